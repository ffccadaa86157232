from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.bed import Bed, why_not
from tests.hosts.jobs import ENV_FILE, data_flags


@pytest.fixture(scope="session", autouse=True)
def _possible() -> None:
    """Skip, with the reason, where hosts cannot be made."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags for training on the embedded sounds."""
    return data_flags(tmp_path_factory.mktemp("data"))


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    """Two hosts."""
    with Bed(tmp_path / "bed") as made:
        yield made


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    """The directory that a job is started in, on a disk that all hosts share; also its HOME."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / ".deepspeed_env").write_text(ENV_FILE)
    return folder
