"""Retrieval figures against hand counts and a slow, obvious definition."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from clap_zero.errors import DataError, DivergedError
from clap_zero.evaluation import retrieval
from clap_zero.evaluation.retrieval import retrieval_metrics


def figures(direction: str, ranks: list[list[float]]) -> dict[str, float]:
    """ranks: of each query, the sorted ranks of its relevant items."""
    found = {f"{direction}.R@{k}": sum(row[0] <= k for row in ranks) / len(ranks) for k in (1, 5, 10)}
    precisions = [sum(i / r for i, r in enumerate(row, 1) if r <= 10) / len(row) for row in ranks]
    found[f"{direction}.mAP@10"] = sum(precisions) / len(ranks)
    found[f"{direction}.median_rank"] = statistics.median(row[0] for row in ranks)
    return found


def obvious(audio: Tensor, text: Tensor, owners: list[int]) -> dict[str, float]:
    """One query after the other, one score after the other."""
    scores = (audio.double() @ text.double().T).tolist()

    def rank(own: float, others: list[float]) -> float:
        return 1 + sum(s > own + 1e-6 for s in others) + sum(abs(s - own) <= 1e-6 for s in others) / 2

    to_audio = []
    for caption, owner in enumerate(owners):
        column = [scores[clip][caption] for clip in range(len(audio))]
        to_audio.append([rank(column[owner], column[:owner] + column[owner + 1 :])])
    to_text = []
    for clip in range(len(audio)):
        foreign = [s for s, owner in zip(scores[clip], owners, strict=True) if owner != clip]
        own = sorted((s for s, owner in zip(scores[clip], owners, strict=True) if owner == clip), reverse=True)
        to_text.append([rank(s, foreign) + place for place, s in enumerate(own)])
    return figures("audio_to_text", to_text) | figures("text_to_audio", to_audio)


def unit(*shape: int, seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def test_ten_clips_with_five_captions_of_known_ranks() -> None:
    """Scores are written down directly: clip i is the i-th unit vector, so score (i, c) is component i of caption c."""
    audio = torch.eye(50)[:10]
    text = torch.zeros(50, 50)
    owners = torch.arange(10).repeat_interleave(5)
    # Caption 5 i + j of clip i scores 0.9 - 0.1 j with its own clip and 0.01 with no other: ranks 1 to 5 of 50.
    for caption, owner in enumerate(owners.tolist()):
        text[caption, owner] = 0.9 - 0.1 * (caption % 5)
    # Three captions of clip 9 score higher with clip 0 than any of its own, and higher there than with clip 9.
    text[45:48, 0] = 0.95
    metrics = retrieval_metrics(audio, text, owners)
    # Clip 0: its captions come after those three, ranks 4 to 8. All others: ranks 1 to 5.
    assert metrics["audio_to_text.R@1"] == pytest.approx(9 / 10)
    assert metrics["audio_to_text.R@5"] == metrics["audio_to_text.R@10"] == 1
    clip_0 = (1 / 4 + 2 / 5 + 3 / 6 + 4 / 7 + 5 / 8) / 5
    assert metrics["audio_to_text.mAP@10"] == pytest.approx((9 + clip_0) / 10)
    assert metrics["audio_to_text.median_rank"] == 1
    # Captions 45 to 47 find clip 0 first and their own second; the other 47 find their own.
    assert metrics["text_to_audio.R@1"] == pytest.approx(47 / 50)
    assert metrics["text_to_audio.mAP@10"] == pytest.approx((47 + 3 / 2) / 50)


def test_map_has_no_more_than_the_whole_and_divides_by_all_captions() -> None:
    """One caption at rank 1, four beyond rank 10: 1/5, not 1."""
    audio = torch.eye(30)[:2]
    owners = torch.tensor([0] * 5 + [1] * 12)
    text = torch.zeros(17, 30)
    text[0, 0], text[1:5, 0], text[5:, 0] = 0.9, 0.1, 0.5
    text[5:, 1] = torch.linspace(0.4, 0.6, 12)
    metrics = retrieval_metrics(audio, text, owners)
    assert metrics["audio_to_text.mAP@10"] == pytest.approx((1 / 5 + 10 / 12) / 2)


@pytest.mark.parametrize("captions", [1, 5])
@pytest.mark.parametrize("clips", [11, 100])
def test_constant_embeddings_are_in_the_middle(clips: int, captions: int) -> None:
    one = unit(1, 512)
    owners = torch.arange(clips).repeat_interleave(captions)
    metrics = retrieval_metrics(one.repeat(clips, 1), one.repeat(clips * captions, 1), owners)
    assert metrics["text_to_audio.median_rank"] == (clips + 1) / 2
    assert metrics["audio_to_text.median_rank"] == 1 + (clips - 1) * captions / 2
    assert metrics["text_to_audio.R@1"] == metrics["audio_to_text.R@1"] == metrics["text_to_audio.R@5"] == 0


def test_equal_captions_of_different_clips_share_the_middle() -> None:
    """Two clips with the same text: a perfect model has rank 1.5 for both, whichever comes first in the data."""
    audio = torch.eye(4)
    text = torch.eye(4)[[0, 0, 2, 3]].clone()
    text[1] += 1e-8  # the same text, embedded in another batch
    audio[1] = audio[0]
    metrics = retrieval_metrics(audio, text, torch.arange(4))
    assert metrics["audio_to_text.R@1"] == metrics["text_to_audio.R@1"] == 0.5
    assert metrics["audio_to_text.median_rank"] == 1.25


def test_a_clip_with_the_same_caption_twice_is_found_at_once() -> None:
    metrics = retrieval_metrics(torch.eye(3), torch.eye(3)[[0, 0, 1, 2]], torch.tensor([0, 0, 1, 2]))
    assert metrics["audio_to_text.R@1"] == metrics["audio_to_text.mAP@10"] == 1


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_equal_to_the_obvious_definition(data: st.DataObject) -> None:
    clips = data.draw(st.integers(1, 12))
    owners = list(range(clips)) + data.draw(st.lists(st.integers(0, clips - 1), max_size=30))
    order = data.draw(st.permutations(owners))
    seed = data.draw(st.integers(0, 10_000))
    levels = data.draw(st.sampled_from([2, 4, 1000]))  # few levels: many ties
    audio = (unit(clips, 3, seed=seed) * levels).round() / levels
    text = (unit(len(order), 3, seed=seed + 1) * levels).round() / levels
    block = data.draw(st.sampled_from([1, 50, 10**6]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval, "MAX_BLOCK_ELEMENTS", block)
        metrics = retrieval_metrics(audio, text, torch.tensor(order))
    expected = obvious(audio, text, list(order))
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert math.isclose(metrics[name], value, rel_tol=1e-6), (name, metrics[name], value)


def test_the_order_of_the_data_does_not_matter() -> None:
    audio, text, owners = unit(20, 8), unit(40, 8, seed=1), torch.arange(20).repeat(2)
    shuffle = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    assert retrieval_metrics(audio, text, owners) == retrieval_metrics(audio, text[shuffle], owners[shuffle])


def test_not_finite_embeddings_are_not_perfect() -> None:
    audio = unit(5, 4)
    audio[3, 1] = torch.nan
    with pytest.raises(DivergedError, match="1 of 5 audio embeddings"):
        retrieval_metrics(audio, unit(5, 4), torch.arange(5))


def test_nothing_to_rank_and_a_clip_without_caption_are_errors() -> None:
    with pytest.raises(DataError, match="0 clips"):
        retrieval_metrics(torch.empty(0, 4), torch.empty(0, 4), torch.empty(0, dtype=torch.int64))
    with pytest.raises(DataError, match="clip 1 of 3 has no caption"):
        retrieval_metrics(unit(3, 4), unit(2, 4), torch.tensor([0, 2]))


def test_thirty_thousand_pairs_in_bounded_memory() -> None:
    """The matrix would have 3.6 GB; the process may use 1 GB more than it has after importing torch."""
    program = textwrap.dedent("""
        import resource, torch
        from torch.nn import functional as F
        from clap_zero.evaluation.retrieval import retrieval_metrics
        torch.manual_seed(0)
        audio = F.normalize(torch.randn(30_000, 16), dim=1)
        text = F.normalize(audio + 0.1 * torch.randn_like(audio), dim=1)
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        metrics = retrieval_metrics(audio, text, torch.arange(30_000))
        assert 0.01 < metrics["audio_to_text.R@1"] < 1, metrics
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)
    """)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    kilobytes = int(result.stdout)
    assert kilobytes < 1_000_000, kilobytes
