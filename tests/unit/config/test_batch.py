"""micro x accumulation x world = global, whoever gives which of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clap_zero.audio.clips import FeatureConfig
from clap_zero.config.batch import (
    FIXED_BYTES,
    MEL_BYTES,
    MIN_PAIRS,
    PROCESS_BYTES,
    Batch,
    activation_bytes,
    fill_batch,
    held_bytes,
    largest_micro_batch,
)
from clap_zero.config.deepspeed import Machine, resolve
from clap_zero.config.load import parse_command_line
from clap_zero.config.preset import Preset, fuses, load_preset
from clap_zero.config.schema import PRESETS
from clap_zero.errors import ConfigError
from clap_zero.planning.memory import estimate_memory


def fill(
    given: Batch, *, world: int = 2, target: int = 32, most: int | None = None, samples: int = 0
) -> tuple[Batch, list[str]]:
    return fill_batch(given, world_size=world, target=target, largest_micro=most, num_samples=samples)


@pytest.mark.parametrize(
    ("numbers", "world", "expected"),
    [
        ((4, 2, None), 2, (4, 2, 16)),
        ((4, None, 32), 2, (4, 4, 32)),
        ((None, 2, 32), 2, (8, 2, 32)),
        ((4, 2, 16), 2, (4, 2, 16)),
        ((None, None, 32), 2, (16, 1, 32)),
        ((4, None, None), 2, (4, 4, 32)),
        ((None, 4, None), 2, (4, 4, 32)),
        ((None, None, None), 2, (16, 1, 32)),
        ((None, None, None), 64, (2, 1, 128)),
        ((1, None, None), 2, (1, 16, 32)),
        ((None, None, 30), 1, (30, 1, 30)),
    ],
)
def test_open_numbers_are_derived(numbers: tuple, world: int, expected: tuple) -> None:
    batch, lines = fill(Batch(*numbers), world=world)
    assert (batch.micro, batch.accumulation, batch.whole) == expected
    assert lines[0] == f"micro {expected[0]} x accumulation {expected[1]} x world {world} = global {expected[2]}"


@pytest.mark.parametrize(
    ("numbers", "world", "parts"),
    [
        ((4, 2, 30), 1, ["30", "4", "2", "world size 1 = 8"]),
        ((4, 2, 16), 4, ["16", "world size 4 = 32"]),
        ((4, None, 30), 1, ["30", "28 or 32"]),
        ((None, 4, 30), 2, ["30", "24 or 32"]),
        ((None, None, 31), 2, ["31", "world size 2", "30 or 32"]),
        ((None, None, 1), 2, ["set it to 2"]),
        ((0, None, None), 2, ["train_micro_batch_size_per_gpu is 0"]),
        ((None, -1, None), 2, ["gradient_accumulation_steps is -1"]),
        ((2**40, None, None), 1, [f"train_micro_batch_size_per_gpu is {2**40}, at most"]),
        ((None, None, 10**30), 1, ["train_batch_size is 1000", "at most"]),
    ],
)
def test_contradictions_give_the_sum_with_the_real_world_size(numbers: tuple, world: int, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        fill(Batch(*numbers), world=world)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_memory_bounds_what_is_open_only() -> None:
    assert fill(Batch(), target=2304, world=8, most=100)[0] == Batch(96, 3, 2304)
    assert fill(Batch(micro=500), target=2304, world=8, most=100)[0].micro == 500
    assert fill(Batch(whole=2304), world=8, most=100)[0] == Batch(96, 3, 2304)
    batch, lines = fill(Batch(), target=2304, world=8, most=0)
    assert batch.micro == MIN_PAIRS
    assert any("memory" in line for line in lines)


def test_a_prime_share_that_does_not_fit_is_refused_with_a_number_that_does() -> None:
    with pytest.raises(ConfigError, match="more divisors, such as 200"):
        fill(Batch(whole=2 * 101), most=50)
    assert fill(Batch(whole=100), most=50)[0] == Batch(50, 1, 100)


def test_few_samples_lower_a_target_that_nobody_asked_for() -> None:
    batch, lines = fill(Batch(), target=32, samples=70)
    assert batch == Batch(8, 1, 16)
    assert "70 pairs" in lines[1]
    assert fill(Batch(), target=32, samples=500)[0].whole == 32
    assert fill(Batch(), target=32, samples=5)[0] == Batch(2, 1, 4)
    assert fill(Batch(whole=64), samples=70)[0].whole == 64
    with pytest.raises(ConfigError, match="no step"):
        fill(Batch(whole=72), samples=70)
    with pytest.raises(ConfigError, match="too few for 2 ranks"):
        fill(Batch(), samples=3)


@given(
    world=st.integers(1, 64),
    target=st.integers(1, 5000),
    most=st.none() | st.integers(0, 400),
    samples=st.just(0) | st.integers(128, 10**6),
    micro=st.none() | st.integers(2, 40),
    accumulation=st.none() | st.integers(1, 5),
)
def test_filled_batches_always_add_up(
    world: int, target: int, most: int | None, samples: int, micro: int | None, accumulation: int | None
) -> None:
    try:
        batch, _ = fill(Batch(micro, accumulation), world=world, target=target, most=most, samples=samples)
    except ConfigError as error:
        assert "no step" in str(error)
        return
    assert batch.micro is not None
    assert batch.accumulation is not None
    assert batch.whole == batch.micro * batch.accumulation * world
    assert batch.micro >= MIN_PAIRS
    assert batch.accumulation >= 1
    assert micro in (None, batch.micro)
    assert accumulation in (None, batch.accumulation)
    if micro is None and most is not None:
        assert batch.micro <= max(MIN_PAIRS, most)


@pytest.mark.parametrize("name", PRESETS)
def test_memory_estimate_is_monotonic(name: str) -> None:
    preset = load_preset(name)

    def most(gib: float, *, checkpointing: bool, low_precision: bool, of: Preset = preset) -> int:
        answer = largest_micro_batch(
            of, memory_bytes=int(gib * 2**30), checkpointing=checkpointing, low_precision=low_precision
        )
        assert answer is not None
        return answer

    plain = most(80, checkpointing=False, low_precision=False)
    assert (
        0 < plain < most(80, checkpointing=False, low_precision=True) < most(80, checkpointing=True, low_precision=True)
    )
    assert most(1, checkpointing=True, low_precision=True) <= most(24, checkpointing=True, low_precision=True)
    assert most(0.5, checkpointing=False, low_precision=False) == 0
    assert largest_micro_batch(preset, memory_bytes=0, checkpointing=True, low_precision=True) is None


def test_recipe_fits_on_eight_large_gpus_at_once() -> None:
    most = largest_micro_batch(
        load_preset("htsat-fused"), memory_bytes=80 * 10**9, checkpointing=True, low_precision=True
    )
    assert fill(Batch(), world=8, target=2304, most=most, samples=600_000)[0] == Batch(288, 1, 2304)


@pytest.mark.parametrize("preset", PRESETS)
def test_log_mels_of_a_step_are_as_large_as_the_features_are(preset: str) -> None:
    """Whole steps of two passes keep them; the sizes here and those of the features must be the same."""
    for truncation in ("rand_trunc", "fusion"):
        config = FeatureConfig(truncation)  # type: ignore[arg-type]
        size = 4 * config.num_mel_images * config.chunk_frames * config.num_mels
        run = parse_command_line(
            ["--ds_config", "x.json", "--model.preset", preset, "--data.truncation", truncation]
        ).run
        assert held_bytes(run, micro_batch=8, accumulation=3) == 24 * size
        assert held_bytes(run, micro_batch=8, accumulation=1) == 0
    assert fuses(preset, pretrained=None) == ("fused" in preset and "unfused" not in preset)


@pytest.mark.parametrize(
    ("config", "fused"),
    [('{"audio_config": {"enable_fusion": true}}', True), ('{"audio_config": {}}', False), ("{}", False), ("{", True)],
)
def test_weights_say_themselves_whether_they_fuse(tmp_path: Path, config: str, fused: bool) -> None:
    (tmp_path / "config.json").write_text(config)
    run = parse_command_line(["--ds_config", "x.json", "--model.pretrained", str(tmp_path)]).run
    assert held_bytes(run, micro_batch=8, accumulation=3) == 24 * MEL_BYTES * (4 if fused else 1)
    assert fuses(None, pretrained="some/name-on-the-hub"), "not read here, so the larger"


def test_auto_leaves_room_for_the_log_mels_of_a_step() -> None:
    """16,384 fused pairs a rank hold 17 GB: a batch that is chosen without them ends in want of memory."""
    ds = {"bf16": {"enabled": True}, "activation_checkpointing": {}, "train_batch_size": 16_384}
    machine = Machine(memory_bytes=40 * 10**9, num_samples=600_000, device_type="cuda")

    def micro(negatives: str) -> int:
        argv = ["--ds_config", "x.json", "--model.preset", "htsat-fused", "--objective.negatives", negatives]
        command = parse_command_line(argv, has_gpu=True)
        resolved = resolve(ds, command.run, world_size=1, machine=machine, explicit=command.explicit)
        most = 0.8 * machine.memory_bytes
        assert estimate_memory(resolved, preset=load_preset("htsat-fused"), world_size=1, device_type="cuda").device[
            "log-mels"
        ] == (16_384 * 4 * MEL_BYTES if negatives == "global" else 0)
        preset = load_preset("htsat-fused")
        kept = (
            activation_bytes(preset, num_pairs=resolved.micro_batch, checkpointing=True, low_precision=True)
            + resolved.held_bytes
        )
        assert kept + FIXED_BYTES * preset.num_parameters + PROCESS_BYTES <= most
        return resolved.micro_batch

    assert micro("global") == 128 < micro("micro") == 256
