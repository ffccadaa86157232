"""Which optimizer states can be converted to other ranks and stages, and what is said of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clap_zero.checkpoint.files import checksum_file
from clap_zero.checkpoint.layout import why_fixed
from clap_zero.checkpoint.state import Layout, conversion
from clap_zero.checkpoint.store import CheckpointStore
from clap_zero.errors import CheckpointError

TWO, FOUR = Layout(2, 2, "bf16"), Layout(4, 3, "bf16")


def checkpoint(root: Path, **about: Any) -> Path:
    store = CheckpointStore(root / "run" / "checkpoints")
    temporary = store.begin(1)
    (temporary / "file").write_text("x")
    return store.commit(temporary, 1, {"file": checksum_file(temporary / "file")}, about=TWO._asdict() | about)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, None),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, None),
        ({"optimizer": {"type": "AdamW"}, "bf16": {"enabled": True}}, None),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "offload_optimizer is on NVMe"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "offload_param is on NVMe"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "over CPU and GPU"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "keeps a second partition"),
        ({"optimizer": {"type": "Muon"}}, "Muon works on whole matrices"),
        ({"optimizer": {"type": "Adafactor"}}, "Adafactor works on whole matrices"),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, "leaves no fp32 masters"),
    ],
)
def test_what_stays_with_its_ranks(config: dict[str, Any], reason: str | None) -> None:
    found = why_fixed(config)
    assert found is None if reason is None else reason in str(found)


def test_the_same_layout_is_not_converted_and_another_is(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, fixed_layout=None)
    assert conversion(path, TWO, config={}) is None
    for here in (FOUR, TWO._replace(world_size=1), TWO._replace(stage=0), TWO._replace(precision="fp32")):
        assert conversion(path, here, config={}) == TWO
    assert str(TWO._replace(world_size=1)) == "1 rank, ZeRO stage 2, bf16"


@pytest.mark.parametrize(
    ("about", "config", "reason"),
    [
        ({"fixed_layout": "Muon works on whole matrices"}, {}, "Muon works"),
        ({"fixed_layout": None}, {"optimizer": {"type": "muon"}}, "muon works"),
        ({}, {}, "it was saved by an earlier version"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_the_way_out(
    tmp_path: Path, about: dict[str, Any], config: dict[str, Any], reason: str
) -> None:
    path = checkpoint(tmp_path, **about)
    assert conversion(path, TWO, config=config) is None
    with pytest.raises(CheckpointError) as error:
        conversion(path, FOUR, config=config)
    assert "(2 ranks, ZeRO stage 2, bf16 there; 4 ranks, ZeRO stage 3, bf16 here)" in str(error.value)
    assert reason in str(error.value) and "\n" not in str(error.value)
    assert f"`clap-zero export {tmp_path / 'run'} DIR`" in str(error.value)
