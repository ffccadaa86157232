"""Which checkpoint a start takes, and an error of rank 0 on all ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clap_zero.checkpoint.files import checksum_file
from clap_zero.checkpoint.store import CheckpointStore
from clap_zero.config.data import DataSetSection
from clap_zero.config.load import parse_command_line
from clap_zero.config.schema import RunConfig
from clap_zero.data.index import load_index
from clap_zero.data.overlap import shards_in_both
from clap_zero.distributed.world import init_distributed
from clap_zero.errors import CheckpointError, ConfigError, DataError, LaunchError
from clap_zero.testing import run_distributed
from clap_zero.training.prepare import _checkpoint_to_load, on_main
from clap_zero.training.story import told_data, told_idle, told_overlap
from tests.unit.data.shard_files import write_split


def write(store: CheckpointStore, step: int) -> Path:
    temporary = store.begin(step)
    (temporary / "file").write_text("x")
    return store.commit(temporary, step, {"file": checksum_file(temporary / "file")})


def config(resume: str) -> RunConfig:
    return parse_command_line(["--ds_config", "zero2.json", "--resume", resume]).run


def test_auto_takes_the_newest_and_none_at_first(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert _checkpoint_to_load(config("auto"), store) is None
    newest = [write(store, step) for step in (1, 2)][-1]
    assert _checkpoint_to_load(config("auto"), store) == newest


def test_a_named_checkpoint_starts_a_new_run_and_must_be_there(tmp_path: Path, capsys) -> None:
    other = write(CheckpointStore(tmp_path / "other" / "checkpoints"), 5)
    own = CheckpointStore(tmp_path / "own" / "checkpoints")
    assert _checkpoint_to_load(config(str(other)), own) == other
    newest = write(own, 6)
    assert _checkpoint_to_load(config(str(other)), own) == newest
    assert "goes on from its own step-00000006" in capsys.readouterr().out
    with pytest.raises(CheckpointError):
        _checkpoint_to_load(config(str(tmp_path / "nowhere")), own)


def test_going_back_within_a_run_is_refused_and_not_ignored(tmp_path: Path) -> None:
    own = CheckpointStore(tmp_path / "checkpoints")
    older, _ = write(own, 1), write(own, 2)
    with pytest.raises(ConfigError, match="gone on to step-00000002"):
        _checkpoint_to_load(config(str(older)), own)


def test_the_data_are_told_set_by_set(tmp_path: Path) -> None:
    places = [str(write_split(tmp_path / name / "train", [8])) for name in "ab"]
    one = load_index(places[:1])
    assert told_data(one, None) == ["data: 8 training pairs an epoch in 1 shards, 0 held out"]
    mixed = load_index([places[0], DataSetSection(shards=(places[1],), weight=0.5, name="half")])
    assert told_data(mixed, one) == [
        "data: 12 training pairs an epoch in 2 shards, 8 held out",
        "data set a/train: 8 pairs x weight 1 = 8, 66.7% of an epoch",
        "data set half: 8 pairs x weight 0.5 = 4, 33.3% of an epoch",
    ]


def test_shards_that_are_trained_on_and_held_out_are_told(tmp_path: Path) -> None:
    places = [str(write_split(tmp_path / name / "train", [8, 8])) for name in "ab"]
    train, val = load_index(places), load_index([f"{places[1]}/1.tar"])
    assert shards_in_both(train, val) == [f"{places[1]}/1.tar"]
    assert shards_in_both(load_index(places[:1]), val) == [] == told_overlap([])
    assert "1 shards stand in data.train and in data.val" in told_overlap(shards_in_both(train, val))[0]


def fail(kind: str) -> str:
    """What a rank gets when rank 0 fails in its part."""
    world = init_distributed()

    def action() -> None:
        if kind == "data":
            raise DataError("no shards")
        if kind == "unforeseen":
            raise MemoryError("no room")
        raise OSError(28, "No space left on device", "runs/x")

    try:
        on_main(world, action)
    except (DataError, LaunchError) as error:
        return json.dumps([type(error).__name__, str(error), error.reported_elsewhere])
    except MemoryError as error:
        return json.dumps(["MemoryError", str(error)])
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "name", "text"), [("data", "DataError", "no shards"), ("disk", "LaunchError", "runs/x")]
)
def test_an_error_of_rank_0_is_every_ranks_and_said_once(kind: str, name: str, text: str) -> None:
    first, second = (json.loads(result) for result in run_distributed(fail, 2, kind))
    assert first[0] == second[0] == name
    assert text in first[1] and text in second[1]
    assert (first[2], second[2]) == (False, True)


def test_what_nobody_foresaw_on_rank_0_ends_the_others_at_once() -> None:
    first, second = (json.loads(result) for result in run_distributed(fail, 2, "unforeseen"))
    assert first == ["MemoryError", "no room"]
    assert second == ["LaunchError", "rank 0 failed unexpectedly: MemoryError: no room", True]


def test_one_rank_beside_idle_gpus_is_told() -> None:
    assert told_idle(1, 1) == told_idle(1, 0) == told_idle(8, 8) == told_idle(2, 8) == []
    (line,) = told_idle(1, 8)
    assert line.startswith("warning: one rank, on one of 8 GPUs: `deepspeed --num_gpus 8 -m clap_zero.train")
