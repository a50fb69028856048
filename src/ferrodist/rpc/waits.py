"""What the threads of an agent wait with."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.listening import Signal

__all__ = ["AGES", "Waiters", "Waits"]

AGES = 1e6
"""Seconds: of a wait that something else ends."""


class Waits:
    """What the threads of an agent wait with, one `Signal` each.

    Args:
        make: Makes one.
    """

    def __init__(self, make: Callable[[], Signal]) -> None:
        self._make = make
        self._local = threading.local()
        self._lock = threading.Lock()
        self.num_waiting = 0  # for calls that they have made; they move messages

    def signal(self) -> Signal:
        """This thread's. It waits for one thing at a time, so there is one."""
        try:
            return self._local.signal  # type: ignore[no-any-return]
        except AttributeError:
            found = self._local.signal = self._make()
            return found

    def renew(self) -> None:
        """Give this thread another signal: the one that it has may be set when nobody waits for that any more."""
        self._local.signal = self._make()

    def wait(self, signal: Signal, seconds: float) -> bool:
        """Wait for what a call brings; see `Signal.wait`."""
        with self._lock:
            self.num_waiting += 1
        try:
            return signal.wait(seconds)
        finally:
            with self._lock:
                self.num_waiting -= 1


class Waiters(Protocol):
    """Whose threads wait for calls."""

    @property
    def waits(self) -> Waits:
        """What they wait with."""

    def begin_wait(self) -> bool:
        """This thread waits; whether it has to `end_wait`."""

    def end_wait(self) -> None:
        """It goes on."""
