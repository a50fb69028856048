"""Signals sent to the launcher, as something its event loop can wait for."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["FORWARDED", "STOPPING", "SignalInbox", "signal_name"]

STOPPING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""Forwarded, and start the countdown to SIGKILL."""

FORWARDED = STOPPING | {signal.SIGUSR1, signal.SIGUSR2}
"""Signals that reach every rank."""


def signal_name(number: int) -> str:
    """``SIGTERM`` for 15; real-time signals have numbers only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class SignalInbox:
    """Collects `FORWARDED` signals while open, instead of letting them end the launcher.

    Python allows signal handlers in the main thread only; opened in another thread, the inbox stays empty and
    signals keep whatever meaning the program gave them. A signal that was ignored when the launcher started
    (``nohup``, a shell's background job) stays ignored, here and in the ranks.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_wakeup: int | None = None

    def __enter__(self) -> Self:
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        if threading.current_thread() is threading.main_thread():
            # The interpreter's C handler writes each number into the pipe in order of arrival; a Python
            # handler must exist for it to do so, but has nothing to add. A full pipe (64 Ki signals) loses
            # signals quietly.
            self._previous_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            for number in sorted(FORWARDED):
                # None: a handler that C code installed, which Python could not put back.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._previous[number] = signal.signal(number, lambda _number, _frame: None)
            # Inherited from some supervisors; the kernel would then reap the ranks and throw their exit codes
            # away.
            if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
                self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._previous_wakeup is not None:
            signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def fileno(self) -> int:
        """Readable while a signal waits."""
        return self._reader

    def take(self) -> list[signal.Signals]:
        """The signals that came since the last call, oldest first; does not block."""
        try:
            numbers = os.read(self._reader, 4096)
        except BlockingIOError:
            return []
        # The pipe also gets signals for which somebody else set a Python handler; they are theirs.
        return [signal.Signals(number) for number in numbers if number in FORWARDED]
