"""Packing in many processes, and the two forms that are stored."""

from __future__ import annotations

import filecmp
import io
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from clap_zero.audio.clips import STORED_UNITS_PER_DB, ClipBatch, FeatureConfig
from clap_zero.audio.features import ClapFeatures
from clap_zero.audio.logmel import decode_logmel
from clap_zero.audio.pcm import load_pcm
from clap_zero.data import pack_pool
from clap_zero.data.pack import PackOptions, pack
from clap_zero.data.pack_encoding import Encoded, Encoding
from clap_zero.data.pack_items import Item
from clap_zero.data.pack_sources import Columns
from clap_zero.data.shards import Shard, ShardReader
from clap_zero.errors import ConfigError, DataError
from tests.unit.data.packing import options, write_rows
from tests.unit.data.shard_files import audio_bytes


def deadly(item: Item, encoding: Encoding, slot: object) -> Encoded:
    """Stands in for a decoder that ends the process at certain files."""
    if item.name.startswith("deadly"):
        os.kill(os.getpid(), signal.SIGKILL)
    if item.name.startswith("once") and not Path(item.path).exists():
        Path(item.path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return Encoded(item, item.name.encode())


def test_a_file_that_kills_its_decoder_is_rejected_and_all_others_are_packed(tmp_path, monkeypatch):
    monkeypatch.setattr(pack_pool, "_work", deadly)
    names = [f"{number}" for number in range(40)]
    names[20], names[39] = "once", "deadly"
    items = [Item("train", name, str(tmp_path / name)) for name in names]
    results = list(pack_pool.encode_all(items, Encoding(1.0), workers=2))
    assert [result.item.name for result in results] == names
    for name, result in zip(names, results, strict=True):
        assert result.data == (None if name.startswith("deadly") else name.encode())
        assert result.reason == ("the process that decoded it died" if name.startswith("deadly") else None)


def test_workers_that_die_at_everything_are_an_error(monkeypatch):
    monkeypatch.setattr(pack_pool, "_work", deadly)
    monkeypatch.setattr(pack_pool, "_MAX_DEATHS", 3)
    items = [Item("train", f"deadly {number}") for number in range(20)]
    with pytest.raises(DataError, match=r"4 packing processes died, the latest with deadly 3 .*fewer --workers"):
        list(pack_pool.encode_all(items, Encoding(1.0), workers=2))


def test_what_is_handed_out_ahead_is_bounded(monkeypatch):
    monkeypatch.setattr(pack_pool, "_AHEAD_BYTES", 3000)
    handed_out = 0

    def items():
        nonlocal handed_out
        for number in range(60):
            handed_out += 1
            yield Item("train", f"{number}", audio=bytes(1000), captions=("x",))

    most = 0
    for taken, result in enumerate(pack_pool.encode_all(items(), Encoding(1.0), workers=2)):
        assert result.reason is not None
        most = max(most, handed_out - taken)
    assert handed_out == 60 and most <= 5


def test_without_shared_memory_the_pipe_serves(monkeypatch):
    def refused(name: str) -> int:
        raise OSError(1, "Operation not permitted")

    items = [Item("train", f"{number}", audio=audio_bytes(number), captions=("x",)) for number in range(5)]
    shared = [bytes(result.data or b"") for result in pack_pool.encode_all(items, Encoding(1.0), workers=2)]
    monkeypatch.setattr(os, "memfd_create", refused)
    piped = [result.data for result in pack_pool.encode_all(items, Encoding(1.0), workers=2)]
    assert shared == piped and all(isinstance(data, bytes) for data in piped)


@pytest.mark.parametrize("form", [{}, {"store": "logmel", "truncation": "fusion"}])
def test_tars_are_equal_for_every_number_of_workers(tmp_path, form):
    """Short clips, long ones, one too long for the shared memory, rejected ones between them, two to be resampled."""
    rows = []
    for number in range(24):
        seconds, rate_hz = (4.0 if number % 5 == 0 else 0.05), (44_100 if number in (2, 9) else 48_000)
        seconds = 15.0 if number == 15 else seconds
        name = f"{number}.wav"
        (tmp_path / name).write_bytes(
            b"junk" if number % 7 == 6 else audio_bytes(number, seconds=seconds, rate_hz=rate_hz, kind="WAV")
        )
        rows.append({"file": name, "caption": name, "split": "test" if number % 11 == 10 else "train"})
    manifest, split = write_rows(tmp_path / "m.csv", rows), {"columns": Columns(split="split")}
    for workers in (0, 2, 3):
        pack(
            options(
                tmp_path, manifest=manifest, shard_size=4, workers=workers, out=tmp_path / f"{workers}", **split, **form
            )
        )
    for workers in (2, 3):
        compared = filecmp.dircmp(tmp_path / "0" / "train", tmp_path / f"{workers}" / "train")
        assert len(compared.common_files) == 9 and not compared.left_only and not compared.right_only
        _, different, errors = filecmp.cmpfiles(compared.left, compared.right, compared.common_files, shallow=False)
        assert not different and not errors


@pytest.mark.parametrize("truncation", ["fusion", "rand_trunc"])
def test_log_mels_are_those_of_the_clips_stored_as_flac(tmp_path, truncation):
    time_s = np.arange(12 * 44_100) / 44_100
    for number, seconds in enumerate((0.3, 10.0, 12.0)):
        tone = 0.3 * np.sin(2 * np.pi * 700 * (number + 1) * time_s[: int(seconds * 44_100)])
        soundfile.write(tmp_path / f"{number}.wav", np.stack([tone, 0.1 * tone], 1), 44_100)
    rows = [{"file": f"{number}.wav", "caption": f"c{number}"} for number in range(3)]
    manifest = write_rows(tmp_path / "m.csv", rows)
    pack(options(tmp_path, manifest=manifest, out=tmp_path / "flac"))
    pack(options(tmp_path, manifest=manifest, out=tmp_path / "mel", store="logmel", truncation=truncation))
    cfg = FeatureConfig(truncation)
    features = ClapFeatures(cfg, device="cpu")
    reader = ShardReader()
    for number in range(3):
        flac = reader.read(Shard(str(tmp_path / "flac" / "train" / "0.tar"), "x", 3), number)
        mel = reader.read(Shard(str(tmp_path / "mel" / "train" / "0.tar"), "x", 3), number)
        assert flac.key == mel.key and flac.texts == mel.texts
        assert soundfile.info(io.BytesIO(flac.audio)).samplerate == 48_000
        stored = decode_logmel(mel.audio, cfg)
        wave = load_pcm(flac.audio, max_seconds=60)
        assert stored.num_samples == wave.size
        if wave.size <= cfg.max_samples:
            exact, _ = features(ClipBatch.from_parts([wave], [(0, 0, 0)]))
            difference = exact[0, 0] - torch.from_numpy(stored.frames.astype(np.float32)) / STORED_UNITS_PER_DB
            assert float(difference.abs().max()) <= 0.01
    reader.close()


def test_a_log_mel_is_made_for_one_kind_of_model(tmp_path):
    with pytest.raises(ConfigError, match="--truncation: fusion or rand_trunc"):
        pack(PackOptions(out=tmp_path, folder=tmp_path, store="logmel"))
    with pytest.raises(ConfigError, match="FLAC serves both"):
        pack(PackOptions(out=tmp_path, folder=tmp_path, truncation="fusion"))
