"""Errors of ranks on GPUs: mismatched calls, late ranks, dead ranks, failures of NCCL; over a fake of NCCL."""

from __future__ import annotations

import re
import threading
from functools import partial
from typing import NoReturn

import pytest
import torch
from nccl_fakes import FakeCommunicator, FakeNccl, fake_groups, send_cpu_tensors_to_nccl

import ferrodist as fd
from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.backends.group_observer import PeerExit
from ferrodist.backends.nccl.communicator import NcclError
from ferrodist.testing import run_ranks


def _sum_in_place(tensor: torch.Tensor) -> CollectiveOp:
    return CollectiveOp(
        kind=CollectiveKind.ALLREDUCE, source=tensor, out=tensor, reduction=fd.ReduceOp.SUM, timeout=20.0
    )


@pytest.fixture(autouse=True)
def _cpu_tensors_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    send_cpu_tensors_to_nccl(monkeypatch)


def lazy_groups(world_size: int) -> list[fd.HybridBackend]:
    """Groups whose operations are enqueued at once, and done when all ranks have called."""
    return fake_groups(world_size, nccl=FakeNccl(is_lazy=True))


def begin(group: fd.Backend) -> None:
    """Make the communicator on all ranks."""
    fd.allreduce(torch.ones(2), group=group)
    group.synchronize()
    group.barrier()


def go_on(group: fd.Backend) -> NoReturn:
    """Call until an error is raised."""
    while True:
        fd.allreduce(torch.ones(2), group=group)
        group.synchronize()


def error_of(group: fd.Backend, kind: type[fd.DistributedError], call: object) -> fd.DistributedError:
    """The error of a call and the waits after it, which must be the same."""

    def call_and_wait() -> None:
        call()
        group.synchronize()
        group.barrier()

    with pytest.raises(kind) as caught:
        call_and_wait()
    with pytest.raises(kind, match=r"\w"):
        fd.allreduce(torch.ones(1), group=group)
    assert type(group.failure) is kind
    return caught.value


_DEATH = PeerExit(what="died: it was killed")

_DIFFERENCES = {
    "operation": (lambda g: fd.allreduce(torch.ones(4), group=g), lambda g: fd.broadcast(torch.ones(4), 0, group=g)),
    "reduction": (
        lambda g: fd.allreduce(torch.ones(4), group=g),
        lambda g: fd.allreduce(torch.ones(4), fd.ReduceOp.MAX, group=g),
    ),
    "dtype": (
        lambda g: fd.allreduce(torch.ones(4), group=g),
        lambda g: fd.allreduce(torch.ones(4, dtype=torch.int32), group=g),
    ),
    "count": (lambda g: fd.allreduce(torch.ones(4), group=g), lambda g: fd.allreduce(torch.ones(5), group=g)),
    "root": (lambda g: fd.broadcast(torch.ones(4), 0, group=g), lambda g: fd.broadcast(torch.ones(4), 1, group=g)),
    "dim": (lambda g: fd.all_gather(torch.ones(4, 4), group=g), lambda g: fd.all_gather(torch.ones(4, 4), 1, group=g)),
}


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("difference", _DIFFERENCES)
@pytest.mark.parametrize("is_lazy", [False, True], ids=["at once", "lazily"])
def test_different_calls_end_the_group_on_all_ranks(difference: str, odd: int, is_lazy: bool) -> None:
    """Whichever rank makes a different call, all raise the mismatch, which names both calls."""
    usual, other = _DIFFERENCES[difference]

    def program(group: fd.Backend) -> tuple[str, tuple[int, ...]]:
        usual(group)
        group.synchronize()
        group.barrier()
        error = error_of(group, fd.CollectiveMismatchError, lambda: (other if group.rank == odd else usual)(group))
        assert not any(one.is_destroyed for one in group.shared.opened)
        return error.message, error.ranks

    told = run_ranks(program, 3, backend=partial(fake_groups, nccl=FakeNccl(is_lazy=is_lazy)))
    for message, ranks in told:  # of one of the two pairs that differ
        assert odd in ranks
        assert "disagree about operation 1 on GPU tensors" in message


def test_a_wait_with_a_timeout_raises_a_mismatch() -> None:
    """An asynchronous call is not done before it has been compared, so a wait on the host raises the mismatch."""

    def program(group: fd.Backend) -> None:
        begin(group)
        op = fd.ReduceOp.SUM if group.rank else fd.ReduceOp.MAX
        with pytest.raises(fd.CollectiveMismatchError, match=r"max.*sum|sum.*max"):
            fd.async_allreduce(torch.ones(4), op).wait(timeout=30)

    run_ranks(program, 2, backend=lazy_groups)


def test_a_mismatch_is_raised_before_the_watchdog_acts() -> None:
    """synchronize() raises a mismatch that was found, even if the watchdog's thread is busy."""

    def program(group: fd.Backend) -> None:
        begin(group)
        group._watchdog.watch = lambda *_, **__: None
        fd.allreduce(torch.ones(4), fd.ReduceOp.SUM if group.rank else fd.ReduceOp.MAX)
        with pytest.raises(fd.CollectiveMismatchError, match=r"max.*sum|sum.*max"):
            group.synchronize()

    run_ranks(program, 2, backend=lazy_groups)


def test_a_call_that_others_have_not_made_is_not_done() -> None:
    """A broadcast's root needs no other rank on the GPU, but is done only when its call has been compared."""

    def program(group: fd.Backend) -> None:
        begin(group)
        if group.rank == 0:
            pending = fd.async_broadcast(torch.ones(4), 0)
            pending._work._launched[0].end.works.clear()  # the GPU has come past it
            assert not pending.done()
            with pytest.raises(fd.DistributedTimeoutError, match="still under way"):
                group.synchronize(0.05)
            group.barrier()
            pending.wait(timeout=30)
            assert pending.done()
        else:
            group.barrier()
            fd.broadcast(torch.ones(4), 0)
        group.synchronize()

    run_ranks(program, 2, backend=lazy_groups)


@pytest.mark.parametrize("groups", [fake_groups, lazy_groups])
def test_the_communicators_of_a_failed_group_are_aborted(groups) -> None:
    """When a group fails its communicators are aborted, so that kernels which wait end."""

    def program(group: fd.Backend) -> None:
        begin(group)
        if group.rank == 0:
            group.abort("the loss is NaN")
        with pytest.raises(fd.GroupAbortedError, match="the loss is NaN"):
            go_on(group)
        group.close()
        (own,) = [one for one in group.shared.opened if one.rank == group.rank]
        assert own.is_aborted

    run_ranks(program, 2, backend=groups)


def test_a_failed_launch_leaves_nothing_on_the_gpu() -> None:
    """When NCCL waits for a rank that never calls, the communicator is aborted before the error is raised."""

    def program(group: fd.Backend) -> None:
        begin(group)
        if group.rank == 0:
            (own,) = [one for one in group.shared.opened if one.rank == 0]
            with pytest.raises(fd.DistributedTimeoutError):
                fd.allreduce(torch.ones(2), timeout=0.2)
            assert own.is_aborted
        else:
            with pytest.raises(fd.DistributedTimeoutError):
                group.recv(bytearray(1), 0)

    run_ranks(program, 2, backend=fake_groups)


@pytest.mark.parametrize("late", [(0,), (2,), (1, 2)])
@pytest.mark.parametrize("groups", [fake_groups, lazy_groups])
def test_late_ranks_are_named(groups, late: tuple[int, ...]) -> None:
    """A rank that does not call in time is named on all ranks, whether NCCL waits for it or the GPU does."""

    def program(group: fd.Backend) -> tuple[int, ...]:
        begin(group)
        if group.rank in late:
            with pytest.raises(fd.DistributedTimeoutError) as caught:
                group.recv(bytearray(1), (group.rank + 1) % 3)
            return caught.value.ranks

        def call() -> None:
            fd.allreduce(torch.ones(2), timeout=0.3)
            group.synchronize()

        error = error_of(group, fd.DistributedTimeoutError, call)
        assert "allreduce(sum, float32[2])" in error.message
        assert "operation 1" in error.message
        return error.ranks

    assert run_ranks(program, 3, backend=groups) == [late] * 3


def test_a_rank_that_is_late_for_the_first_operation_is_named() -> None:
    """The first operation connects the ranks: the verification of calls names a missing rank."""

    def program(group: fd.Backend) -> tuple[int, ...]:
        if group.rank == 1:
            with pytest.raises(fd.DistributedTimeoutError) as caught:
                group.recv(bytearray(1), 0)
        else:
            with pytest.raises(fd.DistributedTimeoutError, match="allreduce") as caught:
                fd.allreduce(torch.ones(2), timeout=0.3)
        return caught.value.ranks

    assert run_ranks(program, 2, backend=fake_groups) == [(1,), (1,)]


def test_a_rank_that_calls_on_the_cpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose tensor is on the CPU, while the others' are on GPUs, is found by the first operation."""
    monkeypatch.undo()

    def program(group: fd.Backend) -> None:
        engine, ones = group.engine("cuda"), torch.ones(2)
        calls = (
            lambda: fd.allreduce(ones),
            lambda: engine.run(_sum_in_place(ones), engine.reserve()),
        )
        with pytest.raises(fd.CollectiveMismatchError, match="on GPUs"):
            calls[group.rank]()

    run_ranks(program, 2, backend=fake_groups)


def test_an_error_of_nccl_ends_the_group() -> None:
    """An error of NCCL on one rank is raised on all, with NCCL's message and the rank."""

    def program(group: fd.Backend) -> None:
        begin(group)
        if group.rank == 1:
            (own,) = [one for one in group.shared.opened if one.rank == 1]
            own.failure = "NCCL failed: remote process exited"
        with pytest.raises(fd.DistributedError, match="remote process exited on rank 1"):
            go_on(group)

    run_ranks(program, 2, backend=lazy_groups)


def test_a_communicator_that_cannot_be_made_ends_the_group() -> None:
    """NCCL's error for a refused communicator reaches all ranks."""
    nccl = FakeNccl()
    nccl.refusal = "Duplicate GPU detected"

    def program(group: fd.Backend) -> None:
        with pytest.raises(fd.DistributedError, match="Duplicate GPU"):
            fd.allreduce(torch.ones(2))

    run_ranks(program, 2, backend=partial(fake_groups, nccl=nccl))


def test_a_rank_without_nccl_is_named_by_the_first_operation() -> None:
    """Before anything is sent all ranks learn that one has no NCCL, and why; the group stays usable."""

    def groups(world_size: int) -> list[fd.HybridBackend]:
        made = fake_groups(world_size)
        usual = made[1]._library

        def missing() -> FakeNccl:
            raise fd.BackendUnavailable("NCCL can't be used here: nobody installed it")

        made[1]._executor._handle._library = missing
        assert usual is not None
        return made

    def program(group: fd.Backend) -> None:
        with pytest.raises(fd.BackendUnavailable, match=r"rank 1 has no NCCL.*nobody installed it") as caught:
            fd.allreduce(torch.ones(2))
        assert caught.value.ranks == (1,)
        assert group.failure is None
        group.barrier()

    run_ranks(program, 3, backend=groups)


def test_shrink_leaves_out_a_dead_rank() -> None:
    """When a rank dies the others raise PeerLostError, and continue in a group without it."""

    def program(group: fd.Backend) -> str:
        begin(group)
        if group.rank == 2:
            group.tcp._peers[0].peer_died(2, _DEATH)
            group.tcp._peers[1].peer_died(2, _DEATH)
            return "dead"
        with pytest.raises(fd.PeerLostError) as caught:
            go_on(group)
        assert caught.value.ranks == (2,)
        left = group.shrink()
        assert left.world_size == 2
        total = fd.allreduce(torch.ones(2), group=left)
        left.synchronize()
        return str(total.tolist())

    assert run_ranks(program, 3, backend=lazy_groups) == ["[2.0, 2.0]", "[2.0, 2.0]", "dead"]


def test_shrink_without_a_lost_rank_raises() -> None:
    """Without a dead rank shrink asks for lost=."""

    def program(group: fd.Backend) -> None:
        with pytest.raises(fd.InvalidRankError, match="pass lost="):
            group.shrink()
        if group.rank != 1:
            assert group.shrink([1]).world_size == 2

    run_ranks(program, 3, backend=fake_groups)


def test_shrink_checks_the_lost_ranks() -> None:
    """A rank that the group does not have is no lost one, and the group would stay as large."""
    one, *others = fake_groups(2)
    with pytest.raises(fd.InvalidRankError, match=r"lost rank 2 is not in 0\.\.1"):
        one.shrink([2])
    for group in (one, *others):
        group.close()


def test_a_group_is_closed_although_nccl_fails_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others learn that this rank has left, and its callbacks run; a wrong timeout changes nothing."""

    def refuse(_: object) -> NoReturn:
        raise NcclError("comm_destroy of NCCL failed")

    def program(group: fd.Backend) -> bool:
        begin(group)
        has_run = threading.Event()
        group.on_close(has_run.set)
        with pytest.raises(TypeError, match="timeout must be"):
            group.close("soon")
        assert group.failure is None
        group.barrier()
        with pytest.raises(NcclError):
            group.close()
        assert isinstance(group.failure, fd.GroupClosedError)
        return has_run.is_set()

    monkeypatch.setattr(FakeCommunicator, "destroy", refuse)
    assert run_ranks(program, 2, backend=fake_groups) == [True, True]


def test_split_sizes_are_compared_pairwise() -> None:
    """A rank with even counts takes part in the comparison with ranks whose counts are uneven."""

    def program(group: fd.Backend) -> list[int]:
        counts = {0: [1, 1, 1], 1: [1, 1, 5], 2: [1, 5, 1]}[group.rank]
        rows = torch.full((sum(counts), 1), group.rank)
        result = fd.all_to_all_single_uneven(rows, counts, counts)
        group.synchronize()
        return result.flatten().tolist()

    assert run_ranks(program, 3, backend=fake_groups) == [[0, 1, 2], [0, 1, 2, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 2]]


@pytest.mark.parametrize(
    ("send_counts", "recv_counts"),
    [
        ({0: [1, 1], 1: [2, 1]}, {0: [1, 1], 1: [1, 1]}),
        ({0: [1, 1], 1: [1, 1]}, {0: [1, 1], 1: [2, 1]}),
        ({0: [1, 3], 1: [2, 1]}, {0: [1, 2], 1: [4, 1]}),
    ],
    ids=["more is sent", "more is expected", "both"],
)
def test_split_sizes_that_differ_end_the_group(send_counts, recv_counts) -> None:
    """A rank with uneven counts moves nothing when counts differ, and all ranks raise which do."""

    def program(group: fd.Backend) -> None:
        begin(group)
        sent, expected = send_counts[group.rank], recv_counts[group.rank]
        error = error_of(
            group,
            fd.SizeMismatchError,
            lambda: fd.all_to_all_single_uneven(torch.ones(sum(sent), 3), sent, expected),
        )
        assert re.search(r"rank \d expects \d rows? from rank \d .*which sends it \d", error.message)
        if group.rank == 1:  # whose counts are uneven: it has waited for rank 0's
            (own,) = [one for one in group.shared.opened if one.rank == 1]
            assert set(own.log) <= {"all_reduce", "abort"}

    run_ranks(program, 2, backend=lazy_groups)


def test_threads_launch_in_the_order_of_sequence_numbers() -> None:
    """Operations of several threads are launched in the order in which they were reserved."""

    def program(group: fd.Backend) -> None:
        engine = group.engine("cuda")
        tensors = [torch.full((3,), float(i)) for i in range(8)]
        places = [engine.reserve() for _ in tensors]

        def launch(i: int) -> None:
            engine.run(_sum_in_place(tensors[i]), places[i])

        # The ranks' threads start in opposite orders.
        order = range(8) if group.rank else reversed(range(8))
        threads = [threading.Thread(target=launch, args=(i,)) for i in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        group.synchronize()
        assert [tensor.tolist() for tensor in tensors] == [[2.0 * i] * 3 for i in range(8)]

    run_ranks(program, 2, backend=fake_groups)


def test_a_launch_while_another_thread_closes_the_group_is_refused() -> None:
    """Between NCCL's end and the control group's, a call finds the group still usable."""

    def program(group: fd.HybridBackend) -> None:
        begin(group)
        group.barrier()
        group._executor.release(None)
        with pytest.raises(fd.GroupClosedError, match="is being closed on this rank"):
            fd.allreduce(torch.ones(2), group=group)
        assert group.failure is None
        group.barrier()

    run_ranks(program, 2, backend=fake_groups)


def test_an_interrupted_launch_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """When an exception breaks off a rank's call, the others raise with the reason."""

    def program(group: fd.Backend) -> None:
        begin(group)
        if group.rank == 0:

            def interrupted(*_: object, **__: object) -> None:
                raise KeyboardInterrupt

            (own,) = [one for one in group.shared.opened if one.rank == 0]
            own.all_reduce = interrupted
            with pytest.raises(KeyboardInterrupt):
                fd.allreduce(torch.ones(2))
        else:
            with pytest.raises(fd.GroupAbortedError, match=r"rank 0 left allreduce.*KeyboardInterrupt"):
                go_on(group)

    run_ranks(program, 2, backend=lazy_groups)
