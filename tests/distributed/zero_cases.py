"""Shared by the tests of ZeRO: a very small CLAP, its inputs, and one step of it under DeepSpeed on a rank."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from clap_zero.model.clap import ClapForContrast, ContrastOutput, Parts, build_model
from clap_zero.model.mlp_heads import MODULES, MlpHead
from clap_zero.objective.autograd import contrastive_objective
from clap_zero.objective.config import ObjectiveConfig
from clap_zero.training.objective import RunObjective

CPU = torch.device("cpu")
NUM_FRAMES = 251
NUM_TOKENS = 9


def tiny_geometry(*, fused: bool) -> dict[str, Any]:
    """Two stages of 16 and 8 patches (the window is 8), one of them with a shifted block; two text layers."""
    return {
        "audio_config": {
            "patch_size": 16,
            "patch_stride": [16, 16],
            "patch_embeds_hidden_size": 16,
            "depths": [2, 1],
            "num_attention_heads": [2, 4],
            "hidden_size": 32,
            "enable_fusion": fused,
            "fusion_type": "aff_2d" if fused else None,
        },
        "text_config": {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 24,
        },
        "projection_dim": 16,
    }


class Pairs(NamedTuple):
    """A batch: mels (b, 1 or 4, frames, 64), is_longer (b, 1), input_ids (b, tokens), attention_mask (b, tokens)."""

    input_features: Tensor
    is_longer: Tensor
    input_ids: Tensor
    attention_mask: Tensor

    def rows(self, start: int, stop: int) -> Pairs:
        return Pairs(*(t[start:stop] for t in self))


def make_pairs(num_pairs: int, *, fused: bool, long_rows: tuple[int, ...] = (), seed: int = 0) -> Pairs:
    """Another smooth pattern in every row, so that embeddings spread; noise alone would make all clips alike."""
    random = torch.Generator().manual_seed(seed)
    channels = 4 if fused else 1
    coarse = 15 * torch.randn(num_pairs, channels, 4, 4, generator=random)
    pattern = torch.nn.functional.interpolate(coarse, (NUM_FRAMES, 64), mode="bilinear")
    mels = -45 + pattern + torch.randn(num_pairs, channels, NUM_FRAMES, 64, generator=random)
    is_longer = torch.zeros(num_pairs, 1, dtype=torch.bool)
    is_longer[list(long_rows)] = True
    ids = torch.randint(3, 64, (num_pairs, NUM_TOKENS), generator=random)
    lengths = torch.randint(3, NUM_TOKENS + 1, (num_pairs,), generator=random)
    mask = torch.arange(NUM_TOKENS) < lengths[:, None]
    return Pairs(mels, is_longer, ids.where(mask, 1), mask.long())


def ds_config(stage: int, *, micro_batch: int, world: int, precision: str = "fp32", **zero: Any) -> dict[str, Any]:
    """A resolved DeepSpeed JSON with everything that matters written out."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,
        "train_batch_size": micro_batch * world,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0, "torch_adam": True}},
        "zero_optimization": {"stage": stage, **zero},
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16", "initial_scale_power": 6, "hysteresis": 1},
        "zero_allow_untested_optimizer": True,
    }


def build(config: dict[str, Any], *, fused: bool, weights: Path | None = None, **options: Any) -> ClapForContrast:
    """The small model, from scratch or from a directory, as the trainer builds it; dropout off by default."""
    options = {"batch_norm": "sync", "dropout": 0.0, "seed": 3} | options
    geometry = tiny_geometry(fused=fused) if weights is None else None
    pretrained = None if weights is None else str(weights)
    return build_model(geometry=geometry, pretrained=pretrained, ds_config=config, device=CPU, **options)


def initialise(model: ClapForContrast, config: dict[str, Any]) -> Any:
    """The model under DeepSpeed."""
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    trainable = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=config, dist_init_required=False)
    return engine


def finish(engine: Any) -> None:
    """Takes DeepSpeed's hooks and its replacement of F.linear away, for the next test in this process."""
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patches

    engine.destroy()
    if hasattr(Patches, "linear_bk"):
        torch.nn.functional.linear = Patches.linear_bk


def loss_of(output: ContrastOutput) -> Tensor:
    """This rank's share of the plain softmax objective, as the trainer takes it. Collective: all ranks must call."""
    audio, text = output.audio_embeds, output.text_embeds
    assert audio is not None and text is not None
    return contrastive_objective(audio, text, output.logit_scale, config=ObjectiveConfig(positives="off"))[0]


def save_weights(model: ClapForContrast, directory: Path) -> Path:
    """Writes the model as Hugging Face would."""
    directory.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(directory)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, directory / "model.safetensors")
    return directory


def warmed_up(directory: Path, *, fused: bool, num_steps: int = 20) -> Path:
    """Weights after some steps on one batch: before, embeddings are nearly equal and gradients nearly cancel."""
    model = build({}, fused=fused)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pairs = make_pairs(8, fused=fused, long_rows=(0, 3, 5), seed=100)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss_of(model(**pairs._asdict())).backward()
        optimizer.step()
    return save_weights(model, directory)


def new_heads(*, width: int, seed: int = 7) -> dict[str, Tensor]:
    """LAION's extra heads at their initial weights, under LAION's names."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        heads = {module: MlpHead(width, dropout=0.1).state_dict() for module in MODULES}
    return {f"{module}.{name}": value for module, state in heads.items() for name, value in state.items()}


def with_heads(weights: Path, directory: Path, *, fused: bool, num_steps: int = 8) -> Path:
    """Weights with LAION's extra heads among them, after some steps of LAION's loss."""
    model = build({}, fused=fused, weights=weights)
    save_weights(model, directory)
    state = load_file(directory / "model.safetensors") | new_heads(width=model.config.projection_dim)
    save_file(state, directory / "model.safetensors")
    model = build({}, fused=fused, weights=directory, parts=Parts(mlp="auto"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pairs = make_pairs(8, fused=fused, long_rows=(0, 3, 5) if fused else (), seed=100)
    objective = RunObjective(ObjectiveConfig(positives="off"))
    for _ in range(num_steps):
        optimizer.zero_grad()
        objective.share(model(**pairs._asdict()), torch.arange(8))[0].backward()
        optimizer.step()
    return save_weights(model, directory)
