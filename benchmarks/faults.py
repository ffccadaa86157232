"""What becomes of a run on two hosts when something dies: time until all is gone, exit code, what the user reads.

    python benchmarks/faults.py                        # all, 20 minutes; as root, with pdsh, sshd and iproute2
    python benchmarks/faults.py --only "Ctrl-C" --only "rank 0 killed"

The hosts are network namespaces of this machine (tests/hosts), the limits those that are shipped. Writes
docs/results/faults.md out of runs/faults.json, where the results of earlier calls stay.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.hosts.bed import Bed, why_not  # noqa: E402
from tests.hosts.fault_cases import FAULTS  # noqa: E402
from tests.hosts.faults import LIMIT_S, Fault, Scene, is_right, play  # noqa: E402
from tests.hosts.jobs import data_flags  # noqa: E402

RESULTS = ROOT / "docs" / "results" / "faults.md"
MESSAGE_CHARACTERS = 240


def measure(fault: Fault, data: list[str]) -> dict[str, Any]:
    """One fault with the shipped limits."""
    with tempfile.TemporaryDirectory(prefix="clap-zero-faults-") as folder:
        cwd = Path(folder) / "job"
        cwd.mkdir()
        with Bed(Path(folder) / "bed", **fault.makes(cwd)) as bed:  # type: ignore[arg-type]
            outcome = play(fault, Scene(bed, cwd, list(data), slots=fault.slots))
    message = outcome.message.replace(f"{folder}/", "").replace(sys.prefix, ".venv")
    return {**dataclasses.asdict(outcome), "message": message, "wrong": is_right(fault, outcome)}


def render(results: dict[str, dict[str, Any]]) -> str:
    """The page: one row a fault, the worst and the median below."""
    rows = []
    for fault in FAULTS:
        if fault.name not in results:
            continue
        got = results[fault.name]
        named = [got["named"].get(what) for what in ("host", "rank", "cause")]
        marks = ["-" if is_there is None else "yes" if is_there else "no" for is_there in named]
        seconds = f"never ({len(got['left'])} processes left)" if got["left"] else f"{got['seconds']:.1f}"
        message = got["message"].replace("|", "\\|")[:MESSAGE_CHARACTERS]
        row = [fault.name, "survives" if fault.survives and got["code"] == 0 else seconds, str(got["code"])]
        rows.append("| " + " | ".join([*row, *(["-"] * 3 if fault.survives else marks), f"`{message}`"]) + " |")
    times = [results[f.name]["seconds"] for f in FAULTS if f.name in results and not f.survives]
    if times:
        told = f"Worst {max(times):.1f} s, median {statistics.median(times):.1f} s; the limit is {LIMIT_S:.0f} s."
        rows += ["", told]
    return "\n".join([HEAD, *rows, ""])


HEAD = """# Faults on several hosts

Two hosts with one rank each (where nothing else is said), made out of network namespaces of one machine with two
cores; started by `deepspeed --hostfile` over pdsh and ssh, with the limits that are shipped. The fault comes after
step 3, a second after the ranks have started (killed before they meet), or is there from the start; then the time runs
from the command, start-up included. "Gone" means every process on every host but sshd. "Named" is what the one line
that is shown says; `-` where the fault has no such thing. The code is that of the `deepspeed` command: the largest of
all hosts, as pdsh gives it; `launch/multi_node.sh` gives the cause's. After Ctrl-C pdsh ends its ssh at once and what
the ranks say is lost, but their checkpoint is there. Measured by `python benchmarks/faults.py`, up to three jobs at a
time on these two cores.

| fault | all gone after, s | exit code | host named | rank named | cause named | line |
|---|---|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="faults whose name begins so; default: all")
    parser.add_argument("--json", type=Path, default=ROOT / "runs" / "faults.json", help="where results are kept")
    parser.add_argument("--outputs", type=Path, help="directory for the whole output of each job")
    args = parser.parse_args()
    if (reason := why_not()) is not None:
        raise SystemExit(f"cannot be measured here: {reason}")
    chosen = [f for f in FAULTS if not args.only or f.name.startswith(tuple(args.only))]
    results = json.loads(args.json.read_text()) if args.json.exists() else {}
    with tempfile.TemporaryDirectory(prefix="clap-zero-faults-data-") as folder:
        data = data_flags(Path(folder))
        for fault in chosen:
            try:
                got = measure(fault, data)
            except AssertionError as error:
                print(f"{fault.name}: not measured: {str(error).splitlines()[0]}", flush=True)
                continue
            if args.outputs is not None:
                args.outputs.mkdir(parents=True, exist_ok=True)
                (args.outputs / f"{fault.name.replace('/', '_')}.log").write_text(got["output"])
            print(
                f"{fault.name}: {got['seconds']:.1f} s, exit code {got['code']}; {got['wrong'] or 'right'}", flush=True
            )
            results[fault.name] = {key: value for key, value in got.items() if key != "output"}
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(results, indent=1))
            RESULTS.write_text(render(results))


if __name__ == "__main__":
    main()
