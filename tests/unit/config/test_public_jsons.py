"""DeepSpeed JSONs as public projects have them: taken or refused rightly at 1, 8, 64 and 512 ranks, and why.

The files in public/ are written after the examples of DeepSpeed's and Hugging Face's documentation. What is taken is
given to DeepSpeed's own DeepSpeedConfig, too, which must read the same numbers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clap_zero.config.deepspeed import Machine, ResolvedDeepSpeed, load_ds_json, resolve
from clap_zero.config.load import dump_run_config, parse_command_line
from clap_zero.errors import ConfigError
from tests.unit.config.test_real_deepspeed import READ, SHIPPED

PUBLIC = Path(__file__).parent / "public"
WORLDS = (1, 8, 64, 512)
MACHINE = Machine(memory_bytes=80 * 10**9, num_samples=600_000, device_type="cuda")

TAKEN: dict[str, tuple[int, ...]] = {
    "hf_zero2_auto": (2296, 2304, 2304, 2048),
    "hf_zero3_auto": (2304, 2304, 2304, 2048),
    "zero3_nvme": (16, 128, 1024, 8192),
    "lamb_large_batch": (65536,) * 4,
    "one_cycle": (64, 512, 4096, 32768),
    "range_test": (32, 256, 2048, 16384),
    "warmup_cosine": (2048,) * 4,
    "profilers": (4, 32, 256, 2048),
    "monitors_to_files": (1024,) * 4,
    "torch_autocast": (16, 128, 1024, 8192),
    "data_types": (4096,) * 4,
    "generated_zero2": (289, 2304, 2304, 2048),
    "first_config": (8, 8),
    "tutorial_zero2": (16, 16),
    "zero_plus_plus": (0, 64, 512, 4096),
}
"""Accepted -> the global batch at each number of ranks; 0 and what is missing at the end: refused there, see below."""

REFUSED_AT = {
    ("first_config", 64): "train_batch_size 8 is not a multiple of gradient_accumulation_steps 1 x world size 64 = 64: "
    "set it to 64, or change gradient_accumulation_steps",
    ("first_config", 512): "train_batch_size 8 is not a multiple of gradient_accumulation_steps 1 x world size 512 = "
    "512: set it to 512, or change gradient_accumulation_steps",
    ("tutorial_zero2", 64): "train_batch_size 16 is not a multiple of the world size 64: set it to 64",
    ("tutorial_zero2", 512): "train_batch_size 16 is not a multiple of the world size 512: set it to 512",
    ("zero_plus_plus", 1): "zero_optimization.zero_hpz_partition_size 8 is more than the world size 1: it is the ranks "
    "of a node; set it to those, or remove it",
}

REFUSED = {
    # DeepSpeed 0.19.8 stops at these itself, some of them only when the model is built.
    "apex_amp": '{file}:2: amp is refused: Apex is gone from DeepSpeed: use "bf16", "fp16" or "torch_autocast"',
    "curriculum": "{file}:3: curriculum_learning is refused: DeepSpeed removed it in 0.19.8: delete the section",
    "elasticity": "{file}:2: elasticity is refused: DeepSpeed removed elastic training in 0.19.8: delete the section "
    "and set the batch sizes",
    "sparse_attention": "{file}:3: sparse_attention is refused: DeepSpeed removed it: delete the section",
    "one_bit_adam": "optimizer.type OneBitAdam: DeepSpeed removed the 1-bit optimizers in 0.19.7: use AdamW",
    "prescaled_zero2": "prescale_gradients true does not go with reduce_scatter at stage 2: set "
    "zero_optimization.reduce_scatter to false, or remove it",
    # DeepSpeed takes these, and they would do nothing.
    "zero3_nvme_thread_count": "{file}:16: aio.thread_count is refused: DeepSpeed calls it intra_op_parallelism now "
    "and passes the old name over",
    # DeepSpeed takes this, and it would train in other steps than this trainer counts.
    "zenflow": "zero_optimization.zenflow is not supported by this trainer: it puts its update_interval in place of "
    "gradient_accumulation_steps, and ends steps by itself: remove the section",
    "autotuning": "autotuning.enabled true is not supported by this trainer: remove the section",
    "deep_compile": "compile.deepcompile true does nothing: this trainer does not compile the engine; remove it "
    "(--ds.compile.deepcompile null)",
    "partitioned_activations": "activation_checkpointing.partition_activations true does nothing: it acts across "
    "tensor-parallel ranks, and here are none; remove it (--ds.activation_checkpointing.partition_activations null)\n"
    "activation_checkpointing.number_checkpoints 4 does nothing: it acts with contiguous_memory_optimization, which "
    "CLAP cannot use; remove it (--ds.activation_checkpointing.number_checkpoints null)",
    "node_local_checkpoints": "checkpoint.use_node_local_storage true does nothing: runs save their own checkpoints, "
    "on a disk that all ranks see; remove it (--ds.checkpoint.use_node_local_storage null)\n"
    "checkpoint.parallel_write {{pipeline_stage: false}} does nothing: runs save their own checkpoints; remove it "
    "(--ds.checkpoint.parallel_write null)",
    "zero2_with_stage3_keys": "zero_optimization.stage3_param_persistence_threshold 1000000 does nothing at stage 2, "
    "it acts at 3: remove it (--ds.zero_optimization.stage3_param_persistence_threshold null)",
    "fixed_loss_scale": "fp16.loss_scale_window 500 does nothing with a fixed fp16.loss_scale 128, it acts with 0: "
    "remove it (--ds.fp16.loss_scale_window null)",
    # DeepSpeed takes these, and one setting contradicts another.
    "one_cycle_two_rates": "optimizer.params.lr 0.00015 and scheduler.params.cycle_max_lr 0.001 contradict each other, "
    'and the schedule\'s would be used: set one of them to "auto", or both to the same',
    "torch_autocast_and_bf16": "torch_autocast.enabled true keeps fp32 weights, and bf16.enabled true makes them bf16: "
    "set one of them to false (--ds.bf16.enabled false)",
    "monitor_wandb": "wandb.enabled true would start a second W&B run beside that of --wandb.mode auto, and stop "
    "training where W&B does not answer: remove the section (--ds.wandb null), and name the project with "
    "--wandb.project",
}
"""Refused at every number of ranks -> the whole message."""


def solve(path: Path, world: int) -> ResolvedDeepSpeed:
    command = parse_command_line(["--ds_config", str(path)], has_gpu=True)
    return resolve(load_ds_json(str(path)), command.run, world_size=world, machine=MACHINE, explicit=command.explicit)


def taken() -> list[tuple[Path, int, int]]:
    """(file, ranks, expected global batch) of everything that is accepted, shipped JSONs (batch 0: any) included."""
    cases = [
        (PUBLIC / f"{name}.json", world, whole)
        for name, batches in TAKEN.items()
        for world, whole in zip(WORLDS, batches, strict=False)
        if whole
    ]
    return cases + [(path, world, 0) for path in SHIPPED for world in WORLDS]


def test_every_file_is_in_the_tables() -> None:
    files = {path.stem for path in PUBLIC.glob("*.json")}
    assert files == set(TAKEN) | set(REFUSED)
    assert len(files) >= 20
    at = {(name, world) for name, batches in TAKEN.items() for world in WORLDS[len(batches) :]}
    assert at | {("zero_plus_plus", 1)} == set(REFUSED_AT)


@pytest.mark.parametrize(("path", "world", "whole"), taken(), ids=lambda value: getattr(value, "stem", str(value)))
def test_taken_with_the_right_sum(path: Path, world: int, whole: int) -> None:
    solved = solve(path, world)
    assert solved.micro_batch * solved.accumulation * world == solved.global_batch
    assert whole in (0, solved.global_batch)


def test_the_page_of_results_says_the_same() -> None:
    page = (Path(__file__).parents[3] / "docs" / "results" / "configs.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:6]] for line in page.splitlines() if line.startswith("| ")][1:]
    listed = {name: numbers for name, *numbers in rows if not name.startswith("ds_configs/")}
    shown = {name: [*map(str, batches), "-", "-"][:4] for name, batches in TAKEN.items()}
    shown["zero_plus_plus"][0] = "-"
    assert listed == {**shown, **dict.fromkeys(REFUSED, ["-"] * 4)}
    assert {name for name, *_ in rows} - set(listed) == {f"ds_configs/{path.name}" for path in SHIPPED}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_with_the_reason(name: str, world: int) -> None:
    path = PUBLIC / f"{name}.json"
    with pytest.raises(ConfigError) as caught:
        solve(path, world)
    assert str(caught.value) == REFUSED[name].format(file=path)


@pytest.mark.parametrize(("name", "world"), sorted(REFUSED_AT))
def test_refused_at_some_numbers_of_ranks(name: str, world: int) -> None:
    with pytest.raises(ConfigError) as caught:
        solve(PUBLIC / f"{name}.json", world)
    assert str(caught.value) == REFUSED_AT[name, world]


@pytest.mark.parametrize("path", [*(PUBLIC / f"{name}.json" for name in TAKEN), *SHIPPED], ids=lambda path: path.stem)
def test_a_run_starts_again_from_what_was_recorded(path: Path, tmp_path: Path) -> None:
    """config.yaml and ds_config.json of a run directory are a whole command, for every JSON that is taken."""
    first = solve(path, 8)
    config, ds = tmp_path / "config.yaml", tmp_path / "ds_config.json"
    config.write_text(dump_run_config(first.run))
    ds.write_text(json.dumps(first.config))
    command = parse_command_line(["--config", str(config), "--ds_config", str(ds)], has_gpu=True)
    again = resolve(load_ds_json(str(ds)), command.run, world_size=8, machine=MACHINE, explicit=command.explicit)
    assert again.config == first.config
    assert again.run.train == first.run.train


def test_deepspeed_reads_what_is_taken() -> None:
    """Its own DeepSpeedConfig, for real: it must not stop, and must come to the same numbers."""
    cases, expected = [], []
    for path, world, _ in taken():
        solved = solve(path, world)
        cases.append((solved.config, world))
        expected.append([world, solved.global_batch, solved.micro_batch, solved.accumulation, solved.stage])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen: list[list[Any]] = json.loads(done.stdout.rpartition("SEEN")[2])
    assert [entry[:5] for entry in seen] == expected
