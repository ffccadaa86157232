"""A rank that ends takes the others with it, though nobody launched them together; one that is to stop stops all."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from clap_zero.checkpoint.store import CheckpointStore
from clap_zero.testing.pool import _free_port, rank_environment
from clap_zero.training.run_directory import read_jsonl

SCRIPT = Path(__file__).with_name("early_rank.py")
ROOT = SCRIPT.parents[2]
FLAGS = (
    *("--ds_config", str(ROOT / "ds_configs" / "zero2.json"), "--ds.bf16", "null", "--train.max_steps", "4"),
    *("--train.micro_batch_size", "2", "--train.global_batch_size", "8", "--data.workers", "0"),
    *("--wandb.mode", "disabled", "--evaluate.every_steps", "1"),
)


@dataclass(frozen=True)
class End:
    """What became of two ranks: exit codes and outputs, and how long the other lived after the planted end."""

    codes: list[int]
    texts: list[str]
    seconds: float


def play(folder: Path, rank: int | str, how: str, place: str, *flags: str) -> End:
    """Start both ranks with the shipped limits and wait for their end."""
    port, processes = _free_port(), []
    for number in (0, 1):
        environment = rank_environment(number, 2, port) | {"ENDED_AT": str(folder / "ended"), "HF_HUB_OFFLINE": "1"}
        words = [sys.executable, str(SCRIPT), str(rank), how, place, *FLAGS, "--run_dir", str(folder / "run"), *flags]
        with (folder / f"log{number}").open("w") as log:
            processes.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
    try:
        for process in processes:
            process.wait(timeout=150)
        seconds = time.time() - float((folder / "ended").read_text())
    finally:
        for process in processes:
            process.kill()
            process.wait()
    texts = [(folder / f"log{number}").read_text() for number in (0, 1)]
    return End([process.returncode for process in processes], texts, seconds)


def test_a_rank_that_cannot_import_torch_is_named_before_the_ranks_have_met(tmp_path: Path) -> None:
    end = play(tmp_path, 1, "raise", "torch")
    assert end.codes == [5, 1], end.texts
    assert end.seconds < 40, "start_timeout_s is 300"
    told = r"rank 1 on \S+ failed in imports: unexpected ImportError in \S+: libcudart.so.13: cannot open shared object"
    assert re.search(rf"clap_zero \[rank 0 on \S+\]: error: {told} file; this run ends\n", end.texts[0]), end.texts[0]
    assert re.search(r"clap_zero \[rank 1 on \S+\]: error: unexpected ImportError in ", end.texts[1]), end.texts[1]


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "place",
    [
        "deepspeed",  # still on the way
        "torch.distributed.rendezvous/rendezvous",  # while the other waits for it
        "clap_zero.distributed.world/_check_everyone_is_here",
        "clap_zero.distributed.hub/open_hub",  # after the meeting, before the watch
    ],
)
def test_a_rank_killed_before_the_watch_begins_is_named(tmp_path: Path, rank: int, place: str) -> None:
    end = play(tmp_path, rank, "kill", place)
    other = 1 - rank
    assert end.codes[rank] == -9 and end.codes[other] == 5, end.texts
    assert end.seconds < 40
    told = rf"rank {rank} on \S+ died in (start|imports|rendezvous) without a word"
    assert re.search(rf"clap_zero \[rank {other} on \S+\]: error: {told}", end.texts[other]), end.texts[other]


@pytest.mark.long
@pytest.mark.parametrize("rank", [1, "all"])
def test_sigterm_during_the_write_of_a_checkpoint(tmp_path: Path, rank: int | str) -> None:
    """The write is finished, one more step is taken and saved, all end with 75, and the run goes on from there."""
    flags = ("--checkpoint.every_steps", "1")
    end = play(tmp_path, rank, "term", "clap_zero.checkpoint.state/save_tensors", *flags)
    assert end.codes == [75, 75], end.texts
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    newest = store.newest_complete()
    assert newest is not None and newest.name == "step-00000002" and not store.rejected
    again = play(tmp_path, 1, "raise", "no_such_module", *flags)
    assert again.codes == [0, 0], again.texts
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [(line["step"], line["attempt"]) for line in lines if "loss" in line] == [(1, 1), (2, 1), (3, 2), (4, 2)]
