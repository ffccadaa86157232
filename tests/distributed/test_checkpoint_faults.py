"""What goes wrong with a checkpoint reaches every rank as one error, and loses nothing."""

from __future__ import annotations

import os
import resource
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from clap_zero.checkpoint.store import CheckpointStore, step_name
from clap_zero.errors import CheckpointError
from clap_zero.testing import run_distributed
from tests.distributed.toy_engine import make_engine, masters, read_weights, state_at, train


def save_once(root: str, stage: int) -> str:
    from clap_zero.checkpoint.state import save

    engine = make_engine(stage, "fp32")
    train(engine, 0, 1)
    return str(save(engine, CheckpointStore(root), state_at(1, stage), companions={"tokenizer.json": b"{}"}))


def try_to_load(
    path: str, stage: int, precision: str = "fp32", width: int = 29, zero: dict[str, int] | None = None
) -> str:
    from clap_zero.checkpoint.state import load

    changes = {"zero_optimization": {"stage": stage} | zero} if zero else {}
    try:
        load(make_engine(stage, precision, width=width, **changes), Path(path))
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_state_that_cannot_be_converted_is_refused_on_all_ranks_with_the_way_out(tmp_path: Path) -> None:
    path = run_distributed(save_once, 2, str(tmp_path / "run" / "checkpoints"), 2)[0]
    messages = run_distributed(try_to_load, 2, path, 3, "fp32", 29, {"zero_hpz_partition_size": 2})
    assert messages[0] == messages[1] and "2 ranks, ZeRO stage 2, fp32 there; 2 ranks, ZeRO stage 3" in messages[0]
    assert "zero_hpz_partition_size keeps a second partition" in messages[0]
    assert f"`clap-zero export {tmp_path / 'run'} DIR`" in messages[0] and "--model.pretrained DIR" in messages[0]


def test_another_model_is_refused_on_all_ranks_with_the_difference(tmp_path: Path) -> None:
    path = run_distributed(save_once, 2, str(tmp_path), 1)[0]
    messages = run_distributed(try_to_load, 2, path, 1, "fp32", 31)
    assert messages[0] == messages[1] and "audio_config.hidden_size 29 there, 31 here" in messages[0]


@pytest.mark.parametrize(
    "victim", ["*optim_states.pt", "rank-00001.safetensors", "model-00001*", "tokenizer.json", "config.json"]
)
def test_a_damaged_checkpoint_is_refused_on_all_ranks(tmp_path: Path, victim: str) -> None:
    path = Path(run_distributed(save_once, 2, str(tmp_path), 1)[0])
    file = next(path.rglob(victim))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    messages = run_distributed(try_to_load, 2, str(path), 1)
    assert messages[0] == messages[1] and "another checksum" in messages[0] and file.name in messages[0]


def fail_on_a_rank(root: str, stage: int, full_rank: int, max_bytes: int) -> tuple[str, list[str], str]:
    """A file size limit on one rank stands in for its full disk: writes fail there half-way through a file."""
    from clap_zero.checkpoint.state import save
    from clap_zero.distributed.collectives import rank_and_size

    engine = make_engine(stage, "fp32")
    store = CheckpointStore(root)
    train(engine, 0, 1)
    save(engine, store, state_at(1, stage))
    train(engine, 1, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    message = ""
    try:
        if rank_and_size()[0] == full_rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, hard))
        save(engine, store, state_at(2, stage))
    except CheckpointError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    torch.distributed.barrier()
    left = sorted(entry.name for entry in Path(root).iterdir())
    torch.distributed.barrier()
    train(engine, 2, 1)
    return message, left, str(save(engine, store, state_at(3, stage)))


@pytest.mark.parametrize("stage, full_rank, max_bytes", [(2, 1, 100_000), (3, 0, 2000), (3, 0, 600_000), (0, 1, 500)])
def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path: Path, stage: int, full_rank: int, max_bytes: int) -> None:
    results = run_distributed(fail_on_a_rank, 2, str(tmp_path), stage, full_rank, max_bytes)
    for message, left, later in results:
        assert f"rank {full_rank}:" in message and "step 2" in message and "too large" in message
        assert left == ["latest", "step-00000001"]
        assert Path(later).name == "step-00000003"
    store = CheckpointStore(tmp_path)
    assert store.newest_complete() == Path(results[0][2]) and not store.rejected


def save_under_signals(root: str, stage: int, ranks: list[int]) -> tuple[int, list[str]]:
    """SIGTERM to some ranks, one after another from the first byte of a checkpoint to its last.

    Returns:
        How many came, and the weights that were not written as they are.
    """
    from clap_zero.checkpoint.state import save
    from clap_zero.distributed.collectives import rank_and_size

    engine, store = make_engine(stage, "fp32"), CheckpointStore(root)
    train(engine, 0, 1)
    came, is_written = [0], threading.Event()

    def send() -> None:
        while not is_written.wait(0.0005):
            os.kill(os.getpid(), signal.SIGTERM)

    def take(*_: object) -> None:
        came[0] += 1

    before = signal.signal(signal.SIGTERM, take)  # as the watchdog takes them: the run goes on to the end of its step
    sender = threading.Thread(target=send)
    try:
        if rank_and_size()[0] in ranks:
            sender.start()
        save(engine, store, state_at(1, stage))
    finally:
        is_written.set()
        if sender.ident is not None:
            sender.join()
        signal.signal(signal.SIGTERM, before)
    return came[0], [
        name for name, value in masters(engine).items() if not torch.equal(value, _saved(root, name, value))
    ]


@pytest.mark.parametrize("stage, ranks", [(2, [1]), (3, [0, 1])])
def test_sigterm_during_a_write_spoils_nothing(tmp_path: Path, stage: int, ranks: list[int]) -> None:
    results = run_distributed(save_under_signals, 2, str(tmp_path), stage, ranks)
    assert [rank for rank, (came, _) in enumerate(results) if came > 0] == ranks
    assert [wrong for _, wrong in results] == [[], []]
    store = CheckpointStore(tmp_path)
    assert store.newest_complete() == tmp_path / step_name(1) and not store.rejected
    assert run_distributed(try_to_load, 2, str(tmp_path / step_name(1)), stage) == ["", ""]


def save_the_same_step_twice(root: str) -> list[str]:
    from clap_zero.checkpoint.state import save

    engine = make_engine(1, "fp32")
    store = CheckpointStore(root)
    train(engine, 0, 1)
    save(engine, store, state_at(1, 1))
    train(engine, 1, 1)
    save(engine, store, state_at(1, 1))
    return [name for name, value in masters(engine).items() if not torch.equal(value, _saved(root, name, value))]


def _saved(root: str, name: str, like: Tensor) -> Tensor:
    return read_weights(Path(root) / step_name(1))[name].reshape(like.shape)


def test_the_same_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    assert run_distributed(save_the_same_step_twice, 2, str(tmp_path)) == [[], []]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step-00000001"]


def stream_in_small_buckets(root: str) -> bool:
    from clap_zero.checkpoint.masters import stream_masters
    from clap_zero.checkpoint.weights import write_weights

    engine = make_engine(3, "fp32", 0)
    train(engine, 0, 1)
    expected = masters(engine)
    same = all(torch.equal(value, expected[name]) for name, value in stream_masters(engine, bucket_elements=40))
    write_weights(engine, Path(root), max_file_bytes=1000)
    return same


def test_buckets_and_files_may_be_small(tmp_path: Path) -> None:
    assert all(run_distributed(stream_in_small_buckets, 2, str(tmp_path)))
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert set(read_weights(tmp_path)) >= {"embedding.weight", "head.bias", "norm.running_var"}
