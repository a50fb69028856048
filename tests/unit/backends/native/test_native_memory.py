"""Shared memory of the native engine: how it is taken, and what is too much."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading

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

    ticks(count)
    descriptor = load().create_arena(_LARGE, 1)
    assert os.fstat(descriptor).st_size == _LARGE
    assert num_ticks
    os.close(descriptor)


def test_an_interruption_ends_the_taking_of_pages(ticks):
    """Ctrl-C does, and leaves no descriptor."""

    class Interruption(Exception):
        pass

    def interrupt(*_):
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        raise Interruption

    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    with pytest.raises(Interruption):  # noqa: PT012 - it may come at once
        ticks(interrupt)
        os.close(load().create_arena(4 * _LARGE, 1))
    assert len(os.listdir("/proc/self/fd")) == len(before)  # noqa: PTH208


def test_other_threads_run_while_pages_are_taken():
    """The interpreter is free meanwhile, for a thread that it would never be taken away for."""
    go, has_run = threading.Event(), threading.Event()

    def run():
        go.wait()
        has_run.set()

    thread = threading.Thread(target=run)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        go.set()
        descriptor = load().create_arena(_LARGE, 1)
        did_run = has_run.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    os.close(descriptor)
    assert did_run


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
                    group.engine("cpu").compiled.map_arena(descriptor, 1, stride, size)
                assert caught.value.errno == errno.EOVERFLOW
        finally:
            os.close(descriptor)

    run_ranks(program, 3, backend="native-threads")
