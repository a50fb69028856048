"""Checks of sub-groups made over the backend."""

from __future__ import annotations

from itertools import combinations, product
from typing import TYPE_CHECKING

from ferrodist.backends.base import Backend
from ferrodist.backends.request import wait_all
from ferrodist.backends.subgroup import SubBackend
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    DistributedTimeoutError,
    GroupAbortedError,
    GroupClosedError,
    PeerLostError,
    SizeMismatchError,
)
from ferrodist.testing.conformance.harness import (
    LARGE,
    TIMEOUT,
    WAITS,
    await_ranks,
    check_bytes,
    error_of,
    in_recv,
    let_others_block,
    make_event,
    make_semaphore,
    pattern,
    rank_check,
    receive,
)

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event, Semaphore


@rank_check(min_ranks=3)
def groups_keep_their_messages_apart(world: Backend) -> None:
    """The world, all pairs as sub-groups, and two sub-groups of the same ranks use one tag without mixing messages."""
    memberships = [[0, 1, 2], [0, 1, 2], *map(list, combinations(range(world.world_size), 2))]
    groups = [world]
    groups.extend(SubBackend(world, ranks) if world.rank in ranks else world for ranks in memberships)
    mine = [(i, group) for i, group in enumerate(groups) if i == 0 or group is not world]
    sends = [
        group.isend(bytes([i, group.rank]), dst, tag=5)
        for i, group in mine
        for dst in range(group.world_size)
        if dst != group.rank
    ]
    for i, group in reversed(mine):
        for src in reversed(range(group.world_size)):
            if src != group.rank:
                check_bytes(receive(group, src, 2, tag=5), bytes([i, src]), f"in group {group.name} (number {i})")
    wait_all(sends, Deadline(TIMEOUT))


@rank_check(min_ranks=3)
def the_order_of_ranks_is_kept(world: Backend) -> None:
    """A sub-group of ranks [2, 0] makes rank 2 its rank 0 and rank 0 its rank 1, for messages and for sources."""
    if world.rank not in (0, 2):
        return
    group = SubBackend(world, [2, 0])
    assert group.world_size == 2, f"two ranks make a group of {group.world_size}"
    assert group.rank == {2: 0, 0: 1}[world.rank], f"rank {world.rank} is rank {group.rank} of [2, 0]"
    other = 1 - group.rank
    request = group.isend(bytes([group.rank]), other)
    check_bytes(receive(group, other, 1), bytes([other]), "a message in [2, 0]")
    assert request.wait(TIMEOUT) == other, "a request of a sub-group names the peer in the world's numbers"


@rank_check(min_ranks=3)
def groups_nest(world: Backend) -> None:
    """A sub-group of a sub-group works, with ranks numbered in its parent, beside its parent and the world."""
    if world.rank > 2:
        return
    outer = SubBackend(world, [2, 1, 0])
    if outer.rank == 2:
        return
    inner = SubBackend(outer, [1, 0])  # the world's ranks 1 and 2
    assert inner.rank == {1: 0, 2: 1}[world.rank], f"rank {world.rank} is rank {inner.rank} of the inner group"
    other = 1 - inner.rank
    sends = [inner.isend(b"inner", other), outer.isend(b"outer", 1 - outer.rank), world.isend(b"world", 3 - world.rank)]
    check_bytes(receive(world, 3 - world.rank, 5), b"world", "in the world")
    check_bytes(receive(outer, 1 - outer.rank, 5), b"outer", "in the outer group")
    check_bytes(receive(inner, other, 5), b"inner", "in the inner group")
    wait_all(sends, Deadline(TIMEOUT))
    inner.barrier(timeout=TIMEOUT)


@rank_check(min_ranks=3)
def a_subgroup_carries_large_messages(world: Backend) -> None:
    """Large messages cross in a sub-group as they do in the world."""
    if world.rank not in (0, 2):
        return
    group = SubBackend(world, [0, 2])
    other, buffer = 1 - group.rank, bytearray(LARGE)
    requests = [group.isend(pattern(LARGE, seed=group.rank), other), group.irecv(buffer, other)]
    wait_all(requests, Deadline(TIMEOUT))
    check_bytes(buffer, pattern(LARGE, seed=other), "a large message in a sub-group")


@rank_check(min_ranks=3)
def a_subgroups_barrier_is_its_own(world: Backend) -> None:
    """A sub-group's barrier waits for its members only; a late member is named by its number in the sub-group."""
    if world.rank not in (0, 2):
        return
    group = SubBackend(world, [2, 0])
    group.barrier(timeout=TIMEOUT)
    if world.rank == 2:
        error = error_of(DistributedTimeoutError, lambda: group.barrier(timeout=0.1), "a barrier alone")
        assert error.ranks == (1,), f"rank 0, which is rank 1 of [2, 0], is late; named is {error.ranks}"


@rank_check(make_event, min_ranks=3)
def an_abort_ends_its_group_only(world: Backend, aborted: Event) -> None:
    """Aborting a sub-group ends it on its members; the world and a sibling go on where the backend overrides
    `Backend.abort_subgroup`, and otherwise end as well.
    """
    if world.rank > 1:
        return
    group, sibling = SubBackend(world, [0, 1]), SubBackend(world, [1, 0])
    if world.rank == 1:
        group.abort("only this one")
        aborted.set()
    error = error_of(GroupAbortedError, lambda: in_recv(group, 1 - group.rank), "recv")
    assert "only this one" in str(error), f"a member of the aborted group says: {error}"
    assert group.failure is not None, "an aborted sub-group has no failure"
    assert aborted.wait(TIMEOUT), "abort did not return"
    if type(world).abort_subgroup is Backend.abort_subgroup:
        error_of(GroupAbortedError, lambda: in_recv(world, 1 - world.rank), "recv in the world")
        return
    for good in (world, sibling):
        peer = 1 - good.rank
        request = good.isend(b"good", peer)
        check_bytes(receive(good, peer, 4), b"good", f"in {good.name}, after an abort of {group.name},")
        request.wait(TIMEOUT)
        assert good.failure is None, f"an abort of {group.name} has failed {good.name}"


@rank_check(min_ranks=3)
def a_subgroup_closes_alone(world: Backend) -> None:
    """Closing a sub-group twice is allowed, ends its calls with `GroupClosedError`, and leaves the world as it was."""
    if world.rank < 2:
        group = SubBackend(world, [0, 1])
        group.barrier(timeout=TIMEOUT)
        group.close()
        group.close()
        error_of(GroupClosedError, lambda: group.send(b"x", 1 - group.rank), "send in a closed sub-group")
        error_of(GroupClosedError, lambda: group.barrier(timeout=TIMEOUT), "barrier of a closed sub-group")
    world.barrier(timeout=TIMEOUT)
    assert world.failure is None, "closing a sub-group has failed the world"


@rank_check(make_semaphore, min_ranks=3, cases=lambda _: product(("recv", "send", "barrier"), (False, True)))
def ranks_are_named_as_their_subgroup_does(
    world: Backend,
    ready: Semaphore,
    call: str,
    nested: bool,  # noqa: FBT001
) -> None:
    """Errors in a sub-group, nested or not, name ranks as the sub-group numbers them: a peer that left the world, and
    the sender of a message of the wrong size.
    """
    if world.rank not in (1, 2):
        return
    # Rank 2 of the world is rank 0 of the inner group, either way.
    outer = SubBackend(world, [0, 2, 1], name="outer") if nested else world
    group = SubBackend(outer, [1, 2] if nested else [2, 1], name="inner")
    leaver = 0
    if group.rank == leaver:
        group.send(b"too long", 1, tag=1, timeout=TIMEOUT)
        await_ranks(ready, 1)
        let_others_block(world, 0)
        world.close(timeout=0.5)
        return
    misfit = error_of(SizeMismatchError, lambda: group.recv(bytearray(1), leaver, tag=1, timeout=TIMEOUT), "recv")
    assert misfit.ranks in ((), (leaver,)), f"{leaver} of {group.name} sent too much, named is {misfit.ranks}"
    ready.release()
    what = f"{call}, when rank {leaver} of a sub-group leaves the world,"
    error = error_of(PeerLostError, lambda: WAITS[call](group, leaver), what)
    assert error.ranks == (leaver,), f"{what} names {error.ranks}: {error}"
    assert f"rank {leaver} of group 'inner'" in error.message, f"{what} says: {error}"
