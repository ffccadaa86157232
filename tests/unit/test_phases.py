"""The phase that a process is in: what is told of it, to whom, and when something is raised."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time

import pytest

from clap_zero import phases
from clap_zero.errors import DataError
from clap_zero.phases import PHASES, Moment, current, phase, progress, raised_at, set_step, spent, worked


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "_moment", Moment("start", 0, time.monotonic()))
    monkeypatch.setattr(phases, "_spent", {})
    monkeypatch.setattr(phases, "_worked", {})
    monkeypatch.setattr(phases, "_worked_until", phases._work_clock())


def test_phases_nest_and_restore_the_outer_one() -> None:
    with phase("forward"):
        with phase("data"):
            assert current().phase == "data"
        assert current().phase == "forward"
    assert current().phase == "start"


def test_the_step_outlives_the_phase_in_which_it_was_set() -> None:
    with phase("metrics"):
        set_step(7)
        with phase("backward"):
            assert str(current()) == "backward of step 7"
    assert current().step == 7


def test_before_the_first_step_no_step_is_named() -> None:
    with phase("model"):
        assert str(current()) == "model"


def test_progress_rises_with_phases_and_steps() -> None:
    seen = [progress()]
    set_step(1)
    seen.append(progress())
    with phase("data"):
        seen.append(progress())
    seen.append(progress())
    assert seen == sorted(set(seen))


def test_each_second_counts_for_one_phase() -> None:
    began = time.monotonic()
    with phase("forward"):
        time.sleep(0.03)
        with phase("data"):
            time.sleep(0.06)
    whole = time.monotonic() - began
    by_phase = spent()
    assert by_phase["data"] >= 0.06 and 0.03 <= by_phase["forward"] <= whole - 0.06 + 0.005
    assert sum(by_phase.values()) == pytest.approx(whole, abs=0.02)


def test_waiting_is_no_work_and_a_shared_core_is() -> None:
    with phase("backward"):
        time.sleep(0.1)
    with phase("forward"):
        until = time.monotonic() + 0.1
        while time.monotonic() < until:
            pass
    assert worked()["backward"] < 0.05
    # Other tests may have the cores: what was waited for them counts, so this holds on a busy machine, too.
    assert worked()["forward"] == pytest.approx(spent()["forward"], abs=0.03)


def test_an_error_keeps_the_innermost_phase_in_which_it_was_raised() -> None:
    set_step(3)
    with pytest.raises(ValueError) as caught, phase("forward"), phase("data"):
        raise ValueError("x")
    assert current().phase == "start"
    assert str(raised_at(caught.value)) == "data of step 3"


def test_an_error_that_is_turned_into_another_keeps_the_phase_of_the_first() -> None:
    def turned() -> None:
        with phase("optimizer"):
            try:
                with phase("backward"):
                    raise RuntimeError("cause")
            except RuntimeError as error:
                raise DataError("turned") from error

    with pytest.raises(DataError) as caught:
        turned()
    assert raised_at(caught.value).phase == "backward"


def test_an_error_outside_of_any_phase_has_the_present_one() -> None:
    assert raised_at(ValueError()).phase == "start"


def test_errors_with_a_moment_travel_between_processes() -> None:
    with pytest.raises(DataError) as caught, phase("preflight"):
        raise DataError("no shards")
    assert raised_at(pickle.loads(pickle.dumps(caught.value))).phase == "preflight"


def test_an_unknown_phase_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError), phase("lunch"):
        pass


def test_another_thread_never_reads_a_mixture() -> None:
    stop, wrong = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            moment = current()
            if moment.phase in ("data", "forward") and moment.step != (1 if moment.phase == "data" else 2):
                wrong.append(moment)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(3000):
        phases._change("data", 1)
        phases._change("forward", 2)
    stop.set()
    reader.join()
    assert not wrong


def test_the_process_began_before_its_first_line() -> None:
    program = "import time; a = time.monotonic(); from clap_zero import phases; print(a - phases.BEGAN)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert -0.02 <= float(done.stdout) < 30


def test_every_phase_has_one_name() -> None:
    assert len(set(PHASES)) == len(PHASES)
