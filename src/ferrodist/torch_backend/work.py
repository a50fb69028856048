"""The `Work` objects that torch's functions return, and whether a caller may wait until a group has none left.

A collective becomes a `CollectiveWork`, started in the `CallbackLevel` of the thread's depth of callbacks
(`callback_levels.py`). Sends and receives are in `messages.py`.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from typing_extensions import override

from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedTimeoutError
from ferrodist.torch_backend.futures import ResultFuture, SerialQueue, ThreadPool
from ferrodist.torch_private.compilers import not_compiled
from ferrodist.torch_private.pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from ferrodist.collectives.work import PendingCollective

_NO_TIMEOUT = timedelta(0)


def seconds_of(timeout: timedelta | None) -> float | None:
    """Convert a timeout of torch's to seconds; None for 0 or less, by which torch means the default."""
    if timeout is None or timeout <= _NO_TIMEOUT:
        return None
    return timeout.total_seconds()


@not_compiled
class FerrodistWork(dist.Work):
    """An operation that has been started; ``result()`` returns ``results``."""

    def __init__(self, results: list[Any], threads: ThreadPool) -> None:
        super().__init__()
        self.results = results
        self.threads = threads
        self._future: ResultFuture | None = None

    # Implemented by each kind of work.

    def is_completed(self) -> bool:
        """Return whether the operation has ended, successfully or not."""
        raise NotImplementedError

    def wait_for(self, seconds: float | None) -> None:
        """Wait until the operation has ended, and raise its error."""
        raise NotImplementedError

    def run_in_thread(self, callback: Callable[[], None]) -> None:
        """Run ``callback``, which waits for the end itself, in one of the group's threads, or now if it has ended."""
        raise NotImplementedError

    # Called by torch.

    @override
    def wait(self, timeout: timedelta | None = _NO_TIMEOUT) -> bool:
        """Block until the operation has ended, and raise its error; after a timeout it may be waited for again."""
        self.wait_for(seconds_of(timeout))
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the results as a future, made at the first call."""
        if self._future is None:
            tensors = [each for each in tree_leaves(self.results) if isinstance(each, torch.Tensor)]
            devices: list[int | str | torch.device] = [each.device for each in tensors if each.is_cuda]
            future = ResultFuture(self.threads, devices)
            if self.is_completed():  # then the future is done at once, which torch's reducer relies on
                future.settle(self.result)
            else:
                self.run_in_thread(lambda: future.settle(self.result))
            self._future = future
        return self._future

    def is_success(self) -> bool:
        """Return whether the operation has ended successfully."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of an operation that has failed, or None."""
        if not self.is_completed():
            return None
        try:
            self.wait_for(None)
        except Exception as error:  # noqa: BLE001 - it is returned
            return error
        return None

    def result(self) -> list[Any]:
        """Wait for the results and return them."""
        self.wait_for(None)
        return self.results

    def synchronize(self) -> None:
        """Do the same as `wait`."""
        self.wait()


@not_compiled
class DoneWork(FerrodistWork):
    """An operation that had ended before its call returned."""

    @override
    def wait(self, timeout: timedelta | None = _NO_TIMEOUT) -> bool:
        return True

    @override
    def is_completed(self) -> bool:
        return True

    @override
    def wait_for(self, seconds: float | None) -> None:
        pass

    @override
    def run_in_thread(self, callback: Callable[[], None]) -> None:
        callback()


@not_compiled
class CollectiveWork(FerrodistWork):
    """A collective that has been started; ``callbacks`` run in the order in which collectives were started."""

    def __init__(
        self, pending: PendingCollective[Any], results: list[Any], threads: ThreadPool, callbacks: SerialQueue
    ) -> None:
        super().__init__(results, threads)
        self._pending = pending
        self._callbacks = callbacks

    @override
    def is_completed(self) -> bool:
        return self._pending.done()

    @override
    def wait_for(self, seconds: float | None) -> None:
        self._pending.wait(seconds)

    @override
    def run_in_thread(self, callback: Callable[[], None]) -> None:
        self._callbacks.run(callback, self.threads)


@not_compiled
class JoinedWork(FerrodistWork):
    """Several operations as one, in the order in which they were started."""

    def __init__(self, works: Sequence[FerrodistWork], threads: ThreadPool) -> None:
        super().__init__([result for work in works for result in work.results], threads)
        self._works = works

    @override
    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    @override
    def wait_for(self, seconds: float | None) -> None:
        deadline = None if seconds is None else Deadline(seconds)
        errors = [error for work in self._works if (error := _error_of(work, deadline)) is not None]
        if errors:
            raise errors[0]

    @override
    def run_in_thread(self, callback: Callable[[], None]) -> None:
        self.threads.run(callback)


def _error_of(work: FerrodistWork, deadline: Deadline | None) -> BaseException | None:
    """Wait for one of several operations and return its error; raises only when it has not ended in time."""
    try:
        work.wait_for(None if deadline is None else deadline.remaining())
    except DistributedTimeoutError as error:
        if not work.is_completed():
            raise
        return error
    except Exception as error:  # noqa: BLE001 - it is raised when all have ended
        return error
    return None


_SHUTDOWN_FUNCTIONS = {"shutdown", "_leave_at_exit"}  # methods of `FerrodistProcessGroup`
_CALL_MODULES = ("ferrodist.backends.", "ferrodist.collectives.", "ferrodist.torch_backend.")
_CALLBACK_MODULES = {
    "ferrodist.torch_backend.futures",
    "ferrodist.backends.lifecycle",
}  # which run callbacks and exit handlers


def can_drain() -> bool:
    """Return whether the caller's caller may wait for started operations: not while an exception is being handled.

    Nor in the middle of a call: signal handlers run there, and a wait for that call would never end.
    """
    if sys.exc_info()[1] is not None:
        return False
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - costs calls nothing
    while frame is not None and frame.f_code.co_name in _SHUTDOWN_FUNCTIONS:
        frame = frame.f_back
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_CALL_MODULES) and module not in _CALLBACK_MODULES:
            return False
        frame = frame.f_back
    return True
