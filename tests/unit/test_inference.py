"""Vectors for those who only want vectors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import clap_zero
from clap_zero.audio.waveform import resample
from clap_zero.checkpoint.export import export_run
from clap_zero.errors import CheckpointError, DataError
from clap_zero.inference import ClapEmbedder
from tests.unit.checkpoint.small_run import RATE_HZ, encoded, make_model, make_run, sound


@pytest.fixture(scope="module", params=[False, True], ids=["rand_trunc", "fusion"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inference")
    make_run(folder / "run", make_model(fusion=request.param))
    export_run(folder / "run", folder / "exported")
    return folder


@pytest.fixture(scope="module")
def embedder(folder: Path) -> ClapEmbedder:
    return clap_zero.load(folder / "run", device="cpu")


def test_a_clip_has_the_same_vector_alone_in_a_batch_and_twice(embedder: ClapEmbedder) -> None:
    clips = [sound(0, 5), sound(1, 0.2), sound(2, 25), sound(3, 11), sound(4, 10), np.float32([0.1] * 10)]
    clips.append(np.random.default_rng(0).uniform(-1, 1, 40 * RATE_HZ).astype(np.float32))
    together = embedder.embed_audio(clips)
    assert together.shape == (7, embedder.dimension) and together.dtype == np.float32
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)
    assert np.array_equal(together, embedder.embed_audio(clips))
    alone = np.concatenate([embedder.embed_audio(clip) for clip in clips])
    assert np.abs(alone - together).max() < 1e-5
    assert np.array_equal(alone[:1], embedder.embed_audio([clips[0]]))
    assert np.abs(embedder.embed_audio(clips, batch_size=2) - together).max() < 1e-5


def test_texts(embedder: ClapEmbedder) -> None:
    texts = ["a dog", "a much longer text about rain on a tin roof " * 30, ""]
    together = embedder.embed_text(texts)
    assert together.shape == (3, embedder.dimension)
    alone = np.concatenate([embedder.embed_text(text) for text in texts])
    assert np.abs(alone - together).max() < 1e-5
    assert embedder.embed_text("a dog").shape == (1, embedder.dimension)
    assert embedder.embed_text([]).shape == embedder.embed_audio([]).shape == (0, embedder.dimension)
    assert embedder.logit_scale == pytest.approx(np.exp(3.25))
    with pytest.raises(DataError, match="text 1 is int"):
        embedder.embed_text(["a", 5])  # type: ignore[list-item]


def test_paths_bytes_and_arrays_of_any_rate_are_the_same_clip(embedder: ClapEmbedder, tmp_path: Path) -> None:
    wave = sound(5, 3)
    (tmp_path / "x.flac").write_bytes(encoded(wave))
    integers = (wave * 32767).astype(np.int16)
    stereo = np.stack([wave, wave], axis=1)
    forms = [tmp_path / "x.flac", str(tmp_path / "x.flac"), encoded(wave), wave, wave.astype(np.float64), integers]
    forms += [stereo, torch.from_numpy(wave)]
    vectors = embedder.embed_audio(forms)
    assert np.abs(vectors - vectors[3]).max() < 1e-3
    assert np.abs(vectors[0] - embedder.embed_audio(sound(6, 3))).max() > 1e-3
    slow = embedder.embed_audio(wave[::2], sample_rate_hz=RATE_HZ // 2)
    assert np.array_equal(slow, embedder.embed_audio(resample(wave[::2], RATE_HZ // 2, RATE_HZ)))


@pytest.mark.parametrize(
    "clip, complaint",
    [
        (b"no sound at all", "clip 0"),
        ("/nowhere/x.wav", "/nowhere/x.wav: No such file"),
        (np.zeros(0, dtype=np.float32), "non-empty"),
        (np.zeros((2, 1000), dtype=np.float32), "transpose"),
        (np.array([0.1, np.nan], dtype=np.float32), "not finite"),
        (np.zeros(100, dtype=np.int64), "int64"),
    ],
)
def test_bad_clips_are_named(embedder: ClapEmbedder, clip: object, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        embedder.embed_audio([clip])  # type: ignore[list-item]


def test_run_checkpoint_and_export_give_the_same_vectors(folder: Path, embedder: ClapEmbedder) -> None:
    clip, long_text = sound(7, 12), "the sound of rain and wind " * 40
    for path in (folder / "exported", folder / "run" / "checkpoints" / "step-00000007"):
        other = clap_zero.load(path, device="cpu")
        assert np.array_equal(other.embed_audio(clip), embedder.embed_audio(clip))
        assert np.array_equal(other.embed_text(long_text), embedder.embed_text(long_text))


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no directory"):
        clap_zero.load(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="neither a run"):
        clap_zero.load(tmp_path)


def test_a_model_loads_without_deepspeed(folder: Path) -> None:
    program = (
        "import clap_zero, sys; clap_zero.load(sys.argv[1], device='cpu').embed_text('a dog');"
        "assert 'deepspeed' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(folder / "run")], check=True)


def test_importing_the_package_is_light() -> None:
    program = (
        "import clap_zero, sys; assert clap_zero.__version__; assert not {'torch', 'deepspeed'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(AttributeError, match="nothing"):
        clap_zero.nothing  # noqa: B018
