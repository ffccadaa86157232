"""How the training process ends: one line for what a user can act on, and the exit code of its kind."""

from __future__ import annotations

import pytest

from clap_zero import train
from clap_zero.errors import CheckpointError, ConfigError, DataError, DivergedError, LaunchError


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "YIELD_TO_CAUSE_S", 0)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a"), 2),
        (DataError("a"), 3),
        (CheckpointError("a"), 4),
        (LaunchError("a"), 5),
        (DivergedError("a"), 6),
    ],
)
def test_an_error_for_the_user_is_one_line(error: Exception, code: int, capsys) -> None:
    assert train._report(error) == code
    assert capsys.readouterr().err == "clap_zero: error: a\n"


def test_ranks_name_themselves(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert train._report(DataError("no shards")) == 3
    assert capsys.readouterr().err.startswith("clap_zero [rank 3 on ")


def test_a_configuration_error_is_said_once_a_host(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert train._report(ConfigError("a")) == 2
    assert capsys.readouterr().err == ""


def test_what_another_rank_says_is_not_repeated(capsys) -> None:
    error = DataError("a")
    error.reported_elsewhere = True
    assert train._report(error) == 3
    assert capsys.readouterr().err == ""


def test_a_lost_peer_is_not_the_cause(capsys) -> None:
    error = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4")
    assert train._report(error) == 5
    assert "lost contact" in capsys.readouterr().err


@pytest.mark.parametrize("error", [FileNotFoundError("/data/igloo/0.tar"), RuntimeError("shapes differ")])
def test_anything_else_is_shown_whole(error: Exception, capsys) -> None:
    assert train._report(error) == 1
    assert type(error).__name__ in capsys.readouterr().err


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (2, 2), (None, 0), ("no licence", 1)])
def test_before_a_run_sys_exit_means_what_it_does_in_python(code: object, expected: int, capsys) -> None:
    assert train._code_of(SystemExit(code)) == expected
    assert capsys.readouterr().err == ("no licence\n" if isinstance(code, str) else "")
