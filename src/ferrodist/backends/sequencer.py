"""Ordered execution: a group's collectives begin in the same order on every rank, whatever threads bring them."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ferrodist.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_POLL_INTERVAL_SECONDS = 0.05


class Sequencer:
    """Issues tickets, and lets their holders go one at a time, in the order of the tickets.

    A ticket is outstanding from `reserve` until it is released. Its turn comes when no smaller one is outstanding.
    Nobody waits once ``is_over()``, which is polled.
    """

    def __init__(self, is_over: Callable[[], bool], first: int = 0) -> None:
        self._is_over = is_over
        self._changed = threading.Condition()
        self._next = self._position = first
        self._outstanding: deque[int] = deque()  # ascending
        self._holder: tuple[int, int] | None = None  # thread and ticket

    @property
    def position(self) -> int:
        """The smallest outstanding ticket, or the next one to be issued."""
        return self._position

    def reserve(self, draw: Callable[[], int] | None = None) -> int:
        """Take the next ticket; ``draw``, called under a lock, issues it in place of this sequencer, ascending."""
        with self._changed:
            ticket = self._next if draw is None else draw()
            self._next = ticket + 1
            self._outstanding.append(ticket)
            self._position = self._outstanding[0]
            return ticket

    def wait(self, ticket: int, timeout: float) -> bool:
        """Wait for a ticket's turn; False when it has not come within ``timeout`` seconds, or the group has ended."""
        if self._position >= ticket:
            return True
        return self._wait_until(lambda: self._position >= ticket, timeout)

    def wait_until_idle(self, timeout: float) -> bool:
        """Wait until no ticket is outstanding; False as for `wait`."""
        return self._wait_until(lambda: not self._outstanding, timeout)

    def _wait_until(self, is_due: Callable[[], bool], timeout: float) -> bool:
        deadline = Deadline(timeout)
        with self._changed:
            while not is_due():
                if deadline.expired or self._is_over():
                    return False
                self._changed.wait(min(_POLL_INTERVAL_SECONDS, deadline.remaining()))
        return True

    @contextmanager
    def hold(self, ticket: int, timeout: float) -> Iterator[bool]:
        """Wait for a ticket's turn, and release the ticket with the block; yields what `wait` returns.

        Inside the block the same thread may hold the ticket again. A ticket whose turn has not come stays outstanding.
        """
        mine = (threading.get_ident(), ticket)
        if self._holder == mine:
            yield True
            return
        if not self.wait(ticket, timeout):
            yield False
            return
        self._holder = mine
        try:
            yield True
        finally:
            self._holder = None
            self._release(ticket)

    @contextmanager
    def releasing(self, ticket: int) -> Iterator[None]:
        """Release the ticket at the end of the block, whether or not its turn has come."""
        try:
            yield
        finally:
            self._release(ticket)

    def _release(self, ticket: int) -> None:
        with self._changed:
            self._outstanding.remove(ticket)
            self._position = self._outstanding[0] if self._outstanding else self._next
            self._changed.notify_all()
