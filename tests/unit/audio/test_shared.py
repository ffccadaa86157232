from __future__ import annotations

import gc
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from clap_zero.audio import shared
from clap_zero.data.processes import forkserver_context, starting_workers

SHAPE = (3, 50_000)


def send(shapes, requests, answers) -> None:
    """A worker: for each request an array full of its number, and how many segments the worker has."""
    for number, shape in enumerate(shapes):
        requests.get()
        array = shared.empty(shape, np.dtype(np.int16))
        array[...] = number
        answers.put((shared.outgoing(torch.from_numpy(array)), len(shared._segments)))
    requests.get()


@pytest.fixture
def worker():
    """Starts a worker for a list of shapes; gives a function that asks for the next tensor."""
    context = forkserver_context()
    started = []

    def start(shapes):
        requests, answers = context.Queue(), context.Queue()
        process = context.Process(target=send, args=(shapes, requests, answers), daemon=True)
        with starting_workers():  # the fork server may be the first of this process
            process.start()
        started.append((process, requests))

        def ask():
            requests.put(None)
            sent, num_segments = answers.get(timeout=60)
            assert isinstance(sent, shared.SharedTensor)
            return sent.open(), num_segments

        return ask

    yield start
    for process, requests in started:
        requests.put(None)
        process.join(10)


def test_a_segment_is_used_again_when_the_tensor_is_gone(worker):
    ask = worker([SHAPE] * 6)
    for number in range(6):
        tensor, num_segments = ask()
        assert num_segments == 1
        assert tensor.shape == SHAPE and tensor.dtype == torch.int16 and bool((tensor == number).all())
        del tensor


def test_what_is_kept_is_never_written_again(worker):
    ask = worker([SHAPE] * 4)
    kept = [ask() for _ in range(4)]
    assert [num_segments for _, num_segments in kept] == [1, 2, 3, 4]
    assert [int(tensor.min()) for tensor, _ in kept] == [int(tensor.max()) for tensor, _ in kept] == [0, 1, 2, 3]


@pytest.mark.parametrize("view", [lambda t: t[1], lambda t: t.numpy()[2], lambda t: t.flatten().split(7)[3]])
def test_a_view_keeps_the_memory(worker, view):
    ask = worker([SHAPE] * 3)
    tensor, _ = ask()
    part = view(tensor)
    del tensor
    gc.collect()
    other, num_segments = ask()
    assert num_segments == 2 and int(part.max()) == 0 and int(other.min()) == 1
    del part
    _, num_segments = ask()
    assert num_segments == 2


def test_larger_batches_take_the_place_of_smaller_segments(worker):
    ask = worker([(1000, 200), (1000, 201), (5000, 200), (900, 200)])
    counts = []
    for _ in range(4):
        tensor, num_segments = ask()
        counts.append((tuple(tensor.shape), num_segments))
        del tensor
    # The second fits into the room that the first left; the third replaces it; the fourth uses the large one.
    assert counts == [((1000, 200), 1), ((1000, 201), 1), ((5000, 200), 1), ((900, 200), 1)]


def test_descriptors_do_not_pile_up(worker):
    ask = worker([SHAPE] * 20)
    ask()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(19):
        ask()
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1


def test_what_is_never_sent_leaves_its_segment():
    before = len(shared._segments)
    for _ in range(5):
        shared.empty(SHAPE, np.dtype(np.int16))
    assert len(shared._segments) == before + 1


@pytest.mark.parametrize("shape", [(), (5,), (3, 0), SHAPE])
def test_other_tensors_arrive_as_they_are(shape):
    tensor = torch.ones(shape, dtype=torch.int64)
    arrived = shared.incoming(pickle.loads(pickle.dumps(shared.outgoing(tensor))))
    assert arrived.dtype == tensor.dtype and torch.equal(arrived, tensor)


def test_a_large_tensor_of_other_memory_travels_in_a_segment():
    tensor = torch.arange(2 * shared.SMALL_BYTES, dtype=torch.int16).reshape(2, -1).t()
    out = shared.outgoing(tensor)
    assert isinstance(out, shared.SharedTensor)
    assert torch.equal(shared.incoming(pickle.loads(pickle.dumps(out))), tensor)


def test_small_arrays_take_no_segment():
    before = len(shared._segments)
    kept = [shared.empty((10,), np.dtype(np.int16)) for _ in range(5)]
    assert len(shared._segments) == before and len(kept) == 5


def test_an_array_that_outlives_its_use_frees_nothing(monkeypatch):
    """A generator still holds the last batch when the rank has freed it and the next one takes its memory."""
    monkeypatch.setattr(shared, "_segments", {})
    monkeypatch.setattr(shared._Segment, "send", lambda self: setattr(self, "_sent", True))
    first = shared.empty(SHAPE, np.dtype(np.int16))
    (segment,) = shared._segments.values()
    shared.outgoing(torch.from_numpy(first))
    segment._mapping[0] = shared._FREE  # as the rank does
    second = shared.empty(SHAPE, np.dtype(np.int16))
    assert np.shares_memory(first, second)
    second[...] = 2
    del first
    gc.collect()
    third = shared.empty(SHAPE, np.dtype(np.int16))
    assert not np.shares_memory(second, third)
    third[...] = 3
    assert bool((second == 2).all())
