"""The order in which a group's operations are launched, whatever threads bring them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ferrodist.errors import DistributedTimeoutError

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend
    from ferrodist.deadline import Deadline

__all__ = ["Places"]

_LOOK_SECONDS = 0.05


class Places:
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
