"""Promise 3: a rank killed in the middle of any operation is reported by every survivor, by number, within a second."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch
from forked_group import ForkedGroup, Report, attempt, open_descriptors, strike_in_data

import ferrodist as fd

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.tcp import TcpBackend

    Call = Callable[[TcpBackend], object]

_WORLD_SIZE = 3
_ELEMENTS = 3_000_000  # 12 MB: 24 frames, and larger than the sockets' buffers
_LIMIT_SECONDS = 1.0


def _full(rows: int = 1) -> torch.Tensor:
    return torch.ones(rows, _ELEMENTS // rows)


_OPERATIONS: dict[str, Call] = {
    "allreduce": lambda group: fd.allreduce(_full()),
    "reduce": lambda group: fd.reduce(_full(), 1),
    "broadcast": lambda group: fd.broadcast(_full(), 2),
    "all_gather": lambda group: fd.all_gather(_full()),
    "all_gather_uneven": lambda group: fd.all_gather_uneven(torch.ones(group.rank + 1, _ELEMENTS // 2)),
    "gather": lambda group: fd.gather(_full(), 0),
    "scatter": lambda group: fd.scatter(_full(3) if group.rank == 0 else None, 0),
    "reduce_scatter": lambda group: fd.reduce_scatter(_full(3)),
    "all_to_all": lambda group: fd.all_to_all(_full(3)),
    "async_allreduce": lambda group: [h.wait() for h in [fd.async_allreduce(_full()) for _ in range(3)]],
    "sendrecv": lambda group: fd.sendrecv(
        _full(), (group.rank + 1) % group.world_size, None, (group.rank - 1) % group.world_size
    ),
}


def _forked_child(fork: ForkedGroup) -> int:
    """Fork a child that goes on with copies of all descriptors, whatever happens to this process."""
    pid = os.fork()
    if pid == 0:
        fork.release.wait()
        os._exit(0)
    return pid


def _survive(group: TcpBackend, fork: ForkedGroup, call: Callable[[], object]) -> Report:
    """What a survivor sees, what it sees after that, and what it keeps."""
    report = attempt(group, call)
    again = attempt(group, lambda: fd.allreduce(torch.ones(2)), times=1)
    report.facts["again"] = (again.error, again.ranks, again.raised_at - again.started_at)
    report.facts["failure"] = (type(group.failure).__name__, group.failure.ranks if group.failure else ())
    group.close()
    report.facts["closed"] = attempt(group, group.barrier, times=1).error
    report.facts["descriptors"] = sorted(open_descriptors() - fork.descriptors_before)
    report.facts["threads"] = [t.name for t in threading.enumerate() if t is not threading.current_thread()]
    return report


def _run(call: Call, victim: int, *, child_of: int | None = None, in_data: bool = True) -> None:
    """Kill ``victim`` inside ``call`` and check what the others say."""

    def program(group: TcpBackend, fork: ForkedGroup) -> Report:
        if group.rank == child_of:
            _forked_child(fork)
        if group.rank == victim and in_data:
            strike_in_data(group, fork, signal.SIGKILL)
            return attempt(group, lambda: call(group))
        if group.rank == victim:  # the others are about to wait for it
            for peer in range(_WORLD_SIZE):
                if peer != victim:
                    group.recv(bytearray(1), peer, tag=9)
            fork.strike(signal.SIGKILL)
        if not in_data:
            group.send(b"x", victim, tag=9)
        return _survive(group, fork, lambda: call(group))

    fork = ForkedGroup(_WORLD_SIZE, program, timeout=20.0)
    try:
        reports = fork.results(set(range(_WORLD_SIZE)) - {victim})
        assert fork.exit_code(victim) == -signal.SIGKILL
        assert fork.struck_at.value > 0
        for rank, report in reports.items():
            took = report.raised_at - fork.struck_at.value
            what = f"rank {rank}, {took:.3f} s after the kill: {report}"
            assert (report.error, report.ranks) == ("PeerLostError", (victim,)), what
            assert took < _LIMIT_SECONDS, what
            assert f"rank {victim}" in report.message, what
            error, ranks, seconds = report.facts["again"]
            assert (error, ranks) == ("PeerLostError", (victim,)), what
            assert seconds < 0.5, what
            assert report.facts["failure"] == ("PeerLostError", (victim,)), what
            assert report.facts["closed"] == "GroupClosedError", what
            assert not report.facts["descriptors"], what
            assert not report.facts["threads"], what
    finally:
        fork.end()


@pytest.mark.parametrize("victim", [0, 1, 2], ids=lambda victim: f"rank{victim}")
@pytest.mark.parametrize("operation", _OPERATIONS)
def test_survivors_name_the_dead(operation: str, victim: int) -> None:
    """SIGKILL while data moves: PeerLostError of that rank on all others, in time, for good, nothing left behind."""
    _run(_OPERATIONS[operation], victim)


@pytest.mark.parametrize("victim", [0, 1, 2], ids=lambda victim: f"rank{victim}")
def test_survivors_of_a_barrier_name_the_dead(victim: int) -> None:
    """SIGKILL of the rank that all others wait for in a barrier."""
    _run(lambda group: fd.barrier(), victim, in_data=False)


@pytest.mark.parametrize("victim", [0, 2], ids=lambda victim: f"rank{victim}")
def test_children_of_the_dead_do_not_hide_it(victim: int) -> None:
    """A child forked by the victim, alive and with copies of its descriptors, keeps no connection open."""
    _run(_OPERATIONS["allreduce"], victim, child_of=victim)


@pytest.mark.parametrize("victim", [0, 2], ids=lambda victim: f"rank{victim}")
def test_children_of_survivors_change_nothing(victim: int) -> None:
    """A child forked by a survivor, alive all the time, does not delay the news or hold anything."""
    _run(_OPERATIONS["all_gather"], victim, child_of=1)


def test_two_deaths_at_once() -> None:
    """When two of four ranks die the others report a dead one, and end."""

    def program(group: TcpBackend, fork: ForkedGroup) -> Report:
        if group.rank in (1, 3):
            strike_in_data(group, fork, signal.SIGKILL)
        return attempt(group, lambda: fd.all_gather(_full()))

    fork = ForkedGroup(4, program, timeout=20.0)
    try:
        for report in fork.results({0, 2}).values():
            assert report.error == "PeerLostError", report
            assert set(report.ranks) <= {1, 3}, report
            assert report.ranks, report
            assert time.monotonic() - fork.struck_at.value < 30
    finally:
        fork.end()
