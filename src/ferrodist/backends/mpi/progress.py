"""The thread that moves an MPI group's frames, and waits that move them too."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ferrodist.backends.polling import Backoff
from ferrodist.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

_BUSY_SECONDS = 2e-3  # how long the thread goes on polling often after a frame has come
_BUSY_POLL_INTERVAL_SECONDS = 50e-6
_AWAITED_POLL_INTERVAL_SECONDS = 0.5e-3
_IDLE_POLL_INTERVAL_SECONDS = 2e-3

_DEATH_CHECK_INTERVAL_SECONDS = 0.05


class ProgressThread:
    """Moves a group's frames until the group is over."""

    def __init__(
        self,
        *,
        poll: Callable[[], bool],  # moves the frames that can be moved; whether there were any; does not raise
        check_deaths: Callable[[], None],  # called every 50 ms
        is_awaited: Callable[[], bool],  # whether frames are expected, so that polling often pays
        is_over: Callable[[], bool],  # whether no frame will come any more
        on_end: Callable[[], None],  # called when the thread ends
        name: str,
    ) -> None:
        self._poll = poll
        self._check_deaths = check_deaths
        self._is_awaited = is_awaited
        self._is_over = is_over
        self._on_end = on_end
        self._num_waiting = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for the thread's end; whether it has come."""
        if self._thread is not threading.current_thread():
            self._thread.join(Deadline(timeout).remaining())
        return not self._thread.is_alive()

    def wait_until(self, done: Callable[[], bool], timeout: float) -> bool:
        """Move frames until ``done()``; False after ``timeout`` seconds."""
        if done():
            return True
        deadline = Deadline(timeout)
        backoff = Backoff()
        self._num_waiting += 1
        try:
            while not done():
                if deadline.expired:
                    return done()
                if self._poll():
                    backoff.begin_again()
                else:
                    backoff.rest(deadline.remaining())
        finally:
            self._num_waiting -= 1
        return True

    def _run(self) -> None:
        busy_until = next_check = 0.0
        while not self._is_over():
            now = time.monotonic()
            if now >= next_check:
                self._check_deaths()
                next_check = now + _DEATH_CHECK_INTERVAL_SECONDS
            if self._poll():
                busy_until = now + _BUSY_SECONDS
            if self._num_waiting:  # waiting threads move the frames
                time.sleep(_IDLE_POLL_INTERVAL_SECONDS)
            elif now < busy_until:
                time.sleep(_BUSY_POLL_INTERVAL_SECONDS)
            else:
                time.sleep(_AWAITED_POLL_INTERVAL_SECONDS if self._is_awaited() else _IDLE_POLL_INTERVAL_SECONDS)
        self._on_end()
