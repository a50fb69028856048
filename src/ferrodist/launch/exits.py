"""Notice that ranks ended, in the order in which they ended.

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
"""

from __future__ import annotations

import os
import select
from dataclasses import dataclass

__all__ = ["CAUSE_SECONDS", "EXIT_POLL_INTERVAL", "ExitWatch", "RankExit"]

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
