"""Futures of torch's, and the threads that complete them.

A callback of a future runs in the thread that completes it, and may wait for other collectives: PowerSGD's does. So no
thread of an engine completes any, and while a callback runs another thread goes on.

A future that ends with an error has that raised by a callback of ours: to set it (`Future.set_exception`) makes torch's
reducer crash.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Completer", "Threads", "promised"]

_IDLE_SECONDS = 2.0


class Ends(Protocol):
    """What ends some time."""

    def end(self) -> list[Any]:
        """Wait until it has, and give what it came to; raises what it has failed with."""


Promise = tuple["torch.futures.Future[Any]", "torch.futures.Future[Any]"]
"""What is completed, and what users have; see above."""


def promised(work: Ends, devices: list[int | str | torch.device]) -> Promise:
    """A future for what ends some time; the first of the two is to be completed when it has."""
    trigger: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
    return trigger, trigger.then(lambda _: work.end())


class Threads:
    """Threads for what may block; as many as are blocked at a time.

    Args:
        name: Of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_idle = 0
        self._is_closed = False

    def run(self, job: Callable[[], None]) -> None:
        """Run something in a thread; it must not raise."""
        with self._lock:
            if self._num_idle:
                self._num_idle -= 1
                self._jobs.put(job)
                return
        threading.Thread(target=self._work, args=(job,), name=self._name, daemon=True).start()

    def close(self) -> None:
        """End the threads that have nothing to do, and the others when they are done."""
        with self._lock:
            self._is_closed = True
            for _ in range(self._num_idle):
                self._jobs.put(None)
            self._num_idle = 0

    def _work(self, job: Callable[[], None] | None) -> None:
        while job is not None:
            job()
            del job  # or a result would live until the next one comes
            with self._lock:
                if self._is_closed:
                    return
                self._num_idle += 1
            job = self._next()

    def _next(self) -> Callable[[], None] | None:
        with contextlib.suppress(queue.Empty):
            return self._jobs.get(timeout=_IDLE_SECONDS)
        with self._lock:
            if self._num_idle:  # nobody has counted on this thread
                self._num_idle -= 1
                return None
        return self._jobs.get()


class Completer:
    """Completes futures of what ends in the order in which it is given.

    Args:
        threads: Who do.
    """

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Ends, torch.futures.Future[Any]]] = deque()
        self._has_leader = False

    def complete(self, work: Ends, trigger: torch.futures.Future[Any]) -> None:
        """Complete a future when something has ended, well or not."""
        with self._lock:
            self._waiting.append((work, trigger))
            if self._has_leader:
                return
            self._has_leader = True
        self._threads.run(self._lead)

    def _lead(self) -> None:
        with self._lock:
            work, trigger = self._waiting.popleft()
        with contextlib.suppress(BaseException):  # the future's callback raises it, to whom it concerns
            work.end()
        with self._lock:  # before callbacks run: they may wait for what comes next
            self._has_leader = bool(self._waiting)
        if self._has_leader:
            self._threads.run(self._lead)
        trigger.set_result(None)
