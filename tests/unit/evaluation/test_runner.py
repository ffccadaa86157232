"""What evaluation makes of the batches of a model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clap_zero.audio.clips import ClipBatch
from clap_zero.data.batch import EvalBatch
from clap_zero.data.captions import caption_id
from clap_zero.evaluation.runner import evaluate
from clap_zero.model.clap import ContrastOutput

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
