"""Our tables of DeepSpeed's keys against DeepSpeed's own classes: every key, and every default that we count on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest

from clap_zero.config.ds_effects import ACTING, AIO, DYNAMIC_SCALE, NVME_ONLY
from clap_zero.config.ds_keys import KEYS, OLD_NAMES, REMOVED, SCHEDULER_PARAMS
from clap_zero.config.ds_optimizer_params import CPU_ADAM, FUSED_ADAM, OPTIMIZER_PARAMS, TORCH_ADAM

DUMP = """
import inspect, json
from deepspeed.compile.config import CompileConfig
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor import config as monitor
from deepspeed.runtime import config, lr_schedules, precision_config
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
from deepspeed.runtime.zero import offload_config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

def fields(model):
    found = {}
    for name, field in model.model_fields.items():
        default = field.default if isinstance(field.default, (int, float, str, bool, type(None))) else None
        found[name] = found[field.alias or name] = default
    return found

models = {
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
    "bf16": precision_config.DeepSpeedBF16Config,
    "fp16": precision_config.DeepSpeedFP16Config,
    "tensorboard": monitor.TensorBoardConfig,
    "csv_monitor": monitor.CSVConfig,
    "wandb": monitor.WandbConfig,
    "comet": monitor.CometConfig,
    "comms_logger": CommsLoggerConfig,
    "compile": CompileConfig,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
}
found = {path: fields(model) for path, model in models.items()}
found["aio"] = AIO_DEFAULT_DICT
schedules = {
    kind: [name for name in inspect.signature(getattr(lr_schedules, kind).__init__).parameters][2:]
    for kind in lr_schedules.VALID_LR_SCHEDULES
}
removed = [*config._REMOVED_TOP_LEVEL_CONFIG_KEYS]
removed += [f"zero_optimization.{name}" for name in config._REMOVED_ZERO_CONFIG_KEYS]
import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
parameters = lambda *kinds: sorted({n for k in kinds for n in [*inspect.signature(k.__init__).parameters][2:]})
optimizers = {
    "torch adam": parameters(torch.optim.AdamW),
    "fused adam": parameters(FusedAdam),
    "cpu adam": parameters(DeepSpeedCPUAdam),
    "lamb": parameters(FusedLamb),
    "lion": parameters(FusedLion, DeepSpeedCPULion),
    "adagrad": parameters(torch.optim.Adagrad, DeepSpeedCPUAdagrad),
}
for name in ("SGD", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Adafactor"):
    optimizers[name.lower()] = parameters(getattr(torch.optim, name))
from deepspeed.runtime.engine import DeepSpeedEngine
optimizers["muon"] = sorted({*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS})
print("SEEN" + json.dumps([found, schedules, removed, optimizers]))
"""


@pytest.fixture(scope="module")
def deepspeed() -> tuple[dict[str, dict[str, Any]], dict[str, list[str]], list[str], dict[str, list[str]]]:
    """(section -> key -> default, schedule -> parameters, removed paths, optimizer -> parameters), read elsewhere."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DUMP], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return tuple(json.loads(done.stdout.rpartition("SEEN")[2]))  # type: ignore[return-value]


def ours(path: str) -> set[str]:
    table: Any = KEYS
    for name in path.split("."):
        table = table[name]
    return set(table)


def below(path: str, names: Iterable[str]) -> set[str]:
    """The keys directly below a section, of dotted paths."""
    return {name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == path}


def test_sections_have_exactly_deepspeeds_keys(deepspeed) -> None:
    for path, fields in deepspeed[0].items():
        elsewhere = below(path, OLD_NAMES) | below(path, REMOVED)
        assert set(fields) - elsewhere == ours(path) - elsewhere, path


def test_defaults_that_ask_for_nothing_are_deepspeeds(deepspeed) -> None:
    sections = deepspeed[0]
    for name, acting in ACTING.items():
        # overlap_comm has none: DeepSpeed decides by the stage, and never turns it on where it does not act.
        if name not in ("overlap_comm", "leaf_module"):
            assert sections["zero_optimization"][name] == acting.default, name
    for section, keys in NVME_ONLY.items():
        for name, default in keys.items():
            assert sections[f"zero_optimization.{section}"][name] == default, name
    assert {name: sections["fp16"][name] for name in DYNAMIC_SCALE} == DYNAMIC_SCALE
    assert sections["aio"] == AIO


def test_every_key_of_the_stages_has_a_rule() -> None:
    always = {"stage", "offload_optimizer", "offload_param", "legacy_stage1"}
    gathering = {"gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save"}
    assert set(ACTING) == ours("zero_optimization") - always - gathering


def test_schedules_have_deepspeeds_parameters(deepspeed) -> None:
    assert {kind: set(names) for kind, names in deepspeed[1].items()} == {
        kind: set(params) for kind, params in SCHEDULER_PARAMS.items()
    }


def test_what_deepspeed_removed_is_refused(deepspeed) -> None:
    assert set(deepspeed[2]) <= set(REMOVED)


def test_optimizers_have_their_own_parameters(deepspeed) -> None:
    """max_grad_norm is refused by DeepSpeed wherever it stands; it takes adam_w_mode out before, and more of Muon's."""
    tables = {"torch adam": TORCH_ADAM, "fused adam": FUSED_ADAM, "cpu adam": CPU_ADAM, **OPTIMIZER_PARAMS}
    handled = {"max_grad_norm", "adam_w_mode", "adamw_mode"}
    for name, parameters in deepspeed[3].items():
        handled_here = handled | ({"fp32_optimizer_states"} if name in ("cpu adam", "muon") else set())
        handled_here |= {"muon_lr", "adam_lr", "torch_adam"} if name == "muon" else set()
        assert set(parameters) - handled_here == set(tables[name]) - handled_here, name
    assert set(deepspeed[3]) - {"torch adam", "fused adam", "cpu adam"} == set(OPTIMIZER_PARAMS) - {"adam", "adamw"}
