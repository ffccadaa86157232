"""Captions are compared where equal ones meet and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from clap_zero.objective import blocks
from clap_zero.objective.chunked import objective_gradients
from clap_zero.objective.config import ObjectiveConfig
from clap_zero.objective.sharing import find_sharing
from tests.unit.objective.cases import VARIANTS, chunked, flat, largest_error, make_case, value_and_gradients


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Top left corners of the blocks in which groups were compared."""
    corners: list[tuple[int, int]] = []
    original = blocks._block

    def block(rows: Any, columns: Any, place: tuple[slice, slice], *rest: Any, compared: bool) -> Any:
        corners.extend([(place[0].start, place[1].start)] if compared else [])
        return original(rows, columns, place, *rest, compared=compared)

    monkeypatch.setattr(blocks, "_block", block)
    return corners


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("positives", ["mask", "soft"])
def test_without_equal_captions_no_cell_is_compared(loss: str, positives: str, compared: list[tuple[int, int]]) -> None:
    """Every pair its own group: the plain objective, bit by bit, at its cost."""
    random = torch.Generator().manual_seed(0)
    audio, text = (torch.nn.functional.normalize(torch.randn(40, 8, generator=random), dim=-1) for _ in range(2))
    bias = torch.tensor(-3.0) if loss == "sigmoid" else None
    values = {"logit_scale": torch.tensor(20.0), "logit_bias": bias, "chunk": 16}
    plain = objective_gradients(audio, text, config=ObjectiveConfig(loss=loss, positives="off"), **values)
    config = ObjectiveConfig(loss=loss, positives=positives)
    grouped = objective_gradients(audio, text, groups=torch.arange(40).flip(0), config=config, **values)
    assert not compared
    assert torch.equal(grouped.loss, plain.loss) and torch.equal(grouped.audio, plain.audio)
    assert all(torch.equal(one, other) for one, other in zip(grouped.figures, plain.figures, strict=True))


@pytest.mark.parametrize("name", ["softmax-soft", "softmax-mask", "smoothing-soft", "smoothing-mask", "sigmoid-soft"])
@pytest.mark.parametrize("scale", [10.0, 100.0])
def test_only_blocks_where_equal_captions_meet_are_compared(
    name: str, scale: float, compared: list[tuple[int, int]]
) -> None:
    """20 pairs in blocks of 6: two in the last block share a caption, and one in the first with one in the third."""
    groups = list(range(20))
    groups[14], groups[19] = groups[1], groups[18]
    case = make_case(groups, scale=scale)
    ours = flat(chunked(case, VARIANTS[name], chunk=6))
    assert set(compared) == {(0, 12), (12, 0), (18, 18)}
    assert largest_error(ours, value_and_gradients(case, VARIANTS[name])) < 1e-10


@pytest.mark.parametrize("seed", range(4))
def test_against_loops(seed: int) -> None:
    """The second of three ranks, uneven chunks."""
    groups = torch.randint(0, 40, (30,), generator=torch.Generator().manual_seed(seed))
    found = find_sharing(groups, own=slice(10, 20), chunk=4)
    assert found is not None
    assert found.sizes.tolist() == [groups.tolist().count(group) for group in groups.tolist()]
    for a, row in enumerate(found.meets):
        for b, meets in enumerate(row):
            down, across = range(10 + 4 * a, min(20, 14 + 4 * a)), range(4 * b, min(30, 4 * b + 4))
            assert meets == any(i != j and groups[i] == groups[j] for i in down for j in across)
    assert (len(found.meets), len(found.meets[0])) == (3, 8)


def test_a_rank_without_a_shared_pair() -> None:
    found = find_sharing(torch.tensor([7, 7, 1, 2]), own=slice(2, 4), chunk=2)
    assert found is not None and found.meets == [[False, False]]
    assert find_sharing(torch.tensor([7, 8]), own=slice(0, 2), chunk=1) is None
