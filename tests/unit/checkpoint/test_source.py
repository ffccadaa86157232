"""A checkpoint is enough by itself: nothing of the directory that its run began from is needed any more."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from clap_zero.audio.features import FeatureConfig
from clap_zero.checkpoint.export import export_run
from clap_zero.checkpoint.source import companions, find_model, tokenizer_directory
from clap_zero.data.text import EMBEDDED_TOKENIZER, Tokenizer
from clap_zero.errors import CheckpointError
from tests.unit.checkpoint.small_run import make_model, make_run

FEATURES = FeatureConfig("rand_trunc", f_min=20.0, max_samples=240_000)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A vocabulary in which two words have other numbers than in the embedded one."""
    folder = tmp_path / "pretrained"
    shutil.copytree(EMBEDDED_TOKENIZER, folder)
    vocabulary = json.loads((folder / "vocab.json").read_text())
    vocabulary["dog"], vocabulary["cat"] = vocabulary["cat"], vocabulary["dog"]
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    return folder


def test_what_the_run_began_from_may_be_gone(tmp_path: Path, tokenizer: Path) -> None:
    run = make_run(
        tmp_path / "run",
        make_model(fusion=False),
        companions=companions(FEATURES, tokenizer),
        changes={"model": {"pretrained": str(tokenizer)}},
    )
    expected, _ = Tokenizer(tokenizer)(["dog"], 77)
    shutil.rmtree(tokenizer)
    for path in (run, run / "checkpoints" / "step-00000007", export_run(run, tmp_path / "out")):
        source = find_model(path)
        assert source.features == FEATURES
        ids, _ = Tokenizer(source.tokenizer)(["dog"], 77)
        assert ids.tolist() == expected.tolist() != Tokenizer()(["dog"], 77)[0].tolist()


def test_without_a_tokenizer_the_embedded_vocabulary_is_meant(tmp_path: Path) -> None:
    assert tokenizer_directory(None) is None and tokenizer_directory(tmp_path) is None
    assert companions(FEATURES, None).keys() == {"preprocessor_config.json"}
    run = make_run(tmp_path / "run", make_model(fusion=False), companions=companions(FEATURES, None))
    assert find_model(run).tokenizer is None


def test_a_checkpoint_that_lacks_what_its_pretrained_model_had_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", make_model(fusion=False), changes={"model": {"pretrained": "somewhere/else"}})
    with pytest.raises(CheckpointError, match="has no preprocessor_config.json.*somewhere/else"):
        find_model(run)


def test_a_checkpoint_knows_its_run_and_has_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", make_model(fusion=False))
    checkpoint = run / "checkpoints" / "step-00000007"
    monkeypatch.chdir(checkpoint)
    for path in (checkpoint, Path(os.curdir)):
        assert find_model(path).run_dir == run and find_model(path).run is not None
    with pytest.raises(CheckpointError, match="is one checkpoint: give the run .*run to choose step 7"):
        find_model(checkpoint, step=7)


def test_a_configuration_that_is_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", make_model(fusion=False))
    (run / "config.yaml").write_text("modle: {preset: tiny}")
    with pytest.raises(CheckpointError, match="config.yaml is not the configuration of a run.*modle"):
        find_model(run)
