"""Top-1 and similarities of a batch, counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from clap_zero.objective.config import ObjectiveConfig
from clap_zero.objective.figures import mean_figures
from tests.unit.objective.cases import VARIANTS, chunked, make_case

variants = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())


@variants
@pytest.mark.parametrize("chunk", [3, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_against_loops(config: ObjectiveConfig, chunk: int, dtype: torch.dtype) -> None:
    groups = [0, 1, 2, 0, 3, 4, 4, 5, 6, 0, 7]
    case = make_case(groups, width=4, seed=1)
    case = case._replace(audio=F.normalize(case.audio + 1.5 * case.text, dim=-1))
    cosines = case.audio @ case.text.t()
    hits, hardest = [], []
    for matrix in (cosines, cosines.t()):
        for i, row in enumerate(matrix):
            negatives = [x for j, x in enumerate(row) if j != i and not (config.uses_groups and groups[j] == groups[i])]
            hits.append(float(row[i] > max(negatives) + 1e-9))
            hardest.append(float(max(negatives)))
    figures = chunked(case.to(dtype), config, chunk=chunk).figures
    n = len(groups)
    assert 0 < sum(hits[:n]) < n, "the case tells nothing"
    assert figures.top1_audio_to_text.item() == pytest.approx(sum(hits[:n]) / n)
    assert figures.top1_text_to_audio.item() == pytest.approx(sum(hits[n:]) / n)
    assert figures.positive_similarity.item() == pytest.approx(cosines.diagonal().mean().item(), rel=1e-5)
    assert figures.hardest_negative_similarity.item() == pytest.approx(sum(hardest) / (2 * n), rel=1e-5)


@pytest.mark.parametrize(("num_pairs", "width"), [(17, 7), (37, 64), (129, 7)])
def test_equal_embeddings_are_no_hits(num_pairs: int, width: int) -> None:
    """A collapsed model guesses: products that differ in the last bit must not make rows right."""
    random = torch.Generator().manual_seed(0)
    audio, text = (F.normalize(torch.randn(1, width, generator=random), dim=-1).repeat(num_pairs, 1) for _ in range(2))
    case = make_case(range(num_pairs)).to(torch.float32)
    case = case._replace(audio=audio, text=text, scale=torch.tensor(100.0))
    figures = chunked(case, ObjectiveConfig(positives="off"), chunk=16).figures
    assert figures.top1_audio_to_text == 0
    assert figures.top1_text_to_audio == 0


def test_a_shared_caption_is_a_tie_unless_groups_are_known() -> None:
    case = make_case([0, 1, 0])
    case = case._replace(audio=case.text.clone())
    assert chunked(case, ObjectiveConfig(positives="off")).figures.top1_audio_to_text.item() == pytest.approx(1 / 3)
    for positives in ("mask", "soft"):
        assert chunked(case, ObjectiveConfig(positives=positives)).figures.top1_audio_to_text == 1


@variants
def test_without_a_negative(config: ObjectiveConfig) -> None:
    figures = chunked(make_case([0]), config).figures
    assert figures.hardest_negative_similarity.isnan()
    assert figures.top1_audio_to_text == 1
    assert all(figure.isfinite() for figure in figures[:-1])


def test_means_leave_out_what_is_lacking_and_nothing_else() -> None:
    alone, several = (
        chunked(make_case(groups), ObjectiveConfig(positives="mask")).figures for groups in ([0], range(5))
    )
    mean = mean_figures([alone, several])
    assert mean.hardest_negative_similarity == several.hardest_negative_similarity
    assert mean.top1_audio_to_text == (1 + several.top1_audio_to_text) / 2
    diverged = several._replace(loss_audio_to_text=torch.tensor(torch.nan))
    assert mean_figures([several, diverged]).loss_audio_to_text.isnan()


def test_the_loss_is_the_mean_of_the_directions() -> None:
    result = chunked(make_case(range(9)), ObjectiveConfig(positives="off"))
    mean = (result.figures.loss_audio_to_text + result.figures.loss_text_to_audio) / 2
    assert result.loss.item() == pytest.approx(mean.item(), rel=1e-12)
    assert abs(result.figures.loss_audio_to_text - result.figures.loss_text_to_audio) > 1e-3
