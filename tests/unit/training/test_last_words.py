"""What a rank says of the error that ends it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clap_zero.errors import ConfigError, DataError
from clap_zero.phases import phase, set_step
from clap_zero.training.last_words import LastWords, last_words


@pytest.fixture(autouse=True)
def first_step():
    set_step(12)
    yield
    set_step(0)


def words_of(error: BaseException, *, process: str = "rank 3 on node7") -> LastWords:
    return last_words(error, process=process, speaks_for_host=True)


def raised(name: str, act) -> BaseException:
    with pytest.raises(BaseException) as caught, phase(name):
        act()
    return caught.value


def test_a_line_names_rank_host_phase_and_step() -> None:
    def act() -> None:
        raise DataError("no shards")

    words = words_of(raised("data", act))
    assert words.line == "clap_zero [rank 3 on node7, data of step 12]: error: no shards"
    assert (words.exit_code, words.details, words.said_by_others) == (3, "", False)


def test_before_a_run_is_there_a_line_names_no_phase() -> None:
    set_step(0)
    assert words_of(ConfigError("a"), process="").line == "clap_zero: error: a"


def test_every_line_of_several_faults_says_who_speaks() -> None:
    set_step(0)
    assert words_of(ConfigError("a\nb"), process="").line == "clap_zero: error: a\nclap_zero: error: b"


def test_a_job_of_one_names_no_phase_of_checks() -> None:
    set_step(0)

    def act() -> None:
        raise DataError("no shards")

    error = raised("preflight", act)
    assert words_of(error, process="").line == "clap_zero: error: no shards"
    assert words_of(error).line == "clap_zero [rank 3 on node7, preflight]: error: no shards"


def test_what_nobody_foresaw_has_a_traceback_and_one_line_after_it() -> None:
    def act() -> None:
        raise KeyError("weights")

    words = words_of(raised("checkpoint", act))
    assert words.exit_code == 1
    assert words.details.startswith("Traceback") and "KeyError: 'weights'" in words.details
    assert words.line.startswith(
        "clap_zero [rank 3 on node7, checkpoint of step 12]: error: unexpected KeyError in training/test_last_words.py:"
    )
    assert "\n" not in words.line


@pytest.mark.parametrize(
    ("how", "asked"),
    [
        (lambda: torch.empty(1 << 50), "4194304.00 GiB more were asked for"),
        (lambda: np.empty(1 << 50), "8.00 PiB more were asked for"),
        (lambda: bytearray(1 << 60), "were held before"),
    ],
)
def test_l11_out_of_memory_is_one_line_with_the_way_out(how, asked: str) -> None:
    words = words_of(raised("backward", how))
    assert words.details == "" and words.exit_code == 1
    assert words.line.startswith("clap_zero [rank 3 on node7, backward of step 12]: error: out of memory on the host, ")
    assert asked in words.line and " GiB were held before: lower train_micro_batch_size_per_gpu" in words.line


def test_l11_out_of_memory_on_a_gpu_says_what_it_has() -> None:
    """The text of torch 2.14, which no machine without a GPU can make."""
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which 10.00 MiB "
        "is free. Process 7 has 79.10 GiB memory in use."
    )

    def act() -> None:
        raise error

    line = words_of(raised("evaluation", act)).line
    assert "out of memory on the device, 20.00 MiB more were asked for, at most " in line
    assert line.endswith(" of 79.11 GiB: lower --evaluate.batch_size")


@pytest.mark.parametrize(
    ("how", "code", "said"), [(3, 3, "sys.exit(3)"), (0, 1, "sys.exit(0)"), (None, 1, "sys.exit(None)")]
)
def test_l11_sys_exit_within_a_run_is_an_error(how: int | None, code: int, said: str) -> None:
    def act() -> None:
        raise SystemExit(how)

    words = words_of(raised("metrics", act))
    assert words.exit_code == code
    assert f"metrics of step 12]: error: something called {said} in training/test_last_words.py:" in words.line


def test_a_text_given_to_sys_exit_is_said() -> None:
    words = words_of(SystemExit("no licence"))
    assert words.exit_code == 1 and words.message.endswith("(no licence)")


def test_a_peer_that_is_gone_is_not_the_cause() -> None:
    words = words_of(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4"))
    assert words.lost_contact and words.exit_code == 5
    assert "lost contact with the other ranks" in words.line
