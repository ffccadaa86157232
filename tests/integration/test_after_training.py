"""What a user does with a finished run: evaluate, export, load it with Hugging Face, embed; the README's commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import clap_zero
from clap_zero.audio.clips import ClipBatch
from clap_zero.audio.features import ClapFeatures
from clap_zero.checkpoint.source import find_model
from clap_zero.model.clap import ClapForContrast
from tests.integration.jobs import BIN, FAST, command, run

pytestmark = pytest.mark.integration

# Nothing of this package: what anybody does with a directory for transformers.
HUGGING_FACE = """
import sys, numpy, torch
from transformers import ClapModel, ClapProcessor
model, info = ClapModel.from_pretrained(sys.argv[1], output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
processor = ClapProcessor.from_pretrained(sys.argv[1])
given = numpy.load(sys.argv[2])
model.eval()
with torch.no_grad():
    audio = model.get_audio_features(
        input_features=torch.from_numpy(given["features"]), is_longer=torch.from_numpy(given["is_longer"])
    )
    tokens = processor(text=["a cello playing the note C3", "rain"], return_tensors="pt", padding=True)
    text = model.get_text_features(**tokens)
pick = lambda out: (out if isinstance(out, torch.Tensor) else out.pooler_output)
normal = lambda x: torch.nn.functional.normalize(pick(x), dim=-1).numpy()
assert model.logit_scale_a.shape == ()
numpy.savez(sys.argv[3], audio=normal(audio), text=normal(text))
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, shards: tuple[Path, Path]) -> Path:
    """A folder with a finished run of the fused model in `run`."""
    folder = tmp_path_factory.mktemp("finished")
    flags = [*FAST, "--data.train", str(shards[0]), "--data.val", str(shards[1]), "--model.preset", "tiny-fused"]
    code, output = run(command("alone", *flags, "--run_dir", "run", "--train.max_steps", "3"), cwd=folder)
    assert code == 0, output
    return folder


def clap(*words: str, cwd: Path) -> str:
    result = subprocess.run([BIN / "clap-zero", *words], cwd=cwd, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_eval_writes_the_figures_of_the_trainer(finished: Path) -> None:
    path = finished / "run" / "eval" / "step-3.json"
    trained = json.loads(path.read_text())
    output = clap("eval", "run", cwd=finished)
    assert "median rank" in output
    evaluated = json.loads(path.read_text())
    assert evaluated.keys() >= trained.keys()
    for name in ("audio_to_text.R@1", "text_to_audio.mAP@10", "audio_to_text.median_rank"):
        assert evaluated[name] == pytest.approx(trained[name], abs=1e-6), name
    assert json.loads((finished / "run" / "eval" / "step-0.json").read_text())["num_clips"] == trained["num_clips"]


def test_export_gives_the_trainers_embeddings_in_a_fresh_process(finished: Path) -> None:
    """20 clips of 0.1 to 40 s: Hugging Face's own model on the exported weights against ours on the fp32 masters."""
    clap("export", "run", "exported", cwd=finished)
    source = find_model(finished / "run")
    rng = np.random.default_rng(0)
    lengths = np.geomspace(4_800, 40 * 48_000, 20).astype(int)
    waves = [(0.1 * rng.standard_normal(length)).astype(np.float32) for length in lengths]
    features, is_longer = ClapFeatures(source.features, device="cpu")(
        ClipBatch.from_clips(waves, source.features, rng=None, as_int16=True)
    )
    assert 0 < int(is_longer.sum()) < 20
    np.savez(finished / "given.npz", features=features.numpy(), is_longer=is_longer.numpy())
    words = [sys.executable, "-c", HUGGING_FACE, "exported", "given.npz", "theirs.npz"]
    subprocess.run(words, cwd=finished, check=True, timeout=240)
    theirs = np.load(finished / "theirs.npz")
    model = _trainers_model(source.weights)
    with torch.no_grad():
        ours = model(input_features=features, is_longer=is_longer).audio_embeds.numpy()
    assert np.abs(ours - theirs["audio"]).max() < 1e-5
    embedder = clap_zero.load(finished / "exported")
    assert np.abs(embedder.embed_text(["a cello playing the note C3", "rain"]) - theirs["text"]).max() < 1e-5


def _trainers_model(weights: Path) -> ClapForContrast:
    """The model as the trainer saved its masters, read without the export."""
    from safetensors.torch import load_file
    from transformers import ClapConfig

    model = ClapForContrast(ClapConfig.from_pretrained(weights))
    state = {
        name: value for file in sorted(weights.glob("model-*.safetensors")) for name, value in load_file(file).items()
    }
    state = {name: value.reshape(model.state_dict()[name].shape) for name, value in state.items()}
    model.load_state_dict(state, strict=True)
    return model.eval()


def test_export_refuses_a_full_directory(finished: Path) -> None:
    (finished / "full").mkdir()
    (finished / "full" / "mine.txt").write_text("keep me")
    words = [BIN / "clap-zero", "export", "run", "full"]
    result = subprocess.run(words, cwd=finished, capture_output=True, text=True, timeout=240)
    assert result.returncode == 4 and "--overwrite" in result.stderr, result.stderr
    assert (finished / "full" / "mine.txt").read_text() == "keep me"


def test_check_config_starts_nothing(finished: Path) -> None:
    output = clap("check-config", *FAST, "--model.preset", "tiny", "--world-size", "8", cwd=finished)
    assert "micro 4 x accumulation" in output and "x world 8 = global" in output
