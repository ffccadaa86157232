"""`clap-zero check` of shards that lie elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clap_zero import cli
from clap_zero.data.spans import SPANS_FILE
from tests.unit.data.http_server import Fault, Site, at_most, http_server
from tests.unit.data.shard_files import write_split
from tests.unit.data.span_files import write_spans


@pytest.fixture
def site(tmp_path):
    write_spans(write_split(tmp_path / "source" / "train", [6, 6, 6]))
    with http_server() as site:
        site.add(tmp_path / "source" / "train", "/train/")
        yield site


def run(site: Site, tmp_path: Path, *more: object) -> int:
    words = ["--cache-dir", tmp_path / "cache", "--timeout-s", 1, "--retries", 1, "--workers", 2, *more]
    with at_most(60):
        return cli.main(["check", f"{site.url}/train", *map(str, words)])


def test_every_sample_is_read_and_an_index_can_be_had(site, tmp_path, capsys):
    spans = site.files["/train/spans.npy"]
    del site.files["/train/spans.npy"]
    assert run(site, tmp_path, "--index-out", tmp_path / "indexes") == 0
    assert "18 usable" in capsys.readouterr().out
    written = tmp_path / "indexes" / "train"
    assert json.loads((written / "sizes.json").read_text()) == {f"{n}.tar": 6 for n in range(3)}
    assert (written / SPANS_FILE).read_bytes() == spans


@pytest.mark.parametrize("fault", [Fault(status=503), Fault(stall_after=300)], ids=["503", "stall"])
def test_a_shard_that_cannot_be_had_ends_training_and_not_the_check(site, tmp_path, capsys, fault):
    site.faults["/train/1.tar"] = fault
    assert run(site, tmp_path) == 3
    said = capsys.readouterr()
    assert "12 usable" in said.out and "1.tar" in said.err
    assert "training on these shards would stop" in said.err
    assert run(site, tmp_path, "--missing-shards", "skip") == 0
    assert "training would go on" in capsys.readouterr().out
