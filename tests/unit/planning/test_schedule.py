"""The schedules of DeepSpeed as check-config tells them, against DeepSpeed's own classes, step by step."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from clap_zero.errors import ConfigError
from clap_zero.planning.schedule import scheduled_rate, torch_rates

STEPS = 30
PEAK = 2e-3
CASES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_num_steps": 5, "warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3}),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_max_lr": 1e-3, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"warmup_num_steps": 5, "warmup_max_lr": 1e-3, "total_num_steps": 20, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"warmup_num_steps": 5, "total_num_steps": 20, "cos_min_ratio": 0.1, "warmup_min_ratio": 0.2}),
    ("LRRangeTest", {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 5, "lr_range_test_staircase": True}),
    (
        "OneCycle",
        {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 8, "cycle_first_stair_count": 4},
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-3,
            "cycle_first_step_size": 6,
            "cycle_second_step_size": 4,
            "decay_step_size": 3,
            "decay_lr_rate": 0.1,
        },
    ),
]

REAL = """
import json, sys, torch, logging
from deepspeed.runtime import lr_schedules
lr_schedules.logger.setLevel(logging.ERROR)
seen = []
cases, peak, num_steps = json.load(sys.stdin)
for kind, params in cases:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=peak)
    schedule = getattr(lr_schedules, kind)(optimizer, **params)
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    seen.append(rates)
for kind in (lr_schedules.WarmupLR, lr_schedules.WarmupCosineLR):
    try:
        kind(optimizer, warmup_num_steps=0, **({} if kind is lr_schedules.WarmupLR else {"total_num_steps": 20}))
    except ValueError:  # why the checks refuse it
        continue
    sys.exit(f"{kind} takes a warm-up of no steps")
print("SEEN" + json.dumps(seen))
"""


@pytest.mark.long
def test_rates_are_deepspeeds_own() -> None:
    words = [sys.executable, "-W", "ignore", "-c", REAL]
    done = subprocess.run(words, input=json.dumps([CASES, PEAK, STEPS]), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for (kind, params), rates in zip(CASES, json.loads(done.stdout.rpartition("SEEN")[2]), strict=True):
        ours = [scheduled_rate(kind, params, peak=PEAK, step=step) for step in range(1, STEPS + 1)]
        assert ours == pytest.approx(rates, rel=1e-9, abs=1e-15), (kind, params)


def test_schedules_of_torch_are_told_by_torch() -> None:
    rates = torch_rates("StepLR", {"step_size": 5, "gamma": 0.5}, peak=PEAK, steps=[1, 5, 6, 11])
    assert rates == pytest.approx({1: PEAK, 5: PEAK, 6: PEAK / 2, 11: PEAK / 4})
    with pytest.raises(ConfigError, match="^scheduler.type CyclicLR does not take these scheduler.params: mode is inv"):
        torch_rates("CyclicLR", {"base_lr": 0.1, "max_lr": 1.0, "mode": "up"}, peak=PEAK, steps=[1])
