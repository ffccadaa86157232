"""A small module with everything that is awkward to save, its engine, and the slow way to its masters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn


class Configuration:
    """As much of a Hugging Face config as a checkpoint needs."""

    def __init__(self, width: int) -> None:
        self.width = width

    def to_json_string(self, use_diff: bool) -> str:
        assert use_diff
        audio = {"hidden_size": self.width, "hidden_dropout_prob": 0.1, "transformers_version": "5"}
        return json.dumps({"model_type": "clap", "audio_config": audio})


class Toy(nn.Module):
    """Small, but with everything that is awkward: a 1-element parameter, odd sizes, BatchNorm, dropout, a frozen part,
    a parameter above and many below stage 3's persistence threshold."""

    def __init__(self, width: int = 29) -> None:
        super().__init__()
        self.config = Configuration(width)
        self.logit_scale_a = nn.Parameter(torch.tensor([1.5]))
        self.embedding = nn.Embedding(4099, width)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.norm = nn.BatchNorm1d(width, affine=False)
        self.register_buffer("index", torch.arange(5), persistent=True)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, 7)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = self.norm(x.float()).to(x.dtype)
        scale = self.logit_scale_a.clamp(0, 4).exp()
        return (self.head(self.dropout(x)) * scale + self.frozen.sum()).float().square().mean()


def make_engine(stage: int, precision: str, threshold: int = 100_000, *, width: int = 29, **changes: Any) -> Any:
    import deepspeed

    if precision == "fp16":
        # DeepSpeed refuses fp16 where the processor has no instructions for it; torch computes it all the same.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(0)
    model = Toy(width)
    if precision != "fp32":
        norm = model.norm
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "weight_decay": 0.01}}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": optimizer,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": threshold},
        "steps_per_print": 10**9,
        **changes,
    }
    if precision != "fp32":
        config.setdefault(precision, {"enabled": True} | ({"initial_scale_power": 6} if precision == "fp16" else {}))
    engine, *_ = deepspeed.initialize(model=model, config=config)
    if precision != "fp32":
        assert norm is engine.module.norm
        for buffer in (norm.running_mean, norm.running_var):
            buffer.data = buffer.data.float()
    return engine


def train(engine: Any, start: int, steps: int) -> list[float]:
    losses = []
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    for step in range(start, start + steps):
        ids = torch.randint(4099, (4,), generator=torch.Generator().manual_seed(100 * step + rank))
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def masters(engine: Any) -> dict[str, Tensor]:
    """The slow, public way: DeepSpeed's own gathering, one parameter at a time.

    It knows no masters of frozen parameters, and none at stage 0 in half precision: then the parameter itself.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    found = {}
    for name, parameter in engine.module.named_parameters():
        value = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        if value is None:
            value = getattr(parameter, "ds_tensor", parameter).detach()
            if hasattr(parameter, "ds_id"):
                import deepspeed

                with deepspeed.zero.GatheredParameters([parameter]):
                    value = parameter.detach().clone()
        found[name] = value.detach().clone().reshape(getattr(parameter, "ds_shape", parameter.shape))
    return found


def state_at(step: int, stage: int) -> Any:
    from clap_zero.checkpoint.state import TrainState
    from clap_zero.distributed.collectives import rank_and_size

    return TrainState(step=step, epoch=1, offset=7, samples=8 * step, world_size=rank_and_size()[1], stage=stage)


def read_weights(path: Path) -> dict[str, Tensor]:
    index = json.loads((path / "model.safetensors.index.json").read_text())
    tensors = {}
    for name, file in index["weight_map"].items():
        with safe_open(path / file, framework="pt") as opened:
            tensors[name] = opened.get_tensor(name)
    return tensors
