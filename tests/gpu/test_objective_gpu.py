"""The objective and cached passes on a real device: exact whatever the program allows, and the same in both passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from clap_zero.distributed.world import World
from clap_zero.model.activation import enable_activation_checkpointing
from clap_zero.model.clap import ClapForContrast, build_model
from clap_zero.objective.chunk import CHUNK_ELSEWHERE
from clap_zero.objective.config import ObjectiveConfig
from clap_zero.training.passes import CachedPasses, Inputs, MicroPasses
from tests.distributed import zero_cases as zc
from tests.unit.objective.cases import VARIANTS, Case, chunked, flat, largest_error, make_case
from tests.unit.training.plain_engine import PLAIN, PlainEngine, Ready

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
NUM_PAIRS = CHUNK_ELSEWHERE + 300
"""More than one block in either direction, with an uneven tail."""


@pytest.fixture
def tf32_is_allowed() -> Iterator[None]:
    """As a program around would, which wants speed for its own products."""
    switch: Any = torch.backends.cuda.matmul
    before = switch.fp32_precision
    switch.fp32_precision = "tf32"
    try:
        yield
        assert switch.fp32_precision == "tf32"
    finally:
        switch.fp32_precision = before


def large_case(scale: float) -> Case:
    """Captions that lean towards their clips; every tenth pair shares its caption with the next one."""
    case = make_case(range(NUM_PAIRS), scale=scale, width=64)
    groups = torch.arange(NUM_PAIRS)
    groups[1::10] = groups[0::10][: len(groups[1::10])]
    return case._replace(text=F.normalize(0.3 * case.audio + case.text, dim=-1), groups=groups)


def on_device(case: Case) -> Case:
    return Case(*(t.to(DEVICE) for t in case))


@pytest.mark.parametrize("scale", [1 / 0.07, 100.0])
@pytest.mark.parametrize("name", ["softmax", "softmax-soft", "smoothing-mask", "hard-mask", "sigmoid-soft"])
def test_equals_float64_on_the_cpu(name: str, scale: float, tf32_is_allowed: None) -> None:
    """With the chunk of the device, in float32, inside a program that allows TF32 and autocast."""
    config: ObjectiveConfig = VARIANTS[name]
    case = large_case(scale)
    exact = flat(chunked(case, config))
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        ours = flat(chunked(on_device(case.to(torch.float32)), config))
    assert all(t.dtype == torch.float32 and t.device.type == DEVICE.type for t in ours)
    # A logit of 100 in float32 is known to 8e-6 at best, and so is the exponential's relative error.
    assert largest_error([t.cpu() for t in ours], exact, floor=1e-3) < (1e-5 if scale < 50 else 1e-4)


def test_tf32_would_be_seen(tf32_is_allowed: None) -> None:
    """The test of the test above."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this device has no TF32")
    case = large_case(100.0)
    audio, text = (t.float().to(DEVICE) for t in (case.audio, case.text))
    off = ((audio @ text.t()).double() - audio.double() @ text.double().t()).abs().max()
    assert 100 * off > 1e-3, "logits must be off by much more than what is asked for"


def make_model(*, dropout: float, dtype: torch.dtype = torch.float32, checkpointing: bool = False) -> ClapForContrast:
    config: dict[str, Any] = {"activation_checkpointing": {}} if checkpointing else {}
    model = build_model(
        geometry=zc.tiny_geometry(fused=True),
        pretrained=None,
        batch_norm="frozen" if not dropout else "local",
        dropout=dropout,
        seed=3,
        ds_config=config,
        device=torch.device("cpu"),
    )
    assert enable_activation_checkpointing(model, config) == checkpointing
    return model.to(device=DEVICE, dtype=dtype).train()


def inputs(first: int, stop: int) -> Inputs:
    """Rows of one batch of 16, a quarter of it long clips."""
    pairs = zc.make_pairs(16, fused=True, long_rows=(0, 1, 5, 10), seed=9).rows(first, stop)
    return Inputs(*(t.to(DEVICE) for t in pairs), torch.arange(first, stop, device=DEVICE))


def ready(model: ClapForContrast, accumulation: int) -> Ready:
    return Ready(PlainEngine(model, accumulation=accumulation), world=World(0, 1, 0, 1, DEVICE))


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of one rank: DeepSpeed's checkpointing asks for its number."""
    import deepspeed

    store = tmp_path_factory.mktemp("store") / "file"
    place: dict[str, Any] = {"init_method": f"file://{store}", "rank": 0, "world_size": 1}
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False, **place)
    yield
    deepspeed.comm.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_passes_draw_the_same_dropout(dtype: torch.dtype, checkpointing: bool) -> None:
    """Without and with gradient, where a kernel of attention may be chosen by which it is."""
    model = make_model(dropout=0.1, dtype=dtype, checkpointing=checkpointing)
    forward, given = ready(model, 1), inputs(0, 16)
    given = given._replace(input_features=given.input_features.to(dtype))
    with torch.no_grad():
        first = forward.embed(given, step=1, micro_index=0)
    second = forward.embed(given, step=1, micro_index=0)
    other = forward.embed(given, step=1, micro_index=1)
    for a, b, c in zip(first[:2], second[:2], other[:2], strict=True):
        assert torch.equal(a, b), f"off by {float((a - b).abs().max()):.1e}"
        assert not torch.equal(a, c)


def gradients_of(accumulation: int, kind: Any) -> tuple[float, dict[str, Tensor]]:
    model = make_model(dropout=0.0)
    size = 16 // accumulation
    batches: Any = iter([inputs(first, first + size) for first in range(0, 16, size)])
    result = kind(ready(model, accumulation), objective=PLAIN).run(batches, step=1)
    assert result.updated
    return float(result.loss), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_cached_passes_are_one_pass() -> None:
    """16 pairs as 16 x 1 and as 4 x 4."""
    (loss, whole), (cached_loss, cached) = gradients_of(1, MicroPasses), gradients_of(4, CachedPasses)
    assert cached_loss == pytest.approx(loss, rel=1e-5)
    assert cached.keys() == whole.keys()
    ours, right = (torch.cat([g.double().flatten() for _, g in sorted(of.items())]) for of in (cached, whole))
    assert (ours - right).norm() < 1e-4 * right.norm()
