"""The calls that a rank makes.

Calls that wait for their results: who waits for them, and who gives up when.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, DistributedTimeoutError, GroupClosedError, RpcError
from ferrodist.rpc.future import Future
from ferrodist.rpc.messages import NO_NUMBER, OWN_NAMES, Call, MessageKind, error_of, unpack_failure, unpack_result
from ferrodist.rpc.transport import lost_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.backends.request import WaitEvent
    from ferrodist.collectives.pytree import LeafCodec
    from ferrodist.errors import PeerLostError
    from ferrodist.rpc.executor import Workers
    from ferrodist.rpc.messages import Content
    from ferrodist.rpc.metrics import Counters
    from ferrodist.rpc.peer import Caller
    from ferrodist.rpc.window import Window

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
        self, peer: int, name: str, seconds: float, *, future: Future | None = None, signal: WaitEvent | None = None
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


_LOOK_SECONDS = 1.0
"""How long a thread sleeps that may not be told, as an interruption came between."""

_MOMENT_SECONDS = 0.01
_FOUND_SECONDS = 10.0
"""How long a result that has been found may take to be told."""


class Outgoing:
    """Makes calls, and takes what they come to.

    Args:
        workers: Those of the agent, who may make calls themselves.
        counters: Of calls.
        caller: Finds a rank, which may take so many seconds.
        extensions: For each rank, what may be in messages from it.
        name: Of a thread.
    """

    def __init__(
        self,
        workers: Workers,
        counters: Counters,
        caller: Callable[[int, float], Caller],
        extensions: Mapping[int, Sequence[LeafCodec]],
        name: str,
    ) -> None:
        self._workers = workers
        self._counters = counters
        self._caller = caller
        self._extensions = extensions
        self.calls = Calls(name, self._gave_up)

    def call(self, to: int, call: Call, seconds: float) -> Any:
        """Call a function, and wait for its result, for so long; see `RpcAgent.rpc_sync`."""
        signal = self._workers.waits.signal()
        waiting = Waiting(to, call.name, seconds, signal=signal)
        is_worker = self._workers.begin_wait()
        try:
            self._await(self._begin(waiting, call), waiting, signal)
        finally:
            if is_worker:
                self._workers.end_wait()
        if waiting.error is not None:
            try:
                raise waiting.error
            finally:
                del waiting  # its error holds this frame, and the caller's with all that is there
        return waiting.value

    def call_async(self, to: int, call: Call, seconds: float) -> Future:
        """Call a function; see `RpcAgent.rpc_async`."""
        future = Future(self._workers)
        waiting = Waiting(to, call.name, seconds, future=future)
        return self._promise(future, lambda: self._begin(waiting, call))

    def start(self, to: int, call: Call, seconds: float) -> Future:
        """Call a function of the agents' own, however many calls have no result."""
        future = Future(self._workers)
        waiting = Waiting(to, call.name, seconds, future=future)

        def begin() -> None:
            caller = self._caller(to, seconds)
            content, waiting.passing = caller.write_call(call)
            self._send(waiting, caller, MessageKind.INTERNAL_CALL, content)

        return self._promise(future, begin)

    def send_unanswered(self, to: int, name: str, make: Callable[[], tuple[Any, ...] | None]) -> None:
        """Call a function of the agents' own that has no answer.

        Args:
            to: The rank.
            name: Of the function.
            make: Makes the arguments, or None if there is nothing to call it for. It is called when the connection is
                known, so that it may make what belongs to that.
        """
        caller = self._caller(to, 0.0)
        arguments = make()
        if arguments is not None:
            content, _ = caller.write_call(Call(name, arguments, {}))
            caller.send(MessageKind.NOTICE, NO_NUMBER, content)

    def answered(self, peer: int, number: int, kind: MessageKind, content: Content) -> None:
        """Take what a call has come to; see `Office`."""
        waiting = self.calls.take(number, peer)
        if waiting is None:  # it has ended with its rank, or with this agent
            if kind is MessageKind.RESULT:
                with contextlib.suppress(Exception):
                    unpack_result(content, peer, self._extensions[peer])  # as below
            return
        waiting.end()
        if waiting.is_given_up:
            if waiting.caller is not None:
                self._counters.count("late")
            with contextlib.suppress(Exception):
                self._open(waiting, kind, content)  # references in it have been counted for this rank
            return
        if waiting.caller is not None:
            self._counters.count_answer(time.monotonic() - waiting.started)
        # At once, in the order in which messages come: what comes next may give back a reference in this.
        try:
            value = self._open(waiting, kind, content)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            waiting.fail(error)
        except BaseException:  # the handler of an interruption raised it in this thread, which need not be the caller's
            waiting.fail(RpcError(f"the result of {waiting.title!r} was lost by an interruption", ranks=(peer,)))
            raise
        else:
            waiting.succeed(value)

    def lost(self, peer: int, error: PeerLostError) -> None:
        """Nothing more will come for what was sent to a rank until now."""
        self.calls.fail(peer, error)

    def close(self) -> None:
        """End all calls."""
        self.calls.close()

    def _promise(self, future: Future, begin: Callable[[], object]) -> Future:
        try:
            begin()
        except DistributedError as error:
            future.settle(None, _without_callers(error))
        return future

    def _begin(self, waiting: Waiting, call: Call) -> int:
        """Make a call; what is raised is not told to who waits for it."""
        caller = self._caller(waiting.peer, waiting.seconds)
        content, waiting.passing = caller.write_call(call)
        if not caller.window.enter(0.0) and not self._await_place(caller, waiting.left):
            raise DistributedTimeoutError(
                f"rank {waiting.peer} has as many calls without a result as may be, for {waiting.seconds:g} s",
                ranks=(waiting.peer,),
            )
        waiting.caller = caller
        kind = MessageKind.INTERNAL_CALL if call.name.startswith(OWN_NAMES) else MessageKind.CALL
        return self._send(waiting, caller, kind, content)

    def _await_place(self, caller: Caller, seconds: float) -> bool:
        with self._workers.resting():
            return caller.window.enter(seconds)

    def _send(self, waiting: Waiting, caller: Caller, kind: MessageKind, content: Content) -> int:
        try:
            number = self.calls.add(waiting)
        except BaseException:
            waiting.end()
            raise
        passing = waiting.passing

        def failed(error: BaseException) -> None:
            if self.calls.take(number) is not None:
                waiting.end()
                if not waiting.is_given_up:
                    waiting.fail(error)

        try:
            if passing is None:
                caller.send(kind, number, content)
            else:
                send = functools.partial(caller.send, kind, number, content)
                sent = passing.send(send, failed, Deadline(waiting.left))
                if waiting.future is not None:
                    waiting.future._sent = sent  # noqa: SLF001 - users have no use for it
        except BaseException as error:
            if self.calls.take(number) is None:  # whoever waits has been told already
                return number
            waiting.end()
            is_wrong_argument = isinstance(error, (TypeError, ValueError))
            if isinstance(error, DistributedError) and not is_wrong_argument and not self.calls.is_closed:
                raise lost_error(waiting.peer, error) from error
            raise
        return number

    def _await(self, number: int, waiting: Waiting, signal: WaitEvent) -> None:
        """Wait for a result. The signal may be set for what this thread has waited for before, too."""
        try:
            while not waiting.has_ended and (left := waiting.left) > 0:
                self._workers.waits.wait(signal, min(left, _LOOK_SECONDS))
        except BaseException:  # the handler of an interruption raised it
            self.calls.give_up(number)
            raise
        patience = Deadline(_FOUND_SECONDS)
        while not waiting.has_ended:
            if self.calls.give_up(number) is not None or patience.expired:
                raise late_error(waiting)
            signal.wait(_MOMENT_SECONDS)  # another thread has taken it, and is about to end it

    def _gave_up(self, number: int, waiting: Waiting) -> None:
        if waiting.caller is not None:
            self._counters.count("timed_out")
            with contextlib.suppress(DistributedError):  # or there is nobody who serves it
                waiting.caller.send(MessageKind.WITHDRAWAL, number, b"")

    def _open(self, waiting: Waiting, kind: MessageKind, content: Content) -> Any:
        if kind is MessageKind.RESULT:
            return unpack_result(content, waiting.peer, self._extensions[waiting.peer])
        raise error_of(waiting.name, waiting.peer, unpack_failure(content, waiting.peer))


def _without_callers(error: DistributedError) -> DistributedError:
    """An error for a future. The frames it was raised in hold what their callers have, references for one."""
    copy = error.fresh()
    copy.__cause__ = None  # has frames too, and its text is in the error's
    return copy
