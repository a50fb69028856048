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
    """Issues sequence numbers, and lets their holders go one at a time, in the order of these.

    A number is outstanding from `reserve` until it is released. Its turn comes when no smaller one is outstanding.
    Nobody waits once ``is_over()``, which is polled.
    """

    def __init__(self, is_over: Callable[[], bool], first: int = 0) -> None:
        self._is_over = is_over
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._num_waiting = 0  # threads that wait for a change
        self._next = self._position = first
        self._outstanding: deque[int] = deque()  # ascending
        self._holder: tuple[int, int] | None = None  # thread and sequence number

    @property
    def position(self) -> int:
        """The smallest outstanding sequence number, or the next one to be issued."""
        return self._position

    def reserve(self, draw: Callable[[], int] | None = None) -> int:
        """Reserve the next number; ``draw``, called under a lock, issues it in place of this sequencer, ascending."""
        with self._lock:
            sequence = self._next if draw is None else draw()
            self._next = sequence + 1
            self._outstanding.append(sequence)
            self._position = self._outstanding[0]
            return sequence

    def start_if_idle(self) -> int | None:
        """Reserve the next number for this thread, which holds it until `end`; None if another one is outstanding.

        In a third of the time of `reserve` and `hold`.
        """
        with self._lock:
            if self._outstanding:
                return None
            sequence = self._next
            self._next = sequence + 1
            self._outstanding.append(sequence)
            self._position = sequence
            self._holder = (threading.get_ident(), sequence)
            return sequence

    def end(self, sequence: int) -> None:
        """Release a number of `start_if_idle`."""
        self._holder = None
        self._release(sequence)

    def wait(self, sequence: int, timeout: float) -> bool:
        """Wait for a number's turn; False when it has not come within ``timeout`` seconds, or the group has ended."""
        if self._position >= sequence:
            return True
        return self._wait_until(lambda: self._position >= sequence, timeout)

    def wait_until_idle(self, timeout: float) -> bool:
        """Wait until no sequence number is outstanding; False as for `wait`."""
        return self._wait_until(lambda: not self._outstanding, timeout)

    def _wait_until(self, is_due: Callable[[], bool], timeout: float) -> bool:
        deadline = Deadline(timeout)
        with self._lock:
            self._num_waiting += 1
            try:
                while not is_due():
                    if deadline.expired or self._is_over():
                        return False
                    self._changed.wait(min(_POLL_INTERVAL_SECONDS, deadline.remaining()))
            finally:
                self._num_waiting -= 1
        return True

    @contextmanager
    def hold(self, sequence: int, timeout: float) -> Iterator[bool]:
        """Wait for a number's turn, and release the number with the block; yields what `wait` returns.

        Inside the block the same thread may hold the number again. A number whose turn has not come stays outstanding.
        """
        mine = (threading.get_ident(), sequence)
        if self._holder == mine:
            yield True
            return
        if not self.wait(sequence, timeout):
            yield False
            return
        self._holder = mine
        try:
            yield True
        finally:
            self._holder = None
            self._release(sequence)

    @contextmanager
    def releasing(self, sequence: int) -> Iterator[None]:
        """Release a sequence number at the end of the block, whether or not its turn has come."""
        try:
            yield
        finally:
            self._release(sequence)

    def _release(self, sequence: int) -> None:
        with self._lock:
            self._outstanding.remove(sequence)
            self._position = self._outstanding[0] if self._outstanding else self._next
            if self._num_waiting:
                self._changed.notify_all()
