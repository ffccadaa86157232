"""Worker processes: what they import, how they end, and what is said when one dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from clap_zero.audio.clips import FeatureConfig
from clap_zero.data.index import load_index
from clap_zero.data.loader import LoaderPlan, train_batches
from clap_zero.errors import DataError
from tests.processes import command_of
from tests.unit.data.shard_files import write_split

PLAN = LoaderPlan(rank=0, world_size=1, micro_batch=2, features=FeatureConfig("rand_trunc"), workers=2)


def worker_pids(process: psutil.Process) -> list[int]:
    """Workers of a process: the children of its fork server. Test ranks have children, too, and are none of ours."""
    servers = [child for child in process.children() if "forkserver" in command_of(child)]
    return [worker.pid for server in servers for worker in server.children()]


def wait_gone(pids: list[int], timeout_s: float) -> list[int]:
    """The processes that still live when the time is over."""
    end = time.monotonic() + timeout_s
    alive = pids
    while alive and time.monotonic() < end:
        alive = [p for p in alive if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]
        time.sleep(0.05)
    return alive


@pytest.fixture
def index(tmp_path):
    return load_index([str(write_split(tmp_path / "train", [8, 8]))])


def test_closing_ends_the_workers(index):
    batches = train_batches(index, plan=PLAN)
    next(batches)
    pids = worker_pids(psutil.Process())
    assert len(pids) == 2
    batches.close()
    assert wait_gone(pids, 5) == []


def test_a_killed_worker_is_an_error_not_a_hang(index):
    batches = train_batches(index, plan=PLAN)
    next(batches)
    pids = worker_pids(psutil.Process())
    start = time.monotonic()
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(DataError, match=rf"data loader of rank 0 failed: worker \d \(process {pids[0]}\): killed by"):
        for _ in range(50):
            next(batches)
    assert time.monotonic() - start < 20
    assert wait_gone(pids, 5) == []


def test_sigterm_to_the_whole_tree_leaves_the_batches_coming(index):
    """Launchers end a job so; the rank finishes its step first."""
    batches = train_batches(index, plan=PLAN)
    next(batches)
    workers = worker_pids(psutil.Process())
    for child in psutil.Process().children():
        if "multiprocessing" in command_of(child):
            for one in (child, *child.children(recursive=True)):
                one.terminate()
    for _ in range(20):
        next(batches)
    batches.close()
    assert wait_gone(workers, 5) == []


@pytest.mark.parametrize(("workers", "words"), [(0, "NoneType"), (2, "worker process 0.*NoneType")])
def test_a_worker_that_raises_is_named(index, workers, words):
    broken = replace(PLAN, seed=None, workers=workers)
    with pytest.raises(DataError, match=f"data loader of rank 0 failed: .*{words}") as caught:
        next(train_batches(index, plan=broken))
    assert "\n" not in str(caught.value)


def test_an_error_for_the_user_arrives_as_it_is(index, tmp_path):
    with pytest.raises(DataError, match=r"^rank 0: [^:]*holds no tokenizer"):
        next(train_batches(index, plan=replace(PLAN, tokenizer_path=str(tmp_path))))


SCRIPT = """
import sys
with open({marker!r}, "a") as file:  # not behind a __main__ guard: whoever imports this module leaves a mark
    file.write(__name__ + "\\n")
import time
import psutil
from clap_zero.audio.clips import FeatureConfig
from clap_zero.data.index import load_index
from clap_zero.data.loader import LoaderPlan, train_batches
plan = LoaderPlan(rank=0, world_size=1, micro_batch=2, features=FeatureConfig("rand_trunc"), workers=2)
batches = train_batches(load_index([{split!r}]), plan=plan)
next(batches)
names = {{name.split(".")[0] for name in sys.modules}}
heavy = sorted(names & {{"transformers", "deepspeed", "datasets", "wandb", "torchaudio"}})
workers = [w.pid for child in psutil.Process().children() for w in child.children()]
print(heavy, workers, flush=True)
time.sleep({sleep_s})
if {sleep_s} == 0:  # as a run ends
    import os
    from clap_zero.data.processes import remove_leftovers
    batches.close()
    remove_leftovers()
    os._exit(0)
"""


def start_script(tmp_path, sleep_s: float) -> tuple[subprocess.Popen, str, list[int]]:
    split = write_split(tmp_path / "train", [8, 8])
    script = tmp_path / "main.py"
    script.write_text(SCRIPT.format(marker=str(tmp_path / "marker"), split=str(split), sleep_s=sleep_s))
    env = {**os.environ, "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
    env["TMPDIR"] = str(tmp_path / "tmp")
    (tmp_path / "tmp").mkdir()
    with (tmp_path / "stderr").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=log, text=True, env=env
        )
    heavy, _, pids = process.stdout.readline().strip().partition("] ")
    return process, heavy + "]", [int(pid) for pid in pids.strip("[]").split(",")]


def test_workers_do_not_import_the_main_module_and_end_with_it(tmp_path):
    process, heavy, pids = start_script(tmp_path, 0)
    assert process.wait(timeout=60) == 0
    process.stdout.close()
    assert heavy == "[]"
    assert (tmp_path / "marker").read_text() == "__main__\n"
    assert len(pids) == 2 and wait_gone(pids, 5) == []
    assert list((tmp_path / "tmp").iterdir()) == []


def test_workers_leave_when_their_rank_is_killed(tmp_path):
    process, _, pids = start_script(tmp_path, 600)
    assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
    process.kill()
    process.wait()
    process.stdout.close()
    assert wait_gone(pids, 5) == []
    assert list((tmp_path / "tmp").iterdir()) == []
