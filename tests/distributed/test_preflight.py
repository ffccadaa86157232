"""The checks that ranks make together, with one rank of two that is not like the other."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clap_zero.data.index import load_index
from clap_zero.distributed import collectives
from clap_zero.distributed.ring import pass_on
from clap_zero.distributed.world import init_distributed
from clap_zero.errors import ClapZeroError
from clap_zero.preflight import links, machine, ranks, shared
from clap_zero.testing import run_distributed
from tests.unit.data.shard_files import write_split


def told(function, *args, **more) -> list[object]:
    """What a collective check gave this rank: its lines, or its error."""
    try:
        return ["ok", function(*args, **more)]
    except ClapZeroError as error:
        return [type(error).__name__, str(error), error.reported_elsewhere, error.exit_code]


def ring_and_table() -> str:
    world = init_distributed()
    received = pass_on(torch.full((3,), float(world.rank)))
    return json.dumps([received.tolist(), told(ranks.check_ranks, world)])


def test_every_rank_hands_on_and_the_table_names_all() -> None:
    first, second = map(json.loads, run_distributed(ring_and_table, 2))
    assert (first[0], second[0]) == ([1.0] * 3, [0.0] * 3)
    assert first[1] == second[1]
    kind, lines = first[1]
    assert kind == "ok"
    assert re.split(r"\s\s+", lines[0].strip()) == [
        "rank", "host", "device", "memory", "threads", "from the rank before"
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[1:3]] == ["0", "1"]
    assert all(re.search(r"cpu +\d.* GB +1 +[\d.]+ [MG]B/s$", line) for line in lines[1:3])
    assert re.fullmatch(r"known numbers arrived exactly on 2 ranks: all-reduce .*/s, all-gather .*/s", lines[3])


def other_facts(change: str) -> str:
    """Rank 1 claims to be another machine than it is."""
    world = init_distributed()
    real = ranks.facts_here
    if world.rank == 1:
        here = real()
        changes = {
            "version": {"versions": {**here.versions, "deepspeed": "0.18.0"}},
            "python": {"python": "3.12.1"},
            "code": {"code": "0" * 12},
            "commit": {"commit": "0" * 12},
        }[change]
        ranks.facts_here = lambda: replace(here, host="node2", **changes)
    try:
        return json.dumps(told(ranks.check_ranks, world))
    finally:
        ranks.facts_here = real


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("version", r"rank 1 on \S+: deepspeed is 0.18.0, expected \S+ as on rank 0 on \S+: in the environment of \S+"),
        ("python", r"rank 1 on \S+: Python is 3.12.1 \(.*\), expected 3\.\S+ \(.*\) as on rank 0 .*"),
        ("code", r"rank 1 on \S+: the code of clap_zero is 000000000000 \(commit .*\), expected .* as on rank 0 .*"),
    ],
)
def test_a_rank_that_differs_stops_all_and_rank_0_says_it(change: str, text: str) -> None:
    first, second = map(json.loads, run_distributed(other_facts, 2, change))
    assert first[0] == second[0] == "LaunchError" and first[3] == 5
    assert first[1] == second[1]
    assert any(re.fullmatch(text, line) for line in first[1].splitlines()), first[1]
    assert (first[2], second[2]) == (False, True)


def test_another_commit_with_the_same_files_is_a_warning() -> None:
    first, _ = map(json.loads, run_distributed(other_facts, 2, "commit"))
    assert first[0] == "ok"
    assert any(re.fullmatch(r"warning: rank 1 on \S+: the commit is 000000000000, .*", line) for line in first[1])


def wrong_numbers(what: str) -> str:
    """One number of one rank's changes on its way."""
    world = init_distributed()
    gather, reduce = collectives.all_gather, collectives.all_reduce_sum

    def broken_gather(t: torch.Tensor) -> torch.Tensor:
        result = gather(t)
        if world.rank == 0 and len(result) > 1000:
            result[len(t) + 500] += 1  # a number of rank 1
        return result

    def broken_sum(t: torch.Tensor) -> torch.Tensor:
        result = reduce(t)
        if world.rank == 1 and len(result) > 1000:
            result[7] += 1
        return result

    if what == "gather":
        collectives.all_gather = broken_gather
    else:
        collectives.all_reduce_sum = broken_sum
    try:
        return json.dumps(told(ranks.check_ranks, world))
    finally:
        collectives.all_gather, collectives.all_reduce_sum = gather, reduce


def test_a_wrong_number_stops_the_run_and_names_both_ends() -> None:
    first, _ = map(json.loads, run_distributed(wrong_numbers, 2, "gather"))
    assert first[0] == "LaunchError"
    assert re.fullmatch(r"rank 0 on \S+: known numbers from rank 1 on \S+ arrived wrong: .*", first[1])
    first, _ = map(json.loads, run_distributed(wrong_numbers, 2, "sum"))
    assert re.fullmatch(r"rank 1 on \S+: an all-reduce of known numbers gave a wrong sum", first[1])


def shared_directory(places: list[str]) -> str:
    world = init_distributed()
    shared.SEES_WITHIN_S = 0.3
    return json.dumps(told(shared.check_shared_directory, Path(places[world.rank]), world=world))


def test_a_run_directory_that_is_not_shared_is_found_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    first, second = map(json.loads, run_distributed(shared_directory, 2, [a, a]))
    assert first[0] == second[0] == "ok"
    for other in (b, str(tmp_path / "nowhere")):
        first, second = map(json.loads, run_distributed(shared_directory, 2, [a, other]))
        assert first[0] == second[0] == "LaunchError"
        assert re.match(rf"rank 1 on \S+: the run directory {re.escape(other)} is not shared", first[1])
        assert first[1] == second[1]
    first, second = map(json.loads, run_distributed(shared_directory, 2, [str(tmp_path / "nowhere"), a]))
    assert re.match(r"rank 0 on \S+: the run directory .*nowhere cannot be written: No such file", first[1])
    assert "\n" not in first[1]
    assert not [*Path(a).iterdir(), *Path(b).iterdir()]


def data_of(split: str, hidden: str) -> str:
    """Rank 1 does not see one shard, or sees it as another."""
    world = init_distributed()
    index = load_index([split])
    real = shared.check_files
    if hidden:
        shared.check_files = lambda files: real({p.replace("1.tar", hidden): size for p, size in files.items()})
    try:
        return json.dumps(told(shared.check_data, [index, None], world=world))
    finally:
        shared.check_files = real


def test_a_rank_that_sees_other_shards_is_named(tmp_path: Path) -> None:
    split = write_split(tmp_path / "train", [2, 2, 2])
    (split / "other.tar").write_bytes(b"x")
    run = [json.loads(run_distributed(data_of, 2, str(split), hidden)[1]) for hidden in ("", "gone.tar", "other.tar")]
    assert run[0][0] == "ok"
    assert run[1][0] == run[2][0] == "DataError" and run[1][3] == 3
    assert re.fullmatch(
        r"rank 1 on \S+: the shard \S+gone.tar cannot be read: No such file or directory; expected: \d+ bytes as on "
        r"rank 0 on \S+",
        run[1][1],
    )
    assert "other.tar has 1 bytes, expected: " in run[2][1]


def test_the_known_numbers_are_exact_and_no_two_ranks_alike() -> None:
    parts = [links.known_numbers(rank, 2048, torch.device("cpu")) for rank in range(64)]
    assert len({tuple(part[:8].tolist()) for part in parts}) == 64
    assert max(float(part.max()) for part in parts) * 8192 < 2**24
    assert torch.equal(torch.stack(parts).sum(0), torch.stack(parts).double().sum(0).float())
    assert machine.facts_here().host
