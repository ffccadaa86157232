"""Data sets and the keys of reading: as flags, in files, dumped again; and what is said about bad values."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from clap_zero.config.data import DataSection, DataSetSection
from clap_zero.config.flags import FIELDS, help_text
from clap_zero.config.load import CommandLine, diff_configs, dump_run_config, parse_command_line, run_config_from_file
from clap_zero.config.schema import accepts, iter_keys
from clap_zero.errors import ConfigError

EXAMPLE = Path(__file__).parents[3] / "examples" / "mixture.yaml"
DS = ["--ds_config", "ds_configs/zero2.json"]


def parse(*argv: str) -> CommandLine:
    return parse_command_line([*DS, *argv])


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*argv)
    return str(caught.value)


def test_a_set_on_the_command_line_beside_patterns() -> None:
    train = parse(
        *("--data.train", "{shards: s3://b/audiocaps/train, weight: 2, name: audiocaps}"),
        *("--data.train", "clotho/{0..9}.tar", "--data.train", "{a,b}"),
        *("--data.train", "[c, {shards: [d, 'e-{0..9}.tar'], tags: missing}]"),
        *("--data.train", '{"shards": "f"}'),
    ).run.data.train
    assert train == (
        DataSetSection(shards=("s3://b/audiocaps/train",), weight=2, name="audiocaps"),
        "clotho/{0..9}.tar",
        "{a,b}",
        "c",
        DataSetSection(shards=("d", "e-{0..9}.tar"), tags="missing"),
        DataSetSection(shards=("f",)),
    )


@pytest.mark.parametrize(
    "text",
    [
        "data:\n  train: {shards: a, weight: 2}\n",
        "data:\n  train:\n    shards: [a]\n    weight: 2\n",
        "data:\n  train:\n    - shards: a\n      weight: 2\n",
    ],
)
def test_one_set_in_a_file_needs_no_list(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    command = parse("--config", str(file))
    assert command.run.data.train == (DataSetSection(shards=("a",), weight=2),)
    assert "data.train" in command.explicit


def test_defaults() -> None:
    one, data = DataSetSection(shards=("a",)), DataSection()
    assert (one.name, one.weight, one.caption_key, one.caption_templates) == (None, 1, None, ())
    assert (one.tags, one.tag_key, one.tag_template) == ("never", "tag", "The sound of {tags}")
    assert (data.blacklist, data.cache_dir, data.cache_bytes) == ((), None, 100_000_000_000)
    assert (data.remote_timeout_s, data.remote_retries, data.allow_pipe, data.missing_shards) == (60, 4, False, "stop")


def test_values_of_reading() -> None:
    data = parse(
        *(
            "--data.blacklist",
            "a.txt",
            "--data.blacklist",
            "b.txt",
            "--data.cache_dir",
            "/c",
            "--data.cache_bytes",
            "5",
        ),
        *("--data.remote_timeout_s", "1.5", "--data.remote-retries", "0", "--data.allow_pipe", "true"),
        *("--data.missing_shards", "skip"),
    ).run.data
    assert (data.blacklist, data.cache_dir, data.cache_bytes) == (("a.txt", "b.txt"), "/c", 5)
    assert (data.remote_timeout_s, data.remote_retries, data.allow_pipe, data.missing_shards) == (1.5, 0, True, "skip")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--data.train", "{shards: x, weight: 0}"], ["data.train[0].weight 0", "greater than 0"]),
        (["--data.train", "{shards: x, weight: -1}"], ["data.train[0].weight -1", "greater than 0"]),
        (["--data.train", "{shards: x, weight: 1e9}"], ["weight", "less than or equal to 1000"]),
        (["--data.train", "{shards: x, weight: .inf}"], ["weight", "finite"]),
        (["--data.train", "{shards: x, weight: much}"], ['weight "much"', "finite number"]),
        (["--data.train", "{shards: x, weight: true}"], ["data.train[0].weight true is refused: a number is needed"]),
        (
            ["--data.train", "a", "--data.train", "{shards: x, wieght: 2}"],
            ["data.train[1].wieght", "did you mean weight?"],
        ),
        (["--data.train", "{weight: 2}"], ["data.train[0].shards", "place of the set's shards"]),
        (["--data.train", "{shards: []}"], ["data.train[0].shards []", "at least 1"]),
        (["--data.train", "{shards: [a, '']}"], ['data.train[0].shards[1] ""', "empty"]),
        (["--data.train", "{shards: x, name: 5}"], ["data.train[0].name 5", "text is needed"]),
        (["--data.train", "{shards: x, name: ''}"], ["name", "empty"]),
        (["--data.train", "{shards: x, tags: sometimes}"], ['"sometimes"', "'never', 'missing' or 'always'"]),
        (["--data.train", "{shards: x, caption_templates: foo}"], ["'foo'", "{caption}"]),
        (["--data.train", "{shards: x, tag_template: foo}"], ["'foo'", "{tags}"]),
        (["--data.train", "{shards: x, tag_key: ''}"], ["tag_key", "empty"]),
        (["--data.train", "{shards: x, caption_key: ''}"], ["caption_key", "empty"]),
        (["--data.train", "{shards: x-{0..9}.tar, weight: 2}"], ["--data.train", "quotes", '"s3://b/{000..127}.tar"']),
        (["--data.train", "[3]"], ["data.train[0] 3", "text is needed"]),
        (["--data.train", "{shards: x, name: n}", "--data.train", "{shards: y, name: n}"], ["name n", "rename one"]),
        (["--data.val", "{shards: x, weight: 2}"], ["data.val", "every held-out pair once", "remove weight"]),
        (["--data.cache_bytes", "0"], ["--data.cache_bytes", "greater than 0"]),
        (["--data.cache_bytes", "100GB"], ["--data.cache_bytes", "whole number"]),
        (["--data.cache_dir", ""], ["--data.cache_dir", "empty"]),
        (["--data.remote_timeout_s", "0"], ["--data.remote_timeout_s", "greater than 0"]),
        (["--data.remote_retries", "-1"], ["--data.remote_retries", "greater than or equal to 0"]),
        (["--data.allow_pipe", "perhaps"], ["--data.allow_pipe", "valid boolean"]),
        (["--data.missing_shards", "ignore"], ["--data.missing_shards", "'stop' or 'skip'"]),
        (["--data.blacklist", ""], ["data.blacklist", "empty"]),
    ],
)
def test_bad_values_name_place_value_and_way_out(argv: list[str], parts: list[str]) -> None:
    message = refusal(*argv)
    assert all(part in message for part in parts), message
    assert "\n" not in message, "one thing is wrong, so one line"
    assert "pydantic" not in message


def test_a_bad_value_in_a_file_is_named_with_its_own_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "data:\n  train:\n    - a\n    - shards: b\n      weight: -1\n    - {shards: c,\n       wight: 2}\n"
    )
    lines = refusal("--config", str(file)).splitlines()
    assert lines[0].startswith(f"{file}:5: data.train[1].weight -1")
    assert lines[1].startswith(f"{file}:7: data.train[2].wight 2")
    file.write_text("data:\n  train:\n    shards: b\n    weight: -1\n")
    assert refusal("--config", str(file)).startswith(f"{file}:4: data.train[0].weight -1")
    # A flag takes the place of the whole list: then it is named, and no line of the file.
    assert refusal("--config", str(file), "--data.train", "{shards: b, weight: 0}").startswith("--data.train: ")


def test_a_key_given_twice_within_a_set_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data:\n  train:\n    - shards: b\n      weight: 2\n      weight: 3\n")
    assert f"{file}:5: data.train[0].weight was already given on line 4" in refusal("--config", str(file))


def test_a_dump_starts_the_same_run_again(tmp_path: Path) -> None:
    run = parse("--config", str(EXAMPLE), "--data.cache_dir", "c", "--data.missing_shards", "skip").run
    file = tmp_path / "config.yaml"
    file.write_text(dump_run_config(run))
    assert run_config_from_file(str(file)) == run


def test_a_changed_weight_is_a_difference() -> None:
    old, new = (parse("--data.train", f"{{shards: a, weight: {weight}}}").run for weight in (1, 2))
    lines = diff_configs(old.model_dump(mode="json"), new.model_dump(mode="json"))
    assert len(lines) == 1 and lines[0].startswith("data.train: ")
    assert "weight: 1.0" in lines[0] and "weight: 2.0" in lines[0]


def test_help_lists_the_keys_of_a_set() -> None:
    text = help_text().partition("A data set of data.train or data.val")[2]
    for name, info in DataSetSection.model_fields.items():
        entry = text.partition(f"      {name}: ")[2].partition("\n      ")[2]
        assert entry.strip().startswith(str(info.description)), name
    assert not any(key.startswith("data.train.") for key in FIELDS), "a set has no flags of its own"
    assert accepts(FIELDS["data.train"], tuple)
    assert [name for name, _ in iter_keys(DataSetSection)] == list(DataSetSection.model_fields)


def test_the_example_of_a_mixture_loads() -> None:
    data = parse("--config", str(EXAMPLE)).run.data
    sets = {one.name: one for one in data.train if isinstance(one, DataSetSection)}
    assert set(sets) == {"audiocaps", "clotho", "freesound", "audioset", "effects", "urbansound"}
    assert len(sets) == len(data.train)
    assert sets["audioset"].weight == 0.5 and sets["audioset"].tags == "always"
    assert all("{caption}" in template for template in sets["effects"].caption_templates)
    assert len(data.blacklist) == 2 and len(data.val) == 2
    assert math.isclose(sum(one.weight for one in sets.values()), 11.5)


@pytest.mark.parametrize(
    "value",
    [
        "{shards: 'https://h/t?sig=SECRET', caption_templates: [none]}",
        "{shards: [s3://SECRET@b/t], tags: {a: pipe:SECRET}}",
        "{shards: 'https://h/{0..9}.tar?sig=SECRET', weight",
        "{shards: https://h/{0..9}.tar?sig=SECRET, weight: {2}",
    ],
)
def test_refused_values_with_urls_are_not_printed(value: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_command_line(["--ds_config", "zero2.json", "--data.train", value])
    assert "SECRET" not in str(error.value)
