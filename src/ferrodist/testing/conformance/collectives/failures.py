"""Checks of failing collectives: every rank raises the same error, in time, and the group stays failed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

import ferrodist as fd
from ferrodist.backends.subgroup import SubBackend
from ferrodist.deadline import Deadline
from ferrodist.testing.conformance.collectives.oracle import COLLECTIVE_SLACK_SECONDS, duplicate_group
from ferrodist.testing.conformance.harness import error_key, error_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.testing.conformance.collectives.oracle import CollectiveCheck

    Collective = Callable[..., object]  # called with group=


_DEADLINE_SECONDS = 0.3

SAMPLE_CALLS: dict[str, Collective] = {
    "barrier": fd.barrier,
    **{
        name: partial(getattr(fd, name), torch.ones(4))
        for name in ("allreduce", "reduce", "broadcast", "all_gather", "all_gather_uneven", "gather")
    },
    "scatter": lambda group: _scatter(torch.ones(4), group=group),
    "reduce_scatter": partial(fd.reduce_scatter, torch.ones(4)),
    "all_to_all": lambda group: _all_to_all(torch.ones(4), group=group),
}
"""A call of each collective, by name."""


def _scatter(tensor: torch.Tensor, src: int = 0, dim: int = 0, *, group: Backend) -> torch.Tensor:
    return fd.scatter(tensor if group.rank == src else None, src, dim=dim, group=group)


def _all_to_all(tensor: torch.Tensor, *, group: Backend) -> object:
    return fd.all_to_all([tensor] * group.world_size, group=group)


def _check_stays_failed(group: Backend, error: fd.DistributedError) -> None:
    """Assert that every later call repeats the group's failure, at once."""
    assert group.failure is not None, f"after {error!r} the group is as good as new"
    assert error_key(group.failure) == error_key(error), f"the group has {group.failure!r}, the call raised {error!r}"
    for name, call in SAMPLE_CALLS.items():
        again = error_of(type(error), partial(call, group=group), f"{name} on a group that has failed")
        assert error_key(again) == error_key(error), f"{name} on a failed group raised {again!r}, not {error!r}"
    pending = error_of(type(error), lambda: fd.async_allreduce(torch.ones(4), group=group).wait(0), "async_allreduce")
    assert error_key(pending) == error_key(error), f"async_allreduce after a failure raised {pending!r}, not {error!r}"


def _check_agreement(world: Backend, error: fd.DistributedError, what: str) -> None:
    """Assert over a group that has not failed that all ranks raised the same error."""
    if world.failure is not None:
        return  # a backend whose sub-groups can't fail alone: there is no way left to ask
    name, message, ranks = error_key(error)
    everyone = fd.all_gather_object([name, message, list(ranks)], group=world)
    for rank, said in enumerate(everyone):
        assert said == [name, message, list(ranks)], f"{what}: rank {world.rank} raised {error!r}, rank {rank} {said}"


def _mismatch_check(name: str) -> CollectiveCheck:
    """A check in which one rank calls another collective than ``name``, for every other collective."""

    def check(world: Backend) -> None:
        if world.world_size == 1:
            return
        odd = world.world_size - 1
        for other in SAMPLE_CALLS:
            if other == name or world.failure is not None:
                continue
            group = duplicate_group(world)
            mine, theirs = (other, name) if world.rank == odd else (name, other)
            what = f"{mine} while others called {theirs}"
            error = error_of(fd.CollectiveMismatchError, partial(SAMPLE_CALLS[mine], group=group), what)
            assert f"called {name}(" in error.message, f"{what}: {name} is not in {error.message!r}"
            assert f"called {other}(" in error.message, f"{what}: {other} is not in {error.message!r}"
            assert f"rank {odd} " in error.message, f"{what}: rank {odd} is not in {error.message!r}"
            if world.world_size > 2:
                assert error.ranks == (odd,), f"{what}: rank {odd} called something else, not {error.ranks}"
            _check_stays_failed(group, error)
            group.close()
            _check_agreement(world, error, what)

    check.__name__ = check.__qualname__ = f"mismatches_of_{name}"
    check.__doc__ = f"When a rank calls another collective than {name}, all ranks raise an error with both names."
    return check


MISMATCH_CHECKS = tuple(map(_mismatch_check, SAMPLE_CALLS))


def _coalesced(*counts: int, group: Backend) -> None:
    with fd.coalesce(group):
        pending = [fd.async_allreduce(torch.ones(count), group=group) for count in counts]
    for handle in reversed(pending):
        handle.wait()


def _started(name: str, *args: object, group: Backend, **kwargs: object) -> object:
    return getattr(fd, f"async_{name}")(*args, group=group, **kwargs).wait()


def _exchange_rows(columns: int, *, group: Backend) -> torch.Tensor:
    counts = [1] * group.world_size
    return fd.all_to_all_single_uneven(torch.ones(group.world_size, columns), counts, counts, group=group)


def _scatter_objects(src: int, *, group: Backend) -> object:
    return fd.scatter_object(["a"] * group.world_size, src, group=group)


_ONES, _INTEGERS, _SQUARE = torch.ones(4), torch.ones(4, dtype=torch.int32), torch.ones(4, 4)

_Variant: TypeAlias = "tuple[Collective, Collective, tuple[str, ...]]"


def _pair(call: Collective, usual: Sequence[Any], other: Sequence[Any], *words: str) -> _Variant:
    """``call`` with the positional arguments ``usual`` and with ``other``; the error must have all ``words``."""
    return partial(call, *usual), partial(call, *other), words


def _dims(call: Collective, usual: int, other: int, *words: str) -> _Variant:
    return partial(call, _SQUARE, dim=usual), partial(call, _SQUARE, dim=other), words


_VARIANTS: dict[str, _Variant] = {
    "element counts of allreduce": _pair(fd.allreduce, [_ONES], [torch.ones(5)], "[4]", "[5]"),
    "large and small": _pair(fd.allreduce, [_ONES], [torch.ones(100_000)], "[4]", "[100000]"),
    "dtypes of one size": _pair(fd.allreduce, [_ONES], [_INTEGERS], "float32", "int32"),
    "operations": _pair(fd.allreduce, [_ONES, fd.ReduceOp.MIN], [_ONES, fd.ReduceOp.MAX], "min", "max"),
    "operations of reduce_scatter": _pair(
        fd.reduce_scatter, [_ONES], [_ONES, fd.premultiplied_sum(1.0)], "(sum,", "(premultiplied_sum,"
    ),
    "roots of reduce": _pair(fd.reduce, [_ONES, 0], [_ONES, 1], "root=0", "root=1"),
    "roots of broadcast": _pair(fd.broadcast, [_ONES, 0], [_ONES, 1], "root=0", "root=1"),
    "roots of gather": _pair(fd.gather, [_ONES, 0], [_ONES, 1], "root=0", "root=1"),
    "roots of scatter": _pair(_scatter, [_ONES, 0], [_ONES, 1], "src=0", "src=1"),
    "dims of scatter": _dims(_scatter, 0, 1, "dim=0", "dim=1"),
    "dims of gather": _dims(fd.gather, 0, 1, "gather", "dim 0", "dim 1"),
    "dims of all_gather": _dims(fd.all_gather, 0, -1, "all_gather(float32[", "dim=0)", "dim=1)"),
    "dims of a started all_gather": _pair(
        partial(_started, "all_gather"), [_SQUARE], [_SQUARE, 1], "all_gather(float32[", "dim=0)", "dim=1)"
    ),
    "dims of reduce_scatter": (
        partial(fd.reduce_scatter, _SQUARE, dim=-2),
        partial(_started, "reduce_scatter", _SQUARE, dim=1),
        ("reduce_scatter(sum, float32[16], dim=0)", "reduce_scatter(sum, float32[16], dim=1)"),
    ),
    "dims of reduce_scatter_tensor": (
        lambda group: fd.reduce_scatter_tensor(
            torch.ones(fd.compute_shard_sizes(4, group.world_size)[group.rank], 4), _SQUARE, group=group
        ),
        partial(fd.reduce_scatter, _SQUARE, dim=1),
        ("dim=0)", "dim=1)"),
    ),
    "dims of all_gather_uneven": _dims(fd.all_gather_uneven, 0, -1, "all_gather_uneven", "dim 0", "dim 1"),
    "sizes of all_gather": _pair(fd.all_gather, [torch.ones(1)], [torch.ones(2)], "float32", "all_gather"),
    "rows of all_gather_uneven": _pair(
        fd.all_gather_uneven, [torch.ones(2, 3)], [torch.ones(3, 2)], "float32", "all_gather"
    ),
    "dtypes of broadcast": _pair(fd.broadcast, [_ONES], [_INTEGERS], "float32", "int32"),
    "dtypes of all_to_all": _pair(_all_to_all, [_ONES], [_INTEGERS], "float32", "int32"),
    "sizes of all_to_all": (
        lambda group: fd.all_to_all(torch.ones(group.world_size, 2), group=group),
        partial(_all_to_all, torch.ones(3)),
        ("all_to_all(float32[2])", "all_to_all(float32[3])"),
    ),
    "rows of all_to_all_single_uneven": _pair(
        _exchange_rows, [2], [5], "all_to_all(float32[2])", "all_to_all(float32[5])"
    ),
    "started operations": _pair(_started, ["allreduce", _ONES], ["broadcast", _ONES], "allreduce", "broadcast"),
    "operations in a coalesce block": _pair(_coalesced, [4, 2], [2, 4], "allreduce[4]", "allreduce[2]"),
    "numbers of operations in a coalesce block": _pair(_coalesced, [4, 2], [6], "allreduce[4]", "allreduce[6]"),
    "roots of objects": _pair(fd.broadcast_object, ["a", 0], ["a", 1], "root=0", "root=1"),
    "sources of objects": _pair(_scatter_objects, [0], [1], "scatter_object", "src=0", "src=1"),
    "objects and tensors": (
        partial(fd.broadcast_object, "a"),
        partial(fd.broadcast, torch.zeros(1, dtype=torch.int64)),
        ("broadcast_object", "broadcast(int64[1]"),
    ),
    "objects and sizes of objects": (
        partial(_scatter_objects, 0),
        lambda group: fd.broadcast(torch.zeros(group.world_size, dtype=torch.int64), group=group),
        ("scatter_object", "broadcast(int64["),
    ),
}


def mismatches_within_a_collective(world: Backend) -> None:
    """The same collective with another size, dtype, operation, root or dim is a mismatch that names both calls."""
    if world.world_size == 1:
        return
    for odd in {0, 1, world.world_size - 1}:
        for name, (usual, other, words) in _VARIANTS.items():
            if world.failure is not None:
                return  # a backend whose sub-groups can't fail alone
            group = duplicate_group(world)
            call = partial(other if world.rank == odd else usual, group=group)
            what = f"different {name}"
            error = error_of(fd.CollectiveMismatchError, call, what)
            for word in words:
                assert word in error.message, f"{what}: {word} is not in {error.message!r}"
            _check_stays_failed(group, error)
            group.close()
            _check_agreement(world, error, what)


def counts_that_do_not_meet(world: Backend) -> None:
    """When a rank expects other rows than another sends, those two raise SizeMismatchError, and no rank goes on."""
    p = world.world_size
    if p == 1:
        return
    for unit in (1, 100_000):
        group = duplicate_group(world)
        send = [unit] * p  # rows
        receive = [2 * unit if world.rank == 1 and src == 0 else unit for src in range(p)]

        def twice(group: Backend = group, send: list[int] = send, receive: list[int] = receive) -> None:
            fd.all_to_all_single_uneven(torch.zeros(sum(send), 3), send, receive, group=group)
            fd.barrier(group)  # where the error may reach a rank whose own counts fit

        error = error_of(fd.SizeMismatchError, twice, "counts that don't meet")
        assert error.ranks == (0,), f"rank 0 sends too little, the error names {error.ranks}: {error!r}"
        said = f"rank 1 expects {2 * unit} rows from rank 0 (recv_counts[0])"
        assert said in error.message, f"not in the error: {said!r}: {error.message!r}"
        if world.failure is not None:
            return


def _late(world: Backend, late: tuple[int, ...], name: str) -> None:
    """Let ``late`` skip a collective, and check that every rank raises the error in time."""
    group = duplicate_group(world)
    watch = Deadline(_DEADLINE_SECONDS)
    if world.rank in late:
        awaited = next(rank for rank in range(world.world_size) if rank != world.rank)
        what = f"rank {world.rank}, which stays away from {name}"
        recv = partial(group.recv, bytearray(1), awaited, timeout=_DEADLINE_SECONDS + 10 * COLLECTIVE_SLACK_SECONDS)
        error = error_of(fd.DistributedTimeoutError, recv, what)
    else:
        error = error_of(fd.DistributedTimeoutError, partial(_LIMITED[name], group), f"{name} without {late}")
    elapsed = watch.elapsed()
    in_time = elapsed <= _DEADLINE_SECONDS + COLLECTIVE_SLACK_SECONDS
    assert in_time, f"rank {world.rank} raised the error of {late} after {elapsed:.2f} s"
    assert error.ranks == late, f"{late} stayed away from {name}, rank {world.rank} names {error.ranks}: {error}"
    assert name.removeprefix("async_") in error.message, f"{name} is not in {error.message!r}"
    _check_stays_failed(group, error)
    group.close()
    # Where rank 0 is late the others find that out each by itself, and say so: all else must be the same.
    _check_agreement(world, fd.DistributedTimeoutError("late", ranks=error.ranks), f"{late} late for {name}")


_LIMITED: dict[str, Collective] = {
    "barrier": lambda group: fd.monitored_barrier(group, timeout=_DEADLINE_SECONDS),
    "async_allreduce": lambda group: _started("allreduce", torch.ones(70_000), group=group, timeout=_DEADLINE_SECONDS),
    "gather": lambda group: fd.gather(torch.ones(4), group=group, timeout=_DEADLINE_SECONDS),
}


def late_ranks_are_named(world: Backend) -> None:
    """Stragglers are named on every rank within the deadline, be it rank 0, the last, or several."""
    p = world.world_size
    cases = [(p - 1,), (0,), (p - 2, p - 1)]
    for late, name in zip(cases[: min(3, p)], _LIMITED, strict=False):
        if p > 1 and world.failure is None:
            _late(world, late, name)


def aborts_reach_waiting_ranks(world: Backend) -> None:
    """When a rank aborts, all ranks that wait in a collective raise its reason, and so do all later calls."""
    p = world.world_size
    for count in (4, 200_000):
        group = duplicate_group(world)
        if world.rank == p - 1:
            if p > 1:
                group.recv(bytearray(1), 0, tag=1)
            group.abort("the loss is NaN")
            error = error_of(fd.GroupAbortedError, partial(fd.barrier, group), "a barrier after an abort")
        else:
            pending = [fd.async_allreduce(torch.ones(count), group=group) for _ in range(3)]
            if world.rank == 0:
                group.send(b"x", p - 1, tag=1)
            for handle in pending:
                error = error_of(fd.GroupAbortedError, handle.wait, "an allreduce on a group that is aborted")
        assert "the loss is NaN" in error.message, f"the reason is not in {error.message!r}"
        assert error.ranks == (p - 1,), f"rank {p - 1} aborted, the error names {error.ranks}"
        _check_stays_failed(group, error)
        group.close()
        _check_agreement(world, error, "an abort")
        if world.failure is not None:
            return


def aborts_reach_messages(world: Backend) -> None:
    """When a rank aborts, sends to it and receives from it fail on the other side."""
    p = world.world_size
    if p == 1:
        return
    group = duplicate_group(world)
    if world.rank == p - 1:
        group.recv(bytearray(1), 0, tag=1)
        group.abort("enough")
    elif world.rank == 0:
        group.send(b"x", p - 1, tag=1)
        error_of(fd.GroupAbortedError, lambda: fd.send(torch.ones(300_000), p - 1, group=group), "a large send")
    else:
        error_of(fd.GroupAbortedError, lambda: fd.recv(None, None, fd.ANY_SOURCE, group=group), "a recv")


def ranks_that_leave_are_named(world: Backend) -> None:
    """When a rank closes the group, ranks that wait for it in a collective get PeerLostError with its rank."""
    p = world.world_size
    if p < 2:
        return
    for leaver, order in ((p - 1, range(p)), (0, range(p)), (0, range(p)[::-1])):
        group = SubBackend(world, order)
        fd.barrier(group)
        if group.rank == leaver:
            group.close()
            error_of(fd.GroupClosedError, partial(fd.allreduce, torch.ones(3), group=group), "allreduce after close")
        else:
            error = error_of(fd.PeerLostError, partial(fd.allreduce, torch.ones(3), group=group), "allreduce")
            assert error.ranks == (leaver,), f"rank {leaver} left, the error names {error.ranks}: {error}"
            named = f"rank {leaver} of group {group.name!r}"
            assert named in error.message, f"{named} left, the error says: {error}"
            _check_stays_failed(group, error)
        if world.failure is not None:
            return
        fd.barrier(world)
