"""One measurement of the objective, made to run in a process of its own: time, and memory above what was there."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from clap_zero.objective.blocks import Problem
from clap_zero.objective.chunk import default_chunk
from clap_zero.objective.chunked import RankView, local_gradients, objective_gradients
from clap_zero.objective.config import ObjectiveConfig
from clap_zero.process_memory import forget_peak, peak_bytes, resident_bytes

CHUNKED = {
    "chunked": ObjectiveConfig(loss="softmax", positives="off"),
    "chunked-soft": ObjectiveConfig(loss="softmax", positives="soft"),
    "sigmoid": ObjectiveConfig(loss="sigmoid", positives="off"),
    "sigmoid-soft": ObjectiveConfig(loss="sigmoid", positives="soft"),
}
"""The forms of ours. Soft ones have a caption twice, so that they cost what they do with real captions."""


class Measured(NamedTuple):
    """What one run of one form took.

    Attributes:
        wall_s: Wall time of forward and backward.
        cpu_s: Processor time of all threads.
        extra_bytes: Peak memory above that before the call, gradients included.
        peak_bytes: Peak memory of the whole process.
        loss: In nats.
    """

    wall_s: float
    cpu_s: float
    extra_bytes: int
    peak_bytes: int
    loss: float


def embeddings(num_pairs: int, width: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Normalised random clips and captions, (num_pairs, width) fp32 each; captions lean towards their clips."""
    random = torch.Generator().manual_seed(seed)
    audio, noise = (torch.randn(num_pairs, width, generator=random) for _ in range(2))
    return F.normalize(audio, dim=-1), F.normalize(0.3 * audio + noise, dim=-1)


def dense(audio: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """The dense form with the fewest products: one matrix of logits, its transpose read for the other direction."""
    logits = scale * audio @ text.t()
    labels = torch.arange(audio.shape[0], device=audio.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def dense_twice(audio: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """The usual dense form: a matrix of logits for each direction."""
    labels = torch.arange(audio.shape[0], device=audio.device)
    return (F.cross_entropy(scale * audio @ text.t(), labels) + F.cross_entropy(scale * text @ audio.t(), labels)) / 2


def _with_autograd(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor], num_pairs: int, width: int
) -> Callable[[], Tensor]:
    """A dense form, forward and backward."""
    inputs = [t.requires_grad_() for t in (*embeddings(num_pairs, width), torch.tensor(1 / 0.07))]

    def run() -> Tensor:
        result = loss(*inputs)
        result.backward()
        return result.detach()

    return run


def _by_hand(config: ObjectiveConfig, num_pairs: int, width: int) -> Callable[[], Tensor]:
    """The chunked form; where captions matter, with those of the first and of the last pair equal."""
    audio, text = embeddings(num_pairs, width)
    bias = torch.tensor(-10.0) if config.uses_bias else None
    groups = torch.arange(num_pairs)
    groups[-1] = groups[0]
    kept = []

    def run() -> Tensor:
        kept.append(
            objective_gradients(
                audio, text, logit_scale=torch.tensor(1 / 0.07), logit_bias=bias, groups=groups, config=config
            )
        )
        return kept[-1].loss

    return run


def _one_rank(num_pairs: int, width: int, num_ranks: int) -> Callable[[], Tensor]:
    """The last of `num_ranks` ranks, without the others: what they would send is made here, and counts as memory."""
    local = num_pairs // num_ranks
    audio, text = embeddings(local, width)
    kept = []

    def run() -> Tensor:
        all_audio, all_text = (torch.empty(num_pairs, width) for _ in range(2))
        for rank in range(num_ranks):
            here = slice(rank * local, (rank + 1) * local)
            others = embeddings(local, width, seed=rank) if rank < num_ranks - 1 else (audio, text)
            all_audio[here], all_text[here] = others
        view = RankView(audio, text, all_audio, all_text, None, num_pairs - local)
        problem = Problem(
            torch.tensor(1 / 0.07), None, ObjectiveConfig(positives="off"), num_pairs, default_chunk(audio.device.type)
        )
        # The other ranks' statistics are of the size of its own.
        kept.append(local_gradients(view, problem=problem, exchange=lambda own: own.repeat(num_ranks, 1)))
        return kept[-1].loss

    return run


def prepare(form: str, num_pairs: int, width: int, num_ranks: int = 1) -> Callable[[], Tensor]:
    """What is measured: dense, dense_twice, one of `CHUNKED`, or rank.

    Args:
        form: Of these.
        num_pairs: B.
        width: d.
        num_ranks: For the form rank: ranks that share B.
    """
    if form == "rank":
        return _one_rank(num_pairs, width, num_ranks)
    if form in CHUNKED:
        return _by_hand(CHUNKED[form], num_pairs, width)
    return _with_autograd({"dense": dense, "dense_twice": dense_twice}[form], num_pairs, width)


def measure(form: str, num_pairs: int, width: int, num_ranks: int, threads: int) -> Measured:
    """Runs one form once, after a small warm-up run that starts threads and libraries.

    Args:
        form: See `prepare`.
        num_pairs: B.
        width: d.
        num_ranks: For the form rank: ranks that share B.
        threads: Of torch.
    """
    torch.set_num_threads(threads)
    prepare(form, 64 * num_ranks, width, num_ranks)()
    run = prepare(form, num_pairs, width, num_ranks)
    forget_peak()
    before = resident_bytes()
    wall, cpu = time.perf_counter(), time.process_time()
    loss = float(run())
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = peak_bytes()
    return Measured(wall, cpu, max(0, peak - before), peak, loss)


def opposed_pairs(num_pairs: int, width: int) -> dict[str, float]:
    """Scale 100, clips around one direction and captions around its opposite: errors against float64, and of a fixed
    shift of the exponent.

    Returns:
        `loss` in nats in float64; `chunked` and `dense` relative errors of the gradient in float32, `chunked_loss` of
        the loss; `fixed_shift` the loss when 100, the largest possible logit, is taken off every exponent.
    """
    centre = embeddings(1, width, seed=1)[0]
    audio, text = (
        F.normalize(t + sign * 2 * centre, dim=-1)
        for t, sign in zip(embeddings(num_pairs, width), (1, -1), strict=True)
    )
    scale = torch.tensor(100.0)

    def gradient(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        inputs = [t.to(dtype).requires_grad_() for t in (audio, text, scale)]
        loss = dense(*inputs)
        return loss.detach(), torch.autograd.grad(loss, inputs[0])[0]

    loss, exact = gradient(torch.float64)
    ours = objective_gradients(audio, text, logit_scale=scale, config=ObjectiveConfig(positives="off"))
    logits = scale * audio @ text.t()
    shifted = (logits - scale).exp().sum(1).log() + scale - logits.diagonal()
    return {
        "loss": loss.item(),
        "chunked_loss": abs(ours.loss.item() / loss.item() - 1),
        "chunked": ((ours.audio - exact).norm() / exact.norm()).item(),
        "dense": ((gradient(torch.float32)[1] - exact).norm() / exact.norm()).item(),
        "fixed_shift": shifted.mean().item() if bool(shifted.isfinite().all()) else math.inf,
    }
