"""Signals to the launcher, which it forwards, and to the ranks' processes."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Self

STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""Signals that are forwarded and start the countdown to SIGKILL, unless a launch names others."""

USER_SIGNALS = frozenset({signal.SIGUSR1, signal.SIGUSR2})
"""Signals that are forwarded, too."""

_PROC = Path("/proc")
_DISPOSITIONS = ("SigBlk:", "SigIgn:", "SigCgt:")
"""The lines of /proc/PID/status with masks of signals without their default action."""


def signal_name(signum: int) -> str:
    """Return ``SIGTERM`` for 15; real-time signals have numbers only."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def members_that_survive(groups: Iterable[int], signum: signal.Signals) -> list[int]:
    """Return the processes of groups that a signal does not kill (off Linux that is unknown: all group leaders)."""
    wanted = set(groups)
    if not _PROC.is_dir():
        return sorted(wanted)
    return [
        int(entry.name)
        for entry in _PROC.iterdir()
        if entry.name.isdecimal() and _survives_signal(entry, wanted, signum)
    ]


def _survives_signal(process: Path, groups: set[int], signum: signal.Signals) -> bool:
    try:
        if os.getpgid(int(process.name)) not in groups:
            return False
        lines = (process / "status").read_text(errors="replace").splitlines()
        is_in_sigwait = "sigtimedwait" in (process / "wchan").read_text()  # the mask doesn't show what it waits for
    except OSError:  # it has ended
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(_DISPOSITIONS)]
    return is_in_sigwait or any(mask >> (signum - 1) & 1 for mask in masks)


class SignalInbox:
    """Collects stop signals and user signals within a ``with`` block, instead of letting them end the launcher.

    Python allows signal handlers in the main thread only; in another thread the inbox stays empty and signals keep
    their meaning. A signal that was ignored when the launcher started (``nohup``, a shell's background job) stays
    ignored, here and in the ranks.
    """

    def __init__(self, stop_signals: frozenset[signal.Signals] = STOP_SIGNALS) -> None:
        self.stop_signals = stop_signals
        self._forwarded = stop_signals | USER_SIGNALS
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
            for signum in sorted(self._forwarded):
                # None: a handler that C code installed, which Python could not put back.
                if signal.getsignal(signum) not in (signal.SIG_IGN, None):
                    self._previous[signum] = signal.signal(signum, lambda _number, _frame: None)
            # Inherited from some supervisors; the kernel would then reap the ranks and throw their exit codes
            # away.
            if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
                self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(self, *_exception: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        if self._previous_wakeup is not None:
            signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def fileno(self) -> int:
        """The descriptor that is readable while a signal is pending."""
        return self._reader

    def take(self) -> list[signal.Signals]:
        """Return the signals since the last call, oldest first, without blocking."""
        try:
            signums = os.read(self._reader, 4096)
        except BlockingIOError:
            return []
        # The pipe also gets signals for which somebody else set a Python handler; they are theirs.
        return [signal.Signals(signum) for signum in signums if signum in self._forwarded]
