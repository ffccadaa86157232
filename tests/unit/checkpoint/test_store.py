"""A directory of checkpoints after every way to die: the newest complete one is found, bad ones are named."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest

from clap_zero.checkpoint.files import ChecksummedFile, FileRecord
from clap_zero.checkpoint.store import CheckpointStore, find_fault
from clap_zero.errors import CheckpointError


def write(store: CheckpointStore, step: int, text: str = "some weights") -> Path:
    temporary = store.begin(step)
    records = {}
    for name in ("engine/rank0.pt", "engine/rank1.pt", "model.safetensors"):
        (temporary / name).parent.mkdir(exist_ok=True)
        with ChecksummedFile(temporary / name) as file:
            file.write(f"{text} of {name} at {step}".encode())
        records[name] = file.record
    return store.commit(temporary, step, records, about={"world_size": 2})


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    write(store, 100)
    write(store, 200)
    return store


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.root.iterdir())


def reasons(store: CheckpointStore) -> str:
    return "\n".join(map(str, store.rejected))


def test_a_checkpoint_is_complete_and_named_by_latest(store: CheckpointStore) -> None:
    assert names(store) == ["latest", "step-00000100", "step-00000200"]
    assert store.newest_complete() == store.root / "step-00000200" and not store.rejected
    assert (store.root / "latest").read_text() == "step-00000200\n"
    manifest = json.loads((store.root / "step-00000200" / "manifest.json").read_text())
    assert (manifest["step"], manifest["world_size"], len(manifest["files"])) == (200, 2, 3)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def _flip(path: Path) -> None:
    path.write_bytes(path.read_bytes()[::-1])


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda p: (p / "model.safetensors").write_bytes(b""), "model.safetensors has 0 bytes instead of"),
        (lambda p: _cut(p / "model.safetensors"), "bytes instead of"),
        (lambda p: (p / "engine" / "rank1.pt").unlink(), "engine/rank1.pt is missing"),
        (lambda p: _flip(p / "engine" / "rank0.pt"), "another checksum"),
        (lambda p: (p / "manifest.json").unlink(), "no manifest.json, so the save was not finished"),
        (lambda p: (p / "manifest.json").write_bytes(b""), "cannot be read"),
        (lambda p: _cut(p / "manifest.json"), "cannot be read"),
        (lambda p: (p / "manifest.json").write_text("[]"), "not a manifest"),
    ],
)
def test_the_newest_complete_one_is_used_and_the_bad_one_named(store: CheckpointStore, damage, reason: str) -> None:
    bad = store.root / "step-00000200"
    damage(bad)
    assert store.newest_complete() == store.root / "step-00000100"
    assert str(bad) in reasons(store) and reason in reasons(store)
    assert store.resolve("auto") == store.resolve("latest") == store.root / "step-00000100"
    with pytest.raises(CheckpointError, match="cannot be used"):
        store.resolve(200)


def test_latest_missing_or_naming_what_is_gone_does_not_matter(store: CheckpointStore) -> None:
    (store.root / "latest").unlink()
    assert store.newest_complete() == store.root / "step-00000200"
    assert "latest: is missing" in reasons(store)
    (store.root / "latest").write_text("step-00000300\n")
    assert store.newest_complete() == store.root / "step-00000200"
    assert "names step-00000300, which is not there" in reasons(store)
    (store.root / "latest").write_bytes(b"\xff\xfe")
    assert store.newest_complete() == store.root / "step-00000200"


def test_nothing_there_is_none_for_auto_and_an_error_for_the_rest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.newest_complete() is None and store.resolve("auto") is None
    for which in ("latest", "best", 5, tmp_path / "nothing"):
        with pytest.raises(CheckpointError):
            store.resolve(which)


def test_resolve_by_step_and_path(store: CheckpointStore) -> None:
    first, second = store.root / "step-00000100", store.root / "step-00000200"
    assert store.resolve(100) == store.resolve("100") == store.resolve(first) == store.resolve(str(first)) == first
    assert store.resolve(store.root) == store.resolve(store.root.parent) == second
    with pytest.raises(CheckpointError, match="it has steps 100, 200"):
        store.resolve(150)


def test_an_unfinished_save_is_no_checkpoint_and_goes_at_the_next_save(store: CheckpointStore) -> None:
    temporary = store.begin(300)
    (temporary / "model.safetensors").write_text("half")
    assert store.newest_complete() == store.root / "step-00000200"
    assert "an unfinished save" in reasons(store)
    write(store, 300)
    assert names(store) == ["latest", "step-00000100", "step-00000200", "step-00000300"]
    assert store.newest_complete() == store.root / "step-00000300" and not store.rejected


def test_saving_a_step_again_replaces_it(store: CheckpointStore) -> None:
    path = write(store, 200, "better weights")
    assert (path / "model.safetensors").read_text().startswith("better")
    assert names(store) == ["latest", "step-00000100", "step-00000200"]


class Death(BaseException):
    """What a process is when the power goes: nothing after it happens."""


def test_death_between_the_renames_of_an_exchange(store: CheckpointStore, monkeypatch) -> None:
    original, calls = Path.rename, []

    def rename(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) > 1:
            raise Death
        return original(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(Death):
        write(store, 200, "better weights")
    monkeypatch.setattr(Path, "rename", original)
    found = store.newest_complete()
    assert found is not None
    text = (found / "model.safetensors").read_text()
    assert text.startswith("some weights") and text.endswith("at 200")
    write(store, 300)
    assert names(store) == ["latest", "step-00000100", "step-00000200", "step-00000300"]
    assert find_fault(store.root / "step-00000200") is None


def test_what_cannot_be_removed_does_not_end_the_run(store: CheckpointStore, monkeypatch, caplog) -> None:
    """As on a network file system, where a file that somebody reads cannot go: again and again, under any name."""

    def refuse(path: Path, **_: object) -> None:
        raise OSError(39, "Directory not empty", str(path))

    store.begin(250)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        for text in ("second", "third"):
            write(store, 200, text)
        for step in (300, 400):
            write(store, step)
        assert [path.name for path in store.prune(1)] == ["step-00000300", "step-00000200", "step-00000100"]
        assert store.newest_complete() == store.root / "step-00000400"
        store.abandon(store.begin(500))
    assert "could not be removed: [Errno 39]" in caplog.text
    write(store, 500)
    assert names(store) == ["latest", "step-00000400", "step-00000500"]


def test_death_at_any_call_that_changes_the_disk(tmp_path: Path) -> None:
    """Whenever it dies, there is a complete checkpoint of the old or the new contents, and the next save works."""
    moments = 0
    for moment in itertools.count():
        store = CheckpointStore(tmp_path / str(moment))
        write(store, 100)
        write(store, 200)
        calls = 0

        def dying(original):
            def call(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls > moment:  # noqa: B023
                    raise Death
                return original(*args, **kwargs)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for owner, name in ((os, "fsync"), (shutil, "rmtree")):
                patch.setattr(owner, name, dying(getattr(owner, name)))
            for name in ("rename", "replace", "mkdir", "unlink", "write_bytes"):
                patch.setattr(Path, name, dying(getattr(Path, name)))
            try:
                write(store, 200, "better weights")
            except Death:
                moments += 1
            else:
                break
        found = store.newest_complete()
        assert found is not None
        assert (found / "model.safetensors").read_text().endswith("at 200"), moment
        assert write(store, 300) == store.newest_complete()
        assert names(store) == ["latest", "step-00000100", "step-00000200", "step-00000300"]
    assert moments > 10


def test_a_file_that_rank_0_does_not_see_is_refused(store: CheckpointStore) -> None:
    temporary = store.begin(300)
    with pytest.raises(CheckpointError, match="file system that all nodes share"):
        store.commit(temporary, 300, {"engine/rank1.pt": FileRecord(10, "00000000")})
    store.abandon(temporary)
    assert names(store) == ["latest", "step-00000100", "step-00000200"]


def test_pruning_keeps_the_last_the_best_and_what_latest_names(store: CheckpointStore) -> None:
    store.mark_best(100)
    for step in (300, 400, 500):
        write(store, step)
    assert [path.name for path in store.prune(2)] == ["step-00000300", "step-00000200"]
    assert names(store) == ["best", "latest", "step-00000100", "step-00000400", "step-00000500"]
    assert store.resolve("best") == store.root / "step-00000100"
    assert store.prune(2) == []


def test_pruning_removes_damaged_ones_that_are_older_but_never_the_last_good_one(store: CheckpointStore) -> None:
    write(store, 300)
    (store.root / "step-00000300" / "model.safetensors").unlink()
    (store.root / "step-00000100" / "model.safetensors").unlink()
    store.prune(1)
    assert names(store) == ["latest", "step-00000200", "step-00000300"]
    assert store.newest_complete() == store.root / "step-00000200"


def test_best_must_be_there(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError):
        store.mark_best(999)
    store.mark_best(100)
    shutil.rmtree(store.root / "step-00000100")
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        store.resolve("best")


def test_a_branch_that_went_back_is_newer_than_what_it_left(store: CheckpointStore) -> None:
    """Resumed from step 100 by its path, the run saves step 150; step 200 belongs to the abandoned branch."""
    write(store, 150)
    assert store.newest_complete() == store.root / "step-00000150"
    assert store.prune(1) and names(store) == ["latest", "step-00000150"]


def test_checksums_can_be_shared_between_ranks(store: CheckpointStore) -> None:
    path = store.root / "step-00000200"
    _flip(path / "engine" / "rank1.pt")
    faults = [find_fault(path, share=(rank, 3)) for rank in range(3)]
    assert sum(fault is not None for fault in faults) == 1
    assert find_fault(path, checksums=False) is None
