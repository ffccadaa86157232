"""What evaluation makes of the batches of a model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from clap_zero.audio.clips import ClipBatch
from clap_zero.data.batch import EvalBatch
from clap_zero.data.captions import caption_id
from clap_zero.evaluation.runner import evaluate
from clap_zero.model.clap import ContrastOutput
from clap_zero.testing import run_distributed

CAPTIONS = ["rain", "rain", "wind", "a dog"]
WORDS = ["rain", "wind", "a dog"]


class Coarse(nn.Module):
    """Finds everything, but a text's embedding differs from batch to batch, as it does in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(
        self, *, input_features: Tensor, is_longer: Tensor, input_ids: Tensor, attention_mask: Tensor
    ) -> ContrastOutput:
        self.calls += 1
        text = torch.eye(4)[input_ids[:, 0]]
        text[:, 3] = 0.01 * (-1) ** self.calls * self.calls
        audio = torch.eye(4)[input_features.long()]
        audio[:, 3] = 0.1
        return ContrastOutput(F.normalize(audio, dim=1), F.normalize(text, dim=1), torch.tensor(1.0))


def batches() -> list[EvalBatch]:
    """One clip and its caption each; the features of a clip are the number of its word."""
    made = []
    for number, caption in enumerate(CAPTIONS):
        word = torch.tensor([WORDS.index(caption)])
        one = torch.tensor([number])
        yes = torch.tensor([True])
        made.append(
            EvalBatch(
                clips=ClipBatch(word, torch.tensor([1]), torch.zeros(1, 3)),
                clip_ids=one,
                valid=yes,
                input_ids=word[:, None],
                attention_mask=torch.ones(1, 1),
                caption_clip_ids=one,
                caption_valid=yes,
                caption_ids=torch.tensor([caption_id(caption)]),
                keys=[str(number)],
                captions=[caption],
            )
        )
    return made


@pytest.mark.parametrize("backwards", [False, True])
def test_equal_captions_tie_whatever_batch_they_were_in(backwards: bool) -> None:
    given = batches()[::-1] if backwards else batches()
    result = evaluate(Coarse(), given, lambda clips: (clips.samples, None), device=torch.device("cpu"))  # type: ignore
    assert (result.num_clips, result.num_captions) == (4, 4)
    # Both clips of rain find their captions at 1.5, the others at 1.
    assert result.metrics["audio_to_text.R@1"] == 0.5
    assert result.metrics["audio_to_text.median_rank"] == 1.25


class Sizes(nn.Module):
    """Remembers how many clips and captions it was given at once; a text's embedding is its number."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def forward(
        self,
        *,
        input_ids: Tensor,
        attention_mask: Tensor,
        input_features: Tensor | None = None,
        is_longer: Tensor | None = None,
    ) -> ContrastOutput:
        self.seen.append((0 if input_features is None else len(input_features), len(input_ids)))
        audio = None if input_features is None else torch.eye(2)[input_features.long()]
        return ContrastOutput(audio, torch.eye(2)[input_ids[:, 0]], torch.tensor(1.0))


def test_any_number_of_captions_takes_bounded_memory() -> None:
    owners = torch.tensor([0] * 49 + [1])
    batch = EvalBatch(
        clips=ClipBatch(torch.tensor([0, 1]), torch.tensor([1, 1]), torch.zeros(2, 3)),
        clip_ids=torch.tensor([0, 1]),
        valid=torch.tensor([True, True]),
        input_ids=owners[:, None],
        attention_mask=torch.ones(50, 1),
        caption_clip_ids=owners,
        caption_valid=torch.ones(50, dtype=torch.bool),
        caption_ids=torch.arange(50),
        keys=["0", "1"],
        captions=[str(number) for number in range(50)],
    )
    model = Sizes()
    result = evaluate(model, [batch], lambda clips: (clips.samples, None), device=torch.device("cpu"))  # type: ignore
    assert model.seen == [(2, 16), (0, 16), (0, 16), (0, 2)]
    assert (result.num_clips, result.num_captions) == (2, 50)
    # Each clip's first caption is among its own: all 50 stayed in their order.
    assert result.metrics["text_to_audio.R@1"] == 1.0


def passes_on_rank() -> tuple[int, int]:
    """Ranks whose clips have unequally many captions: how many forward passes this one made, and captions in all."""
    rank = dist.get_rank()
    num = 40 if rank == 0 else 3
    batch = EvalBatch(
        clips=ClipBatch(torch.tensor([rank]), torch.tensor([1]), torch.zeros(1, 3)),
        clip_ids=torch.tensor([rank]),
        valid=torch.tensor([True]),
        input_ids=torch.full((num, 1), rank),
        attention_mask=torch.ones(num, 1),
        caption_clip_ids=torch.full((num,), rank),
        caption_valid=torch.ones(num, dtype=torch.bool),
        caption_ids=torch.arange(num) + 100 * rank,
        keys=[str(rank)],
        captions=[""] * num,
    )
    model = Sizes()
    result = evaluate(model, [batch], lambda clips: (clips.samples, None), device=torch.device("cpu"))  # type: ignore
    assert result.metrics["text_to_audio.R@1"] == 1.0
    return len(model.seen), result.num_captions


def test_ranks_make_equally_many_forward_passes() -> None:
    """At ZeRO stage 3 a rank that made fewer would leave the others waiting for its weights."""
    assert run_distributed(passes_on_rank, 2) == [(5, 43), (5, 43)]
