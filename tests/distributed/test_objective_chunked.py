"""The chunked objective over gloo ranks of different content against one process with the whole batch, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clap_zero.distributed.collectives import rank_and_size
from clap_zero.objective import chunked as module
from clap_zero.objective.autograd import contrastive_objective
from clap_zero.objective.config import ObjectiveConfig
from clap_zero.objective.figures import ObjectiveFigures
from clap_zero.objective.mlp import TwoHeads, mlp_objective
from clap_zero.testing import run_distributed
from tests.unit.objective.cases import VARIANTS, Case, chunked, flat, largest_error, make_case, value_and_gradients

LOCAL = 3
GROUPS = (0, 1, 0, 2, 3, 0, 3, 4, 5, 5, 6, 7)
"""Captions are shared within a rank and between ranks."""

Share = tuple[list[Tensor], ObjectiveFigures]


def global_case(world: int) -> Case:
    return make_case(GROUPS[: LOCAL * world], scale=20.0, seed=world)


def part(case: Case, rank: int) -> Case:
    mine = slice(rank * LOCAL, (rank + 1) * LOCAL)
    return case._replace(audio=case.audio[mine], text=case.text[mine], groups=case.groups[mine])


def share(config: ObjectiveConfig, chunk: int | None, gather: bool = True) -> Share:
    """What this rank gives: loss and gradients in the order of `value_and_gradients`, and figures."""
    rank, world = rank_and_size()
    result = chunked(part(global_case(world), rank), config, chunk=chunk, gather=gather)
    return flat(result), result.figures


def averaged(shares: list[list[Tensor]], factor: float = 1.0) -> list[Tensor]:
    """What averaging over ranks makes of the shares: the engine divides every gradient by the number of ranks."""
    world = len(shares)
    loss, audio, text, *numbers = zip(*shares, strict=True)
    rows = [factor * torch.cat(t) / world for t in (audio, text)]
    return [torch.stack(loss).mean(), *rows, *(factor * torch.stack(t).mean() for t in numbers)]


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_equal_one_process(config: ObjectiveConfig, world: int) -> None:
    results = run_distributed(share, world, config, 2) if world > 1 else [share(config, 2)]
    whole = global_case(world)
    reference = value_and_gradients(whole, config)
    ours = averaged([gradients for gradients, _ in results])
    assert largest_error(ours, reference) < 1e-11
    # The test of the test: factors that trainers get wrong do not pass.
    for factor in (2.0, 1 / world if world > 1 else 0.5):
        assert largest_error(averaged([gradients for gradients, _ in results], factor), reference) > 0.4
    one = chunked(whole, config).figures
    for name, figures in zip(ObjectiveFigures._fields, zip(*(f for _, f in results), strict=True), strict=True):
        torch.testing.assert_close(torch.stack(figures).mean(), getattr(one, name), rtol=1e-11, atol=1e-12)


def share_that_exchanges_nothing(config: ObjectiveConfig) -> Share:
    """Embeddings are gathered, but what the columns pull is taken from the rank's own rows."""
    original = module.all_gather

    def only_embeddings(t: Tensor) -> Tensor:
        return t.repeat(rank_and_size()[1], 1) if t.shape[1:] == (8,) else original(t)

    module.all_gather = only_embeddings
    try:
        return share(config, None)
    finally:
        module.all_gather = original


def test_statistics_that_are_not_exchanged_are_found() -> None:
    config = ObjectiveConfig(positives="off")
    results = run_distributed(share_that_exchanges_nothing, 2, config)
    ours, reference = averaged([g for g, _ in results]), value_and_gradients(global_case(2), config)
    assert abs(ours[0] - reference[0]) < 1e-11, "the loss alone does not show it"
    assert largest_error(ours, reference) > 0.01


def test_without_gather_the_negatives_are_local() -> None:
    config = ObjectiveConfig(positives="off")
    results = run_distributed(share, 2, config, None, False)
    for rank, (gradients, _) in enumerate(results):
        assert largest_error(gradients, value_and_gradients(part(global_case(2), rank), config)) < 1e-11


def differentiated(config: ObjectiveConfig) -> list[Tensor]:
    """Through autograd, with a loss scale that is the same on all ranks."""
    rank, world = rank_and_size()
    case = part(global_case(world), rank)
    inputs = [t.clone().requires_grad_() for t in case[: 4 if config.uses_bias else 3]]
    bias = inputs[3] if config.uses_bias else None
    loss, _ = contrastive_objective(*inputs[:3], logit_bias=bias, groups=case.groups, config=config)
    return [loss.detach(), *(g / 1024 for g in torch.autograd.grad(1024 * loss, inputs))]


@pytest.mark.parametrize("name", ["softmax", "smoothing-soft", "sigmoid"])
def test_autograd(name: str) -> None:
    results = run_distributed(differentiated, 2, VARIANTS[name])
    assert largest_error(averaged(results), value_and_gradients(global_case(2), VARIANTS[name])) < 1e-11


def two_heads(case: Case, other: Case) -> list[Tensor]:
    h = TwoHeads(
        *(t.clone().requires_grad_() for t in (case.audio, case.text, other.audio, other.text, case.scale, other.scale))
    )
    share, _ = mlp_objective(h, config=ObjectiveConfig(positives="off"))
    return [share.detach(), *torch.autograd.grad(share, list(vars(h).values()))]


def two_heads_of_rank() -> list[Tensor]:
    rank, world = rank_and_size()
    return two_heads(*(part(make_case(GROUPS[: LOCAL * world], seed=seed), rank) for seed in (1, 2)))


def test_two_heads() -> None:
    results = run_distributed(two_heads_of_rank, 2)
    whole = two_heads(*(make_case(GROUPS[: LOCAL * 2], seed=seed) for seed in (1, 2)))
    loss, *embeds, scale_a, scale_t = zip(*results, strict=True)
    ours = [torch.stack(loss).mean(), *(torch.cat(t) / 2 for t in embeds)]
    ours += [torch.stack(t).mean() for t in (scale_a, scale_t)]
    assert largest_error(ours, whole) < 1e-11


def different_numbers() -> str:
    rank, _ = rank_and_size()
    try:
        chunked(make_case(range(3 + rank)), ObjectiveConfig(positives="off"))
    except ValueError as error:
        return str(error)
    return ""


def test_another_number_of_pairs_is_refused_on_all_ranks() -> None:
    """And none waits for the others."""
    messages = run_distributed(different_numbers, 2, timeout_s=60)
    assert messages == ["every rank must bring the same number of pairs; ranks 0 to 1: [3, 4]"] * 2


def close_together(common: float) -> Case:
    """96 pairs at scale 100 that share one direction: with 4 the cosines are above 0.9."""
    case = make_case(range(96), scale=100.0, width=64, seed=5)
    centre = torch.zeros(64, dtype=torch.float64)
    centre[3] = common
    return case._replace(audio=F.normalize(case.audio + centre, dim=-1), text=F.normalize(case.text + centre, dim=-1))


def in_single_precision(common: float) -> list[Tensor]:
    rank, _ = rank_and_size()
    case, mine = close_together(common), slice(rank * 24, (rank + 1) * 24)
    case = case._replace(audio=case.audio[mine], text=case.text[mine], groups=case.groups[mine])
    return flat(chunked(case.to(torch.float32), ObjectiveConfig(positives="off"), chunk=16))


@pytest.mark.parametrize("common", [0.0, 4.0])
def test_float32_at_scale_100(common: float) -> None:
    """Rows and columns are computed by different ranks, whose products differ in the last bits."""
    whole = chunked(close_together(common), ObjectiveConfig(positives="off"))
    assert largest_error(averaged(run_distributed(in_single_precision, 4, common)), flat(whole)) < 1e-5
