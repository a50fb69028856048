"""The order of calls: an engine's collectives must be started in the same one by all ranks.

Turns: operations that were started in one order run in that order, in whatever threads.

The order in which a group's operations are launched, whatever threads bring them.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ferrodist.backends.base import Backend
    from ferrodist.errors import DistributedError

_POLL_SECONDS = 0.05


class TicketQueue:
    """Who of a group's collectives may use its engine: one at a time, in the order of their positions.

    Args:
        has_ended: Whether the group has; then nobody waits.
        first: The first position.
    """

    def __init__(self, has_ended: Callable[[], bool], first: int = 0) -> None:
        self._has_ended = has_ended
        self._changed = threading.Condition()
        self._position = first
        self._holder: tuple[int, int] | None = None  # thread and position

    @property
    def position(self) -> int:
        """The position that has not ended yet."""
        return self._position

    def wait(self, position: int, timeout: float) -> bool:
        """Wait until all before ``position`` have ended; False when they have not in time, or the group has."""
        if self._position >= position:
            return True
        deadline = Deadline(timeout)
        with self._changed:
            while self._position < position:
                if deadline.expired or self._has_ended():
                    return False
                self._changed.wait(min(_POLL_SECONDS, deadline.remaining()))
        return True

    @contextmanager
    def hold(self, position: int, timeout: float) -> Iterator[bool]:
        """Have a turn inside the block, or not: False. A turn that this thread has is the same one."""
        mine = (threading.get_ident(), position)
        if self._holder == mine:
            yield True
            return
        if not self.wait(position, timeout):
            yield False
            return
        self._holder = mine
        try:
            yield True
        finally:
            with self._changed:
                self._holder = None
                self._position = position + 1
                self._changed.notify_all()


class InterruptibleTicketQueue:
    """The places that were reserved and have not been used up.

    Args:
        failure: Why no turn will come any more, or None.
    """

    def __init__(self, failure: Callable[[], DistributedError | None]) -> None:
        self._failure = failure
        self._places: deque[int] = deque()
        self._changed = threading.Condition()

    def reserve(self, reserve: Callable[[], int]) -> int:
        """Take the place that ``reserve()`` gives, with no other between."""
        with self._changed:
            place = reserve()
            self._places.append(place)
            return place

    def wait_for(self, place: int, deadline: Deadline) -> bool:
        """Return when all before this place have ended; False when the deadline passes first.

        Raises:
            DistributedError: What `failure` says.
        """
        with self._changed:
            while self._places and self._places[0] != place:
                failure = self._failure()
                if failure is not None:
                    raise failure.fresh()
                if deadline.expired:
                    return False
                self._changed.wait(min(_POLL_SECONDS, deadline.remaining()))
            return True

    @contextmanager
    def using(self, place: int) -> Iterator[None]:
        """End the place with the block, however that ends."""
        try:
            yield
        finally:
            with self._changed:
                self._places.remove(place)
                self._changed.notify_all()

    def wait_for_all(self, deadline: Deadline) -> None:
        """Return when no place is reserved. Raises TimeoutError when the deadline passes first, or as `wait_for`."""
        with self._changed:
            while self._places:
                failure = self._failure()
                if failure is not None:
                    raise failure.fresh()
                if deadline.expired:
                    raise TimeoutError
                self._changed.wait(min(_POLL_SECONDS, deadline.remaining()))


_LOOK_SECONDS = 0.05


class WatchedTicketQueue:
    """Numbers that ranks give their operations in the same order, and whose turn it is.

    Args:
        group: The group; when it fails, nobody waits for a turn any more.
    """

    def __init__(self, group: Backend) -> None:
        self._group = group
        self._changed = threading.Condition()
        self._num_reserved = self._num_begun = 0

    def reserve(self) -> int:
        """Take the next place."""
        with self._changed:
            self._num_reserved += 1
            return self._num_reserved - 1

    def await_turn(self, place: int, deadline: Deadline) -> None:
        """Return when all before have been launched, or the group has ended."""
        if self._num_begun >= place:
            return
        with self._changed:
            while self._num_begun < place and self._group.failure is None:
                self._changed.wait(min(_LOOK_SECONDS, deadline.remaining()))
                if deadline.expired:
                    raise DistributedTimeoutError(
                        f"operation {place} on group {self._group.name!r}: operations that other threads began before"
                        f" it were not launched within {deadline.timeout:g} s"
                    )

    def pass_on(self, place: int) -> None:
        """Let the next have its turn."""
        with self._changed:
            self._num_begun = max(self._num_begun, place + 1)
            self._changed.notify_all()
