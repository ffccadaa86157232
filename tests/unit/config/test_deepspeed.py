"""JSON + run config + machine -> a config without "auto", moved defaults or meaningless settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clap_zero.config.deepspeed import Machine, ResolvedDeepSpeed, load_ds_json, resolve
from clap_zero.config.load import dump_run_config, parse_command_line
from clap_zero.errors import ConfigError

CPU = Machine(memory_bytes=8 * 2**30, num_samples=500, device_type="cpu")
CUDA = Machine(memory_bytes=80 * 2**30, num_samples=600_000, device_type="cuda")
SHIPPED = sorted((Path(__file__).parents[3] / "ds_configs").glob("*.json"))


def solve(
    ds: dict[str, Any],
    *argv: str,
    world: int = 2,
    machine: Machine = CPU,
    recorded: Any = None,
    has_gpu: bool = False,
) -> ResolvedDeepSpeed:
    command = parse_command_line(["--ds_config", "x.json", *argv], has_gpu=has_gpu)
    return resolve(ds, command.run, world_size=world, machine=machine, recorded=recorded, explicit=command.explicit)


def refusal(ds: dict[str, Any], *argv: str, **keywords: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        solve(ds, *argv, **keywords)
    return str(caught.value)


def without_auto(node: Any) -> bool:
    if isinstance(node, dict):
        return all(without_auto(value) for value in node.values())
    return node != "auto" and not (isinstance(node, list) and "auto" in node)


def test_an_empty_json_becomes_a_whole_config() -> None:
    solved = solve({})
    assert solved.config == {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": 1,
        "train_batch_size": 32,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 0},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "torch_adam": True},
        },
        "zero_force_ds_cpu_optimizer": False,
        "timers": {"throughput": {"enabled": False, "synchronized": False}},
    }
    assert (solved.micro_batch, solved.accumulation, solved.global_batch) == (16, 1, 32)
    assert (solved.stage, solved.precision, solved.activation_checkpointing) == (0, "fp32", False)
    assert solved.total_steps == 250
    assert solved.explanation[0] == "micro 16 x accumulation 1 x world 2 = global 32"


def test_resolving_changes_nothing_of_its_input_and_is_stable() -> None:
    ds = load_ds_json(str(SHIPPED[0]))
    before = json.dumps(ds)
    first = solve(ds)
    assert json.dumps(ds) == before
    again = solve(first.config, recorded=first.config)
    assert again.config == first.config


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("machine", [CPU, CUDA, Machine(4 * 2**30, 70, "cpu")], ids=["cpu", "cuda", "small"])
@pytest.mark.parametrize("world", [1, 2, 8])
def test_shipped_configs_make_sense_everywhere(path: Path, machine: Machine, world: int) -> None:
    json.loads(path.read_text())  # strict JSON
    ds = load_ds_json(str(path))
    assert {"gradient_accumulation_steps", "gradient_clipping", "activation_checkpointing"} <= set(ds)
    solved = solve(ds, world=world, machine=machine, has_gpu=machine is CUDA)
    assert without_auto(solved.config)
    assert solved.activation_checkpointing
    assert solved.precision == ("fp16" if "fp16" in path.stem else "bf16")
    assert solved.stage == int(path.stem.removeprefix("zero")[0])
    assert solved.global_batch <= machine.num_samples
    assert solved.micro_batch >= 2
    assert solved.config["data_types"]["grad_accum_dtype"] == "fp32"
    assert solved.config["communication_data_type"] == "fp32"
    assert ("torch_adam" in solved.config["optimizer"]["params"]) == (machine.device_type == "cpu")
    if machine is CUDA and world == 8:
        assert solved.global_batch == 2304


def test_recorded_batch_wins_over_a_new_computation() -> None:
    first = solve({}, machine=Machine(0, 500, "cpu"))
    more_data = Machine(0, 70, "cpu")
    assert solve({}, machine=more_data).global_batch == 16
    again = solve({}, machine=more_data, recorded=first.config)
    assert (again.micro_batch, again.accumulation, again.global_batch) == (16, 1, 32)
    wider = solve({}, world=4, recorded=first.config)
    assert (wider.micro_batch, wider.accumulation, wider.global_batch) == (8, 1, 32)
    narrow = solve({}, world=1, recorded=first.config)
    assert (narrow.micro_batch, narrow.accumulation, narrow.global_batch) == (32, 1, 32), "BatchNorm's group stays"
    unknown = solve({}, world=1, machine=Machine(0, 500, "cpu"), recorded=first.config)
    assert (unknown.micro_batch, unknown.accumulation, unknown.global_batch) == (16, 2, 32), "memory does not grow"
    assert solve({"train_batch_size": 8}, recorded=first.config).global_batch == 8, "what is given wins"
    bf16 = {"bf16": {"enabled": "auto"}}
    assert solve(bf16, machine=CUDA).precision == "bf16"
    assert solve(bf16).precision == "fp32"
    assert solve(bf16, recorded={"bf16": {"enabled": True}}).precision == "bf16"


def test_only_a_micro_batch_means_no_accumulation_as_in_deepspeed() -> None:
    assert solve({"train_micro_batch_size_per_gpu": 4}).global_batch == 8
    assert solve({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}).global_batch == 32
    assert solve({"train_micro_batch_size_per_gpu": 4}, "--train.global_batch_size", "24").accumulation == 3
    assert solve({"train_batch_size": 24}).micro_batch == 12
    assert solve({}, "--train.micro_batch_size", "4").micro_batch == 4


def test_every_auto_is_filled() -> None:
    solved = solve(
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "communication_data_type": "auto",
            "bf16": {"enabled": "auto", "check_grad_overflow": "auto"},
            "fp16": {"enabled": "auto", "loss_scale": "auto", "initial_scale_power": "auto"},
            "data_types": {"grad_accum_dtype": "auto"},
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "overlap_comm": "auto",
                "offload_optimizer": {"device": "cpu", "pin_memory": "auto"},
            },
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": "auto"},
            },
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "total_num_steps": "auto",
                    "warmup_min_lr": "auto",
                    "warmup_max_lr": "auto",
                    "warmup_num_steps": "auto",
                    "warmup_type": "auto",
                },
            },
            "activation_checkpointing": {"partition_activations": "auto", "number_checkpoints": "auto"},
        }
    )
    assert without_auto(solved.config)
    assert solved.config["scheduler"]["params"] == {
        "total_num_steps": 250,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 1e-3,
        "warmup_num_steps": 20,
        "warmup_type": "linear",
    }
    assert solved.activation_checkpointing


def test_autos_without_a_rule_are_listed_together() -> None:
    message = refusal(
        {
            "zero_optimization": {"stage": "auto", "zero_hpz_partition_size": "auto"},
            "optimizer": {"type": "auto"},
            "steps_per_print": "auto",
            "gradient_clipping": "auto",
        }
    )
    for path in (
        "zero_optimization.stage",
        "zero_optimization.zero_hpz_partition_size",
        "optimizer.type",
        "steps_per_print",
    ):
        assert path in message
    assert "gradient_clipping" not in message
    assert "optimizer.params.momentum" in refusal(
        {
            "optimizer": {"type": "SGD", "params": {"momentum": "auto"}},
            "zero_allow_untested_optimizer": True,
        }
    )
    late = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}
    message = refusal(late, "--train.epochs", "2", machine=Machine(0, 0, "cpu"))
    assert "scheduler.params.total_num_steps" in message


def test_local_negatives_need_a_second_pair_in_the_micro_batch() -> None:
    ds = {"train_micro_batch_size_per_gpu": 1}
    message = refusal(ds, "--objective.negatives", "local", world=2)
    assert message.startswith("objective.negatives local compares the pairs of one rank's micro batch, and that is one")
    assert solve(ds, "--objective.negatives", "micro", world=2).micro_batch == 1


@pytest.mark.parametrize("length", [0, 10, 99])
def test_a_decay_that_ends_within_its_warm_up_is_refused(length: int) -> None:
    params = {"total_num_steps": length, "warmup_num_steps": 100}
    assert refusal({"scheduler": {"type": "WarmupDecayLR", "params": params}}) == (
        f"scheduler.params.total_num_steps is {length}, and the warm-up alone (warmup_num_steps) takes 100 steps, so "
        'the rate of WarmupDecayLR would stay 0: lower the warm-up, or give the length of the run ("auto" takes it)'
    )


@pytest.mark.parametrize(("length", "told"), [(200, "at its end from step 200 on"), (300, "not come to its end")])
def test_a_decay_of_another_length_than_the_run_is_told(length: int, told: str) -> None:
    params = {"total_num_steps": length, "warmup_num_steps": 20}
    solved = solve({"scheduler": {"type": "WarmupCosineLR", "params": params}})
    assert any(told in line for line in solved.explanation)
    fitting = solve({"scheduler": {"type": "WarmupCosineLR", "params": params | {"total_num_steps": 250}}})
    assert not any("total_num_steps" in line for line in fitting.explanation)


def test_auto_passes_where_it_is_deepspeeds_own_word() -> None:
    ds = {"data_types": {"keep_in_fp32_modules": "auto"}, "autotuning": {"fast": "auto"}}
    assert solve(ds).config["data_types"]["keep_in_fp32_modules"] == "auto"


@pytest.mark.parametrize(
    ("ds", "argv", "parts"),
    [
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}},
            ["--train.learning_rate", "1e-4"],
            ["optimizer.params.lr is 0.0003", "train.learning_rate is 0.0001"],
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}}},
            ["--train.weight_decay", "0.2"],
            ["optimizer.params.weight_decay is 0.1", "train.weight_decay is 0.2"],
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}},
            ["--train.warmup_steps", "9"],
            ["scheduler.params.warmup_num_steps is 7", "train.warmup_steps is 9"],
        ),
        (
            {"train_micro_batch_size_per_gpu": 4},
            ["--train.micro_batch_size", "8"],
            ["train_micro_batch_size_per_gpu is 4", "train.micro_batch_size is 8"],
        ),
        (
            {"train_batch_size": 4},
            ["--train.global_batch_size", "8"],
            ["train_batch_size is 4", "train.global_batch_size is 8"],
        ),
    ],
)
def test_a_number_in_both_that_differs_names_both(ds: dict, argv: list[str], parts: list[str]) -> None:
    message = refusal(ds, *argv)
    assert all(part in message for part in parts), message


def test_json_owns_its_numbers_over_recommendations_and_the_run_records_them() -> None:
    solved = solve(
        {
            "optimizer": {"type": "Adam", "params": {"lr": 3e-4}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}},
        }
    )
    assert solved.config["optimizer"]["params"]["lr"] == 3e-4
    assert solved.run.train.learning_rate == 3e-4
    assert solved.run.train.warmup_steps == 7
    assert solved.config["optimizer"]["params"]["weight_decay"] == solved.run.train.weight_decay == 0.01
    same = solve({"optimizer": {"params": {"lr": 3e-4}}}, "--train.learning_rate", "3e-4")
    assert same.run.train.learning_rate == 3e-4
    assert "min_learning_rate" in refusal({"optimizer": {"params": {"lr": 1e-5}}}, "--train.min_learning_rate", "1e-4")


def test_recommended_warm_up_never_eats_a_short_run() -> None:
    assert solve({}, "--train.max_steps", "30").run.train.warmup_steps == 3
    assert solve({}, "--train.max_steps", "5").run.train.warmup_steps == 0
    assert solve({}, "--train.max_steps", "30", "--train.warmup_steps", "20").run.train.warmup_steps == 20
    solved = solve({}, "--train.max_steps", "30", "--train.warmup_steps", "40")
    assert any("not shorter than the run" in line for line in solved.explanation)


def test_epochs_become_steps() -> None:
    assert solve({}, "--train.epochs", "2").total_steps == 2 * (500 // 32)
    assert solve({}, "--train.epochs", "0.01").total_steps == 1
    assert solve({}, "--train.epochs", "2", machine=Machine(0, 0, "cpu")).total_steps is None


@pytest.mark.parametrize(
    ("zero", "part"),
    [
        ({"stage": 4}, "0, 1, 2 and 3 are possible"),
        ({"stage": -1}, "0, 1, 2 and 3 are possible"),
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, "does nothing at stage 0"),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "offload_param does nothing at stage 2"),
        ({"stage": 1, "offload_optimizer": {"device": "None"}}, 'write "none" in lower case'),
        ({"stage": 1, "offload_optimizer": {"device": "gpu"}}, "cpu, nvme or none"),
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, "nvme_path"),
        ({"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}, "stage 3, not 2"),
        ({"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "ratio 0.5 needs"),
        ({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 2}}, "0 to 1"),
    ],
)
def test_meaningless_zero_settings_are_refused(zero: dict, part: str) -> None:
    assert part in refusal({"zero_optimization": zero})


def test_offload_that_acts_is_shown() -> None:
    solved = solve({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}})
    assert any("optimizer offloaded to cpu" in line for line in solved.explanation)
    assert solved.config["zero_optimization"]["offload_optimizer"]["pin_memory"] is False
    none = solve({"zero_optimization": {"stage": 2, "offload_param": {"device": "none"}}})
    assert not any("offloaded" in line for line in none.explanation)


def test_precision_rules() -> None:
    both = {"bf16": {"enabled": True}, "fp16": {"enabled": True}}
    assert "bf16.enabled and fp16.enabled" in refusal(both)
    plain_cpu = Machine(8 * 2**30, 500, "cpu", precisions=("fp32", "bf16"))
    message = refusal({"fp16": {"enabled": True}}, machine=plain_cpu)
    assert "--ds.fp16.enabled false and --ds.bf16.enabled true" in message
    old_gpu = Machine(0, 500, "cuda", precisions=("fp32", "fp16"))
    assert "--ds.bf16.enabled false and fp32" in refusal({"bf16": {"enabled": True}}, machine=old_gpu)
    assert solve({"bf16": {"enabled": "auto"}}, machine=old_gpu).precision == "fp32"
    stage0 = solve({"bf16": {"enabled": True}}).config
    assert "data_types" not in stage0, "DeepSpeed refuses fp32 accumulation under bf16 without ZeRO"
    assert stage0["bf16"]["check_grad_overflow"] is True
    assert "stage 0" in refusal({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}})
    kept = solve(
        {
            "bf16": {"enabled": True, "check_grad_overflow": False},
            "data_types": {"grad_accum_dtype": "bf16"},
            "communication_data_type": "bf16",
            "zero_optimization": {"stage": 2},
            "gradient_clipping": 0,
        }
    ).config
    assert kept["data_types"]["grad_accum_dtype"] == kept["communication_data_type"] == "bf16"
    assert kept["bf16"]["check_grad_overflow"] is False
    assert kept["gradient_clipping"] == 0
    assert "gradient_clipping is -1" in refusal({"gradient_clipping": -1})


def test_activation_checkpointing_rules() -> None:
    assert solve({"activation_checkpointing": {}}).activation_checkpointing
    assert not solve({"activation_checkpointing": None}).activation_checkpointing
    on_cpu = solve({"activation_checkpointing": {"cpu_checkpointing": True}})
    assert on_cpu.config["activation_checkpointing"]["cpu_checkpointing"] is False
    assert any("cpu_checkpointing" in line for line in on_cpu.explanation)
    on_gpu = solve({"activation_checkpointing": {"cpu_checkpointing": True}}, machine=CUDA)
    assert on_gpu.config["activation_checkpointing"]["cpu_checkpointing"] is True
    assert "set it to false" in refusal({"activation_checkpointing": {"contiguous_memory_optimization": True}})


@pytest.mark.parametrize(
    ("ds", "part"),
    [
        ({"optimizer": {"type": "OneBitAdam"}}, "1-bit"),
        ({"optimizer": {"type": "AdmaW"}}, "did you mean adamw?"),
        ({"optimizer": {"type": "sgd"}}, "did you mean SGD?"),
        ({"optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 1}}, "zero_allow_untested_optimizer"),
        ({"optimizer": {"params": {"lr": 0}}}, "lr is 0"),
        ({"optimizer": {"params": {"betas": [0.9]}}}, "two numbers"),
        ({"scheduler": {"params": {}}}, "scheduler.type is missing"),
        ({"scheduler": {"type": "WarmupCosinLR"}}, "did you mean WarmupCosineLR?"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, "needs 1 or more, write 1"),
        ({"scheduler": {"type": "StepLR", "params": [1]}}, "scheduler.params is [1], a section in braces is needed"),
        ({"optimizer": {"type": "Muon", "params": []}}, "optimizer.params is [], a section in braces is needed"),
        ({"optimizer": {"type": "Muon", "params": {"nesterov": True}}}, "unknown key optimizer.params.nesterov"),
        ({"optimizer": {"params": {"weight_decay": -1}}}, "weight_decay is -1: 0 to 1e+06 is needed"),
        ({"gradient_allreduce_op": "sum"}, "averaged gradients"),
        ({"sequence_parallel_size": 2}, "data-parallel"),
        ({"tensor_parallel": {"autotp_size": 2}}, "data-parallel"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine"),
    ],
)
def test_optimizer_scheduler_and_unsupported(ds: dict, part: str) -> None:
    assert part in refusal(ds)


def test_an_auto_in_what_is_passed_on_is_deepspeeds_own() -> None:
    ds = {"log_level": "info", "data_types": {"keep_in_fp32_modules": "auto"}, "zero_optimization": {"stage": 3}}
    ds["zero_optimization"]["leaf_module"] = {"classes": "auto"}
    config = solve(ds).config
    assert config["data_types"]["keep_in_fp32_modules"] == "auto"
    assert config["zero_optimization"]["leaf_module"] == {"classes": "auto"}


def test_without_zero_gradients_may_be_named_as_the_weights_are() -> None:
    ds = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bfloat16"}}
    assert solve(ds).config["data_types"]["grad_accum_dtype"] == "bfloat16"


def test_cosine_scheduler_takes_the_floor_of_the_run_config() -> None:
    params = solve({"scheduler": {"type": "WarmupCosineLR", "params": {}}}, "--train.min_learning_rate", "1e-4").config[
        "scheduler"
    ]["params"]
    assert params == {"warmup_num_steps": 20, "total_num_steps": 250, "cos_min_ratio": pytest.approx(0.1)}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_run_starts_again_from_what_its_directory_holds(path: Path, tmp_path: Path) -> None:
    first = solve(load_ds_json(str(path), {"optimizer.params.lr": 3e-4}), "--train.max_steps", "50")
    config, ds = tmp_path / "config.yaml", tmp_path / "ds_config.json"
    config.write_text(dump_run_config(first.run))
    ds.write_text(json.dumps(first.config))
    command = parse_command_line(["--config", str(config), "--ds_config", str(ds)])
    again = resolve(
        load_ds_json(str(ds)), command.run, world_size=2, machine=Machine(0, 90, "cpu"), explicit=command.explicit
    )
    assert again.config == first.config
    assert again.run.train == first.run.train
    assert command.run.run_dir == first.run.run_dir


@pytest.mark.parametrize(("kind", "part"), [("Foo", "there are"), ("WarmupCosinLR", "did you mean WarmupCosineLR?")])
def test_an_unknown_scheduler_is_refused_before_a_model_is_built(kind: str, part: str) -> None:
    assert part in refusal({"scheduler": {"type": kind}})
