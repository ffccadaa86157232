"""Gradients of other trainers' contrastive losses over gloo ranks, beside ours and one process in float64.

    git clone https://github.com/mlfoundations/open_clip DIR/open_clip    # outside of this repository
    git clone https://github.com/luyug/GradCache DIR/GradCache
    git clone https://github.com/DAMO-NLP-SG/Inf-CLIP DIR/Inf-CLIP
    python benchmarks/objective_peers.py --peers DIR --world 4

Every rank computes a peer's loss on its part of one global batch and differentiates it with respect to its embeddings
and the logit scale. Then gradients are averaged over ranks, as DistributedDataParallel and DeepSpeed do with those of
parameters, and compared with those of the whole batch in one process. Nothing of the peers is copied: their files are
loaded from where they are; what is not there is left out, and said.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from clap_zero.distributed.collectives import rank_and_size
from clap_zero.objective.autograd import contrastive_objective
from clap_zero.objective.config import ObjectiveConfig
from clap_zero.testing import run_distributed

LOCAL, WIDTH = 8, 256
"""Pairs a rank; Inf-CL wants a width that is a multiple of 256."""

LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


class Peer(NamedTuple):
    """One setting of one trainer.

    Attributes:
        folder: Of its repository inside the directory of peers; empty for our own.
        setting: What is printed.
        directions: 2, or 1 for a loss from clips to captions only.
        load: From its repository to its loss, called on the rank.
    """

    folder: str
    setting: str
    directions: int
    load: Callable[[Path], LossFunction]


class Comparison(NamedTuple):
    """Averaged gradients against one process.

    Attributes:
        loss: Mean over ranks over the reference, 1 where right.
        error: ||g - reference|| / ||reference|| of the embeddings.
        factor: Best factor c in g = c * reference, 1 where right.
        cosine: Of g and the reference.
        scale: Gradient of the logit scale over the reference, 1 where right.
    """

    loss: float
    error: float
    factor: float
    cosine: float
    scale: float


def _file(path: Path, name: str) -> ModuleType:
    """Loads one file without the package around it."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _open_clip(*, local_loss: bool, gather_with_grad: bool) -> Callable[[Path], LossFunction]:
    def load(repository: Path) -> LossFunction:
        module = _file(repository / "src/open_clip/loss.py", "peer_open_clip_loss")
        rank, world = rank_and_size()
        return module.ClipLoss(
            local_loss=local_loss, gather_with_grad=gather_with_grad, rank=rank, world_size=world
        ).forward

    return load


def _gradcache(repository: Path) -> LossFunction:
    loss = _file(repository / "src/grad_cache/loss.py", "peer_grad_cache_loss").DistributedContrastiveLoss()
    return lambda audio, text, scale: loss(scale * audio, text)


def _inf_cl(repository: Path) -> LossFunction:
    if str(repository) not in sys.path:
        sys.path.insert(0, str(repository))
    ring = importlib.import_module("inf_cl.ring")

    def loss(audio: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        return (ring.cal_ring_loss(audio, text, scale=scale) + ring.cal_ring_loss(text, audio, scale=scale)) / 2

    return loss


def _ours(_: Path) -> LossFunction:
    return lambda audio, text, scale: contrastive_objective(
        audio, text, scale, config=ObjectiveConfig(positives="off"), chunk=5
    )[0]


PEERS = (
    Peer("open_clip", "local_loss off, gather_with_grad off", 2, _open_clip(local_loss=False, gather_with_grad=False)),
    Peer("open_clip", "local_loss off, gather_with_grad on", 2, _open_clip(local_loss=False, gather_with_grad=True)),
    Peer("open_clip", "local_loss on,  gather_with_grad off", 2, _open_clip(local_loss=True, gather_with_grad=False)),
    Peer("open_clip", "local_loss on,  gather_with_grad on", 2, _open_clip(local_loss=True, gather_with_grad=True)),
    Peer("GradCache", "DistributedContrastiveLoss", 1, _gradcache),
    Peer("Inf-CLIP", "cal_ring_loss", 2, _inf_cl),
    Peer("", "clap_zero", 2, _ours),
)


def global_inputs(num_pairs: int, scale: float, common: float) -> list[Tensor]:
    """Clips, captions (num_pairs, WIDTH) and the scale, float32 values in float64.

    `common` is the weight of one direction that all share: with 8 every cosine is above 0.9, as early in training.
    """
    random = torch.Generator().manual_seed(0)
    audio, noise = (F.normalize(torch.randn(num_pairs, WIDTH, generator=random), dim=-1) for _ in range(2))
    centre = common * F.normalize(torch.randn(1, WIDTH, generator=random), dim=-1)
    embeds = [F.normalize(t + centre, dim=-1).double() for t in (audio, 0.2 * audio + noise)]
    return [*embeds, torch.tensor(scale, dtype=torch.float64)]


def on_rank(index: int, directory: str, scale: float, common: float) -> list[Tensor] | str:
    """Loss and gradients of one peer on this rank, or why it does not run here."""
    rank, world = rank_and_size()
    mine = slice(rank * LOCAL, (rank + 1) * LOCAL)
    audio, text, factor = global_inputs(world * LOCAL, scale, common)
    inputs = [t.float().clone().requires_grad_() for t in (audio[mine], text[mine], factor)]
    try:
        loss = PEERS[index].load(Path(directory) / PEERS[index].folder)(*inputs)
    except (ImportError, FileNotFoundError) as error:
        return f"does not run here: {error}"
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


def reference(num_pairs: int, directions: int, *, scale: float, common: float) -> list[Tensor]:
    """Loss and gradients of the whole batch in one process, dense, float64."""
    inputs = [t.requires_grad_() for t in global_inputs(num_pairs, scale, common)]
    logits = inputs[2] * inputs[0] @ inputs[1].t()
    matrices = (logits, logits.t())[:directions]
    loss = torch.stack([F.cross_entropy(m, torch.arange(num_pairs)) for m in matrices]).mean()
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


def compare(index: int, directory: Path, *, world: int, scale: float = 20.0, common: float = 0.0) -> Comparison | str:
    """Runs one of PEERS over `world` ranks; a text says why it could not."""
    shares = run_distributed(on_rank, world, index, str(directory), scale, common)
    for share in shares:
        if isinstance(share, str):
            return share
    loss, audio, text, scales = zip(*shares, strict=True)
    exact = reference(world * LOCAL, PEERS[index].directions, scale=scale, common=common)
    ours = torch.cat([t.flatten() for t in (*audio, *text)]).double() / world
    right = torch.cat([t.flatten() for t in exact[1:3]])
    return Comparison(
        loss=(torch.stack(loss).double().mean() / exact[0]).item(),
        error=((ours - right).norm() / right.norm()).item(),
        factor=(ours @ right / (right @ right)).item(),
        cosine=F.cosine_similarity(ours, right, dim=0).item(),
        scale=(torch.stack(scales).double().mean() / exact[3]).item(),
    )


def caching_error(directory: Path) -> float | str:
    """GradCache's caching on one process: two small towers in uneven chunks against one backward of the whole batch.

    Returns:
        ||g - reference|| / ||reference|| of all parameters, or why it does not run here.
    """
    source = str(directory / "GradCache/src")
    if source not in sys.path:
        sys.path.insert(0, source)
    try:
        cached = importlib.import_module("grad_cache").GradCache
    except (ImportError, AttributeError) as error:
        return f"does not run here: {error}"
    torch.manual_seed(0)
    towers = [torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.Tanh(), torch.nn.Linear(20, 16)) for _ in range(2)]
    inputs = [torch.randn(11, 12) for _ in range(2)]

    def loss(audio: Tensor, text: Tensor) -> Tensor:
        embeds = (F.normalize(t, dim=-1) for t in (audio, text))
        return contrastive_objective(*embeds, torch.tensor(20.0), config=ObjectiveConfig(positives="off"))[0]

    def gradients() -> Tensor:
        parts = [p.grad.flatten() for tower in towers for p in tower.parameters() if p.grad is not None]
        for tower in towers:
            tower.zero_grad()
        return torch.cat(parts)

    loss(towers[0](inputs[0]), towers[1](inputs[1])).backward()
    whole = gradients()
    cached(models=towers, chunk_sizes=4, loss_fn=loss)(*inputs)
    return ((gradients() - whole).norm() / whole.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="directory of the peers' repositories")
    parser.add_argument("--world", type=int, default=4, help="ranks")
    parser.add_argument("--scale", type=float, default=20.0, help="factor on the cosines")
    parser.add_argument("--common", type=float, default=0.0, help="weight of a direction that all embeddings share")
    args = parser.parse_args()
    print(
        f"{args.world} ranks of {LOCAL} pairs, scale {args.scale:g}, common direction {args.common:g}, float32; "
        "gradients averaged over ranks\n"
    )
    print(f"{'':<48}{'loss':>9}{'error':>10}{'factor':>9}{'cosine':>9}{'scale':>9}")
    for index, peer in enumerate(PEERS):
        result = compare(index, args.peers.resolve(), world=args.world, scale=args.scale, common=args.common)
        name = f"{peer.folder}  {peer.setting}".strip()
        if isinstance(result, str):
            print(f"{name:<48} {result}")
            continue
        numbers = "".join(f"{x:>9.4f}" for x in result[2:])
        print(f"{name:<48}{result.loss:>9.4f}{result.error:>10.1e}{numbers}", flush=True)
    error = caching_error(args.peers.resolve())
    print(f"\nGradCache around clap_zero's loss, 11 pairs in chunks of 4, one process: error {error}")


if __name__ == "__main__":
    main()
