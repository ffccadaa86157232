"""The two places where the audio tower has to differ from transformers' while it trains on several ranks.

Hugging Face's patch embedding runs its long-clip branch only when the micro batch has a clip longer than 10 s. Under
ZeRO the ranks then differ in which parameters they gather and reduce, and in which order: stages 1 to 3 deadlock, and
adding zero times the unused parameters gives silently wrong gradients at stage 2. Here every rank always runs the
branch, over its long clips or else over one clip whose result is thrown away, so that all ranks build the same graph.

Both classes take the place of transformers' on the same parameters and names (only `__class__` changes).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.clap.modeling_clap import ClapAudioAFFBlock, ClapAudioPatchEmbed

from clap_zero.model.batch_norm import BatchNorm


class FusionBlock(ClapAudioAFFBlock):
    """Attentional feature fusion (Dai et al. 2021) in which some clips may not count in BatchNorm's statistics."""

    def forward(self, hidden_states: Tensor, residual: Tensor, valid: Tensor) -> Tensor:
        """Fuses two feature maps.

        Args:
            hidden_states: (n, c, h, w), of the whole clip.
            residual: (n, c, h, w), of its three chunks.
            valid: (n,) bool, the clips that are really long.

        Returns:
            (n, c, h, w); without meaning where `valid` is False.
        """
        both = hidden_states + residual
        weight = self.sigmoid(_run(self.local_att, both, valid) + _run(self.global_att, both, valid))
        return 2 * hidden_states * weight + 2 * residual * (1 - weight)


def _run(layers: nn.Sequential, x: Tensor, valid: Tensor) -> Tensor:
    """Runs a Sequential whose BatchNorms look at some samples only."""
    for layer in layers:
        x = layer(x, valid) if isinstance(layer, BatchNorm) else layer(x)
    return x


class PatchEmbed(ClapAudioPatchEmbed):
    """Patch embedding whose long-clip branch runs on every rank, always."""

    def forward(self, hidden_states: Tensor, is_longer_idx: Tensor | None = None) -> Tensor:
        """Embeds mel images as patches.

        Args:
            hidden_states: (b, 1 or 4, height, width) mel images; with fusion the whole clip first, then its chunks.
            is_longer_idx: (n,) int64, the rows of clips longer than the model's window; used with fusion only.

        Returns:
            (b, patches, c).
        """
        if not self.enable_fusion:
            return super().forward(hidden_states, is_longer_idx)
        height, width = hidden_states.shape[2:]
        if (height, width) != tuple(self.img_size):
            raise ValueError(f"mel image of {height} x {width}, but the model takes {self.img_size}")
        if hidden_states.shape[1] == 1:
            # Features without chunks (rand_trunc): as for a short clip, whose four channels are the same.
            hidden_states = hidden_states.expand(-1, 4, -1, -1)
        whole = self.proj(hidden_states[:, 0:1])
        assert is_longer_idx is not None, "a fused model is always told which clips are long"
        valid = torch.ones_like(is_longer_idx, dtype=torch.bool)
        if is_longer_idx.numel() == 0:
            is_longer_idx, valid = is_longer_idx.new_zeros(1), valid.new_zeros(1)
        selected = whole.index_select(0, is_longer_idx)
        chunks = self._embed_chunks(hidden_states.index_select(0, is_longer_idx)[:, 1:], width=whole.shape[-1])
        fused = self.fusion_model(selected, chunks, valid)
        fused = torch.where(valid.view(-1, 1, 1, 1), fused, selected)
        patches = whole.index_copy(0, is_longer_idx, fused.to(whole.dtype))
        if self.flatten:
            patches = patches.flatten(2).transpose(1, 2)
        return self.norm(patches)

    def _embed_chunks(self, chunks: Tensor, *, width: int) -> Tensor:
        """Embeds the chunks of long clips, joined along time and padded to the width of the whole clip's patches.

        Args:
            chunks: (n, 3, height, width) mel images.
            width: Patches along time.

        Returns:
            (n, c, patches along frequency, width).
        """
        num_clips, num_chunks, image_height, image_width = chunks.shape
        embedded = self.mel_conv2d(chunks.reshape(num_clips * num_chunks, 1, image_height, image_width))
        _, num_channels, num_rows, num_columns = embedded.shape
        embedded = embedded.view(num_clips, num_chunks, num_channels, num_rows, num_columns)
        joined = embedded.permute(0, 2, 3, 1, 4).contiguous().flatten(3)
        return F.pad(joined, (0, width - joined.shape[-1]))


def replace_patch_embedding(model: nn.Module) -> None:
    """Gives a model's audio tower the classes above, in place: parameters and names stay."""
    for module in model.modules():
        if type(module) is ClapAudioAFFBlock:
            module.__class__ = FusionBlock
        elif type(module) is ClapAudioPatchEmbed:
            module.__class__ = PatchEmbed
