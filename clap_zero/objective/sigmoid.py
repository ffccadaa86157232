"""The sigmoid objective by hand, in one sweep over blocks: it needs no statistics.

With s_ij = scale cos_ij + bias, the loss is sum_ij softplus(-z_ij s_ij) / B with z = 1 for a positive and -1 otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from clap_zero.objective.blocks import NOTHING, Problem, Side
from clap_zero.precision import wide


@dataclass
class SigmoidLines:
    """Sums over the rows, or over the columns; each (k,).

    Attributes:
        losses: In nats.
        hardest: Largest logit of a negative.
        own: Logit of the pair itself.
    """

    losses: Tensor
    hardest: Tensor
    own: Tensor

    @classmethod
    def start(cls, side: Side) -> SigmoidLines:
        """Sums before the first block."""
        zeros = side.embeds.new_zeros(side.embeds.shape[0])
        return cls(zeros, torch.full_like(zeros, NOTHING), zeros.clone())


@dataclass(frozen=True)
class Sweep:
    """What one sweep gives.

    Attributes:
        rows: Sums over the rows.
        columns: Sums over the columns, None unless asked for.
        d_rows: (r, d) sum of G_ij times the columns, G being the gradient of B times the loss; without the scale.
        d_columns: (c, d), None unless asked for.
        d_logits: () sum of G over all cells: the gradient of B times the loss with respect to the bias.
    """

    rows: SigmoidLines
    columns: SigmoidLines | None
    d_rows: Tensor
    d_columns: Tensor | None
    d_logits: Tensor


def sweep(rows: Side, columns: Side, *, problem: Problem, both: bool) -> Sweep:
    """Loss and gradient.

    Args:
        rows: Clips (or captions) of this process.
        columns: All captions (or clips).
        problem: The objective.
        both: Whether the rows are the whole batch too, so that the columns are finished in the same sweep.

    Returns:
        Sums over the rows, and with `both` over the columns, and the gradients.
    """
    row_lines = SigmoidLines.start(rows)
    column_lines = SigmoidLines.start(columns) if both else None
    d_rows = torch.zeros_like(rows.embeds)
    d_columns = torch.zeros_like(columns.embeds) if both else None
    d_logits = rows.embeds.new_zeros((), dtype=wide(rows.embeds.device))
    third: Tensor | None = None
    for block in problem.blocks(rows, columns):
        logits = block.logits
        own = block.own(logits).clone()
        block.own(logits).fill_(-torch.inf)
        same, negatives = block.same, logits
        if same is not None:
            negatives = block.spare.copy_(logits).masked_fill_(same, -torch.inf)
        sides = [(row_lines, block.rows, block.own_rows, 1)]
        if column_lines is not None:
            sides.append((column_lines, block.columns, block.own_columns, 0))
        for lines, part, _, dim in sides:
            lines.hardest[part] = torch.maximum(lines.hardest[part], negatives.amax(dim))
        signs = None
        if same is not None and problem.config.positives == "mask":
            logits.masked_fill_(same, -torch.inf)
        elif same is not None:
            signs = block.spare.fill_(1).masked_fill_(same, -1)
            logits.mul_(signs)
        # The first block is the largest. Fresh memory for each block would cost more than the arithmetic.
        third = third if third is not None else torch.empty_like(logits)
        cells = torch.sigmoid(logits, out=third.view(-1)[: logits.numel()].view(logits.shape))
        if signs is not None:
            cells.mul_(signs)
        losses = _softplus(logits, block.spare)
        own_losses = -F.logsigmoid(own)
        for lines, part, own_part, dim in sides:
            lines.losses[part] += losses.sum(dim)
            lines.losses[own_part] += own_losses
            lines.own[own_part] = own
        block.own(cells).copy_(-torch.sigmoid(-own))
        d_logits += cells.sum()
        d_rows[block.rows].addmm_(cells, columns.embeds[block.columns])
        if d_columns is not None:
            d_columns[block.columns].addmm_(cells.t(), rows.embeds[block.rows])
    return Sweep(row_lines, column_lines, d_rows, d_columns, d_logits)


def _softplus(x: Tensor, out: Tensor) -> Tensor:
    """log(1 + exp(x)) into `out`, overwriting x, to the last bits.

    torch's softplus and log1p take nine times as long as log on a CPU. With u = 1 + e rounded, log(1 + e) is
    log(u) - ((u - 1) - e) / u up to the square of the rounding error.
    """
    e = torch.abs(x, out=out).neg_().exp_()
    above = x.clamp_(min=0)
    u = e + 1
    e.sub_(u - 1).div_(u)
    return e.add_(u.log_()).add_(above)
