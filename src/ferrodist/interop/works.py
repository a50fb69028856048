"""What torch's functions return when they don't wait."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedTimeoutError
from ferrodist.interop.completion import Line, ResultFuture, Threads
from ferrodist.torch_private.compilers import not_compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.collectives.pending import PendingCollective

__all__ = ["CollectiveWork", "DoneWork", "FerrodistWork", "JoinedWork", "seconds_of", "tensors_in"]

_NO_TIMEOUT = timedelta(0)


def seconds_of(timeout: timedelta | None) -> float | None:
    """A timeout of torch's in seconds; None where it means none, which it says by 0 or less."""
    if timeout is None or timeout <= _NO_TIMEOUT:
        return None
    return timeout.total_seconds()


def tensors_in(results: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors of results, some of which are lists of them."""
    found: list[Any] = []
    for each in results:
        found += tensors_in(each) if isinstance(each, (list, tuple)) else [each]
    return [each for each in found if isinstance(each, torch.Tensor)]


@not_compiled
class FerrodistWork(dist.Work):
    """Something that is under way.

    Args:
        results: What it gives.
        threads: Of its group.
    """

    def __init__(self, results: list[Any], threads: Threads) -> None:
        super().__init__()
        self.results = results
        self.threads = threads
        self._future: ResultFuture | None = None

    # What the kinds of it differ in.

    def has_ended(self) -> bool:
        """Whether it has ended, well or not."""
        raise NotImplementedError

    def wait_for(self, seconds: float | None) -> None:
        """Wait until it has ended, and raise what it has failed with."""
        raise NotImplementedError

    def tell(self, settle: Callable[[], None]) -> None:
        """Have something called, not by an engine's thread, when it has ended or is about to."""
        raise NotImplementedError

    # What torch calls.

    def wait(self, timeout: timedelta | None = _NO_TIMEOUT) -> bool:
        """Return when it has ended; raises what it has failed with.

        Raises:
            DistributedTimeoutError: ``timeout`` passed; it goes on and may be waited for again.
        """
        self.wait_for(seconds_of(timeout))
        return True

    def end(self) -> list[Any]:
        """Wait until it has ended, and give what it came to."""
        self.wait_for(None)
        return self.results

    def get_future(self) -> torch.futures.Future[Any]:
        """Its results as a future; made when first asked for."""
        if self._future is None:
            devices: list[int | str | torch.device] = [each.device for each in tensors_in(self.results) if each.is_cuda]
            future = self._future = ResultFuture(self.threads, devices)
            if self.has_ended():  # then it is done at once, which torch's reducer counts on
                future.settle(self.end)
            else:
                self.tell(lambda: future.settle(self.end))
        return self._future

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self.has_ended()

    def is_success(self) -> bool:
        """Whether it has ended, and well."""
        return self.has_ended() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What it has failed with, if it has."""
        if not self.has_ended():
            return None
        try:
            self.wait_for(None)
        except Exception as error:  # noqa: BLE001 - it is given back
            return error
        return None

    def result(self) -> list[Any]:
        """Its results; waits for them."""
        return self.end()

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()


@not_compiled
class DoneWork(FerrodistWork):
    """What has ended before its call returned."""

    def has_ended(self) -> bool:
        """See `FerrodistWork`."""
        return True

    def wait_for(self, seconds: float | None) -> None:
        """See `FerrodistWork`."""

    def tell(self, settle: Callable[[], None]) -> None:
        """See `FerrodistWork`."""
        settle()


@not_compiled
class CollectiveWork(FerrodistWork):
    """A collective that was started.

    Args:
        pending: It.
        results: What it gives.
        threads: Of its group.
        line: Of those that end in the order in which they were started.
    """

    def __init__(self, pending: PendingCollective[Any], results: list[Any], threads: Threads, line: Line) -> None:
        super().__init__(results, threads)
        self._pending = pending
        self._line = line

    def has_ended(self) -> bool:
        """See `FerrodistWork`."""
        return self._pending.done()

    def wait_for(self, seconds: float | None) -> None:
        """See `FerrodistWork`."""
        self._pending.wait(seconds)

    def tell(self, settle: Callable[[], None]) -> None:
        """See `FerrodistWork`."""
        self._line.run(settle, self.threads)


@not_compiled
class JoinedWork(FerrodistWork):
    """Several as one.

    Args:
        works: They, in the order in which they were started.
        threads: Of their group.
    """

    def __init__(self, works: Sequence[FerrodistWork], threads: Threads) -> None:
        super().__init__([result for work in works for result in work.results], threads)
        self._works = works

    def has_ended(self) -> bool:
        """See `FerrodistWork`."""
        return all(work.has_ended() for work in self._works)

    def wait_for(self, seconds: float | None) -> None:
        """See `FerrodistWork`."""
        deadline = None if seconds is None else Deadline(seconds)
        errors = [error for work in self._works if (error := _error_of(work, deadline)) is not None]
        if errors:
            raise errors[0]

    def tell(self, settle: Callable[[], None]) -> None:
        """See `FerrodistWork`."""
        self.threads.run(settle)


def _error_of(work: FerrodistWork, deadline: Deadline | None) -> BaseException | None:
    """Wait for one of several; raises only that it has not ended yet."""
    try:
        work.wait_for(None if deadline is None else deadline.remaining())
    except DistributedTimeoutError as error:
        if not work.has_ended():
            raise
        return error
    except Exception as error:  # noqa: BLE001 - it is raised when all have ended
        return error
    return None
