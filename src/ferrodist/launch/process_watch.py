"""Events of the rank processes: their exits, in order, and which failures are secondary.

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
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

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
