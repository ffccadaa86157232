"""What the real `deepspeed` launcher makes of exit codes, and what the launch scripts make of that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

RANK = '''
"""A rank that ends as its last argument says, and writes its code as clap_zero.train does."""
import os, signal, sys, time
rank, how = int(os.environ["RANK"]), sys.argv[-1]
file = os.path.join(os.environ["CLAP_ZERO_EXIT_CODES"], f"rank{rank}")
def end(code):
    open(file, "w").write(f"{code}\\n")
    os._exit(code)
open(file, "w").write("running\\n")
if how == "stopped":
    end(75)
if how == "mixed":
    end(5 if rank == 0 else 3)
if how == "killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if how == "launcher-killed" and rank == 0:
    time.sleep(1)
    os.kill(os.getppid(), signal.SIGKILL)
if how == "launcher-stopped":
    signal.signal(signal.SIGTERM, lambda *_: end(75))
    if rank == 0:
        time.sleep(1)
        os.kill(os.getppid(), signal.SIGTERM)
if how != "done":
    parent = os.getppid()
    for _ in range(300):
        if os.getppid() != parent:
            end(5)
        time.sleep(0.1)
end(0)
'''


@pytest.mark.parametrize(
    ("how", "by_deepspeed", "by_script"),
    [
        ("done", {0}, 0),
        ("stopped", {75}, 75),
        ("mixed", {3, 5}, 3),
        ("killed", {247}, 5),
        ("launcher-killed", {0}, 5),
        ("launcher-stopped", {1}, 75),
    ],
)
def test_scripts_give_the_true_code(
    tmp_path: Path, root: Path, how: str, by_deepspeed: set[int], by_script: int
) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    # deepspeed itself, wrapped to note its code and pass it on.
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(
        f'"{Path(sys.executable).parent}/deepspeed" --num_gpus 2 "{tmp_path}/rank.py" {how} || code=$?\n'
        f'echo "${{code:-0}}" >"{tmp_path}/by_deepspeed"\nexit "${{code:-0}}"\n'
    )
    script = f'. "{root}/launch/_env.sh"; PY="{sys.executable}"; run_job bash "{wrapper}"'
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == by_script, done.stderr
    assert int((tmp_path / "by_deepspeed").read_text()) in by_deepspeed, "docs/launching.md says otherwise"
