"""Audio that stopped other runs (the ids are those of the list of field faults): from the shard to the batch."""

from __future__ import annotations

import io
import json
import logging
import time
import wave
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from clap_zero.audio.features import ClapFeatures
from clap_zero.audio.waveform import mix_down
from clap_zero.data.pack import PackOptions, pack
from tests.unit.audio.sounds import encode, noise, tone
from tests.unit.audio.test_mp3 import without_header_frame
from tests.unit.data.reading import FUSION, RAND, clip_of, keys_of, skipped_of, take
from tests.unit.data.shard_files import audio_bytes, write_tar

M4A = b"\x00\x00\x00\x20ftypM4A \x00\x00\x02\x00" + b"\0" * 100
WEBM = b"\x1aE\xdf\xa3\x9fB\x86\x81\x01" + b"\0" * 100


def shard(directory: Path, files: dict[str, bytes], num_good: int = 0) -> Path:
    """A split of one tar with these audio files, a caption each, and good clips beside them."""
    files = files | {f"good{n:02d}.flac": audio_bytes(n) for n in range(num_good)}
    members = [
        m for name, data in files.items() for m in ((name, data), (f"{name[: name.rfind('.')]}.txt", b"a sound"))
    ]
    write_tar(directory / "train" / "0.tar", members)
    return directory / "train"


def folder(directory: Path, files: dict[str, bytes]) -> Path:
    """Recordings with a caption beside each, to be packed."""
    directory.mkdir()
    for name, data in files.items():
        (directory / name).write_bytes(data)
        (directory / name).with_suffix(".txt").write_text("a sound")
    return directory


def rejected(out: Path) -> str:
    return (out / "train" / "rejected.jsonl").read_text()


def test_a01_no_bytes_and_an_mp3_without_sound(tmp_path, caplog):
    id3 = b"ID3\x03\x00\x00" + bytes([0, 12, 26, 64]) + b"APIC" + bytes(200_000)
    files = {"a.wav": b"", "b.mp3": id3}
    good = {f"good{n:02d}.wav": audio_bytes(n, kind="WAV") for n in range(30)}
    report = pack(PackOptions(out=tmp_path / "out", folder=folder(tmp_path / "in", files | good), progress=False))
    assert (report.num_pairs, report.num_rejected) == (30, 2)
    assert "0 bytes" in rejected(tmp_path / "out") and "ID3" in rejected(tmp_path / "out")
    with caplog.at_level(logging.WARNING):
        batches = take(shard(tmp_path, files, num_good=30), 32)
    skipped = skipped_of(batches)
    assert "0 bytes" in skipped["a"] and "ID3" in skipped["b"] and len(skipped) == 2
    assert len(set(keys_of(batches))) + len(skipped) == 32
    assert "train/0.tar::a" in caplog.text and "train/0.tar::b" in caplog.text


def test_a03_a_flac_cut_short_that_claims_its_full_length(tmp_path, caplog):
    data = encode(tone(120, hz=440), "FLAC")
    split = shard(tmp_path, {"x.flac": data[: len(data) * 2 // 5]})
    begun = time.monotonic()
    with caplog.at_level(logging.WARNING):
        batches = take(split, 6)
    assert time.monotonic() - begun < 30
    assert [int(batch.clips.lengths) for batch in batches] == [480_000] * 6  # from the readable 48 s, at random
    assert all(batch.clips.samples.abs().max() > 16_000 for batch in batches)
    assert "train/0.tar::x: FLAC is damaged or cut short" in caplog.text


def test_a05_an_mp3_of_variable_rate_without_its_count(tmp_path):
    samples = noise(25)
    mp3 = without_header_frame(encode(samples, "MP3", bitrate_mode="VARIABLE", compression_level=0.7))
    for name, data in (("v.mp3", mp3), ("w.wav", encode(samples, "WAV"))):
        out = tmp_path / f"out-{name}"
        pack(PackOptions(out=out, folder=folder(tmp_path / f"in-{name}", {name: data}), progress=False))
        assert abs(json.loads((out / "train" / "index.json").read_text())["duration_s"] - 25) < 0.06
        batches = take(shard(tmp_path / name, {name: data}), 8)
        assert [int(batch.clips.lengths) for batch in batches] == [480_000] * 8
        assert all(batch.clips.samples[-2_000:].abs().max() > 300 for batch in batches)


def test_a06_every_bit_depth_has_one_scale(tmp_path):
    kinds = {
        "u8": ("WAV", "PCM_U8"), "mulaw": ("WAV", "ULAW"), "s16": ("WAV", "PCM_16"), "s24": ("WAV", "PCM_24"),
        "s32": ("WAV", "PCM_32"), "f32": ("WAV", "FLOAT"), "f64": ("WAV", "DOUBLE"), "flac24": ("FLAC", "PCM_24"),
    }  # fmt: skip
    files = {f"{name}.wav": encode(tone(0.5), kind, subtype=subtype) for name, (kind, subtype) in kinds.items()}
    batches = take(shard(tmp_path, files), 8)
    for name in kinds:
        clip = clip_of(batches, name)
        assert abs(np.abs(clip).max() / 0.5 - 1) <= (0.03 if name in ("u8", "mulaw") else 0.01), name
        assert abs(clip.mean()) <= 1 / 256, name


def test_a07_channels_are_averaged(tmp_path):
    rear = np.zeros((48_000, 6), dtype=np.float32)
    rear[:, 5] = tone(1)
    files = {
        "six.wav": encode(rear, "WAV"),
        "six2.flac": encode(rear, "FLAC"),
        "opposed.wav": encode(np.stack([tone(1), -tone(1)], axis=1), "WAV", subtype="FLOAT"),
        "mono.wav": encode(tone(1), "WAV"),
    }
    batches = take(shard(tmp_path, files), 4)
    for name, peak in (("six", 0.5 / 6), ("six2", 0.5 / 6), ("opposed", 0.0), ("mono", 0.5)):
        clip = clip_of(batches, name)
        assert clip.shape == (48_000,) and np.abs(clip).max() == pytest.approx(peak, abs=1e-3), name
    one = tone(0.1)
    assert mix_down(one[:, None]).shape == one.shape and mix_down(one).dtype == np.float32
    assert mix_down(one[None, :]).shape == (1,)  # (n, channels) is the one layout: a row is one moment of n channels


def test_a08_the_kind_is_found_in_the_content(tmp_path):
    split = shard(tmp_path, {"a.m4a": M4A, "b.mp3": M4A, "c.webm": WEBM}, num_good=8)
    skipped = skipped_of(take(split, 11))
    assert set(skipped) == {"a", "b", "c"}  # headers only: no decoder makes sound of them
    assert "MP4/M4A" in skipped["a"] and skipped["a"] == skipped["b"] and "WebM" in skipped["c"]


def test_a09_one_hertz_stands_for_two_hundred_hours(tmp_path):
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, 1, 0, "NONE", ""))
        out.writeframes(noise(15).astype("<f2").tobytes())
    assert len(file.getvalue()) == 720_000 * 2 + 44
    files = {"slow.wav": file.getvalue()}
    good = {"good.wav": audio_bytes(0, kind="WAV")}
    pack(PackOptions(out=tmp_path / "out", folder=folder(tmp_path / "in", files | good), progress=False))
    assert "1 Hz" in rejected(tmp_path / "out")
    split = shard(tmp_path, files, num_good=4)
    take(split, 1)  # whatever the first batch loads
    before = psutil.Process().memory_info().rss
    skipped = skipped_of(take(split, 5))
    assert "1 Hz" in skipped["slow"] and psutil.Process().memory_info().rss - before < 30e6


@pytest.mark.parametrize("config", [RAND, FUSION], ids=lambda config: config.truncation)
def test_a11_a_batch_of_digital_silence(tmp_path, config):
    """What the model makes of it in fp16 and bf16 is tested with the precisions."""
    silence = encode(np.zeros(480_000, np.float32), "FLAC")
    split = shard(tmp_path, {f"{n}.flac": silence for n in range(4)})
    (batch,) = take(split, 1, micro_batch=4, features=config)
    features, _ = ClapFeatures(config, device=torch.device("cpu"))(batch.clips)
    assert features.shape[0] == 4 and (features == -100).all()
    files = {"still.flac": silence, "loud.flac": audio_bytes(0)}
    options = PackOptions(out=tmp_path / "out", folder=folder(tmp_path / "in", files), progress=False)
    report = pack(options)
    assert (report.num_pairs, report.num_silent) == (2, 1)
    dropped = pack(PackOptions(**{**vars(options), "out": tmp_path / "out2", "drop_silent": True}))
    assert (dropped.num_pairs, dropped.num_rejected) == (1, 1) and "silent" in rejected(tmp_path / "out2")


@pytest.mark.parametrize("config", [RAND, FUSION], ids=lambda config: config.truncation)
def test_a13_very_short_clips_are_repeated(tmp_path, config):
    lengths = {"one": 1, "ten": 480, "most": 43_200, "nearly": 479_952, "whole": 480_000}
    samples = noise(10)
    split = shard(tmp_path, {f"{name}.wav": encode(samples[:n], "WAV") for name, n in lengths.items()})
    (batch,) = take(split, 1, micro_batch=5, features=config)
    assert sorted(batch.clips.lengths.tolist()) == sorted(lengths.values())
    features, is_longer = ClapFeatures(config, device=torch.device("cpu"))(batch.clips)
    assert features.shape == (5, config.num_mel_images, 1001, 64) and torch.isfinite(features).all()
    assert not is_longer.any()
    # As the extractor pads by default: as often as it fits, then zeros.
    row = [key.split("::")[1] for key in batch.keys].index("most")
    clip = batch.clips.samples[int(batch.clips.lengths[:row].sum()) :][:43_200]
    padded = torch.cat([clip.repeat(480_000 // 43_200), clip.new_zeros(480_000 % 43_200)])
    by_hand, _ = ClapFeatures(config, device=torch.device("cpu"))(
        type(batch.clips)(padded, torch.tensor([480_000]), torch.zeros(1, 3).long())
    )
    torch.testing.assert_close(features[row], by_hand[0], atol=1e-3, rtol=0)
