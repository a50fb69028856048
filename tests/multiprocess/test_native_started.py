"""Started collectives of the native engine among signals, forks, threads and garbage."""

from __future__ import annotations

import gc
import os
import random
import select
import signal
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, NoReturn

import pytest
import torch
from forked_group import ForkedGroup

import ferrodist as fd
from ferrodist.backends.native import NativeBackend, is_native_available
from ferrodist.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(
    not is_native_available(), reason="this installation was built without the native engine"
)

_LATE_SECONDS = 2.0  # the ranks' processors are shared with others


def _run(program: Callable[[NativeBackend, ForkedGroup], object], *, timeout: float = 20.0) -> dict[int, object]:
    fork = ForkedGroup(2, program, timeout=timeout, kind=NativeBackend)
    try:
        return fork.results({0, 1})
    finally:
        fork.end()


def _interrupt_in(seconds: float) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started without
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


def _outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except (KeyboardInterrupt, fd.DistributedError) as error:
        return type(error).__name__
    return ""


def test_a_handler_that_raises_leaves_the_tensors_to_the_engine() -> None:
    """Wherever a signal's handler raises, the engine never writes what belongs to others by then."""

    class Stroke(Exception):
        pass

    def strike(*_: object) -> NoReturn:
        raise Stroke

    def program(group: NativeBackend, _: ForkedGroup) -> int:
        if group.rank == 1:
            group.recv(bytearray(1), 0)
            assert _outcome(lambda: [fd.allreduce(torch.full((1000,), 100.0)) for _ in range(1_000_000)])
            return 0
        source = torch.ones(1000)
        handles = [fd.async_allreduce(source)]  # starts a thread, in which Python must not be interrupted
        enough = Deadline(1.5)
        signal.signal(signal.SIGALRM, strike)
        while len(handles) < 2_000 and not enough.expired:  # on busy processors each may take a millisecond
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-5, 3e-4))
                for _ in range(200):  # and no more: where the collector runs, what the handler raises is lost
                    handles.append(fd.async_allreduce(source))
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Stroke:
                pass
        mine = [torch.full((1000,), 5.0) for _ in range(2000)]
        group.send(b"g", 1)
        handles[-1].wait()
        group.close()
        return sum(bool((tensor != 5).any()) for tensor in mine)

    assert _run(program) == {0: 0, 1: 0}


def test_handles_in_cycles_are_collected_anywhere() -> None:
    """The garbage collector may free a handle while another is made or freed."""

    def program(group: NativeBackend, _: ForkedGroup) -> bool:
        fd.barrier()
        if group.rank == 1:
            group.recv(bytearray(1), 0)
            for _ in range(800):
                fd.allreduce(torch.ones(2))
            fd.barrier()
            return True
        thresholds = gc.get_threshold()
        for i in range(400):
            gc.set_threshold(1_000_000)
            handle = fd.async_allreduce(torch.ones(2))
            handle.me = handle  # type: ignore[attr-defined]
            del handle
            handle = fd.async_allreduce(torch.ones(2))
            gc.set_threshold(1 + i % 10)
            del handle
        gc.set_threshold(*thresholds)
        group.send(b"g", 1)
        fd.barrier()
        return True

    assert _run(program) == {0: True, 1: True}


def test_the_tensors_of_a_dropped_handle_are_freed() -> None:
    """The tensors of a collective that nobody waits for go with the next call or with the group."""

    def program(group: NativeBackend, _: ForkedGroup) -> bool:
        tensor = torch.ones(100_000)
        gone = weakref.ref(tensor)
        fd.async_allreduce(tensor, out=tensor)
        del tensor
        fd.barrier()
        fd.async_allreduce(torch.ones(1)).wait()
        fd.async_allreduce(torch.ones(1)).wait()
        return gone() is None

    assert _run(program) == {0: True, 1: True}


def test_ctrl_c_in_a_wait_that_runs_the_collective() -> None:
    """It raises KeyboardInterrupt there, whichever collective was under way, and says on all ranks who left.

    On a busy machine the engine's thread may come first and run the collective: then it goes on, and the test ends it.
    """

    def program(group: NativeBackend, _: ForkedGroup) -> tuple[str, ...]:
        for _ in range(20):  # so that the engine's thread looks by itself, and later than who waits
            fd.async_allreduce(torch.ones(2)).wait()
        if group.rank == 1:
            _outcome(lambda: group.recv(bytearray(1), 0, timeout=10))
            return (_outcome(fd.barrier), str(group.failure))
        _interrupt_in(0.3)
        first, second = (fd.async_allreduce(torch.ones(2)) for _ in range(2))
        outcomes = [_outcome(second.wait)]
        if group.failure is None:
            group.abort("rank 0 left, after a KeyboardInterrupt")
        outcomes += [_outcome(second.wait), _outcome(first.wait)]
        return (*outcomes, str(group.failure))

    results = _run(program)
    for result in results.values():
        assert isinstance(result, tuple)
        assert "left" in result[-1], results
        assert "KeyboardInterrupt" in result[-1], results
    assert results[0][:-1] == ("KeyboardInterrupt", "GroupAbortedError", "GroupAbortedError"), results


def test_ctrl_c_while_a_call_waits_for_its_turn() -> None:
    """A blocking call behind a started one that does not end can be interrupted."""

    def program(group: NativeBackend, _: ForkedGroup) -> tuple[str, float]:
        if group.rank == 1:
            return _outcome(lambda: group.recv(bytearray(1), 0, timeout=10)), 0.0
        handle = fd.async_allreduce(torch.ones(1 << 20))
        _interrupt_in(0.3)
        began = time.monotonic()
        outcome = _outcome(fd.barrier)
        took = time.monotonic() - began
        del handle
        return outcome, took

    results = _run(program)
    assert results[0][0] == "KeyboardInterrupt"  # type: ignore[index]
    assert results[0][1] < _LATE_SECONDS, results  # type: ignore[index]


def test_ctrl_c_after_a_handler_that_communicates() -> None:
    """A signal's handler may run a collective of another group inside of a wait, which stays interruptible."""

    def program(group: NativeBackend, _: ForkedGroup) -> tuple[str, float]:
        fd.barrier()
        if group.rank == 1:
            return _outcome(lambda: group.recv(bytearray(1), 0, timeout=10)), 0.0
        alone = fd.new_group([0])
        fd.barrier(alone)
        signal.signal(signal.SIGUSR1, lambda *_: fd.barrier(alone))
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        _interrupt_in(0.5)
        began = time.monotonic()
        return _outcome(fd.barrier), time.monotonic() - began

    results = _run(program)
    assert results[0][0] == "KeyboardInterrupt"  # type: ignore[index]
    assert results[0][1] < _LATE_SECONDS, results  # type: ignore[index]


@pytest.mark.parametrize("limits", [(15.0, None), (15.0, 1.0)], ids=["long-then-short-way", "long-way"])
def test_time_counts_from_the_turn(limits: tuple[float | None, float | None]) -> None:
    """A started collective is not late for what those before it took."""

    def program(group: NativeBackend, _: ForkedGroup) -> bool:
        group.timeout = 1.5
        fd.barrier()
        if group.rank == 1:
            threading.Event().wait(2.5)  # longer than the group's time: what is tested is that it passes
        handles = [fd.async_allreduce(torch.ones(3), timeout=limit) for limit in limits]
        return all(handle.wait().tolist() == [2.0] * 3 for handle in handles)

    assert _run(program) == {0: True, 1: True}


def test_a_forked_child_drops_a_group() -> None:
    """Neither the engine's thread nor waits of the parent keep a child from freeing what it has copies of."""

    def program(group: NativeBackend, _: ForkedGroup) -> int:
        sub = fd.new_group([0, 1])
        assert sub is not None
        fd.barrier(sub)
        handle = fd.async_allreduce(torch.ones(2), group=sub)
        handle.wait()
        code = 0
        if group.rank == 0:
            child = os.fork()
            if child == 0:
                del handle, sub
                gc.collect()
                os._exit(7)
            code = _exit_code_of(child)
        fd.barrier()
        return code

    assert _run(program) == {0: 7, 1: 0}


def test_a_call_in_a_forked_child_fails_at_once() -> None:
    """A call in a child fails at once, also while a thread of the parent was in a collective."""

    def program(group: NativeBackend, _: ForkedGroup) -> int:
        fd.barrier()
        if group.rank == 1:
            group.recv(bytearray(1), 0)
            fd.barrier()
            return 0
        thread = threading.Thread(target=fd.barrier, args=(group,))
        thread.start()
        _wait_until_inside(thread)
        child = os.fork()
        if child == 0:
            began = time.monotonic()
            told = _outcome(fd.barrier) == "GroupClosedError"
            os._exit(7 if told and time.monotonic() - began < 1.0 else 1)
        code = _exit_code_of(child)
        group.send(b"g", 1)
        thread.join()
        return code

    assert _run(program) == {0: 7, 1: 0}


def _wait_until_inside(thread: threading.Thread) -> None:
    """Return when a thread is in a barrier, from where it goes straight into the engine."""
    frames: list[str] = []
    while "barrier" not in frames:
        frame = sys._current_frames()[thread.ident or 0]
        frames = [frame.f_code.co_name]


def _exit_code_of(child: int) -> int:
    """What a child ended with; -1 when it does not end, and then it is killed."""
    descriptor = os.pidfd_open(child)
    has_ended, _, _ = select.select([descriptor], [], [], 10.0)
    os.close(descriptor)
    if not has_ended:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if has_ended else -1
