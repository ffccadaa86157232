"""BatchNorm that is right under ZeRO: fp32 arithmetic and statistics, and a stated group over which it averages.

Parameters of a bf16 or fp16 model are cast, running statistics are not, and torch's BatchNorm refuses the mixture.
`BatchNorm` computes in fp32 whatever the parameters are stored in, keeps its statistics in fp32, and gives its output
in the dtype of its parameters: at the entry of the audio tower that is the one place where fp32 features become half
precision (after the normalisation, so that decibels of -100 lose nothing).

Policies, which decide over what a training batch is averaged:
- local: the micro batch of this rank. Ranks' running statistics drift apart.
- sync: the micro batch over all ranks, as if one process had it. Running statistics stay equal on all ranks.
- frozen: nothing; the running statistics are used in training, too, and do not move.
In evaluation every policy uses the running statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clap_zero.distributed.collectives import all_reduce_sum
from clap_zero.precision import wide

Policy = Literal["local", "sync", "frozen"]

_STATISTICS = ("running_mean", "running_var")


class BatchNorm(nn.BatchNorm2d):
    """`nn.BatchNorm2d` in fp32 under any parameter dtype, over a chosen group, optionally over some samples only.

    Same parameters, buffers and state-dict names. Made from an existing module by `replace_batch_norm`.
    """

    policy: Policy = "local"
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Normalises per channel.

        With fewer than two values per channel in the group a variance does not exist: then the running statistics are
        used instead, and stay as they are (torch raises, which would end a run at the first micro batch with one long
        clip).

        Args:
            x: (n, c, h, w), any float dtype.
            valid: (n,) bool, the samples that count; the others' outputs are 0 and they move no statistic.

        Returns:
            (n, c, h, w) in the dtype of the parameters.

        Collective under policy sync in training, in forward and backward: all ranks must call.
        """
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        # Autocast could hand the arithmetic below to half precision again.
        with torch.autocast(x.device.type, enabled=False):
            x, weight, bias = x.to(dtype), self.weight.to(dtype), self.bias.to(dtype)
            if not self.training or self.policy == "frozen":
                mean, var = self.running_mean.to(dtype), self.running_var.to(dtype)
                y = F.batch_norm(x, mean, var, weight, bias, training=False, eps=self.eps)
                y = y if valid is None else torch.where(valid.view(-1, 1, 1, 1), y, 0)
            else:
                y = self._forward_training(x, weight, bias, valid)
        return y.to(self.weight.dtype)

    def _forward_training(self, x: Tensor, weight: Tensor, bias: Tensor, valid: Tensor | None) -> Tensor:
        """Normalises with the statistics of the group and moves the running statistics."""
        if valid is None:
            valid = x.new_ones(x.shape[0], dtype=torch.bool)
        running = (self.running_mean.to(x.dtype), self.running_var.to(x.dtype))
        y, mean, var, count = _Normalise.apply(x, weight, bias, valid, running, self.eps, self.policy == "sync")
        self._move_statistics(mean, var, count)
        return y

    @torch.no_grad()
    def _move_statistics(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Exponential (or, with momentum None, cumulative) average as `nn.BatchNorm2d`: variance unbiased.

        Args:
            mean: (c,).
            var: (c,), biased.
            count: (), values per channel; with fewer than two nothing moves. Neither does it where a value is not
                finite, as in a forward that overflows in fp16: the step is skipped, and statistics would stay spoilt.
        """
        # Without .item(): a decision on the host would make a GPU wait.
        enough = (count >= 2) & mean.isfinite().all() & var.isfinite().all()
        self.num_batches_tracked += enough.to(self.num_batches_tracked.dtype)
        if self.momentum is None:
            step = 1 / self.num_batches_tracked.clamp(min=1).to(mean.dtype)
        else:
            step = mean.new_tensor(self.momentum)
        unbiased = var * (count / (count - 1).clamp(min=1)).to(var.dtype)
        for name, value in (("running_mean", mean), ("running_var", unbiased)):
            old = getattr(self, name)
            old.add_(torch.where(enough, step * (value - old), 0).to(old.dtype))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BatchNorm:
        """As `nn.Module._apply`, but .half() and .bfloat16() leave the statistics in the precision they have."""
        before = {name: self._buffers[name] for name in _STATISTICS}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = old.to(device=new.device, dtype=torch.promote_types(old.dtype, torch.float32))
        return self


class _Normalise(torch.autograd.Function):
    """Batch normalisation over the valid samples of this rank or of all ranks.

    Mean first, then squared distances from it (no difference of large numbers). Ioffe and Szegedy 2015, algorithm 1;
    the backward is the closed form of its chain rule, with the two sums taken over the group.

    The arithmetic is in fp64, what is kept and handed on is not. Gradients that cancel (of biases before a BatchNorm)
    are the sum of thousands of elements, in which a mean that is rounded to fp32 leaves the same error in every one.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, valid: Tensor, running: tuple[Tensor, Tensor],
        eps: float, sync: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Gives y (n, c, h, w), mean (c,), biased variance (c,) and count () of the group."""
        reduce = all_reduce_sum if sync else _identity
        mask = valid.view(-1, 1, 1, 1)
        values = torch.where(mask, x, 0).to(wide(x.device))
        num_values = valid.sum().to(values.dtype) * (x.shape[2] * x.shape[3])
        totals = reduce(torch.cat([values.sum((0, 2, 3)), num_values.view(1)]))
        count = totals[-1]
        mean = totals[:-1] / count.clamp(min=1)
        centred = torch.where(mask, values - _per_channel(mean), 0)
        var = reduce(centred.square().sum((0, 2, 3))) / count.clamp(min=1)
        # Too few values anywhere: the running statistics, as constants.
        enough = count >= 2
        used_mean, used_var = (torch.where(enough, new, old) for new, old in zip((mean, var), running, strict=True))
        inverse_std = torch.rsqrt(used_var + eps)
        normalised = ((values - _per_channel(used_mean)) * _per_channel(inverse_std)).to(x.dtype)
        y = torch.where(mask, normalised * _per_channel(weight) + _per_channel(bias), 0)
        ctx.save_for_backward(normalised, weight, valid, inverse_std, count)
        ctx.reduce = reduce
        mean, var = mean.to(x.dtype), var.to(x.dtype)
        ctx.mark_non_differentiable(mean, var, count)
        return y, mean, var, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        normalised, weight, valid, inverse_std, count = ctx.saved_tensors
        mask = valid.view(-1, 1, 1, 1)
        values = torch.where(mask, gradient, 0).to(inverse_std.dtype)
        bias_gradient = values.sum((0, 2, 3))
        weight_gradient = (values * normalised).sum((0, 2, 3))
        # The parameters' gradients stay this rank's own (DeepSpeed averages them); those of the statistics are the
        # group's, since every rank's output depends on every rank's input.
        share = ctx.reduce(torch.cat([bias_gradient, weight_gradient])) / count.clamp(min=1)
        through_mean, through_var = torch.where(count >= 2, share, 0).chunk(2)
        values = values - _per_channel(through_mean) - normalised * _per_channel(through_var)
        x_gradient = torch.where(mask, values * _per_channel(weight * inverse_std), 0).to(gradient.dtype)
        weight_gradient, bias_gradient = weight_gradient.to(weight.dtype), bias_gradient.to(weight.dtype)
        return x_gradient, weight_gradient, bias_gradient, None, None, None, None


def _per_channel(values: Tensor) -> Tensor:
    return values.view(1, -1, 1, 1)


def _identity(t: Tensor) -> Tensor:
    return t


def replace_batch_norm(model: nn.Module, *, policy: Policy) -> int:
    """Turns every `nn.BatchNorm2d` of a model into `BatchNorm`, in place: parameters, buffers and names stay.

    Only the class of the module changes, so it works on parameters that ZeRO has partitioned.

    Args:
        model: Any module.
        policy: local, sync or frozen.

    Returns:
        How many there are.
    """
    found = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for module in found:
        assert module.affine and module.track_running_stats
        module.__class__ = BatchNorm
        setattr(module, "policy", policy)  # noqa: B010  (to a type checker it is still an nn.BatchNorm2d)
    return len(found)
