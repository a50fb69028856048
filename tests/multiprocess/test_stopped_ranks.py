"""Promise 1: a rank that is stopped, and so neither answers nor closes anything, is named when the deadline passes."""

from __future__ import annotations

import contextlib
import re
import signal
from typing import TYPE_CHECKING

import pytest
import torch
from forked_group import ForkedGroup, Report, attempt, strike_in_data

import ferrodist as fd
from ferrodist.backends.subgroup import SubBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.tcp import TcpBackend

    Call = Callable[[TcpBackend], object]

_WORLD_SIZE = 3
_DEADLINE_SECONDS = 0.5
_LATE_SECONDS = 2.0  # the ranks' processors are shared with others
_ELEMENTS = 3_000_000


def _full(rows: int = 1) -> torch.Tensor:
    return torch.ones(rows, _ELEMENTS // rows)


_IN_DATA: dict[str, Call] = {
    "allreduce": lambda group: fd.allreduce(_full(), timeout=_DEADLINE_SECONDS),
    "all_gather": lambda group: fd.all_gather(_full(), timeout=_DEADLINE_SECONDS),
    "broadcast": lambda group: fd.broadcast(_full(), timeout=_DEADLINE_SECONDS),
    "gather": lambda group: fd.gather(_full(), timeout=_DEADLINE_SECONDS),
    "all_to_all": lambda group: fd.all_to_all(_full(3), timeout=_DEADLINE_SECONDS),
}

_AT_THE_CALL: dict[str, Call] = {
    "barrier": lambda group: fd.barrier(timeout=_DEADLINE_SECONDS),
    "allreduce": lambda group: fd.allreduce(torch.ones(3), timeout=_DEADLINE_SECONDS),
    "scatter": lambda group: fd.scatter(_full(3) if group.rank == 0 else None, timeout=_DEADLINE_SECONDS),
}


def _check(fork: ForkedGroup, victim: int) -> None:
    try:
        for rank, report in fork.results(set(range(_WORLD_SIZE)) - {victim}).items():
            took = report.raised_at - report.started_at
            what = f"rank {rank}, {took:.2f} s after the call: {report}"
            assert report.error == "DistributedTimeoutError", what
            assert report.ranks == (victim,), what
            assert took < _DEADLINE_SECONDS + _LATE_SECONDS, what
            assert re.search(rf"\branks? (\d, )*{victim}\b", report.message), what
    finally:
        fork.end()


@pytest.mark.parametrize("victim", [0, 1], ids=lambda victim: f"rank{victim}")
@pytest.mark.parametrize("operation", _AT_THE_CALL)
def test_a_rank_that_is_stopped_before_a_call_is_named(operation: str, victim: int) -> None:
    """SIGSTOP of the rank that all others wait for: they raise in time, and name it."""

    def program(group: TcpBackend, fork: ForkedGroup) -> Report:
        if group.rank == victim:
            for peer in range(_WORLD_SIZE):
                if peer != victim:
                    group.recv(bytearray(1), peer, tag=9)
            fork.strike(signal.SIGSTOP)
        group.send(b"x", victim, tag=9)
        return attempt(group, lambda: _AT_THE_CALL[operation](group), times=1)

    _check(ForkedGroup(_WORLD_SIZE, program, timeout=20.0), victim)


@pytest.mark.parametrize(
    ("operation", "victim"),
    [
        *((operation, 1) for operation in _IN_DATA),
        *((operation, 0) for operation in ("allreduce", "all_gather", "all_to_all", "gather")),
    ],
)
def test_a_rank_that_is_stopped_while_data_moves_is_named(operation: str, victim: int) -> None:
    """SIGSTOP in the middle of the exchange: the others raise in time, and name it."""

    def program(group: TcpBackend, fork: ForkedGroup) -> Report:
        if group.rank == victim:
            strike_in_data(group, fork, signal.SIGSTOP)
        return attempt(group, lambda: _IN_DATA[operation](group))

    for _ in range(2):  # on a busy machine a rank that waits, too, may answer too late, and be named
        with contextlib.suppress(AssertionError):
            _check(ForkedGroup(_WORLD_SIZE, program, timeout=20.0), victim)
            return
    _check(ForkedGroup(_WORLD_SIZE, program, timeout=20.0), victim)


def test_a_relay_that_holds_a_rank_up_is_not_taken_for_stopped() -> None:
    """Rank 0 does not read from a rank whose data is queued for a stopped one: only the stopped one is named."""

    def program(group: TcpBackend, fork: ForkedGroup) -> Report | None:
        if group.rank == 2:
            fork.strike(signal.SIGSTOP)
        if group.rank == 1:
            for _ in range(200):  # more than the sockets and rank 0 take
                group.isend(bytes(250_000), 2)
            return attempt(group, lambda: group.recv(bytearray(1), 2, timeout=_DEADLINE_SECONDS), times=1)
        group.recv(bytearray(1), 1, tag=9)  # until the end of the test
        return None

    fork = ForkedGroup(_WORLD_SIZE, program, timeout=20.0)
    try:
        report = fork.results({1})[1]
        assert (report.error, report.ranks) == ("DistributedTimeoutError", (2,)), report
    finally:
        fork.end()


@pytest.mark.parametrize("members", [[2, 1, 0], [1, 2]], ids=["member", "stranger"])
def test_a_stopped_relay_is_named_in_a_subgroup(members: list[int]) -> None:
    """Rank 0 is named by its rank in a sub-group; if it is no member, the message names it as the relay."""

    def program(group: TcpBackend, fork: ForkedGroup) -> list[Report]:
        if group.rank == 0:
            for peer in (1, 2):
                group.recv(bytearray(1), peer, tag=9)
            fork.strike(signal.SIGSTOP)
        sub = SubBackend(group, members, name="sub")
        group.send(b"x", 0, tag=9)
        fork.wait_for_strike()
        peer = 1 - sub.rank
        return [
            attempt(sub, lambda: sub.recv(bytearray(1), peer, timeout=_DEADLINE_SECONDS), times=1),
            attempt(sub, lambda: fd.recv((1,), torch.float32, peer, group=sub, timeout=_DEADLINE_SECONDS), times=1),
            attempt(sub, lambda: fd.barrier(sub, timeout=_DEADLINE_SECONDS), times=1),
        ]

    fork = ForkedGroup(_WORLD_SIZE, program, timeout=20.0)
    try:
        for rank, reports in fork.results({1, 2}).items():
            for report in reports:
                named = members.index(0) if 0 in members else 1 - members.index(rank)
                assert (report.error, report.ranks) == ("DistributedTimeoutError", (named,)), f"rank {rank}: {report}"
                assert "rank 0 of group 'world', which passes on" in report.message, f"rank {rank}: {report}"
                assert "'sub'" in report.message, f"rank {rank}: {report}"
    finally:
        fork.end()


def test_a_rank_that_goes_on_in_time_is_not_missed() -> None:
    """SIGSTOP and SIGCONT within the deadline: the collective ends well on every rank."""

    def program(group: TcpBackend, fork: ForkedGroup) -> float:
        if group.rank == 1:
            strike_in_data(group, fork, signal.SIGSTOP)
        result = float(fd.allreduce(_full(), timeout=20.0)[0, -1])
        fd.barrier()
        return result

    fork = ForkedGroup(_WORLD_SIZE, program, timeout=20.0)
    try:
        fork.wait_until_stopped(1)
        fork.resume(1)
        assert fork.results({0, 1, 2}) == {0: 3.0, 1: 3.0, 2: 3.0}
    finally:
        fork.end()
