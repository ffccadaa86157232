"""Flags of other trainers are refused with what they are called here, in the one line of the refusal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clap_zero.config.ds_keys import all_paths
from clap_zero.config.flags import FIELDS, read_flags
from clap_zero.config.other_trainers import HINTS
from clap_zero.errors import ConfigError
from clap_zero.launching.options import MISPLACED


def refusal(flag: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_flags([flag, "3"])
    return str(caught.value)


@pytest.mark.parametrize(
    ("flags", "ours"),
    [
        ("--lr --learning-rate --learning_rate", "--train.learning_rate"),
        ("--batch-size --batch_size", "--train.global_batch_size"),
        ("--batch-size --per_device_train_batch_size", "--train.micro_batch_size"),
        ("--train-data --train_data", "--data.train"),
        ("--val-data", "--data.val"),
        ("--output_dir --output-dir --logs --name", "--run_dir"),
        ("--precision --amp --bf16", "--ds.bf16.enabled"),
        ("--precision --amp --fp16", "--ds.fp16.enabled"),
        ("--epochs --num_train_epochs", "--train.epochs"),
        ("--max_steps --max-train-steps", "--train.max_steps"),
        ("--seed", "--train.seed"),
        ("--workers --num_workers --dataloader_num_workers", "--data.workers"),
        ("--warmup --warmup_steps", "--train.warmup_steps"),
        ("--wd --weight_decay", "--train.weight_decay"),
        ("--gradient_accumulation_steps --accum-freq", "--ds.gradient_accumulation_steps"),
        ("--gradient_checkpointing --grad-checkpointing", "--ds.activation_checkpointing"),
        ("--grad-clip-norm --max_grad_norm", "--ds.gradient_clipping"),
        ("--local-loss --gather-with-grad", "--objective.negatives"),
        ("--pretrained --model --amodel", "--model.pretrained"),
        ("--model --amodel --tmodel", "--model.preset"),
        ("--save_steps --save-frequency", "--checkpoint.every_steps"),
        ("--eval_steps --val-frequency", "--evaluate.every_steps"),
        ("--resume_from_checkpoint", "--resume PATH"),
        ("--report_to", "--wandb.mode"),
        ("--deepspeed", "--ds_config"),
        ("--use_cpu --no_cuda", "CUDA_VISIBLE_DEVICES=-1"),
        ("--train.lr --LR", "--train.learning_rate"),
    ],
)
def test_a_foreign_flag_names_ours(flags: str, ours: str) -> None:
    for flag in flags.split():
        line = refusal(flag)
        assert line.startswith(f"unknown flag {flag}: ") and ours in line, line
        assert "\n" not in line


def test_no_hint_names_a_flag_that_is_not_there() -> None:
    ours = {*FIELDS, *(f"ds.{path}" for path in all_paths()), "num_gpus"}
    named = {flag for hint in HINTS.values() for flag in re.findall(r"--([\w.]*\w)", hint)}
    assert named <= ours, named - ours


def test_no_flag_of_ours_is_taken_for_a_foreign_one() -> None:
    """`--model` and the names of keys without their section are no flags."""
    assert not HINTS.keys() & {key for key in FIELDS if "." not in key}
    assert HINTS.keys() == {name.lower().replace("-", "_") for name in HINTS}


def test_options_of_the_launcher_are_known_as_such() -> None:
    """Those that a user types on one node; behind the module they would reach this parser."""
    for name in ("num_gpus", "hostfile", "include", "exclude", "master_port", "master_addr"):
        assert name in MISPLACED
        assert "the launcher takes it" in refusal(f"--{name}")


def test_the_table_of_the_documents_says_what_the_refusals_say() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "configuration.md").read_text("utf-8")
    rows = re.findall(
        r"^\| (`--[^|]*) \| (`--[^|]*) \|", page.partition("## Coming from another trainer")[2], re.MULTILINE
    )
    assert len(rows) >= 10
    for there, here in rows:
        theirs, ours = (re.findall(r"`(--[^`]+)`", cell) for cell in (there, here))
        for number, flag in enumerate(theirs):
            assert ours[min(number, len(ours) - 1)] in refusal(flag), flag
