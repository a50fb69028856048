"""Rounds: ranks that meet, leave, and meet again at the same address or file.

[Note: rounds]
A rank that has left is often faster than the others, and finds the store of the last round at the address, which rank 0
still serves, or the file, which the last rank that leaves will remove. Each store has a random name. Who finds the name
of a store that it has left waits for the next one.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from ferrodist.errors import DistributedTimeoutError

if TYPE_CHECKING:
    from ferrodist.deadline import Deadline
    from ferrodist.rendezvous.store import Store

_NAME_KEY = "ferrodist/round"
_OVER_KEY = "ferrodist/round over"
_PAUSE_SECONDS = 0.02

_left: set[bytes] = set()  # of stores that this process met in, and has left


def make_name() -> bytes:
    """A random name for a store."""
    return os.urandom(16)


def note_left(name: bytes) -> None:
    """Remember that this process is done with a store."""
    _left.add(name)


def has_left(name: bytes) -> bool:
    """Whether this process has been a member in a store, and is no more."""
    return name in _left


def has_left_any() -> bool:
    """Whether this process has been a member in any store that it has left."""
    return bool(_left)


def set_name(store: Store) -> bytes:
    """Give a store that this process serves a name."""
    name = make_name()
    store.set(_NAME_KEY, name)
    return name


def name_of(store: Store, deadline: Deadline) -> bytes:
    """The name of a store that rank 0 serves."""
    return store.get(_NAME_KEY, timeout=deadline.remaining())


def say_over(store: Store) -> None:
    """Have ranks that wait for the next round look for it: this store is about to end."""
    store.set(_OVER_KEY, b"1")


def wait_until_over(store: Store, deadline: Deadline) -> None:
    """Return when the rank that serves a store is about to end it."""
    store.get(_OVER_KEY, timeout=deadline.remaining())


def pause(what: str, deadline: Deadline) -> None:
    """Wait a moment for the next round; raises DistributedTimeoutError when the time is over."""
    if deadline.expired:
        raise DistributedTimeoutError(
            f"{what} is still that of the last round, which this process has left, after {deadline.elapsed():.1f} s"
            f" (limit {deadline.timeout:.1f} s): the other ranks must leave, too, before all meet again"
        )
    time.sleep(min(_PAUSE_SECONDS, deadline.remaining()))
