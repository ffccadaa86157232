"""An exported directory loads in Hugging Face's classes, offline, and gives the trainer's embeddings."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from clap_zero.audio.features import ClapFeatures, ClipBatch
from clap_zero.checkpoint import export as export_module
from clap_zero.checkpoint.export import _check_target, export_run
from clap_zero.checkpoint.files import checksum_file
from clap_zero.checkpoint.source import find_model
from clap_zero.errors import CheckpointError
from tests.unit.checkpoint.small_run import make_model, make_run, sound

FRESH_PROCESS = textwrap.dedent("""
    import sys, torch
    from transformers import AutoProcessor, ClapModel, ClapProcessor
    model, report = ClapModel.from_pretrained(sys.argv[1], output_loading_info=True)
    assert not any(report.values()), report
    assert model.logit_scale_a.shape == () and model.dtype == torch.float32
    given = torch.load(sys.argv[2], weights_only=True)
    processors = [ClapProcessor.from_pretrained(sys.argv[1]), AutoProcessor.from_pretrained(sys.argv[1])]
    for processor in processors:
        assert type(processor).__name__ == "ClapProcessor"
        extractor = processor.feature_extractor
        assert extractor.truncation == given["truncation"], extractor.truncation
        assert (extractor.frequency_min, extractor.frequency_max) == (50, 14000)
        ids = processor.tokenizer(given["texts"], padding=True, return_tensors="pt")
        assert torch.equal(ids["input_ids"], given["input_ids"]), ids
    model.eval()
    with torch.no_grad():
        audio = model.get_audio_features(input_features=given["features"], is_longer=given["is_longer"]).pooler_output
        text = model.get_text_features(**ids).pooler_output
        wave = extractor(given["wave"].numpy(), sampling_rate=48000, return_tensors="pt")
    torch.save({"audio": audio, "text": text, "extracted": wave["input_features"]}, sys.argv[3])
""")


@pytest.fixture(scope="module", params=[False, True], ids=["rand_trunc", "fusion"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    folder = tmp_path_factory.mktemp("export")
    model = make_model(fusion=request.param)
    out = export_run(make_run(folder / "run", model), folder / "out")
    return model, folder, out, request.param


def test_loads_offline_in_a_fresh_process_with_the_same_embeddings(exported: tuple) -> None:
    from clap_zero.data.text import Tokenizer

    model, folder, out, fusion = exported
    source = find_model(folder / "run")
    lengths = (0.5, 10.0, 12.0) if fusion else (0.5, 10.0)
    waves = [sound(number, seconds) for number, seconds in enumerate(lengths)]
    features, is_longer = ClapFeatures(source.features, device=torch.device("cpu"))(
        ClipBatch.from_clips(waves, source.features)
    )
    texts = ["a dog barks", "rain, and thunder far away"]
    ids, mask = Tokenizer()(texts, 77)
    given = {
        "features": features,
        "is_longer": is_longer,
        "texts": texts,
        "input_ids": ids,
        "truncation": source.features.truncation,
        "wave": torch.from_numpy(waves[1]),
    }
    torch.save(given, folder / "given.pt")
    command = [sys.executable, "-c", FRESH_PROCESS, str(out), str(folder / "given.pt"), str(folder / "result.pt")]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    result = torch.load(folder / "result.pt", weights_only=True)
    with torch.no_grad():
        ours = model(input_features=features, is_longer=is_longer, input_ids=ids, attention_mask=mask)
    for theirs, own in ((result["audio"], ours.audio_embeds), (result["text"], ours.text_embeds)):
        assert torch.allclose(torch.nn.functional.normalize(theirs, dim=-1), own, atol=1e-5)
    # Their extractor is set up as our features: same loudness in every band, but for the 16-bit round trip.
    assert (result["extracted"][0] - features[1]).abs().mean() < 0.1


def test_the_scales_have_no_dimension_and_one_file_holds_all(exported: tuple) -> None:
    model, _, out, _ = exported
    tensors = load_file(out / "model.safetensors")
    assert tensors["logit_scale_a"].shape == () and tensors["logit_scale_a"].item() == 3.25
    assert tensors.keys() == model.state_dict().keys()
    assert json.loads((out / "config.json").read_text())["architectures"] == ["ClapModel"]
    assert not list(out.parent.glob(".out*"))


def test_a_directory_in_use_is_refused_and_overwritten_only_when_asked(exported: tuple) -> None:
    _, folder, out, _ = exported
    (out / "vocab.json").write_text("an older export's")
    with pytest.raises(CheckpointError, match="not empty.*--overwrite"):
        export_run(folder / "run", out)
    assert (out / "vocab.json").read_text() == "an older export's"
    assert export_run(folder / "run", out, overwrite=True) == out
    assert (out / "vocab.json").read_text() != "an older export's" and (out / "model.safetensors").exists()
    run = folder / "run"
    for source in (run, run / "checkpoints" / "step-00000007"):
        for target in (run, folder, run / "checkpoints", run / "eval"):
            with pytest.raises(CheckpointError, match="the run"):
                export_run(source, target, overwrite=True)


@pytest.mark.parametrize("name", ["metrics.jsonl", "0.tar", "notes.txt", ".lock"])
def test_overwrite_deletes_nothing_but_an_export(tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text("{}")
    (target / name).write_text("mine")
    with pytest.raises(CheckpointError, match=f"holds {name}, which no export wrote"):
        _check_target(target, tmp_path / "run", overwrite=True)
    assert (target / name).read_text() == "mine"


def test_large_models_are_sharded(exported: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder, _, _ = exported
    monkeypatch.setattr(export_module, "MAX_FILE_BYTES", 1_000_000)
    out = export_run(folder / "run", folder / "sharded")
    files = sorted(out.glob("model-*.safetensors"))
    assert len(files) > 1 and not (out / "model.safetensors").exists()
    merged = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert all(torch.equal(merged[n].reshape(t.shape), t) for n, t in model.state_dict().items())


def _change_a_file(checkpoint: Path, change) -> None:
    """Changes the tensors of one weight file and makes the manifest agree, as a faulty writer would have."""
    file = max(checkpoint.glob("model-*.safetensors"))
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    record = checksum_file(file)
    manifest["files"][file.name] = {"size_bytes": record.size_bytes, "crc32": record.crc32}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("how", ["empty", "missing", "shape"])
def test_bad_tensors_are_refused_by_name(tmp_path: Path, how: str) -> None:
    run = make_run(tmp_path / "run", make_model(fusion=False))

    def change(tensors: dict) -> None:
        name = max(name for name in tensors if name.endswith("weight"))
        if how == "missing":
            del tensors[name]
        else:
            tensors[name] = torch.zeros(0) if how == "empty" else torch.zeros(2, 2)

    _change_a_file(run / "checkpoints" / "step-00000007", change)
    with pytest.raises(CheckpointError, match="empty tensors.*weight" if how == "empty" else "in 1 tensors.*weight"):
        export_run(run, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_no_run_and_no_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no directory"):
        export_run(tmp_path / "nothing", tmp_path / "out")
    (tmp_path / "run").mkdir()
    with pytest.raises(CheckpointError, match="nothing was saved yet"):
        export_run(tmp_path / "run", tmp_path / "out")
    (tmp_path / "run" / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        export_run(tmp_path / "run", tmp_path / "out")
    with pytest.raises(CheckpointError, match="step 3"):
        export_run(tmp_path / "run", tmp_path / "out", step=3)


def test_a_scale_that_overshot_is_exported_as_the_trainer_used_it(tmp_path: Path) -> None:
    model = make_model(fusion=False)
    with torch.no_grad():
        model.logit_scale_a.fill_(4.7)
    out = export_run(make_run(tmp_path / "run", model), tmp_path / "out")
    assert load_file(out / "model.safetensors")["logit_scale_a"].exp().item() == pytest.approx(100, rel=1e-6)
    assert model().logit_scale.item() == pytest.approx(100, rel=1e-6)
