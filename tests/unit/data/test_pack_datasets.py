"""Hugging Face datasets, all local: nothing here may need the hub."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from clap_zero.data.pack import PackOptions, pack
from clap_zero.data.pack_cli import add_pack_arguments, options_from_args, pack_from_args
from clap_zero.data.pack_join import join
from clap_zero.data.pack_keys import Part
from clap_zero.data.pack_sources import Columns
from clap_zero.errors import DataError
from tests.unit.data.packing import read_split
from tests.unit.data.shard_files import audio_bytes

TEMPLATE = Columns(templates=("This is a sound of {category}.",))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def write_clips(directory: Path, number: int = 4) -> list[str]:
    directory.mkdir(parents=True, exist_ok=True)
    names = [f"{fold}-{n}-A-{n}.wav" for n, fold in zip(range(number), [1, 1, 5, 5], strict=True)]
    for n, name in enumerate(names):
        (directory / name).write_bytes(audio_bytes(n, kind="WAV", rate_hz=44_100))
    return names


def texts(split: Path) -> list[list[str]]:
    return [record["text"] for _, _, record in read_split(split)]


def test_directory_of_esc50s_layout(tmp_path):
    names = write_clips(tmp_path / "ESC-50" / "audio")
    meta = tmp_path / "ESC-50" / "meta" / "esc50.csv"
    meta.parent.mkdir()
    kinds = ["dog", "crying_baby", "dog", "rain"]
    rows = [f"{name},{name[0]},{n},{kind},False,1,A" for n, (name, kind) in enumerate(zip(names, kinds, strict=True))]
    meta.write_text("filename,fold,target,category,esc10,src_file,take\n" + "\n".join(rows) + "\n")
    columns = Columns(templates=TEMPLATE.templates, split="fold", split_map={"5": "test", "*": "train"})
    report = pack(PackOptions(out=tmp_path / "out", dataset=str(tmp_path / "ESC-50"), columns=columns, progress=False))
    assert report.num_pairs == 4 and report.num_rejected == 0
    assert texts(tmp_path / "out" / "train") == [["This is a sound of dog."], ["This is a sound of crying baby."]]
    assert texts(tmp_path / "out" / "test") == [["This is a sound of dog."], ["This is a sound of rain."]]


# datasets leaves the file open that it reads the metadata from.
@pytest.mark.filterwarnings("ignore:.*metadata.csv:pytest.PytestUnraisableExceptionWarning")
def test_audiofolder_with_metadata(tmp_path):
    names = write_clips(tmp_path / "in" / "train")
    lines = "".join(f"{name},caption {n},dog\n" for n, name in enumerate(names))
    (tmp_path / "in" / "train" / "metadata.csv").write_text("file_name,caption,category\n" + lines)
    report = pack(PackOptions(out=tmp_path / "out", dataset=str(tmp_path / "in"), progress=False))
    assert report.num_pairs == 4
    assert texts(tmp_path / "out" / "train") == [[f"caption {n}"] for n in range(4)]
    _, _, record = read_split(tmp_path / "out" / "train")[0]
    assert record["original_data"] == {"category": "dog", "name": names[0]}


def test_saved_to_disk_with_labels_and_splits(tmp_path):
    import datasets

    names = write_clips(tmp_path / "in")
    features = datasets.Features(
        {"sound": datasets.Audio(), "category": datasets.ClassLabel(names=["dog", "crying_baby"])}
    )

    def split(which: list[str]) -> datasets.Dataset:
        sounds = [{"bytes": (tmp_path / "in" / name).read_bytes(), "path": name} for name in which]
        return datasets.Dataset.from_dict({"sound": sounds, "category": [1, 0]}, features=features)

    saved = datasets.DatasetDict(train=split(names[:2]), validation=split(names[2:]))
    saved.save_to_disk(str(tmp_path / "saved"))
    columns = Columns(templates=TEMPLATE.templates, split_map={"validation": "test"})
    options = PackOptions(out=tmp_path / "out", dataset=str(tmp_path / "saved"), columns=columns, progress=False)
    assert pack(options).num_pairs == 4
    assert texts(tmp_path / "out" / "train") == [["This is a sound of crying baby."], ["This is a sound of dog."]]
    assert len(texts(tmp_path / "out" / "test")) == 2
    saved["train"].save_to_disk(str(tmp_path / "one"))
    one = PackOptions(out=tmp_path / "out1", dataset=str(tmp_path / "one"), columns=TEMPLATE, progress=False, workers=2)
    assert {name: split.num_pairs for name, split in pack(one).splits.items()} == {"train": 2}


def test_columns_are_found_in_each_split(tmp_path):
    import datasets

    names = write_clips(tmp_path / "in")
    sound = {"bytes": (tmp_path / "in" / names[0]).read_bytes(), "path": names[0]}
    one = datasets.Dataset.from_dict({"audio": [sound], "caption": ["a dog"]}).cast_column("audio", datasets.Audio())
    two = datasets.Dataset.from_dict({"sound": [sound], "caption": ["rain"]}).cast_column("sound", datasets.Audio())
    for name, split in (("train", one), ("test", two)):
        split.save_to_disk(str(tmp_path / "saved" / name))
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    options = PackOptions(out=tmp_path / "out", dataset=str(tmp_path / "saved"), progress=False)
    assert pack(options).num_pairs == 2
    assert texts(tmp_path / "out" / "train") == [["a dog"]] and texts(tmp_path / "out" / "test") == [["rain"]]


@pytest.mark.parametrize("kind", ["bytes", "paths"])
def test_parts_of_a_dataset_are_the_whole(tmp_path, kind):
    """Rows picked from a table, two splits in a column of classes, equal names, rows without audio, NaN beside them."""
    import datasets

    names = write_clips(tmp_path / "in")
    sounds: list[object] = [str(tmp_path / "in" / name) for name in names] * 3
    sounds[5] = None
    features = {"fold": datasets.ClassLabel(names=["train", "held"]), "caption": datasets.Value("string")}
    features["score"] = datasets.Value("float32")
    features["audio"] = datasets.Value("string")
    if kind == "bytes":
        features["audio"] = datasets.Audio()
        sounds = [{"bytes": Path(s).read_bytes(), "path": f"x/{Path(s).name[:3]}.wav"} if s else None for s in sounds]
    columns = {"fold": [n % 3 // 2 for n in range(12)], "caption": [f"c{n}" for n in range(12)], "audio": sounds}
    columns["score"] = [float("nan")] * 12
    table = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    table.select([11, *range(10)]).save_to_disk(str(tmp_path / "saved"))

    def options(out: str, **change) -> PackOptions:
        columns = Columns(split="fold", split_map={"held": "test"})
        return PackOptions(tmp_path / out, dataset=str(tmp_path / "saved"), columns=columns, progress=False, **change)

    whole = pack(options("whole"))
    assert whole.num_pairs == 10 and list(whole.reasons) == ["names no audio"]
    for number in (3, 1, 2):
        pack(options("joined", part=Part(number, 3)))
    assert join(tmp_path / "joined").numbers() == whole.numbers()
    for split in ("train", "test"):
        assert read_split(tmp_path / "joined" / split) == read_split(tmp_path / "whole" / split)
        assert all(record["original_data"]["score"] is None for _, _, record in read_split(tmp_path / "whole" / split))


def test_what_cannot_be_loaded_is_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="cannot be loaded") as caught:
        pack(PackOptions(out=tmp_path / "out", dataset=str(tmp_path / "empty"), progress=False))
    assert "\n" not in str(caught.value)


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_pack_arguments(parser)
    return parser.parse_args(arguments)


def test_command_line(tmp_path, capsys):
    write_clips(tmp_path / "in")
    (tmp_path / "in" / "m.jsonl").write_text(json.dumps({"file": "1-0-A-0.wav", "caption": "x"}))
    report = pack_from_args(
        parse("--manifest", str(tmp_path / "in" / "m.jsonl"), "--out", str(tmp_path / "out"), "--workers", "1")
    )
    assert report.num_pairs == 1
    printed = capsys.readouterr().out
    assert "train: 1 pairs" in printed and "3 files beside them are not listed" in printed


def test_command_line_options():
    options = options_from_args(
        parse(
            *("--folder", "x", "--out", "y", "--caption-column", "a", "--caption-column", "b", "--shard-size", "7"),
            *("--split-map", "a=b=train", "--split-map", "*=test", "--overwrite", "--audio-column", "s"),
        )
    )
    assert options.columns.captions == ("a", "b") and options.columns.audio == "s"
    assert options.columns.split_map == {"a=b": "train", "*": "test"}
    assert options.shard_size == 7 and options.overwrite and options.workers >= 1
