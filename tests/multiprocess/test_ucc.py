"""Groups over a real UCC, where there is one: FERRODIST_UCC_LIBRARY names it."""

from __future__ import annotations

import multiprocessing
import signal
import socket
import threading
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from forked_group import ForkedGroup, Report, attempt, open_descriptors
from ucc_group import CONTROLS, UccRunner, open_ucc

import ferrodist as fd
from ferrodist.backends.ucc import data_plane
from ferrodist.backends.ucc.bindings import why_no_ucc
from ferrodist.testing import BACKEND_CHECKS
from ferrodist.testing.conformance.collectives.suite import COLLECTIVE_CHECKS

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend
    from ferrodist.testing.conformance.collectives.oracle import CollectiveCheck
    from ferrodist.testing.conformance.harness import BackendCheck

_REASON = why_no_ucc()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=_REASON or "")


@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
def test_backend_conforms(check: BackendCheck) -> None:
    """Every check of the public suite of backends passes."""
    check(UccRunner("tcp"), 3)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("check", COLLECTIVE_CHECKS, ids=lambda check: check.__name__)
def test_collectives_conform(check: CollectiveCheck, world_size: int) -> None:
    """Every collective gives the bits and errors of any other backend, in every dtype."""
    UccRunner(CONTROLS[-1]).run(world_size, check)


_LARGE = 1_000_000
_PATIENCE = 20.0

_OPERATIONS: dict[str, Callable[[], object]] = {
    "allreduce": lambda: fd.allreduce(torch.ones(_LARGE)),
    "broadcast": lambda: fd.broadcast(torch.ones(_LARGE), 1),
    "all_gather": lambda: fd.all_gather(torch.ones(_LARGE)),
}


def _run(
    world_size: int, program: Callable[[Any, ForkedGroup], Report], control: str, lost: set[int]
) -> dict[int, Any]:
    fork = ForkedGroup(world_size, program, timeout=_PATIENCE, kind=open_ucc(control))
    try:
        return fork.results(set(range(world_size)) - lost)
    finally:
        fork.end()


def _strike_in_data(group: Backend, action: Callable[[], object]) -> None:
    """Run ``action()`` in the second data step that this rank waits for."""
    wait_for, steps = group.data_plane.wait_for, iter([False, True])

    def wait(*args: Any) -> Any:
        if next(steps, False):
            action()
        return wait_for(*args)

    group.data_plane.wait_for = wait


@pytest.mark.parametrize("transports", ["all", "tcp"])
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("operation", _OPERATIONS)
@pytest.mark.parametrize("control", CONTROLS)
def test_a_killed_rank(
    control: str, operation: str, victim: int, transports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL while UCC moves data: the others soon raise PeerLostError with that rank, and live on."""
    monkeypatch.setenv("UCX_TLS", transports)

    def program(group: Any, fork: ForkedGroup) -> Report:
        if group.rank == victim:
            _strike_in_data(group, lambda: fork.strike(signal.SIGKILL))
        report = attempt(group, _OPERATIONS[operation])
        report.facts["seconds"] = report.raised_at - fork.struck_at.value
        report.facts["again"] = attempt(group, _OPERATIONS[operation], times=1).error
        return report

    for rank, report in _run(3, program, control, {victim}).items():
        assert (report.error, report.ranks) == ("PeerLostError", (victim,)), f"rank {rank}: {report}"
        assert report.facts["seconds"] < _PATIENCE / 2, f"rank {rank}: {report}"
        assert report.facts["again"] == "PeerLostError", f"rank {rank}: {report}"


@pytest.mark.parametrize("control", CONTROLS)
def test_a_rank_that_stops_in_a_collective(control: str) -> None:
    """When a rank stops in the middle of a collective, the others raise at their deadline, and the group has failed."""

    def program(group: Any, fork: ForkedGroup) -> Report:
        if group.rank == 1:
            _strike_in_data(group, fork.release.wait)
        report = attempt(group, lambda: fd.allreduce(torch.ones(_LARGE), timeout=1.0))
        report.facts["failure"] = type(group.failure).__name__
        return report

    for rank, report in _run(3, program, control, {1}).items():
        assert report.error == "DistributedTimeoutError", f"rank {rank}: {report}"
        assert report.facts["failure"] == "DistributedTimeoutError", f"rank {rank}: {report}"


@pytest.mark.parametrize("control", CONTROLS)
def test_a_rank_that_leaves_a_collective(control: str) -> None:
    """A rank that closes the group during a collective is named by PeerLostError on ranks that wait for it."""

    def program(group: Any, _: ForkedGroup) -> Report:
        if group.rank == 1:
            _strike_in_data(group, group.close)
        return attempt(group, lambda: fd.allreduce(torch.ones(_LARGE)))

    reports = _run(3, program, control, set())
    assert reports.pop(1).error == "GroupClosedError"
    for rank, report in reports.items():
        assert (report.error, report.ranks) == ("PeerLostError", (1,)), f"rank {rank}: {report}"


@pytest.mark.parametrize("control", CONTROLS)
def test_a_rank_that_leaves_between_verification_and_data(control: str) -> None:
    """A collective that is refused on a closing rank raises PeerLostError on the others."""

    def program(group: Any, _: ForkedGroup) -> Report:
        if group.rank == 1:
            all_gather, destroy_team = group.data_plane.all_gather, group.data_plane._team.destroy_team
            closing = threading.Thread(target=group.close)
            is_ending, is_refused = threading.Event(), threading.Event()

            def destroy() -> Any:
                is_ending.set()
                assert is_refused.wait(_PATIENCE)
                return destroy_team()

            def gather(*args: Any) -> Any:
                closing.start()
                assert is_ending.wait(_PATIENCE)
                return all_gather(*args)

            group.data_plane._team.destroy_team, group.data_plane.all_gather = destroy, gather
            report = attempt(group, lambda: fd.allreduce(torch.ones(1000)))
            is_refused.set()
            closing.join()
            return report
        return attempt(group, lambda: fd.allreduce(torch.ones(1000)))

    reports = _run(3, program, control, set())
    assert reports.pop(1).error == "GroupClosedError"
    for rank, report in reports.items():
        assert (report.error, report.ranks) == ("PeerLostError", (1,)), f"rank {rank}: {report}"


@pytest.mark.parametrize("control", CONTROLS)
def test_a_rank_that_leaves_after_its_share(control: str) -> None:
    """A rank may leave once it has sent its data: others that still wait get their result."""

    def program(group: Any, fork: ForkedGroup) -> Report:
        report = Report(group.rank)
        if group.rank == 0:
            check_for_departures = data_plane._DepartureWatch.check

            def check(self: Any) -> None:
                check_for_departures(self)
                if 1 in self._departures:
                    fork.release.set()

            data_plane._DepartureWatch.check = check  # type: ignore[method-assign]
        if group.rank == 2:  # begins its part when rank 0 knows that rank 1 has left
            start = group.data_plane.gather

            def late(*args: Any) -> Any:
                assert fork.release.wait(_PATIENCE)
                return start(*args)

            group.data_plane.gather = late
        parts = fd.gather(torch.full((100,), group.rank + 1.0), 0)
        if group.rank == 1:
            group.close()
        if parts is not None:
            report.facts["sum"] = float(sum(part.sum() for part in parts))
        return report

    assert _run(3, program, control, set())[0].facts["sum"] == 600.0


def test_mismatched_calls() -> None:
    """A mismatch raises on all ranks, before UCC is called."""

    def program(group: Any, _: ForkedGroup) -> Report:
        tensor = torch.ones(1000 + (group.rank == 1))
        return attempt(group, lambda: fd.allreduce(tensor), times=1)

    assert {report.error for report in _run(3, program, "tcp", set()).values()} == {"CollectiveMismatchError"}


def test_asynchronous_collectives_and_barriers() -> None:
    """Asynchronous collectives end in order, among barriers and small collectives that don't use UCC."""

    def program(group: Backend) -> list[float]:
        results = []
        for i in range(20):
            handles = [fd.async_allreduce(torch.full((n,), float(i))) for n in (1, 1000, 100_000)]
            group_wide = [handle.wait() for handle in handles]
            group.barrier()
            results.append(float(group_wide[0][0] + group_wide[1][-1] + group_wide[2][-1]))
        return results

    assert UccRunner(CONTROLS[-1]).run(2, program) == [[6.0 * i for i in range(20)]] * 2


def test_forked_children() -> None:
    """A forked child can't use UCC while its parent has an open group, and can after the group is closed."""

    def in_child() -> str | None:
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            return pool.submit(why_no_ucc).result(_PATIENCE)

    def program(group: Backend) -> list[str | None]:
        while_open = in_child()
        group.close()
        return [while_open, in_child()]

    for while_open, after in UccRunner("tcp").run(2, program):
        assert while_open is not None
        assert "the process that this one was forked from has a group" in while_open
        assert after is None


def test_groups_leave_nothing_behind() -> None:
    """Groups that were closed leave no thread and no file descriptor."""

    def program(group: Backend) -> list[list[str]]:
        found = []
        for _ in range(4):
            address = torch.zeros(1, dtype=torch.int64)
            own: dict[str, Any] = {}
            if group.rank == 0:
                own["listener"] = listener = socket.create_server(("127.0.0.1", 0))
                address[0] = listener.getsockname()[1]
            fd.broadcast(address, 0, out=address)
            again = open_ucc("tcp")(group.rank, 2, f"127.0.0.1:{int(address)}", secret=b"of the test", **own)
            assert fd.allreduce(torch.ones(100_000), group=again)[-1] == 2
            again.close()
            group.barrier()
            threads = [thread.name for thread in threading.enumerate()]
            found.append([*sorted(entry.split()[1].split(":")[0] for entry in open_descriptors()), *sorted(threads)])
        return found

    for found in UccRunner("tcp").run(2, program):
        assert found[3] == found[1]
