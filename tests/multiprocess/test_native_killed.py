"""Promises 1 and 3 in the native engine: ranks killed or stopped anywhere in a collective are named in time."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from forked_group import ForkedGroup, Report, attempt, open_descriptors

import ferrodist as fd
from ferrodist.backends.native import NativeBackend, is_native_available
from ferrodist.backends.tags import Channel, channel_tag
from ferrodist.collectives.tensor_protocol import TensorHeader

if TYPE_CHECKING:
    from collections.abc import Callable

    Call = Callable[[NativeBackend], object]

pytestmark = pytest.mark.skipif(
    not is_native_available(), reason="this installation was built without the native engine"
)

_WORLD_SIZE = 3
_LIMIT_SECONDS = 1.0 + 2.0  # a second, and some for a machine that is busy with other tests
_DEADLINE_SECONDS = 0.5
_LATE_SECONDS = 2.0  # the ranks' processors are shared with others


def _full(rows: int = 1) -> torch.Tensor:
    return torch.ones(rows, 3_000_000 // rows)


_OPERATIONS: dict[str, Call] = {
    "small_allreduce": lambda _: fd.allreduce(torch.ones(2)),
    "allreduce": lambda _: fd.allreduce(_full()),
    "reduce": lambda _: fd.reduce(_full(), 1),
    "broadcast": lambda _: fd.broadcast(_full(), 2),
    "all_gather": lambda _: fd.all_gather(_full()),
    "all_gather_uneven": lambda group: fd.all_gather_uneven(torch.ones(group.rank + 1, 1_500_000)),
    "gather": lambda _: fd.gather(_full(), 0),
    "scatter": lambda group: fd.scatter(_full(3) if group.rank == 0 else None, 0),
    "reduce_scatter": lambda _: fd.reduce_scatter(_full(3)),
    "all_to_all": lambda _: fd.all_to_all(_full(3)),
    "barrier": lambda _: fd.barrier(),
    "async_allreduce": lambda _: [h.wait() for h in [fd.async_allreduce(_full()) for _ in range(3)]],
}


def _strike_soon(fork: ForkedGroup, number: int, seconds: float) -> None:
    """Send this process a signal from another thread, while the caller goes on."""
    threading.Timer(seconds, fork.strike, (number,)).start()


def _survive(group: NativeBackend, fork: ForkedGroup, call: Callable[[], object]) -> Report:
    report = attempt(group, call)
    again = attempt(group, lambda: fd.allreduce(torch.ones(2)), times=1)
    report.facts["again"] = (again.error, again.ranks, again.raised_at - again.started_at)
    group.close()
    report.facts["closed"] = attempt(group, group.barrier, times=1).error
    del group
    report.facts["descriptors"] = sorted(open_descriptors() - fork.descriptors_before)
    report.facts["threads"] = [t.name for t in threading.enumerate() if t is not threading.current_thread()]
    return report


def _hold_child(fork: ForkedGroup) -> None:
    """Fork a child that goes on with copies of all descriptors, whatever happens to this process."""
    if os.fork() == 0:
        fork.release.wait()
        os._exit(0)


@pytest.mark.parametrize("victim", [0, 2], ids=lambda victim: f"rank{victim}")
@pytest.mark.parametrize("operation", _OPERATIONS)
@pytest.mark.parametrize("has_children", [False, True], ids=["", "children"])
def test_survivors_name_the_dead(operation: str, victim: int, has_children: bool) -> None:
    """SIGKILL while collectives run: PeerLostError of that rank on all others, in time; nothing is left behind."""

    def program(group: NativeBackend, fork: ForkedGroup) -> Report:
        if has_children:
            _hold_child(fork)
        if group.rank == victim:
            _strike_soon(fork, signal.SIGKILL, 0.1)
            return attempt(group, lambda: _OPERATIONS[operation](group))
        return _survive(group, fork, lambda: _OPERATIONS[operation](group))

    fork = ForkedGroup(_WORLD_SIZE, program, timeout=20.0, kind=NativeBackend)
    try:
        for rank, report in fork.results(set(range(_WORLD_SIZE)) - {victim}).items():
            took = report.raised_at - fork.struck_at.value
            what = f"rank {rank}, {took:.3f} s after the kill: {report}"
            assert (report.error, report.ranks) == ("PeerLostError", (victim,)), what
            assert took < _LIMIT_SECONDS, what
            error, ranks, seconds = report.facts["again"]
            assert (error, ranks) == ("PeerLostError", (victim,)), what
            assert seconds < 0.5, what
            assert report.facts["closed"] == "GroupClosedError", what
            assert not report.facts["descriptors"], what
            assert not report.facts["threads"], what
    finally:
        fork.end()


@pytest.mark.parametrize("victim", [0, 1], ids=lambda victim: f"rank{victim}")
@pytest.mark.parametrize("size", [2, 3_000_000])
def test_a_stopped_rank_is_named(size: int, victim: int) -> None:
    """SIGSTOP while collectives run: DistributedTimeoutError of that rank on all others, soon after the deadline."""

    def program(group: NativeBackend, fork: ForkedGroup) -> Report:
        if group.rank == victim:
            _strike_soon(fork, signal.SIGSTOP, 0.1)
        return attempt(group, lambda: fd.allreduce(torch.ones(size), timeout=_DEADLINE_SECONDS))

    fork = ForkedGroup(_WORLD_SIZE, program, timeout=20.0, kind=NativeBackend)
    try:
        for rank, report in fork.results(set(range(_WORLD_SIZE)) - {victim}).items():
            took = report.raised_at - report.started_at
            what = f"rank {rank}, {took:.2f} s after the call: {report}"
            assert (report.error, report.ranks) == ("DistributedTimeoutError", (victim,)), what
            assert took < _DEADLINE_SECONDS + _LATE_SECONDS, what
    finally:
        fork.end()


def _interrupt_when_waiting(fork: ForkedGroup) -> None:
    """Send this process SIGINT from another thread, once this one has been inside the engine for a while."""
    caller = threading.get_ident()

    def watch() -> None:
        for _ in range(1000):
            frame = sys._current_frames()[caller]
            file = Path(frame.f_code.co_filename)
            if file.name in ("reduce.py", "p2p.py") or "native" in file.parts:
                threading.Event().wait(0.1)
                fork.strike(signal.SIGINT)
                return
            threading.Event().wait(0.01)

    threading.Thread(target=watch).start()


@pytest.mark.parametrize("options", [{}, {"timeout": 15.0}], ids=["short-way", "long-way"])
def test_an_interruption_ends_a_wait(options: dict[str, float]) -> None:
    """Ctrl-C in a collective that waits raises KeyboardInterrupt at once, and the other rank hears of it."""

    def program(group: NativeBackend, fork: ForkedGroup) -> tuple[str, float]:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started without
        try:
            if group.rank == 1:
                _interrupt_when_waiting(fork)
                fd.allreduce(torch.ones(2), **options)
            else:
                group.recv(bytearray(1), 1, timeout=15.0)
        except (KeyboardInterrupt, fd.GroupAbortedError) as error:
            return type(error).__name__, time.monotonic() - fork.struck_at.value
        return "nothing", 0.0

    fork = ForkedGroup(2, program, timeout=20.0, kind=NativeBackend)
    try:
        results = fork.results({0, 1})
        assert results[0][0] == "GroupAbortedError", results
        assert results[1][0] == "KeyboardInterrupt", results
        assert all(seconds < _LATE_SECONDS for _, seconds in results.values()), results
    finally:
        fork.end()


def _check_interrupted(program: Callable[[NativeBackend, ForkedGroup], tuple[str, float]]) -> None:
    """Run it on two ranks, each of which says what it caught and how late."""
    fork = ForkedGroup(2, program, timeout=20.0, kind=NativeBackend)
    try:
        results = fork.results({0, 1})
        assert all(caught == "KeyboardInterrupt" for caught, _ in results.values()), results
        assert all(seconds < _LATE_SECONDS for _, seconds in results.values()), results
    finally:
        fork.end()


@pytest.mark.parametrize("size", [1, 3_000_000])
def test_an_interruption_ends_a_message(size: int) -> None:
    """Ctrl-C in a recv or send that waits raises KeyboardInterrupt at once; the group is still good."""

    def program(group: NativeBackend, fork: ForkedGroup) -> tuple[str, float]:
        into = bytearray(size)
        if group.rank == 1:
            group.recv(bytearray(1), 0, tag=1)
            group.send(bytes(size), 0)
            group.recv(into, 0)
            return "KeyboardInterrupt", 0.0
        signal.signal(signal.SIGINT, signal.default_int_handler)
        caught, seconds = "nothing", 0.0
        try:
            _interrupt_when_waiting(fork)
            if size == 1:
                group.recv(into, 1, timeout=10.0)
            else:
                group.send(into, 1, timeout=10.0)
        except KeyboardInterrupt:
            caught, seconds = "KeyboardInterrupt", time.monotonic() - fork.struck_at.value
        group.send(b"g", 1, tag=1)
        group.recv(into, 1)
        group.send(into, 1)
        return caught, seconds

    _check_interrupted(program)


@pytest.mark.parametrize("wait", ["head", "elements", "send", "sendrecv"])
def test_an_interruption_ends_a_tensor(wait: str) -> None:
    """Ctrl-C in a tensor's receive or send raises at once; what was sent comes later, what was given up never does."""
    count = 1_000_000
    number = 10_000

    def program(group: NativeBackend, fork: ForkedGroup) -> tuple[str, float]:
        if group.rank == 1:
            if wait == "elements":
                head = TensorHeader(number, torch.float32, (2,)).pack()
                group.send(head, 0, tag=channel_tag(Channel.TENSOR, 0))
            group.recv(bytearray(1), 0, tag=1)
            if wait == "elements":
                group.send(bytes(8), 0, tag=channel_tag(Channel.TENSOR_PAYLOAD, number))
            if wait == "sendrecv":
                assert fd.recv(None, None, 0, timeout=10).tolist() == [5.0]
            assert fd.recv(None, None, 0, timeout=10).tolist() == [7.0]
            if wait != "elements":
                fd.send(torch.zeros(2), 0)
            return "KeyboardInterrupt", 0.0
        signal.signal(signal.SIGINT, signal.default_int_handler)
        caught, seconds = "nothing", 0.0
        into = torch.ones(2)
        try:
            _interrupt_when_waiting(fork)
            if wait == "send":
                fd.send(torch.ones(count), 1)
            elif wait == "sendrecv":
                fd.sendrecv(torch.tensor([5.0]), 1, None, 1)
            else:
                fd.recv_into(into, 1)
        except KeyboardInterrupt:
            caught, seconds = "KeyboardInterrupt", time.monotonic() - fork.struck_at.value
        group.send(b"g", 1, tag=1)
        fd.send(torch.tensor([7.0]), 1)
        fd.recv_into(into, 1)
        assert not into.any()
        return caught, seconds

    _check_interrupted(program)


@pytest.mark.parametrize("wait", ["recv", "send", "irecv"])
def test_a_rank_killed_in_the_middle_of_a_message(wait: str) -> None:
    """SIGKILL of a rank that sends large messages all the time: whoever waits for it is told in time, and its name."""

    def program(group: NativeBackend, fork: ForkedGroup) -> Report:
        data = bytearray(8 << 20)
        if group.rank == 2:
            _strike_soon(fork, signal.SIGKILL, 0.1)
            return attempt(group, lambda: [r.wait(20) for r in (group.isend(data, 0), group.irecv(bytearray(data), 0))])
        if group.rank == 1:
            return attempt(group, lambda: group.recv(bytearray(1), fd.ANY_SOURCE, timeout=10.0))

        def converse() -> None:
            receiving = group.irecv(data, 2)
            if wait == "irecv":
                group.isend(bytes(data), 2)
                receiving.wait(10)
                return
            sending = group.isend(bytes(data), 2)
            (receiving if wait == "recv" else sending).wait(10)
            (sending if wait == "recv" else receiving).wait(10)

        return attempt(group, converse)

    fork = ForkedGroup(3, program, timeout=20.0, kind=NativeBackend)
    try:
        for rank, report in fork.results({0, 1}).items():
            took = report.raised_at - fork.struck_at.value
            what = f"rank {rank}, {took:.3f} s after the kill: {report}"
            assert (report.error, report.ranks) == ("PeerLostError", (2,)), what
            assert took < _LIMIT_SECONDS, what
    finally:
        fork.end()
