"""Calls that wait for their results: who waits for them, and who gives up when."""

from __future__ import annotations

import heapq
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from ferrodist.errors import DistributedError, DistributedTimeoutError, GroupClosedError
from ferrodist.rpc.messages import OWN_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.listening import Signal
    from ferrodist.deadline import Deadline
    from ferrodist.rpc.futures import Future
    from ferrodist.rpc.messages import Content, MessageKind
    from ferrodist.rpc.window import Window

__all__ = ["Calls", "Waiting", "late_error"]

_MOST_ENDED = 1000
"""Calls that have ended and whose timeouts are still known."""


class Callee(Protocol):
    """A rank that is called."""

    @property
    def window(self) -> Window:
        """Of calls to it."""

    def send(self, kind: MessageKind, number: int, content: Content) -> None:
        """Send it a message."""


class Passed(Protocol):
    """The references in a call, which may have to be told of before it goes; see `Passing`."""

    def send(self, transmit: Callable[[], None], failed: Callable[[BaseException], None], deadline: Deadline) -> Any:
        """Send the call, now or soon."""

    def forget(self) -> None:
        """Keep them no more."""


class Waiting:
    """A call whose result has not come.

    Args:
        peer: The rank that was called.
        name: Of the function.
        seconds: How long whoever made it waits.
        future: Where its result goes; or
        signal: what the thread waits for that made it. It finds the result in ``value``, or an error in ``error``.

    Attributes:
        caller: The rank, as who has the call's place in a window; none where the call has none, and is no user's.
        passing: The references in it.
    """

    __slots__ = (
        "caller",
        "error",
        "future",
        "has_ended",
        "is_given_up",
        "name",
        "passing",
        "peer",
        "seconds",
        "signal",
        "started",
        "value",
    )

    def __init__(
        self, peer: int, name: str, seconds: float, *, future: Future | None = None, signal: Signal | None = None
    ) -> None:
        self.peer = peer
        self.name = name
        self.seconds = seconds
        self.future = future
        self.signal = signal
        self.started = time.monotonic()
        self.value: Any = None
        self.error: BaseException | None = None
        self.has_ended = self.is_given_up = False
        self.caller: Callee | None = None
        self.passing: Passed | None = None

    @property
    def title(self) -> str:
        """What errors call the function."""
        return self.name.removeprefix(OWN_NAMES)

    @property
    def left(self) -> float:
        """How many of its seconds are left."""
        return max(0.0, self.started + self.seconds - time.monotonic())

    def end(self) -> None:
        """Give back what it takes up, when it was answered or will not be."""
        if self.caller is not None:
            self.caller.window.leave()
        if self.passing is not None:
            self.passing.forget()

    def succeed(self, value: Any) -> None:
        """Give whoever made it the result."""
        if self.future is not None:
            self.future.settle(value)
        elif self.signal is not None:
            self.value = value
            self.has_ended = True
            self.signal.set()

    def fail(self, error: BaseException) -> None:
        """Tell whoever made it of an error."""
        if self.future is not None:
            self.future.settle(None, _without_frames(error))
        elif self.signal is not None:
            self.error = error
            self.has_ended = True
            self.signal.set()


def _without_frames(error: BaseException) -> BaseException:
    """An error for a future, which lasts. Frames hold those of all callers, and so whatever these have.

    Where messages are moved by the threads that wait those are a user's, with references of whose end the future hears.
    """
    error.__context__ = None
    each: BaseException | None = error
    while each is not None:
        each = each.with_traceback(None).__cause__
    return error


class Calls:
    """All of one agent that have not been answered, by their numbers.

    One that its caller has given up stays until it is answered: until then it takes up a place at the other side.

    Args:
        name: Of the thread that ends what is late.
        gave_up: Called with a call, and its number, that nobody waits for any more.

    Attributes:
        num_made: Calls of users.
        num_ended: Those of them that have been answered, or will not be.
    """

    def __init__(self, name: str, gave_up: Callable[[int, Waiting], None]) -> None:
        self._gave_up = gave_up
        self._next_number = 0
        self.num_made = self.num_ended = 0
        self._waiting: dict[int, Waiting] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ends: list[tuple[float, int]] = []  # a heap of when, and of which call
        self._next_end = float("inf")  # which the thread sleeps until
        self._closed: DistributedError | None = None
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._thread.start()

    def add(self, waiting: Waiting) -> int:
        """Wait for a call's result; gives its number.

        Raises:
            GroupClosedError: The agent is closed.
        """
        with self._lock:
            if self._closed is not None:
                raise self._closed.fresh()
            self._next_number += 1
            number = self._next_number
            self.num_made += waiting.caller is not None
            self._waiting[number] = waiting
            if waiting.future is not None:  # who waits for a signal looks at the time
                self._add_end(waiting.started + waiting.seconds, number)
        return number

    def take(self, number: int, peer: int | None = None) -> Waiting | None:
        """A call whose result has come, for the caller to end, if nobody gave it up; None where there is none.

        Args:
            number: Of the call.
            peer: Only if it was made to this rank.
        """
        with self._lock:
            waiting = self._waiting.pop(number, None)
            if waiting is not None and peer is not None and waiting.peer != peer:
                self._waiting[number] = waiting
                return None
            self.num_ended += waiting is not None and waiting.caller is not None
            return waiting

    def give_up(self, number: int) -> Waiting | None:
        """A call that nobody waits for any more, for the caller to end; None where its result has come after all."""
        with self._lock:
            waiting = self._waiting.get(number)
            if waiting is None or waiting.is_given_up:
                return None
            waiting.is_given_up = True
        if waiting.passing is not None:
            waiting.passing.forget()
        self._gave_up(number, waiting)
        return waiting

    @property
    def is_closed(self) -> bool:
        """Whether all calls have ended for good."""
        return self._closed is not None

    @property
    def count(self) -> int:
        """How many calls of users have no result."""
        with self._lock:
            return sum(waiting.caller is not None and not waiting.is_given_up for waiting in self._waiting.values())

    def fail(self, peer: int | None, error: DistributedError) -> None:
        """End the calls of a rank, or of all."""
        with self._lock:
            waiting_now = list(self._waiting.items())
        for number, waiting in waiting_now:
            if peer is None or waiting.peer == peer:
                taken = self.take(number)
                if taken is not None:
                    taken.end()
                    if not taken.is_given_up:
                        taken.fail(error.fresh())

    def close(self) -> None:
        """End all calls, and the thread."""
        with self._changed:
            self._closed = GroupClosedError("the agent was closed")
            self._changed.notify()
        self.fail(None, self._closed)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _add_end(self, end: float, number: int) -> None:
        if len(self._ends) > 2 * len(self._waiting) + _MOST_ENDED:
            self._ends = [each for each in self._ends if each[1] in self._waiting]
            heapq.heapify(self._ends)
        heapq.heappush(self._ends, (end, number))
        if end < self._next_end:
            self._next_end = end
            self._changed.notify()

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._closed is not None:
                    return
                now = time.monotonic()
                late = []
                while self._ends and (self._ends[0][0] <= now or self._ends[0][1] not in self._waiting):
                    late.append(heapq.heappop(self._ends)[1])
                self._next_end = self._ends[0][0] if self._ends else float("inf")
                if not late:
                    self._changed.wait(min(self._next_end - now, threading.TIMEOUT_MAX))
            for number in late:
                self._end_late(number)

    def _end_late(self, number: int) -> None:
        # By itself, so that nothing of the call is kept until there is another one: it may hold references.
        waiting = self.give_up(number)
        if waiting is not None:
            waiting.fail(late_error(waiting))


def late_error(waiting: Waiting) -> DistributedTimeoutError:
    """What a call ends with whose result does not come."""
    return DistributedTimeoutError(
        f"rank {waiting.peer} did not answer the call of {waiting.title!r} within {waiting.seconds:g} s."
        " Is it busy, or does the function wait for something? Pass a longer timeout where it may",
        ranks=(waiting.peer,),
    )
