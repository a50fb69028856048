"""The thread that looks after what is on streams: deadlines, and failures of which no call would learn."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Protocol

from ferrodist.backends.weak import held_now
from ferrodist.errors import DistributedError, describe_error

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Watch", "Watched"]

_PERIOD_SECONDS = 0.01
_JOIN_SECONDS = 3.0


class Watched(Protocol):
    """A group's work on GPUs, as the watch sees it."""

    @property
    def has_outstanding(self) -> bool:
        """Whether something has been launched whose end has not been seen."""

    def look(self, now: float) -> bool:
        """Let go of what has ended, and end the group for what is late; whether anything is left."""

    def fail(self, error: DistributedError) -> None:
        """End the group."""


class Watch:
    """Looks at the outstanding work of a backend's groups every 10 ms, and sleeps while there is none.

    The thread starts with the first work.

    Args:
        name: The thread's.
        begin: Called in it at first.
        clock: Where the time comes from.
    """

    def __init__(
        self, name: str, begin: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._begin = begin
        self._clock = clock
        self._changed = threading.Condition()
        self._busy: set[Watched] = set()
        self._reports: deque[tuple[Watched, DistributedError]] = deque()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def look_after(self, launcher: Watched) -> None:
        """Look at a group's work from now on, until there is none."""
        if launcher in self._busy:
            return
        with self._changed:
            self._busy.add(launcher)
            self._wake()

    def report(self, launcher: Watched, error: DistributedError) -> None:
        """Have the group ended in the watch's thread: who reports must not block."""
        with self._changed:
            self._reports.append((launcher, error))
            self._wake()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

    def _wake(self) -> None:
        if self._is_closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
            # The interpreter ends daemon threads where they stand, which may be in CUDA.
            _open_watches.add(self)
        self._changed.notify_all()

    def _run(self) -> None:
        self._begin()
        while self._await_work():
            with contextlib.suppress(IndexError):
                while True:
                    launcher, error = self._reports.popleft()
                    launcher.fail(error)
            now = self._clock()
            for launcher in list(self._busy):
                if not self._look(launcher, now):
                    with self._changed:
                        # What was launched since the look has not been seen: `look_after` found the group here.
                        self._busy.discard(launcher)
                        if launcher.has_outstanding:
                            self._busy.add(launcher)
            launcher = None  # type: ignore[assignment] # or its group would live until the next work

    @staticmethod
    def _look(launcher: Watched, now: float) -> bool:
        try:
            return launcher.look(now)
        except Exception as error:  # noqa: BLE001 - CUDA tells by any class that a device is lost
            launcher.fail(DistributedError(f"the GPU can't be asked how far it has come: {describe_error(error)}"))
            return False

    def _await_work(self) -> bool:
        """Sleep until there is something to look at; False when the watch was closed."""
        with self._changed:
            if self._busy and not self._reports and not self._is_closed:
                self._changed.wait(_PERIOD_SECONDS)
            while not (self._busy or self._reports or self._is_closed):
                self._changed.wait()
            return not self._is_closed


_open_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


@atexit.register
def _stop_watches() -> None:
    for watch in held_now(lambda: _open_watches):
        watch.close()
