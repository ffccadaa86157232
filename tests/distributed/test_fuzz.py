"""Thousands of damaged shards and audio files, read by 2 ranks with 2 workers each."""

from __future__ import annotations

from pathlib import Path

import pytest

from clap_zero.testing import run_distributed
from tests.distributed.fuzz_reading import Account, read_fuzzed
from tests.distributed.fuzz_shards import LOSSY_KINDS, SAMPLES_PER_SHARD, owners, write_fuzzed

PEAK_BYTES = 600e6


def judge(accounts: list[Account], num_shards: int, intact: list[int]) -> None:
    """No crash and no hang brought us here. Now: nothing wrong, nothing uncounted, memory flat."""
    for account in accounts:
        assert not account.wrong, account.wrong[:10]
        assert account.peak_bytes < PEAK_BYTES
    for keys, skipped in accounts[0].epochs:
        # Each slot is read as what it is or reported as skipped; replacements are read once more.
        assert len(keys) == num_shards * SAMPLES_PER_SHARD
        assert len(set(skipped)) == len(skipped) and not set(keys) & set(skipped)
        assert len(set(keys)) + len(skipped) == num_shards * SAMPLES_PER_SHARD
    assert len({tuple(sorted(skipped)) for _, skipped in accounts[0].epochs}) == 1  # the same samples each time
    assert len({tuple(keys) for keys, _ in accounts[0].epochs}) == len(accounts[0].epochs)
    whole = [owner for number in intact for owner in owners(number) if owner.kind not in LOSSY_KINDS]
    exact = set.union(*(account.exact for account in accounts))
    assert {f"train/{owner.shard}.tar::{owner.key}" for owner in whole} <= exact


def fuzz(tmp_path: Path, *, shards: int, audio_files: int, intact: int, epochs: int, seed: int) -> list[Account]:
    intact_numbers = write_fuzzed(tmp_path / "train", shards=shards, audio_files=audio_files, intact=intact, seed=seed)
    accounts = run_distributed(read_fuzzed, 2, str(tmp_path / "train"), epochs, timeout_s=1200)
    judge(accounts, shards + audio_files // 2 + intact, intact_numbers)
    return accounts


def test_hundreds_of_damaged_shards_and_files(tmp_path):
    accounts = fuzz(tmp_path, shards=120, audio_files=120, intact=60, epochs=2, seed=1)
    assert sum(account.reasons.total() for account in accounts) > 50


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_two_thousand_damaged_shards_and_files(tmp_path):
    accounts = fuzz(tmp_path, shards=1000, audio_files=1000, intact=500, epochs=4, seed=2)
    for account in accounts:
        for first, last in zip(account.memory[0], account.memory[-1], strict=True):
            assert last < 1.05 * first, account.memory
