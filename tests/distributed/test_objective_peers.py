"""Gradients of other trainers' losses: equal to ours where they are right, and by how much they are off elsewhere.

Their code is not part of this repository. CLAP_ZERO_PEERS names a directory that holds clones of open_clip, GradCache
and Inf-CLIP (`benchmarks/objective_peers.py` says from where); without it only our own line is compared.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import objective_peers as peers

DIRECTORY = Path(os.environ.get("CLAP_ZERO_PEERS", ""))


def compare(folder: str, setting: str = "", *, world: int, common: float = 0.0, scale: float = 20.0):
    if folder and not ("CLAP_ZERO_PEERS" in os.environ and (DIRECTORY / folder).is_dir()):
        pytest.skip(f"no clone of {folder}: set CLAP_ZERO_PEERS to the directory that holds it")
    [index] = [
        i for i, p in enumerate(peers.PEERS) if p.folder == folder and " ".join(p.setting.split()).startswith(setting)
    ]
    result = peers.compare(index, DIRECTORY.resolve(), world=world, common=common, scale=scale)
    if isinstance(result, str):
        pytest.skip(f"{folder} {result}")
    return result


@pytest.mark.parametrize("world", [2, 4])
def test_ours(world: int) -> None:
    """Where every logit is near 98, dense float32 on one process is off by 1.5e-5 too."""
    for scale, common, limit in ((20.0, 0.0, 1e-6), (100.0, 8.0, 5e-5)):
        result = compare("", world=world, scale=scale, common=common)
        assert result.error < limit
        assert result.scale == pytest.approx(1, abs=limit)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("local_loss", ["off", "on"])
def test_open_clip_with_gradient_through_the_gather_is_right(local_loss: str, world: int) -> None:
    result = compare("open_clip", f"local_loss {local_loss}, gather_with_grad on", world=world)
    assert result.error < 1e-5
    assert result.scale == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("world", [2, 4])
def test_open_clip_by_default_is_one_over_world(world: int) -> None:
    """The towers' gradient is too small by the number of ranks, that of the logit scale is right."""
    result = compare("open_clip", "local_loss off, gather_with_grad off", world=world)
    assert result.loss == pytest.approx(1, abs=1e-5)
    assert result.factor == pytest.approx(1 / world, abs=1e-5)
    assert result.cosine == pytest.approx(1, abs=1e-5)
    assert result.scale == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("world", [2, 4])
def test_open_clip_with_local_loss_alone_points_elsewhere(world: int) -> None:
    """Negatives of other ranks are not pushed away: no factor makes it right."""
    result = compare("open_clip", "local_loss on, gather_with_grad off", world=world)
    assert result.loss == pytest.approx(1, abs=1e-5)
    assert result.error > 0.4
    assert result.cosine < 0.999


@pytest.mark.parametrize("world", [2, 4])
def test_gradcache_is_one_over_world(world: int) -> None:
    result = compare("GradCache", world=world)
    assert result.factor == pytest.approx(1 / world, abs=1e-5)
    assert result.scale == pytest.approx(1 / world, abs=1e-5)


def test_the_caching_of_gradcache_is_right() -> None:
    if not (DIRECTORY / "GradCache").is_dir() or "CLAP_ZERO_PEERS" not in os.environ:
        pytest.skip("no clone of GradCache: set CLAP_ZERO_PEERS to the directory that holds it")
    error = peers.caching_error(DIRECTORY.resolve())
    assert not isinstance(error, str), error
    assert error < 1e-5


@pytest.mark.parametrize("world", [2, 4])
def test_inf_cl_has_the_scale_times_world(world: int) -> None:
    """Embeddings are right; its own sum over ranks of the scale's gradient comes on top of the average."""
    result = compare("Inf-CLIP", world=world)
    assert result.error < 1e-5
    assert result.scale == pytest.approx(world, rel=1e-3)


def test_inf_cl_overflows_where_all_cosines_are_high() -> None:
    """Its ring sums exponentials that are not shifted: exp(98) is no float32."""
    result = compare("Inf-CLIP", world=2, scale=100.0, common=8.0)
    assert not result.error < 1
