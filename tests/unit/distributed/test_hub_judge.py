from __future__ import annotations

import pytest

from clap_zero.distributed.hub_judge import CLOSE_GRACE_S, Judge, Peer, one_behind, told_ranks


def judge(size: int = 4, *, own_rank: int = 0, heartbeat_s: float | None = 30, hang_s: float | None = 600) -> Judge:
    made = Judge(own_rank=own_rank, heartbeat_timeout_s=heartbeat_s, hang_timeout_s=hang_s)
    for rank in range(size):
        made.join(rank, host=f"node{rank // 2}", pid=100 + rank)
        made.beat(rank, phase="backward", step=12, progress=50)
    return made


def test_nothing_is_wrong_while_all_beat() -> None:
    one = judge()
    for progress in range(100):
        for rank in range(4):
            one.beat(rank, phase="forward", step=progress, progress=progress)
        one.advance(1.0)
        assert one.verdict() is None and not one.hangs()


def test_an_end_without_a_word_is_a_death() -> None:
    one = judge()
    one.lose(3)
    verdict = one.verdict()
    assert verdict is not None and verdict.rank == 3 and not verdict.is_told
    assert verdict.cause.startswith("rank 3 on node1 died in backward of step 12")


def test_the_death_counts_and_not_the_errors_that_follow_from_it() -> None:
    one = judge()
    one.failing(1, "in backward of step 12: a collective failed")
    one.lose(1)
    one.lose(3)
    verdict = one.verdict()
    assert verdict is not None and verdict.rank == 3


def test_a_failing_rank_gets_time_to_end_by_itself_and_is_quoted() -> None:
    one = judge()
    one.failing(2, "in data of step 13: no shard 7")
    one.advance(CLOSE_GRACE_S - 1)
    for rank in range(4):
        one.beat(rank, phase="backward", step=12, progress=51)
    assert one.verdict() is None
    one.lose(2)
    verdict = one.verdict()
    assert (
        verdict is not None
        and verdict.is_told
        and verdict.cause == "rank 2 on node1 failed in data of step 13: no shard 7"
    )


def test_a_failing_rank_that_does_not_end_is_not_waited_for() -> None:
    one = judge(heartbeat_s=None)
    one.failing(2, "in data of step 13: no shard 7")
    one.advance(CLOSE_GRACE_S + 1)
    verdict = one.verdict()
    assert verdict is not None and verdict.rank == 2


def test_silence_is_noticed_after_the_timeout_and_has_the_last_place() -> None:
    one = judge()
    for _ in range(31):
        for rank in (0, 1, 2):
            one.beat(rank, phase="backward", step=12, progress=50)
        assert one.verdict() is None
        one.advance(1.0)
    verdict = one.verdict()
    assert verdict is not None and verdict.rank == 3
    assert "rank 3 on node1 has not been heard of for 30 s (last: backward of step 12)" in verdict.cause


def test_the_cut_off_side_names_rank_0() -> None:
    one = Judge(own_rank=3, heartbeat_timeout_s=30, hang_timeout_s=None)
    one.join(3, host="node1", pid=1)
    one.join(0, host="node0", pid=0)
    one.advance(31)
    verdict = one.verdict()
    assert verdict is not None and verdict.cause.startswith("no contact with rank 0 on node0 for 30 s")


def test_null_switches_the_watch_for_silence_off() -> None:
    one = judge(heartbeat_s=None)
    one.advance(1e6)
    assert one.verdict() is None


def test_a_rank_that_said_goodbye_may_go() -> None:
    one = judge(2)
    for rank in range(2):
        one.beat(rank, phase="end", step=12, progress=60)
    one.goodbye(1)
    one.lose(1)
    one.advance(1000)  # rank 0 still uploads
    assert one.verdict() is None


def test_a_rank_that_never_comes_out_of_its_end_is_ended() -> None:
    one = judge(2)
    for rank in range(2):
        one.beat(rank, phase="end", step=12, progress=60)
    one.goodbye(1)
    one.advance(4 * 600 - 1)
    assert not one.hangs()
    one.advance(2)
    assert one.hangs()


def test_what_a_rank_still_writes_after_the_last_step_is_no_early_end() -> None:
    one = judge(2)
    one.beat(0, phase="metrics", step=12, progress=60)
    one.goodbye(1)
    one.advance(500)
    assert one.verdict() is None
    one.advance(101)
    assert one.verdict() is not None


def test_a_loss_at_the_end_is_no_death() -> None:
    one = judge(2)
    one.beat(1, phase="end", step=12, progress=60)
    one.lose(1)
    assert one.verdict() is None


def test_of_several_deaths_the_first_is_named() -> None:
    one = judge()
    one.lose(3), one.lose(1)
    assert one.verdict().rank == 3


def test_an_end_while_others_go_on_is_noticed() -> None:
    one = judge()
    one.goodbye(1)
    one.lose(1)
    for progress in range(40):
        for rank in (0, 2, 3):
            one.beat(rank, phase="forward", step=13, progress=progress)
        one.advance(1.0)
    verdict = one.verdict()
    assert verdict is not None
    assert (
        verdict.cause
        == "rank 1 on node0 came to its end 30 s ago, while rank 0 on node0 is still in forward of step 13"
    )


@pytest.mark.parametrize(("phase", "limit_s"), [("backward", 600), ("evaluation", 2400), ("checkpoint", 2400)])
def test_a_hang_is_no_progress_of_any_rank_and_long_phases_have_longer(phase: str, limit_s: float) -> None:
    one = judge()
    one.beat(2, phase=phase, step=12, progress=51)
    one.advance(limit_s - 1)
    assert not one.hangs()
    one.beat(3, phase="backward", step=12, progress=50)  # says the same: no progress
    one.advance(2)
    assert one.hangs()
    one.beat(3, phase="optimizer", step=12, progress=51)
    assert not one.hangs()


def test_null_switches_the_watch_for_hangs_off() -> None:
    one = judge(hang_s=None)
    one.advance(1e6)
    assert not one.hangs()


def test_a_hang_names_the_rank_in_data_while_the_others_wait() -> None:
    one = judge()
    one.beat(2, phase="data", step=12, progress=48)
    one.peers[2].frames = "  clap_zero/data/loader.py:12 in __next__"
    for rank in (0, 1, 3):
        one.peers[rank].waits = True
    one.advance(700)
    verdict = one.hang("runs/x/stacks")
    assert verdict.rank == 2 and "rank 2 on node1 is behind, in data of step 12" in verdict.cause
    assert "backward of step 12: ranks 0, 1, 3" in verdict.cause and "runs/x/stacks" in verdict.cause
    assert verdict.cause.endswith("innermost frames of rank 2:\n  clap_zero/data/loader.py:12 in __next__")


@pytest.mark.parametrize(
    ("peers", "expected"),
    [
        ([Peer(0, phase="backward", step=5, waits=True), Peer(1, phase="backward", step=5)], 1),
        ([Peer(0, phase="data", step=5, waits=True), Peer(1, phase="backward", step=5)], 1),
        ([Peer(0, phase="data", step=6), Peer(1, phase="optimizer", step=5)], 1),
        ([Peer(0, phase="forward", step=5), Peer(1, phase="data", step=5)], 1),
        ([Peer(0, phase="backward", step=5, waits=True), Peer(1, phase="backward", step=5, waits=True)], None),
    ],
)
def test_who_is_behind(peers: list[Peer], expected: int | None) -> None:
    behind = one_behind(peers)
    assert (None if behind is None else behind.rank) == expected


def test_many_ranks_are_told_in_few_words() -> None:
    assert told_ranks([3]) == "rank 3"
    assert told_ranks(list(range(66))) == "ranks 0, 1, 2, 3, 4, 5 and 60 others"
