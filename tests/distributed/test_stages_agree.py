"""The same run at every ZeRO stage, on one process or two, and with the batch in one or several micro batches.

The same losses, from the command line to the metrics; and they are those of the objective that was asked for.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

from clap_zero.config.load import parse_command_line
from clap_zero.data.pack import PackOptions, pack
from clap_zero.distributed.world import init_distributed
from clap_zero.model.clap import ContrastOutput
from clap_zero.objective.config import ObjectiveConfig
from clap_zero.objective.reference import sigmoid_reference, softmax_reference
from clap_zero.testing import run_distributed
from clap_zero.training.passes import Forward, Inputs
from clap_zero.training.prepare import prepare
from clap_zero.training.run_directory import read_jsonl
from clap_zero.training.setup import build

NUM_STEPS = 10
SECONDS = (0.5, 3, 9.99, 12, 30, 2, 15, 4)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """32 pairs in 3 tars, three of eight longer than the model's 10 s."""
    folder = tmp_path_factory.mktemp("clips")
    rng = np.random.default_rng(0)
    for number in range(32):
        time = np.arange(int(48_000 * SECONDS[number % 8])) / 48_000
        wave = 0.3 * np.sin(2 * np.pi * (100 + 37 * number) * time) + 0.05 * rng.standard_normal(time.size)
        soundfile.write(folder / f"{number:02d}.flac", wave, 48_000)
        (folder / f"{number:02d}.txt").write_text(f"a tone of {100 + 37 * number} hertz in noise")
    out = tmp_path_factory.mktemp("packed")
    pack(PackOptions(out=out, folder=folder, shard_size=12, workers=1, progress=False))
    return out / "train"


Embedded = tuple[Tensor, Tensor, Tensor, Tensor]


def train(argv: list[str]) -> list[Embedded]:
    """What `clap_zero.train` does on a rank, without its own process around it.

    Returns:
        Clips, captions, logit scale and groups of every forward of a training step.
    """
    world = init_distributed()
    prepared = prepare(parse_command_line(argv), world=world)
    assert prepared is not None
    settled, lock = prepared
    trainer = build(settled, world=world, stop_requested=lambda: None)
    seen: list[Embedded] = []
    embed = Forward.embed

    def remembered(self: Forward, inputs: Inputs, **place: int) -> ContrastOutput:
        output = embed(self, inputs, **place)
        assert output.audio_embeds is not None and output.text_embeds is not None
        of_pairs = output.audio_embeds, output.text_embeds, output.logit_scale
        seen.append((*(t.detach().clone() for t in of_pairs), inputs.groups))
        return output

    try:
        with mock.patch.object(Forward, "embed", remembered):
            trainer.fit()
    finally:
        trainer.close()
        lock.release()
    return seen


def flags(shards: Path, run_dir: Path, *, preset: str, stage: int, micro: int, **more: object) -> list[str]:
    root = Path(__file__).resolve().parents[2]
    words = {
        "ds_config": root / "ds_configs" / "zero2.json",
        "ds.bf16": "null",
        "ds.zero_optimization.stage": stage,
        "run_dir": run_dir,
        "data.train": shards,
        "model.preset": preset,
        "model.dropout": 0,
        "train.micro_batch_size": micro,
        "train.max_steps": NUM_STEPS,
        "train.warmup_steps": 2,
        "train.learning_rate": 1e-3,
        "ds.optimizer.params.eps": 1e-4,
        "checkpoint.every_steps": 1000,
        "wandb.mode": "disabled",
    } | more
    return [word for key, value in words.items() for word in (f"--{key}", str(value))]


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in read_jsonl(run_dir / "metrics.jsonl") if "loss" in line]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, shards: Path):
    """Losses of a run; each combination is run once."""

    @functools.cache
    def losses_of(preset: str, batch_norm: str, world_size: int, stage: int, persistence: int | None) -> list[float]:
        run_dir = tmp_path_factory.mktemp("run")
        more: dict[str, object] = {"model.batch_norm": batch_norm}
        if persistence is not None:
            more["ds.zero_optimization.stage3_param_persistence_threshold"] = persistence
        words = flags(shards, run_dir, preset=preset, stage=stage, micro=8 // world_size, **more)
        run_distributed(train, world_size, words, timeout_s=300)
        return losses(run_dir)

    return losses_of


CASES = [
    *[("tiny-fused", "sync", 2, stage, None) for stage in (0, 1, 2, 3)],
    ("tiny-fused", "sync", 2, 3, 0),
    *[
        pytest.param("tiny-fused", "frozen", 2, stage, None, marks=pytest.mark.long if stage in (0, 1) else ())
        for stage in (0, 1, 2, 3)
    ],
    *[pytest.param("tiny", "sync", 2, stage, None, marks=pytest.mark.long) for stage in (0, 1, 2, 3)],
    *[pytest.param("tiny", "frozen", 2, stage, None, marks=pytest.mark.long) for stage in (0, 1, 2, 3)],
    pytest.param("tiny-fused", "sync", 4, 2, None, marks=pytest.mark.long),
    pytest.param("tiny-fused", "sync", 4, 3, 0, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("preset", "batch_norm", "world_size", "stage", "persistence"), CASES)
def test_ten_losses_equal_those_of_one_process(
    run, preset: str, batch_norm: str, world_size: int, stage: int, persistence: int | None
) -> None:
    expected = run(preset, batch_norm, 1, 0, None)
    got = run(preset, batch_norm, world_size, stage, persistence)
    assert len(got) == len(expected) == NUM_STEPS
    assert got == pytest.approx(expected, rel=1e-5)
    assert max(expected) - min(expected) > 0.05, "the run must move, or the comparison says nothing"


def test_local_batch_norm_is_another_run(run) -> None:
    """The comparison can fail: two ranks with statistics of their own are not one process."""
    expected = run("tiny-fused", "sync", 1, 0, None)
    assert run("tiny-fused", "local", 2, 2, None) != pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def negatives(tmp_path_factory: pytest.TempPathFactory, shards: Path):
    """Losses of four steps of 8 pairs: of (negatives, ranks, micro batches)."""

    @functools.cache
    def losses_of(kind: str, world_size: int, accumulation: int) -> list[float]:
        run_dir = tmp_path_factory.mktemp("run")
        more = {"model.batch_norm": "frozen", "objective.negatives": kind, "train.max_steps": 4}
        more["train.global_batch_size"] = 8
        micro = 8 // world_size // accumulation
        run_distributed(train, world_size, flags(shards, run_dir, preset="tiny", stage=2, micro=micro, **more))
        return losses(run_dir)

    return losses_of


def test_micro_batches_do_not_change_the_negatives(negatives) -> None:
    """The path that a run takes, and not only its parts: 8 x 1 pairs and 2 x 4 are one run, on two ranks, too."""
    whole = negatives("global", 1, 1)
    assert len(whole) == 4
    assert negatives("global", 1, 4) == pytest.approx(whole, rel=1e-5)
    assert negatives("global", 2, 2) == pytest.approx(whole, rel=1e-5)


def test_fewer_negatives_are_other_runs(negatives) -> None:
    """Chance is ln 8 over all pairs, ln 4 over those of a micro batch, ln 2 over those of a rank."""
    first = [negatives(kind, 2, 2)[0] for kind in ("global", "micro", "local")]
    for loss, candidates in zip(first, (8, 4, 2), strict=True):
        assert loss == pytest.approx(math.log(candidates), abs=0.3)


@pytest.mark.parametrize("variant", ["label_smoothing 0.2", pytest.param("loss sigmoid", marks=pytest.mark.long)])
def test_the_variant_that_was_asked_for_is_minimised(variant: str, shards: Path, tmp_path: Path) -> None:
    """The first loss on record is that of the slow reference on what the run embedded."""
    name, value = variant.split()
    more = {"train.max_steps": 1, "train.global_batch_size": 8, f"objective.{name}": value}
    ranks = run_distributed(train, 2, flags(shards, tmp_path / "run", preset="tiny", stage=2, micro=2, **more))
    seen = [embedded for rank in ranks for embedded in rank[:2]]
    audio, text, scales, groups = (torch.stack(column) for column in zip(*seen, strict=True))
    given = audio.flatten(0, 1).double(), text.flatten(0, 1).double(), scales[0].double()
    if name == "loss":
        config = ObjectiveConfig(loss="sigmoid", positives="soft")
        expected = sigmoid_reference(*given, torch.tensor(-10.0), groups.flatten(), config=config)
    else:
        config = ObjectiveConfig(label_smoothing=0.2, positives="soft")
        expected = softmax_reference(*given, groups.flatten(), config=config)
    assert losses(tmp_path / "run") == [pytest.approx(expected.item(), rel=1e-5)]
