"""Every flag of every command, one by one: it can be typed, and it changes what the command does.

The tables hold one value for each flag that is not its default. A flag that is added without one fails here, and so
does a flag that is read by nobody.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from clap_zero import cli
from clap_zero.config.flags import FIELDS
from clap_zero.config.load import dump_run_config, parse_command_line, run_config_from_file
from clap_zero.planning.check_config import OWN_FLAGS, read_place
from clap_zero.preflight import doctor

ROOT = Path(__file__).resolve().parents[2]
BASE = ["--ds_config", "ds_configs/zero2.json", "--model.preset", "htsat-unfused"]

RUN_KEYS: dict[str, tuple[str, Any]] = {
    "model.preset": ("tiny-fused", "tiny-fused"),
    "model.pretrained": ("some/clap", "some/clap"),
    "model.batch_norm": ("frozen", "frozen"),
    "model.dropout": ("0.2", 0.2),
    "data.train": ("shards/train", ("shards/train",)),
    "data.val": ("shards/{0..3}.tar", ("shards/{0..3}.tar",)),
    "data.workers": ("3", 3),
    "data.log_keys": ("keys", "keys"),
    "data.truncation": ("fusion", "fusion"),
    "data.max_caption_tokens": ("64", 64),
    "data.max_seconds": ("30", 30.0),
    "data.shuffle_shards": ("64", 64),
    "data.caption_key": ("title", "title"),
    "data.max_bad_fraction": ("0.5", 0.5),
    "data.blacklist": ("ids.txt", ("ids.txt",)),
    "data.missing_shards": ("skip", "skip"),
    "data.cache_dir": ("/cache", "/cache"),
    "data.cache_bytes": ("5e9", 5_000_000_000),
    "data.remote_timeout_s": ("7.5", 7.5),
    "data.remote_retries": ("0", 0),
    "data.allow_pipe": ("true", True),
    "objective.negatives": ("micro", "micro"),
    "objective.loss": ("sigmoid", "sigmoid"),
    "objective.positives": ("mask", "mask"),
    "objective.label_smoothing": ("0.1", 0.1),
    "objective.hard_negative_beta": ("0.5 --objective.positives off", 0.5),
    "objective.mlp": ("off", "off"),
    "train.max_steps": ("7", 7),
    "train.epochs": ("2.5", 2.5),
    "train.global_batch_size": ("96", 96),
    "train.micro_batch_size": ("12", 12),
    "train.learning_rate": ("3e-4", 3e-4),
    "train.weight_decay": ("0.1", 0.1),
    "train.warmup_steps": ("17", 17),
    "train.min_learning_rate": ("1e-6", 1e-6),
    "train.schedule": ("constant", "constant"),
    "train.seed": ("3", 3),
    "evaluate.every_steps": ("100", 100),
    "evaluate.batch_size": ("4", 4),
    "checkpoint.every_steps": ("11", 11),
    "checkpoint.keep": ("5", 5),
    "log.every_steps": ("10", 10),
    "wandb.mode": ("offline", "offline"),
    "wandb.project": ("sounds", "sounds"),
    "wandb.name": ("first", "first"),
    "wandb.entity": ("team", "team"),
    "distributed.timeout_s": ("900", 900.0),
    "distributed.start_timeout_s": ("60", 60.0),
    "distributed.heartbeat_timeout_s": ("null", None),
    "distributed.hang_timeout_s": ("1200", 1200.0),
    "run_dir": ("runs/mine", "runs/mine"),
    "ds_config": ("other.json", "other.json"),
    "resume": ("never", "never"),
    "force": ("true", True),
}
START_KEYS = {"resume", "force"}
"""Say how one start behaves; they are not part of a run's config.yaml."""


def value_of(run: Any, key: str) -> Any:
    for part in key.split("."):
        run = getattr(run, part)
    return run


def base_without(key: str) -> list[str]:
    return [
        word
        for flag, value in zip(BASE[::2], BASE[1::2], strict=True)
        if flag != f"--{key}" and not (key == "model.pretrained" and flag == "--model.preset")
        for word in (flag, value)
    ]


@pytest.mark.parametrize("key", list(FIELDS))
def test_every_key_of_the_run_config(key: str, tmp_path: Path) -> None:
    text, expected = RUN_KEYS[key]
    base = base_without(key)
    run = parse_command_line([*base, f"--{key}", *text.split()], has_gpu=True).run
    assert value_of(run, key) == expected
    if key not in ("ds_config", "model.pretrained"):
        assert value_of(parse_command_line(base, has_gpu=True).run, key) != expected, "the default shows nothing"
    (tmp_path / "config.yaml").write_text(dump_run_config(run))
    again = value_of(run_config_from_file(str(tmp_path / "config.yaml")), key)
    assert again == (FIELDS[key].default if key in START_KEYS else expected)


def attributes_read() -> set[str]:
    """Names of all attributes that the package reads outside of config/, where keys only meet each other."""
    paths = [path for path in (ROOT / "clap_zero").rglob("*.py") if path.parent.name != "config"]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


def test_every_key_of_the_run_config_is_read_by_something() -> None:
    through_json = {"global_batch_size", "micro_batch_size", "max_steps", "epochs", "ds_config"}
    leaves = {key.rpartition(".")[2] for key in FIELDS}
    assert not leaves - attributes_read() - through_json


class Captured(Exception):
    """What a command's function would have been called with."""


def capture(*args: Any, **kwargs: Any) -> None:
    raise Captured(repr((args, sorted(kwargs.items(), key=str))))


COMMANDS: dict[str, tuple[list[str], list[str], dict[str, list[str]]]] = {
    "pack": (
        ["clap_zero.data.pack_cli.pack", "clap_zero.data.pack_cli.join"],
        ["--manifest", "m.csv", "--out", "out"],
        {
            "--manifest": ["n.csv"],
            "--folder": ["f"],
            "--dataset": ["d"],
            "--join": [],
            "--out": ["other"],
            "--audio-column": ["a"],
            "--caption-column": ["c"],
            "--caption-template": ["A {c}."],
            "--split-column": ["s"],
            "--split-map": ["5=test"],
            "--split": ["test"],
            "--caption-key": ["k"],
            "--audio-root": ["r"],
            "--dataset-config": ["first"],
            "--store": ["logmel"],
            "--truncation": ["rand_trunc"],
            "--part": ["3/64"],
            "--shard-size": ["8"],
            "--workers": ["7"],
            "--max-seconds": ["5"],
            "--drop-silent": [],
            "--overwrite": [],
            "--no-progress": [],
        },
    ),
    "check": (
        ["clap_zero.data.check.check"],
        ["shards"],
        {
            "--workers": ["7"],
            "--json": ["f.json"],
            "--rewrite-index": [],
            "--index-out": ["i"],
            "--no-index": [],
            "--no-progress": [],
            "--caption-key": ["k"],
            "--tags": ["missing"],
            "--truncation": ["fusion"],
            "--max-seconds": ["5"],
            "--max-caption-tokens": ["9"],
            "--max-bad-fraction": ["0.5"],
            "--blacklist": ["b"],
            "--cache-dir": ["c"],
            "--cache-bytes": ["5"],
            "--timeout-s": ["5"],
            "--retries": ["9"],
            "--missing-shards": ["skip"],
            "--allow-pipe": [],
        },
    ),
    "bench loader": (
        ["clap_zero.data.bench.bench_loader"],
        ["shards"],
        {
            "--seconds": ["3"],
            "--workers": ["7"],
            "--micro-batch": ["3"],
            "--features": [],
            "--truncation": ["fusion"],
            "--seed": ["3"],
            "--caption-key": ["k"],
            "--max-seconds": ["5"],
            "--shuffle-shards": ["3"],
            "--cache-dir": ["c"],
            "--cache-bytes": ["5"],
            "--timeout-s": ["5"],
            "--retries": ["9"],
            "--missing-shards": ["skip"],
            "--allow-pipe": [],
        },
    ),
    "bench objective": (
        ["clap_zero.objective.bench._one_size"],
        ["--sizes", "8"],
        {"--sizes": ["16"], "--width": ["32"], "--rounds": ["2"], "--threads": ["7"]},
    ),
    "eval": (
        ["clap_zero.evaluation.from_run.eval_run"],
        ["run"],
        {"--step": ["best"], "--val": ["shards"], "--batch-size": ["3"]},
    ),
    "export": (["clap_zero.checkpoint.export.export_run"], ["run", "out"], {"--step": ["7"], "--overwrite": []}),
}
ELSEWHERE = {
    ("bench loader", "--json"): "tests/unit/data/test_bench.py",
    ("bench objective", "--json"): "tests/unit/objective/test_bench.py",
    ("bench objective", "--rank-of"): "tests/unit/objective/test_bench.py",
    ("bench objective", "--rank-pairs"): "tests/unit/objective/test_bench.py",
}
"""Flags that act after the function: command and flag -> the test that types them."""


def called_with(command: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[str, set[str]]:
    """What the command's function gets, and all flags that the command has."""
    flags: set[str] = set()
    read = cli._Parser.read

    def read_and_note(parser: cli._Parser, argv: list[str]) -> Any:
        flags.update(name for action in parser._actions for name in action.option_strings if name.startswith("--"))
        return read(parser, argv)

    with monkeypatch.context() as patch:
        patch.setattr(cli._Parser, "read", read_and_note)
        for target in COMMANDS[command][0]:
            patch.setattr(target, capture)
        with pytest.raises(Captured) as caught:
            cli.main([*command.split(), *words])
    return str(caught.value), flags - {"--help"}


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_flag_of_a_command_reaches_its_function(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, base, values = COMMANDS[command]
    plain, flags = called_with(command, base, monkeypatch)
    for name in sorted(flags):
        if (command, name) in ELSEWHERE:
            assert f'"{name}"' in (ROOT / ELSEWHERE[command, name]).read_text()
            continue
        own = values[name]
        words = base if name not in ("--folder", "--dataset", "--join") else base[2:]  # one source only
        changed, _ = called_with(command, [*words, name, *own], monkeypatch)
        assert changed != plain, f"{command} {name} changes nothing"


def test_every_own_flag_of_check_config_and_doctor(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    values = {"world_size": "8", "num_samples": "100", "memory_gb": "80", "device": "cuda"}
    assert values.keys() == OWN_FLAGS.keys()
    for name, value in values.items():
        plain, changed = (read_place(words, device_here=lambda: "cpu") for words in ([], [f"--{name}", value]))
        assert changed != plain and changed[1] == [], name
    values = {
        "hostfile": str(tmp_path / "hosts"),
        "ranks": "3",
        "ssh": "ssh -v",
        "master_addr": "a",
        "master_port": "7",
    }
    assert values.keys() == doctor._OWN.keys()
    for name, value in values.items():
        assert doctor._read([f"--{name}", value]) != doctor._read([]), name
