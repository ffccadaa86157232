"""A run that goes on with other ranks and at another ZeRO stage is the run that it would have been."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from clap_zero.config.load import parse_command_line
from clap_zero.distributed.world import init_distributed
from clap_zero.testing import run_distributed
from clap_zero.training.prepare import prepare
from clap_zero.training.run_directory import read_jsonl
from clap_zero.training.setup import build
from tests.distributed.test_stages_agree import flags, losses
from tests.unit.data.shard_files import write_split

NUM_STEPS, BATCH, NUM_PAIRS = 7, 8, 35
"""Four steps an epoch; three pairs of each are left over."""


def train_until(argv: list[str], step: int) -> None:
    """A rank of a run that a signal stops after a step, with a checkpoint."""
    world = init_distributed()
    prepared = prepare(parse_command_line(argv), world=world)
    assert prepared is not None
    settled, lock = prepared
    trainer = build(settled, world=world, stop_requested=lambda: "SIGTERM" if trainer.state.step >= step else None)
    try:
        trainer.fit()
    finally:
        trainer.close()
        lock.release()


def keys_of_steps(folder: Path) -> dict[int, list[str]]:
    """Keys of all ranks by step; those of the last attempt count."""
    lines = [line for path in sorted(folder.glob("rank*.jsonl")) for line in read_jsonl(path)]
    last = {step: max(line["attempt"] for line in lines if line["step"] == step) for step in {x["step"] for x in lines}}
    found: dict[int, list[str]] = {step: [] for step in sorted(last)}
    for line in lines:
        if line["attempt"] == last[line["step"]]:
            found[line["step"]] += line["keys"]
    return found


CHAINS = {
    "2 at 2, 1 at 3": [(2, 2, 2), (1, 3, NUM_STEPS)],
    "2 at 2, 4 at 3, 1 at 1": [(2, 2, 2), (4, 3, 5), (1, 1, NUM_STEPS)],
    "1 at 0, 2 at 3": [(1, 0, 3), (2, 3, NUM_STEPS)],
    "4 at 3, 2 at 0, 4 at 2": [(4, 3, 1), (2, 0, 6), (4, 2, NUM_STEPS)],
}
"""(ranks, stage, last step) of each start."""


@pytest.mark.parametrize(
    ("chain", "batch_norm"),
    [
        ("2 at 2, 1 at 3", "sync"),
        *(pytest.param(chain, "local", marks=pytest.mark.long) for chain in CHAINS),
        pytest.param("2 at 2, 4 at 3, 1 at 1", "sync", marks=pytest.mark.long),
    ],
)
def test_a_run_on_other_ranks_and_at_other_stages(tmp_path: Path, chain: str, batch_norm: str) -> None:
    """With BatchNorm over a rank its micro batch stays; with BatchNorm over all, what they have together does."""
    shards = write_split(tmp_path / "data" / "train", [20, 15])

    def start(name: str, world: int, stage: int, until: int) -> None:
        more = {
            "train.global_batch_size": BATCH,
            "train.max_steps": NUM_STEPS,
            "data.log_keys": tmp_path / name / "keys",
            "data.workers": 0,
            "model.batch_norm": batch_norm,
            "train.micro_batch_size": "auto" if batch_norm == "sync" else 2,
        }
        words = flags(shards, tmp_path / name, preset="tiny", stage=stage, micro=2, **more)
        run_distributed(train_until, world, words, until, timeout_s=200)

    start("unbroken", 2, 2, NUM_STEPS)
    for part in CHAINS[chain]:
        start("moved", *part)
    wanted, got = (keys_of_steps(tmp_path / name / "keys") for name in ("unbroken", "moved"))
    assert list(got) == list(wanted) == list(range(1, NUM_STEPS + 1))
    assert {step: sorted(keys) for step, keys in got.items()} == {step: sorted(keys) for step, keys in wanted.items()}
    first_epoch = Counter(key for step in range(1, 5) for key in got[step])
    assert len(first_epoch) == 32 and set(first_epoch.values()) == {1}
    expected = losses(tmp_path / "unbroken")
    assert losses(tmp_path / "moved") == pytest.approx(expected, rel=1e-5)
    assert max(expected) - min(expected) > 0.05, "the run must move, or the comparison says nothing"
    world, stage, _ = CHAINS[chain][-1]
    recorded = json.loads((tmp_path / "moved" / "ds_config.json").read_text())
    micro, accumulation = recorded["train_micro_batch_size_per_gpu"], recorded["gradient_accumulation_steps"]
    assert (micro, accumulation) == ((BATCH // world, 1) if batch_norm == "sync" else (2, 4 // world))
    assert recorded["train_batch_size"] == BATCH and recorded["zero_optimization"]["stage"] == stage
