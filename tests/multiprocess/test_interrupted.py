"""An exception that leaves a collective on one rank, as of Ctrl-C: the others hear of it at once, on any backend."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from forked_group import ForkedGroup
from nccl_fakes import fake_groups, send_cpu_tensors_to_nccl

import ferrodist as fd
from ferrodist.backends.native import GlooBackend, NativeBackend, is_native_available
from ferrodist.backends.nccl import NcclBackend
from ferrodist.backends.simulated import SimulatedBackend
from ferrodist.backends.tcp import TcpBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend

_LIMIT_SECONDS = 3.0
_TIMEOUT = 20.0

_KINDS = [TcpBackend] + [NativeBackend, GlooBackend] * is_native_available()


class _TermError(Exception):
    """What a program's own handler of a signal raises."""


def _raise_term(number: int, _frame: object) -> None:
    raise _TermError(number)


_CALLS = {
    "allreduce": lambda group: fd.allreduce(torch.ones(3), group=group),
    "reduce_scatter": lambda group: fd.reduce_scatter(torch.ones(300_000), group=group),
    "barrier": lambda group: fd.barrier(group=group),
    "all_gather_object": lambda group: fd.all_gather_object("x", group=group),
    "scatter": lambda group: fd.scatter(torch.ones(3) if group.rank == 2 else None, 2, group=group),
}


def _interrupt_a_wait() -> None:
    """Interrupt the main thread once it has stood still for 0.1 s.

    On a busy machine it may look at its arguments for as long: an exception there is no other rank's business.
    """
    main = threading.main_thread().ident
    assert main is not None
    where, num_same = None, 0
    while num_same < 10:
        time.sleep(0.01)
        frame = sys._current_frames()[main]
        before, where = where, (frame, frame.f_lasti)
        num_same = num_same + 1 if where == before else 0
    os.kill(os.getpid(), signal.SIGINT)


def _seconds_until_told(group: Backend, victim: int, call: Callable[[Backend], object]) -> float:
    """Have rank ``victim`` interrupted in a collective that rank 2 does not call; after how long this rank knew."""
    started = time.monotonic()
    if group.rank == victim:
        threading.Thread(target=_interrupt_a_wait).start()
        with pytest.raises((KeyboardInterrupt, _TermError)):
            call(group)
        return time.monotonic() - started
    with pytest.raises(fd.GroupAbortedError, match=rf"rank {victim} left .*(KeyboardInterrupt|_TermError)") as caught:
        group.recv(bytearray(1), victim, tag=5) if group.rank == 2 else call(group)
    assert caught.value.ranks == (victim,)
    return time.monotonic() - started


@pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("handler", [signal.default_int_handler, _raise_term], ids=["Ctrl-C", "handler"])
def test_who_leaves_a_collective_by_an_exception_says_so(kind: type[TcpBackend], handler: Any) -> None:
    """Its rank lives on, as at a prompt, and all others raise at once who left what by which exception."""

    def program(world: Backend, _fork: ForkedGroup) -> list[float]:
        signal.signal(signal.SIGINT, handler)
        found = []
        for victim in (0, 1):
            for call in _CALLS.values():
                group = fd.new_group([0, 1, 2])
                assert group is not None
                found.append(_seconds_until_told(group, victim, call))
        return [*found, _seconds_until_told(world, 1, _CALLS["allreduce"])]

    fork = ForkedGroup(3, program, timeout=_TIMEOUT, kind=kind)
    try:
        for seconds in fork.results({0, 1, 2}).values():
            assert max(seconds) < _LIMIT_SECONDS, seconds
    finally:
        fork.end()


@pytest.mark.parametrize("kind", ["simulated", "nccl", "hybrid"])
@pytest.mark.parametrize("victim", [0, 1])
def test_groups_whose_ranks_are_threads_say_so_too(kind: str, victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank of the main thread is interrupted as it waits: who waits with it hears of it, and who comes later."""
    make = {
        "simulated": SimulatedBackend.create_group,
        "nccl": partial(fake_groups, kind=NcclBackend),
        "hybrid": fake_groups,
    }[kind]
    if kind != "simulated":
        send_cpu_tensors_to_nccl(monkeypatch)
    for call in _CALLS.values():
        groups = make(3)
        told: list[tuple[int, ...]] = []

        def hear(
            group: Backend,
            told: list[tuple[int, ...]] = told,
            call: Callable[[Backend], object] = call,
        ) -> None:
            with pytest.raises(fd.GroupAbortedError, match=rf"rank {victim} left .*KeyboardInterrupt") as caught:
                call(group)
            told.append(caught.value.ranks)

        other = threading.Thread(target=hear, args=(groups[1 - victim],))
        other.start()
        threading.Thread(target=_interrupt_a_wait).start()
        with pytest.raises(KeyboardInterrupt):
            call(groups[victim])
        other.join(_LIMIT_SECONDS)
        hear(groups[2])
        assert told == [(victim,)] * 2
        for group in groups:
            group.close()
