"""The calls that a rank makes."""

from __future__ import annotations

import contextlib
import functools
import time
from typing import TYPE_CHECKING, Any

from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, DistributedTimeoutError, RpcError
from ferrodist.rpc.calls import Calls, Waiting, late_error
from ferrodist.rpc.connector import lost_error
from ferrodist.rpc.futures import Future
from ferrodist.rpc.messages import (
    NO_NUMBER,
    OWN_NAMES,
    Call,
    MessageKind,
    error_of,
    unpack_failure,
    unpack_result,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.backends.listening import Signal
    from ferrodist.collectives.nested_values import Extension
    from ferrodist.errors import PeerLostError
    from ferrodist.rpc.caller import Caller
    from ferrodist.rpc.messages import Content
    from ferrodist.rpc.statistics import Counters
    from ferrodist.rpc.workers import Workers

__all__ = ["Outgoing"]

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
        extensions: Mapping[int, Sequence[Extension]],
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

    def _await(self, number: int, waiting: Waiting, signal: Signal) -> None:
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
