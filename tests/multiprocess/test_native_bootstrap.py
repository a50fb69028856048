"""A rank that can't take part in the opening of a group's engine says why to all, at once."""

from __future__ import annotations

import os
import re
import resource
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from forked_group import ForkedGroup, Report, attempt

import ferrodist as fd
from ferrodist.backends.native import GlooBackend, NativeBackend, host_connections, is_native_available

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(
    not is_native_available(), reason="this installation was built without the native engine"
)

_WORLD_SIZE = 3
_LIMIT_SECONDS = 1.0
_TIMEOUT = 20.0


def _leave_descriptors(number: int) -> None:
    """Have this process open no more than so many files from now on."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for descriptor in taken[len(taken) - number :]:
        os.close(descriptor)


def _leave_address_space() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (1 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


_NO_MORE_FILES = "Too many open files|has as many files open as it may"
_LACKS: dict[str, tuple[int, Callable[[], None], str]] = {
    "no-descriptor-on-the-lowest": (0, lambda: _leave_descriptors(0), _NO_MORE_FILES),
    "one-descriptor-on-the-lowest": (0, lambda: _leave_descriptors(1), _NO_MORE_FILES),
    "two-descriptors-on-the-lowest": (0, lambda: _leave_descriptors(2), _NO_MORE_FILES),
    "no-descriptor": (1, lambda: _leave_descriptors(0), _NO_MORE_FILES),
    "four-descriptors-on-the-lowest": (0, lambda: _leave_descriptors(4), _NO_MORE_FILES),
    "four-descriptors": (1, lambda: _leave_descriptors(4), _NO_MORE_FILES),
    "one-descriptor": (1, lambda: _leave_descriptors(1), _NO_MORE_FILES),
    "no-address-space": (1, _leave_address_space, "Cannot allocate memory"),
}


def _check(reports: dict[int, Report], error: str, ranks: tuple[int, ...] | None, *texts: str) -> None:
    for rank, report in reports.items():
        what = f"rank {rank}: {report}"
        assert report.error == error, what
        assert ranks is None or report.ranks == ranks, what
        assert all(re.search(text, report.message) for text in texts), what
        assert report.raised_at - report.started_at < _LIMIT_SECONDS, what


@pytest.mark.parametrize(
    ("kind", "lack"),
    [(NativeBackend, lack) for lack in _LACKS if not lack.startswith("four")]
    + [(GlooBackend, lack) for lack in _LACKS if "descriptor" in lack],
)
def test_a_lack_of_one_rank_is_reported_to_all(kind: type[NativeBackend], lack: str) -> None:
    """BackendUnavailable on all ranks, with the rank and what the system said to it."""
    victim, bring_about, text = _LACKS[lack]

    def program(group: NativeBackend, fork: ForkedGroup) -> Report:
        subgroup = fd.new_group(group=group)
        group.barrier()
        limits = [(which, resource.getrlimit(which)) for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)]
        if group.rank == victim:
            bring_about()
        report = attempt(group, subgroup.barrier, times=1)
        for which, limit in limits:
            resource.setrlimit(which, limit)
        group.barrier()
        return report

    fork = ForkedGroup(_WORLD_SIZE, program, timeout=_TIMEOUT, kind=kind)
    try:
        reports = fork.results(set(range(_WORLD_SIZE)))
        _check(reports, "BackendUnavailable", None, f"rank {victim}: ", text)
    finally:
        fork.end()


@pytest.mark.parametrize("symmetric", [False, True], ids=["first-collective", "empty-symmetric"])
@pytest.mark.parametrize("victim", [0, 1])
def test_an_interruption_of_the_opening_is_reported_to_all(victim: int, symmetric: bool) -> None:
    """Ctrl-C on a rank that waits for another one in the opening: the others don't wait for it."""

    def program(group: NativeBackend, fork: ForkedGroup) -> tuple[Report, float]:
        subgroup = fd.new_group(group=group)
        if symmetric:
            subgroup.barrier()
        interrupted_at = 0.0
        if group.rank == 2:
            group.recv(bytearray(1), victim)
        elif group.rank == victim:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Timer(0.2, fork.strike, (signal.SIGINT,)).start()
        try:
            report = attempt(
                group, lambda: fd.empty_symmetric((9,), group=subgroup) if symmetric else subgroup.barrier()
            )
        except KeyboardInterrupt:
            interrupted_at = time.monotonic()
            group.send(b"x", 2)
            report = attempt(group, subgroup.barrier, times=1)
        group.barrier()
        return report, interrupted_at - fork.struck_at.value

    fork = ForkedGroup(_WORLD_SIZE, program, timeout=_TIMEOUT, kind=NativeBackend)
    try:
        results = fork.results(set(range(_WORLD_SIZE)))
        _check(
            {rank: report for rank, (report, _) in results.items() if rank in (2, victim)},
            "GroupAbortedError",
            (victim,),
            f"rank {victim} left ",
            "by KeyboardInterrupt",
        )
        other = results[1 - victim][0]
        assert (other.error, other.ranks) == ("GroupAbortedError", (victim,)), other
        assert 0 <= results[victim][1] < _LIMIT_SECONDS
    finally:
        fork.end()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_killed_while_hosts_connect(victim: int) -> None:
    """PeerLostError of that rank on all others in time, whether they dial it or wait for it."""

    def program(group: GlooBackend, fork: ForkedGroup) -> Report:
        subgroup = fd.new_group(group=group)
        group.barrier()
        if group.rank == victim:
            host_connections._Connector.dial = lambda *_: fork.strike(signal.SIGKILL)  # type: ignore[method-assign,misc]
        return attempt(group, subgroup.barrier, times=1)

    fork = ForkedGroup(_WORLD_SIZE, program, timeout=_TIMEOUT, kind=GlooBackend)
    try:
        for rank, report in fork.results(set(range(_WORLD_SIZE)) - {victim}).items():
            took = report.raised_at - fork.struck_at.value
            what = f"rank {rank}, {took:.3f} s after the kill: {report}"
            assert (report.error, report.ranks) == ("PeerLostError", (victim,)), what
            assert took < _LIMIT_SECONDS, what
    finally:
        fork.end()


@pytest.mark.skipif(os.geteuid() != 0, reason="to become another user needs root")
def test_a_rank_that_changes_its_user_is_not_taken_for_dead() -> None:
    """BackendUnavailable that says which memory the system no longer lets be read, and its errno."""

    def program(group: NativeBackend, fork: ForkedGroup) -> Report | None:
        group.barrier()
        assert group.engine("cpu") is not None
        if not group.engine("cpu").communicator.can_read_peers:
            return None
        if group.rank == 1:
            os.setgid(65534)
            os.setuid(65534)
        return attempt(group, lambda: fd.all_gather(torch.ones(20_000)), times=1)

    fork = ForkedGroup(2, program, timeout=_TIMEOUT, kind=NativeBackend)
    try:
        reports = fork.results({0, 1})
        if None in reports.values():
            pytest.skip("this system lets no process read another's memory (process_vm_readv)")
        _check(reports, "BackendUnavailable", None, "process_vm_readv: Operation not permitted, errno 1")
    finally:
        fork.end()
