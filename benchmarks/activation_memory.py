"""What activation checkpointing saves: peak memory of training steps above that before the first forward.

    python benchmarks/activation_memory.py                       # htsat-unfused, micro batch 8, stage 3, 2 ranks
    python benchmarks/activation_memory.py --preset htsat-fused --micro_batch 4 --ds_config ds_configs/zero2.json

Every setting runs in fresh processes. RSS is read from /proc by a thread of its own, so that peaks inside the backward
count. RSS is more than live memory, since the allocator keeps what was freed; `--trim` fixes glibc's thresholds so that
it gives memory back at once.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from typing import Any

import torch

from clap_zero.process_memory import resident_bytes
from clap_zero.testing import run_distributed
from clap_zero.training.engine import allocate_moments

# Blocks of 1 MB and more come from mmap and go back at once; few arenas. Ranks inherit the environment.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576", "MALLOC_ARENA_MAX": "2"}


class PeakRss:
    """The largest RSS while it runs, sampled every few milliseconds, and the value at its start."""

    def __enter__(self) -> PeakRss:
        self.start_bytes = self.peak_bytes = resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.003):
            self.peak_bytes = max(self.peak_bytes, resident_bytes())


def measure(settings: dict[str, Any], checkpointing: bool) -> dict[str, float]:
    """One rank: build, train some steps, and report in MB and seconds."""
    import deepspeed

    from clap_zero.config.deepspeed import load_ds_json
    from clap_zero.config.preset import load_preset
    from clap_zero.distributed.collectives import rank_and_size
    from clap_zero.model.activation import enable_activation_checkpointing
    from clap_zero.model.clap import build_model
    from clap_zero.objective.autograd import contrastive_objective
    from clap_zero.objective.config import ObjectiveConfig

    rank, world = rank_and_size()
    batch = settings["micro_batch"]
    config = load_ds_json(settings["ds_config"])
    config |= {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "train_batch_size": batch * world,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    }
    config.pop("activation_checkpointing", None)
    if checkpointing:
        config["activation_checkpointing"] = {}
    model = build_model(
        geometry=load_preset(settings["preset"]).model,
        pretrained=None,
        batch_norm="sync",
        dropout=None,
        seed=0,
        ds_config=config,
        device=torch.device("cpu"),
    )
    enable_activation_checkpointing(model, config)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config, dist_init_required=False
    )
    allocate_moments(engine)  # as the trainer does: Adam's moments are there before the first forward
    random = torch.Generator().manual_seed(rank)
    fused = model.config.audio_config.enable_fusion
    inputs = {
        "input_features": -40 + 15 * torch.randn(batch, 4 if fused else 1, 1001, 64, generator=random),
        "is_longer": torch.zeros(batch, 1, dtype=torch.bool),
        "input_ids": torch.randint(3, 1000, (batch, settings["num_tokens"]), generator=random),
    }
    before = resident_bytes()
    peaks = {"forward": 0, "backward": 0, "step": 0}
    started = time.perf_counter()
    for _ in range(settings["num_steps"]):
        with PeakRss() as memory:
            output = engine(**inputs)
            embeds = output.audio_embeds, output.text_embeds
            loss, _ = contrastive_objective(*embeds, output.logit_scale, config=ObjectiveConfig(positives="off"))
        peaks["forward"] = max(peaks["forward"], memory.peak_bytes)
        with PeakRss() as memory:
            engine.backward(loss)
        peaks["backward"] = max(peaks["backward"], memory.peak_bytes)
        with PeakRss() as memory:
            engine.step()
        peaks["step"] = max(peaks["step"], memory.peak_bytes)
    return {
        "before_mb": before / 1e6,
        **{f"{phase}_above_mb": (peak - before) / 1e6 for phase, peak in peaks.items()},
        "above_mb": (max(peaks.values()) - before) / 1e6,
        "step_s": (time.perf_counter() - started) / settings["num_steps"],
        "last_loss": loss.item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="htsat-unfused")
    parser.add_argument("--micro_batch", type=int, default=8, help="pairs per rank")
    parser.add_argument("--ds_config", default="ds_configs/zero3.json")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--num_steps", type=int, default=2)
    parser.add_argument("--num_tokens", type=int, default=77)
    parser.add_argument("--trim", action="store_true", help="let glibc return freed memory at once")
    settings = vars(parser.parse_args())
    if settings["trim"]:
        os.environ.update(ALLOCATOR)
    above = {}
    for checkpointing in (False, True):
        results = run_distributed(measure, settings["ranks"], settings, checkpointing, timeout_s=1800, fresh=True)
        above[checkpointing] = max(result["above_mb"] for result in results)
        print(json.dumps({"checkpointing": checkpointing, "ranks": results}))
    print(f"with / without: {above[True]:.0f} MB / {above[False]:.0f} MB = {above[True] / above[False]:.2f}")


if __name__ == "__main__":
    main()
