"""Shared memory of the native engine: how it is taken, and what is too much."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest
import torch

import ferrodist as fd
from ferrodist.backends.native import is_native_available
from ferrodist.backends.native.binding import load
from ferrodist.testing import run_ranks

pytestmark = pytest.mark.skipif(
    not is_native_available(), reason="this installation was built without the native engine"
)

_LARGE = 256 << 20
_WRAPPED = 4096 * ((2**52 + 2) // 3)  # three of it are 8192 more than 2**64
_SLOTS = 3 * 64 * 1024  # a rank's


def _open_rank(descriptor, rank, num_ranks):
    """Return the communicator of a rank in memory of `create_segment`."""
    return load().Communicator(descriptor, rank, [0] * num_ranks, [], num_ranks, num_ranks, _SLOTS // 3, False, 50)


@contextlib.contextmanager
def _memory(create, *arguments):
    descriptor = create(*arguments)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _communicator():
    """A group of one rank."""
    with _memory(load().create_segment, 1, 1, _SLOTS // 3, False, 50) as segment:
        yield _open_rank(segment, 0, 1)


def _pages_bytes(descriptor):
    return os.fstat(descriptor).st_blocks * 512


def _check_taken(descriptor, start, size, before):
    """Nothing but the pages of a range of bytes was taken since there were ``before`` bytes."""
    assert _pages_bytes(descriptor) == before + size
    os.posix_fallocate(descriptor, start, size)
    assert _pages_bytes(descriptor) == before + size


@pytest.fixture
def ticks():
    """SIGALRM every millisecond; returns how to say what it does."""
    previous = signal.getsignal(signal.SIGALRM)

    def start(handler):
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)

    yield start
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, previous)


def test_signals_do_not_end_the_taking_of_pages(ticks):
    """Memory that takes many ticks of a timer to make is made all the same."""
    num_ticks = 0

    def count(*_):
        nonlocal num_ticks
        num_ticks += 1

    with _communicator() as communicator, _memory(load().create_arena, _LARGE, 1) as descriptor:
        ticks(count)
        communicator.map_arena(descriptor, 1, _LARGE, _LARGE)
        assert _pages_bytes(descriptor) == _LARGE
        assert num_ticks


def test_an_interruption_ends_the_taking_of_pages(ticks):
    """Ctrl-C does, and leaves no mapping."""

    class Interruption(Exception):
        pass

    def interrupt(*_):
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        raise Interruption

    with _communicator() as communicator, _memory(load().create_arena, 4 * _LARGE, 1) as descriptor:
        before = Path("/proc/self/maps").read_text().count("ferrodist-symmetric")
        with pytest.raises(Interruption):  # noqa: PT012 - it may come at once
            ticks(interrupt)
            communicator.map_arena(descriptor, 1, 4 * _LARGE, 4 * _LARGE)
        assert _pages_bytes(descriptor) < 4 * _LARGE
        assert Path("/proc/self/maps").read_text().count("ferrodist-symmetric") == before


def test_other_threads_run_while_pages_are_taken():
    """The interpreter is free meanwhile, for a thread that it would never be taken away for."""
    go, has_run = threading.Event(), threading.Event()

    def run():
        go.wait()
        has_run.set()

    thread = threading.Thread(target=run)
    thread.start()
    interval = sys.getswitchinterval()
    with _communicator() as communicator, _memory(load().create_arena, _LARGE, 1) as descriptor:
        sys.setswitchinterval(1000.0)
        try:
            go.set()
            communicator.map_arena(descriptor, 1, _LARGE, _LARGE)
            did_run = has_run.is_set()
        finally:
            sys.setswitchinterval(interval)
            thread.join()
    assert did_run


def test_each_rank_takes_the_pages_of_its_slots():
    """The system puts a page on the node of the rank that takes it: the creator takes none of the ranks' slots."""
    with _memory(load().create_segment, 2, 2, _SLOTS // 3, False, 50) as descriptor:
        size, common = os.fstat(descriptor).st_size, _pages_bytes(descriptor)
        assert common == size - 2 * _SLOTS
        ranks = [_open_rank(descriptor, 1, 2)]
        _check_taken(descriptor, size - _SLOTS, _SLOTS, common)
        ranks.append(_open_rank(descriptor, 0, 2))
        _check_taken(descriptor, common, _SLOTS, common + _SLOTS)


def test_ranks_of_two_hosts_take_their_own_slots():
    """On each host the indexes follow rank order: here rank 2 is the second one of its host."""
    with _memory(load().create_segment, 2, 3, _SLOTS // 3, False, 50) as descriptor:
        size, common = os.fstat(descriptor).st_size, _pages_bytes(descriptor)
        own, peer = socket.socketpair()
        with peer:
            links = [-1, own.detach(), -1]
            rank = load().Communicator(descriptor, 2, [0, 1, 0], links, 2, 3, _SLOTS // 3, False, 50)
            _check_taken(descriptor, size - _SLOTS, _SLOTS, common)
            del rank


def test_each_rank_takes_the_pages_of_the_rings_that_it_sends_by():
    """The creator takes those of no ring; a rank those of its own, to all others."""
    with _memory(load().create_rings, 2) as descriptor:
        size, common = os.fstat(descriptor).st_size, _pages_bytes(descriptor)
        rings = (size - common) // 2
        assert rings == 1 << 20  # two of 512 KiB
        engine = load().P2PEngine(
            rank=1,
            eager_bytes=1024,
            max_unexpected_bytes=1 << 20,
            is_oversubscribed=False,
            spin_micros=50,
            memory=descriptor,
            num_local=2,
            local_indexes=[0, 1],
            sockets=[-1, -1],
            on_event=lambda *_: None,
        )
        _check_taken(descriptor, size - rings, rings, common)
        engine.close()


def test_each_rank_takes_the_pages_of_its_symmetric_memory():
    """A rank's part of an arena, and no other."""
    stride = 8192

    def program(group):
        group.barrier()
        with _memory(load().create_arena, stride, 3) as descriptor:
            assert _pages_bytes(descriptor) == 0
            tensor = group.engine("cpu").communicator.map_arena(descriptor, 1, stride, stride)
            _check_taken(descriptor, group.rank * stride, stride, 0)
            del tensor

    run_ranks(program, 3, backend="native-threads")


@pytest.mark.parametrize("backend", ["simulated", "native-threads"])
@pytest.mark.parametrize("shape", [(2**62,), (2**40, 2**40), (_WRAPPED,)], ids=str)
def test_shapes_beyond_all_memory_are_refused(backend, shape):
    """On all ranks, before anything is sent; the group is still good."""

    def program(group):
        with pytest.raises(ValueError, match=r"bytes; those of the 3 ranks .* pass a smaller shape"):
            fd.empty_symmetric(shape)
        assert torch.equal(fd.allreduce(torch.ones(1)), torch.full((1,), 3.0))

    run_ranks(program, 3, backend=backend)


def test_the_engine_counts_without_wrapping():
    """A size that wraps around is an error there too, and so is a tensor that is larger than its memory."""
    with pytest.raises(OSError, match="size of symmetric memory") as caught:
        os.close(load().create_arena(_WRAPPED, 3))
    assert caught.value.errno == errno.EOVERFLOW
    with pytest.raises(OSError, match="size of shared memory"):
        os.close(load().create_arena(1 << 63, 1))

    def program(group):
        group.barrier()
        descriptor = load().create_arena(4096, 3)
        try:
            for stride, size in ((_WRAPPED, 8192), (4096, 4097)):
                with pytest.raises(OSError, match="size of") as caught:
                    group.engine("cpu").communicator.map_arena(descriptor, 1, stride, size)
                assert caught.value.errno == errno.EOVERFLOW
        finally:
            os.close(descriptor)

    run_ranks(program, 3, backend="native-threads")
