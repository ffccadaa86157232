"""The whole story of `clap-zero check-config`, and the JSON Schema that it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from clap_zero import cli
from clap_zero.config.load import dump_run_config, parse_command_line
from clap_zero.planning.check_config import told
from clap_zero.planning.json_schema import run_config_schema, schema_text

ROOT = Path(__file__).resolve().parents[3]


def story(*argv: str) -> list[str]:
    def no_device() -> str:
        raise AssertionError("--device was given")

    return told([*argv, "--device", "cuda"], device_here=no_device)


def test_the_story_of_a_large_run() -> None:
    path = str(ROOT / "ds_configs" / "zero3.json")
    assert story("--ds_config", path, "--world-size", "64", "--num-samples", "600000", "--memory-gb", "80") == [
        "for 64 ranks on cuda (--world-size and --device say otherwise)",
        "model.preset htsat-fused: neither preset nor pretrained was named, and an accelerator is there",
        "micro 36 x accumulation 1 x world 64 = global 2304",
        "ZeRO stage 3, bf16, activation checkpointing on, gradients clipped at norm 1",
        "warm-up of 1170 steps instead of 3200: the run has 11700 steps",
        "negatives: all 2304 pairs of a step, in one pass",
        "objective: softmax; pairs with an equal caption or group: positives soft",
        "memory of a rank, model of 153.5 M parameters: about 3.9 GB = weights 0.0048 + gradients 0.0096 + optimizer "
        "0.029 + buffers 0.06 + activations 2.8 + contrast 0.02 + process 1 (an estimate, not measured for GPUs)",
        "one checkpoint: 2.5 GB, at most 3 at a time",
        "optimizer steps 11700, warm-up 1170; 600000 pairs make 260 steps an epoch, 960 of them, others each time, do "
        "not fill a step",
        "schedule: cosine after 1170 steps of warm-up, 8.55e-08 at step 1, 0.0001 at step 1170, 5e-05 at step 6435, 0 "
        "at step 11700",
        "optimizer: AdamW, learning rate 0.0001, weight decay 0",
        "run directory runs/htsat-fused-zero3",
    ]


def test_offload_a_schedule_of_the_json_and_too_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},'
        ' "train_micro_batch_size_per_gpu": 64,'
        ' "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}'
    )
    lines = story("--ds_config", str(path), "--memory-gb", "8", "--train.max_steps", "100", "--world-size", "4")
    text = "\n".join(lines)
    assert "host memory beside it: 0.61 GB a rank = optimizer 0.46 + gradients 0.15" in text
    warning = "warning: that is more than the 8 GB of a rank: lower --ds.train_micro_batch_size_per_gpu, "
    assert f"{warning}--ds.activation_checkpointing '{{}}' (recomputes), --ds.zero_optimization.stage 3" in text
    on = "\n".join(story("--ds_config", str(path), "--memory-gb", "1", "--ds.activation_checkpointing", "{}"))
    assert "more than the 1 GB of a rank" in on and "recomputes" not in on
    assert "schedule: WarmupLR of the DeepSpeed JSON, 0 at step 1, 0.0001 at step 12, 0.0001 at step 56" in text


def test_a_run_without_a_known_length(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("{}")
    lines = story("--ds_config", str(path), "--train.epochs", "2")
    assert "optimizer steps not known without --num-samples, warm-up 3200" in lines
    assert any("its length is not known without --num-samples" in line for line in lines)


def test_the_shipped_schema_is_the_one_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """`clap-zero check-config --schema > docs/run_config.schema.json` brings it up to date."""
    assert cli.main(["check-config", "--schema"]) == 0
    printed = capsys.readouterr().out
    assert printed == schema_text()
    assert (ROOT / "docs" / "run_config.schema.json").read_text() == printed
    assert json.loads(printed)["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert cli.main(["check-config", "--schema", "--ds_config", "x"]) == 2


def test_the_schema_takes_what_the_trainer_takes() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = run_config_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    written = dump_run_config(parse_command_line(["--ds_config", "x.json", "--model.preset", "tiny"]).run)
    for text in (
        written,
        "train: {max_steps: 10}",
        "data: {train: /data/train}",
        "data: {train: {shards: /data, weight: 2}, val: [/a, {shards: [/b, /c]}]}",
    ):
        assert not list(validator.iter_errors(yaml.safe_load(text))), text
    for text in ("train: {max_stepz: 10}", "train: {max_steps: ten}", "trian: {}", "data: {train: {weight: 2}}"):
        assert list(validator.iter_errors(yaml.safe_load(text))), text
