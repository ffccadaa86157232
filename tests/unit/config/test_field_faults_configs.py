"""Faults of configs as they were reported from the field: the whole message, before a model is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clap_zero import cli
from clap_zero.config.deepspeed import Machine, ResolvedDeepSpeed, load_ds_json, resolve
from clap_zero.config.load import parse_command_line
from clap_zero.errors import ConfigError

MACHINE = Machine(memory_bytes=80 * 10**9, num_samples=600_000, device_type="cuda")


@pytest.fixture
def solve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Text of a DeepSpeed JSON, flags, ranks -> the run, as `check-config` and `train` come to it."""
    monkeypatch.chdir(tmp_path)

    def solved(text: str, *flags: str, world: int = 1) -> ResolvedDeepSpeed:
        Path("ds.json").write_text(text)
        command = parse_command_line(["--ds_config", "ds.json", *flags], has_gpu=True)
        ds = load_ds_json("ds.json", command.ds_overrides)
        return resolve(ds, command.run, world_size=world, machine=MACHINE, explicit=command.explicit)

    return solved


def refusal(solve: Any, text: str, *flags: str, world: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        solve(text, *flags, world=world)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "world", "message"),
    [
        (
            '{"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}',
            1,
            "train_batch_size 30 is not train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 2 x world size "
            '1 = 8: change one of them or set one to "auto"',
        ),
        (
            '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}',
            8,
            "train_batch_size 32 is not train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 2 x world size "
            '8 = 64: change one of them or set one to "auto"',
        ),
        (
            '{"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4}',
            2,
            "train_batch_size 30 is not a multiple of train_micro_batch_size_per_gpu 4 x world size 2 = 8: set it to "
            "24 or 32, or change train_micro_batch_size_per_gpu",
        ),
        (
            '{"train_batch_size": 30}',
            8,
            "train_batch_size 30 is not a multiple of the world size 8: set it to 24 or 32",
        ),
        (
            '{"train_micro_batch_size_per_gpu": 0}',
            1,
            'train_micro_batch_size_per_gpu is 0, at least 1 is needed (or "auto")',
        ),
    ],
)
def test_j01_a_wrong_sum_is_shown_with_the_real_world_size(solve, text: str, world: int, message: str) -> None:
    assert refusal(solve, text, world=world) == message


@pytest.mark.parametrize(
    ("text", "world", "numbers"),
    [
        ('{"train_batch_size": 32}', 4, (8, 1, 32)),
        ('{"train_micro_batch_size_per_gpu": 4}', 4, (4, 1, 16)),
        ('{"train_batch_size": 32, "gradient_accumulation_steps": 2}', 4, (4, 2, 32)),
        ('{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}', 4, (4, 2, 32)),
    ],
)
def test_j01_what_is_open_is_derived(solve, text: str, world: int, numbers: tuple[int, ...]) -> None:
    solved = solve(text, world=world)
    assert (solved.micro_batch, solved.accumulation, solved.global_batch) == numbers


def test_j02_autos_are_filled(solve) -> None:
    text = """{"gradient_clipping": "auto", "train_batch_size": "auto", "bf16": {"enabled": "auto"},
      "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
      "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}"""
    config = solve(text, "--model.preset", "tiny", world=2).config
    assert (config["gradient_clipping"], config["train_batch_size"], config["bf16"]["enabled"]) == (1.0, 32, True)
    assert config["optimizer"]["params"]["lr"] == 1e-3
    assert config["zero_optimization"]["reduce_bucket_size"] == 50_000_000


def test_j02_autos_that_nobody_can_fill_are_listed_by_path(solve) -> None:
    text = """{"zero_optimization": {"stage": "auto"}, "optimizer": {"type": "auto"}, "steps_per_print": "auto",
      "tensorboard": {"enabled": "auto"}, "aio": {"block_size": "auto"}}"""
    assert refusal(solve, text) == (
        '"auto" cannot be filled here: zero_optimization.stage, optimizer.type, steps_per_print, tensorboard.enabled, '
        "aio.block_size: write a value, or remove the key"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"gradient_clipp1ng": 1', "unknown key gradient_clipp1ng: did you mean gradient_clipping?"),
        ('"zero_optimisation": {"stage": 2}', "unknown key zero_optimisation: did you mean zero_optimization?"),
        ('"stage": 2', "unknown key stage: did you mean zero_optimization.stage?"),
        ('"bf16": {"enable": true}', "unknown key bf16.enable: did you mean bf16.enabled?"),
        (
            '"zero_optimization": {"stage": 2, "offload_optimizer": {"pin_mem": true}}',
            "unknown key zero_optimization.offload_optimizer.pin_mem: did you mean "
            "zero_optimization.offload_optimizer.pin_memory?",
        ),
        (
            '"flops_profiler": {"enabled": true, "profile_steps": 5}',
            "unknown key flops_profiler.profile_steps: did you mean flops_profiler.profile_step?",
        ),
        (
            '"tensorboard": {"enabled": true, "output_dir": "x"}',
            "unknown key tensorboard.output_dir: did you mean tensorboard.output_path?",
        ),
        (
            '"activation_checkpointing": {"cpu_checkpoint": true}',
            "unknown key activation_checkpointing.cpu_checkpoint: did you mean "
            "activation_checkpointing.cpu_checkpointing?",
        ),
        (
            '"scheduler": {"type": "OneCycle", "params": {"cycle_max": 1}}',
            "unknown key scheduler.params.cycle_max: did you mean scheduler.params.cycle_max_lr?",
        ),
        ('"learning_rate": 1e-4', "unknown key learning_rate: DeepSpeed 0.19.8 would ignore or refuse it"),
    ],
)
def test_j03_misspelt_and_misplaced_keys_are_refused_with_line_and_place(solve, text: str, message: str) -> None:
    assert refusal(solve, "{\n" + text + "\n}") == f"ds.json:2: {message}"


OFFLOAD = "zero_optimization.offload_"


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        (
            '{"stage": 2, "offload_param": {"device": "cpu"}}',
            f"{OFFLOAD}param does nothing at stage 2: set zero_optimization.stage 3, or remove {OFFLOAD}param",
        ),
        ('{"stage": 2, "offload_optimizer": {"device": "None"}}', None),
        (
            '{"stage": 3, "offload_optimizer": {"device": "nvme"}}',
            f'{OFFLOAD}optimizer.device "nvme" needs {OFFLOAD}optimizer.nvme_path: a directory on the NVMe disk',
        ),
        (
            '{"stage": 0, "offload_optimizer": {"device": "cpu"}}',
            f"{OFFLOAD}optimizer does nothing at stage 0: set zero_optimization.stage to 1, 2 or 3, or remove "
            f"{OFFLOAD}optimizer",
        ),
        (
            '{"stage": 2, "offload_optimizer": {"device": "cpu", "pipeline_read": true}}',
            f'{OFFLOAD}optimizer.pipeline_read true does nothing with device "cpu", it acts with nvme: remove it '
            f"(--ds.{OFFLOAD}optimizer.pipeline_read null)",
        ),
        (
            '{"stage": 3, "round_robin_gradients": true}',
            "zero_optimization.round_robin_gradients true does nothing at stage 3, it acts at 1 or 2: remove it "
            "(--ds.zero_optimization.round_robin_gradients null)",
        ),
        (
            '{"stage": 0, "overlap_comm": true}',
            "zero_optimization.overlap_comm true does nothing at stage 0, it acts at 1, 2 or 3: remove it "
            "(--ds.zero_optimization.overlap_comm null)",
        ),
        (
            '{"stage": 3, "stage3_max_live_parameters": 1e8, "max_live_parameters": 1e9}',
            "zero_optimization.max_live_parameters 1000000000 and zero_optimization.stage3_max_live_parameters "
            "100000000 are one setting: keep one of them",
        ),
        (
            '{"stage": 2, "cpu_offload": true, "offload_optimizer": {"device": "cpu"}}',
            "ds.json:1: zero_optimization.cpu_offload true and zero_optimization.offload_optimizer "
            '{device: "cpu"} are one setting: keep zero_optimization.offload_optimizer',
        ),
    ],
)
def test_j05_settings_without_effect_at_the_stage_are_refused(solve, zero: str, message: str | None) -> None:
    if message is None:
        message = f'{OFFLOAD}optimizer.device is "None": write "none" in lower case'
    assert refusal(solve, '{"zero_optimization": ' + zero + "}") == message


def test_j05_what_is_in_force_is_told(solve) -> None:
    told = solve('{"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}').explanation
    assert (
        "ZeRO stage 1, fp32, activation checkpointing off, optimizer offloaded to cpu, gradients clipped at norm 1"
        in told
    )
    # The old names, which DeepSpeed still takes, and its first form of the section.
    old = solve('{"zero_optimization": {"stage": 2, "cpu_offload": true}, "bfloat16": {"enabled": true}}')
    assert old.config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert (old.precision, solve('{"zero_optimization": true}').stage) == ("bf16", 1)
    # A key that states DeepSpeed's own default asks for nothing, and "auto" fills nothing where it would not act.
    quiet = '{"zero_optimization": {"stage": 1, "sub_group_size": 1e9, "stage3_max_reuse_distance": "auto"}}'
    assert "stage3_max_reuse_distance" not in solve(quiet).config["zero_optimization"]


def test_j05_another_stage_by_flag_leaves_out_what_belongs_to_the_files(solve) -> None:
    """`--ds.zero_optimization.stage 2` on a file for stage 3 asks for stage 2, and not to edit the file."""
    text = '{"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 1e6, "reduce_bucket_size": 1e6}}'
    assert solve(text, "--ds.zero_optimization.stage", "2").config["zero_optimization"] == {
        "stage": 2,
        "reduce_bucket_size": 1_000_000,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"optimizer": {"params": {"lr": "1e-4"}}}',
            'optimizer.params.lr is "1e-4", a number is needed: write it without quotes',
        ),
        (
            '{"zero_optimization": {"reduce_bucket_size": "5e8"}}',
            'zero_optimization.reduce_bucket_size is "5e8", a whole number is needed: write it without quotes',
        ),
        (
            '{"zero_optimization": {"reduce_bucket_size": 3774873.6}}',
            "zero_optimization.reduce_bucket_size is 3774873.6, a whole number is needed",
        ),
        (
            '{"zero_optimization": {"stage": "2"}}',
            'zero_optimization.stage is "2", a whole number is needed: write it without quotes',
        ),
        (
            '{"bf16": {"enabled": "true"}}',
            'bf16.enabled is "true", true or false is needed: write it without quotes',
        ),
        (
            '{"flops_profiler": {"enabled": true, "profile_step": "5"}}',
            'flops_profiler.profile_step is "5", a whole number is needed: write it without quotes',
        ),
        ('{"fp16": {"enabled": 2}}', "fp16.enabled is 2, true or false is needed"),
    ],
)
def test_j07_numbers_as_text_are_refused_with_path_and_value(solve, text: str, message: str) -> None:
    assert refusal(solve, text) == f"ds.json:1: {message}"


def test_j07_exact_values_are_cast(solve) -> None:
    size = solve('{"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}}').config["zero_optimization"]
    assert (size["reduce_bucket_size"], type(size["reduce_bucket_size"])) == (500_000_000, int)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"communication_data_type": "float16"}',
            'communication_data_type is "float16": fp32, bf16, fp16 are possible',
        ),
        (
            '{"bf16": {"enabled": true}, "data_types": {"param_dtype": "fp16"}, "zero_optimization": {"stage": 1}}',
            'data_types.param_dtype "fp16" contradicts the weights, which are bf16: set fp16.enabled true, or remove '
            "data_types.param_dtype",
        ),
        (
            '{"fp16": {"enabled": true, "loss_scale_window": 0}}',
            "fp16.loss_scale_window is 0: 1 or more is needed",
        ),
        (
            '{"optimizer": {"type": "Lamb"}, "fp16": {"enabled": true, "loss_scale": 128}}',
            "optimizer.type Lamb needs a dynamic loss scale, and fp16.loss_scale is 128: set it to 0",
        ),
        (
            '{"bf16": {"enabled": true, "bf16_master_weights_and_grads": true}}',
            "bf16.bf16_master_weights_and_grads true needs zero_optimization.stage 1, 2 or 3, not 0",
        ),
        (
            '{"optimizer": {"type": "AdamW", "params": {"adam_w_mode": false}}}',
            'optimizer.type AdamW and optimizer.params.adam_w_mode false contradict each other: use the type "Adam"',
        ),
        (
            '{"zero_optimization": {"stage": 1, "compute_grad_norm": false}}',
            "zero_optimization.compute_grad_norm false takes the norm away that this trainer records in each step: "
            "remove it",
        ),
        (
            '{"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}}',
            'scheduler.params.warmup_type is "cosine": linear, log are possible',
        ),
        (
            '{"scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": 1e-3}}}',
            "scheduler.params.cycle_min_lr is missing: scheduler.type OneCycle needs it",
        ),
    ],
)
def test_contradictions_name_both_sides(solve, text: str, message: str) -> None:
    assert refusal(solve, text) == message


def test_a_schedule_of_the_json_leaves_nothing_of_ours_without_effect(solve) -> None:
    cycle = '{"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3}}}'
    assert refusal(solve, cycle, "--train.warmup_steps", "10") == (
        "train.warmup_steps 10 does nothing beside scheduler.type OneCycle of the DeepSpeed JSON: leave it out, or "
        "remove the JSON's scheduler (--ds.scheduler null)"
    )
    train = solve(cycle).run.train
    assert (train.learning_rate, train.warmup_steps) == (1e-3, 0), "what is in force is recorded"
    assert "scheduler.params.cycle_max_lr is 0.001" in refusal(solve, cycle, "--train.learning_rate", "1e-4")
    assert solve(cycle, "--ds.scheduler", "null", "--train.warmup_steps", "10").run.train.warmup_steps == 10
    betas = cycle[:-1] + ', "optimizer": {"params": {"betas": [0.9, 0.95]}}}'
    assert refusal(solve, betas) == (
        "optimizer.params.betas [0.9, 0.95] does nothing beside scheduler.type OneCycle, which sets them in each step: "
        "remove it (--ds.optimizer.params.betas null), or set scheduler.params.cycle_momentum to false"
    )
    decay = '{"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5}}}'
    assert "train.schedule constant" in refusal(solve, decay, "--train.schedule", "constant")


def test_adam_gets_only_what_the_chosen_one_takes(solve) -> None:
    """DeepSpeed hands them on, and one too many is a TypeError while the engine is built."""
    ds = '{"optimizer": {"type": "Adam", "params": {"torch_adam": %s, %s}}}'
    assert solve(ds % ("true", '"bias_correction": true')).config["optimizer"]["params"].get("bias_correction") is None
    assert solve(ds % ("false", '"bias_correction": false')).config["optimizer"]["params"]["bias_correction"] is False
    assert refusal(solve, ds % ("true", '"bias_correction": false')) == (
        "optimizer.params.bias_correction false does nothing in torch's Adam, which this run uses: remove it "
        "(--ds.optimizer.params.bias_correction null), or set optimizer.params.torch_adam to false"
    )
    assert "fused Adam" in refusal(solve, ds % ("false", '"foreach": true'))
    assert "has no AMSGrad" in refusal(solve, ds % ("false", '"amsgrad": true'))


def test_settings_that_print_do_print(solve) -> None:
    """The trainer keeps DeepSpeed's logger quieter than these need."""
    assert solve('{"wall_clock_breakdown": true}').config["log_level"] == "info"
    assert "log_level" not in solve('{"steps_per_print": 10}').config


def test_all_faults_are_told_at_once_and_the_command_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"compile": {"deepcompile": true}, "hybrid_engine": {"enabled": true}, "steps_per_print": 0}')
    assert cli.main(["check-config", "--ds_config", str(path), "--world-size", "64", "--device", "cuda"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("clap-zero: error: ") for line in lines)
