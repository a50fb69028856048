"""Calls that wait for their results: their futures, and who gives up when."""

from __future__ import annotations

import asyncio
import concurrent.futures
import heapq
import itertools
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ferrodist.errors import DistributedTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from ferrodist.errors import DistributedError
    from ferrodist.rpc.statistics import Counters

__all__ = ["Calls", "Future", "Waiting"]


_MOST_ENDED = 1000
"""Calls that have ended and whose timeouts are still known."""


class Future(concurrent.futures.Future[Any]):
    """The result of a call that is under way: a `concurrent.futures.Future` that can be awaited.

    Callbacks run in the thread that brings the result and must not wait for other calls. It can't be cancelled: a call
    ends by its timeout.
    """

    def cancel(self) -> bool:
        """A call goes on until its result comes, or its timeout."""
        return False

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()


@dataclass(frozen=True, slots=True)
class Waiting:
    """A call whose result has not come.

    Args:
        future: Who waits for it.
        peer: The rank that was called.
        name: Of the function.
        started: When, by the monotonic clock.
        seconds: How long the caller waits.
        done: Called once, when nothing is waited for any more.
    """

    future: Future
    peer: int
    name: str
    started: float
    seconds: float
    done: Callable[[], None]


class Calls:
    """All of one agent, by their numbers.

    Args:
        name: Of the thread that ends what is late.
        counters: Of what is late, too.
    """

    def __init__(self, name: str, counters: Counters) -> None:
        self._counters = counters
        self._numbers = itertools.count()
        self._waiting: dict[int, Waiting] = {}
        self._changed = threading.Condition()
        self._ends: list[tuple[float, int]] = []  # a heap of when, and of which call
        self._next_end = float("inf")  # which the thread sleeps until
        self._is_closed = False
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._thread.start()

    def add(self, waiting: Waiting) -> int:
        """Wait for a call's result; gives its number."""
        number = next(self._numbers)
        end = waiting.started + waiting.seconds
        with self._changed:
            self._waiting[number] = waiting
            if len(self._ends) > 2 * len(self._waiting) + _MOST_ENDED:
                self._ends = [each for each in self._ends if each[1] in self._waiting]
                heapq.heapify(self._ends)
            heapq.heappush(self._ends, (end, number))
            if end < self._next_end:
                self._next_end = end
                self._changed.notify()
        return number

    def take(self, number: int) -> Waiting | None:
        """A call whose result has come; None where nobody waits any more. It is for the caller to end its future."""
        waiting = self._waiting.pop(number, None)
        if waiting is not None:
            waiting.done()
        return waiting

    @property
    def count(self) -> int:
        """How many calls have no result."""
        return len(self._waiting)

    def fail(self, peer: int | None, error: DistributedError) -> None:
        """End the calls of a rank, or of all."""
        for number, waiting in list(self._waiting.items()):
            if peer is None or waiting.peer == peer:
                self._fail_one(number, error.fresh())

    def close(self, error: DistributedError) -> None:
        """End all calls, and the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self.fail(None, error)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _fail_one(self, number: int, error: Exception) -> bool:
        waiting = self.take(number)
        if waiting is not None:
            waiting.future.set_exception(error)
        return waiting is not None

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                now = time.monotonic()
                late = []
                while self._ends and (self._ends[0][0] <= now or self._ends[0][1] not in self._waiting):
                    late.append(heapq.heappop(self._ends)[1])
                self._next_end = self._ends[0][0] if self._ends else float("inf")
                if not late:
                    self._changed.wait(self._next_end - now if self._ends else None)
            for number in late:
                waiting = self._waiting.get(number)
                if waiting is not None:
                    text = (
                        f"rank {waiting.peer} did not answer the call of {waiting.name!r} within {waiting.seconds:g} s."
                        " Is it busy? Look at its statistics, or pass a longer timeout"
                    )
                    if self._fail_one(number, DistributedTimeoutError(text, ranks=(waiting.peer,))):
                        self._counters.count("timed_out")
