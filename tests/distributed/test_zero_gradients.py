"""Loss and every gradient of several ranks under DeepSpeed ZeRO against one process with the whole batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clap_zero.distributed.collectives import all_reduce_sum, rank_and_size
from clap_zero.objective import chunked
from clap_zero.testing import run_distributed
from tests.distributed import zero_cases as zc
from tests.distributed.cached_cases import statistics
from tests.distributed.cached_reference import worst_gradient

LOCAL = 4
SHARES = {"none": (), "one": (1,), "some": (0, 2, 5), "all": tuple(range(8))}
"""Rows of long clips in a global batch of 8, of which rank 0 has 0 to 3: both ranks differ in all but the last."""


@dataclass(frozen=True)
class Case:
    """What one comparison runs with."""

    stage: int
    weights: Path
    fused: bool
    batch_norm: str
    long_rows: tuple[int, ...] = ()
    world: int = 2
    factor: float = 1.0
    zero: dict[str, Any] = field(default_factory=dict)

    def pairs(self) -> zc.Pairs:
        return zc.make_pairs(LOCAL * self.world, fused=self.fused, long_rows=self.long_rows, seed=9)


@dataclass(frozen=True)
class Outcome:
    """Loss over the global batch, gradients and BatchNorm buffers by name."""

    loss: float
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def one_process(case: Case) -> Outcome:
    """The definition: the whole batch in one process, without DeepSpeed, in fp64.

    In fp32 the reference would have the same rounding noise as what is compared with it, about half of the tolerance.
    """
    model = zc.build({}, fused=case.fused, weights=case.weights, batch_norm=case.batch_norm).double()
    loss = zc.loss_of(model(**case.pairs()._asdict()))
    loss.backward()
    return Outcome(loss.item(), {n: p.grad for n, p in model.named_parameters()}, statistics(model))


def on_a_rank(case: Case) -> Outcome:
    """This rank's part under DeepSpeed; gradients are the whole ones that DeepSpeed would step with."""
    from deepspeed.utils import safe_get_full_grad

    rank, world = rank_and_size()
    config = zc.ds_config(case.stage, micro_batch=LOCAL, world=world, **case.zero)
    model = zc.build(config, fused=case.fused, weights=case.weights, batch_norm=case.batch_norm)
    engine = zc.initialise(model, config)
    mine = case.pairs().rows(LOCAL * rank, LOCAL * (rank + 1))
    share = zc.loss_of(engine(**mine._asdict())) * case.factor
    engine.backward(share)
    gradients = {n: safe_get_full_grad(p).detach().clone() for n, p in engine.module.named_parameters()}
    outcome = Outcome(share.item(), gradients, statistics(engine.module))
    zc.finish(engine)
    return outcome


def compare(case: Case) -> None:
    outcomes = run_distributed(on_a_rank, case.world, case)
    reference = one_process(case)
    loss = sum(o.loss for o in outcomes) / case.world
    assert loss == pytest.approx(reference.loss, rel=1e-5)
    for outcome in outcomes:
        worst, name = worst_gradient(outcome, reference)
        assert worst <= 1e-5, (worst, name)
        if case.batch_norm == "sync":
            for name, value in reference.buffers.items():
                torch.testing.assert_close(outcome.buffers[name].to(value.dtype), value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("share", ["none", "one", "some"])
def test_fused_sync(stage: int, share: str, weights: dict[bool, Path]) -> None:
    compare(Case(stage, weights[True], True, "sync", SHARES[share]))


@pytest.mark.parametrize("share", ["some"])
def test_fused_nothing_stays_resident(share: str, weights: dict[bool, Path]) -> None:
    compare(Case(3, weights[True], True, "sync", SHARES[share], zero={"stage3_param_persistence_threshold": 0}))


@pytest.mark.parametrize("stage", [2, 3])
def test_unfused_sync(stage: int, weights: dict[bool, Path]) -> None:
    compare(Case(stage, weights[False], False, "sync"))


def test_fused_frozen(weights: dict[bool, Path]) -> None:
    compare(Case(2, weights[True], True, "frozen", SHARES["one"]))


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("batch_norm", ["sync", "frozen"])
@pytest.mark.parametrize("share", [None, *SHARES])
@pytest.mark.parametrize("stage", [0, 1, 2, 3, "3, nothing resident"])
def test_matrix(stage: int | str, share: str | None, batch_norm: str, world: int, weights: dict[bool, Path]) -> None:
    zero = {"stage3_param_persistence_threshold": 0} if isinstance(stage, str) else {}
    fused = share is not None
    rows = SHARES[share] if fused else ()
    compare(Case(3 if zero else stage, weights[fused], fused, batch_norm, rows, world=world, zero=zero))


def ten_steps(case: Case) -> list[float]:
    """Losses over the global batch of ten AdamW steps, long clips on one rank, on none and on both."""
    rank, world = rank_and_size()
    config = zc.ds_config(case.stage, micro_batch=LOCAL, world=world)
    # With 1e-8 a gradient that is zero but for rounding moves its parameter by a whole learning rate either way.
    config["optimizer"]["params"]["eps"] = 1e-4
    engine = zc.initialise(zc.build(config, fused=True, weights=case.weights, batch_norm=case.batch_norm), config)
    losses = []
    for step in range(10):
        rows = list(SHARES.values())[step % len(SHARES)]
        pairs = zc.make_pairs(LOCAL * world, fused=True, long_rows=rows, seed=step)
        loss = zc.loss_of(engine(**pairs.rows(LOCAL * rank, LOCAL * (rank + 1))._asdict()))
        engine.backward(loss)
        engine.step()
        losses.append(float(all_reduce_sum(loss)) / world)
    zc.finish(engine)
    return losses


@pytest.mark.parametrize("batch_norm", ["sync", "frozen"])
def test_losses_of_ten_steps_agree_over_stages(batch_norm: str, weights: dict[bool, Path]) -> None:
    runs = [run_distributed(ten_steps, 2, Case(stage, weights[True], True, batch_norm))[0] for stage in range(4)]
    for losses in runs[1:]:
        assert losses == pytest.approx(runs[0], rel=1e-5)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_planted_factor_is_found(factor: float, weights: dict[bool, Path]) -> None:
    """The test of the test: gradients off by the world size must not pass."""
    case = Case(2, weights[True], True, "sync", SHARES["some"], factor=factor)
    worst, _ = worst_gradient(run_distributed(on_a_rank, 2, case)[0], one_process(case))
    assert worst > 0.4


def without_gradient_in_the_gather(case: Case) -> Outcome:
    """Other ranks' rows do not pull at this rank's embeddings, the classic mistake: a gather without gradient."""
    original = chunked.all_gather

    def own_pull_only(t: Tensor) -> Tensor:
        rows = original(t)
        if t.shape[1:] == (8,):  # what rows and columns pull, four numbers in each direction
            mine = torch.arange(len(rows)) // len(t) == rank_and_size()[0]
            rows = rows * mine[:, None]
        return rows

    chunked.all_gather = own_pull_only
    try:
        return on_a_rank(case)
    finally:
        chunked.all_gather = original


def test_a_gather_without_gradient_is_found(weights: dict[bool, Path]) -> None:
    case = Case(2, weights[False], False, "sync")
    worst, _ = worst_gradient(run_distributed(without_gradient_in_the_gather, 2, case)[0], one_process(case))
    assert worst > 1e-2
