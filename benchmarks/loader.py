"""Pairs per second of one core: bare decoding, this loader, the plain pipeline of today, and two peers, side by side.

    python benchmarks/loader.py                         # clips made of examples/sounds
    python benchmarks/loader.py --sounds DIR --json FILE --open_clip DIR --laion_clap DIR --peer_python PYTHON

`--open_clip` and `--laion_clap` are checkouts of mlfoundations/open_clip and LAION-AI/CLAP.

Every contender runs in processes of its own on one and the same core, with one thread. They take turns, several rounds
of them; a turn begins and ends when the contender is at rest, its workers having prepared all they may, so the CPU time
between is that of the batches taken. The figure is pairs per CPU second of all its processes, the median over rounds;
on a core without other work that is pairs per second. `wall` is by the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
REST_S = 0.15
"""A contender whose CPU time did not change for so long is at rest."""
START_S = 90.0
"""Most seconds until the first batches of a contender; one that skips all samples never gives any."""
TARGETS = {
    ("ours", "bare"): 0.8,
    ("ours+features", "plain"): 2.0,
    ("ours-logmel+features", "plain"): 15.0,
}
PEERS = ("open_clip", "laion_clap")


@dataclass
class Contender:
    """A contender's process and what was measured of it."""

    name: str
    workers: int
    process: subprocess.Popen[str]
    rounds: list[dict[str, float]] = field(default_factory=list)
    problem: str | None = None

    @property
    def label(self) -> str:
        return self.name if self.name.startswith("bare") else f"{self.name} w{self.workers}"

    def take(self, seconds: float) -> dict[str, float] | None:
        """One turn; None if the process has ended, and `problem` says why."""
        try:
            before = self._cpu_at_rest()[0]
            started = time.perf_counter()
            assert self.process.stdin is not None and self.process.stdout is not None
            print(seconds, file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
            if not answer:
                raise BrokenPipeError
            cpu_s, rested = self._cpu_at_rest()
        except (BrokenPipeError, psutil.NoSuchProcess):
            self.problem = f"ended with code {self.process.wait()}"
            return None
        pairs = int(answer)
        return {"pairs": pairs, "per_core": pairs / (cpu_s - before), "wall": pairs / (rested - started)}

    def _cpu_at_rest(self) -> tuple[float, float]:
        """CPU seconds of the contender's processes once they are at rest, and when that was."""
        value, since = self._cpu_seconds(), time.perf_counter()
        while time.perf_counter() - since < REST_S:
            time.sleep(0.02)
            now = self._cpu_seconds()
            if now - value > 0.0101:  # one tick may belong to a thread that looks around
                value, since = now, time.perf_counter()
        return self._cpu_seconds(), since

    def _cpu_seconds(self) -> float:
        root = psutil.Process(self.process.pid)
        total = 0.0
        for process in [root, *root.children(recursive=True)]:
            try:
                times = process.cpu_times()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            total += times.user + times.system
        return total

    def stop(self) -> None:
        """Ends the process and all that it started."""
        try:
            started = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            started = []
        self.process.kill()
        for process in started:
            if process.is_running():
                process.kill()
        self.process.wait()


def run_contender(args: argparse.Namespace) -> None:
    """What a contender's process does: for each line on stdin it takes batches for so long, and says how many pairs."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # peers print
    from loader_contenders import CONTENDERS, Setting

    checkout = getattr(args, args.contender, None) if args.contender in PEERS else None
    setting = Setting(
        split=args.split,
        logmel_split=args.logmel_split,
        workers=args.workers[0],
        micro_batch=args.micro_batch,
        checkout=checkout,
        scratch=args.scratch,
    )
    import torch

    torch.set_num_threads(1)
    batches = CONTENDERS[args.contender](setting)
    for _ in range(3):
        next(batches)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        pairs, end = 0, time.perf_counter() + float(line)
        while time.perf_counter() < end:
            pairs += next(batches)
        print(pairs, file=answers, flush=True)


def start(name: str, workers: int, args: argparse.Namespace, data: tuple[Path, Path]) -> Contender:
    """Starts a contender on the core and waits until it has given its first batches."""
    scratch = args.data / f"scratch-{name}-{workers}"
    scratch.mkdir(parents=True, exist_ok=True)
    python = args.peer_python if name in PEERS else sys.executable
    command = [python, str(Path(__file__)), "--contender", name, "--workers", str(workers)]
    command += ["--split", str(data[0]), "--logmel_split", str(data[1]), "--scratch", str(scratch)]
    command += ["--micro_batch", str(args.micro_batch)]
    for peer in PEERS:
        if getattr(args, peer) is not None:
            command += [f"--{peer}", str(getattr(args, peer))]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    log = (scratch / "stderr.txt").open("w")
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, {args.core}),
    )
    contender = Contender(name, workers, process)
    assert process.stdout is not None
    answered, _, _ = select.select([process.stdout], [], [], START_S)
    if not answered or process.stdout.readline() != "ready\n":
        last = (scratch / "stderr.txt").read_text(errors="replace").strip().splitlines()[-1:] or ["no message"]
        contender.problem = f"does not run: {last[0][:200]}"
    return contender


def measure(args: argparse.Namespace, data: tuple[Path, Path]) -> list[Contender]:
    """All contenders, in turns."""
    names = [("bare", 0), ("bare-float32", 0)]
    for name in ("ours", "ours+features", "ours-logmel", "ours-logmel+features", "plain", *PEERS):
        if name not in PEERS or getattr(args, name) is not None:
            names += [(name, workers) for workers in args.workers]
    names = [(name, workers) for name, workers in names if not args.only or name in args.only]
    contenders: list[Contender] = []
    try:
        for name, workers in names:
            contenders.append(start(name, workers, args, data))
            print(f"{contenders[-1].label}: {contenders[-1].problem or 'ready'}", file=sys.stderr)
        for number in range(args.rounds + 1):
            for contender in contenders:
                turn = None if contender.problem else contender.take(args.seconds)
                if turn is not None and number > 0:  # the first round warms up
                    contender.rounds.append(turn)
            print(f"round {number} of {args.rounds}", file=sys.stderr)
    finally:
        for contender in contenders:
            contender.stop()
    return contenders


def summary(contenders: list[Contender], args: argparse.Namespace) -> dict[str, Any]:
    """Medians, ratios with their spread over rounds, and whether the targets are reached."""
    rows = {}
    for contender in contenders:
        row: dict[str, Any] = {"name": contender.name, "workers": contender.workers, "problem": contender.problem}
        if contender.rounds:
            rates = [turn["per_core"] for turn in contender.rounds]
            row |= {"per_core": statistics.median(rates), "rounds": rates}
            row["wall"] = statistics.median(turn["wall"] for turn in contender.rounds)
        rows[contender.label] = row
    ratios = []
    for (above, below), target in TARGETS.items():
        for workers in args.workers:
            first = rows.get(f"{above} w{workers}", {}).get("per_core")
            second = rows.get(below if below == "bare" else f"{below} w{workers}", {}).get("per_core")
            if first and second:
                ratio = first / second
                ratios.append(
                    {
                        "ratio": f"{above} / {below}",
                        "workers": workers,
                        "value": ratio,
                        "target": target,
                        "ok": ratio >= target,
                    }
                )
    return {"contenders": rows, "ratios": ratios}


def print_summary(result: dict[str, Any]) -> None:
    """The table."""
    rows = result["contenders"]
    base = rows.get("bare", {}).get("per_core")
    print(f"{'contender':26}{'pairs/s of a core':>18}{'spread':>16}{'wall':>9}{'/ bare':>8}{'/ plain':>9}")
    for label, row in rows.items():
        if row["problem"] or "per_core" not in row:
            print(f"{label:26}  {row['problem'] or 'not measured'}")
            continue
        plain = rows.get(f"plain w{row['workers']}", {}).get("per_core")
        spread = f"{min(row['rounds']):.0f}..{max(row['rounds']):.0f}"
        print(
            f"{label:26}{row['per_core']:18.1f}{spread:>16}{row['wall']:9.1f}"
            f"{row['per_core'] / base if base else float('nan'):8.2f}"
            f"{row['per_core'] / plain if plain else float('nan'):9.2f}"
        )
    for ratio in result["ratios"]:
        verdict = "reached" if ratio["ok"] else "MISSED"
        print(
            f"{ratio['ratio']}, workers {ratio['workers']}: {ratio['value']:.2f}, target {ratio['target']:g}: {verdict}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sounds", type=Path, default=ROOT / "examples" / "sounds", help="recordings to make clips of")
    parser.add_argument("--data", type=Path, help="where the shards go (default: a temporary directory)")
    parser.add_argument("--clips", type=int, default=256)
    parser.add_argument("--micro_batch", type=int, default=16)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)))
    parser.add_argument("--only", nargs="+", help="contenders that run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--open_clip", type=Path, help="checkout of mlfoundations/open_clip")
    parser.add_argument("--laion_clap", type=Path, help="checkout of LAION-AI/CLAP")
    parser.add_argument("--peer_python", default=sys.executable, help="interpreter that has the peers' requirements")
    for name in ("--contender", "--split", "--logmel_split", "--scratch"):  # how it starts itself
        parser.add_argument(name, type=str if name == "--contender" else Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.contender is not None:
        run_contender(args)
        return
    for peer in PEERS:
        if getattr(args, peer) is not None:
            setattr(args, peer, getattr(args, peer).resolve())
    from loader_data import make_data

    with tempfile.TemporaryDirectory() as temporary:
        args.data = Path(temporary) if args.data is None else args.data.resolve()
        data = make_data(args.data, args.sounds, num_clips=args.clips)
        size = sum(path.stat().st_size for path in data[0].glob("*.tar")) / args.clips
        print(f"{args.clips} clips of 10 s, {size / 1000:.0f} kB each; {args.rounds} rounds, core {args.core}")
        result = summary(measure(args, data), args)
    result |= {"clips": args.clips, "clip_bytes": size, "micro_batch": args.micro_batch, "rounds": args.rounds}
    result["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print_summary(result)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
