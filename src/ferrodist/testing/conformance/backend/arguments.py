"""Checks of wrong arguments: each is refused at once, clearly, and the group stays usable."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ferrodist.backends.tags import ANY_SOURCE
from ferrodist.errors import InvalidRankError, SelfSendError
from ferrodist.testing.conformance.harness import TIMEOUT, error_of, rank_check, receive

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend

_BUFFER_ERRORS = (TypeError, ValueError, BufferError)


@rank_check()
def ranks_outside_the_group_are_refused(group: Backend) -> None:
    """A peer outside the group raises `InvalidRankError` from every call that takes one."""
    wrong: list[Any] = [group.world_size, -2, 2**31, "1", 1.0, None, True]
    for peer in wrong:
        for name, call in _calls_with_peer(group, peer).items():
            error_of(InvalidRankError, call, f"{name} with peer {peer!r}")
    for name in ("send", "isend"):
        call = _calls_with_peer(group, ANY_SOURCE)[name]
        error_of(InvalidRankError, call, f"{name} to ANY_SOURCE")
    _assert_good(group)


@rank_check()
def a_rank_does_not_talk_to_itself(group: Backend) -> None:
    """A rank's own number as a peer raises `SelfSendError`, which names it."""
    for name, call in _calls_with_peer(group, group.rank).items():
        error = error_of(SelfSendError, call, f"{name} with its own rank")
        assert error.ranks == (group.rank,), f"{name} with its own rank names {error.ranks}"
    _assert_good(group)


@rank_check()
def wrong_tags_are_refused(group: Backend) -> None:
    """A tag that is negative, longer than 128 bits or not an integer raises ValueError (or TypeError for a type)."""
    peer = (group.rank + 1) % group.world_size
    wrong_types: list[Any] = ["1", 1.5, None]
    for tag in (-1, 2**128, *wrong_types):
        kinds = ValueError if isinstance(tag, int) else (ValueError, TypeError)
        for name, call in _calls_with_peer(group, peer, tag=tag).items():
            error_of(kinds, call, f"{name} with tag {tag!r}")
    _assert_good(group)


@rank_check()
def wrong_timeouts_are_refused(group: Backend) -> None:
    """A negative or NaN timeout raises ValueError, one that is not a number TypeError, before anything is done."""
    peer = (group.rank + 1) % group.world_size
    wrong_types: list[Any] = ["1", True, [1]]
    for timeout in (-1, -0.001, math.nan, *wrong_types):
        kind = TypeError if timeout in wrong_types else ValueError
        what = f"with timeout {timeout!r}"
        error_of(kind, partial(group.send, b"x", peer, timeout=timeout), f"send {what}")
        error_of(kind, partial(group.recv, bytearray(1), peer, timeout=timeout), f"recv {what}")
        error_of(kind, partial(group.barrier, timeout=timeout), f"barrier {what}")
    _assert_good(group)


@rank_check()
def buffers_that_cannot_be_sent_are_refused(group: Backend) -> None:
    """Data that is not a C-contiguous buffer raises TypeError, ValueError or BufferError."""
    peer = (group.rank + 1) % group.world_size
    wrong: list[Any] = [memoryview(bytes(8))[::2], np.zeros((4, 4)).T, np.zeros(8)[::2], "text", [1, 2], 7, None]
    for data in wrong:
        error_of(_BUFFER_ERRORS, partial(group.send, data, peer, timeout=TIMEOUT), f"send of {data!r}")
        error_of(_BUFFER_ERRORS, lambda d=data: group.isend(d, peer).wait(TIMEOUT), f"isend of {data!r}")  # type: ignore[misc]
    _assert_good(group)


@rank_check()
def buffers_that_cannot_be_filled_are_refused(group: Backend) -> None:
    """A receive into anything but a writable C-contiguous buffer raises TypeError, ValueError or BufferError."""
    peer = (group.rank + 1) % group.world_size
    frozen = np.zeros(4, np.uint8)
    frozen.flags.writeable = False
    wrong: list[Any] = [b"1234", memoryview(bytearray(8))[::2], np.zeros((2, 2), np.uint8).T, frozen, "text", None]
    for buffer in wrong:
        error_of(_BUFFER_ERRORS, partial(group.recv, buffer, peer, timeout=TIMEOUT), f"recv into {buffer!r}")
        error_of(_BUFFER_ERRORS, lambda b=buffer: group.irecv(b, peer).wait(TIMEOUT), f"irecv into {buffer!r}")  # type: ignore[misc]
    _assert_good(group)


def _calls_with_peer(group: Backend, peer: int, tag: int = 0) -> dict[str, Callable[[], object]]:
    return {
        "send": lambda: group.send(b"x", peer, tag=tag, timeout=TIMEOUT),
        "recv": lambda: group.recv(bytearray(1), peer, tag=tag, timeout=TIMEOUT),
        "isend": lambda: group.isend(b"x", peer, tag=tag).wait(TIMEOUT),
        "irecv": lambda: group.irecv(bytearray(1), peer, tag=tag).wait(TIMEOUT),
    }


def _assert_good(group: Backend) -> None:
    """The group still works, and no refused message was sent: the next ones that arrive are these."""
    assert group.failure is None, f"a wrong argument has failed the group: {group.failure}"
    for tag in (0, 1):
        request = group.isend(bytes([group.rank]), (group.rank + 1) % group.world_size, tag=tag)
        src = (group.rank - 1) % group.world_size
        assert receive(group, src, 1, tag=tag) == bytes([src]), "a message that had been refused was delivered"
        request.wait(TIMEOUT)
