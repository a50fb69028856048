"""How many calls to a rank may have no result."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ferrodist.backends.request import WaitEvent
    from ferrodist.rpc.executor import Waits

_LOOK_SECONDS = 0.002


class Window:
    """How many calls to a rank may have no result, and who waits until there are fewer.

    To wake a thread for each place costs more than a call, so those who wait are woken when there are some. For the
    last ones, which nobody may ever add to, they look again from time to time.

    Args:
        size: How many.
        waits: Of the agent.
    """

    def __init__(self, size: int, waits: Waits) -> None:
        self._free = size
        self._enough = max(1, size // 4)
        self._waits = waits
        self._lock = threading.Lock()
        self._waiting: list[WaitEvent] = []
        self._are_woken = False

    def enter(self, seconds: float) -> bool:
        """Take a place, and wait for one for so long; whether there was one. Who waits already has the first ones."""
        with self._lock:
            if self._free > len(self._waiting):
                self._free -= 1
                return True
        return seconds > 0 and self._wait(time.monotonic() + seconds)

    def leave(self) -> None:
        """Give a place back."""
        with self._lock:
            self._free += 1
            if self._free < self._enough or self._are_woken or not self._waiting:
                return
            self._are_woken = True
            woken = self._waiting.copy()
        for signal in woken:
            signal.set()

    def close(self) -> None:
        """Let everybody in: the link says what is wrong."""
        with self._lock:
            self._free = self._enough = 1 << 62
            woken = self._waiting.copy()
        for signal in woken:
            signal.set()

    def _wait(self, end: float) -> bool:
        signal = self._waits.signal()
        with self._lock:
            self._waiting.append(signal)
        has_place = False
        try:
            while not (has_place := self._take()) and (left := end - time.monotonic()) > 0:
                signal.wait(min(left, _LOOK_SECONDS))
        finally:
            with self._lock:
                self._waiting.remove(signal)
        return has_place

    def _take(self) -> bool:
        with self._lock:
            self._are_woken = False
            if self._free <= 0:
                return False
            self._free -= 1
            return True
