"""`clap-zero bench objective`: what it measures, at sizes that take seconds, and the whole promise when asked for."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from clap_zero.errors import ConfigError
from clap_zero.objective.bench import add_bench_arguments, bench_from_args, in_fresh_process
from clap_zero.objective.bench_case import CHUNKED, embeddings, opposed_pairs, prepare
from clap_zero.objective.config import ObjectiveConfig
from clap_zero.objective.reference import sigmoid_reference, softmax_reference


def arguments(*tokens: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_bench_arguments(parser)
    return parser.parse_args(tokens)


def test_all_softmax_forms_measure_the_same_thing() -> None:
    losses = [prepare(form, 96, 16)() for form in ("dense", "dense_twice", "chunked")]
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize(("form", "config"), CHUNKED.items())
def test_forms_of_ours_are_what_they_say(form: str, config: ObjectiveConfig) -> None:
    """Soft ones with one caption twice."""
    audio, text = embeddings(24, 16)
    groups = torch.arange(24)
    groups[-1] = 0
    inputs = [audio, text, torch.tensor(1 / 0.07), *([torch.tensor(-10.0)] if config.uses_bias else [])]
    reference = sigmoid_reference if config.uses_bias else softmax_reference
    assert prepare(form, 24, 16)().item() == pytest.approx(reference(*inputs, groups, config=config).item(), rel=1e-5)


def test_one_rank_has_its_part_of_the_whole() -> None:
    """The last 24 of 96 pairs against all of them."""
    parts = [embeddings(24, 16, seed=seed) for seed in (0, 1, 2, 0)]  # its own are of seed 0, as its first peer's are
    audio, text = (torch.cat(side) for side in zip(*parts, strict=True))
    labels = torch.arange(72, 96)
    pairs = ((audio, text), (text, audio))
    expected = sum(F.cross_entropy(rows[72:] @ columns.t() / 0.07, labels) for rows, columns in pairs) / 2
    assert prepare("rank", 96, 16, 4)().item() == pytest.approx(expected.item(), rel=1e-5)


def test_opposite_directions_at_scale_100() -> None:
    errors = opposed_pairs(256, 64)
    assert errors["chunked"] < max(1e-5, 3 * errors["dense"])
    assert errors["chunked_loss"] < 1e-5
    assert errors["fixed_shift"] == math.inf


def test_memory_in_fresh_processes() -> None:
    """At 3,072 pairs already; the promise is for 16,384."""
    dense, chunked = (in_fresh_process(form, 3072, 32, 1, 1) for form in ("dense", "chunked"))
    assert dense.extra_bytes > 4 * 3072**2 * 3
    assert chunked.extra_bytes < dense.extra_bytes / 5
    assert chunked.loss == pytest.approx(dense.loss, rel=1e-5)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--sizes", "12,many"], "--sizes 12,many: must be whole numbers"),
        (["--rounds", "0"], "must be at least 1"),
        (["--rank-of", "16", "--rank-pairs", "100"], "must be a multiple of --rank-of 16"),
        (["--rank-of", "-2"], "both above 0"),
        (["--rank-pairs", "0"], "both above 0"),
        (["--threads", "-1"], "--threads -1: 0 .all cores. to"),
        (["--json", "/nowhere/x.json"], "--json /nowhere/x.json: there is no directory /nowhere"),
        (["--json", "/"], "--json /: this is a directory"),
    ],
)
def test_numbers_that_make_no_sense(tokens: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench_from_args(arguments(*tokens))


def test_what_does_not_fit_into_memory_is_said_in_one_line() -> None:
    with pytest.raises(ConfigError, match="dense of 64 pairs of width 100000000000 does not fit"):
        in_fresh_process("dense", 64, 10**11, 1, 1)


@pytest.mark.long
def test_the_promise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """16,384 pairs of width 512: 1/15 of the dense memory, 0.75 of its time; one rank of 16 at 65,536 in 2 GB."""
    file = tmp_path / "figures.json"
    bench_from_args(arguments("--sizes", "16384", "--rounds", "1", "--threads", "1", "--json", str(file)))
    figures = json.loads(file.read_text())
    dense, chunked = (figures["table"]["16384"][form] for form in ("dense", "chunked"))
    assert chunked["extra_bytes"] < dense["extra_bytes"] / 15
    # Processor time: what other programs do on the machine is not part of it.
    assert chunked["cpu_s"] < 0.75 * dense["cpu_s"]
    assert figures["rank"]["peak_bytes"] < 2e9
    assert "one rank of 16, 65536 pairs" in capsys.readouterr().out
