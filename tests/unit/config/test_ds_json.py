"""The JSON is read as DeepSpeed reads it, and what DeepSpeed would ignore is refused with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clap_zero.config.ds_json import check_keys, key_lines, load_ds_json
from clap_zero.config.ds_keys import REMOVED, all_paths
from clap_zero.errors import ConfigError

HJSON = """\
{
  // comment, with "a": 1 in it
  "train_micro_batch_size_per_gpu": 4, # another
  zero_optimization: {"stage": 2, "reduce_bucket_size": 5e8,
     "offload_optimizer": {"device": "cpu",},},
  /* and "b": 2
  */
  bf16: {
    enabled: true
  }
  "data_types": {"grad_accum_dtype": fp32
  }
  'optimizer': { "type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999]} }
}
"""


NAMES = st.from_regex(r"[a-z]{1,3}", fullmatch=True)


def write(folder: Path, text: str) -> str:
    path = folder / "ds.json"
    path.write_text(text)
    return str(path)


def refusal(path: str, overrides: dict | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_ds_json(path, overrides)
    return str(caught.value)


def test_hjson_is_read_and_whole_numbers_are_cast(tmp_path: Path) -> None:
    ds = load_ds_json(write(tmp_path, HJSON))
    size = ds["zero_optimization"]["reduce_bucket_size"]
    assert (size, type(size)) == (500_000_000, int)
    assert ds["optimizer"]["params"]["lr"] == 1e-4
    assert ds["bf16"] == {"enabled": True}


def test_key_lines_of_hjson() -> None:
    lines = dict(key_lines(HJSON))
    assert lines["train_micro_batch_size_per_gpu"] == 3
    assert lines["zero_optimization.offload_optimizer.device"] == 5
    assert lines["bf16.enabled"] == 9
    assert lines["data_types.grad_accum_dtype"] == 11
    assert lines["optimizer.params.betas"] == 13
    assert not {"a", "b"} & set(lines)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z]{1,3}", fullmatch=True), inner)
        ),
        max_leaves=12,
    ).map(lambda value: {"k": value})
)
def test_key_lines_of_any_json(value: dict) -> None:
    def paths(node: object, prefix: str = "") -> list[str]:
        if not isinstance(node, dict):
            return []
        return [p for name, item in node.items() for p in (f"{prefix}{name}", *paths(item, f"{prefix}{name}."))]

    text = json.dumps(value, indent=1)
    found = [path for path, _ in key_lines(text)]
    assert [path for path in found if path in paths(value)] == paths(value)


def test_broken_json_has_line_and_column(tmp_path: Path) -> None:
    path = write(tmp_path, '{\n  "train_batch_size": 4,\n  "bf16": {"enabled": true ]\n}')
    assert refusal(path).startswith(f"{path}:3:")
    assert "cannot be read" in refusal(str(tmp_path / "none.json"))
    assert "in braces" in refusal(write(tmp_path, "[1]"))


LISTED = """{"tensor_parallel": {"layer_specs": [
  {"patterns": ["a", "b"]}, {"patterns": ["c"]},
  {"patterns": [], "shape": [[1, {"of": 2}]]}, 7,
  {"patterns": 1, "patterns": 2}
]}}"""


def test_objects_of_a_list_have_keys_of_their_own(tmp_path: Path) -> None:
    lines = [(path.removeprefix("tensor_parallel.layer_specs"), line) for path, line in key_lines(LISTED)]
    assert lines[2:] == [
        *[("[0].patterns", 2), ("[1].patterns", 2), ("[2].patterns", 3), ("[2].shape", 3), ("[2].shape[0][1].of", 3)],
        *[("[4].patterns", 4), ("[4].patterns", 4)],
    ]
    path = write(tmp_path, LISTED)
    assert refusal(path).startswith(f"{path}:4: tensor_parallel.layer_specs[4].patterns was already given on line 4")
    path = write(tmp_path, LISTED.replace(', "patterns": 2', ""))
    assert load_ds_json(path)["tensor_parallel"]["layer_specs"][1] == {"patterns": ["c"]}


@pytest.mark.parametrize(
    "text",
    [
        *('{"steps_per_print": Infinity}', '{\n"steps_per_print": Infinity,\n}', '{"a": -NaN}'),
        *('{\n"steps_per_print": inf,\n}', '{"steps_per_print": inf, "gradient_clipping": 1.0}'),
    ],
)
def test_numbers_that_json_has_not_are_named(tmp_path: Path, text: str) -> None:
    """As Python's json writes them, and accelerate with it."""
    message = refusal(write(tmp_path, text))
    assert "no number in JSON" in message or "JSON has no such number" in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"gradient_clipping": 1e999}', "a number in it is larger than any that fits"),
        (f'{{"train_batch_size": {"9" * 5000}}}', "a number in it is larger than any that fits"),
        (f'{{"train_batch_size": {"9" * 400}}}', "a whole number is needed, and no counter of 64 bits holds this one"),
        ('{"zero_optimization": {"reduce_bucket_size": 1e30}}', "1e+30, a whole number is needed, and no counter of"),
        ('{"bf16": {\n"enabled": True,\n}}', "true or false is needed: write true, in lower case and without quotes"),
        ('{"bf16":\n{"enabled":True}}', "ds.json:2: True is Python's word, in JSON it is true"),
        ('{"bf16": {"enabled": "yes"}}', "true or false is needed: write true"),
        ('{"autotuning": true}', "autotuning is true, a section in braces is needed"),
        ('{"hybrid_engine": "auto"}', 'hybrid_engine is "auto", a section in braces is needed'),
        ('{"data_types": {"keep_in_fp32_modules": [1]}}', "keep_in_fp32_modules is [1], a list of texts is needed"),
        ('{"train_batch_size": "Auto"}', 'a whole number is needed: write "auto", in lower case'),
    ],
)
def test_numbers_too_large_and_words_of_python_are_one_line(tmp_path: Path, text: str, part: str) -> None:
    assert part in refusal(write(tmp_path, text))


def test_another_stage_by_flag_leaves_out_what_acts_at_the_files_only(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[3] / "ds_configs" / "zero3_offload.json"
    lower = load_ds_json(str(shipped), {"zero_optimization.stage": 2})["zero_optimization"]
    assert "offload_param" not in lower and lower["offload_optimizer"]["device"] == "cpu"
    none = load_ds_json(str(shipped), {"zero_optimization.stage": 0})
    assert not {"offload_param", "offload_optimizer"} & set(none["zero_optimization"])
    assert "grad_accum_dtype" not in none.get("data_types", {})


def test_doubled_keys_have_both_lines(tmp_path: Path) -> None:
    path = write(tmp_path, '{"train_batch_size": 4,\n "fp16": {"enabled": true,\n  "enabled": false}}')
    assert refusal(path) == f"{path}:3: fp16.enabled was already given on line 2: keep one of them"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ('"gradient_clipp1ng": 1', "did you mean gradient_clipping?"),
        ('"zero_optimisation": {}', "did you mean zero_optimization?"),
        ('"stage": 2', "did you mean zero_optimization.stage?"),
        ('"lr": 2', "did you mean optimizer.params.lr?"),
        ('"zero_optimization": {"stge": 2}', "did you mean zero_optimization.stage?"),
        ('"zero_optimization": {"gradient_clipping": 2}', "did you mean gradient_clipping?"),
        (
            '"activation_checkpointing": {"partition_activation": true}',
            "activation_checkpointing.partition_activations?",
        ),
        ('"optimizer": {"type": "Adam", "params": {"weightdecay": 0}}', "optimizer.params.weight_decay?"),
        ('"optimizer": {"type": "SGD", "params": {"momentun": 0.9}}', "optimizer.params.momentum?"),
        ('"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 9}}', "unknown key scheduler.params"),
        ('"zero_optimization": {"offload_param": {"devise": "cpu"}}', "zero_optimization.offload_param.device?"),
        ('"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.9]}}', "optimizer.type has no such parameter"),
    ],
)
def test_unknown_keys_name_the_nearest_and_the_level(tmp_path: Path, text: str, hint: str) -> None:
    path = write(tmp_path, "{\n" + text + "\n}")
    message = refusal(path)
    assert message.startswith(f"{path}:2: "), message
    assert hint in message


@pytest.mark.parametrize("path", sorted(REMOVED))
def test_removed_keys_are_refused_with_the_way_out(path: str) -> None:
    ds: dict = {}
    node = ds
    *sections, leaf = path.split(".")
    for name in sections:
        node = node.setdefault(name, {})
    node[leaf] = {}
    with pytest.raises(ConfigError, match=r"is refused: .{10}"):
        check_keys(ds)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('"optimizer": {"params": {"lr": "1e-4"}}', 'optimizer.params.lr is "1e-4", a number is needed'),
        ('"zero_optimization": {"reduce_bucket_size": "5e8"}', 'reduce_bucket_size is "5e8", a whole number'),
        ('"zero_optimization": {"reduce_bucket_size": 3774873.6}', "reduce_bucket_size is 3774873.6, a whole number"),
        ('"zero_optimization": {"stage": "2"}', 'stage is "2", a whole number'),
        ('"bf16": {"enabled": "true"}', 'bf16.enabled is "true", true or false'),
        ('"bf16": {"enabled": 2}', "bf16.enabled is 2, true or false"),
        ('"train_batch_size": true', "train_batch_size is true, a whole number"),
        ('"optimizer": {"params": {"betas": 0.9}}', "betas is 0.9, a list"),
        ('"zero_optimization": 2', "zero_optimization is 2, a section in braces"),
        ('"bf16": "auto"', 'bf16 is "auto", a section in braces'),
    ],
)
def test_wrong_kinds_are_refused_with_path_and_value(tmp_path: Path, text: str, part: str) -> None:
    message = refusal(write(tmp_path, "{" + text + "}"))
    assert part in message, message


def test_all_faults_are_listed(tmp_path: Path) -> None:
    path = write(tmp_path, '{"stage": 2,\n "amp": {},\n "bf16": {"enabled": "x"}}')
    assert [line.partition(": ")[0] for line in refusal(path).splitlines()] == [f"{path}:{n}" for n in (1, 2, 3)]


def test_sections_for_monitors_pass_untouched() -> None:
    ds = {
        "wandb": {"enabled": False, "team": "t"},
        "flops_profiler": {"enabled": True, "profile_step": 5, "output_file": "flops.txt"},
        "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "clap"},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
    }
    assert check_keys(ds) == ds


def test_overrides_set_remove_and_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, HJSON)
    ds = load_ds_json(
        path,
        {
            "zero_optimization.stage": 3,
            "bf16": None,
            "optimizer.params.eps": 1e-4,
            "fp16.enabled": True,
            "autotuning.x.y": 1,
        },
    )
    assert ds["zero_optimization"]["stage"] == 3
    assert "bf16" not in ds
    assert ds["optimizer"]["params"]["eps"] == 1e-4
    assert ds["fp16"] == {"enabled": True}
    assert ds["autotuning"] == {"x": {"y": 1}}
    assert load_ds_json(path, {"scheduler": None, "fp16.loss_scale": None}) == load_ds_json(path)
    assert "--ds.stage: unknown key stage: did you mean" in refusal(path, {"stage": 3})
    assert "--ds.gradient_clippng" in refusal(path, {"gradient_clippng": None})
    assert "--ds.fp16.enabld" in refusal(path, {"fp16.enabld": None})
    assert "bf16.enabled is true, not a section" in refusal(path, {"bf16.enabled.x": 1})
    assert "no empty part" in refusal(path, {"bf16..enabled": 1})


def test_table_holds_what_deepspeed_reads() -> None:
    paths = set(all_paths())
    assert {"zero_optimization.stage3_max_live_parameters", "zero_optimization.max_live_parameters"} <= paths
    assert {"optimizer.params.torch_adam", "scheduler.params.warmup_num_steps", "bf16.check_grad_overflow"} <= paths


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_file_is_a_cut_copy_and_not_a_config(tmp_path: Path, text: str) -> None:
    path = tmp_path / "zero.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is empty"):
        load_ds_json(str(path))
    path.write_text("{}")
    assert load_ds_json(str(path)) == {}
