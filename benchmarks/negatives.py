"""What the negatives of the whole global batch are worth: retrieval after equally many steps, seed by seed.

    python benchmarks/negatives.py                                   # the embedded sounds, tiny, 8 x accumulation
    python benchmarks/negatives.py --train DIR --val DIR --steps 200

Runs of `clap_zero.train` that differ in `--objective.negatives` and `--train.seed` only: same samples, same order, same
learning rates. Figures are those of the evaluation at the end, in percent, over all held-out pairs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = {"cached (global)": "global", "naive (micro)": "micro"}
FIGURES = (
    *("audio_to_text.R@1", "audio_to_text.R@10", "audio_to_text.mAP@10"),
    *("text_to_audio.R@1", "text_to_audio.R@10", "text_to_audio.mAP@10"),
)


def train(negatives: str, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """One run; its figures at the end."""
    run_dir = args.out / f"{negatives}-{seed}"
    words = [
        *(sys.executable, "-m", "clap_zero.train", "--ds_config", str(ROOT / "ds_configs" / "zero1.json")),
        *("--ds.bf16", "null", "--ds.activation_checkpointing", "null", "--run_dir", str(run_dir)),
        *("--model.preset", args.preset, "--objective.negatives", negatives, "--train.seed", str(seed)),
        *("--train.micro_batch_size", str(args.micro_batch)),
        *("--train.global_batch_size", str(args.micro_batch * args.accumulation)),
        *("--train.max_steps", str(args.steps), "--train.warmup_steps", str(args.steps // 10)),
        *("--train.learning_rate", str(args.learning_rate), "--wandb.mode", "disabled", "--data.workers", "0"),
        *(word for path in args.train for word in ("--data.train", path)),
        *(word for path in args.val for word in ("--data.val", path)),
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
    found: dict[str, float] = json.loads((run_dir / "eval" / f"step-{args.steps}.json").read_text())
    print(negatives, seed, {name: round(100 * found[name], 2) for name in FIGURES}, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--train", action="append", default=[], help="shards; default: the embedded sounds")
    parser.add_argument("--val", action="append", default=[])
    parser.add_argument("--micro_batch", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("runs") / "negatives", help="directory of the runs")
    args = parser.parse_args()
    if args.out.exists() and any(args.out.iterdir()):
        # A run directory of before is complete: its old figures would be printed as those of this code.
        sys.exit(f"--out {args.out} is not empty: move it away, or name another directory")
    places = [(name, seed) for seed in range(args.seeds) for name in KINDS]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(lambda place: train(KINDS[place[0]], place[1], args), places))
    print(f"\n| negatives | seed | {' | '.join(FIGURES)} |\n|---|---|{'---:|' * len(FIGURES)}")
    for name in KINDS:
        own = [figures for (kind, _), figures in zip(places, results, strict=True) if kind == name]
        for seed, figures in enumerate(own):
            print(f"| {name} | {seed} | " + " | ".join(f"{100 * figures[key]:.1f}" for key in FIGURES) + " |")
        means = [statistics.mean(100 * figures[key] for figures in own) for key in FIGURES]
        print(f"| {name} | mean | " + " | ".join(f"{mean:.1f}" for mean in means) + " |")


if __name__ == "__main__":
    main()
