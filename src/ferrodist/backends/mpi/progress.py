"""The thread that moves a group's frames, and waits that move them too."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ferrodist.backends.moving.polling import Pace
from ferrodist.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Progress"]

_BUSY_SECONDS = 2e-3
"""How long the thread goes on looking often after something has come."""

_BUSY_REST_SECONDS = 50e-6
_AWAITED_REST_SECONDS = 0.5e-3
_IDLE_REST_SECONDS = 2e-3

_PATROL_SECONDS = 0.05
"""How often it is looked whether a rank has died."""


class Progress:
    """Looks after a group's frames until told to stop.

    Args:
        look: Moves what can be moved, and says whether there was anything; does not raise.
        patrol: Called from time to time.
        is_awaited: Whether something is expected, so that it pays to look often.
        is_over: Whether nothing will come any more.
        ended: Called when the thread ends.
        name: Of the thread.
    """

    def __init__(
        self,
        *,
        look: Callable[[], bool],
        patrol: Callable[[], None],
        is_awaited: Callable[[], bool],
        is_over: Callable[[], bool],
        ended: Callable[[], None],
        name: str,
    ) -> None:
        self._look = look
        self._patrol = patrol
        self._is_awaited = is_awaited
        self._is_over = is_over
        self._ended = ended
        self._num_lookers = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for the thread's end; whether it has come."""
        if self._thread is not threading.current_thread():
            self._thread.join(Deadline(timeout).remaining())
        return not self._thread.is_alive()

    def wait_until(self, done: Callable[[], bool], timeout: float) -> bool:
        """Move frames until ``done()``; False when that has not come within so many seconds."""
        if done():
            return True
        deadline = Deadline(timeout)
        pace = Pace()
        self._num_lookers += 1
        try:
            while not done():
                if deadline.expired:
                    return done()
                if self._look():
                    pace.begin_again()
                else:
                    pace.rest(deadline.remaining())
        finally:
            self._num_lookers -= 1
        return True

    def _run(self) -> None:
        busy_until = next_patrol = 0.0
        while not self._is_over():
            now = time.monotonic()
            if now >= next_patrol:
                self._patrol()
                next_patrol = now + _PATROL_SECONDS
            if self._look():
                busy_until = now + _BUSY_SECONDS
            if self._num_lookers:  # they do the work
                time.sleep(_IDLE_REST_SECONDS)
            elif now < busy_until:
                time.sleep(_BUSY_REST_SECONDS)
            else:
                time.sleep(_AWAITED_REST_SECONDS if self._is_awaited() else _IDLE_REST_SECONDS)
        self._ended()
