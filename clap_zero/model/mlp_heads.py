"""LAION-CLAP's extra heads: a perceptron on each side's embeddings, which its MLP loss compares with the other side.

LAION names them `audio_transform` and `text_transform`. Hugging Face's ClapModel has no place for them, and its
conversion from LAION's checkpoints leaves them out: here they stand in a file of their own beside the weights, so that
`ClapModel.from_pretrained` loads the same directory without a word. They are found among the weights, too.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import torch
from torch import Tensor, nn

from clap_zero.errors import CheckpointError

FILE = "mlp_heads.safetensors"
MODULES = ("audio_transform", "text_transform")
DROPOUT = 0.1
"""LAION's, where `model.dropout` says nothing else."""

PARAMETERS = tuple(
    f"{module}.sequential.{layer}.{kind}" for module in MODULES for layer in (0, 3) for kind in ("weight", "bias")
)
"""Their names in LAION's checkpoints."""

_CONVERTED = re.compile(rf"({'|'.join(MODULES)})\.layers\.([01])\.linear\.(weight|bias)")


class MlpHead(nn.Module):
    """Two linear layers with a ReLU between them; the place of each in `sequential` is LAION's."""

    def __init__(self, width: int, *, dropout: float) -> None:
        """Args:
        width: Of the embeddings, in and out.
        dropout: Probability between the layers.
        """
        super().__init__()
        layers = (nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, width))
        self.sequential = nn.Sequential(*layers)

    def forward(self, embeds: Tensor) -> Tensor:
        """Args:
            embeds: (b, width) L2-normalised, fp32 or wider.

        Returns:
            (b, width) fp32 or wider, of any length: LAION does not normalise it.
        """
        weight = self.sequential[0].weight
        assert isinstance(weight, Tensor)
        return self.sequential(embeds.to(weight.dtype)).to(torch.promote_types(embeds.dtype, torch.float32))


def laions_name(name: str) -> str:
    """The name of a head's parameter as LAION spells it; Hugging Face's conversion counts linear layers only."""
    found = _CONVERTED.fullmatch(name)
    return name if found is None else f"{found[1]}.sequential.{3 * int(found[2])}.{found[3]}"


def is_of_a_head(name: str) -> bool:
    """Whether a parameter belongs to one of the heads, by its name."""
    return name.partition(".")[0] in MODULES


def holds_heads(names: Collection[str], *, where: object) -> bool:
    """Whether weights have the heads.

    Args:
        names: Of all tensors.
        where: What holds them, for the error.

    Raises:
        CheckpointError: They have a part of them.
    """
    present = {name for name in names if is_of_a_head(name)}
    if not present:
        return False
    missing = [name for name in PARAMETERS if name not in present]
    if missing:
        raise CheckpointError(
            f"{where} holds a part of LAION's MLP heads ({min(present)}...), but not {', '.join(missing)}: complete "
            "them, or leave them out with --objective.mlp off"
        )
    return True
