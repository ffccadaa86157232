"""The softmax objective by hand, in two sweeps over blocks: statistics of every row and column, then the gradient.

With s_ij the logit of clip i and caption j, the statistics are over the pairs other than i itself. A row's loss is

    log(exp(s_ii) + sum_j w_ij exp(s_ij)) - s_ii + sum_{j != i} q_ij (s_ii - s_ij)  =  softplus(gap_i) + target part,

with gap_i = log sum_j w_ij exp(s_ij) - s_ii, targets q, and w = 1 but for hard negatives. sigmoid(gap_i) is the
probability that the row gives to others, so the gradient at the pair itself, -sigmoid(gap_i), comes without the
cancellation of p_ii - 1. Largest logits are tracked as the sweep goes (Milakov and Gimelshein 2018, "Online normalizer
calculation for softmax"), so no exponent is shifted by a guess.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from clap_zero.objective.blocks import NEAR, Block, Problem, Side
from clap_zero.objective.lines import Lines, cut, targets
from clap_zero.precision import wide


@dataclass(frozen=True)
class Pull:
    """What the gradient needs to know about a row or column: G_ij = weight exp((1 + beta) u) - base exp(beta u).

    Attributes:
        largest: (k,) u is the logit minus this.
        weight: (k,).
        base: (k,), 0 without beta.
        miss: (k,) probability that the line gives to others than its own pair.
    """

    largest: Tensor
    weight: Tensor
    base: Tensor
    miss: Tensor

    def packed(self) -> Tensor:
        """As one (k, 4) tensor, for one collective."""
        return torch.stack([self.largest, self.weight, self.base, self.miss], dim=1)

    @classmethod
    def unpacked(cls, packed: Tensor) -> Pull:
        """What `packed` packed."""
        return cls(*(column.contiguous() for column in packed.unbind(1)))


def is_narrow(scale: Tensor, longest: Tensor) -> bool:
    """`Problem.narrow`. Waits for the device, once a call.

    Args:
        scale: (), factor on the products.
        longest: (), no product is larger.
    """
    return bool(2 * scale.abs() * longest <= NEAR)


def statistics(
    rows: Side,
    columns: Side,
    sizes: tuple[Tensor | None, Tensor | None],
    *,
    problem: Problem,
    both: bool,
) -> tuple[Lines, Lines | None]:
    """First sweep.

    Args:
        rows: Clips (or captions) of this process.
        columns: All captions (or clips).
        sizes: Sizes of the groups of the rows and of the columns.
        problem: The objective.
        both: Whether the rows are the whole batch too, so that the columns can be finished in the same sweep.

    Returns:
        Statistics of the rows, and with `both` of the columns.
    """
    beta = problem.config.hard_negative_beta
    row_lines = Lines.start(rows, sizes[0], problem=problem)
    column_lines = Lines.start(columns, sizes[1], problem=problem) if both else None
    for block in problem.blocks(rows, columns):
        own = block.own(block.logits)
        sides = [(row_lines, block.rows, 1)]
        if column_lines is not None:
            sides.append((column_lines, block.columns, 0))
            column_lines.own[block.own_columns] = own
        row_lines.own[block.own_rows] = own
        own.fill_(-torch.inf)
        if problem.config.positives == "mask" and block.same is not None:
            block.logits.masked_fill_(block.same, -torch.inf)
        for lines, part, dim in sides:
            lines.aim(block, part, dim=dim, largest=lines.update_largest(block.logits, part, dim=dim, beta=beta))
        _add_exponentials(block, sides, problem=problem)
    return row_lines, column_lines


def _add_exponentials(block: Block, sides: list[tuple[Lines, slice, int]], *, problem: Problem) -> None:
    """Adds the block's exponentials to the totals of its rows and columns; overwrites the block."""
    beta, largest = problem.config.hard_negative_beta, [lines.largest[part] for lines, part, _ in sides]
    top = _shift(block.logits, largest, problem=problem) if len(sides) == 2 else None
    if top is not None:
        _exponentials(block.logits, top)
        for (lines, part, dim), high in zip(sides, largest, strict=True):
            lines.total[part] += block.logits.sum(dim) * _factor(top, high)
        return
    for (lines, part, dim), high in zip(sides, largest, strict=True):
        below = torch.sub(block.logits, high.unsqueeze(dim), out=block.spare)
        if lines.base is not None:
            lines.base[part] += torch.exp(beta * below).sum(dim)
            below.mul_(1 + beta)
        lines.total[part] += below.exp_().sum(dim)


def _shift(logits: Tensor, largest: list[Tensor], *, problem: Problem) -> Tensor | float | None:
    """What to take off the block's logits where one exponential serves rows and columns; None where it does not.

    On a CPU a block is looked at where `Problem.narrow` does not hold. Elsewhere that would have the device wait in
    each block, which costs more than a second exponential.
    """
    if problem.config.hard_negative_beta:
        return None
    if problem.narrow:
        return 0.0
    if logits.device.type != "cpu":
        return None
    top = torch.minimum(largest[0].max(), largest[1].max())
    return top if min(low.min() for low in largest) > top - NEAR else None


def _exponentials(logits: Tensor, top: Tensor | float) -> Tensor:
    """exp(logits - top), in place."""
    return logits.exp_() if isinstance(top, float) else logits.sub_(top).exp_()


def _factor(top: Tensor | float, largest: Tensor) -> Tensor:
    """exp(top - largest). A line without candidates, whose sums are 0, gets a finite one."""
    return torch.exp((top - largest).clamp_(max=NEAR))


def finish(lines: Lines, sizes: Tensor | None, *, problem: Problem) -> tuple[Tensor, Pull]:
    """Losses of the lines, and what the gradient needs.

    Args:
        lines: Statistics after the last block.
        sizes: (k,) of the lines' groups, or None.
        problem: The objective.

    Returns:
        (k,) losses in nats; the pull.
    """
    beta, config = problem.config.hard_negative_beta, problem.config
    others = lines.largest + lines.total.log()
    if lines.base is not None:
        masked = config.positives == "mask" and sizes is not None
        num_negatives = problem.num_pairs - (sizes.to(others.dtype) if masked and sizes is not None else 1)
        mean_weight = lines.base / num_negatives
        others = torch.where(lines.base > 0, others - mean_weight.log(), -torch.inf)
    gap = others - lines.own
    losses, miss = -F.logsigmoid(-gap), torch.sigmoid(gap)
    if lines.aimed is not None:
        losses = losses + (1 - lines.targets.own) * lines.own - lines.aimed
    weight = torch.where(lines.total > 0, miss * (1 + beta) / lines.total, 0)
    base = torch.zeros_like(weight)
    if lines.base is not None:
        base = torch.where(lines.base > 0, miss * beta / lines.base, 0)
    return losses, Pull(lines.largest, weight, base, miss)


def gradients(
    rows: Side,
    columns: Side,
    sizes: tuple[Tensor | None, Tensor | None],
    pulls: tuple[Pull, Pull],
    *,
    problem: Problem,
    both: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Second sweep: sums of G_ij times the embedding on the other side, G being the gradient of 2 B times the loss.

    Args:
        rows: As in `statistics`.
        columns: As in `statistics`.
        sizes: As in `statistics`.
        pulls: Of the rows and of the columns.
        problem: The objective.
        both: Whether the columns' gradient is wanted too.

    Returns:
        (r, d) and, with `both`, (c, d): without the factor scale / (2 B); and (), the sum of G.
    """
    row_targets, column_targets = (
        targets(size, problem=problem, like=side.embeds) for size, side in zip(sizes, (rows, columns), strict=True)
    )
    d_rows = torch.zeros_like(rows.embeds)
    d_columns = torch.zeros_like(columns.embeds) if both else None
    d_logits = rows.embeds.new_zeros((), dtype=wide(rows.embeds.device))
    for block in problem.blocks(rows, columns):
        if problem.config.positives == "mask" and block.same is not None:
            block.logits.masked_fill_(block.same, -torch.inf)
        cells = _probabilities(block, pulls, problem=problem)
        if row_targets.every is not None and column_targets.every is not None:
            every = cut(row_targets.every, block.rows, 1) + cut(column_targets.every, block.columns, 0)
            if problem.config.positives == "mask" and block.same is not None:
                every = every.expand_as(cells).masked_fill(block.same, 0)
            cells.sub_(every)
        if row_targets.same is not None and block.same is not None:
            # Both lines of such a cell have the same group, hence the same target; without beta `spare` is free.
            cells.sub_(torch.mul(2 * row_targets.same[block.rows, None], block.same, out=block.spare))
        own = cut(row_targets.own, block.own_rows)
        miss = pulls[0].miss[block.own_rows] + pulls[1].miss[block.own_columns]
        block.own(cells).copy_(2 * (1 - own) - miss)
        d_logits += cells.sum()
        d_rows[block.rows].addmm_(cells, columns.embeds[block.columns])
        if d_columns is not None:
            d_columns[block.columns].addmm_(cells.t(), rows.embeds[block.rows])
    return d_rows, d_columns, d_logits


def _probabilities(block: Block, pulls: tuple[Pull, Pull], *, problem: Problem) -> Tensor:
    """(r, c) sum of what rows and columns pull at each cell, without targets; meaningless at the pairs themselves."""
    rows, columns = (pull.largest[part] for pull, part in zip(pulls, (block.rows, block.columns), strict=True))
    weights = [pull.weight[part] for pull, part in zip(pulls, (block.rows, block.columns), strict=True)]
    top = _shift(block.logits, [rows, columns], problem=problem)
    if top is not None:
        shares = [w * _factor(top, high) for w, high in zip(weights, (rows, columns), strict=True)]
        torch.add(shares[0].unsqueeze(1), shares[1].unsqueeze(0), out=block.spare)
        return _exponentials(block.logits, top).mul_(block.spare)
    beta = problem.config.hard_negative_beta
    if not beta:
        torch.sub(block.logits, rows.unsqueeze(1), out=block.spare).exp_().mul_(weights[0].unsqueeze(1))
        return block.logits.sub_(columns.unsqueeze(0)).exp_().mul_(weights[1].unsqueeze(0)).add_(block.spare)
    parts = ((pulls[0], block.rows, 1), (pulls[1], block.columns, 0))
    block.spare.zero_()
    for pull, part, dim in parts:
        below = block.logits - cut(pull.largest, part, dim)
        block.spare.add_(torch.exp(below * (1 + beta)) * cut(pull.weight, part, dim))
        block.spare.sub_(torch.exp(below * beta) * cut(pull.base, part, dim))
    return block.spare
