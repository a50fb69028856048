"""Checks of blocking messages: contents, order, tags, sizes.

Checks of wrong arguments: each is refused at once, clearly, and the group stays good.
"""

from __future__ import annotations

import array
import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from ferrodist.backends.tags import ANY_SOURCE
from ferrodist.errors import InvalidRankError, SelfSendError, SizeMismatchError
from ferrodist.testing.conformance.backend.harness import (
    LARGE,
    PATIENCE,
    RankRunner,
    backend_check,
    error_of,
    pattern,
    receive,
    same_bytes,
    transfer_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend

_BUFFER_ERRORS = (TypeError, ValueError, BufferError)


@backend_check()
def ranks_outside_the_group_are_refused(runner: RankRunner, world_size: int) -> None:
    """A peer that is no rank of the group raises `InvalidRankError` from every call that takes one."""

    def program(group: Backend) -> None:
        wrong: list[Any] = [world_size, -2, 2**31, "1", 1.0, None, True]
        for peer in wrong:
            for name, call in _calls_with_peer(group, peer).items():
                error_of(InvalidRankError, call, f"{name} with peer {peer!r}")
        for name in ("send", "isend"):
            call = _calls_with_peer(group, ANY_SOURCE)[name]
            error_of(InvalidRankError, call, f"{name} to ANY_SOURCE")
        _assert_good(group)

    runner.run(world_size, program)


@backend_check()
def a_rank_does_not_talk_to_itself(runner: RankRunner, world_size: int) -> None:
    """The own rank as a peer raises `SelfSendError`, which names it."""

    def program(group: Backend) -> None:
        for name, call in _calls_with_peer(group, group.rank).items():
            error = error_of(SelfSendError, call, f"{name} with its own rank")
            assert error.ranks == (group.rank,), f"{name} with its own rank names {error.ranks}"
        _assert_good(group)

    runner.run(world_size, program)


@backend_check()
def wrong_tags_are_refused(runner: RankRunner, world_size: int) -> None:
    """A tag that is negative, longer than 128 bits or no integer raises ValueError (TypeError will do for a type)."""

    def program(group: Backend) -> None:
        peer = (group.rank + 1) % world_size
        wrong_types: list[Any] = ["1", 1.5, None]
        for tag in (-1, 2**128, *wrong_types):
            kinds = ValueError if isinstance(tag, int) else (ValueError, TypeError)
            for name, call in _calls_with_peer(group, peer, tag=tag).items():
                error_of(kinds, call, f"{name} with tag {tag!r}")
        _assert_good(group)

    runner.run(world_size, program)


@backend_check()
def wrong_timeouts_are_refused(runner: RankRunner, world_size: int) -> None:
    """A timeout that is negative or NaN raises ValueError, one that is no number TypeError, before anything is done."""

    def program(group: Backend) -> None:
        peer = (group.rank + 1) % world_size
        wrong_types: list[Any] = ["1", True, [1]]
        for timeout in (-1, -0.001, math.nan, *wrong_types):
            kind = TypeError if timeout in wrong_types else ValueError
            calls: dict[str, Callable[[], object]] = {
                "send": lambda t=timeout: group.send(b"x", peer, timeout=t),  # type: ignore[misc]
                "recv": lambda t=timeout: group.recv(bytearray(1), peer, timeout=t),  # type: ignore[misc]
                "barrier": lambda t=timeout: group.barrier(timeout=t),  # type: ignore[misc]
            }
            for name, call in calls.items():
                error_of(kind, call, f"{name} with timeout {timeout!r}")
        _assert_good(group)

    runner.run(world_size, program)


@backend_check()
def buffers_that_cannot_be_sent_are_refused(runner: RankRunner, world_size: int) -> None:
    """Data that is no C-contiguous buffer raises TypeError, ValueError or BufferError."""

    def program(group: Backend) -> None:
        peer = (group.rank + 1) % world_size
        wrong: list[Any] = [memoryview(bytes(8))[::2], np.zeros((4, 4)).T, np.zeros(8)[::2], "text", [1, 2], 7, None]
        for data in wrong:
            error_of(_BUFFER_ERRORS, lambda d=data: group.send(d, peer, timeout=PATIENCE), f"send of {data!r}")  # type: ignore[misc]
            transfer_error(_BUFFER_ERRORS, lambda d=data: group.isend(d, peer), f"isend of {data!r}")  # type: ignore[misc]
        _assert_good(group)

    runner.run(world_size, program)


@backend_check()
def buffers_that_cannot_be_filled_are_refused(runner: RankRunner, world_size: int) -> None:
    """A receive into what is no writable C-contiguous buffer raises TypeError, ValueError or BufferError at once."""

    def program(group: Backend) -> None:
        peer = (group.rank + 1) % world_size
        frozen = np.zeros(4, np.uint8)
        frozen.flags.writeable = False
        wrong: list[Any] = [b"1234", memoryview(bytearray(8))[::2], np.zeros((2, 2), np.uint8).T, frozen, "text", None]
        for buffer in wrong:
            what = f"into {buffer!r}"
            error_of(_BUFFER_ERRORS, lambda b=buffer: group.recv(b, peer, timeout=PATIENCE), f"recv {what}")  # type: ignore[misc]
            transfer_error(_BUFFER_ERRORS, lambda b=buffer: group.irecv(b, peer), f"irecv {what}")  # type: ignore[misc]
        _assert_good(group)

    runner.run(world_size, program)


def _calls_with_peer(group: Backend, peer: int, tag: int = 0) -> dict[str, Callable[[], object]]:
    return {
        "send": lambda: group.send(b"x", peer, tag=tag, timeout=PATIENCE),
        "recv": lambda: group.recv(bytearray(1), peer, tag=tag, timeout=PATIENCE),
        "isend": lambda: group.isend(b"x", peer, tag=tag).wait(PATIENCE),
        "irecv": lambda: group.irecv(bytearray(1), peer, tag=tag).wait(PATIENCE),
    }


def _assert_good(group: Backend) -> None:
    """The group still works, and no refused message was sent: the next ones that arrive are these."""
    assert group.failure is None, f"a wrong argument has failed the group: {group.failure}"
    for tag in (0, 1):
        request = group.isend(bytes([group.rank]), (group.rank + 1) % group.world_size, tag=tag)
        src = (group.rank - 1) % group.world_size
        assert receive(group, src, 1, tag=tag) == bytes([src]), "a message that had been refused was delivered"
        request.wait(PATIENCE)


ARGUMENT_CHECKS = (
    ranks_outside_the_group_are_refused,
    a_rank_does_not_talk_to_itself,
    wrong_tags_are_refused,
    wrong_timeouts_are_refused,
    buffers_that_cannot_be_sent_are_refused,
    buffers_that_cannot_be_filled_are_refused,
)

_SIZES = (0, 1, 3, 4095, 65_535, 65_536, 65_537, LARGE, LARGE + 1)


@backend_check()
def ranks_know_themselves(runner: RankRunner, world_size: int) -> None:
    """Each handle has its own rank and the group's size, a timeout, a name, and no failure."""

    def program(group: Backend) -> tuple[int, int]:
        assert isinstance(group.name, str), f"the group's name is {group.name!r}"
        assert group.name, "the group has no name for its error messages"
        assert group.timeout > 0, f"the group's timeout is {group.timeout!r}"
        assert group.failure is None, f"a fresh group has failed: {group.failure!r}"
        return group.rank, group.world_size

    known = runner.run(world_size, program)
    assert known == [(rank, world_size) for rank in range(world_size)], f"(rank, world_size) by rank: {known}"


@backend_check()
def messages_of_all_sizes_arrive_whole(runner: RankRunner, world_size: int) -> None:
    """`send` and `recv` carry 0, 1, odd, around 64 KiB and 8 MiB bytes unchanged."""

    def program(group: Backend) -> None:
        for size in _SIZES:
            data = pattern(size, seed=size)
            same_bytes(_pass_round(group, data, size), data, f"a message of {size} bytes")

    runner.run(world_size, program)


@backend_check()
def every_pair_of_ranks_can_talk(runner: RankRunner, world_size: int) -> None:
    """Every rank reaches every other rank, not only its neighbours."""

    def program(group: Backend) -> None:
        for src in range(world_size):
            for dst in range(world_size):
                if src != dst and group.rank == src:
                    group.send(bytes([src, dst]), dst, timeout=PATIENCE)
                elif src != dst and group.rank == dst:
                    same_bytes(receive(group, src, 2), bytes([src, dst]), f"from rank {src} to rank {dst}")

    runner.run(world_size, program)


@backend_check()
def buffers_of_many_kinds_are_taken(runner: RankRunner, world_size: int) -> None:
    """`send` and `recv` take bytes, bytearray, memoryview, array and numpy arrays of any element type and shape."""

    def program(group: Backend) -> None:
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
                group.send(source, 1, timeout=PATIENCE)
            elif group.rank == 1:
                group.recv(target, 0, timeout=PATIENCE)
                same_bytes(bytes(target), data, f"from {type(source).__name__} into {type(target).__name__}")
        assert longer[0] == longer[-1] == 0, "recv wrote outside the part of a buffer it was given"

    runner.run(world_size, program)


@backend_check()
def a_sent_buffer_may_be_changed(runner: RankRunner, world_size: int) -> None:
    """When `send` has returned, the data is the caller's again: changing it changes nothing for the receiver."""

    def program(group: Backend) -> None:
        for size in (1, 100, 65_537, LARGE):
            if group.rank == 0:
                data = bytearray(pattern(size))
                group.send(data, 1, timeout=PATIENCE)
                data[:] = bytes(size)
                group.send(b"changed", 1, tag=1, timeout=PATIENCE)
            elif group.rank == 1:
                if size <= 100:  # the send of a larger one may last until it is received
                    receive(group, 0, 7, tag=1)
                same_bytes(receive(group, 0, size), pattern(size), f"{size} bytes, changed after send")
                if size > 100:
                    receive(group, 0, 7, tag=1)

    runner.run(world_size, program)


@backend_check()
def order_is_kept_within_a_tag(runner: RankRunner, world_size: int) -> None:
    """Messages from one rank with one tag arrive in the order they were sent, whatever their sizes."""
    sizes = [(0, 5, 70_000, 1, 300_000)[i % 5] + i for i in range(100)]

    def program(group: Backend) -> None:
        if group.rank == 0:
            for i, size in enumerate(sizes):
                for dst in range(1, world_size):
                    group.send(pattern(size, seed=i), dst, timeout=PATIENCE)
        else:
            for i, size in enumerate(sizes):
                same_bytes(receive(group, 0, size), pattern(size, seed=i), f"message {i}")

    runner.run(world_size, program)


@backend_check()
def tags_do_not_wait_for_each_other(runner: RankRunner, world_size: int) -> None:
    """Messages with different tags are received in any order; small ones are sent without a receiver."""

    def program(group: Backend) -> None:
        if group.rank == 0:
            for tag in range(20):
                for dst in range(1, world_size):
                    group.send(pattern(64, seed=tag), dst, tag=tag, timeout=PATIENCE)
        else:
            for tag in reversed(range(20)):
                same_bytes(receive(group, 0, 64, tag=tag), pattern(64, seed=tag), f"the message with tag {tag}")

    runner.run(world_size, program)


@backend_check()
def tags_are_compared_whole(runner: RankRunner, world_size: int) -> None:
    """All 128 bits of a tag count: sub-groups and collectives live in the upper ones."""
    tags = [0, 1, 2**31, 2**32, 2**53 + 1, 2**56 - 1, 2**56, 2**63, 2**64, 2**64 + 1, 2**127, 2**128 - 1]

    def program(group: Backend) -> None:
        if group.rank == 0:
            for tag in tags:
                group.send(str(tag).encode().ljust(40), 1, tag=tag, timeout=PATIENCE)
        elif group.rank == 1:
            for tag in reversed(tags):
                same_bytes(receive(group, 0, 40, tag=tag), str(tag).encode().ljust(40), f"the tag {tag:#x}")

    runner.run(world_size, program)


@backend_check(min_ranks=3)
def any_source_takes_from_whoever_sent(runner: RankRunner, world_size: int) -> None:
    """`ANY_SOURCE` receives from every rank, in order for each of them, and `recv` returns who it was."""

    def program(group: Backend) -> None:
        if group.rank != 0:
            for i in range(10):
                group.send(bytes([group.rank, i]), 0, tag=3, timeout=PATIENCE)
            return
        counts = dict.fromkeys(range(1, world_size), 0)
        for _ in range(10 * (world_size - 1)):
            buffer = bytearray(2)
            sender = group.recv(buffer, ANY_SOURCE, tag=3, timeout=PATIENCE)
            assert bytes(buffer) == bytes([sender, counts[sender]]), f"rank {sender} is said to have sent {buffer!r}"
            counts[sender] += 1

    runner.run(world_size, program)


@backend_check(min_ranks=3)
def a_source_takes_from_no_other(runner: RankRunner, world_size: int) -> None:
    """A receive from one rank leaves what others sent with the same tag for later."""

    def program(group: Backend) -> None:
        if group.rank != 0:
            group.send(bytes([group.rank]), 0, timeout=PATIENCE)
        else:
            for src in reversed(range(1, world_size)):
                same_bytes(receive(group, src, 1), bytes([src]), f"the message of rank {src}")

    runner.run(world_size, program)


@backend_check()
def a_message_that_does_not_fit_stays(runner: RankRunner, world_size: int) -> None:
    """A receive into a shorter or longer buffer raises `SizeMismatchError` and leaves the message for the next one."""

    def program(group: Backend) -> None:
        for size in (1, 100, LARGE):
            if group.rank == 0:
                group.send(pattern(size), 1, timeout=PATIENCE)
            elif group.rank == 1:
                for wrong in (size - 1, size + 1, 0, size * 2):
                    error_of(
                        SizeMismatchError,
                        lambda wrong=wrong: group.recv(bytearray(wrong), 0, timeout=PATIENCE),  # type: ignore[misc]
                        f"recv of {size} bytes into {wrong}",
                    )
                assert group.failure is None, "a size mismatch must leave the group good"
                same_bytes(receive(group, 0, size), pattern(size), "the message after the mismatch")

    runner.run(world_size, program)


@backend_check()
def threads_share_a_handle(runner: RankRunner, world_size: int) -> None:
    """Several threads of a rank may use its handle at the same time, each with a tag of its own."""
    num_threads = 4

    def program(group: Backend) -> None:
        dst, src = (group.rank + 1) % world_size, (group.rank - 1) % world_size

        def converse(tag: int) -> None:
            for i in range(25):
                size = 40_000 * (i % 3) + i
                if group.rank == 0:
                    group.send(pattern(size, seed=tag + i), dst, tag=tag, timeout=PATIENCE)
                same_bytes(receive(group, src, size, tag=tag), pattern(size, seed=tag + i), f"tag {tag}, {i}")
                if group.rank != 0:
                    group.send(pattern(size, seed=tag + i), dst, tag=tag, timeout=PATIENCE)

        with ThreadPoolExecutor(num_threads) as pool:
            for result in [pool.submit(converse, tag) for tag in range(num_threads)]:
                result.result()

    runner.run(world_size, program)


def _pass_round(group: Backend, data: bytes, size: int) -> bytes:
    """Have ``data`` go from rank to rank and back to rank 0, one blocking call at a time; returns what came here."""
    dst, src = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    if group.rank == 0:
        group.send(data, dst, timeout=PATIENCE)
        return receive(group, src, size)
    got = receive(group, src, size)
    group.send(got, dst, timeout=PATIENCE)
    return got


MESSAGE_CHECKS = (
    ranks_know_themselves,
    messages_of_all_sizes_arrive_whole,
    every_pair_of_ranks_can_talk,
    buffers_of_many_kinds_are_taken,
    a_sent_buffer_may_be_changed,
    order_is_kept_within_a_tag,
    tags_do_not_wait_for_each_other,
    tags_are_compared_whole,
    any_source_takes_from_whoever_sent,
    a_source_takes_from_no_other,
    a_message_that_does_not_fit_stays,
    threads_share_a_handle,
)
