"""Hugging Face's ClapModel for training under DeepSpeed ZeRO: same weights and names, a forward for our objective."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ClapConfig, ClapModel
from transformers.initialization import no_init_weights

from clap_zero.distributed.collectives import all_reduce_sum
from clap_zero.errors import ConfigError
from clap_zero.model.batch_norm import Policy, replace_batch_norm
from clap_zero.model.features import feature_config
from clap_zero.model.geometry import clap_config, override_dropout
from clap_zero.model.initial import initialise_weights
from clap_zero.model.logit_bias import INITIAL_BIAS, INITIAL_SCALE, as_number, fill_bias, make_bias, take_bias
from clap_zero.model.mlp_heads import DROPOUT, MODULES, MlpHead
from clap_zero.model.pretrained import load_pretrained, read_config, resolve_pretrained, stores_heads
from clap_zero.model.towers import replace_patch_embedding

__all__ = ["ClapForContrast", "ContrastOutput", "Parts", "build_model", "feature_config"]

MAX_LOGIT_SCALE = 100.0
"""Cap of the factor on cosine similarities (Radford et al. 2021, section 2.5, and LAION's recipe); its floor is 1."""


class ContrastOutput(NamedTuple):
    """What the objective needs. A named tuple, because ZeRO-3 finds the tensors in one.

    Attributes:
        audio_embeds: (b, d) fp32, L2-normalised; None without audio.
        text_embeds: (c, d) fp32, L2-normalised; None without text.
        logit_scale: () fp32, in [1, 100].
        logit_bias: () fp32; None for a model without one.
        audio_mlp: (b, d) fp32, clips through LAION's extra head, of any length; None for a model without it.
        text_mlp: (c, d) fp32, captions likewise.
        logit_scale_t: () fp32, in [1, 100], the factor on products of `audio_mlp` and `text_embeds`; `logit_scale` is
            then that of `audio_embeds` and `text_mlp`. None for a model without the heads.
    """

    audio_embeds: Tensor | None
    text_embeds: Tensor | None
    logit_scale: Tensor
    logit_bias: Tensor | None = None
    audio_mlp: Tensor | None = None
    text_mlp: Tensor | None = None
    logit_scale_t: Tensor | None = None


@dataclass(frozen=True)
class Parts:
    """What a model may have beyond Hugging Face's ClapModel.

    Attributes:
        bias: Whether it has the bias of the sigmoid objective; None: if the weights have one.
        mlp: Whether it has LAION's extra heads: where the weights have them (auto), or never (off).
    """

    bias: bool | None = False
    mlp: Literal["auto", "off"] = "off"


class ClapForContrast(ClapModel):
    """ClapModel with fp32 tail and BatchNorm, one-dimensional logit scales and a graph that is equal on all ranks.

    State-dict names are those of ClapModel, and where there are any those of `clap_zero.model.logit_bias` and
    `clap_zero.model.mlp_heads`; only `logit_scale_a` and `logit_scale_t` have shape (1,) instead of (), because
    DeepSpeed cannot flatten a 0-dim parameter. Without LAION's heads nothing depends on `logit_scale_t`: it is carried
    along, takes part with factor zero, and so keeps its value.
    """

    # Read by DeepSpeed when it converts buffers (data_types.buffer_dtype), and by transformers when it loads.
    _keep_in_fp32_modules_strict = ("running_mean", "running_var")

    def __init__(
        self,
        config: ClapConfig,
        *,
        batch_norm: Policy = "sync",
        with_bias: bool = False,
        heads_dropout: float | None = None,
    ) -> None:
        """Args:
        config: Geometry.
        batch_norm: local, sync or frozen, see `clap_zero.model.batch_norm`.
        with_bias: Whether the model has the bias of the sigmoid objective.
        heads_dropout: Dropout of LAION's extra heads, None for a model without them.
        """
        super().__init__(config)
        for name in ("logit_scale_a", "logit_scale_t"):
            setattr(self, name, nn.Parameter(torch.full((1,), math.log(config.logit_scale_init_value))))
        self.logit_bias = make_bias() if with_bias else None
        for name in MODULES:
            head = None if heads_dropout is None else MlpHead(config.projection_dim, dropout=heads_dropout)
            setattr(self, name, head)
        replace_batch_norm(self, policy=batch_norm)
        replace_patch_embedding(self)

    @property
    def has_heads(self) -> bool:
        """Whether the model has LAION's extra heads."""
        return self.audio_transform is not None

    def forward(
        self,
        *,
        input_features: Tensor | None = None,
        is_longer: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> ContrastOutput:
        """Embeds clips, captions or both.

        Args:
            input_features: (b, 1 or 4, frames, mels) log-mel in dB, fp32 or fp64 whatever the model's dtype: the
                BatchNorm at the entry of the audio tower computes in fp32 and casts.
            is_longer: (b, 1) bool, clips longer than the model's window; needed by a model with fusion.
            input_ids: (c, tokens) int64.
            attention_mask: (c, tokens), 1 for real tokens; default: all that are not padding.

        Returns:
            Embeddings and logit scale.

        Collective at ZeRO stage 3 and, with BatchNorm policy sync, in training: all ranks must call, with the same
        kinds of input.
        """
        audio_embeds = text_embeds = None
        if input_features is not None:
            if self.config.audio_config.enable_fusion and is_longer is None:
                raise ValueError("a model with fusion needs is_longer, (b, 1) bool, beside input_features")
            audio = self.audio_model(input_features=input_features, is_longer=is_longer)
            audio_embeds = _normalised(self.audio_projection(audio.pooler_output))
        if input_ids is not None:
            if attention_mask is None:
                attention_mask = (input_ids != self.config.text_config.pad_token_id).long()
            text = self.text_model(input_ids=input_ids, attention_mask=attention_mask)
            text_embeds = _normalised(self.text_projection(text.pooler_output))
        if not self.has_heads:
            unused = 0 * self.logit_scale_t.float().sum()
            scale = logit_scale(self.logit_scale_a) + unused
            return ContrastOutput(audio_embeds, text_embeds, scale, as_number(self.logit_bias))
        return ContrastOutput(
            audio_embeds,
            text_embeds,
            logit_scale(self.logit_scale_a),
            audio_mlp=None if audio_embeds is None else self.audio_transform(audio_embeds),
            text_mlp=None if text_embeds is None else self.text_transform(text_embeds),
            logit_scale_t=logit_scale(self.logit_scale_t),
        )


def _normalised(embeds: Tensor) -> Tensor:
    """Rows scaled to length 1, in fp32: in bf16 the lengths would be off by 2e-3.

    A micro batch of nothing but silence gives embeddings of exactly 0 at initialisation; the gradient there is 1 / eps.
    """
    with torch.autocast(embeds.device.type, enabled=False):
        return F.normalize(embeds.to(torch.promote_types(embeds.dtype, torch.float32)), dim=-1, eps=1e-6)


def logit_scale(raw: Tensor) -> Tensor:
    """The factor on cosine similarities: exp of the stored parameter, held in [1, 100].

    The clamp lives here and not in the optimizer step, because ZeRO keeps other copies of the parameter. Beyond a
    bound the gradient passes if a descent step along it leads back inside, and is zero otherwise: a plain clamp would
    leave a parameter that overshot the cap there for ever, a gradient that always passes would let it run away.
    Which way the gradient points is decided on the sum over ranks, as one process with the whole batch would.

    Args:
        raw: (1,), the logarithm, any float dtype.

    Returns:
        (), fp32 or wider.

    Collective in the backward: all ranks must call.
    """
    return _BoundedExp.apply(raw.to(torch.promote_types(raw.dtype, torch.float32)).reshape(()))


class _BoundedExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, raw: Tensor) -> Tensor:
        # The last clamp takes away the rounding error of exp(log(100)).
        scale = raw.clamp(0.0, math.log(MAX_LOGIT_SCALE)).exp().clamp(1.0, MAX_LOGIT_SCALE)
        ctx.save_for_backward(scale, raw > math.log(MAX_LOGIT_SCALE), raw < 0)
        return scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        scale, above, below = ctx.saved_tensors
        whole = all_reduce_sum(gradient)
        leads_back = ~(above | below) | (above & (whole > 0)) | (below & (whole < 0))
        return torch.where(leads_back, gradient * scale, 0)


def build_model(
    *,
    geometry: dict[str, Any] | None,
    pretrained: str | None,
    batch_norm: Policy,
    dropout: float | None,
    seed: int,
    ds_config: dict[str, Any],
    device: torch.device,
    parts: Parts = Parts(),
) -> ClapForContrast:
    """Builds the model on this rank; at ZeRO stage 3 every module is partitioned as soon as it exists.

    From scratch the weights are a function of the seed and the geometry alone: equal on all ranks, for every stage,
    world size and device.

    Args:
        geometry: ClapConfig's keyword arguments as nested dicts (a preset's `model` part); None with `pretrained`.
        pretrained: Directory or hub name of a ClapModel; None with `geometry`.
        batch_norm: local, sync or frozen.
        dropout: Probability for every dropout of both towers; None leaves the configuration's own.
        seed: Of the initial weights.
        ds_config: Resolved DeepSpeed JSON.
        device: Where this rank computes; used at stages 0 to 2.
        parts: What it has beyond ClapModel.

    Returns:
        The model in training mode, fp32 (DeepSpeed casts it), at stage 3 in the training dtype already.

    Raises:
        ConfigError: The geometry is impossible, `pretrained` names nothing, or it has LAION's heads and `parts` a bias.
        CheckpointError: The weights do not fit the configuration beside them.

    Collective: all ranks must call.
    """
    assert (geometry is None) != (pretrained is None)
    directory = None if pretrained is None else resolve_pretrained(pretrained)
    config = clap_config(geometry or {}) if directory is None else read_config(directory)
    if dropout is not None:
        override_dropout(config, dropout)
    bias = take_bias(config)
    with_bias = bias is not None if parts.bias is None else parts.bias
    heads_dropout = None
    if directory is not None and parts.mlp == "auto" and stores_heads(directory):
        heads_dropout = DROPOUT if dropout is None else dropout
        if with_bias:
            raise ConfigError(
                f"objective.loss sigmoid has no form with LAION's MLP heads, which {pretrained} holds: "
                "--objective.mlp off leaves them out, or take --objective.loss softmax"
            )
    if with_bias and directory is None:
        config.logit_scale_init_value = INITIAL_SCALE
    partitioned = ds_config.get("zero_optimization", {}).get("stage", 0) == 3
    with contextlib.ExitStack() as contexts:
        # transformers' initialisation would fail on partitioned parameters, and would draw from the global generator.
        contexts.enter_context(no_init_weights())
        if partitioned:
            import deepspeed

            # Not through transformers' HfDeepSpeedConfig: it needs accelerate, and as long as it lives it partitions
            # every other model that the process loads.
            contexts.enter_context(deepspeed.zero.Init(config_dict_or_path=ds_config))
        model = ClapForContrast._from_config(
            config, dtype=torch.float32, batch_norm=batch_norm, with_bias=with_bias, heads_dropout=heads_dropout
        )
    if directory is None:
        initialise_weights(model, seed=seed)
    else:
        load_pretrained(model, directory)
    fill_bias(model, INITIAL_BIAS if bias is None else bias)
    if not partitioned:
        model.to(device)
    return model.train()
