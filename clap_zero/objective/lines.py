"""What the softmax objective keeps of each row and column: its targets, and statistics that grow block by block."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from clap_zero.objective.blocks import NOTHING, Block, Problem, Side


@dataclass
class Targets:
    """The targets of k rows or columns.

    Attributes:
        own: (k,) or (), target of the pair itself.
        same: (k,) target of every other positive, None where there are none.
        every: (k,) or () what label smoothing adds to every other candidate, None without smoothing.
    """

    own: Tensor
    same: Tensor | None
    every: Tensor | None


def targets(sizes: Tensor | None, *, problem: Problem, like: Tensor) -> Targets:
    """Targets of rows whose groups have `sizes` members ((k,) int64; None: one each); `like` gives dtype and device."""
    config, smoothing = problem.config, problem.config.label_smoothing
    one = like.new_ones(())
    members = one if sizes is None else sizes.to(like.dtype)
    candidates = problem.num_pairs * one
    own, same, every = one, None, None
    if config.positives == "soft":
        own = 1 / members
        same = (1 - smoothing) * own if sizes is not None else None
    elif config.positives == "mask":
        candidates = problem.num_pairs - members + 1
    if smoothing:
        every = smoothing / candidates
        own = (1 - smoothing) * own + every
    return Targets(own, same, every)


@dataclass
class Lines:
    """Statistics of the rows, or of the columns, over the candidates other than the pair itself; each (k,).

    Attributes:
        largest: Largest logit so far.
        total: Sum of exp((1 + beta) (s - largest)).
        base: Sum of exp(beta (s - largest)), None without beta.
        hardest: Largest logit of a negative; the same tensor as `largest` but for soft positives.
        own: Logit of the pair itself.
        aimed: Sum of q_ij s_ij, None where only the pair itself is a target.
    """

    largest: Tensor
    total: Tensor
    base: Tensor | None
    hardest: Tensor
    own: Tensor
    aimed: Tensor | None
    targets: Targets

    @classmethod
    def start(cls, side: Side, sizes: Tensor | None, *, problem: Problem) -> Lines:
        """Statistics before the first block."""
        zeros = side.embeds.new_zeros(side.embeds.shape[0])
        largest = torch.full_like(zeros, NOTHING)
        goals = targets(sizes, problem=problem, like=zeros)
        several = goals.same is not None or goals.every is not None
        return cls(
            largest=largest,
            total=zeros.clone(),
            base=zeros.clone() if problem.config.hard_negative_beta else None,
            hardest=largest.clone() if goals.same is not None else largest,
            own=zeros.clone(),
            aimed=zeros.clone() if several else None,
            targets=goals,
        )

    def update_largest(self, logits: Tensor, part: slice, *, dim: int, beta: float) -> Tensor:
        """Takes a block's largest logits into account.

        Args:
            logits: (r, c), -inf where there is no candidate.
            part: The lines of the block.
            dim: Over which to reduce: 1 for rows, 0 for columns.
            beta: Concentration of hard negatives.

        Returns:
            (r,) or (c,), the largest logits of these lines in the block.
        """
        before, here = self.largest[part], logits.amax(dim)
        after = torch.maximum(before, here)
        fall = before - after
        self.total[part] *= torch.exp((1 + beta) * fall)
        if self.base is not None:
            self.base[part] *= torch.exp(beta * fall)
        self.largest[part] = after
        return here

    def aim(self, block: Block, part: slice, *, dim: int, largest: Tensor) -> None:
        """Adds the block's share to `aimed` and, for soft positives, to `hardest`.

        Args:
            block: With -inf in the logits where there is no candidate; `spare` is overwritten.
            part: The lines of the block.
            dim: Over which to reduce.
            largest: The lines' largest logits in the block.
        """
        if self.aimed is None:
            return
        same = None if self.targets.same is None else block.same
        if self.targets.every is not None or same is not None:
            finite = torch.nan_to_num(block.logits, nan=math.nan, posinf=math.inf, neginf=0.0, out=block.spare)
            if self.targets.every is not None:
                self.aimed[part] += cut(self.targets.every, part) * finite.sum(dim)
            if same is not None and self.targets.same is not None:
                self.aimed[part] += self.targets.same[part] * finite.mul_(same).sum(dim)
        if self.hardest is self.largest:
            return
        if same is not None:
            largest = block.spare.copy_(block.logits).masked_fill_(same, -torch.inf).amax(dim)
        self.hardest[part] = torch.maximum(self.hardest[part], largest)


def cut(t: Tensor, part: slice, dim: int | None = None) -> Tensor:
    """The part of (k,) values, with `dim` ready to be broadcast over a block; of a () that all share, itself."""
    if t.dim() == 0:
        return t
    return t[part] if dim is None else t[part].unsqueeze(dim)
