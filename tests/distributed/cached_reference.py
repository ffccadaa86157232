"""The one process that global batches out of micro batches are held to, and how far off they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from clap_zero.model.clap import ContrastOutput
from clap_zero.objective.mlp import TwoHeads
from clap_zero.objective.reference import mlp_reference, sigmoid_reference, softmax_reference
from clap_zero.testing import run_distributed
from clap_zero.training.objective import joined
from tests.distributed import zero_cases as zc
from tests.distributed.cached_cases import Case, Outcome, on_a_rank, statistics
from tests.worst import worst

PROMISE = 1e-5
NOTHING_RESIDENT = {"stage3_param_persistence_threshold": 0}


def one_process(case: Case, *, dtype: torch.dtype = torch.float64) -> Outcome:
    """The definition: the whole global batch in one graph and one slow loss, with the same groups of BatchNorm.

    Under `sync` a group is a micro batch over all ranks, under `local` that of a rank, and every rank has statistics of
    its own.
    """
    model = zc.build({}, fused=case.fused, weights=case.weights, batch_norm=case.batch_norm, parts=case.parts).to(dtype)
    plain = [p for n, p in model.named_parameters() if p.dim() < 2 or "position_bias" in n]
    decayed = [p for n, p in model.named_parameters() if not (p.dim() < 2 or "position_bias" in n)]
    groups = [{"params": decayed, "weight_decay": case.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-4)
    local = case.batch_norm == "local"
    size = case.local if local else case.local * case.world
    outcome = Outcome(statistics_of_ranks=[statistics(model) for _ in range(case.world if local else 1)])

    def forward(first: int, pairs: zc.Pairs) -> ContrastOutput:
        """Of one group, with the statistics of its rank."""
        kept, rank = outcome.statistics_of_ranks, first // size % len(outcome.statistics_of_ranks)
        for name, value in kept[rank].items():
            parent, _, leaf = name.rpartition(".")
            # Another tensor: the graph of the groups before may hold the one that is there.
            setattr(model.get_submodule(parent), leaf, value.clone())
        output = model(**pairs.rows(first, first + size)._asdict())
        kept[rank] = statistics(model)
        return output

    for step in range(1, case.steps + 1):
        optimizer.zero_grad()
        pairs = case.pairs(step)
        outputs = [forward(first, pairs) for first in range(0, case.num_pairs, size)]
        loss = _loss(case, joined(outputs))
        loss.backward()
        outcome.losses.append(loss.item())
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        outcome.norms.append(float(torch.nn.utils.get_total_norm(gradients.values())))
        outcome.gradients = outcome.gradients or gradients
        if case.clipping:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clipping)
        optimizer.step()
    outcome.parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
    return outcome


def _loss(case: Case, output: ContrastOutput) -> Tensor:
    """Over the candidates that the negatives leave: all pairs, those of each micro batch, or each rank's of it."""
    audio, text = output.audio_embeds, output.text_embeds
    assert audio is not None and text is not None
    block = {"global": case.num_pairs, "micro": case.local * case.world, "local": case.local}[case.negatives]

    def of(rows: slice) -> Tensor:
        parts = (audio[rows], text[rows], output.logit_scale)
        if output.audio_mlp is not None:
            assert output.text_mlp is not None and output.logit_scale_t is not None
            heads = (output.audio_mlp[rows], output.text_mlp[rows], output.logit_scale, output.logit_scale_t)
            return mlp_reference(TwoHeads(*parts[:2], *heads), case.groups()[rows], config=case.config)
        if case.config.loss == "sigmoid":
            assert output.logit_bias is not None
            return sigmoid_reference(*parts, output.logit_bias, case.groups()[rows], config=case.config)
        return softmax_reference(*parts, case.groups()[rows], config=case.config)

    return torch.stack([of(slice(s, s + block)) for s in range(0, case.num_pairs, block)]).mean()


def worst_gradient(outcome: Outcome, reference: Outcome) -> tuple[float, str]:
    """The largest ||g - ref|| / max(||ref||, 1e-3 ||whole ref||) over parameters, and whose it is.

    Scale and bias stand on their own: relative to themselves.
    """
    assert outcome.gradients.keys() == reference.gradients.keys()
    whole = torch.stack([g.norm() for g in reference.gradients.values()]).norm()

    def error(name: str) -> float:
        ref = reference.gradients[name].double()
        floor = 0.0 if name in ("logit_scale_a", "logit_scale_t", "logit_bias") else 1e-3 * float(whole)
        return float((outcome.gradients[name].double().reshape(ref.shape) - ref).norm()) / max(float(ref.norm()), floor)

    # Without LAION's heads nothing depends on the second scale.
    names = [n for n, gradient in reference.gradients.items() if n != "logit_scale_t" or gradient.any()]
    return worst({name: error(name) for name in names})


def parameter_distance(outcome: Outcome, reference: Outcome) -> float:
    """||p - ref|| / ||ref|| of all parameters as one vector."""
    pairs = [(outcome.parameters[n].double().flatten(), p.double().flatten()) for n, p in reference.parameters.items()]
    ours, theirs = (torch.cat(side) for side in zip(*pairs, strict=True))
    return float((ours - theirs).norm() / theirs.norm())


def difference(outcome: Outcome, reference: Outcome) -> tuple[float, float]:
    """Cosine of the whole gradients, and how much longer ours is, as a factor."""
    names = [name for name in reference.gradients if name in outcome.gradients]
    ours = torch.cat([outcome.gradients[name].double().flatten() for name in names])
    theirs = torch.cat([reference.gradients[name].double().flatten() for name in names])
    return float(torch.cosine_similarity(ours, theirs, dim=0)), float(ours.norm() / theirs.norm())


_references: dict[str, Outcome] = {}


def reference(case: Case, *, dtype: torch.dtype = torch.float64) -> Outcome:
    """The one process of a case; the stage, its options and the precision do not matter to it."""
    known = repr((replace(case, stage=0, zero={}, precision="fp32", checkpointing=False, factor=1.0), dtype))
    if known not in _references:
        _references[known] = one_process(case, dtype=dtype)
    return _references[known]


def check(case: Case) -> list[Outcome]:
    """Loss, gradients, parameters and statistics of all ranks; gives what they ended with."""
    outcomes, expected = run_distributed(on_a_rank, case.world, case), reference(case)
    for step, loss in enumerate(expected.losses):
        assert sum(o.losses[step] for o in outcomes) / case.world == pytest.approx(loss, rel=1e-6)
    plain, _ = worst_gradient(reference(case, dtype=torch.float32), expected)
    for outcome in outcomes:
        worst, name = worst_gradient(outcome, expected)
        assert worst <= min(PROMISE, 3 * plain), (worst, name, plain)
        assert parameter_distance(outcome, expected) <= 1e-6
        assert outcome.norms == pytest.approx(expected.norms, rel=1e-5)
        assert outcome.counted == case.steps
    check_statistics(case, outcomes, expected, limit=3e-5)
    return outcomes


def check_statistics(case: Case, outcomes: list[Outcome], expected: Outcome, *, limit: float) -> None:
    """BatchNorm's, of every rank: moved once a micro batch, or not at all where they are frozen.

    Args:
        case: What was run.
        outcomes: Of the ranks.
        expected: Of one process, which forwards every micro batch once.
        limit: Of ||s - ref|| / ||ref||. Over three steps; moved twice they would be off by a tenth.
    """
    stored = load_file(case.weights / "model.safetensors") if case.weights is not None else {}
    for rank, outcome in enumerate(outcomes):
        right = expected.statistics_of_ranks[rank % len(expected.statistics_of_ranks)]
        assert outcome.statistics.keys() == right.keys()
        for name, value in right.items():
            ours = outcome.statistics[name]
            if case.batch_norm == "frozen":
                assert torch.equal(ours, stored[name]), name
            elif "num_batches" in name:
                assert torch.equal(ours, value), name
            else:
                distance = torch.linalg.vector_norm(ours.double() - value.double())
                assert distance <= limit * torch.linalg.vector_norm(value.double()), name


def of_stage(case: Case, stage: int) -> Case:
    return replace(case, stage=stage, zero=NOTHING_RESIDENT if stage == 3 else {})
