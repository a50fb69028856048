"""Waiting for an engine that tells nobody when something has come: one has to look.

[Note: looking for what comes]
Such engines' own blocking calls look without pause, and return for no deadline. Here every wait looks some twenty
times, which takes as many microseconds, then gives way between looks to whoever wants the processor, and after some
hundred looks sleeps, for longer and longer. Ranks often are more than processors, and what a rank waits for needs one.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.deadline import Deadline

_BARE_LOOKS = 20
_LOOKS_AWAKE = 300
_SHORTEST_SECONDS = 20e-6
_LONGEST_SECONDS = 1e-3
_GROWTH = 1.1

_give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


class Backoff:
    """How long to rest between looks; see [Note: looking for what comes].

    Args:
        longest: Seconds between two looks, at most.
    """

    def __init__(self, longest: float = _LONGEST_SECONDS) -> None:
        self._longest = longest
        self._num_looks = 0
        self._seconds = _SHORTEST_SECONDS

    def begin_again(self) -> None:
        """Something has come: look again soon."""
        self._num_looks = 0
        self._seconds = _SHORTEST_SECONDS

    def rest(self, longest: float) -> bool:
        """Let others run, for at most so many seconds; whether that was sleep."""
        self._num_looks += 1
        if self._num_looks < _LOOKS_AWAKE:
            if self._num_looks > _BARE_LOOKS:
                _give_way()
            return False
        time.sleep(min(self._seconds, self._longest, longest))
        self._seconds = min(self._seconds * _GROWTH, self._longest)
        return True


def wait_until(done: Callable[[], bool], deadline: Deadline, is_over: Callable[[], bool] = lambda: False) -> bool:
    """Look until ``done()``; False when the deadline has passed before, or ``is_over()``."""
    if done():
        return True
    pace = Backoff()
    while not done():
        if pace.rest(deadline.remaining()) and is_over():
            return done()
        if deadline.expired:
            return done()
    return True
