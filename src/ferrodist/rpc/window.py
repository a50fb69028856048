"""How many calls to a rank may have no result."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ferrodist.rpc.waits import AGES

if TYPE_CHECKING:
    from ferrodist.backends.listening import Signal
    from ferrodist.rpc.waits import Waits

__all__ = ["Window"]


class Window:
    """How many calls to a rank may have no result, and who waits until there are fewer.

    Args:
        size: How many.
        waits: Of the agent.
    """

    def __init__(self, size: int, waits: Waits) -> None:
        self._free = size
        self._enough = max(1, size // 4)
        self._waits = waits
        self._lock = threading.Lock()
        self._waiting: list[Signal] = []

    def enter(self, seconds: float) -> bool:
        """Take a place, and wait for one for so long; whether there was one."""
        with self._lock:
            if self._free > 0 and not self._waiting:
                self._free -= 1
                return True
        return self._wait(time.monotonic() + seconds)

    def leave(self) -> None:
        """Give a place back."""
        with self._lock:
            self._free += 1
            # Who waits is woken for some at once: it would be for each else, which costs more than a call.
            woken = self._waiting if self._waiting and self._free >= self._enough else []
            if woken:
                self._waiting = []
        for signal in woken:
            signal.set()

    def close(self) -> None:
        """Let everybody in: the link says what is wrong."""
        with self._lock:
            self._free = self._enough = 1 << 62
            woken, self._waiting = self._waiting, []
        for signal in woken:
            signal.set()

    def _wait(self, end: float) -> bool:
        signal = self._waits.signal()
        while True:
            with self._lock:
                if self._free > 0:
                    self._free -= 1
                    return True
                self._waiting.append(signal)
            try:
                has_come = signal.wait(max(0.0, end - time.monotonic()))
            except BaseException:  # the handler of an interruption raised it
                self._give_up(signal)
                raise
            if not has_come and not self._give_up(signal):
                signal.wait(AGES)  # it is about to be set
                has_come = True
            if not has_come:
                return False

    def _give_up(self, signal: Signal) -> bool:
        with self._lock:
            if signal not in self._waiting:
                return False
            self._waiting.remove(signal)
            return True
