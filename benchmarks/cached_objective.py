"""What all negatives cost: peak memory and time of steps with cached embeddings against naive accumulation.

    python benchmarks/cached_objective.py                  # tiny, global batch 1,024 out of micro batches of 16
    python benchmarks/cached_objective.py --global_batch 256 --rounds 1

One rank, fp32, no activation checkpointing. The log-mels are computed once before, and left out of both figures. Each
measurement is a process of its own, the two kinds alternate, medians are printed. Memory is the peak of the resident
set during the steps, absolute (with the program, the weights and the inputs) and above that before the first step.
`--trim` lets glibc give memory back at once, so that the resident set is what is alive; that doubles the time, so times
are to be read without it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch

from clap_zero.process_memory import forget_peak, peak_bytes, resident_bytes

# Blocks of 1 MB and more come from mmap and go back at once.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576", "MALLOC_ARENA_MAX": "1"}
PATHS = {"naive": "micro", "cached": "global"}


def measure(kind: str, args: argparse.Namespace) -> dict[str, float]:
    """Takes the steps in this process."""
    import deepspeed

    from clap_zero.config.preset import load_preset
    from clap_zero.distributed.world import World
    from clap_zero.model.clap import build_model
    from clap_zero.objective.config import ObjectiveConfig
    from clap_zero.training.engine import Engine
    from clap_zero.training.objective import RunObjective
    from clap_zero.training.passes import CachedPasses, Forward, Inputs, MicroPasses

    torch.set_num_threads(args.threads)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    os.environ.setdefault("MASTER_PORT", str(20_000 + os.getpid() % 20_000))
    deepspeed.init_distributed("gloo", verbose=False)
    accumulation = args.global_batch // args.micro_batch
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": args.global_batch,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.0, "torch_adam": True}},
        "zero_optimization": {"stage": args.stage},
    }
    device = torch.device("cpu")
    world = World(0, 1, 0, 1, device)
    model = build_model(
        geometry=load_preset(args.preset).model,
        pretrained=None,
        batch_norm="local",
        dropout=None,
        seed=0,
        ds_config=config,
        device=device,
    )
    resolved: Any = SimpleNamespace(config=config, stage=args.stage, precision="fp32")
    engine = Engine(model, resolved=resolved, world=world)

    class Ready(Forward):
        def inputs(self, batch: Any) -> Inputs:
            return batch

    forward = Ready(engine, features=None, seed=0, world=world)  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(0)
    channels = 4 if model.config.audio_config.enable_fusion else 1
    batches = [
        Inputs(
            torch.randn(args.micro_batch, channels, 1001, 64, generator=random) * 15 - 40,
            torch.zeros(args.micro_batch, 1, dtype=torch.bool),
            torch.randint(3, 1000, (args.micro_batch, args.tokens), generator=random),
            torch.ones(args.micro_batch, args.tokens, dtype=torch.int64),
            torch.arange(index * args.micro_batch, (index + 1) * args.micro_batch),
        )
        for index in range(accumulation)
    ]
    objective = RunObjective(ObjectiveConfig(positives="soft"))
    passes = (CachedPasses if kind == "cached" else MicroPasses)(forward, objective=objective)
    # One micro batch forward and backward before: what is made at first use is not what is compared.
    output = forward.embed(batches[0], step=0, micro_index=0)
    output.audio_embeds.sum().backward()  # type: ignore[union-attr]
    engine.deepspeed.zero_grad()
    del output
    before = resident_bytes()
    forget_peak()
    started, cpu = time.perf_counter(), time.process_time()
    for step in range(1, args.steps + 1):
        given: Any = iter(batches)
        loss = float(passes.run(given, step=step).loss)
    return {
        "wall_s": (time.perf_counter() - started) / args.steps,
        "cpu_s": (time.process_time() - cpu) / args.steps,
        "peak_bytes": peak_bytes(),
        "extra_bytes": peak_bytes() - before,
        "loss": loss,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--stage", type=int, default=1, help="ZeRO stage")
    parser.add_argument("--global_batch", type=int, default=1024)
    parser.add_argument("--micro_batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trim", action="store_true", help="measure live memory; spoils the times")
    parser.add_argument("--kind", choices=PATHS, help="measure this one here, print JSON")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.kind:
        print("RESULT " + json.dumps(measure(args.kind, args)))
        return
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in PATHS}
    for number in range(args.rounds):
        for kind in PATHS if number % 2 == 0 else reversed(PATHS):
            words = [sys.executable, __file__, *sys.argv[1:], "--kind", kind]
            variables = os.environ | (ALLOCATOR if args.trim else {})
            done = subprocess.run(words, env=variables, stdout=subprocess.PIPE, text=True, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if not lines:
                sys.exit(f"the measurement of {kind} ended with {done.returncode}; what it said stands above")
            runs[kind].append(json.loads(lines[0].removeprefix("RESULT ")))
            print(kind, runs[kind][-1], flush=True)
    medians = {
        kind: {name: statistics.median(run[name] for run in found) for name in found[0]} for kind, found in runs.items()
    }
    print(f"{args.preset}, global batch {args.global_batch} out of {args.micro_batch}, {args.rounds} rounds, medians")
    for kind, figures in medians.items():
        print(
            f"{kind:7} {figures['wall_s']:8.2f} s wall {figures['cpu_s']:8.2f} s CPU a step, peak "
            f"{figures['peak_bytes'] / 1e6:7.0f} MB, {figures['extra_bytes'] / 1e6:7.0f} MB above the start"
        )
    ratio = {name: medians["cached"][name] / medians["naive"][name] for name in medians["naive"] if name != "loss"}
    print("cached / naive: " + ", ".join(f"{name} {value:.3f}" for name, value in ratio.items()))


if __name__ == "__main__":
    main()
