"""Requests: transfers that were started and not waited for."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import TYPE_CHECKING, Protocol

from ferrodist.backends.stragglers import Stragglers
from ferrodist.backends.tags import ANY_SOURCE
from ferrodist.deadline import Deadline, long_wait
from ferrodist.errors import DistributedError, DistributedTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_ANSWER_SECONDS = 0.2  # how long past its deadline a wait may ask other ranks why it timed out
_MIN_WAIT_SECONDS = 0.02


def answer_seconds(timeout: float) -> float:
    """Return how long to look for stragglers after a wait of ``timeout`` seconds; 0 after a mere poll."""
    return _ANSWER_SECONDS if timeout >= _MIN_WAIT_SECONDS else 0.0


class Request(Protocol):
    """A transfer that was started. Its buffer belongs to the backend until the request is done."""

    @property
    def peer(self) -> int:
        """The peer's rank; `ANY_SOURCE` until it is known."""

    def wait(self, timeout: float) -> int:
        """Block until done and return the peer's rank.

        Raises:
            DistributedTimeoutError: ``timeout`` seconds passed; the request is still under way and may be waited for
                again or cancelled.
            DistributedError: The transfer failed; the reason.
        """

    def done(self) -> bool:
        """Return whether the transfer has ended, successfully or not."""

    def cancel(self) -> bool:
        """Cancel the transfer, so that the buffer is the caller's again.

        Returns False if it has ended, or ends by itself at once: `wait` then returns or raises its result. A message on
        its way to a cancelled receive is kept for the next one.
        """

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` once when done, immediately if it is; it must not block or raise."""


class SizedRequest(Request, Protocol):
    """A receive of a message that may be shorter than the buffer."""

    @property
    def message_bytes(self) -> int:
        """Size of the message, once the request is done."""


def wait_all(
    requests: Iterable[Request], deadline: Deadline, warn: Callable[[list[Request]], None] | None = None
) -> None:
    """Wait for every request of a group; if one fails, cancel the others and raise its error.

    ``warn`` is called once after a long wait, with the requests that are not done; see [Note: long waits]. The
    ``ranks`` of a DistributedTimeoutError are the stragglers among the peers of those.
    """
    pending = list(requests)
    warn_after = long_wait().timeout
    try:
        warning_due = Deadline(max(0.0, warn_after - deadline.elapsed()))
        if warn is not None and warn_after < deadline.timeout and not _are_done(pending, warning_due):
            warn([request for request in pending if not request.done()])
        for request in pending:
            _wait_for_one(request, pending, deadline)
    except BaseException:
        for request in pending:
            request.cancel()
        raise


def _are_done(requests: list[Request], deadline: Deadline) -> bool:
    """Wait for requests until the deadline; whether all have ended."""
    for request in requests:
        with contextlib.suppress(DistributedTimeoutError):  # of this wait, or of the transfer, which has ended then
            request.wait(deadline.remaining())
        if not request.done():
            return False
    return True


def _wait_for_one(request: Request, pending: list[Request], deadline: Deadline) -> None:
    try:
        request.wait(deadline.remaining())
    except DistributedTimeoutError as error:
        if not request.done():
            _give_up(pending, deadline, error)
        request.wait(math.inf)  # it has ended meanwhile, or its group has failed with a timeout


def _give_up(pending: list[Request], deadline: Deadline, error: DistributedTimeoutError) -> None:
    """Cancel the requests that are not done and raise; return if all have ended, or do so at once, after all."""
    waiting = [request for request in pending if not request.done()]
    if not waiting:
        return
    late = Stragglers(ranks=tuple(sorted({request.peer for request in waiting} - {ANY_SOURCE})))
    finders = (getattr(request, "find_stragglers", None) for request in waiting)  # of requests that ask their group
    find = next(filter(None, finders), None)
    if find is not None:
        late = find(late.ranks, answer_seconds(deadline.timeout))
    cancelled = [request.cancel() for request in pending]
    if any(cancelled):
        found = DistributedTimeoutError(error.message + late.detail, ranks=late.ranks)
        found.detail = late.detail
        raise found from None


class BaseRequest:
    """The state that every request ends in, and how threads wait for it.

    Subclasses start the transfer; whoever learns of its end calls `end` exactly once, from any thread.
    """

    __slots__ = ("__weakref__", "_callbacks", "_done", "_lock", "error", "peer")

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._done = False
        # Held until the transfer ends. A bare lock costs a third of an Event, most of the cost of waiting for a
        # small message; a waiter releases it at once, so any number of threads may wait.
        self._lock = threading.Lock()
        self._lock.acquire()

    def end(self, error: BaseException | None = None) -> None:
        """End the request, with ``error`` if it failed, and wake its waiters. For the code that moves the bytes."""
        assert not self._done, "a request ends once"
        self.error = error
        self._done = True
        self._lock.release()
        while self._callbacks:  # add_done_callback may take from it, too
            try:
                callback = self._callbacks.pop()
            except IndexError:
                return  # the other thread took it
            callback()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` once when done, immediately if it is; it must not block or raise."""
        self._callbacks.append(callback)
        if self._done:  # end may have read the list before the append
            try:
                self._callbacks.remove(callback)
            except ValueError:
                return  # end took it
            callback()

    def done(self) -> bool:
        """Return whether the transfer has ended, successfully or not."""
        return self._done

    def ended_within(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for the end; whether it has come."""
        if not self._done:
            if not self._lock.acquire(timeout=Deadline(timeout).remaining()):
                return False
            self._lock.release()
        return True

    def wait(self, timeout: float) -> int:
        """Block until done; see `Request.wait`."""
        if not self.ended_within(timeout):
            peer, ranks = (f"rank {self.peer}", (self.peer,)) if self.peer >= 0 else ("any rank", ())
            raise DistributedTimeoutError(f"no transfer with {peer} within {timeout:g} s", ranks=ranks)
        if self.error is not None:
            raise self.error.fresh() if isinstance(self.error, DistributedError) else self.error
        return self.peer


_EARLY = 0.8
"""A call that raises a timeout before this fraction of its time has passed did not time out: its group has failed."""


class ThreadedRequest(BaseRequest):
    """A request that repeats a blocking call with a short timeout in a thread until it succeeds or is cancelled.

    ``attempt(timeout)`` returns the peer, or raises DistributedTimeoutError without an effect. It begins once the
    requests ``after``, which could take its message, have ended. `cancel` waits for the attempt under way, which takes
    at most 0.5 s, and 0.1 s more for each MB. The group's ``failure()`` may be a DistributedTimeoutError too.
    """

    __slots__ = ("_failure", "_is_cancel_requested", "_is_cancelled", "_longest")

    # The first attempt is short, so that cancel() waits little. Later ones are longer, for messages that take long; for
    # one that moves at less than 10 MB/s none is long enough.
    _FIRST_SECONDS = 0.05
    _GROWTH = 1.25
    _LONGEST_SECONDS = 0.5
    _SECONDS_PER_BYTE = 1e-7

    def __init__(
        self,
        attempt: Callable[[float], int],
        peer: int,
        failure: Callable[[], BaseException | None],
        *,
        after: Iterable[ThreadedRequest] = (),
        size_bytes: int = 0,
    ) -> None:
        super().__init__(peer)
        self._is_cancel_requested = self._is_cancelled = False
        self._failure = failure
        self._longest = self._LONGEST_SECONDS + size_bytes * self._SECONDS_PER_BYTE
        threading.Thread(target=self._run, args=(attempt, list(after)), name="ferrodist-request", daemon=True).start()

    def _run(self, attempt: Callable[[float], int], earlier: list[ThreadedRequest]) -> None:
        seconds = self._FIRST_SECONDS
        while not self._is_cancel_requested:
            if earlier:
                if earlier[-1].ended_within(self._FIRST_SECONDS):
                    earlier.pop()
                continue
            deadline = Deadline(_EARLY * seconds)
            try:
                self.peer = attempt(seconds)
            except DistributedTimeoutError as error:
                failure = self._failure() or (None if deadline.expired else error)
                if failure is not None:
                    self.end(failure)
                    return
                seconds = min(seconds * self._GROWTH, self._longest)
            except Exception as error:  # noqa: BLE001 - it is raised in wait()
                self.end(error)
                return
            else:
                self.end()
                return
        self._is_cancelled = True
        ranks = () if self.peer == ANY_SOURCE else (self.peer,)
        self.end(DistributedTimeoutError("the transfer was cancelled", ranks=ranks))

    def cancel(self) -> bool:
        """Stop after the attempt under way; see `Request.cancel`."""
        if self._done:
            return False
        self._is_cancel_requested = True
        self.ended_within(math.inf)
        return self._is_cancelled
