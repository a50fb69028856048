"""Events of the rank processes: their exits, in order; which failures are secondary; and signals to the launcher.

[Note: which rank failed first] When one rank dies, its peers follow within milliseconds, and the report must not blame
them. SIGCHLD doesn't tell the order, since pending ones merge. A pidfd does: the kernel appends it to the ready list of
its epoll set when it notifies the parent (``exit_notify``), and ``epoll_wait`` returns that list first in, first out.
So the order is the kernel's own, however late the launcher polls, even if it was stopped. The *times* in the report are
those of the polls, usually well under a millisecond later.

That orders the exits of processes, not the causes. A rank whose program fails notifies the others from an exit handler,
and then shuts its interpreter down, which with torch takes about as long as the others need to raise, print a traceback
and shut down theirs; rank 0 even waits for them. So a rank whose standard error names another rank as the reason
(`is_secondary_failure`) is not blamed at once: the launcher waits until a rank fails by itself, until all have ended,
or for `ROOT_CAUSE_TIMEOUT`, and only then blames the first exit. The order alone decides for exits without exit
handlers, as by SIGKILL. The kernel frees memory and closes sockets shortly before ``exit_notify``, tens of milliseconds
for much memory; a peer that notices the closed socket and leaves faster than that, silently and with ``os._exit``,
would come first.

Without pidfds (Linux before 5.3, other systems) the ranks are polled every 20 ms, and ranks that end between two polls
are reported in rank order.
"""

from __future__ import annotations

import os
import re
import select
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Self

_TRACEBACK = b"Traceback (most recent call last):"
# What Python puts between the tracebacks of one chain of exceptions.
_CHAINS = (
    b"The above exception was the direct cause of the following exception:",
    b"During handling of the above exception, another exception occurred:",
)
# Bars and spaces stand in front in exception groups.
_ERROR = re.compile(rb"[\s|]*ferrodist\.errors\.(?P<kind>PeerLostError|NoConnectionError|GroupAbortedError)\b")
_ABORTER = re.compile(rb"\brank (\d+) (?:aborted|of) group 'world'")


def is_secondary_failure(lines: Iterable[bytes], rank: int) -> bool:
    """Return whether the last printed exception, or one that caused it, is ferrodist's error about another rank's end.

    A rank that catches its error and prints something else, or nothing, counts as having failed by itself. So does one
    that was aborted by itself.
    """
    is_secondary, previous = False, b""
    for line in lines:
        if line.startswith(_TRACEBACK) and previous not in _CHAINS:
            is_secondary = False  # another exception; the program went on after what stood before
        error = _ERROR.match(line)
        if error is not None:
            aborter = _ABORTER.search(line) if error["kind"] == b"GroupAbortedError" else None
            is_secondary = aborter is None or int(aborter[1]) != rank
        if line.strip():
            previous = line.strip()
    return is_secondary


EXIT_POLL_INTERVAL = 0.02  # seconds between two polls of the ranks where the kernel doesn't notify the launcher

ROOT_CAUSE_TIMEOUT = 6.0
"""Seconds to wait for the exit of the rank that caused another's failure; rank 0 may take five to leave its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """The exit of one rank's process."""

    rank: int
    pid: int
    code: int  # exit code, or the negative number of the signal that ended it
    elapsed: float  # seconds from the group's start until the launcher noticed the exit
    stopped: bool = False  # the launcher had asked the rank to end, and it exited accordingly
    is_secondary: bool = False  # according to the rank's standard error


def _has_pidfd() -> bool:
    if not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # an old kernel, or a sandbox that does not know the call
        return False
    return True


def _exit_code(pid: int) -> int | None:
    """Return the exit code of a child that ended, leaving it a zombie; None while it runs."""
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


class ExitWatch:
    """Watches child processes without reaping them.

    Zombies keep their process ids, and with them their process group ids, from being reused until their owner waits for
    them: a signal to the group of an ended rank can't hit another process.
    """

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}  # pidfd, or the pid itself where there is none -> pid
        self._epoll = select.epoll() if _has_pidfd() else None

    def close(self) -> None:
        """Stop watching."""
        if self._epoll is not None:
            for pidfd in self._pids:
                os.close(pidfd)
            self._epoll.close()
        self._pids.clear()

    def add(self, pid: int) -> None:
        """Watch a child; one that has already ended counts as ending now."""
        if self._epoll is None:
            self._pids[pid] = pid
            return
        pidfd = os.pidfd_open(pid)
        self._pids[pidfd] = pid
        self._epoll.register(pidfd, select.EPOLLIN)

    def fileno(self) -> int | None:
        """The descriptor that becomes readable at an exit; None if `take` must be called every `EXIT_POLL_INTERVAL`."""
        return None if self._epoll is None else self._epoll.fileno()

    def take(self) -> list[tuple[int, int]]:
        """Return pid and exit code of the children that ended since the last call, in order, without blocking."""
        if self._epoll is None:
            ready = list(self._pids)
        else:
            ready = [pidfd for pidfd, _ in self._epoll.poll(0, max(1, len(self._pids)))]
        ended = []
        for key in ready:
            code = _exit_code(self._pids[key])
            if code is None:
                continue
            ended.append((self._pids.pop(key), code))
            if self._epoll is not None:
                self._epoll.unregister(key)
                os.close(key)
        return ended


STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""Signals that are forwarded and start the countdown to SIGKILL."""

FORWARDED_SIGNALS = STOP_SIGNALS | {signal.SIGUSR1, signal.SIGUSR2}  # all signals that are forwarded to the ranks

_PROC = Path("/proc")
_DISPOSITIONS = ("SigBlk:", "SigIgn:", "SigCgt:")
"""The lines of /proc/PID/status with masks of signals without their default action."""


def signal_name(signum: int) -> str:
    """Return ``SIGTERM`` for 15; real-time signals have numbers only."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def surviving_members(groups: Iterable[int], signum: signal.Signals) -> list[int]:
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
    """Collects `FORWARDED_SIGNALS` within a ``with`` block, instead of letting them end the launcher.

    Python allows signal handlers in the main thread only; in another thread the inbox stays empty and signals keep
    their meaning. A signal that was ignored when the launcher started (``nohup``, a shell's background job) stays
    ignored, here and in the ranks.
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
            for signum in sorted(FORWARDED_SIGNALS):
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
        return [signal.Signals(signum) for signum in signums if signum in FORWARDED_SIGNALS]
