"""Transfers that were started and not waited for."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Protocol

from ferrodist.backends.tags import ANY_SOURCE
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, DistributedTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["BaseRequest", "Request", "ThreadedRequest", "wait_all"]


class Request(Protocol):
    """A transfer that was started. Its buffer belongs to the backend until the request is done."""

    @property
    def peer(self) -> int:
        """The rank of the other side; `ANY_SOURCE` until it is known."""

    def wait(self, timeout: float) -> int:
        """Block until done and return the rank of the other side.

        Raises:
            DistributedTimeoutError: ``timeout`` seconds passed; the request is still under way and may be waited for
                again or cancelled.
            DistributedError: The transfer failed, with the reason.
        """

    def done(self) -> bool:
        """Whether the transfer has ended, well or not."""

    def cancel(self) -> bool:
        """Give the transfer up, so that the buffer is the caller's again.

        Returns False when it has ended, or ends by itself at once: `wait` then tells how. A message on its way to a
        cancelled receive is kept for the next one.
        """

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` once when done, at once if it is; it must not block or raise."""


def wait_all(requests: Iterable[Request], deadline: Deadline) -> None:
    """Wait for every request; when one fails cancel the others and raise its error.

    Raises:
        DistributedTimeoutError: The deadline passed; ``ranks`` are the peers of all that were not done.
    """
    pending = list(requests)
    try:
        for request in pending:
            request.wait(deadline.remaining())
    except DistributedTimeoutError as error:
        late = {request.peer for request in pending if not request.done()}
        cancelled = [request.cancel() for request in pending]
        if not any(cancelled):
            for request in pending:  # they ended between the two, or end at once: see Request.cancel
                request.wait(math.inf)
            return
        raise DistributedTimeoutError(error.message, ranks=tuple(sorted(late - {ANY_SOURCE}))) from None
    except BaseException:
        for request in pending:
            request.cancel()
        raise


class BaseRequest:
    """The state every request ends in, and the way threads wait for it.

    Subclasses start the transfer; whoever knows of its end calls `end` exactly once, from any thread.
    """

    __slots__ = ("__weakref__", "_callbacks", "_done", "_lock", "error", "peer")

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._done = False
        # Held until the transfer ends. A bare lock is a third of the cost of an Event, and a small message's wait is
        # mostly that cost; a waiter gives it back at once, so any number of threads may wait.
        self._lock = threading.Lock()
        self._lock.acquire()

    def end(self, error: BaseException | None = None) -> None:
        """End the request, well or with ``error``, and wake who waits. For who moves the bytes."""
        assert not self._done, "a request ends once"
        self.error = error
        self._done = True
        self._lock.release()
        while self._callbacks:  # emptied from both ends by whoever comes last: see add_done_callback
            self._callbacks.pop()()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` once when done, at once if it is; it must not block or raise."""
        self._callbacks.append(callback)
        if self._done:  # end may have looked at the list before the append
            try:
                self._callbacks.remove(callback)
            except ValueError:
                return  # end took it
            callback()

    def done(self) -> bool:
        """Whether the transfer has ended, well or not."""
        return self._done

    def ended_within(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for the end; False when it has not come."""
        if not self._done:
            if not self._lock.acquire(timeout=Deadline(timeout).remaining()):
                return False
            self._lock.release()
        return True

    def wait(self, timeout: float) -> int:
        """Block until done; see `Request.wait`."""
        if not self.ended_within(timeout):
            whom, ranks = (f"rank {self.peer}", (self.peer,)) if self.peer >= 0 else ("any rank", ())
            raise DistributedTimeoutError(f"no transfer with {whom} within {timeout:g} s", ranks=ranks)
        if self.error is not None:
            raise self.error.fresh() if isinstance(self.error, DistributedError) else self.error
        return self.peer


class ThreadedRequest(BaseRequest):
    """A request that repeats a blocking call with a short timeout in a thread until it succeeds or is cancelled.

    Args:
        attempt: ``attempt(timeout)`` returns the peer, or raises DistributedTimeoutError with nothing done.
        peer: The other side, for error messages.
        failure: Why the group can't be used any more, or None; it may be a DistributedTimeoutError too.
        after: Requests that could take each other's messages: it begins once they have ended.
    """

    __slots__ = ("_cancelled", "_failure", "_gave_up")

    # The first attempt is short, so that cancel() waits little; later ones are longer, for messages that take long.
    _FIRST_SECONDS = 0.05
    _GROWTH = 1.25

    def __init__(
        self,
        attempt: Callable[[float], int],
        peer: int,
        failure: Callable[[], BaseException | None],
        after: Iterable[ThreadedRequest] = (),
    ) -> None:
        super().__init__(peer)
        self._cancelled = self._gave_up = False
        self._failure = failure
        threading.Thread(target=self._run, args=(attempt, list(after)), name="ferrodist-request", daemon=True).start()

    def _run(self, attempt: Callable[[float], int], earlier: list[ThreadedRequest]) -> None:
        seconds = self._FIRST_SECONDS
        while not self._cancelled:
            if earlier:
                if earlier[-1].ended_within(self._FIRST_SECONDS):
                    earlier.pop()
                continue
            try:
                self.peer = attempt(seconds)
            except DistributedTimeoutError:
                failure = self._failure()
                if failure is not None:
                    self.end(failure)
                    return
                seconds *= self._GROWTH
            except Exception as error:  # noqa: BLE001 - it is raised again in wait()
                self.end(error)
                return
            else:
                self.end()
                return
        self._gave_up = True
        self.end(DistributedTimeoutError("the transfer was cancelled", ranks=(self.peer,)))

    def cancel(self) -> bool:
        """Stop after the attempt under way; see `Request.cancel`."""
        if self._done:
            return False
        self._cancelled = True
        self.ended_within(math.inf)
        return self._gave_up
