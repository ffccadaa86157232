"""The contrastive objective of the global batch in bounded memory: loss and gradients by hand, block by block.

Every rank holds the embeddings of all ranks, B x d, and takes its own rows of the similarity matrix in both directions.
Ranks exchange their number of pairs, groups where these matter, embeddings, and for softmax four numbers a row and
direction, each once, and nothing in the backward; memory grows with B. On one process a block serves both directions.
Over ranks this is the aim of Inf-CL (Cheng et al. 2024, "Breaking the Memory Barrier: Near Infinite Batch Size Scaling
for Contrastive Loss"), with the embeddings gathered instead of sent around a ring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clap_zero.distributed.collectives import all_gather, rank_and_size
from clap_zero.objective import sigmoid, softmax
from clap_zero.objective.blocks import NOTHING, Problem, Side
from clap_zero.objective.checks import check_arguments, check_same_number_everywhere
from clap_zero.objective.chunk import default_chunk
from clap_zero.objective.config import ObjectiveConfig
from clap_zero.objective.figures import ObjectiveFigures, longest_product
from clap_zero.objective.lines import Lines
from clap_zero.objective.sharing import find_sharing
from clap_zero.precision import exact_float32, wide

TIE_EPS = 16
"""Two cosines closer than this many rounding steps are a tie: equal captions get products that differ in the last bit,
depending on where in a block they stand."""


@dataclass(frozen=True)
class ObjectiveGradients:
    """This rank's share of the loss, and the gradient of (world x the global mean loss).

    That is the gradient of the sum of all ranks' shares; where gradients of parameters are averaged over ranks, as
    DeepSpeed does, they come out as those of the global mean loss.

    Attributes:
        loss: () mean over this rank's rows and both directions, in nats; its mean over ranks is the global loss.
        audio: (n, d) gradient with respect to this rank's clips.
        text: (n, d) with respect to this rank's captions.
        logit_scale: () this rank's part; the mean over ranks is the gradient of the global mean loss.
        logit_bias: () likewise; None for an objective without bias.
        figures: What people watch.
    """

    loss: Tensor
    audio: Tensor
    text: Tensor
    logit_scale: Tensor
    logit_bias: Tensor | None
    figures: ObjectiveFigures


@dataclass(frozen=True)
class RankView:
    """One rank's view of the global batch of B pairs.

    Attributes:
        audio: (n, d) its own clips.
        text: (n, d) its own captions.
        all_audio: (B, d) clips of all ranks in rank order.
        all_text: (B, d).
        all_groups: (B,) int64, None where groups do not matter.
        first: Index of its first pair in the global batch.
    """

    audio: Tensor
    text: Tensor
    all_audio: Tensor
    all_text: Tensor
    all_groups: Tensor | None
    first: int

    @property
    def whole(self) -> bool:
        """Whether the rank's own pairs are the global batch."""
        return self.audio.shape[0] == self.all_audio.shape[0]

    @property
    def own(self) -> slice:
        """Where its pairs stand in the global batch."""
        return slice(self.first, self.first + self.audio.shape[0])

    def own_groups(self, of_all: Tensor | None) -> Tensor | None:
        """The part of a (B,) tensor that belongs to this rank's pairs."""
        return None if of_all is None else of_all[self.own]

    def sides(self) -> tuple[Side, Side, Side, Side]:
        """Own clips, own captions, all clips and all captions as sides of the similarity matrix."""
        own, every = (self.own_groups(self.all_groups), self.first), (self.all_groups, 0)
        return Side(self.audio, *own), Side(self.text, *own), Side(self.all_audio, *every), Side(self.all_text, *every)


def objective_gradients(
    audio: Tensor,
    text: Tensor,
    *,
    logit_scale: Tensor,
    logit_bias: Tensor | None = None,
    groups: Tensor | None = None,
    config: ObjectiveConfig,
    gather: bool = True,
    chunk: int | None = None,
) -> ObjectiveGradients:
    """Loss and gradients without autograd, computed in fp32 (fp64 for fp64 input) whatever the surroundings.

    Args:
        audio: (n, d) clips of this rank, L2-normalised. Half precision is taken as fp32.
        text: (n, d), row i captions row i of `audio`.
        logit_scale: (), the factor on cosine similarities (not its logarithm).
        logit_bias: (), added to every logit; for the sigmoid loss and no other.
        groups: (n,) int64, equal for pairs that share a caption, on all ranks (`data.captions.pair_id`); needed
            unless config.positives is off.
        config: The objective.
        gather: Whether the pairs of all ranks are candidates; otherwise those of this rank.
        chunk: Edge of a block of the similarity matrix; None chooses one for the device.

    Returns:
        Share of the loss, gradients with respect to this rank's inputs and figures.

    Raises:
        ValueError: Shapes that do not fit, another number of pairs on another rank, a missing bias or groups.

    Collective with `gather`: all ranks must call.
    """
    check_arguments(audio, text, logit_bias=logit_bias, groups=groups, config=config)
    dtype = torch.promote_types(audio.dtype, torch.float32)
    audio, text = audio.detach().to(dtype), text.detach().to(dtype)
    rank, world = rank_and_size() if gather else (0, 1)
    if world > 1:
        check_same_number_everywhere(audio)
    exchange: Callable[[Tensor], Tensor] = all_gather if world > 1 else _alone
    all_groups = exchange(groups.detach()) if groups is not None and config.uses_groups else None
    view = RankView(
        audio=audio,
        text=text,
        all_audio=exchange(audio),
        all_text=exchange(text),
        all_groups=all_groups,
        first=rank * audio.shape[0],
    )
    problem = Problem(
        scale=logit_scale.detach().to(dtype).reshape(()),
        bias=None if logit_bias is None else logit_bias.detach().to(dtype).reshape(()),
        config=config,
        num_pairs=view.all_audio.shape[0],
        chunk=chunk or default_chunk(audio.device.type),
    )
    return local_gradients(view, problem=problem, exchange=exchange)


def local_gradients(view: RankView, *, problem: Problem, exchange: Callable[[Tensor], Tensor]) -> ObjectiveGradients:
    """This rank's part once the embeddings of all are known.

    Args:
        view: Embeddings.
        problem: The objective; `num_pairs` is B.
        exchange: Makes (B, k) of all ranks out of this rank's (n, k); called once for softmax, never for sigmoid.

    Collective if `exchange` is.
    """
    # In half precision cosines would be off by 2e-3 and a scale of 100 by 1 %.
    with exact_float32(view.audio.device):
        if view.all_groups is not None:
            sharing = find_sharing(view.all_groups, own=view.own, chunk=problem.chunk)
            problem = replace(problem, sharing=sharing)
            if sharing is None:  # each pair is its own group: the plain objective
                view = replace(view, all_groups=None)
                problem = replace(problem, config=replace(problem.config, positives="off"))
        if problem.config.loss == "sigmoid":
            return _sigmoid(view, problem)
        return _softmax(view, problem, exchange)


def _softmax(view: RankView, problem: Problem, exchange: Callable[[Tensor], Tensor]) -> ObjectiveGradients:
    """Two sweeps for own clips and own captions, or for both at once. Collective if `exchange` is."""
    narrow = softmax.is_narrow(problem.scale, longest_product(view.all_audio, view.all_text))
    problem = replace(problem, narrow=narrow)
    all_sizes = None if problem.sharing is None else problem.sharing.sizes
    sizes = view.own_groups(all_sizes)
    audio, text, all_audio, all_text = view.sides()
    whole = view.whole
    rows, columns = softmax.statistics(audio, all_text, (sizes, all_sizes), problem=problem, both=whole)
    if columns is None:
        columns, _ = softmax.statistics(text, all_audio, (sizes, all_sizes), problem=problem, both=False)
    audio_losses, audio_pull = softmax.finish(rows, sizes, problem=problem)
    text_losses, text_pull = softmax.finish(columns, sizes, problem=problem)
    both = exchange(torch.cat([audio_pull.packed(), text_pull.packed()], dim=1))
    all_pulls = [softmax.Pull.unpacked(part) for part in both.chunk(2, dim=1)]
    d_audio, d_text, d_logits = softmax.gradients(
        audio, all_text, (sizes, all_sizes), (audio_pull, all_pulls[1]), problem=problem, both=whole
    )
    if d_text is None:
        d_text, _, _ = softmax.gradients(
            text, all_audio, (sizes, all_sizes), (text_pull, all_pulls[0]), problem=problem, both=False
        )
    losses = (audio_losses, text_losses)
    # Over all ranks the gradients of the logits sum to 0, so any constant may be taken off the cosines in the scale's
    # gradient. Taking off their mean keeps it exact where they are all alike: rows and columns come from different
    # products there, whose last bits would be multiplied with a cosine of nearly 1.
    middle = view.all_audio.mean(0) @ view.all_text.mean(0)
    return _result(view, problem, (rows, columns), losses, (d_audio, d_text), 2, d_scale=-middle * d_logits)


def _sigmoid(view: RankView, problem: Problem) -> ObjectiveGradients:
    """One sweep for own clips and one for own captions, or one for both."""
    audio, text, all_audio, all_text = view.sides()
    first = sigmoid.sweep(audio, all_text, problem=problem, both=view.whole)
    columns, d_text = first.columns, first.d_columns
    if columns is None or d_text is None:
        second = sigmoid.sweep(text, all_audio, problem=problem, both=False)
        columns, d_text = second.rows, second.d_rows
    lines, losses, sums = (first.rows, columns), (first.rows.losses, columns.losses), (first.d_rows, d_text)
    return _result(view, problem, lines, losses, sums, 1, d_bias=first.d_logits)


def _result(
    view: RankView,
    problem: Problem,
    lines: tuple[Lines, Lines] | tuple[sigmoid.SigmoidLines, sigmoid.SigmoidLines],
    losses: tuple[Tensor, Tensor],
    sums: tuple[Tensor, Tensor],
    times: int,
    *,
    d_scale: Tensor | float = 0.0,
    d_bias: Tensor | None = None,
) -> ObjectiveGradients:
    """Puts the factors in.

    Args:
        view: Embeddings.
        problem: The objective.
        lines: Statistics of own clips and captions, for the figures.
        losses: (n,) of each.
        sums: (n, d) of each, G times the other side; overwritten.
        times: G is the gradient of times * B * the loss with respect to the logits.
        d_scale: () correction of the scale's gradient, before the factor.
        d_bias: () gradient of the bias, before the factor.
    """
    dtype, factor, sums_in = view.audio.dtype, 1 / (times * view.audio.shape[0]), wide(view.audio.device)
    loss = [line.mean(dtype=sums_in).to(dtype) for line in losses]
    d_audio, d_text = sums
    logit_scale = torch.linalg.vecdot(view.audio, d_audio).sum(dtype=sums_in) + d_scale
    return ObjectiveGradients(
        loss=(loss[0] + loss[1]) / 2,
        audio=d_audio.mul_(problem.scale * factor),
        text=d_text.mul_(problem.scale * factor),
        logit_scale=(logit_scale * factor).to(dtype),
        logit_bias=None if d_bias is None else (d_bias * factor).to(dtype),
        figures=_figures(problem, lines, (loss[0], loss[1]), longest=longest_product(view.all_audio, view.all_text)),
    )


def _figures(
    problem: Problem,
    lines: tuple[Lines, Lines] | tuple[sigmoid.SigmoidLines, sigmoid.SigmoidLines],
    loss: tuple[Tensor, Tensor],
    *,
    longest: Tensor,
) -> ObjectiveFigures:
    """Figures; `longest` is the largest product that two rows could have, () and 1 for normalised ones."""
    offset = 0 if problem.bias is None else problem.bias
    margin = TIE_EPS * torch.finfo(loss[0].dtype).eps * problem.scale.abs() * longest
    hits, hardest = [], []
    for line in lines:
        hits.append((line.own - line.hardest > margin).to(line.own.dtype).mean())
        hardest.append(torch.where(line.hardest > NOTHING, (line.hardest - offset) / problem.scale, torch.nan).mean())
    return ObjectiveFigures(
        loss_audio_to_text=loss[0],
        loss_text_to_audio=loss[1],
        top1_audio_to_text=hits[0],
        top1_text_to_audio=hits[1],
        positive_similarity=((lines[0].own - offset) / problem.scale).mean(),
        hardest_negative_similarity=(hardest[0] + hardest[1]) / 2,
    )


def _alone(t: Tensor) -> Tensor:
    """What one process gathers."""
    return t
