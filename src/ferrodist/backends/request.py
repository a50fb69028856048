"""Transfers that were started and not waited for.

Messages of one size that keep coming, and a wait that other threads can end.
"""

from __future__ import annotations

import contextlib
import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ferrodist.backends.tags import ANY_SOURCE
from ferrodist.deadline import Deadline, long_wait
from ferrodist.errors import DistributedError, DistributedTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from typing_extensions import Buffer

_ANSWER_SECONDS = 0.2
"""How long past its deadline a wait may ask around for whom it waits in vain."""

_SHORTEST_WAIT_SECONDS = 0.02


def answer_seconds(timeout: float) -> float:
    """How long to ask around after a wait of ``timeout`` seconds: not at all for one that hardly waits, but polls."""
    return _ANSWER_SECONDS if timeout >= _SHORTEST_WAIT_SECONDS else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers:
    """Whom a wait that ran out of time is put down to.

    Args:
        ranks: In the numbers of the group that was asked.
        detail: A clause for an error's message, with a space in front; empty when there is nothing to add.
        is_relay: Whether it is a rank that does not pass on what others send each other.
    """

    ranks: tuple[int, ...]
    detail: str = ""
    is_relay: bool = False


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


@runtime_checkable
class StragglerFinder(Protocol):
    """What may know whom a wait in vain is put down to: a group, or a request of one."""

    def find_stragglers(self, peers: tuple[int, ...], within: float) -> Stragglers:
        """See `Backend.find_stragglers`."""


def wait_all(
    requests: Iterable[Request], deadline: Deadline, warn: Callable[[list[Request]], None] | None = None
) -> None:
    """Wait for every request; when one fails cancel the others and raise its error.

    Args:
        requests: Of one group.
        deadline: When to give up.
        warn: Called once where it takes long, with the requests that are not done; see [Note: long waits].

    Raises:
        DistributedTimeoutError: The deadline passed; ``ranks`` are those that `Backend.find_stragglers` puts it down
            to, given the peers of all requests that were not done.
    """
    pending = list(requests)
    patience = long_wait().timeout
    try:
        soon = Deadline(max(0.0, patience - deadline.elapsed()))
        if warn is not None and patience < deadline.timeout and not _are_done(pending, soon):
            warn([request for request in pending if not request.done()])
        for request in pending:
            _wait_for_one(request, pending, deadline)
    except BaseException:
        for request in pending:
            request.cancel()
        raise


def _are_done(requests: list[Request], deadline: Deadline) -> bool:
    """Wait for requests until the deadline: whether all of them have ended."""
    for request in requests:
        with contextlib.suppress(DistributedTimeoutError):  # of the wait; or it has ended with that
            request.wait(deadline.remaining())
        if not request.done():
            return False
    return True


def _peers_of(requests: Iterable[Request]) -> tuple[int, ...]:
    """The other ranks of requests that are not done, as far as they are known."""
    return tuple(sorted({request.peer for request in requests if not request.done()} - {ANY_SOURCE}))


def _wait_for_one(request: Request, pending: list[Request], deadline: Deadline) -> None:
    try:
        request.wait(deadline.remaining())
    except DistributedTimeoutError as error:
        if not request.done():
            _give_up(pending, deadline, error)
        request.wait(math.inf)  # it ended between the two, or its group has failed with a timeout


def _give_up(pending: list[Request], deadline: Deadline, error: DistributedTimeoutError) -> None:
    """Cancel what is not done and raise; return when everything has ended, or ends at once, after all."""
    waiting = [request for request in pending if not request.done()]
    if not waiting:
        return
    peers = _peers_of(waiting)
    finder = next((request for request in waiting if isinstance(request, StragglerFinder)), None)
    late = (
        finder.find_stragglers(peers, answer_seconds(deadline.timeout))
        if finder is not None
        else Stragglers(ranks=peers)
    )
    cancelled = [request.cancel() for request in pending]
    if any(cancelled):
        found = DistributedTimeoutError(error.message + late.detail, ranks=late.ranks)
        found.detail = late.detail
        raise found from None


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
            try:
                callback = self._callbacks.pop()
            except IndexError:
                return  # the other took it
            callback()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` once when done, at once if it is; it must not block or raise."""
        self._callbacks.append(callback)
        if self._done:  # end may have looked at the list before the append
            try:
                self._callbacks.remove(callback)
            except ValueError:
                return  # end took it
            callback()

    def find_stragglers(self, peers: tuple[int, ...], within: float) -> Stragglers:
        """Put a wait in vain down to the ranks that were waited for; see `Backend.find_stragglers`."""
        del within
        return Stragglers(ranks=peers)

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


_EARLY = 0.8
"""A call that raises a timeout before this part of its time has passed has not run out of it: its group has failed."""


class ThreadedRequest(BaseRequest):
    """A request that repeats a blocking call with a short timeout in a thread until it succeeds or is cancelled.

    Args:
        attempt: ``attempt(timeout)`` returns the peer, or raises DistributedTimeoutError with nothing done.
        peer: The other side, for error messages.
        failure: Why the group can't be used any more, or None; it may be a DistributedTimeoutError too.
        after: Requests that could take each other's messages: it begins once they have ended.
        size_bytes: Of the message. `cancel` waits for the attempt under way, which takes at most 0.5 s, and 0.1 s more
            for each MB.
    """

    __slots__ = ("_cancelled", "_failure", "_gave_up", "_longest")

    # The first attempt is short, so that cancel() waits little; later ones are longer, for messages that take long: one
    # that moves more slowly than at 10 MB/s has no attempt long enough.
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
        self._cancelled = self._gave_up = False
        self._failure = failure
        self._longest = self._LONGEST_SECONDS + size_bytes * self._SECONDS_PER_BYTE
        threading.Thread(target=self._run, args=(attempt, list(after)), name="ferrodist-request", daemon=True).start()

    def _run(self, attempt: Callable[[float], int], earlier: list[ThreadedRequest]) -> None:
        seconds = self._FIRST_SECONDS
        while not self._cancelled:
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


_MOST_AT_ONCE = 64

_INTERRUPTION_SECONDS = 0.2
"""How long a signal of the system may go unseen that came just before a thread fell asleep."""


class PersistentRecv(Protocol):
    """Receives that are asked for ahead."""

    def close(self) -> None:
        """Hear nothing more."""


class WaitEvent(Protocol):
    """What one thread waits for, and any other may give."""

    def set(self) -> None:
        """End the wait, or the next one."""

    def wait(self, timeout: float) -> bool:
        """Wait until it is set, for so many seconds; whether it was, and it no longer is."""


class Receiving(Protocol):
    """What a `PostedPersistentRecv` needs of a backend."""

    def irecv(self, buffer: Buffer, src: int, *, tag: int = 0) -> Request:
        """Start to receive a message."""


class LockWaitEvent:
    """A `WaitEvent` for backends whose messages are moved by threads of their own."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """See `WaitEvent`."""
        if self._lock.locked():
            with contextlib.suppress(RuntimeError):  # another thread has set it just now
                self._lock.release()

    def wait(self, timeout: float) -> bool:
        """See `WaitEvent`."""
        deadline = Deadline(timeout)
        while not self._lock.acquire(timeout=min(deadline.remaining(), _INTERRUPTION_SECONDS)):
            if deadline.expired:
                return False
        return True


class PostedPersistentRecv:
    """A `PersistentRecv` of any backend: one receive at a time; see `Backend.listen`."""

    def __init__(
        self,
        group: Receiving,
        where: tuple[int, int],
        size_bytes: int,
        heard: Callable[[list[bytes]], None],
        ended: Callable[[DistributedError], None],
    ) -> None:
        self._group = group
        self._src, self._tag = where
        self._heard = heard
        self._ended = ended
        self._buffer = bytearray(size_bytes)
        self._lock = threading.Lock()
        self._is_due = self._is_closed = False
        self._actor: int | None = None  # the thread that takes what has come
        self._messages: list[bytes] = []  # and was not heard
        self._request = self._post()
        self._request.add_done_callback(self._act)

    def close(self) -> None:
        """See `PersistentRecv`."""
        self._is_closed = True
        self._request.cancel()

    def _post(self) -> Request:
        return self._group.irecv(self._buffer, self._src, tag=self._tag)

    def _act(self) -> None:
        """A receive has ended: take what is there. Runs in whichever thread ended it, one at a time."""
        thread, is_mine, interruption = threading.get_ident(), False, None
        try:
            with self._lock:
                self._is_due = True
                if self._actor is not None:
                    return  # which looks again
                is_mine, self._actor = True, thread
            while self._is_wanted():
                try:
                    self._hear()
                except BaseException as error:  # noqa: BLE001, PERF203 - raised below, when nothing is left behind
                    self._is_due |= bool(self._messages) and interruption is None
                    interruption = interruption or error
        finally:
            if is_mine and self._actor == thread:
                self._actor = None
        if interruption is not None:
            raise interruption

    def _is_wanted(self) -> bool:
        with self._lock:
            if self._is_due and not self._is_closed:
                self._is_due = False
                return True
            self._actor = None
            return False

    def _hear(self) -> None:
        error = None
        if not self._messages:
            error = self._take(self._messages)
        try:
            if self._messages and not self._is_closed:
                self._heard(self._messages)
                self._messages.clear()
        finally:
            if error is None and not self._is_closed:
                self._request.add_done_callback(self._act)
        if error is not None and not self._is_closed:
            self._is_closed = True
            self._ended(error)

    def _take(self, messages: list[bytes]) -> DistributedError | None:
        try:
            while self._request.done() and len(messages) < _MOST_AT_ONCE:
                self._request.wait(math.inf)
                messages.append(bytes(self._buffer))
                self._request = self._post()
        except DistributedError as error:
            return error
        return None
