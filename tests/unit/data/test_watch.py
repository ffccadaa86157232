"""Watching over reads."""

from __future__ import annotations

from concurrent.futures import Future

from clap_zero.data.watch import Allowance, Progress, wait_for


class JustDone(Future):
    """Is done between the end of a wait and the look at it."""

    def result(self, timeout: float | None = None) -> str:
        if not self.done():
            self.set_result("all of it")
            raise TimeoutError
        return super().result(timeout)


def test_what_is_done_just_as_the_wait_ends_is_no_failure():
    assert wait_for(JustDone(), Progress(), Allowance(10)) == "all of it"
