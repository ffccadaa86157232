"""LAION's extra heads: found in every spelling, complete or named, and computed as LAION computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import ClapModel

from clap_zero.errors import CheckpointError, ConfigError
from clap_zero.model.clap import ClapForContrast, Parts
from clap_zero.model.mlp_heads import FILE, PARAMETERS
from clap_zero.training.engine import parameter_groups
from tests.distributed import zero_cases as zc

AUTO = Parts(mlp="auto")
CONVERTED = {
    ".sequential.0.": ".layers.0.linear.",
    ".sequential.3.": ".layers.1.linear.",
}
"""What Hugging Face's conversion makes of LAION's names."""


@pytest.fixture(scope="module")
def heads() -> dict[str, Tensor]:
    return zc.new_heads(width=16)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A Hugging Face directory without the heads."""
    model = zc.build({}, fused=False)
    with torch.no_grad():
        model.logit_scale_a.fill_(3.0)
        model.logit_scale_t.fill_(2.0)
    directory = zc.save_weights(model, tmp_path / "plain")
    scales = {name: value.reshape(()) for name, value in model.state_dict().items() if "logit_scale" in name}
    return add(directory, scales, among=True)


def load(directory: Path, parts: Parts = AUTO, **options: Any) -> ClapForContrast:
    return zc.build({}, fused=False, weights=directory, parts=parts, **options)


def add(directory: Path, tensors: dict[str, Tensor], *, among: bool) -> Path:
    """Puts tensors into a file of their own, or among the weights."""
    if among:
        tensors = load_file(directory / "model.safetensors") | tensors
    save_file(tensors, directory / ("model.safetensors" if among else FILE))
    return directory


def converted(name: str) -> str:
    for laion, hugging_face in CONVERTED.items():
        name = name.replace(laion, hugging_face)
    return name


@pytest.mark.parametrize("spelling", ["laion", "wrapped", "converted", "own file"])
def test_every_spelling(spelling: str, plain: Path, heads: dict[str, Tensor]) -> None:
    names = {"wrapped": lambda name: f"module.{name}", "converted": converted}.get(spelling, str)
    add(plain, {names(name): value for name, value in heads.items()}, among=spelling != "own file")
    model = load(plain)
    state = model.state_dict()
    assert model.has_heads and set(heads) == set(PARAMETERS)
    assert all(torch.equal(state[name], value) for name, value in heads.items())
    # Hugging Face's class loads the same directory, and tells names among the weights that it has no place for.
    _, report = ClapModel.from_pretrained(plain, output_loading_info=True)
    unexpected = {name for kind, found in report.items() if kind != "unexpected_keys" for name in found}
    assert not unexpected and bool(report["unexpected_keys"]) == (spelling != "own file")


def test_in_a_file_of_torch(plain: Path, heads: dict[str, Tensor]) -> None:
    torch.save(load_file(plain / "model.safetensors") | heads, plain / "pytorch_model.bin")
    (plain / "model.safetensors").unlink()
    assert torch.equal(load(plain).text_transform.sequential[3].bias, heads["text_transform.sequential.3.bias"])


def test_computes_what_laion_computes(plain: Path, heads: dict[str, Tensor]) -> None:
    model = load(add(plain, heads, among=False)).eval()
    output = model(**zc.make_pairs(3, fused=False)._asdict())
    for side, module in ((output.audio_embeds, "audio_transform"), (output.text_embeds, "text_transform")):
        weights = [heads[f"{module}.sequential.{n}.{kind}"] for n in (0, 3) for kind in ("weight", "bias")]
        expected = F.linear(F.linear(side, *weights[:2]).clamp(min=0), *weights[2:])
        found = output.audio_mlp if module == "audio_transform" else output.text_mlp
        torch.testing.assert_close(found, expected)
        assert (found.norm(dim=1) - 1).abs().min() > 0.01, "it is not normalised"
    assert output.logit_scale.item() == pytest.approx(20.0855, rel=1e-4)
    assert output.logit_scale_t is not None and output.logit_scale_t.item() == pytest.approx(7.38906, rel=1e-4)
    only_text = model(input_ids=torch.ones(2, 4, dtype=torch.int64))
    assert only_text.audio_mlp is None and only_text.text_mlp.shape == (2, 16)


def test_off_leaves_them_out(plain: Path, heads: dict[str, Tensor]) -> None:
    before = load(plain).state_dict()
    for among in (False, True):
        model = load(add(plain, heads, among=among), Parts(mlp="off"))
        (plain / FILE).unlink(missing_ok=True)
        assert not model.has_heads and model.state_dict().keys() == before.keys()
        output = model(**zc.make_pairs(2, fused=False)._asdict())
        assert output.audio_mlp is output.text_mlp is output.logit_scale_t is None


def test_weights_without_them_stay_without(plain: Path) -> None:
    assert not load(plain).has_heads


def test_a_part_of_them_is_refused_with_what_is_missing(plain: Path, heads: dict[str, Tensor]) -> None:
    half = {name: value for name, value in heads.items() if name.startswith("audio")}
    with pytest.raises(CheckpointError) as caught:
        load(add(plain, half, among=False))
    assert all(name in str(caught.value) for name in PARAMETERS if name.startswith("text")), caught.value
    assert "--objective.mlp off" in str(caught.value) and "\n" not in str(caught.value)
    load(plain, Parts(mlp="off"))


def test_others_that_do_not_fit_are_refused(plain: Path, heads: dict[str, Tensor]) -> None:
    wide = heads | {"text_transform.sequential.0.weight": torch.zeros(16, 24)}
    with pytest.raises(CheckpointError, match=r"text_transform.sequential.0.weight \[16, 24\] instead of \[16, 16\]"):
        load(add(plain, wide, among=False))
    more = heads | {"text_transform.sequential.6.weight": torch.zeros(16, 16)}
    with pytest.raises(CheckpointError, match="not of this model: text_transform.sequential.6.weight"):
        load(add(plain, more, among=False))


def test_twice_is_refused(plain: Path, heads: dict[str, Tensor]) -> None:
    add(add(plain, heads, among=True), heads, among=False)
    with pytest.raises(CheckpointError, match="both hold audio_transform.sequential.0.bias: remove one"):
        load(plain)


def test_the_sigmoid_objective_has_no_form_with_them(plain: Path, heads: dict[str, Tensor]) -> None:
    add(plain, heads, among=False)
    with pytest.raises(ConfigError, match="--objective.mlp off leaves them out"):
        load(plain, Parts(bias=True, mlp="auto"))
    assert load(plain, Parts(bias=True, mlp="off")).logit_bias is not None


@pytest.mark.parametrize(("given", "expected"), [(None, 0.1), (0.0, 0.0), (0.3, 0.3)])
def test_dropout(given: float | None, expected: float, plain: Path, heads: dict[str, Tensor]) -> None:
    model = load(add(plain, heads, among=False), dropout=given)
    assert model.audio_transform.sequential[2].p == model.text_transform.sequential[2].p == expected


def test_scales_and_biases_do_not_decay(plain: Path, heads: dict[str, Tensor]) -> None:
    model = load(add(plain, heads, among=False))
    decayed, rest = ([id(p) for p in group["params"]] for group in parameter_groups(model, weight_decay=0.1))
    for name, parameter in model.named_parameters():
        if name in PARAMETERS:
            assert id(parameter) in (decayed if name.endswith("weight") else rest)
        if name.startswith("logit_scale"):
            assert id(parameter) in rest and parameter.shape == (1,)
