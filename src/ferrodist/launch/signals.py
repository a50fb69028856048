"""Signals sent to the launcher, as something its event loop can wait for."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["FORWARDED", "STOPPING", "SignalInbox", "signal_name", "surviving_members"]

STOPPING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""Forwarded, and start the countdown to SIGKILL."""

FORWARDED = STOPPING | {signal.SIGUSR1, signal.SIGUSR2}
"""Signals that reach the ranks."""

_PROC = Path("/proc")
_DISPOSITIONS = ("SigBlk:", "SigIgn:", "SigCgt:")
"""The lines of /proc/PID/status with the masks of signals that do not take their default action."""


def signal_name(number: int) -> str:
    """``SIGTERM`` for 15; real-time signals have numbers only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def surviving_members(groups: Iterable[int], number: signal.Signals) -> list[int]:
    """The processes of these process groups that a signal does not kill: they catch, ignore or block it.

    Elsewhere than on Linux nobody can say, and all the groups' leaders are taken.
    """
    wanted = set(groups)
    if not _PROC.is_dir():
        return sorted(wanted)
    return [
        int(entry.name)
        for entry in _PROC.iterdir()
        if entry.name.isdecimal() and _group_of(int(entry.name)) in wanted and _survives(entry, number)
    ]


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:  # it has ended
        return None


def _survives(process: Path, number: signal.Signals) -> bool:
    try:
        lines = (process / "status").read_text(errors="replace").splitlines()
        is_in_sigwait = "sigtimedwait" in (process / "wchan").read_text()  # it blocks what it waits for, unseen
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(_DISPOSITIONS)]
    return is_in_sigwait or any(mask >> (number - 1) & 1 for mask in masks)


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
