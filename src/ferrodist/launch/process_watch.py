"""Whether a rank failed because another did: its standard error says so.

Notice that ranks ended, in the order in which they ended.

[Note: which rank failed first] When one rank dies, its peers follow within milliseconds, and the report must
not blame them. SIGCHLD cannot tell the order: pending ones merge. A pidfd can: the kernel appends it to the
ready list of its epoll set at the moment it notifies the parent (``exit_notify``), and ``epoll_wait`` returns
that list first in, first out. So the order is the kernel's own, however late the launcher looks, even if it
was stopped meanwhile. The *times* in the report are those at which the launcher looked, usually well under a
millisecond later.

How good is that? It orders the ends of processes, not the causes. A rank whose program fails tells the others
from an exit handler, and then shuts its interpreter down, which with torch takes about as long as the others
need to raise, print a traceback and shut down theirs; rank 0 even waits for them. So a rank whose standard
error says that another rank was the reason (`is_consequence`) is not blamed at once: the launcher waits until
a rank fails of itself, until all have ended, or until `CAUSE_SECONDS` have passed, and only then settles for
the first end. What the order alone must get right are ends without exit handlers, as by SIGKILL. The kernel
tears down memory and closes sockets shortly before ``exit_notify``, tens of milliseconds for much memory; a
peer that notices the closed socket, says nothing and leaves faster than that with ``os._exit`` would come first.

Where there is no pidfd (Linux before 5.3, other systems) the ranks are polled every 20 ms in rank order, and
ranks that end between two looks are reported in rank order.

Signals sent to the launcher, as something its event loop can wait for.
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
    from types import TracebackType

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


def is_consequence(lines: Iterable[bytes], rank: int) -> bool:
    """Whether the last exception printed, or one it came from, is ferrodist's error about another rank's end.

    A rank that catches its error and prints something else, or nothing, counts as one that failed of itself.

    Args:
        lines: The end of the rank's standard error.
        rank: The rank. An abort by itself is no consequence.
    """
    found, previous = False, b""
    for line in lines:
        if line.startswith(_TRACEBACK) and previous not in _CHAINS:
            found = False  # another exception; the program went on after what stood before
        error = _ERROR.match(line)
        if error is not None:
            aborter = _ABORTER.search(line) if error["kind"] == b"GroupAbortedError" else None
            found = aborter is None or int(aborter[1]) != rank
        if line.strip():
            previous = line.strip()
    return found


EXIT_POLL_INTERVAL = 0.02
"""Seconds between two looks at the ranks where the kernel cannot tell us."""

CAUSE_SECONDS = 6.0
"""Longest wait for the rank that was the reason for another's failure; rank 0 may take five to leave its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """The end of one rank's process.

    Args:
        rank: Its number in the job.
        pid: Its process.
        code: Exit code, or the negative number of the signal that ended it.
        elapsed: Seconds between the start of the group and the launcher's noticing.
        stopped: Whether the launcher had asked it to end, and it ended the way one does then.
        consequence: Whether it failed because another rank did, by what it said last.
    """

    rank: int
    pid: int
    code: int
    elapsed: float
    stopped: bool = False
    consequence: bool = False


def _has_pidfd() -> bool:
    if not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # an old kernel, or a sandbox that does not know the call
        return False
    return True


def _peek(pid: int) -> int | None:
    """The exit code of a child that ended, leaving it a zombie; None while it runs."""
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


class ExitWatch:
    """Watches child processes without reaping them.

    The zombies stay until their owner waits for them. They keep their process ids, and with them their
    process group ids, from being used again: a signal to the group of a rank that ended cannot hit a
    stranger.
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
        """Watch a child; one that has ended already counts as ending now."""
        if self._epoll is None:
            self._pids[pid] = pid
            return
        pidfd = os.pidfd_open(pid)
        self._pids[pidfd] = pid
        self._epoll.register(pidfd, select.EPOLLIN)

    def fileno(self) -> int | None:
        """Readable once a child has ended; None where `take` must be called every `EXIT_POLL_INTERVAL`."""
        return None if self._epoll is None else self._epoll.fileno()

    def take(self) -> list[tuple[int, int]]:
        """(pid, exit code) of the children that ended since the last call, in that order; does not block."""
        if self._epoll is None:
            ready = list(self._pids)
        else:
            ready = [pidfd for pidfd, _ in self._epoll.poll(0, max(1, len(self._pids)))]
        ended = []
        for key in ready:
            code = _peek(self._pids[key])
            if code is None:
                continue
            ended.append((self._pids.pop(key), code))
            if self._epoll is not None:
                self._epoll.unregister(key)
                os.close(key)
        return ended


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
