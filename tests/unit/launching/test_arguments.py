"""Arguments survive pdsh and a shell byte for byte."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clap_zero.launching.arguments import quote, unquote

WORDS = st.text(st.characters(exclude_characters="\0"), max_size=12)


@pytest.mark.parametrize(
    "words", [[], ["--run_dir", "a/b"], ["--x=1", "-1e-4", "user@host:/data/{}".replace("{}", "")]]
)
def test_plain_words_stay_readable(words: list[str]) -> None:
    assert quote(words) == words == unquote(words)


@settings(max_examples=300)
@given(words=st.lists(st.one_of(WORDS, st.sampled_from(["", "quoted:x", "--arguments=quoted", "\udcff"]))))
def test_l09_every_list_of_words_comes_back(words: list[str]) -> None:
    assert unquote(["--local_rank=0", *quote(words)]) == ["--local_rank=0", *words]


@given(words=st.lists(WORDS, min_size=1, max_size=3))
@settings(max_examples=30)
def test_l09_no_shell_changes_a_quoted_word(words: list[str]) -> None:
    quoted = quote(words)
    assert not any("%" in word for word in quoted), "pdsh fills in %h, %n and %u"
    shown = subprocess.run(
        ["sh", "-c", "printf '%s\\n' " + " ".join(quoted)], capture_output=True, text=True, check=True
    )
    assert shown.stdout.splitlines() == quoted


def test_l09_what_the_launcher_logs_can_be_read() -> None:
    assert quote(["--template", "This is it."]) == ["--arguments=quoted", "--template", "quoted:This=20is=20it."]


def test_without_the_mark_nothing_is_touched() -> None:
    assert unquote(["quoted:a=20b"]) == ["quoted:a=20b"]
