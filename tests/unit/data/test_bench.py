from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from clap_zero.audio.clips import FeatureConfig
from clap_zero.audio.features import ClapFeatures
from clap_zero.audio.logmel import encode_logmel
from clap_zero.cli import main
from clap_zero.data import bench
from clap_zero.data.bench import BenchOptions, bench_loader
from clap_zero.data.bench_report import BenchReport
from clap_zero.data.embedded import sounds_directory
from clap_zero.data.stopwatch import STAGES
from clap_zero.errors import DataError
from tests.unit.data.shard_files import pair, write_split, write_tar

REPORT = BenchReport(
    num_shards=2,
    num_samples=100,
    workers=1,
    micro_batch=8,
    truncation="rand_trunc",
    device=None,
    num_pairs=200,
    wall_s=2.0,
    cpu_s=4.0,
    stage_s={"read": 0.2, "decode": 1.5, "collate": 0.3},
    skipped={},
    bare_pairs_per_core_s=100.0,
    mean_clip_s=10.0,
)


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    """Two shards of the embedded sounds."""
    split = tmp_path_factory.mktemp("sounds") / "train"
    files = sorted(sounds_directory().glob("*.ogg"))[:40]
    for shard in range(2):
        members = []
        for path in files[shard * 20 : shard * 20 + 20]:
            members += [(path.name, path.read_bytes()), (f"{path.stem}.txt", path.stem.encode())]
        write_tar(split / f"{shard}.tar", members)
    (split / "sizes.json").write_text('{"0.tar": 20, "1.tar": 20}')
    return split


def options(*shards, **change) -> BenchOptions:
    return replace(BenchOptions(tuple(map(str, shards)), seconds=0.3, micro_batch=8), **change)


@pytest.mark.parametrize("workers", [0, 1])
def test_reads_the_embedded_sounds_and_measures_each_stage(sounds, workers):
    report = bench_loader(options(sounds, workers=workers))
    assert (report.num_shards, report.num_samples, report.workers) == (2, 40, workers)
    assert report.num_pairs >= 16 and report.num_pairs % 8 == 0
    assert report.wall_s >= 0.3 and report.cpu_s > 0.05
    assert set(report.stage_s) == set(STAGES) and report.stage_s["decode"] > 0
    assert sum(report.shares.values()) == pytest.approx(1)
    assert list(report.shares.values()) == sorted(report.shares.values(), reverse=True)
    assert report.bare_pairs_per_core_s is not None and report.bare_pairs_per_core_s > 0
    assert report.mean_clip_s is not None and 0.1 < report.mean_clip_s < 60
    assert report.skipped == {} and report.device is None


def test_work_of_other_processes_counts():
    before, own = bench._cpu_seconds(), time.process_time()
    burn = "import time\nwhile time.process_time() < 0.6: pass\nprint(flush=True)\ninput()"
    child = subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    burnt, own = bench._cpu_seconds() - before, time.process_time() - own
    child.communicate(b"\n")
    assert burnt - own > 0.4


@pytest.mark.parametrize("truncation", ["rand_trunc", "fusion"])
def test_features_are_a_stage_of_their_own(sounds, truncation):
    report = bench_loader(options(sounds, features=True, truncation=truncation))
    assert report.stage_s["features"] > 0 and report.device is not None
    assert any(line.startswith("features ") for line in report.lines())


def test_skipped_samples_are_counted_by_reason(tmp_path):
    members = [member for n in range(20) for member in pair(f"k{n}", n)]
    members[0] = ("k0.flac", b"")
    write_tar(tmp_path / "train" / "0.tar", members)
    (tmp_path / "train" / "sizes.json").write_text('{"0.tar": 20}')
    report = bench_loader(options(tmp_path / "train", micro_batch=10))
    assert set(report.skipped) == {"empty file"}
    assert "unusable samples: empty file (" in "\n".join(report.lines())


def test_few_samples_make_a_smaller_batch_and_hints_name_arguments_of_bench(tmp_path):
    write_tar(tmp_path / "train" / "0.tar", [member for n in range(5) for member in pair(f"k{n}", n)])
    report = bench_loader(BenchOptions((str(tmp_path / "train"),), seconds=0.1))
    assert report.micro_batch == 5 and report.num_pairs >= 10
    assert "--data." not in report.verdict()


def test_stored_mels_have_nothing_to_decode(tmp_path):
    features = ClapFeatures(FeatureConfig("rand_trunc"), device="cpu")
    data = encode_logmel(np.ones(4800, dtype=np.int16), features)
    members = [m for n in range(8) for m in ((f"{n}.logmel", data), (f"{n}.txt", b"one"))]
    write_tar(tmp_path / "train" / "0.tar", members)
    (tmp_path / "train" / "sizes.json").write_text('{"0.tar": 8}')
    report = bench_loader(options(tmp_path / "train", features=True))
    assert report.bare_pairs_per_core_s is None and report.mean_clip_s is None
    assert any(line.startswith("bare decoding ") and "none of these clips" in line for line in report.lines())


def test_the_yardstick_passes_over_what_soundfile_cannot_decode():
    good = pair("a", 1, seconds=0.5)[0][1]
    count, cpu_s, clip_s = bench._bare_decoding([b"no audio", good, b""], 0.01)
    assert count >= 1 and cpu_s > 0 and clip_s == pytest.approx(0.5 * count)
    assert bench._bare_decoding([b"no audio"], 0.01) == (0, 0.0, 0.0)


def test_the_figures():
    assert REPORT.pairs_per_s == 100 and REPORT.pairs_per_core_s == 50
    assert list(REPORT.shares.items()) == [("decode", 0.75), ("collate", 0.15), ("read", 0.1)]
    text = "\n".join(REPORT.lines())
    assert "1,000 pairs a second take 20.0 cores" in text and "the loader reaches 50% of it" in text
    assert "2.00 cores busy" in text


@pytest.mark.parametrize(
    ("stage_s", "start", "way_out"),
    [
        ({"decode": 3.0, "read": 1.0}, "decode is the limit, 75% of the time", "--store logmel"),
        ({"download": 9.0, "decode": 1.0}, "download is the limit, 90% of the time", "cache"),
        ({"resample": 2.0, "decode": 1.0}, "resample is the limit, 67% of the time", "clap-zero pack"),
        ({"features": 2.0, "decode": 1.0}, "features is the limit, 67% of the time", "GPU"),
        ({"decode": 1.0, "read": 0.9, "tokenise": 0.8, "collate": 0.7}, "no stage is the limit by itself", "workers"),
        ({"decode": 0.0}, "no stage took time", "--seconds"),
    ],
)
def test_one_sentence_says_the_limit_and_the_way_out(stage_s, start, way_out):
    verdict = replace(REPORT, stage_s=stage_s).verdict()
    assert verdict.startswith(start) and way_out in verdict and "\n" not in verdict


def test_every_stage_of_the_loader_has_a_way_out():
    for stage in STAGES:
        assert replace(REPORT, stage_s={stage: 1.0}).verdict().startswith(f"{stage} is the limit")


def test_command_prints_and_writes_the_figures(sounds, tmp_path, capsys):
    out = tmp_path / "figures.json"
    command = ["bench", "loader", "--seconds", "0.2", "--micro_batch", "4", "--workers", "0", str(sounds)]
    assert main([*command, "--json", str(out)]) == 0
    printed, record = capsys.readouterr().out.splitlines(), json.loads(out.read_text())
    assert printed[-1] == record["verdict"]
    assert f"pairs per second per core  {record['pairs_per_core_s']:10.1f}" in "\n".join(printed)
    assert record["num_pairs"] % 4 == 0 and record["micro_batch"] == 4


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["loader", "/nowhere/train"], 3, "/nowhere/train"),
        (["loader"], 2, "SHARDS"),
        (["reader", "x"], 2, "loader"),
        (["loader", "x", "--seconds", "0"], 2, "--seconds 0"),
        (["loader", "x", "--seconds", "nan"], 2, "--seconds nan"),
        (["loader", "x", "--workers", "-1"], 2, "--workers -1"),
        (["loader", "x", "--micro-batch", "0"], 2, "--micro-batch 0"),
        (["loader", "x", "--max-seconds", "0"], 2, "--max-seconds 0"),
        (["loader", "x", "--timeout-s", "0"], 2, "--timeout-s 0"),
        (["loader", "x", "--json", "/nowhere/x.json"], 2, "/nowhere"),
        (["loader", "x", "--truncation", "none"], 2, "truncation"),
        (["loader", "x", "--worker", "1"], 2, "did you mean --workers"),
    ],
)
def test_mistakes_are_one_line_and_an_exit_code(arguments, code, words, capsys):
    assert main(["bench", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and words in captured.err
    assert captured.err.startswith("clap-zero: error: ")


def test_data_that_cannot_fill_a_batch_are_refused(tmp_path):
    split = write_split(tmp_path / "train", [3])
    with pytest.raises(DataError, match="global batch of 8"):
        bench_loader(options(split))
