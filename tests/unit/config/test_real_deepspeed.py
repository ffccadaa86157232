"""DeepSpeed itself takes every shipped config as we resolve it, and reads the same numbers out of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from clap_zero.config.deepspeed import Machine, load_ds_json, resolve
from clap_zero.config.load import parse_command_line

SHIPPED = sorted((Path(__file__).parents[3] / "ds_configs").glob("*.json"))

READ = """
import json, sys
from types import SimpleNamespace
from deepspeed import comm
from deepspeed.runtime.config import DeepSpeedConfig
comm.get_rank = lambda group=None: 0  # there is no process group; the ranks are those of the mpu below
seen = []
for config, world in json.load(sys.stdin):
    mpu = SimpleNamespace(get_data_parallel_world_size=lambda world=world: world)
    read = DeepSpeedConfig(config, mpu=mpu)
    seen.append([
        read.world_size, read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps,
        read.zero_optimization_stage, read.bfloat16_config.enabled, read.float16_config.enabled, read.optimizer_params,
        read.gradient_clipping, read.grad_accum_dtype, str(read.communication_data_type),
    ])
print("SEEN" + json.dumps(seen))
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_deepspeed_reads_what_we_resolved(device: str) -> None:
    cases, expected = [], []
    for path in SHIPPED:
        for world in (1, 2, 8):
            command = parse_command_line(["--ds_config", str(path)], has_gpu=device == "cuda")
            machine = Machine(80 * 10**9, 5_000, device)
            solved = resolve(load_ds_json(str(path)), command.run, world_size=world, machine=machine)
            cases.append((solved.config, world))
            expected.append(
                [
                    *(world, solved.global_batch, solved.micro_batch, solved.accumulation, solved.stage),
                    *(solved.precision == "bf16", solved.precision == "fp16", solved.config["optimizer"]["params"]),
                    *(1.0, "fp32", "torch.float32"),
                ]
            )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.rpartition("SEEN")[2]) == expected
    assert len(cases) == 18
