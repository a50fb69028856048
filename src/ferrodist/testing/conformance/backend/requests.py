"""Checks of asynchronous transfers."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from ferrodist.backends.request import wait_all
from ferrodist.backends.tags import ANY_SOURCE
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, DistributedTimeoutError, SizeMismatchError
from ferrodist.testing.conformance.backend.harness import (
    LARGE,
    TIMEOUT,
    check_bytes,
    check_deadline,
    error_of,
    pattern,
    rank_check,
    receive,
)

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend


@rank_check()
def large_messages_cross(group: Backend) -> None:
    """Ranks that send each other large messages at the same moment, all with all, don't block each other."""
    others = [rank for rank in range(group.world_size) if rank != group.rank]
    buffers = {rank: bytearray(LARGE) for rank in others}
    sends = [group.isend(pattern(LARGE, seed=group.rank), rank) for rank in others]
    receives = [group.irecv(buffers[rank], rank) for rank in others]
    wait_all([*sends, *receives], Deadline(TIMEOUT))
    for rank in others:
        check_bytes(buffers[rank], pattern(LARGE, seed=rank), f"the large message of rank {rank}")


@rank_check()
def a_ring_of_large_messages_turns(group: Backend) -> None:
    """Each rank posts a receive from its left and sends to its right, round after round, as ring collectives do."""
    dst, src = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    mine = bytearray(pattern(LARGE, seed=group.rank))
    for step in range(group.world_size):
        incoming = bytearray(LARGE)
        posted = group.irecv(incoming, src, tag=step)
        group.send(mine, dst, tag=step, timeout=TIMEOUT)
        assert posted.wait(TIMEOUT) == src, "a request's wait returns the rank of the other side"
        mine = incoming
    check_bytes(mine, pattern(LARGE, seed=group.rank), "what has come round the ring")


@rank_check()
def many_transfers_may_be_under_way(group: Backend) -> None:
    """A hundred sends and receives with each peer may be in flight, and be waited for in any order."""
    count = 100
    others = [rank for rank in range(group.world_size) if rank != group.rank]
    buffers = {(rank, tag): bytearray(tag * 7) for rank in others for tag in range(count)}
    receives = {key: group.irecv(buffer, key[0], tag=key[1]) for key, buffer in buffers.items()}
    sends = [
        group.isend(pattern(tag * 7, seed=group.rank + tag), rank, tag=tag)
        for tag in reversed(range(count))
        for rank in others
    ]
    wait_all([*reversed(sends), *reversed(receives.values())], Deadline(TIMEOUT))
    for (rank, tag), buffer in buffers.items():
        check_bytes(buffer, pattern(tag * 7, seed=rank + tag), f"rank {rank}, tag {tag}")


@rank_check()
def started_transfers_keep_order(group: Backend) -> None:
    """Sends with one tag arrive as they were started, and receives with one tag take messages as they were posted."""
    sizes = [0, 9, 70_000, 3, 400_000, 1, 2, 8] * 4
    if group.rank == 0:
        sends = [group.isend(pattern(size, seed=i), 1) for i, size in enumerate(sizes)]
        wait_all(sends, Deadline(TIMEOUT))
    elif group.rank == 1:
        buffers = [bytearray(size) for size in sizes]
        wait_all([group.irecv(buffer, 0) for buffer in buffers], Deadline(TIMEOUT))
        for i, buffer in enumerate(buffers):
            check_bytes(buffer, pattern(sizes[i], seed=i), f"the receive posted as number {i}")


@rank_check(min_ranks=3)
def receives_from_different_ranks_are_independent(group: Backend) -> None:
    """A receive posted for one rank does not hold up a later one, with the same tag, for another rank."""
    if group.rank == 0:
        first, second = bytearray(1), bytearray(1)
        from_1 = group.irecv(first, 1)
        from_2 = group.irecv(second, 2)
        group.send(b"go", 2, tag=1, timeout=TIMEOUT)
        from_2.wait(TIMEOUT)
        assert not from_1.done(), "a receive is done before anything was sent to it"
        group.send(b"go", 1, tag=1, timeout=TIMEOUT)
        from_1.wait(TIMEOUT)
        check_bytes(first + second, bytes([1, 2]), "the messages of ranks 1 and 2")
    elif group.rank < 3:
        receive(group, 0, 2, tag=1)
        group.send(bytes([group.rank]), 0, timeout=TIMEOUT)


@rank_check()
def an_end_is_announced_once(group: Backend) -> None:
    """A request is not done before its message; then its callbacks run once, those added later at once."""
    if group.rank == 1:
        receive(group, 0, 2, tag=1)
        group.send(b"message", 0, timeout=TIMEOUT)
    elif group.rank == 0:
        request = group.irecv(bytearray(7), 1)
        calls: list[str] = []
        called = threading.Event()
        request.add_done_callback(lambda: calls.append("before"))
        request.add_done_callback(called.set)
        assert not request.done(), "a receive is done before anything was sent"
        assert not calls, "a callback ran before the transfer ended"
        group.send(b"go", 1, tag=1, timeout=TIMEOUT)
        assert request.wait(TIMEOUT) == 1, "wait returns the rank that sent"
        assert request.done(), "a request that was waited for is done"
        assert called.wait(TIMEOUT), "a callback did not run"
        request.add_done_callback(lambda: calls.append("after"))
        assert request.wait(0) == 1, "a request that is done may be waited for again"
        assert calls == ["before", "after"], f"callbacks that ran: {calls}"


@rank_check()
def a_wait_may_be_repeated(group: Backend) -> None:
    """`Request.wait` that times out leaves the transfer in flight; a later wait completes it."""
    if group.rank == 1:
        receive(group, 0, 2, tag=1)
        group.send(b"late", 0, timeout=TIMEOUT)
    elif group.rank == 0:
        buffer = bytearray(4)
        request = group.irecv(buffer, 1)
        for timeout in (0.0, 0.2):
            with check_deadline(timeout, "Request.wait"):
                error_of(DistributedTimeoutError, lambda t=timeout: request.wait(t), "a wait for nothing")  # type: ignore[misc]
        group.send(b"go", 1, tag=1, timeout=TIMEOUT)
        request.wait(TIMEOUT)
        check_bytes(buffer, b"late", "the transfer after two waits in vain")


@rank_check()
def a_cancelled_receive_takes_nothing(group: Backend) -> None:
    """After `cancel` the buffer stays as it is, and the next receive gets the message."""
    for size in (10, LARGE):
        for source in (1 if group.rank == 0 else 0, ANY_SOURCE):
            if group.rank == 1:
                receive(group, 0, 2, tag=1)
                group.send(pattern(size), 0, timeout=TIMEOUT)
            elif group.rank == 0:
                abandoned = bytearray(size)
                request = group.irecv(abandoned, source)
                assert request.cancel(), "cancel of a receive that has nothing returns True"
                assert request.done(), "a cancelled request is done"
                assert not request.cancel(), "cancel of a request that has ended returns False"
                error_of(DistributedError, partial(request.wait, 0), "the wait for a cancelled receive")
                group.send(b"go", 1, tag=1, timeout=TIMEOUT)
                check_bytes(receive(group, 1, size), pattern(size), "the message after a cancelled receive")
                assert not any(abandoned), "a cancelled receive has written into its buffer"


@rank_check()
def an_ended_request_is_not_cancelled(group: Backend) -> None:
    """`cancel` of a request that has ended returns False and changes nothing."""
    if group.rank == 1:
        request = group.isend(b"sent", 0)
        request.wait(TIMEOUT)
        assert not request.cancel(), "cancel of a send that has ended returns False"
    elif group.rank == 0:
        buffer = bytearray(4)
        request = group.irecv(buffer, 1)
        request.wait(TIMEOUT)
        assert not request.cancel(), "cancel of a receive that has ended returns False"
        assert request.wait(0) == 1, "a useless cancel changed the request"
        check_bytes(buffer, b"sent", "a message that was received")


@rank_check()
def a_posted_receive_that_does_not_fit_raises(group: Backend) -> None:
    """A posted receive of another size than the message ends with `SizeMismatchError`; the message stays."""
    if group.rank == 1:
        receive(group, 0, 2, tag=1)
        group.send(b"12345", 0, timeout=TIMEOUT)
    elif group.rank == 0:
        request = group.irecv(bytearray(4), 1)
        group.send(b"go", 1, tag=1, timeout=TIMEOUT)
        error_of(SizeMismatchError, lambda: request.wait(TIMEOUT), "a receive of 5 bytes into 4")
        check_bytes(receive(group, 1, 5), b"12345", "the message after the mismatch")
