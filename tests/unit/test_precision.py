"""Products in full float32 inside a program that allows less."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from clap_zero.objective.config import ObjectiveConfig
from clap_zero.precision import exact_float32
from tests.unit.objective.cases import VARIANTS, chunked, flat, make_case

CPU = torch.device("cpu")
SWITCHES: tuple[Any, ...] = (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)  # type: ignore[attr-defined]
ALLOWED = ("bf16", "tf32")


def now() -> tuple[str, ...]:
    return tuple(switch.fp32_precision for switch in SWITCHES)


@pytest.fixture(autouse=True)
def less_is_allowed() -> Iterator[None]:
    """As a program would: bf16 products on CPUs, TF32 on GPUs; and what it allows is in force again afterwards."""
    before = now()
    for switch, value in zip(SWITCHES, ALLOWED, strict=True):
        switch.fp32_precision = value
    try:
        yield
        assert now() == ALLOWED
    finally:
        for switch, value in zip(SWITCHES, before, strict=True):
            switch.fp32_precision = value


def test_the_switches_are_set_and_put_back() -> None:
    with exact_float32(CPU):
        assert now() == ("ieee", "ieee")
        assert not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert now() == ALLOWED


def test_they_are_put_back_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), torch.autocast("cpu", dtype=torch.bfloat16), exact_float32(CPU):
        _ = 1 / 0
    assert now() == ALLOWED


def test_the_last_thread_puts_them_back() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with exact_float32(CPU):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with exact_float32(CPU):
        thread.start()
        assert inside.wait(10)
    assert now() == ("ieee", "ieee"), "the other thread is inside"
    leave.set()
    thread.join()
    assert now() == ALLOWED


class Products(TorchDispatchMode):
    """Remembers which precision was in force at every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in function.overloadpacket.__name__ or "mv" in function.overloadpacket.__name__:
            self.seen.add(now())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["softmax", "hard-mask", "sigmoid-soft"])
def test_every_product_of_the_objective_is_exact(name: str) -> None:
    config: ObjectiveConfig = VARIANTS[name]
    case = make_case([i % 250 for i in range(300)], width=64).to(torch.float32)
    with Products() as mode:
        allowed = flat(chunked(case, config))
    assert mode.seen == {("ieee", "ieee")}
    for switch in SWITCHES:
        switch.fp32_precision = "ieee"
    exact = flat(chunked(case, config))
    for switch, value in zip(SWITCHES, ALLOWED, strict=True):
        switch.fp32_precision = value
    assert all(torch.equal(a, b) for a, b in zip(allowed, exact, strict=True))
