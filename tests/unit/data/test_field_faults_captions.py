"""Captions that broke other trainings (the ids are those of the list of field faults): from the shard to the batch."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from clap_zero.data.captions import caption_id
from clap_zero.data.index import load_index
from clap_zero.data.loader import eval_batches
from clap_zero.data.text import MAX_TOKENS, Tokenizer
from tests.unit.audio.sounds import encode
from tests.unit.data.reading import keys_of, plan, skipped_of, take
from tests.unit.data.shard_files import audio_bytes, pair, write_tar


def shard(directory: Path, texts: dict[str, tuple[str, bytes]]) -> Path:
    members = []
    for number, (key, (suffix, data)) in enumerate(texts.items()):
        members += [(f"{key}.flac", audio_bytes(number)), (f"{key}{suffix}", data)]
    write_tar(directory / "train" / "0.tar", members)
    return directory / "train"


@pytest.mark.parametrize("limit", [77, MAX_TOKENS])
def test_c01_captions_above_the_limit_of_the_text_model(tmp_path, caplog, limit):
    tokens = {length: b" ".join([b"dog"] * (length - 2)) for length in (510, 511, 512, 513, 5002)}
    tokenizer = Tokenizer()
    assert {len(tokenizer.encode(tokens[length].decode(), MAX_TOKENS)) for length in (512, 513)} == {512}
    assert len(tokenizer.encode(tokens[510].decode(), MAX_TOKENS)) == 510
    split = shard(tmp_path, {f"t{length}": (".txt", text) for length, text in tokens.items()})
    with caplog.at_level(logging.WARNING):
        batches = take(split, 5, max_caption_tokens=limit)
    expected = {f"t{length}": min(length, limit) for length in tokens}
    assert {keys_of([batch])[0]: batch.input_ids.shape[1] for batch in batches} == expected
    assert all(batch.input_ids[0, -1] == 2 for batch in batches)  # </s> stands at the end of cut ones, too
    assert sum(batch.num_truncated for batch in batches) == sum(length > limit for length in tokens)
    assert caplog.text.count("are cut") == 1
    index = load_index([str(split)])
    held_out = list(eval_batches(index, plan=plan(max_caption_tokens=limit)))
    assert {keys_of([batch])[0]: batch.input_ids.shape[1] for batch in held_out} == expected


def test_c03_captions_in_every_shape(tmp_path):
    texts = {
        "list": (".json", b'{"text": ["a", "b"]}'),
        "other": (".json", b'{"caption": "x"}'),
        "none": (".json", b'{"text": []}'),
        "null": (".json", b'{"text": null}'),
        "blank": (".json", b'{"text": "  "}'),
        "number": (".json", b'{"text": 5}'),
        "broken": (".json", b'{"text"'),
    }
    split = shard(tmp_path, texts)
    members = [m for n in range(20) for m in pair(f"good{n}", 50 + n)]
    write_tar(split / "1.tar", [*members, ("alone.flac", audio_bytes(99))])
    batches = take(split, 27)
    skipped = skipped_of(batches)
    reasons = {
        "other": "json has no 'text'", "none": "'text' is empty", "null": "'text' is null, not text",
        "blank": "'text' is empty", "number": "'text' is int, not text", "broken": "broken json",
    }  # fmt: skip
    assert {key: skipped[key] for key in reasons} == reasons
    assert set(skipped) == set(reasons)  # a clip without any text member is no pair: it is not in the count
    drawn = [b.caption_ids.item() for b in take(split, 27 * 12) if b.keys[0].endswith("::list") and not b.skipped]
    assert {caption_id("a"), caption_id("b")} == set(drawn)
    again = [b.caption_ids.item() for b in take(split, 27 * 12) if b.keys[0].endswith("::list") and not b.skipped]
    assert drawn == again


def test_c03_the_key_of_the_captions_can_be_chosen(tmp_path):
    split = shard(tmp_path, {f"k{n}": (".json", b'{"caption": "x"}') for n in range(4)})
    index = load_index([str(split)], caption_key="caption")
    assert {batch.caption_ids.item() for batch in take(index, 4)} == {caption_id("x")}


def test_c04_equal_captions_are_known_to_the_objective(tmp_path):
    """32 clips, 4 captions: the ids that the objective may take as groups; what it makes of them is its own matter."""
    captions = [f"caption {n % 4}" for n in range(32)]
    sounds = np.random.default_rng(0).uniform(-0.5, 0.5, (32, 480)).astype(np.float32)
    members = []
    for number, caption in enumerate(captions):
        text = json.dumps({"text": [caption]}).encode()
        members += [(f"s{number:02d}.flac", encode(sounds[number], "FLAC")), (f"s{number:02d}.json", text)]
    write_tar(tmp_path / "train" / "0.tar", members)
    (batch,) = take(tmp_path / "train", 1, micro_batch=32)
    assert sorted(Counter(batch.caption_ids.tolist()).values()) == [8, 8, 8, 8]
    for key, number in zip(keys_of([batch]), batch.caption_ids.tolist(), strict=True):
        assert number == caption_id(captions[int(key[1:])])


def test_c04_a_group_in_the_json_stands_for_the_caption(tmp_path):
    groups = ["dog", "dog", 7, "7", None, ["dog"], True, "\ud800"]
    files = {
        f"k{n}": (".json", json.dumps({"text": f"caption {n}", "group": group}).encode())
        for n, group in enumerate(groups)
    }
    split = shard(tmp_path, files)
    found = {batch.keys[0].rpartition("::")[2]: batch.caption_ids.item() for batch in take(split, len(files))}
    assert found["k0"] == found["k1"] and found["k2"] == found["k3"]
    assert len(set(found.values())) == 6
    # What names no group is its caption.
    assert [found[f"k{n}"] for n in (4, 5, 6)] == [caption_id(f"caption {n}") for n in (4, 5, 6)]
    assert found["k0"] != caption_id("dog")
