"""Reading shards from a real S3 server on this machine (moto), through s3fs."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clap_zero.data.index import load_index
from clap_zero.data.places import ReadPolicy
from clap_zero.data.shards import Shard, ShardReader
from clap_zero.data.sources import exists, list_names, read_text
from clap_zero.data.spans import SpansRef
from clap_zero.errors import DataError
from tests.unit.data.http_server import at_most
from tests.unit.data.shard_files import write_split
from tests.unit.data.span_files import write_spans

ROOT = Path(__file__).resolve().parents[3]
SIZES = [4, 3]
PREFIX = "s3://sounds/my data/train"


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> Path:
    directory = write_split(tmp_path_factory.mktemp("s3") / "train", SIZES)
    write_spans(directory)
    return directory


@pytest.fixture(scope="module")
def endpoint(split) -> Iterator[str]:
    """A server with the split in the bucket `sounds`."""
    pytest.importorskip("s3fs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None and time.monotonic() < deadline, "the S3 server does not start"
            time.sleep(0.1)
        url = f"http://127.0.0.1:{port}"
        _upload(url, split)
        yield url
    finally:
        server.kill()
        server.wait()


def _upload(url: str, split: Path) -> None:
    import boto3

    client = boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="k", aws_secret_access_key="s"
    )
    client.create_bucket(Bucket="sounds")
    for path in split.iterdir():
        client.put_object(Bucket="sounds", Key=f"my data/train/{path.name}", Body=path.read_bytes())


@pytest.fixture
def policy(endpoint, tmp_path, monkeypatch) -> ReadPolicy:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEYID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRETKEY")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return ReadPolicy(cache_dir=str(tmp_path / "cache"), timeout_s=10, retries=1)


def keys(reader: ShardReader, shards: list[Shard]) -> list[str]:
    found = [reader.read(shard, n).key for shard in shards for n in range(shard.num_samples)]
    reader.close()
    return found


@pytest.mark.parametrize("spans", [False, True])
def test_a_split_in_a_bucket_is_read_as_a_local_one(policy, split, tmp_path, spans):
    firsts = [0, SIZES[0]]
    shards = [
        Shard(
            f"{PREFIX}/{n}.tar",
            "",
            SIZES[n],
            0,
            SpansRef(f"{PREFIX}/spans.npy", firsts[n], sum(SIZES)) if spans else None,
        )
        for n in (0, 1)
    ]
    reader = ShardReader(policy)
    for shard in shards:
        reader.prefetch(shard, 0)
    assert keys(reader, shards) == [f"s{n:04d}" for n in range(sum(SIZES))]
    assert reader.take_notes() == []
    cached = sorted(path.stat().st_size for path in (tmp_path / "cache").iterdir() if path.is_file())
    files = ["spans.npy"] if spans else ["0.tar", "1.tar"]  # with byte ranges no shard is downloaded
    assert cached == sorted((split / name).stat().st_size for name in files)


def test_the_index_of_a_bucket(policy):
    index = load_index([PREFIX], policy=policy)
    assert index.sizes.tolist() == SIZES
    shards = [index.shard(n) for n in range(2)]
    assert shards[1].path == f"{PREFIX}/1.tar" and shards[1].spans is not None and shards[1].spans.first_row == SIZES[0]
    assert keys(ShardReader(policy), shards)[-1] == "s0006"


def test_small_files_and_listings(policy):
    assert read_text(f"{PREFIX}/sizes.json", policy) == '{"0.tar": 4, "1.tar": 3}'
    assert exists(f"{PREFIX}/0.tar", policy) and not exists(f"{PREFIX}/9.tar", policy)
    assert not exists(PREFIX, policy)
    assert list_names(PREFIX, policy) == ["0.tar", "1.tar", "sizes.json", "spans.npy"]


@pytest.mark.parametrize("where", ["s3://sounds/my data/train/9.tar", "s3://nobucket/0.tar"])
def test_what_is_not_there_is_said(policy, where):
    with at_most(20), pytest.raises(DataError, match=f"{where}: .*(is not there|does not exist)") as error:
        ShardReader(policy).read(Shard(where, "", 1), 0)
    assert "SECRETKEY" not in str(error.value) and "\n" not in str(error.value)


def test_a_server_that_is_gone_ends_in_time(policy, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with at_most(40), pytest.raises(DataError, match=r"0\.tar: .*(connect|stalled).*2 attempts"):
        ShardReader(policy).read(Shard(f"{PREFIX}/0.tar", "", 1), 0)


def test_without_s3fs_one_line_names_the_package(tmp_path):
    program = (
        "import sys\n"
        "sys.modules['s3fs'] = None\n"
        "from clap_zero.data.shards import Shard, ShardReader\n"
        "from clap_zero.errors import DataError\n"
        "try: ShardReader().read(Shard('s3://sounds/0.tar', '', 1), 0)\n"
        "except DataError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.startswith(
        "s3://sounds/0.tar: needs a package that is not installed: pip install 'clap-zero[s3]'"
    ), done
    assert done.stdout.count("\n") == 1
