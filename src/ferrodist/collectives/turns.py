"""Turns: operations that were started in one order run in that order, in whatever threads."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ferrodist.deadline import Deadline
    from ferrodist.errors import DistributedError

__all__ = ["Turns"]

_POLL_SECONDS = 0.05


class Turns:
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
