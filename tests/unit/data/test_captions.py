from __future__ import annotations

import json

import numpy as np
import pytest

from clap_zero.data.captions import MAX_CAPTIONS, Caption, CaptionRule, all_captions, draw_caption, read_captions
from clap_zero.data.members import BadSampleError

TEMPLATES = ("This is {caption}.", "I hear {caption} in a {room}")


def texts(**record) -> dict[str, bytes]:
    return {".json": json.dumps(record).encode()}


def drawn(sample: dict[str, bytes], rule: CaptionRule, number: int = 200) -> set[str]:
    return {draw_caption(sample, rule, lambda seed=seed: np.random.default_rng(seed)).text for seed in range(number)}


def no_draw() -> np.random.Generator:
    raise AssertionError("there is no choice, so nothing is drawn")


def test_training_draws_caption_and_template_and_evaluation_takes_all_in_the_first():
    rule = CaptionRule(caption_templates=TEMPLATES)
    sample = texts(text=["a dog", "a {cat}"])
    assert all_captions(sample, rule) == [Caption("This is a dog.", "a dog"), Caption("This is a {cat}.", "a {cat}")]
    assert drawn(sample, rule) == {
        "This is a dog.", "This is a {cat}.", "I hear a dog in a {room}", "I hear a {cat} in a {room}"
    }  # fmt: skip


def test_nothing_is_drawn_where_there_is_no_choice():
    assert draw_caption(texts(text="x"), CaptionRule(), no_draw) == Caption("x", "x")
    assert draw_caption(texts(text="x"), CaptionRule(caption_templates=TEMPLATES[:1]), no_draw).text == "This is x."


@pytest.mark.parametrize(
    ("tags", "record", "expected"),
    [
        ("never", {"text": ["a"], "tag": ["dog", "rain"]}, ["a"]),
        ("missing", {"text": ["a"], "tag": ["dog", "rain"]}, ["a"]),
        ("missing", {"text": [], "tag": ["dog", "rain", "dog", " ", 5]}, ["The sound of dog, rain"]),
        ("missing", {"tag": "dog"}, ["The sound of dog"]),
        ("always", {"text": ["a", "b"], "tag": ["dog"]}, ["a", "b", "The sound of dog"]),
        ("always", {"text": None, "tag": ["dog"]}, ["The sound of dog"]),
        ("always", {"text": "a"}, ["a"]),
    ],
)
def test_tags_make_captions_where_the_rule_says(tags, record, expected):
    rule = CaptionRule(tags=tags)
    assert [caption.text for caption in all_captions(texts(**record), rule)] == expected
    assert drawn(texts(**record), rule) == set(expected)


def test_templates_are_not_put_around_tags_and_both_can_be_named():
    rule = CaptionRule("cap", TEMPLATES[:1], "always", "labels", "One of {tags}")
    assert [c.text for c in all_captions(texts(cap="a", labels=["x", "y"]), rule)] == ["This is a.", "One of x, y"]


@pytest.mark.parametrize("tags", ["never", "missing", "always"])
@pytest.mark.parametrize("record", [{"tag": []}, {"text": "", "tag": None}, {"text": " ", "tag": [5]}])
def test_without_captions_and_tags_the_reason_is_the_captions(tags, record):
    with pytest.raises(BadSampleError, match="'text'"):
        all_captions(texts(**record), CaptionRule(tags=tags))


@pytest.mark.parametrize("tags", ["never", "missing", "always"])
def test_broken_json_is_broken_json(tags):
    with pytest.raises(BadSampleError, match="broken json"):
        draw_caption({".json": b"{"}, CaptionRule(tags=tags), no_draw)


def test_equal_captions_are_equal_whatever_their_templates():
    rule = CaptionRule(caption_templates=TEMPLATES)
    captions = [
        draw_caption(texts(text="x"), rule, lambda seed=seed: np.random.default_rng(seed)) for seed in range(20)
    ]
    assert len({caption.text for caption in captions}) == 2 and {caption.bare for caption in captions} == {"x"}


def test_evaluation_takes_the_first_of_very_many_captions():
    many, notes = texts(text=[f"{n}" for n in range(3_000)]), []
    captions = all_captions(many, CaptionRule(), notes=notes)
    assert [caption.text for caption in captions] == [f"{n}" for n in range(MAX_CAPTIONS)]
    assert notes == ["has 3000 captions, evaluation takes the first 1000"]
    all_captions(texts(text=["a"] * MAX_CAPTIONS), CaptionRule(), notes=notes)
    assert len(notes) == 1


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_txt_may_have_a_byte_order_mark(encoding):
    assert read_captions({".txt": "ein Rüde bellt\r\n".encode(encoding)}) == ["ein Rüde bellt"]
