"""Checks of blocking messages: contents, order, tags, sizes."""

from __future__ import annotations

import array
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ferrodist.backends.tags import ANY_SOURCE
from ferrodist.errors import SizeMismatchError
from ferrodist.testing.conformance.backend.harness import (
    LARGE,
    TIMEOUT,
    as_runner,
    check_bytes,
    error_of,
    pattern,
    rank_check,
    receive,
)

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend
    from ferrodist.testing.conformance.backend.harness import BackendUnderTest

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
