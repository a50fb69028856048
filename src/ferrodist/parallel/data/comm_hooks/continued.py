"""What is to be done when a collective has ended, as a handle like the collective's own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from ferrodist.collectives.pending import PendingCollective

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Continued"]

T = TypeVar("T")
S = TypeVar("S")


class Continued(PendingCollective[T]):
    """A collective whose result is made into another one by the first who waits for it.

    What is made of it may call collectives itself. All ranks then wait for their handles in one order, as DDP does.

    Args:
        first: The collective under way.
        then: ``then(result)`` gives the result.
    """

    def __init__(self, first: PendingCollective[S], then: Callable[[S], T]) -> None:
        super().__init__(first.op_name, first._group_name)  # noqa: SLF001 - of its own base class
        self._lock = threading.Lock()
        self._steps: Callable[[float | None], T] | None = lambda timeout: then(first.wait(timeout))
        self._first = first
        self._results: list[T] = []

    def done(self) -> bool:
        """Whether the collective has ended; `wait` may have work left to do."""
        return self._first.done()

    def wait(self, timeout: float | None = None) -> T:
        """Block until the collective has ended, and give what is made of it; see `PendingCollective.wait`."""
        with self._lock:
            if self._steps is not None:
                self._results.append(self._steps(timeout))
                self._steps = None
        return self._results[0]
