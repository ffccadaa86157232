"""What `--force` may change of a run, and what is left of one that it cannot continue."""

from __future__ import annotations

from pathlib import Path

from clap_zero.errors import CheckpointError, ConfigError
from clap_zero.testing import run_distributed
from tests.distributed.test_stages_agree import flags, losses, train
from tests.unit.data.shard_files import write_split


def start(argv: list[str]) -> str:
    """One start of a run; its error in words."""
    try:
        train(argv)
    except (ConfigError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_start_that_the_checkpoint_does_not_fit_leaves_the_record_of_the_run(tmp_path: Path) -> None:
    shards, run_dir = write_split(tmp_path / "data" / "train", [8]), tmp_path / "run"

    def started(*more: str, steps: int) -> str:
        given = flags(shards, run_dir, preset="tiny", stage=2, micro=4, **{"train.max_steps": steps})
        return run_distributed(start, 1, [*given, "--data.workers", "0", *more], timeout_s=200)[0]

    assert started(steps=1) == ""
    records = {name: (run_dir / name).read_bytes() for name in ("config.yaml", "ds_config.json", "data.json")}
    sigmoid = ("--objective.loss", "sigmoid")
    assert "so --force cannot help" in started(*sigmoid, steps=2)
    forced = started(*sigmoid, "--force", steps=2)
    assert forced.startswith("CheckpointError") and "bias of the sigmoid objective" in forced
    assert {name: (run_dir / name).read_bytes() for name in records} == records
    assert "or --force to continue this one with the changes" in started(steps=2)
    assert started("--force", steps=2) == ""
    assert len(losses(run_dir)) == 2
    assert (run_dir / "config.yaml").read_bytes() != records["config.yaml"]
