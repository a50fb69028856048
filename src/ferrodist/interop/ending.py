"""What a group waits for before it is left."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING

from ferrodist.collectives.operation import wait_for_started
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

    from ferrodist.backends.base import Backend
    from ferrodist.interop.messages import MessageWork

__all__ = ["Sends", "finish_started", "may_finish"]

_SEND_SECONDS = 10.0
"""How long messages may take to be received."""

_ENDS = {"shutdown", "_leave_at_exit"}

_CALLING = ("ferrodist.backends.", "ferrodist.collectives.", "ferrodist.interop.")
_CALLED_BACK = "ferrodist.interop.completion"


def may_finish() -> bool:
    """Whether the caller's caller may wait for what was started: not where an exception is why it leaves.

    Nor in the middle of a call: handlers of signals run there, and what waits for it to go on would do so for ever.
    """
    if sys.exc_info()[1] is not None:
        return False
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the way to it that costs calls nothing
    while frame is not None and frame.f_code.co_name in _ENDS:
        frame = frame.f_back
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_CALLING) and module != _CALLED_BACK:
            return False
        frame = frame.f_back
    return True


class Sends:
    """Messages of a group that may not have been received yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: deque[MessageWork] = deque()
        self._limit = 0

    def add(self, work: MessageWork) -> None:
        """Keep one until it has ended, or not much longer."""
        with self._lock:
            while self._works and self._works[0].has_ended():
                self._works.popleft()
            if len(self._works) >= self._limit:  # behind one that has not: seldom, for that looks at all of them
                self._works = deque(each for each in self._works if not each.has_ended())
                self._limit = 2 * len(self._works) + 8
            if not work.has_ended():
                self._works.append(work)

    def finish(self) -> None:
        """Wait for them, not for long."""
        deadline = Deadline(_SEND_SECONDS)
        with self._lock:
            works = list(self._works)
        for work in works:
            with contextlib.suppress(DistributedError):
                work.wait_for(deadline.remaining())


def finish_started(groups: Iterable[Backend], sends: Sends) -> None:
    """Return when collectives and sends that were started have ended, well or not."""
    for group in groups:
        if group.failure is None:
            wait_for_started(group)
    sends.finish()
