"""Waiting by polling, for engines that signal no completion.

[Note: polling]
The blocking calls of such engines poll without pause, and return for no deadline. Here every wait polls some twenty
times, which takes as many microseconds, then yields the processor between polls, and after some hundred polls sleeps,
for longer and longer. There are often more ranks than processors, and the rank that is waited for needs one.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.deadline import Deadline

_POLLS_WITHOUT_YIELD = 20
_POLLS_WITHOUT_SLEEP = 300
_MIN_PAUSE_SECONDS = 20e-6
_MAX_PAUSE_SECONDS = 1e-3
_GROWTH = 1.1

_yield_processor: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


class Backoff:
    """The pauses between polls, of at most ``longest`` seconds; see [Note: polling]."""

    def __init__(self, longest: float = _MAX_PAUSE_SECONDS) -> None:
        self._longest = longest
        self._num_polls = 0
        self._seconds = _MIN_PAUSE_SECONDS

    def reset(self) -> None:
        """Poll without pause again, after an event."""
        self._num_polls = 0
        self._seconds = _MIN_PAUSE_SECONDS

    def pause(self, longest: float) -> bool:
        """Pause for at most so many seconds; whether that was a sleep."""
        self._num_polls += 1
        if self._num_polls < _POLLS_WITHOUT_SLEEP:
            if self._num_polls > _POLLS_WITHOUT_YIELD:
                _yield_processor()
            return False
        time.sleep(min(self._seconds, self._longest, longest))
        self._seconds = min(self._seconds * _GROWTH, self._longest)
        return True


def wait_until(done: Callable[[], bool], deadline: Deadline, is_over: Callable[[], bool] = lambda: False) -> bool:
    """Poll until ``done()``; False if the deadline has passed before, or ``is_over()``."""
    if done():
        return True
    backoff = Backoff()
    while not done():
        if (backoff.pause(deadline.remaining()) and is_over()) or deadline.expired:
            return done()
    return True
