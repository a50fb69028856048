"""Checks of messages: blocking ones, and transfers that are started and waited for."""

from __future__ import annotations

import array
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ferrodist.backends.request import wait_all
from ferrodist.backends.tags import ANY_SOURCE
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, DistributedTimeoutError, SizeMismatchError
from ferrodist.testing.conformance.harness import (
    LARGE,
    TIMEOUT,
    as_runner,
    check_bytes,
    check_deadline,
    error_of,
    pattern,
    rank_check,
    receive,
)

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend
    from ferrodist.testing.conformance.harness import BackendUnderTest

_SIZES = (0, 1, 3, 4095, 65_535, 65_536, 65_537, LARGE, LARGE + 1)


def ranks_know_themselves(backend: BackendUnderTest, world_size: int = 3) -> None:
    """Each handle has its own rank and the group's size, a timeout, a name, and no failure."""

    def program(group: Backend) -> tuple[int, int]:
        assert isinstance(group.name, str), f"the group's name is {group.name!r}"
        assert group.name, "the group has no name for its error messages"
        assert group.timeout > 0, f"the group's timeout is {group.timeout!r}"
        assert group.failure is None, f"a fresh group has failed: {group.failure!r}"
        return group.rank, group.world_size

    known = as_runner(backend).run(world_size, program)
    assert known == [(rank, world_size) for rank in range(world_size)], f"(rank, world_size) by rank: {known}"


@rank_check()
def messages_of_all_sizes_arrive_whole(group: Backend) -> None:
    """`send` and `recv` carry 0, 1, odd, around 64 KiB and 8 MiB bytes unchanged."""
    for size in _SIZES:
        _pass_round(group, pattern(size, seed=size), f"a message of {size} bytes")


@rank_check()
def every_pair_of_ranks_can_talk(group: Backend) -> None:
    """Every rank reaches every other rank, not only its neighbours."""
    for src in range(group.world_size):
        for dst in range(group.world_size):
            if src != dst and group.rank == src:
                group.send(bytes([src, dst]), dst, timeout=TIMEOUT)
            elif src != dst and group.rank == dst:
                check_bytes(receive(group, src, 2), bytes([src, dst]), f"from rank {src} to rank {dst}")


@rank_check()
def buffers_of_many_kinds_are_taken(group: Backend) -> None:
    """`send` and `recv` take bytes, bytearray, memoryview, array and numpy arrays of any element type and shape."""
    data = pattern(96)
    sources: list[Any] = [  # numpy's arrays are buffers, which its annotations say from Python 3.12 on
        data,
        bytearray(data),
        memoryview(data),
        memoryview(data).cast("d"),
        memoryview(b"x" + data + b"x")[1:-1],
        array.array("I", data),
        np.frombuffer(data, np.float32).reshape(4, 6),
        np.frombuffer(data, np.complex128),
    ]
    longer = bytearray(98)
    targets: list[Any] = [
        bytearray(96),
        memoryview(bytearray(96)),
        memoryview(bytearray(96)).cast("d"),
        memoryview(longer)[1:97],
        array.array("H", bytes(96)),
        np.zeros((3, 4), np.int64),
        np.zeros(96, np.uint8),
        np.zeros((2, 6), np.complex64),
    ]
    for source, target in zip(sources, targets, strict=True):
        if group.rank == 0:
            group.send(source, 1, timeout=TIMEOUT)
        elif group.rank == 1:
            group.recv(target, 0, timeout=TIMEOUT)
            check_bytes(bytes(target), data, f"from {type(source).__name__} into {type(target).__name__}")
    assert longer[0] == longer[-1] == 0, "recv wrote outside the part of a buffer it was given"


@rank_check()
def a_sent_buffer_may_be_changed(group: Backend) -> None:
    """When `send` has returned the caller may change the data, without an effect on the receiver."""
    for size in (1, 100, 65_537, LARGE):
        if group.rank == 0:
            data = bytearray(pattern(size))
            group.send(data, 1, timeout=TIMEOUT)
            data[:] = bytes(size)
            group.send(b"changed", 1, tag=1, timeout=TIMEOUT)
        elif group.rank == 1:
            if size <= 100:  # the send of a larger one may last until it is received
                receive(group, 0, 7, tag=1)
            check_bytes(receive(group, 0, size), pattern(size), f"{size} bytes, changed after send")
            if size > 100:
                receive(group, 0, 7, tag=1)


@rank_check()
def order_is_kept_within_a_tag(group: Backend) -> None:
    """Messages from one rank with one tag arrive in the order they were sent, whatever their sizes."""
    sizes = [(0, 5, 70_000, 1, 300_000)[i % 5] + i for i in range(100)]
    messages = [(0, pattern(size, seed=i)) for i, size in enumerate(sizes)]
    _send_to_all(group, messages, received=messages)


@rank_check()
def tags_do_not_wait_for_each_other(group: Backend) -> None:
    """Messages with different tags are received in any order; small ones are sent without a receiver."""
    messages = [(tag, pattern(64, seed=tag)) for tag in range(20)]
    _send_to_all(group, messages, received=messages[::-1])


@rank_check()
def tags_are_compared_whole(group: Backend) -> None:
    """All 128 bits of a tag are compared: sub-groups and collectives use the upper ones."""
    tags = [0, 1, 2**31, 2**32, 2**53 + 1, 2**56 - 1, 2**56, 2**63, 2**64, 2**64 + 1, 2**127, 2**128 - 1]
    messages = [(tag, str(tag).encode().ljust(40)) for tag in tags]
    _send_to_all(group, messages, received=messages[::-1])


def _send_to_all(group: Backend, messages: list[tuple[int, bytes]], *, received: list[tuple[int, bytes]]) -> None:
    """Rank 0 sends ``messages``, each a tag and the data, to all others, which receive them in another order."""
    if group.rank == 0:
        for tag, data in messages:
            for dst in range(1, group.world_size):
                group.send(data, dst, tag=tag, timeout=TIMEOUT)
    else:
        for i, (tag, data) in enumerate(received):
            check_bytes(receive(group, 0, len(data), tag=tag), data, f"message {i}, with tag {tag:#x}")


@rank_check(min_ranks=3)
def any_source_takes_from_whoever_sent(group: Backend) -> None:
    """`ANY_SOURCE` receives from every rank, in order for each of them, and `recv` returns the sender."""
    if group.rank != 0:
        for i in range(10):
            group.send(bytes([group.rank, i]), 0, tag=3, timeout=TIMEOUT)
        return
    counts = dict.fromkeys(range(1, group.world_size), 0)
    for _ in range(10 * (group.world_size - 1)):
        buffer = bytearray(2)
        sender = group.recv(buffer, ANY_SOURCE, tag=3, timeout=TIMEOUT)
        assert bytes(buffer) == bytes([sender, counts[sender]]), f"rank {sender} is said to have sent {buffer!r}"
        counts[sender] += 1


@rank_check(min_ranks=3)
def a_source_takes_from_no_other(group: Backend) -> None:
    """A receive from one rank leaves messages of others with the same tag for later."""
    if group.rank != 0:
        group.send(bytes([group.rank]), 0, timeout=TIMEOUT)
    else:
        for src in reversed(range(1, group.world_size)):
            check_bytes(receive(group, src, 1), bytes([src]), f"the message of rank {src}")


@rank_check()
def a_message_that_does_not_fit_stays(group: Backend) -> None:
    """A receive into a shorter or longer buffer raises `SizeMismatchError` and leaves the message for the next one."""
    for size in (1, 100, LARGE):
        if group.rank == 0:
            group.send(pattern(size), 1, timeout=TIMEOUT)
        elif group.rank == 1:
            for wrong in (size - 1, size + 1, 0, size * 2):
                recv = partial(group.recv, bytearray(wrong), 0, timeout=TIMEOUT)
                error_of(SizeMismatchError, recv, f"recv of {size} bytes into {wrong}")
            assert group.failure is None, "a size mismatch must leave the group good"
            check_bytes(receive(group, 0, size), pattern(size), "the message after the mismatch")


@rank_check()
def a_message_may_be_shorter_than_its_buffer(group: Backend) -> None:
    """`irecv_up_to` takes a message of up to the buffer's size, says how long it is, and leaves the buffer's rest."""
    if not group.inline_limit:  # a backend without it
        return
    for size in (0, 1, 99, 100):
        if group.rank == 0:
            group.send(pattern(size), 1, timeout=TIMEOUT)
        elif group.rank == 1:
            buffer = bytearray(b"\xee" * 100)
            request = group.irecv_up_to(buffer, 0)
            assert request.wait(TIMEOUT) == 0, "irecv_up_to returned another rank than the sender"
            assert request.message_bytes == size, f"a message of {size} bytes came as {request.message_bytes}"
            check_bytes(buffer, pattern(size) + b"\xee" * (100 - size), f"{size} bytes in a buffer of 100")
    if group.rank == 0:
        group.send(pattern(101), 1, timeout=TIMEOUT)
    elif group.rank == 1:
        error_of(
            SizeMismatchError,
            lambda: group.irecv_up_to(bytearray(100), 0).wait(TIMEOUT),
            "irecv_up_to of 101 bytes into 100",
        )
        check_bytes(receive(group, 0, 101), pattern(101), "the message after the mismatch")


@rank_check()
def threads_share_a_handle(group: Backend) -> None:
    """Several threads of a rank may use its handle at the same time, each with a tag of its own."""
    num_threads = 4

    def converse(tag: int) -> None:
        for i in range(25):
            _pass_round(group, pattern(40_000 * (i % 3) + i, seed=tag + i), f"tag {tag}, {i}", tag=tag)

    with ThreadPoolExecutor(num_threads) as pool:
        for result in [pool.submit(converse, tag) for tag in range(num_threads)]:
            result.result()


def _pass_round(group: Backend, data: bytes, what: str, *, tag: int = 0) -> None:
    """Send ``data`` from rank to rank and back to rank 0, one blocking call at a time."""
    dst, src = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    if group.rank == 0:
        group.send(data, dst, tag=tag, timeout=TIMEOUT)
    got = receive(group, src, len(data), tag=tag)
    if group.rank != 0:
        group.send(got, dst, tag=tag, timeout=TIMEOUT)
    check_bytes(got, data, what)


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
            check_bytes(buffer, pattern(sizes[i], seed=i), f"receive {i}, counted from 0")


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
