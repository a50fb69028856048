"""`Continued`: a pending collective with a function to call on its result, as `torch.futures.Future.then`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from ferrodist.collectives.work import PendingCollective
from ferrodist.deadline import check_timeout

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
S = TypeVar("S")


class Continued(PendingCollective[T]):
    """A collective followed by a function of its result, which the first waiter calls.

    The function may call collectives itself. All ranks then wait for their handles in one order, as DDP does.

    Args:
        first: The collective under way.
        then: ``then(result)`` returns the final result.
    """

    def __init__(self, first: PendingCollective[S], then: Callable[[S], T]) -> None:
        super().__init__(first.op_name, first._group_name)  # noqa: SLF001 - of its own base class
        self._lock = threading.Lock()
        self._steps: Callable[[float | None], T] | None = lambda timeout: then(first.wait(timeout))
        self._first = first
        self._results: list[T] = []

    def done(self) -> bool:
        """True if the collective has ended; `wait` may have work left to do."""
        return self._first.done()

    def wait(self, timeout: float | None = None) -> T:
        """Block until the collective has ended, and return the final result; see `PendingCollective.wait`."""
        limit = -1 if timeout is None else min(check_timeout(timeout), threading.TIMEOUT_MAX)
        if not self._lock.acquire(timeout=limit):  # another thread is waiting
            raise self._still_running(timeout)
        try:
            if self._steps is not None:
                self._results.append(self._steps(timeout))
                self._steps = None
        finally:
            self._lock.release()
        return self._results[0]
