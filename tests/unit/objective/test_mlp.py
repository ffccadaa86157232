"""LAION's two losses against four cross-entropies, and every variant of them against the slow reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clap_zero.objective.config import ObjectiveConfig
from clap_zero.objective.mlp import TwoHeads, mlp_gradients, mlp_objective
from clap_zero.objective.reference import mlp_reference
from tests.unit.objective.cases import VARIANTS, largest_error

NAMES = ("audio", "text", "audio_mlp", "text_mlp", "logit_scale_a", "logit_scale_t")


def heads(
    num_pairs: int = 5,
    *,
    length: float = 1.7,
    scales: tuple[float, float] = (14.0, 9.0),
    dtype: torch.dtype | None = None,
) -> TwoHeads:
    """Rows of length 1 before the heads, and of about `length` after them."""
    random = torch.Generator().manual_seed(0)
    embeds = [torch.randn(num_pairs, 4, generator=random, dtype=torch.float64) for _ in range(4)]
    lengths = [length * (1 + torch.rand(num_pairs, 1, generator=random, dtype=torch.float64)) for _ in range(2)]
    rows = [F.normalize(embed, dim=-1) for embed in embeds]
    numbers = [torch.tensor(s, dtype=torch.float64) for s in scales]
    parts = [*rows[:2], rows[2] * lengths[0], rows[3] * lengths[1], *numbers]
    return TwoHeads(*(t.to(dtype or torch.float64).requires_grad_() for t in parts))


def four_cross_entropies(h: TwoHeads) -> Tensor:
    """As the published training code writes it, with one matrix for each direction and head."""
    labels = torch.arange(5)
    matrices = (
        h.logit_scale_a * h.audio @ h.text_mlp.t(),
        h.logit_scale_a * h.text_mlp @ h.audio.t(),
        h.logit_scale_t * h.audio_mlp @ h.text.t(),
        h.logit_scale_t * h.text @ h.audio_mlp.t(),
    )
    return torch.stack([F.cross_entropy(m, labels) for m in matrices]).mean()


def test_equals_four_cross_entropies() -> None:
    h = heads()
    inputs = [getattr(h, name) for name in NAMES]
    reference = four_cross_entropies(h)
    expected = [reference.detach(), *torch.autograd.grad(reference, inputs)]
    share, gradients, _ = mlp_gradients(h, config=ObjectiveConfig(positives="off"), chunk=2)
    assert largest_error([share, *(getattr(gradients, name) for name in NAMES)], expected) < 1e-11
    share, figures = mlp_objective(h, config=ObjectiveConfig(positives="off"), chunk=2)
    positive = (h.audio * h.text_mlp + h.audio_mlp * h.text).detach().sum(1).mean().item() / 2
    assert largest_error([share.detach(), *torch.autograd.grad(share, inputs)], expected) < 1e-11
    assert figures.positive_similarity == pytest.approx(positive)


SOFTMAX = {name: config for name, config in VARIANTS.items() if not config.uses_bias}
variants = pytest.mark.parametrize("config", SOFTMAX.values(), ids=SOFTMAX.keys())


QUICK = ("softmax-soft", "smoothing-mask", "hard")


@pytest.mark.parametrize(
    "config", [pytest.param(c, id=n, marks=() if n in QUICK else pytest.mark.long) for n, c in SOFTMAX.items()]
)
def test_gradcheck(config: ObjectiveConfig) -> None:
    h, groups = heads(), torch.tensor([0, 1, 2, 1, 3])
    inputs = tuple(getattr(h, name) for name in NAMES)
    settings = {"config": config, "groups": groups, "chunk": 2}
    assert torch.autograd.gradcheck(lambda *t: mlp_objective(TwoHeads(*t), **settings)[0], inputs)


@variants
@pytest.mark.parametrize("groups", [[0, 1, 2, 0, 3, 4, 4], [5] * 7, [0]], ids=["some", "all equal", "one pair"])
@pytest.mark.parametrize("scales", [(14.0, 9.0), (100.0, 100.0)])
def test_every_variant(config: ObjectiveConfig, groups: list[int], scales: tuple[float, float]) -> None:
    """Uneven tail of a block of three, heads that give rows of length 1.7 to 3.4, both scales at their cap."""
    h, same = heads(len(groups), scales=scales), torch.tensor(groups)
    inputs = [getattr(h, name) for name in NAMES]
    reference = mlp_reference(h, same, config=config)
    expected = [reference.detach(), *torch.autograd.grad(reference, inputs)]
    share, gradients, _ = mlp_gradients(h, config=config, groups=same, chunk=3)
    assert largest_error([share, *(getattr(gradients, name) for name in NAMES)], expected) < 1e-10


def test_the_second_head_and_scale_are_on_their_own() -> None:
    """With the parts exchanged another loss comes out: neither head nor scale is taken for the other's."""
    h = heads()
    loss = mlp_reference(h, config=ObjectiveConfig(positives="off")).item()
    others = (
        TwoHeads(h.audio, h.text, h.audio_mlp, h.text_mlp, h.logit_scale_t, h.logit_scale_a),
        TwoHeads(h.audio, h.text, h.text_mlp, h.audio_mlp, h.logit_scale_a, h.logit_scale_t),
    )
    assert all(
        abs(mlp_reference(other, config=ObjectiveConfig(positives="off")).item() - loss) > 0.1 for other in others
    )


def test_figures_of_long_rows() -> None:
    """Products beyond 1 and below -1 are shown as they are; equal rows are ties, however long they are."""
    h = heads(num_pairs=6, length=3.0)
    _, figures = mlp_objective(h, config=ObjectiveConfig(positives="off"))
    hardest = []
    for one, other in ((h.audio, h.text_mlp), (h.audio_mlp, h.text)):
        products = (one @ other.t()).fill_diagonal_(-torch.inf)
        hardest += [products.amax(0).mean(), products.amax(1).mean()]
    assert figures.hardest_negative_similarity == pytest.approx(torch.stack(hardest).mean().item())
    one = heads(num_pairs=1, length=1000.0, dtype=torch.float32)
    embeds = [getattr(one, name).detach().repeat(33, 1) for name in NAMES[:4]]
    scale = torch.tensor(100.0)
    _, figures = mlp_objective(TwoHeads(*embeds, scale, scale), config=ObjectiveConfig(positives="off"), chunk=16)
    assert figures.top1_audio_to_text == 0 == figures.top1_text_to_audio
