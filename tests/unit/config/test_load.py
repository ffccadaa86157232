"""Flags, files and presets become one RunConfig, and whatever is wrong is one line that says where."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from clap_zero.config.ds_json import load_ds_json
from clap_zero.config.flags import FIELDS, help_text
from clap_zero.config.load import CommandLine, diff_configs, dump_run_config, parse_command_line, run_config_from_file
from clap_zero.config.schema import RunConfig
from clap_zero.config.values import parse_value, parse_yaml, to_yaml
from clap_zero.errors import ConfigError

DS = ["--ds_config", "ds_configs/zero2.json"]


def parse(*argv: str, has_gpu: bool = False) -> CommandLine:
    return parse_command_line([*DS, *argv], has_gpu=has_gpu)


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_command_line(list(argv))
    return str(caught.value)


def test_bare_command_takes_tiny_without_an_accelerator_and_says_so() -> None:
    command = parse()
    assert command.run.model.preset == "tiny"
    assert command.run.run_dir == "runs/tiny-zero2"
    assert command.run.train.max_steps == 250
    assert command.explicit == {"ds_config"}
    assert "tiny" in command.notes[0]


def test_bare_command_takes_the_default_geometry_on_a_gpu() -> None:
    command = parse(has_gpu=True)
    assert command.run.model.preset == "htsat-fused"
    assert command.run.train.epochs == 45
    assert command.run.train.max_steps is None
    assert (command.run.train.learning_rate, command.run.train.warmup_steps) == (1e-4, 3200)


@pytest.mark.parametrize(
    "argv",
    [
        ["--train.max_steps", "7"],
        ["--train.max_steps=7"],
        ["--train.max-steps", "7"],
        ["--train.max-steps=7"],
        ["--local_rank=0", "--train.max_steps", "7"],
        ["--local-rank", "1", "--train.max_steps", "7"],
    ],
)
def test_spellings_of_a_flag(argv: list[str]) -> None:
    command = parse(*argv)
    assert command.run.train.max_steps == 7
    assert command.run.train.epochs is None
    assert "train.max_steps" in command.explicit


def test_lists_grow_by_repetition_and_take_yaml() -> None:
    command = parse(
        "--data.train", "a dir", "--data.train=[b, 'c d']", "--data.val", "s-{0..9}.tar", "--data.val", "[ab]/*"
    )
    assert command.run.data.train == ("a dir", "b", "c d")
    assert command.run.data.val == ("s-{0..9}.tar", "[ab]/*")


@pytest.mark.parametrize(
    "text",
    ["it's a 72\" test", "a=b=c", "", " ", "'q'", "a: b", "# no comment", "1e-4", "yes", "[x", "--tail", "naïve 音"],
)
def test_texts_arrive_byte_for_byte(text: str) -> None:
    assert parse(f"--wandb.name={text}").run.wandb.name == text
    if not text.startswith("--"):
        assert parse("--wandb.name", text).run.wandb.name == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("5e8", 5e8),
        ("1E-4", 1e-4),
        (".5", 0.5),
        ("-3", -3),
        ("010", 10),
        ("0x10", 16),
        ("true", True),
        ("on", "on"),
        ("yes", "yes"),
        ("null", None),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("[a, 1e-3]", ["a", 1e-3]),
        ("{a: 1}", {"a": 1}),
        ("a: b: c", "a: b: c"),
        ("", ""),
    ],
)
def test_values_are_yaml_1_2(text: str, value: object) -> None:
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_ds_overrides_keep_their_types() -> None:
    command = parse("--ds.optimizer.params.lr", "1e-4", "--ds.zero_optimization.stage=3", "--ds.fp16", "null")
    assert command.ds_overrides == {"optimizer.params.lr": 1e-4, "zero_optimization.stage": 3, "fp16": None}
    assert command.ds_path == "ds_configs/zero2.json"
    assert parse_command_line(["--deepspeed_config", "x.json"]).ds_path == "x.json"


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["--train.max_stepz", "3"], "--train.max_steps"),
        (["--max_steps", "3"], "--train.max_steps"),
        (["--learning-rate", "3"], "--train.learning_rate"),
        (["--zero_optimization.stage", "3"], "--ds.zero_optimization.stage"),
        (["--rundir", "x"], "--run_dir"),
        (["--train", "3"], "is a section"),
        (["--ds", "3"], "unknown flag --ds"),
        (["--train.seed"], "--train.seed needs a value"),
        (["--train.seed", "--force"], "--train.seed needs a value"),
        (["--train.seed", "1", "--train.seed", "2"], "given twice"),
        (["--ds.a", "1", "--ds.a", "2"], "given twice"),
        (["3"], "unexpected argument '3'"),
        (["train.seed=3"], "write --train.seed=3"),
        (["+data.train=x"], "write --data.train=x"),
        (["--data.train", "s/0.tar", "s/1.tar", "s/2.tar"], "'s/1.tar' and 1 more: give --data.train the directory"),
        (["--train.a", "3"], "unknown flag --train.a: --help lists them all"),
        (["--optimizer.params.lr", "3"], "--ds.optimizer.params.lr"),
        (["--", "x"], "unexpected argument '--'"),
    ],
)
def test_unusable_flags_name_the_way_out(argv: list[str], hint: str) -> None:
    assert hint in refusal(*DS, *argv)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--train.max_steps", "0"], ["--train.max_steps", "0", "greater than 0"]),
        (["--train.max_steps", "2.5"], ["whole number"]),
        (["--train.max_steps", "true"], ["max_steps", "true"]),
        (["--train.learning_rate", "abc"], ["--train.learning_rate", '"abc"', "number"]),
        (["--train.learning_rate", ".inf"], ["finite"]),
        (["--model.batch_norm", "syn"], ["'sync', 'local' or 'frozen'"]),
        (["--model.preset", "huge"], ["'tiny'"]),
        (["--train.global_batch_size", "0"], ["greater than 0", "'auto'"]),
        (["--train.micro_batch_size", "3", "--train.global_batch_size", "8"], ["micro_batch_size 3", "8"]),
        (["--train.max_steps", "3", "--train.epochs", "2"], ["train.max_steps 3", "train.epochs 2", "null"]),
        (["--model.preset", "tiny", "--model.pretrained", "x"], ["model.preset tiny", "model.pretrained x", "null"]),
        (["--train.min_learning_rate", "1"], ["--train.min_learning_rate", "--train.learning_rate"]),
        (["--train.max_steps", "null"], ["--train.max_steps N", "--train.epochs N"]),
        (["--run_dir", ""], ["--run_dir", "empty"]),
        (["--data.train", ""], ["data.train", "empty"]),
        (["--wandb.mode", "true"], ["--wandb.mode", "true", "'offline'"]),
        (["--data.workers", "false"], ["--data.workers", "false", "whole number"]),
        (["--model.dropout", "true"], ["--model.dropout", "true", "number"]),
        (["--resume", "latest"], ["resume latest names no checkpoint", "auto (the default)"]),
        (["--resume", "100"], ["resume 100 names no checkpoint", "path"]),
    ],
)
def test_wrong_values_name_flag_value_and_way_out(argv: list[str], parts: list[str]) -> None:
    message = refusal(*DS, *argv)
    assert all(part in message for part in parts), message
    assert "\n" not in message, "one thing is wrong, so one line"
    assert "pydantic" not in message


def test_every_wrong_value_gets_its_line() -> None:
    lines = refusal(*DS, "--train.max_steps", "0", "--model.dropout", "2", "--checkpoint.keep", "x").splitlines()
    assert len(lines) == 3


def test_every_unusable_flag_gets_its_line() -> None:
    argv = ["--bf16", "--lr", "1e-3", "--train.seed", "1", "2", "--nope=3", "--train.workerz", "4", "--data.val"]
    assert refusal(*argv).splitlines() == [
        "unknown flag --bf16: did you mean --ds.bf16.enabled true?",
        "unknown flag --lr: did you mean --train.learning_rate?",
        "unexpected argument '2': every value follows its flag, as in --train.seed 1",
        "unknown flag --nope: --help lists them all",
        "unknown flag --train.workerz: did you mean --data.workers?",
        "--data.val needs a value (a value that begins with -- is written --data.val=VALUE)",
    ]


def test_every_unknown_key_of_a_file_gets_its_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lr: 3e-4\ntrain:\n  seeed: 1\n  batch_size: 8\nbf16: {enabled: true}\nwandb: x\n")
    assert refusal(*DS, "--config", str(file)).replace(f"{file}:", "").splitlines() == [
        "1: unknown key lr: did you mean train.learning_rate?",
        "3: unknown key train.seeed: did you mean train.seed?",
        "4: unknown key train.batch_size: did you mean train.micro_batch_size (pairs per forward and rank) or "
        "train.global_batch_size (per step, all ranks)?",
        "5: unknown key bf16: did you mean --ds.bf16.enabled true?",
        "6: wandb is a section: give its keys below it, such as wandb.mode",
    ]


def test_the_two_files_in_each_others_place_are_told() -> None:
    line = refusal(*DS, "--config", DS[1])
    assert line == f"--config {DS[1]}: these are the keys of a DeepSpeed JSON, which goes to --ds_config {DS[1]}"
    with pytest.raises(ConfigError, match=r"is a JSON object; a run config goes to --config examples/my_run\.yaml"):
        load_ds_json("examples/my_run.yaml")


def test_missing_ds_config_says_what_to_give() -> None:
    assert "--ds_config FILE" in refusal("--train.max_steps", "3")


def test_null_takes_a_file_value_back(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {preset: htsat-fused}\ntrain:\n  epochs: 3\n")
    assert "train.epochs 3" in refusal(*DS, "--config", str(file), "--train.max_steps", "5")
    command = parse("--config", str(file), "--train.max_steps", "5", "--train.epochs", "null")
    assert (command.run.train.max_steps, command.run.train.epochs) == (5, None)
    swapped = parse("--config", str(file), "--model.preset", "null", "--model.pretrained", "org/some-clap/")
    assert swapped.run.run_dir == "runs/some-clap-zero2"


def test_precedence_default_preset_file_flag(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train: {learning_rate: 3e-4, weight_decay: 0.2}\ndata: {train: one.tar}\nwandb:\n")
    run = parse("--config", str(file), "--train.weight_decay", "0.3").run
    assert run.train.learning_rate == 3e-4, "file over preset"
    assert run.train.weight_decay == 0.3, "flag over file"
    assert run.train.warmup_steps == 20, "preset over default"
    assert run.train.seed == 0, "default"
    assert run.data.train == ("one.tar",)


def test_json_config_with_tabs(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text('{\n\t"train": {\n\t\t"max_steps": 4},\n\t"data": {"train": ["a/\\u00e4", "b"]}\n}')
    command = parse("--config", str(file))
    assert command.run.train.max_steps == 4
    assert command.run.data.train == ("a/ä", "b")
    assert command.explicit == {"ds_config", "train.max_steps", "data.train"}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("train:\n  max_step: 3\n", [":2:", "train.max_step", "did you mean train.max_steps?"]),
        ("max_steps: 3\n", [":1:", "did you mean train.max_steps?"]),
        ("train:\n  seed: 1\n  seed: 2\n", [":3:", "already given on line 2"]),
        ("train:\n  seed: [1\nx: 2\n", [":3:", "not readable"]),
        ("train: 3\n", [":1:", "is a section"]),
        ("- a\n", [":1", "mapping"]),
        ("\n\ntrain:\n  max_steps: -1\n", [":4:", "train.max_steps", "-1"]),
        ("wandb:\n  name: 1e3\n", [":2:", "text is needed"]),
    ],
)
def test_wrong_files_name_file_and_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    message = refusal(*DS, "--config", str(file))
    assert all(part in message for part in [str(file), *parts]), message


def test_missing_file_is_a_line() -> None:
    assert "--config /no/such.yaml" in refusal(*DS, "--config", "/no/such.yaml")


def test_dump_starts_the_same_run_again(tmp_path: Path) -> None:
    run = parse(
        "--wandb.name", "1e-4", "--wandb.entity", "on", "--data.train", "ä b", "--force", "--resume", "never"
    ).run
    text = dump_run_config(run)
    assert "force" not in text
    assert "resume" not in text
    file = tmp_path / "config.yaml"
    file.write_text(text)
    again = run_config_from_file(str(file))
    assert again == run.model_copy(update={"force": False, "resume": "auto"})
    assert yaml.safe_load(text)["wandb"] == {"mode": "auto", "project": "clap_zero", "name": "1e-4", "entity": "on"}
    assert diff_configs(yaml.safe_load(text), run.model_dump(mode="json")) == []


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists))
@example("\x85")
@example("a\u2028 b\u2029")
def test_yaml_round_trip(value: object) -> None:
    assert parse_yaml(to_yaml({"x": value})) == {"x": value}


def test_diff_names_both_sides() -> None:
    old = {"train": {"seed": 0, "epochs": 1}, "data": {"train": ["a"]}, "force": True}
    new = {"train": {"seed": 1, "epochs": 1}, "data": {"train": ["a"], "val": []}, "force": False}
    assert diff_configs(old, new) == ["data.val: absent -> []", "train.seed: 0 -> 1"]
    assert diff_configs(old, new, ignore=("train", "force")) == ["data.val: absent -> []"]


def test_run_config_is_frozen_and_closed() -> None:
    run = RunConfig(model={"preset": "tiny"}, train={"max_steps": 1}, ds_config="x")
    with pytest.raises(ValueError, match="frozen"):
        run.train.seed = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="Extra inputs"):
        RunConfig(model={"preset": "tiny"}, train={"max_steps": 1, "step": 1}, ds_config="x")


def test_help_lists_every_key_with_unit_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_command_line(["--train.max_stepz", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text == help_text()
    for key, info in FIELDS.items():
        entry = " ".join(text.partition(f"  --{key} ")[2].partition("\n  --")[0].split())
        assert str(info.description) in entry, key
        unit = info.json_schema_extra["unit"]
        assert f"; {'' if unit == '-' else f'unit {unit}, '}{'default ' if key != 'ds_config' else 'required'}" in entry
    assert max(map(len, text.splitlines())) <= 120


def test_config_is_light_to_import() -> None:
    code = (
        "import sys, clap_zero.config.load, clap_zero.config.deepspeed; "
        "print({'torch', 'deepspeed', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
