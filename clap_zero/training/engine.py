"""The model under DeepSpeed: parameter groups, `deepspeed.initialize`, one backward, one optimizer step."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from clap_zero.config.deepspeed import ResolvedDeepSpeed
from clap_zero.distributed.world import World
from clap_zero.errors import DivergedError
from clap_zero.phases import phase
from clap_zero.training.own_time import DeviceTimer


class Engine:
    """A DeepSpeed engine with the few calls that a training step needs.

    Attributes:
        deepspeed: The engine that `deepspeed.initialize` returned.
        forward_timer: Seconds that a GPU spent on forwards.
    """

    def __init__(self, model: nn.Module, *, resolved: ResolvedDeepSpeed, world: World) -> None:
        """Hand the model to DeepSpeed.

        Collective: all ranks must call.

        Args:
            model: What `clap_zero.model.clap.build_model` returned.
            resolved: The checked DeepSpeed configuration.
            world: The ranks.
        """
        import deepspeed

        deepspeed.utils.logger.setLevel(logging.WARNING)
        params = resolved.config["optimizer"]["params"]
        groups = parameter_groups(model, weight_decay=params["weight_decay"])
        with phase("engine"):
            self.deepspeed, _, _, self._json_scheduler = deepspeed.initialize(
                model=model, model_parameters=groups, config=resolved.config, dist_init_required=False
            )
            allocate_moments(self.deepspeed)
        # Muon's halves may have rates of their own; the schedule moves all of them alike.
        self._shares = [group["lr"] / params["lr"] for group in self.deepspeed.optimizer.param_groups]
        self.forward_timer = DeviceTimer(on_device=world.device.type == "cuda" and resolved.stage < 3)
        self._unmanaged_norm: float | None = None
        self._norm_is_ours = resolved.stage == 0 and resolved.precision == "fp32"

    def __call__(self, **inputs: Tensor | None) -> Any:
        """Run the model's forward. Collective at ZeRO stage 3."""
        with phase("forward"), self.forward_timer:
            return self.deepspeed(**inputs)

    @property
    def module(self) -> nn.Module:
        """The model itself; at stage 3 its parameters are partitioned."""
        return self.deepspeed.module

    @property
    def has_json_scheduler(self) -> bool:
        """Whether the DeepSpeed JSON brought its own learning-rate schedule."""
        return self._json_scheduler is not None

    @property
    def learning_rate(self) -> float:
        """The rate that the next step will use; with `muon_lr` that of the parameters that Muon updates."""
        return float(self.deepspeed.optimizer.param_groups[0]["lr"])

    def set_learning_rate(self, value: float) -> None:
        """Set the rate that the next step will use, of all parameter groups: each has its share of it.

        Args:
            value: Where the schedule, which peaks at the run config's learning rate, stands.
        """
        for group, share in zip(self.deepspeed.optimizer.param_groups, self._shares, strict=True):
            group["lr"] = value * share

    def backward(self, loss: Tensor, *, divide: bool = True) -> None:
        """Backward of one micro batch; DeepSpeed averages over the ranks.

        Args:
            loss: () this rank's.
            divide: Whether to divide by the accumulation steps; not where the loss is a part of the whole step's.

        Collective: all ranks must call.
        """
        with phase("backward"):
            self.deepspeed.backward(loss, scale_wrt_gas=divide)
            if self._norm_is_ours and self.deepspeed.is_gradient_accumulation_boundary():
                grads = [p.grad for p in self.module.parameters() if p.grad is not None]
                self._unmanaged_norm = float(torch.nn.utils.get_total_norm(grads))

    def step(self) -> bool:
        """Count one micro batch; at the accumulation boundary clip and update.

        Returns:
            Whether the weights were updated: False between boundaries and when a gradient overflowed.

        Raises:
            DivergedError: The fp16 loss scale fell to its minimum and the gradients still overflow; or a gradient is
                not a number where DeepSpeed would not look (stage 0, fp32). The weights are as they were.

        Collective: all ranks must call.
        """
        with phase("optimizer"):
            return self._step()

    def _step(self) -> bool:
        at_boundary = self.deepspeed.is_gradient_accumulation_boundary()
        if self._norm_is_ours and at_boundary and self.grad_norm is None:
            raise DivergedError(
                "the gradients are not finite: the weights were left as they are; lower the learning rate, or look at "
                "the data of this step with --data.log_keys"
            )
        try:
            self.deepspeed.step()
        except Exception as error:
            # DeepSpeed raises a bare Exception here; anything else is not ours to explain.
            if "minimum" not in str(error) or "scale" not in str(error):
                raise
            raise DivergedError(
                f"the fp16 loss scale is at its minimum ({self.loss_scale:g}) and gradients still overflow: the last "
                "complete checkpoint is intact; lower the learning rate, or use bf16"
            ) from error
        return bool(self.deepspeed.was_step_applied())

    @property
    def loss_scale(self) -> float | None:
        """The current fp16 loss scale, None without one."""
        return float(self.deepspeed.optimizer.loss_scale) if self.deepspeed.fp16_enabled() else None

    @property
    def grad_norm(self) -> float | None:
        """Norm over all gradients of the last step before clipping; None when it was not finite."""
        norm = self._unmanaged_norm if self._norm_is_ours else self.deepspeed.get_global_grad_norm()
        if norm is None:
            return None
        norm = float(norm)
        return norm if math.isfinite(norm) else None


def allocate_moments(engine: Any) -> None:
    """Make Adam's moments at ZeRO stage 3 before the first step, not in it.

    torch makes them at the first update, when the activations' memory was already taken: a run that does not fit then
    ends after its first forward and backward instead of at its start. The values are those that torch would make.

    Args:
        engine: What `deepspeed.initialize` returned; other stages, optimizers and offloaded states stay as they are.
    """
    wrapper = engine.optimizer
    base: Any = getattr(wrapper, "optimizer", None)
    if engine.zero_optimization_stage() != 3 or type(base) not in (torch.optim.Adam, torch.optim.AdamW):
        return
    if wrapper.offload_optimizer or any(group["amsgrad"] or group["fused"] for group in base.param_groups):
        return
    for masters in wrapper.fp32_partitioned_groups_flat:
        state = base.state[masters]
        assert not state, "a fresh optimizer has no state"
        state["step"] = torch.tensor(0.0, dtype=torch.float32)
        for name in ("exp_avg", "exp_avg_sq"):
            # zeros alone would reserve the pages without taking them.
            state[name] = torch.zeros_like(masters, requires_grad=False).zero_()


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters into those that decay and those that do not.

    Weight matrices and embeddings decay. Biases, norm weights, logit scales (all of one dimension) and the relative
    position biases of the Swin blocks do not.

    Args:
        model: The model; at ZeRO stage 3 with partitioned parameters.
        weight_decay: Decay of the first group.

    Returns:
        Groups as torch's optimizers take them, those that decay first; none that is empty.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in _trainable(model):
        # A partitioned parameter has size 0 itself and keeps its real shape beside it.
        num_dims = len(getattr(parameter, "ds_shape", parameter.shape))
        (plain if num_dims < 2 or "position_bias" in name else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _trainable(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
