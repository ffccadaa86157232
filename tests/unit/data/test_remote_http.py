"""Reading shards by http from a real server that misbehaves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from clap_zero.data.members import BadSampleError
from clap_zero.data.places import ReadPolicy
from clap_zero.data.remote import Remote
from clap_zero.data.shards import Shard, ShardReader
from clap_zero.data.source_errors import SourceError
from clap_zero.data.sources import exists, list_names, read_text
from clap_zero.data.spans import SpansRef
from clap_zero.errors import DataError
from tests.unit.data.http_server import Fault, Site, at_most, http_server
from tests.unit.data.shard_files import pair, write_split, write_tar
from tests.unit.data.span_files import write_spans

ROOT = Path(__file__).resolve().parents[3]
NUM = 6


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> Path:
    directory = write_split(tmp_path_factory.mktemp("http") / "train", [NUM, NUM])
    write_spans(directory)
    return directory


@pytest.fixture
def site(split) -> Iterator[Site]:
    with http_server() as site:
        site.add(split, "/train/")
        yield site


@pytest.fixture
def policy(tmp_path) -> ReadPolicy:
    return ReadPolicy(cache_dir=str(tmp_path / "cache"), timeout_s=1, retries=2)


def shard(site: Site, number: int = 0, *, spans: bool = False, query: str = "") -> Shard:
    ref = SpansRef(f"{site.url}/train/spans.npy{query}", NUM * number, 2 * NUM) if spans else None
    return Shard(f"{site.url}/train/{number}.tar{query}", f"train/{number}.tar", NUM, 0, ref)


def read_all(reader: ShardReader, shard: Shard) -> list:
    """All samples of a shard; None for bad ones."""
    found = []
    for sample_id in range(shard.num_samples):
        try:
            found.append(reader.read(shard, sample_id))
        except BadSampleError:
            found.append(None)
    reader.close()
    return found


def expected(split: Path, number: int = 0) -> list:
    return read_all(ShardReader(), Shard(str(split / f"{number}.tar"), "", NUM))


@pytest.mark.parametrize("spans", [False, True])
@pytest.mark.parametrize(
    "fault",
    [
        Fault(),
        Fault(status=500, times=2),
        Fault(status=429, times=1),
        Fault(get_only=True),
        Fault(no_ranges=True),
        Fault(no_length=True),
        Fault(redirect="/moved/0.tar"),
    ],
    ids=["good", "500 twice", "429 once", "no HEAD", "no ranges", "no length", "redirect"],
)
def test_what_can_be_read_in_the_end_is_read_whole(site, split, policy, fault, spans):
    site.faults["/train/0.tar"] = fault
    site.files["/moved/0.tar"] = site.files["/train/0.tar"]
    reader = ShardReader(policy)
    with at_most(10):
        assert read_all(reader, shard(site, spans=spans)) == expected(split)


@pytest.mark.parametrize("missing", ["skip", "stop"])
@pytest.mark.parametrize("spans", [False, True])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(status=500), "the server answers 500"),
        (Fault(stall_after=2_000), "stalled"),
        (Fault(stall_after=-1), "stalled"),
        (Fault(cut_after=1_000), "ended early|not enough data|payload"),
        (Fault(trickle_s=0.02), "stalled"),
        (Fault(status=404), "is not there"),
        (Fault(status=403), "access is denied .*credentials"),
    ],
    ids=["500", "stall in the middle", "no answer", "ends early", "trickle", "404", "403"],
)
def test_what_cannot_be_read_is_named_and_passed_over_or_fatal(site, policy, fault, words, spans, missing):
    site.faults["/train/0.tar"] = fault
    reader = ShardReader(replace(policy, missing=missing, retries=1, timeout_s=0.5))
    wanted = shard(site, spans=spans)
    with at_most(8):
        if missing == "stop":
            with pytest.raises(DataError, match=rf"/train/0\.tar: .*({words})") as error:
                reader.read(wanted, 0)
            assert "\n" not in str(error.value) and "--data.missing_shards skip" in str(error.value)
        else:
            for sample_id in range(NUM):  # the first takes all attempts, the others fail at once
                with pytest.raises(BadSampleError, match=words):
                    reader.read(wanted, sample_id)
            notes = reader.take_notes()
            assert len(notes) == 1 and "/train/0.tar cannot be had" in notes[0]
            assert reader.read(shard(site, 1, spans=spans), 0).key == f"s{NUM:04d}"
    reader.close()


def test_a_length_that_is_too_long_is_an_early_end(site, policy):
    site.faults["/train/0.tar"] = Fault(announced=4_000)
    with at_most(8), pytest.raises(DataError, match=r"0\.tar: .*(early|not enough data|payload)"):
        ShardReader(policy).read(shard(site), 0)


def test_a_length_that_is_too_short_gives_a_shard_cut_short(site, policy):
    site.faults["/train/0.tar"] = Fault(announced=-10_000)
    reader = ShardReader(policy)
    found = read_all(reader, shard(site))
    assert found[0] is not None and found[-1] is None
    assert any("cut short" in note for note in reader.take_notes())


def test_a_sample_costs_one_request_and_its_own_bytes(site, policy):
    reader = ShardReader(policy)
    wanted = shard(site, spans=True)
    raws = [reader.read(wanted, sample_id) for sample_id in (4, 1)]
    sizes = [len(raw.audio) + sum(map(len, raw.texts.values())) for raw in raws]
    assert site.requests["GET", "/train/0.tar"] == 2 and site.requests["HEAD", "/train/0.tar"] == 0
    assert sum(sizes) < site.sent["/train/0.tar"] < sum(sizes) + 2 * 4 * 512
    assert site.requests["GET", "/train/spans.npy"] == 1
    reader.close()


def test_hints_are_fetched_in_the_background(site, split, policy):
    reader = ShardReader(policy)
    for sample_id in range(NUM):
        reader.prefetch(shard(site, spans=True), sample_id)
        reader.prefetch(shard(site, 1), sample_id)
    assert read_all(reader, shard(site, spans=True)) == expected(split)
    assert read_all(reader, shard(site, 1)) == expected(split, 1)
    assert site.requests["GET", "/train/0.tar"] == NUM  # once each: the hint or the read, not both
    assert site.requests["GET", "/train/1.tar"] == 1


def test_the_time_that_a_reader_waits_is_counted(site, policy):
    site.faults["/train/0.tar"] = Fault(status=500, times=2)  # HEAD and GET
    reader = ShardReader(policy)
    assert reader.seconds == {"download": 0.0}
    reader.read(shard(site), 0)
    assert 0.3 < reader.seconds["download"] < 5  # the pause before the second attempt
    reader.close()


def test_a_shard_that_was_hinted_and_fails_is_named_at_the_read(site, policy):
    site.faults["/train/0.tar"] = Fault(status=404)
    reader = ShardReader(replace(policy, missing="skip"))
    for spans in (True, False):
        reader.prefetch(shard(site, spans=spans), 3)
        with pytest.raises(BadSampleError, match="is not there"):
            reader.read(shard(site, spans=spans), 3)
    reader.close()


@pytest.mark.parametrize("fault", [Fault(no_ranges=True), Fault(first_range=True)])
def test_a_server_without_ranges_is_named_once_as_what_it_is(site, split, policy, fault):
    site.faults["/train/0.tar"] = site.faults["/train/1.tar"] = fault
    reader = ShardReader(policy)
    assert read_all(reader, shard(site, spans=True)) == expected(split)
    (note,) = reader.take_notes()
    assert note.startswith("http://") and "gives whole files only" in note and "spans.npy" not in note
    reader.close()


def test_a_redirection_without_end_is_said_without_its_address(site, policy):
    site.faults["/train/0.tar"] = Fault(redirect="/train/0.tar?signature=secret")
    with pytest.raises(DataError, match="0.tar: redirects again and again") as caught:
        exists(f"{site.url}/train/0.tar", policy)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("spans", ["stale", "short", "junk", "absent"])
def test_spans_that_do_not_fit_cost_a_note_and_no_sample(site, split, policy, tmp_path, spans):
    table = site.files["/train/spans.npy"]
    if spans == "stale":  # the shard was written anew, with other sizes
        members = [member for number in range(NUM) for member in pair(f"s{number:04d}", number, seconds=0.07)]
        site.files["/train/0.tar"] = write_tar(tmp_path / "0.tar", members).read_bytes()
    elif spans == "absent":
        del site.files["/train/spans.npy"]
    else:
        site.files["/train/spans.npy"] = table[:-20] if spans == "short" else b"junk" * 99
    reader = ShardReader(policy)
    found = read_all(reader, shard(site, spans=True))
    assert [raw.key for raw in found] == [f"s{number:04d}" for number in range(NUM)]
    notes = reader.take_notes()
    assert len(notes) == 1 and "spans.npy cannot be used" in notes[0]


def test_a_shard_that_has_changed_is_downloaded_again(site, policy, tmp_path):
    assert ShardReader(policy).read(shard(site), 0).key == "s0000"
    site.files["/train/0.tar"] = write_tar(tmp_path / "0.tar", [*pair("other", 1, seconds=0.3)]).read_bytes()
    assert ShardReader(policy).read(shard(site), 0).key == "other"


def test_credentials_are_used_and_never_shown(site, policy, tmp_path, caplog):
    query = "?X-Amz-Signature=SECRET&sig=SECRET"
    base = site.url.replace("http://", "http://user:SECRET@")
    wanted = Shard(f"{base}/train/0.tar{query}", "train/0.tar", NUM + 1)
    reader = ShardReader(policy)
    assert reader.read(wanted, 0).key == "s0000"
    assert any(user.startswith("Basic ") for user in site.users)
    said = [*reader.take_notes(), *(path.name for path in (tmp_path / "cache").rglob("*"))]
    for status in (404, 403, 500):
        site.faults["/train/1.tar"] = Fault(status=status)
        with pytest.raises(DataError) as error:
            ShardReader(replace(policy, retries=0)).read(Shard(f"{base}/train/1.tar{query}", "", NUM), 0)
        said.append(str(error.value))
    site.faults["/train/1.tar"] = Fault(stall_after=0)
    with pytest.raises(DataError) as error:
        read_text(f"{base}/train/1.tar{query}", replace(policy, retries=0))
    text = "\n".join([*said, str(error.value), caplog.text])
    assert "SECRET" not in text and "user" not in text and "/train/1.tar" in text


def test_small_files_and_what_is_there(site, policy):
    assert read_text(f"{site.url}/train/sizes.json", policy) == '{"0.tar": 6, "1.tar": 6}'
    assert exists(f"{site.url}/train/0.tar", policy) and not exists(f"{site.url}/train/7.tar", policy)
    site.files["/train/"] = b'<a href="0.tar">0.tar</a> <a href="1.tar?x=1">'
    site.faults["/train/0.tar"] = Fault(status=500)
    with pytest.raises(DataError, match=r"0\.tar: the server answers 500"):
        exists(f"{site.url}/train/0.tar", policy)
    assert list_names(f"{site.url}/nothing/", policy) == []


def test_names_with_spaces_and_other_letters(site, policy):
    site.files["/my%20data/n%C3%A4%20(1)%20%25.tar"] = site.files["/train/0.tar"]
    wanted = Shard(f"{site.url}/my data/nä (1) %25.tar", "my data/nä (1) %.tar", NUM)
    assert ShardReader(policy).read(wanted, 0).key == "s0000"


def test_a_place_that_nobody_knows_is_said(policy):
    with pytest.raises(DataError, match=r"foo://bucket/0\.tar: Protocol not known"):
        ShardReader(policy).read(Shard("foo://bucket/0.tar", "", 1), 0)


def test_nobody_listening_is_a_source_that_fails(policy):
    with at_most(8), pytest.raises(DataError, match=r"127\.0\.0\.1:9/0\.tar: .*3 attempts"):
        ShardReader(policy).read(Shard("http://127.0.0.1:9/0.tar", "", 1), 0)


def test_a_host_that_is_down_is_not_asked_with_all_attempts_for_each_shard(site, policy):
    for number in range(12):
        site.faults[f"/down/{number}.tar"] = Fault(status=503)
    reader = ShardReader(replace(policy, missing="skip", retries=1))
    for number in range(12):
        with pytest.raises(BadSampleError):
            reader.read(Shard(f"{site.url}/down/{number}.tar", "", 1), 0)
    asked = [site.requests["HEAD", f"/down/{number}.tar"] for number in range(12)]
    assert asked[:2] == [2, 2] and asked[2:] == [1] * 10
    site.faults.clear()
    assert reader.read(shard(site), 0).key == "s0000"
    reader.close()


@pytest.mark.parametrize("fault", [Fault(), Fault(stall_after=100)], ids=["idle", "stalled"])
def test_a_program_ends_though_threads_still_read(site, policy, fault, tmp_path):
    site.faults["/train/0.tar"] = fault
    program = (
        "import sys, time\n"
        "from clap_zero.data.shards import Shard, ShardReader\n"
        "from clap_zero.data.places import ReadPolicy\n"
        "reader = ShardReader(ReadPolicy(cache_dir=sys.argv[2], timeout_s=60))\n"
        "shard = Shard(sys.argv[1], '', 6)\n"
        "reader.prefetch(shard, 0)\n"
        "time.sleep(1.5)\n"
        "print('end', flush=True)\n"
    )
    command = [sys.executable, "-c", program, shard(site).path, str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=20, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_fsspec_is_loaded_for_remote_places_only(split):
    program = (
        "import sys\n"
        "from clap_zero.data.shards import Shard, ShardReader\n"
        "print(ShardReader().read(Shard(sys.argv[1], '', 6), 0).key, 'fsspec' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(split / "0.tar")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout == "s0000 False\n", done.stderr


def test_a_source_that_sends_more_than_it_announced_fails_as_a_source(site, policy, tmp_path):
    """It is not the disk that is full."""
    remote, size = Remote(policy), len(site.files["/train/0.tar"])
    with pytest.raises(SourceError, match=rf"more than the {size - 100} bytes that it announced"):
        remote.fetch(f"{site.url}/train/0.tar", tmp_path / "x", size_bytes=size - 100, max_bytes=size - 100)
    assert site.requests["GET", "/train/0.tar"] == 1 + policy.retries


def test_what_trickles_has_an_end_by_the_clock(site, policy):
    site.faults["/train/0.tar"] = Fault(trickle_s=0.001)
    patient = replace(policy, timeout_s=30, fetch_s=1, retries=3)
    with at_most(6), pytest.raises(DataError, match=r"/train/0\.tar: .*was not done in time"):
        read_all(ShardReader(patient), shard(site))


class Blobs(MemoryFileSystem):
    """As hf:// tells versions: by the id of the blob."""

    protocol = "blobs"
    version = "1"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("blobs://", "memory://"))

    def info(self, path, **options):
        found = super().info(path, **options)
        return {"name": found["name"], "size": found["size"], "type": "file", "blob_id": self.version}


def test_versions_are_told_by_the_ids_of_blobs(policy, monkeypatch):
    fsspec.register_implementation("blobs", Blobs, clobber=True)
    Blobs().pipe_file("/a.tar", b"x")
    first = Remote(policy).info("blobs://a.tar")
    monkeypatch.setattr(Blobs, "version", "2")
    assert Remote(policy).info("blobs://a.tar").version != first.version
