from __future__ import annotations

import json

import pytest

from clap_zero.config.load import parse_command_line
from clap_zero.data.public import holds_secrets, public_config

SIGNED = "https://me:word@host/train/{0..3}.tar?sig=SECRET"


def dump(*places: str) -> dict:
    flags = [part for place in places for part in ("--data.train", place)]
    return parse_command_line(["--ds_config", "zero2.json", *flags]).run.model_dump(mode="json")


@pytest.mark.parametrize(
    ("place", "public"),
    [
        (SIGNED, "https://host/train/{0..3}.tar"),
        ("https://host/train?sig=SECRET", "https://host/train"),
        ("s3://key:SECRET@bucket/train", "s3://bucket/train"),
        ("{shards: 'https://host/train?sig=SECRET', weight: 2}", "https://host/train"),
    ],
)
def test_what_names_the_data_is_kept_and_what_opens_it_is_not(place: str, public: str) -> None:
    run = dump("/data/what?/train", place)
    assert holds_secrets(run)
    hidden = public_config(run)
    text = json.dumps(hidden)
    assert "SECRET" not in text and "word" not in text and public in text and "/data/what?/train" in text
    assert hidden["train"] == run["train"] and not holds_secrets(hidden)


def test_the_words_of_a_command_are_hidden() -> None:
    run = dump("pipe:get --token SECRET b/0.tar")
    assert holds_secrets(run) and "SECRET" not in json.dumps(public_config(run))


def test_plain_places_stay_as_they_are() -> None:
    run = dump("/data/train", "s3://bucket/train", "{shards: ['a/{0..3}.tar'], weight: 2}")
    assert public_config(run) == run and not holds_secrets(run) and not holds_secrets({})
