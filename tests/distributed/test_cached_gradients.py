"""N ranks x M micro batches under DeepSpeed against one process with the whole global batch and one slow loss."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from clap_zero.model.clap import Parts
from clap_zero.objective.config import ObjectiveConfig
from clap_zero.testing import run_distributed
from tests.distributed import zero_cases as zc
from tests.distributed.cached_cases import Case, Outcome, on_a_rank
from tests.distributed.cached_reference import (
    NOTHING_RESIDENT,
    PROMISE,
    check,
    check_statistics,
    difference,
    of_stage,
    reference,
    worst_gradient,
)

SIGMOID = ObjectiveConfig(loss="sigmoid", positives="soft")
SOFT = ObjectiveConfig(positives="soft", label_smoothing=0.1)


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_times_three_micro_batches(stage: int, weights: dict[bool, Path]) -> None:
    check(of_stage(Case(weights[True], accumulation=3, steps=3), stage))


@pytest.mark.parametrize(("stage", "world", "accumulation"), [pytest.param(0, 1, 3, marks=pytest.mark.long), (1, 2, 2)])
def test_without_fusion(stage: int, world: int, accumulation: int, weights: dict[bool, Path]) -> None:
    check(Case(weights[False], stage, world, accumulation, fused=False, steps=3))


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_matrix(world: int, accumulation: int, fused: bool, stage: int, weights: dict[bool, Path]) -> None:
    check(of_stage(Case(weights[fused], 0, world, accumulation, fused=fused, steps=3), stage))


def test_sigmoid_with_its_bias(weights: dict[bool, Path]) -> None:
    """And with a decay of the weights, from which the bias and the scales are kept."""
    case = Case(weights[False], 2, fused=False, accumulation=2, config=SIGMOID, weight_decay=0.5)
    (outcome, _) = check(case)
    assert "logit_bias" in outcome.gradients


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("batch_norm", ["sync", "local", "frozen"])
@pytest.mark.parametrize("config", [SIGMOID, SOFT, ObjectiveConfig(positives="mask", hard_negative_beta=0.5)])
def test_every_variant(config: ObjectiveConfig, batch_norm: str, stage: int, weights: dict[bool, Path]) -> None:
    check(of_stage(Case(weights[True], batch_norm=batch_norm, config=config), stage))


HEADS = {"audio_transform.sequential.0.weight", "text_transform.sequential.3.bias", "logit_scale_t"}


@pytest.mark.parametrize("stage", [3, *(pytest.param(s, marks=pytest.mark.long) for s in (0, 1, 2))])
def test_laions_heads_with_both_scales(stage: int, with_heads: dict[bool, Path]) -> None:
    case = of_stage(Case(with_heads[False], fused=False, accumulation=2, config=SOFT), stage)
    for outcome in check(case):
        assert all(outcome.gradients[name].abs().max() > 1e-6 for name in HEADS)


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("negatives", ["global", "micro", "local"])
@pytest.mark.parametrize(("world", "accumulation"), [(1, 3), (2, 1), (2, 3), (4, 2)])
def test_laions_heads_in_the_matrix(
    world: int, accumulation: int, negatives: str, stage: int, with_heads: dict[bool, Path]
) -> None:
    check(of_stage(Case(with_heads[True], 0, world, accumulation, negatives=negatives, steps=3), stage))


@pytest.mark.long
@pytest.mark.parametrize(
    "config", [ObjectiveConfig(positives="off"), ObjectiveConfig(positives="mask", hard_negative_beta=0.5)]
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_laions_heads_in_variants(config: ObjectiveConfig, checkpointing: bool, with_heads: dict[bool, Path]) -> None:
    check(Case(with_heads[True], 2, config=config, checkpointing=checkpointing, steps=3))


@pytest.mark.long
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_planted_factor_is_found_with_laions_heads(factor: float, with_heads: dict[bool, Path]) -> None:
    case = Case(with_heads[False], 2, fused=False, accumulation=2)
    worst, _ = worst_gradient(run_distributed(on_a_rank, 2, replace(case, factor=factor))[0], reference(case))
    assert worst > 0.4


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_laions_heads_in_half_precision(precision: str, with_heads: dict[bool, Path]) -> None:
    case = Case(with_heads[True], 2, accumulation=2, precision=precision)
    outcomes, expected = run_distributed(on_a_rank, 2, case), reference(case)
    assert sum(o.losses[0] for o in outcomes) / 2 == pytest.approx(expected.losses[0], rel=2e-2)
    cosine, longer = difference(outcomes[0], expected)
    assert cosine > 0.99 and longer == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("batch_norm", ["local", "frozen"])
def test_other_policies_of_batch_norm(batch_norm: str, weights: dict[bool, Path]) -> None:
    check(Case(weights[True], 2, accumulation=2, batch_norm=batch_norm))


@pytest.mark.parametrize(
    "factor",
    [0.5, pytest.param(2.0, marks=pytest.mark.long), pytest.param(1 / 3, marks=pytest.mark.long)],
    ids=["1/world", "2", "1/accumulation"],
)
def test_a_planted_factor_is_found(factor: float, weights: dict[bool, Path]) -> None:
    """The test of the test."""
    case = Case(weights[False], 2, fused=False, accumulation=3)
    worst, _ = worst_gradient(run_distributed(on_a_rank, 2, replace(case, factor=factor))[0], reference(case))
    assert worst > 0.4


@pytest.mark.parametrize("stage", [2, *(pytest.param(s, marks=pytest.mark.long) for s in (0, 1, 3))])
def test_clipping_acts_once_on_the_whole_gradient(stage: int, weights: dict[bool, Path]) -> None:
    case = Case(weights[False], fused=False, accumulation=2, steps=3, clipping=0.05)
    (outcome, _) = check(of_stage(case, stage))
    assert min(norm or 0.0 for norm in outcome.norms) > 10 * case.clipping


@pytest.mark.parametrize("checkpointing", [False, True])
def test_both_passes_draw_the_same_dropout(checkpointing: bool, weights: dict[bool, Path]) -> None:
    case = Case(weights[True], 2, accumulation=2, dropout=0.1, steps=2, checkpointing=checkpointing)
    for outcome in run_distributed(on_a_rank, 2, case):
        first, again, *second_step = outcome.embeds[:2], outcome.embeds[2:4], *outcome.embeds[4:]
        for one, other in (*zip(first, again, strict=True), *zip(second_step[:2], second_step[2:], strict=True)):
            assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
        assert not torch.equal(first[0][0], first[1][0]) and not torch.equal(first[0][0], second_step[0][0])


def test_activation_checkpointing_recomputes_the_same(weights: dict[bool, Path]) -> None:
    case = Case(weights[True], 2, accumulation=2, dropout=0.1)
    plain, *_ = run_distributed(on_a_rank, 2, case)
    recomputed, *_ = run_distributed(on_a_rank, 2, replace(case, checkpointing=True))
    assert worst_gradient(recomputed, plain)[0] <= PROMISE
    for name, value in plain.statistics.items():
        torch.testing.assert_close(recomputed.statistics[name], value, rtol=1e-6, atol=1e-6)
    # Dropout comes after every BatchNorm: one process without it forwards the same micro batches once.
    expected = reference(replace(case, dropout=0.0))
    check_statistics(case, [plain], expected, limit=3e-5)


OFFLOAD = {
    2: {"offload_optimizer": {"device": "cpu"}},
    3: {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}, **NOTHING_RESIDENT},
}


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_offload(stage: int, weights: dict[bool, Path]) -> None:
    check(Case(weights[False], stage, fused=False, accumulation=2, steps=3, zero=OFFLOAD[stage]))


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        (2, "bf16"),
        *(pytest.param(s, p, marks=pytest.mark.long) for s, p in [(0, "bf16"), (3, "bf16"), (2, "fp16"), (3, "fp16")]),
    ],
)
def test_half_precision(stage: int, precision: str, weights: dict[bool, Path]) -> None:
    case = Case(weights[True], stage, accumulation=2, precision=precision)
    outcomes, expected = run_distributed(on_a_rank, 2, case), reference(case)
    assert sum(o.losses[0] for o in outcomes) / 2 == pytest.approx(expected.losses[0], rel=2e-2)
    cosine, longer = difference(outcomes[0], expected)
    assert cosine > 0.99 and longer == pytest.approx(1, abs=0.05)
    check_statistics(case, outcomes, expected, limit=2e-2)


@pytest.mark.parametrize(("world", "fused"), [(1, False), pytest.param(2, True, marks=pytest.mark.long)])
def test_an_overflow_skips_the_step_once(world: int, fused: bool, weights: dict[bool, Path]) -> None:
    """A loss scale of 2^26 overflows fp16 gradients: one skipped step and one halving for each global batch."""
    case = Case(weights[fused], 2, world, 2, fused=fused, precision="fp16", scale_power=26, steps=2)
    stored = load_file(weights[fused] / "model.safetensors")
    for outcome in run_distributed(on_a_rank, world, case):
        assert outcome.updated == [False, False]
        assert outcome.loss_scales == [2.0**25, 2.0**24]
        assert outcome.counted == 2, "DeepSpeed counts steps that it skips"
        for name, value in outcome.parameters.items():
            assert torch.equal(value, stored[name].half().float().reshape(value.shape)), name
        for name, value in outcome.statistics.items():
            assert value.isfinite().all(), name
            if "num_batches" in name and not fused:
                assert value == stored[name] + case.steps * case.accumulation, name


@cache
def t03(weights: Path, local: int, accumulation: int, negatives: str) -> Outcome:
    case = Case(weights, 2, 1, accumulation, local=local, batch_norm="frozen", negatives=negatives, fused=False)
    return run_distributed(on_a_rank, 1, case)[0]


def test_t03_accumulation_does_not_change_the_gradient(weights: dict[bool, Path]) -> None:
    """The same 32 pairs as 32 x 1 and as 8 x 4."""
    whole, cached = (t03(weights[False], *shape, "global") for shape in ((32, 1), (8, 4)))
    cosine, longer = difference(cached, whole)
    assert cosine > 0.999999 and longer == pytest.approx(1, abs=1e-5)
    assert cached.losses == pytest.approx(whole.losses, rel=1e-6)
    # Naive accumulation: other negatives, but divided by the steps exactly once.
    naive = t03(weights[False], 8, 4, "micro")
    expected = reference(Case(weights[False], 2, 1, 4, local=8, batch_norm="frozen", negatives="micro", fused=False))
    assert worst_gradient(naive, expected)[0] <= PROMISE
    assert difference(naive, whole)[0] < 0.99


@pytest.mark.parametrize("stage", [1, *(pytest.param(s, marks=pytest.mark.long) for s in (0, 2, 3))])
@pytest.mark.parametrize("negatives", ["global", "local"])
def test_t04_two_ranks_of_eight_equal_one_process_of_sixteen(
    negatives: str, stage: int, weights: dict[bool, Path]
) -> None:
    check(of_stage(Case(weights[False], 0, 2, 1, local=8, negatives=negatives, fused=False), stage))


@pytest.mark.parametrize("heads", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("precision", ["fp32", *(pytest.param(p, marks=pytest.mark.long) for p in ("bf16", "fp16"))])
def test_t05_a_scale_that_ran_away(
    precision: str, heads: bool, with_heads: dict[bool, Path], weights: dict[bool, Path], tmp_path: Path
) -> None:
    """Weights whose raw scales are 100, exp of which no format holds."""
    start = with_heads[False] if heads else weights[False]
    model = zc.build({}, fused=False, weights=start, parts=Parts(mlp="auto"))
    with torch.no_grad():
        model.logit_scale_a.fill_(100.0)
        model.logit_scale_t.fill_(100.0)
    case = Case(zc.save_weights(model, tmp_path), 2, accumulation=2, fused=False, precision=precision, steps=2)
    for outcome in run_distributed(on_a_rank, 2, case):
        assert all(0 <= loss < 1e4 for loss in outcome.losses)
        assert len(outcome.scales) == 2 * (1 + heads) and outcome.scales[0] == pytest.approx(100, rel=0.02)
        assert all(1 <= scale <= 100 for scale in outcome.scales)
        assert all(torch.isfinite(value).all() for value in outcome.parameters.values())
