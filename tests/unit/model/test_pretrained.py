"""Loading weights: every layout that is met in the wild, and everything that does not fit is named."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from clap_zero.errors import CheckpointError, ConfigError
from clap_zero.model.clap import ClapForContrast
from clap_zero.model.pretrained import OPTIONAL_BUFFER, read_model_config, resolve_pretrained
from tests.distributed import zero_cases as zc


@pytest.fixture(scope="module")
def source() -> ClapForContrast:
    """A model whose every parameter and statistic differs from what a new model has."""
    model = zc.build({}, fused=True, seed=11)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(0.01 * torch.rand(tensor.shape))
    return model


def state_of(model: ClapForContrast) -> dict[str, Tensor]:
    return {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}


def write(directory: Path, model: ClapForContrast, state: dict[str, Tensor]) -> Path:
    model.config.save_pretrained(directory)
    save_file(state, directory / "model.safetensors")
    return directory


def load(directory: Path) -> ClapForContrast:
    return zc.build({}, fused=True, weights=directory)


def assert_equal(model: ClapForContrast, source: ClapForContrast) -> None:
    expected = source.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name].reshape(tensor.shape)), name


def test_round_trip(tmp_path: Path, source: ClapForContrast) -> None:
    model = load(write(tmp_path, source, state_of(source)))
    assert_equal(model, source)
    assert model.training and model.config.audio_config.enable_fusion


def test_scales_without_dimension_and_a_wrapper_prefix(tmp_path: Path, source: ClapForContrast) -> None:
    state = {f"module.{n}": t.reshape(()) if "logit_scale" in n else t for n, t in state_of(source).items()}
    assert_equal(load(write(tmp_path, source, state)), source)


def test_position_ids_may_be_missing_or_of_any_length(tmp_path: Path, source: ClapForContrast) -> None:
    state = state_of(source)
    del state[OPTIONAL_BUFFER]
    assert_equal(load(write(tmp_path / "missing", source, state)), source)
    state[OPTIONAL_BUFFER] = torch.arange(512)[None]
    assert_equal(load(write(tmp_path / "longer", source, state)), source)


def test_torch_file(tmp_path: Path, source: ClapForContrast) -> None:
    source.config.save_pretrained(tmp_path)
    torch.save(state_of(source), tmp_path / "pytorch_model.bin")
    assert_equal(load(tmp_path), source)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_several_files(tmp_path: Path, source: ClapForContrast, kind: str) -> None:
    source.config.save_pretrained(tmp_path)
    items = list(state_of(source).items())
    for number, part in enumerate((items[:50], items[50:])):
        if kind == "safetensors":
            save_file(dict(part), tmp_path / f"model-0000{number + 1}-of-00002.safetensors")
        else:
            torch.save(dict(part), tmp_path / f"pytorch_model-0000{number + 1}-of-00002.bin")
    assert_equal(load(tmp_path), source)


def test_half_precision_weights(tmp_path: Path, source: ClapForContrast) -> None:
    state = {n: t.half() if t.is_floating_point() else t for n, t in state_of(source).items()}
    model = load(write(tmp_path, source, state))
    assert model.dtype == torch.float32
    name = "text_projection.linear1.weight"
    assert torch.equal(model.get_parameter(name), state[name].float())


def test_a_raw_scale_beyond_the_cap_starts_at_the_cap(tmp_path: Path, source: ClapForContrast) -> None:
    state = state_of(source) | {"logit_scale_a": torch.tensor(100.0), "logit_scale_t": torch.tensor(100.0)}
    model = load(write(tmp_path, source, state))
    assert model.logit_scale_a.item() == pytest.approx(math.log(100))
    loss = zc.loss_of(model(**zc.make_pairs(3, fused=True)._asdict()))
    assert torch.isfinite(loss)


def test_everything_that_does_not_fit_is_named(tmp_path: Path, source: ClapForContrast) -> None:
    state = state_of(source)
    del state["audio_projection.linear1.weight"]
    del state["audio_model.audio_encoder.batch_norm.running_mean"]
    state["text_projection.linear1.bias"] = torch.zeros(7)
    state["text_projection.linear2.bias"] = torch.zeros(0)
    state["text_adapter.sequential.0.weight"] = torch.zeros(2)
    with pytest.raises(CheckpointError) as error:
        load(write(tmp_path, source, state))
    message = str(error.value)
    assert "missing: audio_model.audio_encoder.batch_norm.running_mean, audio_projection.linear1.weight;" in message
    assert "not of this model: text_adapter.sequential.0.weight;" in message
    assert "text_projection.linear1.bias [7] instead of [16]" in message
    assert "text_projection.linear2.bias [0] instead of [16]" in message
    assert "\n" not in message


@pytest.mark.parametrize("keep", [0, 7, 4000])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_cut_short(tmp_path: Path, source: ClapForContrast, name: str, keep: int) -> None:
    source.config.save_pretrained(tmp_path)
    path = tmp_path / name
    if name.endswith("bin"):
        torch.save(state_of(source), path)
    else:
        save_file(state_of(source), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path)


def test_a_pickle_that_would_run_code(tmp_path: Path, source: ClapForContrast) -> None:
    source.config.save_pretrained(tmp_path)
    torch.save({"logit_scale_a": Path("/")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [(None, "no config.json"), ("{", "not valid JSON"), ('{"model_type": "clip"}', "'clip'")],
)
def test_not_a_clap_directory(tmp_path: Path, config: str | None, message: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_a_wrong_value_in_the_config(tmp_path: Path, source: ClapForContrast) -> None:
    write(tmp_path, source, state_of(source))
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    content["text_config"]["hidden_size"] = "wide"
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="hidden_size"):
        load(tmp_path)


def test_no_weights(tmp_path: Path, source: ClapForContrast) -> None:
    source.config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no weights"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["nobody/no-such-model", "/no/such/directory", "a b c"])
def test_a_name_that_leads_nowhere(name: str) -> None:
    with pytest.raises(ConfigError, match="not a directory here"):
        resolve_pretrained(name)


def test_what_is_no_model_of_the_hub_says_what_is_needed(tmp_path: Path) -> None:
    """The file of another trainer, a path that is not there, and a run of ours: the hub is asked for none of them."""
    (tmp_path / "630k-best.pt").write_bytes(b"PK")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=r"630k-best\.pt' is a file, needed is the directory .*laion/clap-htsat-unfused"
    ):
        resolve_pretrained(str(tmp_path / "630k-best.pt"))
    for name in (str(tmp_path / "nowhere"), "./nowhere", "models/clap/nowhere"):
        with pytest.raises(ConfigError, match="nowhere' is not a directory here: check the path"):
            resolve_pretrained(name)
    with pytest.raises(CheckpointError, match=r"it is a run, so clap-zero export .*/run DIR first"):
        read_model_config(resolve_pretrained(str(tmp_path / "run")))
