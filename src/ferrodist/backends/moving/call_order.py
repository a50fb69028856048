"""The order of calls: an engine's collectives must be started in the same one by all ranks."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ferrodist.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["CallOrder"]

_POLL_SECONDS = 0.05


class CallOrder:
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
