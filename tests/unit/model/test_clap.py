"""The model against transformers' ClapModel, and what it does differently on purpose."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from transformers import ClapModel

from clap_zero.model.batch_norm import BatchNorm
from clap_zero.model.clap import ClapForContrast, build_model, logit_scale
from clap_zero.model.towers import PatchEmbed
from tests.distributed import zero_cases as zc


def ours_and_theirs(*, fused: bool, batch_norm: str = "local") -> tuple[ClapForContrast, ClapModel]:
    """Both models with the same weights and statistics that are not the initial ones."""
    ours = zc.build({}, fused=fused, batch_norm=batch_norm)
    for module in ours.modules():
        if isinstance(module, BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    theirs = ClapModel(ours.config)
    state = {n: t.reshape(()) if n.startswith("logit_scale") else t for n, t in ours.state_dict().items()}
    theirs.load_state_dict(state)
    return ours, theirs


def run(model: nn.Module, pairs: zc.Pairs) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Both embeddings and all gradients of a fixed weighting of them."""
    output = model(**pairs._asdict())
    weights = torch.randn(2, *output.audio_embeds.shape, generator=torch.Generator().manual_seed(5))
    (weights[0] * output.audio_embeds + weights[1] * output.text_embeds).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return output.audio_embeds.detach(), output.text_embeds.detach(), gradients


LONG = {"none": (), "one": (1,), "some": (0, 2), "all": (0, 1, 2, 3)}


@pytest.mark.parametrize("long_rows", LONG.values(), ids=LONG)
def test_evaluation_equals_transformers(long_rows: tuple[int, ...]) -> None:
    ours, theirs = (model.eval() for model in ours_and_theirs(fused=True))
    pairs = zc.make_pairs(4, fused=True, long_rows=long_rows)
    with torch.no_grad():
        a, b = ours(**pairs._asdict()), theirs(**pairs._asdict())
    torch.testing.assert_close(a.audio_embeds, b.audio_embeds, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(a.text_embeds, b.text_embeds, rtol=1e-6, atol=1e-6)


def test_evaluation_equals_transformers_without_fusion() -> None:
    ours, theirs = (model.eval() for model in ours_and_theirs(fused=False))
    pairs = zc.make_pairs(4, fused=False)
    with torch.no_grad():
        a, b = ours(**pairs._asdict()), theirs(**pairs._asdict())
    torch.testing.assert_close(a.audio_embeds, b.audio_embeds, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(a.text_embeds, b.text_embeds, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("fused", "long_rows"), [(False, ()), (True, ()), (True, (0, 2)), (True, (0, 1, 2, 3))])
def test_training_equals_transformers(fused: bool, long_rows: tuple[int, ...]) -> None:
    """Embeddings, gradients and moved statistics. With one long clip transformers raises."""
    ours, theirs = ours_and_theirs(fused=fused)
    pairs = zc.make_pairs(4, fused=fused, long_rows=long_rows)
    audio, text, gradients = run(ours.train(), pairs)
    expected_audio, expected_text, expected = run(theirs.train(), pairs)
    torch.testing.assert_close(audio, expected_audio, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(text, expected_text, rtol=1e-5, atol=1e-5)
    whole = torch.stack([g.norm() for g in expected.values()]).norm()
    for name, gradient in expected.items():
        error = (gradients[name] - gradient).norm() / max(gradient.norm(), 1e-3 * whole)
        assert error < 2e-4, (name, error)
    for name, gradient in gradients.items():
        assert name in expected or not gradient.any(), name
    for (name, a), b in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=name)


def test_one_long_clip_trains() -> None:
    ours, _ = ours_and_theirs(fused=True)
    output = ours(**zc.make_pairs(4, fused=True, long_rows=(3,))._asdict())
    zc.loss_of(output).backward()
    assert all(torch.isfinite(p.grad).all() for p in ours.parameters())


def test_the_graph_does_not_depend_on_the_clips() -> None:
    """Same modules in the same order, and a gradient for every parameter, for any share of long clips."""
    orders = []
    for long_rows in LONG.values():
        model = zc.build({}, fused=True)
        order: list[str] = []
        for name, module in model.named_modules():
            module.register_forward_hook(lambda *_, name=name, order=order: order.append(name))
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name, order=order: order.append(f"grad {name}"))
        zc.loss_of(model(**zc.make_pairs(4, fused=True, long_rows=long_rows)._asdict())).backward()
        assert [n for n, p in model.named_parameters() if p.grad is None] == []
        orders.append(order)
    assert all(order == orders[0] for order in orders)


def test_no_long_clip_leaves_the_fusion_block_alone() -> None:
    model = zc.build({}, fused=True)
    block = model.audio_model.audio_encoder.patch_embed.fusion_model
    before = {n: b.clone() for n, b in block.named_buffers()}
    zc.loss_of(model(**zc.make_pairs(4, fused=True)._asdict())).backward()
    assert all(not p.grad.any() for p in block.parameters())
    assert all(torch.equal(b, before[n]) for n, b in block.named_buffers())


def test_features_without_chunks_are_those_of_short_clips() -> None:
    model = zc.build({}, fused=True).eval()
    pairs = zc.make_pairs(3, fused=False)
    four = pairs.input_features.expand(-1, 4, -1, -1)
    with torch.no_grad():
        a = model(input_features=pairs.input_features, is_longer=pairs.is_longer)
        b = model(input_features=four, is_longer=pairs.is_longer)
    assert torch.equal(a.audio_embeds, b.audio_embeds)


def test_fusion_needs_to_know_which_clips_are_long() -> None:
    with pytest.raises(ValueError, match="is_longer"):
        zc.build({}, fused=True)(input_features=zc.make_pairs(2, fused=True).input_features)


def test_one_tower_alone_and_one_item() -> None:
    model = zc.build({}, fused=True).eval()
    pairs = zc.make_pairs(1, fused=True)
    with torch.no_grad():
        audio = model(input_features=pairs.input_features, is_longer=pairs.is_longer)
        text = model(input_ids=pairs.input_ids)
        both = model(**pairs._asdict())
    assert audio.text_embeds is None and text.audio_embeds is None
    assert audio.audio_embeds.shape == text.text_embeds.shape == (1, 16)
    assert torch.equal(audio.audio_embeds, both.audio_embeds)
    assert torch.equal(text.text_embeds, both.text_embeds)


def test_names_are_transformers() -> None:
    ours, theirs = ours_and_theirs(fused=True)
    shapes = {n: t.shape for n, t in theirs.state_dict().items()}
    assert list(ours.state_dict()) == list(shapes)
    different = [n for n, t in ours.state_dict().items() if t.shape != shapes[n]]
    assert different == ["logit_scale_a", "logit_scale_t"]
    assert isinstance(ours.audio_model.audio_encoder.patch_embed, PatchEmbed)


@pytest.mark.parametrize("model_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("feature_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("training", [False, True])
def test_half_precision_takes_any_features(
    model_dtype: torch.dtype, feature_dtype: torch.dtype, training: bool
) -> None:
    model = zc.build({}, fused=True).to(model_dtype).train(training)
    pairs = zc.make_pairs(4, fused=True, long_rows=(1, 2))
    pairs = pairs._replace(input_features=pairs.input_features.to(feature_dtype))
    output = model(**pairs._asdict())
    assert output.audio_embeds.dtype == output.text_embeds.dtype == output.logit_scale.dtype == torch.float32
    torch.testing.assert_close(output.audio_embeds.norm(dim=-1), torch.ones(4), rtol=1e-6, atol=1e-6)
    assert torch.isfinite(zc.loss_of(output))
    direct = model.get_audio_features(pairs.input_features, pairs.is_longer).pooler_output
    assert torch.isfinite(direct).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_silence_stays_finite(dtype: torch.dtype) -> None:
    """A whole micro batch of digital silence: -100 dB everywhere, no variance at all."""
    model = zc.build({}, fused=True).to(dtype)
    pairs = zc.make_pairs(4, fused=True, long_rows=(0, 1))
    loss = zc.loss_of(model(**pairs._replace(input_features=torch.full_like(pairs.input_features, -100))._asdict()))
    loss.backward()
    assert torch.isfinite(loss)
    # In fp16 gradients may overflow; DeepSpeed then skips the step (tests/distributed/test_precision.py).
    assert dtype == torch.float16 or all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("raw", [-3.0, 0.0, 2.659, math.log(100), 4.7, 100.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logit_scale_stays_within_its_bounds(raw: float, dtype: torch.dtype) -> None:
    scale = logit_scale(torch.tensor([raw], dtype=dtype))
    assert scale.shape == () and scale.dtype == torch.float32
    assert 1 <= scale <= 100
    expected = min(max(math.exp(min(raw, 50)), 1), 100)
    assert scale.item() == pytest.approx(expected, rel=1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize(
    ("raw", "wanted", "moves"),
    [
        (2, "up", True),
        (2, "down", True),
        (4.7, "up", False),
        (4.7, "down", True),
        (-1, "up", True),
        (-1, "down", False),
    ],
)
def test_beyond_a_bound_the_gradient_only_leads_back(raw: float, wanted: str, moves: bool) -> None:
    parameter = torch.tensor([float(raw)], requires_grad=True)
    (logit_scale(parameter) * (-1 if wanted == "up" else 1)).backward()
    assert bool(parameter.grad != 0) == moves


def test_a_scale_above_the_cap_comes_back() -> None:
    parameter = nn.Parameter(torch.tensor([4.8]))
    optimizer = torch.optim.Adam([parameter], lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        logit_scale(parameter).backward()
        optimizer.step()
    assert parameter < math.log(100)


def test_the_unused_scale_keeps_its_value() -> None:
    model = zc.build({}, fused=False)
    zc.loss_of(model(**zc.make_pairs(3, fused=False)._asdict())).backward()
    assert model.logit_scale_t.grad == 0 and model.logit_scale_a.grad != 0


@pytest.mark.parametrize("probability", [0.0, 0.3])
def test_dropout_override_reaches_every_dropout(probability: float) -> None:
    geometry = zc.tiny_geometry(fused=False)
    geometry["text_config"]["attention_probs_dropout_prob"] = 0.1
    geometry["audio_config"]["drop_path_rate"] = 0.1
    model = build_model(
        geometry=geometry,
        pretrained=None,
        batch_norm="local",
        dropout=probability,
        seed=0,
        ds_config={},
        device=zc.CPU,
    )
    dropouts = {n: m.p for n, m in model.named_modules() if isinstance(m, nn.Dropout)}
    assert len(dropouts) > 10 and set(dropouts.values()) == {probability}
    attention = [m.attention_dropout for m in model.modules() if hasattr(m, "attention_dropout")]
    assert attention == [probability] * 2
    paths = [getattr(m.drop_path, "drop_prob", 0.0) for m in model.modules() if hasattr(m, "drop_path")]
    assert paths == pytest.approx([0.0, probability / 2, probability])
    pairs = zc.make_pairs(2, fused=False)
    a, b = (model(**pairs._asdict()) for _ in range(2))
    assert torch.equal(a.audio_embeds, b.audio_embeds) == (probability == 0)
    assert torch.equal(a.text_embeds, b.text_embeds) == (probability == 0)
