"""Retrieval over held-out pairs: shared over ranks while training, or by one process from a checkpoint."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from clap_zero.audio.features import ClapFeatures
from clap_zero.checkpoint.buffers import merged_statistics
from clap_zero.checkpoint.files import write_text_atomic
from clap_zero.checkpoint.store import CheckpointStore, step_name
from clap_zero.data.batch import EvalBatch
from clap_zero.distributed.collectives import (
    all_gather_objects,
    all_reduce_max,
    broadcast_object,
    patient_wait,
    rank_and_size,
)
from clap_zero.errors import CheckpointError, ClapZeroError, ConfigError
from clap_zero.evaluation.retrieval import RECALL_AT, mean_map, retrieval_metrics
from clap_zero.model.clap import ContrastOutput
from clap_zero.phases import advance

_CAPTIONS_PER_CLIP = 8
"""Captions of a batch that the model embeds at once, for each of its clips: few of the usual data sets have more."""


@dataclass(frozen=True)
class EvalResult:
    """Retrieval on the held-out pairs.

    Attributes:
        metrics: Names as in `retrieval_metrics`; recall and mAP are fractions.
        num_clips: Clips counted, each once.
        num_captions: Their captions.
        num_skipped: Clips that could not be used.
    """

    metrics: dict[str, float]
    num_clips: int
    num_captions: int
    num_skipped: int = 0


@dataclass
class _Embeddings:
    """Valid embeddings and the clips they belong to; on the CPU."""

    audio: Tensor
    clip_ids: Tensor
    text: Tensor
    caption_clip_ids: Tensor
    caption_ids: Tensor
    num_skipped: int

    @staticmethod
    def joined(parts: list[_Embeddings]) -> _Embeddings:
        """All parts as one, clips and captions in the order of clip ids (captions of a clip stay in their order)."""
        clip_ids = torch.cat([part.clip_ids for part in parts])
        owners = torch.cat([part.caption_clip_ids for part in parts])
        by_clip, by_owner = clip_ids.argsort(stable=True), owners.argsort(stable=True)
        return _Embeddings(
            torch.cat([part.audio for part in parts])[by_clip],
            clip_ids[by_clip],
            torch.cat([part.text for part in parts])[by_owner],
            owners[by_owner],
            torch.cat([part.caption_ids for part in parts])[by_owner],
            sum(part.num_skipped for part in parts),
        )


def evaluate(
    engine_or_model: nn.Module, batches: Iterable[EvalBatch], features: ClapFeatures, *, device: torch.device
) -> EvalResult:
    """Embeds this rank's share of the held-out pairs and ranks the embeddings of all ranks together.

    Nothing is random, and the figures do not depend on the number of ranks: repeats that fill up the last batches are
    left out, and BatchNorm statistics that differ between ranks are merged for the time (as in an export).

    Args:
        engine_or_model: ClapForContrast, or the DeepSpeed engine around it, at any ZeRO stage.
        batches: This rank's batches; all ranks have equally many.
        features: Waveforms to log-mel.
        device: Where the model is.

    Returns:
        The same on all ranks.

    Raises:
        DataError: There are no usable pairs.
        DivergedError: An embedding is not finite.

    Collective: all ranks must call.
    """
    module = getattr(engine_or_model, "module", engine_or_model)
    with torch.no_grad(), _evaluation_mode(engine_or_model), merged_statistics(module):
        own = _embed(engine_or_model, batches, features, device)
    parts = [part for part in all_gather_objects(own) if part is not None]
    rank, _ = rank_and_size()
    outcome: EvalResult | ClapZeroError | None = None
    if rank == 0:
        try:
            outcome = _rank_all(parts)
        except ClapZeroError as error:
            outcome = error
    outcome = broadcast_object(outcome)
    if isinstance(outcome, ClapZeroError):
        raise outcome
    assert isinstance(outcome, EvalResult)
    return outcome


def _embed(
    model: nn.Module, batches: Iterable[EvalBatch], features: ClapFeatures, device: torch.device
) -> _Embeddings | None:
    parts = []
    for batch in batches:
        advance()  # the phase is a long one
        moved = batch.to(device, non_blocking=True)
        input_features, is_longer = features(moved.clips)
        audio_embeds, text_embeds = _forward(model, input_features, is_longer, moved)
        valid, caption_valid = batch.valid.cpu(), batch.caption_valid.cpu()
        parts.append(
            _Embeddings(
                audio_embeds[valid],
                batch.clip_ids.cpu()[valid],
                text_embeds[caption_valid],
                batch.caption_clip_ids.cpu()[caption_valid],
                batch.caption_ids.cpu()[caption_valid],
                len(batch.skipped),
            )
        )
    return _Embeddings.joined(parts) if parts else None


def _forward(
    model: nn.Module, input_features: Tensor, is_longer: Tensor | None, batch: EvalBatch
) -> tuple[Tensor, Tensor]:
    """Embeddings of the clips and of the captions of a batch, fp32 on the CPU.

    Clips may have any number of captions: they go through the model in pieces, so that they do not decide how much
    memory it takes. All ranks make equally many forward passes, because ZeRO stage 3 gathers weights in each; a rank
    with fewer pieces repeats its last one.

    For a model with LAION's extra heads the rows are longer, and the product of two is what LAION ranks by: the mean of
    (audio, text_mlp) by the first scale and of (audio_mlp, text) by the second.
    """
    at_once = _CAPTIONS_PER_CLIP * len(batch)
    pieces = list(zip(batch.input_ids.split(at_once), batch.attention_mask.split(at_once), strict=True))
    patient_wait()  # batches are not read equally fast
    num_passes = int(all_reduce_max(torch.tensor(len(pieces), device=batch.input_ids.device)))
    ids, mask = pieces[0]
    output = model(input_features=input_features, is_longer=is_longer, input_ids=ids, attention_mask=mask)
    audio, texts = _audio_rows(output), [_text_rows(output)]
    for number in range(1, num_passes):
        ids, mask = pieces[min(number, len(pieces) - 1)]
        output = model(input_ids=ids, attention_mask=mask)
        if number < len(pieces):
            texts.append(_text_rows(output))
    return audio, torch.cat(texts)


def _audio_rows(output: ContrastOutput) -> Tensor:
    assert output.audio_embeds is not None
    if output.audio_mlp is None or output.logit_scale_t is None:
        return output.audio_embeds.float().cpu()
    scaled = [output.logit_scale * output.audio_embeds, output.logit_scale_t * output.audio_mlp]
    return torch.cat(scaled, dim=1).float().cpu() / 2


def _text_rows(output: ContrastOutput) -> Tensor:
    assert output.text_embeds is not None
    if output.text_mlp is None:
        return output.text_embeds.float().cpu()
    return torch.cat([output.text_mlp, output.text_embeds], dim=1).float().cpu()


def _rank_all(parts: list[_Embeddings]) -> EvalResult:
    if not parts:
        raise ConfigError("nothing to evaluate: data.val holds no pairs")
    every = _Embeddings.joined(parts)
    assert len(every.clip_ids.unique()) == len(every.clip_ids), "a clip was embedded by two ranks"
    rows = torch.searchsorted(every.clip_ids, every.caption_clip_ids)
    # Equal captions have equal scores: in bf16 the same text embedded in two batches differs by more than rounding.
    _, groups = every.caption_ids.unique(return_inverse=True)
    places = torch.arange(len(groups))
    first = torch.full_like(places, len(groups)).scatter_reduce(0, groups, places, "amin")
    metrics = retrieval_metrics(every.audio, every.text[first[groups]], rows)
    return EvalResult(metrics, len(every.audio), len(every.text), every.num_skipped)


@contextlib.contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """eval() within the block; afterwards every submodule is in the mode that it was in (some may be frozen)."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def write_result(run_dir: str | Path, step: int, result: EvalResult) -> Path:
    """Writes RUN/eval/step-N.json in one step and returns its path. One process only."""
    path = Path(run_dir) / "eval" / f"step-{step}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "step": step,
        "num_clips": result.num_clips,
        "num_captions": result.num_captions,
        "num_skipped": result.num_skipped,
        **result.metrics,
    }
    write_text_atomic(path, json.dumps(content, indent=2) + "\n")
    return path


def read_results(run_dir: str | Path) -> dict[int, dict[str, float]]:
    """All evaluations of a run by step, in order; unreadable files are left out."""
    results = {}
    for path in (Path(run_dir) / "eval").glob("step-*.json"):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            results[int(content["step"])] = content
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return dict(sorted(results.items()))


def mark_best(run_dir: str | Path) -> int | None:
    """Marks the best of a run's checkpoints, which then survives pruning. One process only.

    The best has the highest mean of mAP@10 in both directions, the later one of equals. Call it after `write_result`.

    Returns:
        Its step, None while no step has both an evaluation and a complete checkpoint.
    """
    store = CheckpointStore(Path(run_dir) / "checkpoints")
    results = {step: r for step, r in read_results(run_dir).items() if (store.root / step_name(step)).is_dir()}
    for step in sorted(results, key=lambda step: (mean_map(results[step]), step), reverse=True):
        with contextlib.suppress(CheckpointError):  # not complete: the next best one
            store.mark_best(step)
            return step
    return None


def format_result(result: EvalResult, *, title: str) -> str:
    """A small table for people: recall and mAP in percent."""
    names = [f"R@{k}" for k in RECALL_AT] + ["mAP@10"]
    lines = [title, f"{'':14}" + "".join(f"{name:>9}" for name in names) + f"{'median rank':>14}"]
    for direction in ("audio_to_text", "text_to_audio"):
        cells = [f"{100 * result.metrics[f'{direction}.{name}']:8.2f}%" for name in names]
        lines.append(f"{direction:14}" + "".join(cells) + f"{result.metrics[f'{direction}.median_rank']:14.1f}")
    skipped = f", {result.num_skipped} skipped as unusable" if result.num_skipped else ""
    lines.append(f"{result.num_clips} clips, {result.num_captions} captions{skipped}")
    return "\n".join(lines)
