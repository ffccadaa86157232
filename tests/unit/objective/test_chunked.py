"""The chunked objective against the slow references and torch's dense autograd, where numbers are awkward too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from clap_zero.objective.blocks import Problem
from clap_zero.objective.chunked import RankView, local_gradients, objective_gradients
from clap_zero.objective.config import ObjectiveConfig
from clap_zero.objective.sigmoid import _softplus
from tests.unit.objective.cases import VARIANTS, Case, chunked, flat, largest_error, make_case, value_and_gradients

variants = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
SHARED = (0, 1, 0, 2, 3, 0, 3)
PLAIN = VARIANTS["softmax"]


@variants
@pytest.mark.parametrize("chunk", [1, 3, 4, 16])
def test_equals_the_reference(config: ObjectiveConfig, chunk: int) -> None:
    """Three captions of one group, two of another; blocks with uneven tails, of one cell, and larger than the batch."""
    case = make_case(SHARED)
    assert largest_error(flat(chunked(case, config, chunk=chunk)), value_and_gradients(case, config)) < 1e-11


@variants
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_a_batch_of_one(config: ObjectiveConfig, scale: float) -> None:
    """No negatives: softmax has nothing to decide."""
    case = make_case([5], scale=scale)
    result = chunked(case, config)
    assert largest_error(flat(result), value_and_gradients(case, config)) < 1e-12
    if not config.uses_bias:
        assert largest_error(flat(result), [torch.zeros_like(t) for t in flat(result)]) < 1e-12


@variants
@pytest.mark.parametrize("chunk", [2, 16])
def test_all_captions_equal(config: ObjectiveConfig, chunk: int) -> None:
    case = make_case([4] * 5, scale=100.0)
    assert largest_error(flat(chunked(case, config, chunk=chunk)), value_and_gradients(case, config)) < 1e-10


def opposed(groups: tuple[int, ...]) -> Case:
    """Scale 100 and captions that point away from their clips."""
    case = make_case(groups, scale=100.0)
    return case._replace(text=-case.audio)


def opposite_clusters(groups: tuple[int, ...]) -> Case:
    """Scale 100 and clips around one direction, captions around its opposite: every logit is near -100."""
    case = make_case(groups, scale=100.0)
    centre = torch.tensor([0.0, 0.0, 12.0, 0.0, 0.0], dtype=torch.float64)
    return case._replace(audio=F.normalize(case.audio + centre, dim=-1), text=F.normalize(case.text - centre, dim=-1))


@variants
@pytest.mark.parametrize("make", [opposed, opposite_clusters])
@pytest.mark.parametrize("chunk", [3, 16])
def test_scale_100_and_opposite_directions(config: ObjectiveConfig, make: Any, chunk: int) -> None:
    case = make(SHARED)
    reference = value_and_gradients(case, config)
    assert largest_error(flat(chunked(case, config, chunk=chunk)), reference) < 1e-10
    single = flat(chunked(case.to(torch.float32), config, chunk=chunk))
    assert all(t.dtype == torch.float32 for t in single)
    # A logit of 100 in float32 is known to 8e-6 at best, and so is the exponential's relative error.
    assert largest_error(single, reference, floor=1e-3) < 1e-4


def test_a_fixed_shift_would_underflow_there() -> None:
    """The test of the test above: what it guards against does happen with these numbers."""
    case = opposite_clusters(SHARED).to(torch.float32)
    logits = case.scale * case.audio @ case.text.t()
    assert not (logits - case.scale).exp().sum(1).log().isfinite().all()


class Exponentials(TorchDispatchMode):
    """Counts how many exponentials were taken."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.exp, torch.ops.aten.exp_):
            self.count += result.numel()
        return result


def counted(case: Case, chunk: int) -> tuple[list[Tensor], float]:
    """Loss and gradients, and exponentials for each cell of the similarity matrix; each of the two sweeps has some."""
    with Exponentials() as mode:
        result = flat(chunked(case, PLAIN, chunk=chunk))
    return result, mode.count / len(case.audio) ** 2


def test_one_and_two_exponentials_a_cell_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks whose lines have largest logits near each other take a short cut."""
    case = make_case(range(40), scale=20.0, width=16)
    short, few = counted(case, 16)
    monkeypatch.setattr("clap_zero.objective.softmax.NEAR", -1.0)
    long, many = counted(case, 16)
    assert 2 <= few < 3 and many >= 4
    assert largest_error(long, short) < 1e-13


def far_apart() -> Case:
    """40 pairs at scale 100: the largest logits of half of the lines are near 97, of the others near 52."""
    case = make_case(range(40), scale=100.0, width=16)
    axes = torch.eye(16, dtype=torch.float64)
    other = 0.57 * axes[1] + 0.82 * axes[2]
    centres = torch.stack([axes[0]] * 20 + [axes[1]] * 20), torch.stack([axes[0]] * 20 + [other] * 20)
    audio, text = (F.normalize(c + 0.05 * t, dim=-1) for c, t in zip(centres, (case.audio, case.text), strict=True))
    return case._replace(audio=audio, text=text)


def test_one_exponential_is_right_where_lines_are_nearly_too_far_apart() -> None:
    """45 nats below the block's largest logit, in float32, each row for itself."""
    case = far_apart()
    others = (100 * case.audio @ case.text.t()).fill_diagonal_(-torch.inf)
    assert 43 < others.amax(1).max() - others.amax(1).min() < 49
    single, exponentials = counted(case.to(torch.float32), 64)
    assert exponentials < 3, "the short cut was not taken"
    exact, plain = (dense(case.to(dtype)) for dtype in (torch.float64, torch.float32))
    for ours, theirs, right in zip(single[1:3], plain[1:3], exact[1:3], strict=True):
        # Only these rows' exponentials are small; their errors are those of the logits, which dense float32 has too.
        error, usual = (((t - right).norm(dim=1) / right.norm(dim=1))[20:].max() for t in (ours, theirs))
        assert error < 3 * usual < 2e-4
    assert single[0] == pytest.approx(exact[0].item(), rel=1e-6)


def dense(case: Case, smoothing: float = 0.0) -> list[Tensor]:
    """Loss and gradients by torch, with the whole matrix."""
    inputs = [t.clone().requires_grad_() for t in case[:3]]
    logits = inputs[2] * inputs[0] @ inputs[1].t()
    labels = torch.arange(len(case.audio))
    losses = [F.cross_entropy(x, labels, label_smoothing=smoothing) for x in (logits, logits.t())]
    loss = (losses[0] + losses[1]) / 2
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("scale", [1 / 0.07, 100.0])
def test_equals_dense_autograd_in_float32(smoothing: float, scale: float) -> None:
    """Of 300 pairs in blocks of 128: no further from float64 than three times what dense float32 is."""
    case = make_case(range(300), scale=scale, width=64)
    config = ObjectiveConfig(label_smoothing=smoothing, positives="off")
    exact = dense(case, smoothing)
    assert largest_error(flat(chunked(case, config, chunk=128)), exact) < 1e-11
    error = largest_error(flat(chunked(case.to(torch.float32), config, chunk=128)), exact)
    assert error < 1e-5
    assert error < 3 * largest_error(dense(case.to(torch.float32), smoothing), exact)


def test_well_separated_pairs_keep_their_small_gradients() -> None:
    """Where a model is nearly done the loss is of the size of rounding; the gradient must not drown in 1 - 0.99999."""
    case = make_case(range(6), scale=30.0, width=8)
    case = case._replace(text=F.normalize(case.audio + 0.01 * case.text, dim=-1))
    reference = value_and_gradients(case, ObjectiveConfig(positives="off"))
    assert 0 < reference[0] < 1e-3
    assert (
        largest_error(flat(chunked(case.to(torch.float32), ObjectiveConfig(positives="off"))), reference, floor=1e-12)
        < 1e-4
    )


@variants
def test_half_precision_is_taken_as_float32(config: ObjectiveConfig) -> None:
    """Logits that overflow float16 are fine in float32, known to 4e-3; autocast, which would round, changes nothing."""
    case = make_case(SHARED)
    half = Case(*(t.half() if t.is_floating_point() else t for t in case))._replace(scale=torch.tensor(100.0))
    large = half._replace(audio=half.audio * 600, text=half.text * 2)
    assert not torch.isfinite(large.scale.half() * large.audio @ large.text.t()).all()
    exact = value_and_gradients(large.to(torch.float64), config)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = flat(chunked(large, config))
    assert all(t.dtype == torch.float32 for t in ours)
    assert largest_error(ours, exact, floor=1e-2) < 1e-3


@variants
def test_not_a_number_is_passed_on(config: ObjectiveConfig) -> None:
    case = make_case(SHARED)
    case.audio[3, 1] = torch.nan
    assert chunked(case, config, chunk=3).loss.isnan()


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that an operation returned, in elements."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [
            t.untyped_storage().nbytes() // t.element_size() for t in tree_flatten(result)[0] if torch.is_tensor(t)
        ]
        self.largest = max(self.largest, *sizes, 0)
        return result


@variants
def test_the_similarity_matrix_is_never_whole(config: ObjectiveConfig) -> None:
    case = make_case([i % 150 for i in range(200)], width=4).to(torch.float32)
    with LargestTensor() as mode:
        chunked(case, config, chunk=32)
    assert mode.largest <= max(32 * 32, 200 * 8)
    with LargestTensor() as mode:
        chunked(case, config, chunk=200)
    assert mode.largest == 200 * 200


@variants
@pytest.mark.parametrize("chunk", [2, 5])
def test_ranks_without_a_process_group(config: ObjectiveConfig, chunk: int) -> None:
    """Three ranks of four pairs, one after another; what they exchange is put together by hand."""
    case = make_case([0, 1, 0, 2, 3, 0, 3, 4, 5, 5, 6, 7])
    problem = Problem(case.scale, case.bias if config.uses_bias else None, config, 12, chunk)
    batches = [
        RankView(case.audio[i : i + 4], case.text[i : i + 4], case.audio, case.text, _groups(case, config), i)
        for i in (0, 4, 8)
    ]
    sent: list[Tensor] = []
    for batch in batches:
        # The first round is only for what each rank sends, which does not depend on what it receives.
        local_gradients(batch, problem=problem, exchange=lambda own: sent.append(own) or own.repeat(3, 1))
    received = torch.cat(sent) if sent else None
    results = [local_gradients(b, problem=problem, exchange=lambda own: received) for b in batches]
    parts = list(zip(*(flat(result) for result in results), strict=True))
    whole = [torch.stack(parts[0]).mean(), *(torch.cat(part) / 3 for part in parts[1:3])]
    whole += [torch.stack(part).mean() for part in parts[3:]]
    assert largest_error(whole, value_and_gradients(case, config)) < 1e-11


def _groups(case: Case, config: ObjectiveConfig) -> Tensor | None:
    return case.groups if config.uses_groups else None


def test_default_chunk_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clap_zero.objective.chunk.CHUNK_ON_CPU", 2)
    with LargestTensor() as mode:
        chunked(make_case(range(20), width=1), PLAIN)
    assert mode.largest <= 20 * 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": torch.zeros(6, 5)}, r"clips \(7, 5\) and captions \(6, 5\)"),
        ({"audio": torch.zeros(0, 5), "text": torch.zeros(0, 5)}, "n > 0"),
        ({"logit_bias": torch.tensor(0.0)}, "the softmax loss takes no logit_bias"),
        ({"config": VARIANTS["sigmoid"]}, "the sigmoid loss takes a logit_bias"),
        ({"config": VARIANTS["softmax-mask"]}, r"positives mask needs groups of shape \(7,\), got none"),
        ({"config": VARIANTS["softmax-soft"], "groups": torch.zeros(3, dtype=torch.int64)}, r"got \(3,\)"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    case = make_case(SHARED)
    arguments = {
        "audio": case.audio,
        "text": case.text,
        "logit_scale": case.scale,
        "config": ObjectiveConfig(positives="off"),
    }
    arguments |= changes
    with pytest.raises(ValueError, match=message):
        objective_gradients(arguments.pop("audio"), arguments.pop("text"), **arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softplus_to_the_last_bits(dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-80, 80, 4001), torch.tensor([-torch.inf, 0.0])]).to(dtype)
    exact = torch.logaddexp(x.double(), torch.zeros(()).double())
    ours = _softplus(x.clone(), torch.empty_like(x)).double()
    assert ((ours - exact).abs() <= 4 * torch.finfo(dtype).eps * exact).all()
