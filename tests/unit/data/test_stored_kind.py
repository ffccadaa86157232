from __future__ import annotations

import json

import pytest

from clap_zero.data.index import load_index
from clap_zero.data.stored_kind import check_stored_kind
from clap_zero.errors import ConfigError
from tests.unit.data.shard_files import write_split


@pytest.mark.parametrize(("kind", "other"), [("fusion", "rand_trunc"), ("rand_trunc", "fusion")])
def test_log_mels_for_another_kind_of_model_are_refused_by_their_index(tmp_path, kind, other):
    splits = [write_split(tmp_path / name, [2]) for name in ("a", "b")]
    (splits[1] / "index.json").write_text(json.dumps({"store": "logmel", "truncation": kind}))
    index = load_index(list(map(str, splits)))
    check_stored_kind(index, truncation=kind)
    with pytest.raises(ConfigError, match=f"/b/? holds log-mels for {kind} models, the model here takes {other}"):
        check_stored_kind(index, truncation=other)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"store": "flac", "truncation": null}', '{"truncation": "fusion"}'])
def test_an_index_that_says_nothing_about_log_mels_passes(tmp_path, text):
    split = write_split(tmp_path / "a", [2])
    (split / "index.json").write_text(text)
    check_stored_kind(load_index([str(split)]), truncation="rand_trunc")
