"""BatchNorm in fp32: against torch's, masked, in half precision, and where a variance does not exist."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clap_zero.model.batch_norm import BatchNorm, replace_batch_norm


def twins(policy: str = "local", *, momentum: float | None = 0.1) -> tuple[nn.BatchNorm2d, BatchNorm]:
    """torch's module and ours with the same random parameters and statistics."""
    random = torch.Generator().manual_seed(0)
    theirs, ours = nn.BatchNorm2d(3, momentum=momentum), nn.BatchNorm2d(3, momentum=momentum)
    for t in (*theirs.parameters(), theirs.running_mean, theirs.running_var):
        t.data = torch.rand(t.shape, generator=random) + 0.5
    ours.load_state_dict(theirs.state_dict())
    assert replace_batch_norm(ours, policy=policy) == 1
    return theirs, ours


def batch(n: int = 4, *, offset: float = 0.0, scale: float = 3.0) -> Tensor:
    random = torch.Generator().manual_seed(n)
    return offset + scale * torch.randn(n, 3, 5, 2, generator=random) * torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1)


def run(module: nn.Module, x: Tensor, *args: Tensor) -> list[Tensor]:
    """Output, gradients of input and parameters under a fixed weighting, and buffers."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = module(x, *args)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y.dtype)
    (y * weights).sum().backward()
    return [y, x.grad, module.weight.grad, module.bias.grad, *module.buffers()]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_training_is_torchs(momentum: float | None) -> None:
    theirs, ours = twins(momentum=momentum)
    for n in (4, 7, 2):
        for a, b in zip(run(ours, batch(n)), run(theirs, batch(n)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", ["local", "sync", "frozen"])
def test_evaluation_is_torchs_to_the_bit(policy: str) -> None:
    theirs, ours = (module.eval() for module in twins(policy))
    for a, b in zip(run(ours, batch()), run(theirs, batch()), strict=True):
        assert torch.equal(a, b)


def test_frozen_uses_and_keeps_running_statistics_in_training() -> None:
    theirs, ours = twins("frozen")
    expected = run(theirs.eval(), batch())
    for a, b in zip(run(ours.train(), batch()), expected, strict=True):
        assert torch.equal(a, b)


def test_gradcheck_with_a_mask() -> None:
    _, ours = twins()
    ours.double()
    valid = torch.tensor([True, False, True, True])

    def f(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(ours, {"weight": weight, "bias": bias}, (x, valid))

    x = batch().double().requires_grad_()
    assert torch.autograd.gradcheck(f, (x, ours.weight.detach().requires_grad_(), ours.bias.detach().requires_grad_()))


def test_masked_samples_might_as_well_not_be_there() -> None:
    theirs, ours = twins()
    x, valid = batch(6), torch.tensor([True, False, True, True, False, True])
    x[~valid] = float("nan")
    y, x_gradient, *rest = run(ours, x, valid)
    expected = theirs(x[valid])
    torch.testing.assert_close(y[valid], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(y[~valid], torch.zeros_like(y[~valid]))
    assert torch.equal(x_gradient[~valid], torch.zeros_like(x_gradient[~valid]))
    for a, b in zip(rest[2:], theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_nothing_valid_leaves_everything_untouched() -> None:
    _, ours = twins()
    before = [b.clone() for b in ours.buffers()]
    y, *gradients = run(ours, batch(2), torch.zeros(2, dtype=torch.bool))[:4]
    assert all(torch.equal(t, torch.zeros_like(t)) for t in (y, *gradients))
    assert all(torch.equal(a, b) for a, b in zip(before, ours.buffers(), strict=True))


@pytest.mark.parametrize("num_masked", [0, 2])
def test_one_value_per_channel_uses_the_running_statistics(num_masked: int) -> None:
    """The global branch of the fusion block sees one value per channel and clip; torch raises."""
    theirs, ours = twins()
    x = batch(1 + num_masked)[:, :, :1, :1]
    valid = torch.arange(1 + num_masked) == 0
    before = [b.clone() for b in ours.buffers()]
    y, x_gradient, *_ = run(ours, x, valid)
    expected_y, expected_gradient, *_ = run(theirs.eval(), x[:1])
    torch.testing.assert_close(y[:1], expected_y, rtol=1e-6, atol=1e-6)
    if not num_masked:
        torch.testing.assert_close(x_gradient, expected_gradient, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(before, ours.buffers(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Parameters are cast, statistics are not; fp32 features come in, the parameters' dtype comes out."""
    theirs, ours = twins()
    ours.to(dtype)
    assert {name: b.dtype for name, b in ours.named_buffers()} == {
        "running_mean": torch.float32,
        "running_var": torch.float32,
        "num_batches_tracked": torch.int64,
    }
    x = batch(offset=-80.0)
    for features in (x, x.double()):
        assert ours(features).dtype == dtype
    theirs(x)
    reference = nn.BatchNorm2d(3)
    reference.load_state_dict(ours.state_dict())
    y, expected = ours.eval()(x), reference.eval()(x)
    torch.testing.assert_close(y.float(), expected, rtol=2**-8, atol=2**-8)


def test_statistics_move_by_less_than_half_precision_resolves() -> None:
    _, ours = twins()
    ours.bfloat16()
    ours.momentum = 1e-5
    before = ours.running_mean.clone()
    ours(batch())
    assert 0 < (ours.running_mean - before).abs().max() < 1e-4


def test_a_large_mean_costs_no_precision() -> None:
    """A difference of sums of squares would lose everything here."""
    _, ours = twins()
    x = batch(8, offset=30_000.0, scale=0.5)
    y = ours(x)
    exact = nn.BatchNorm2d(3).double()
    exact.load_state_dict({k: v.double() for k, v in twins()[0].state_dict().items()})
    torch.testing.assert_close(y.double(), exact(x.double()), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ours.running_var.double(), exact.running_var, rtol=1e-4, atol=1e-6)


def test_replacing_keeps_names_and_parameters() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm2d(3)))
    before = {id(p): name for name, p in model.named_parameters()}
    names = list(model.state_dict())
    assert replace_batch_norm(model, policy="sync") == 2
    assert {id(p): name for name, p in model.named_parameters()} == before
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("spoilt", [torch.inf, torch.nan, 1e30])
def test_what_is_not_finite_is_never_kept(spoilt: float, momentum: float | None) -> None:
    """A forward that overflows costs its step, not the statistics of all that follow (1e30: of the variance alone)."""
    _, ours = twins(momentum=momentum)
    _, alone = twins(momentum=momentum)
    broken = batch()
    broken[1, 2, 0, 0] = spoilt
    start = {name: value.clone() for name, value in ours.named_buffers()}
    ours(broken)
    assert all(torch.equal(value, start[name]) for name, value in ours.named_buffers())
    ours(batch(7))
    alone(batch(7))
    assert all(torch.equal(one, other) for one, other in zip(ours.buffers(), alone.buffers(), strict=True))
