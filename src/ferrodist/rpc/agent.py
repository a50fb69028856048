"""`RpcAgent`: one rank's part of all calls, to other ranks and from them."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ferrodist.backends.base import Backend
from ferrodist.collectives.prepare import check_integer
from ferrodist.deadline import check_timeout
from ferrodist.errors import (
    DistributedError,
    DistributedTimeoutError,
    GroupClosedError,
    InvalidRankError,
    PeerLostError,
    RpcError,
    ranks_text,
)
from ferrodist.rpc.backends import GroupRpcBackend, RpcBackend
from ferrodist.rpc.buffers import Buffers
from ferrodist.rpc.callers import Neighbor, Office, OwnCaller
from ferrodist.rpc.calls import Calls, Future, Waiting, Waits, late_error
from ferrodist.rpc.messages import ARRAYS, Call, FailureKind, MessageKind, unpack_failure, unpack_result
from ferrodist.rpc.serving import Functions, Workers
from ferrodist.rpc.statistics import Counters

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.listening import Signal
    from ferrodist.rpc.messages import Content
    from ferrodist.rpc.statistics import RpcStatistics

_Function = TypeVar("_Function", bound="Callable[..., Any]")

__all__ = ["DEFAULT_MESSAGE_LIMIT", "RpcAgent"]

DEFAULT_MESSAGE_LIMIT = 1 << 30
"""Bytes that the arguments of a call, or its result, may have."""

_AGES = 1e6  # seconds


class RpcAgent:
    """Calls functions of other ranks, and serves the calls of others.

    Every rank makes one with the same arguments; any of them may call as soon as its own is made. Threads may share it,
    and functions that serve calls may make calls themselves.

    Args:
        backend: How ranks reach each other; or a group, whose messages then do.
        num_workers: Threads that serve calls at a time. One that waits for a call of its own does not count.
        most_outstanding: Calls to one rank that may be without a result; who makes more waits. As many of each other
            rank wait here for their turn, at most.
        message_limit: Bytes that the arguments of a call, or its result, may have.

    Raises:
        TypeError, ValueError: An argument is wrong.
    """

    def __init__(
        self,
        backend: RpcBackend | Backend,
        *,
        num_workers: int = 8,
        most_outstanding: int = 1024,
        message_limit: int = DEFAULT_MESSAGE_LIMIT,
    ) -> None:
        numbers = {"num_workers": num_workers, "most_outstanding": most_outstanding, "message_limit": message_limit}
        for name, number in numbers.items():
            if check_integer(number, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {number}")
        if isinstance(backend, Backend):
            backend = GroupRpcBackend(backend)
        if not isinstance(backend, RpcBackend):
            raise TypeError(f"an RpcAgent is made with an RpcBackend or a group, not {type(backend).__name__}")
        self._backend = backend
        self._functions = Functions()
        self._waits = waits = Waits(backend.signal)
        self._counters = Counters()
        label = f"ferrodist-rpc-{backend.rank}"
        self._calls = Calls(f"{label}-timeouts", self._gave_up)
        self._workers = Workers(self._functions, num_workers, f"{label}-worker", waits)
        office = Office(
            self._workers,
            waits,
            self._counters,
            Buffers(),
            self._answered,
            self._lose,
            most_outstanding,
            message_limit,
        )
        self._closed = False
        self._lost: dict[int, DistributedError] = {}
        self._callers: dict[int, OwnCaller | Neighbor] = {backend.rank: OwnCaller(backend.rank, office)}
        for peer in range(backend.world_size):
            if peer != backend.rank:
                self._callers[peer] = Neighbor(peer, office, backend.connect(peer))

    @property
    def rank(self) -> int:
        """This rank."""
        return self._backend.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._backend.world_size

    @overload
    def register(self, name: str, function: _Function) -> _Function: ...

    @overload
    def register(self, name: str) -> Callable[[_Function], _Function]: ...

    def register(self, name: str, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Allow others to call a function; one that is ``async`` runs in an event loop of the agent's.

        Args:
            name: By which it is called.
            function: It; without one this is a decorator: ``@agent.register("name")``.

        Returns:
            The function, as it is.

        Raises:
            TypeError: It is no function, or the name is no text.
            ValueError: There is another one of that name.
        """
        if function is None:
            return functools.partial(self.register, name)
        self._functions.register(name, function)
        return function

    def rpc_sync(self, to: int, name: str, *arguments: Any, timeout: float | None = None, **keywords: Any) -> Any:
        """Call a function of a rank, and wait for its result.

        Args:
            to: The rank; this one's functions are called without the network.
            name: That the function was registered with there.
            arguments: Nested tuples, lists and dicts of tensors, numpy arrays, numbers, text, bytes and None.
            timeout: Seconds until this gives up; None takes the backend's. The function is not stopped by that, unless
                it is ``async``, but one whose turn has not come by then is not called.
            keywords: More arguments, by name.

        Raises:
            RpcError: The function raised, or there is none of that name.
            DistributedTimeoutError: There is no result in time.
            PeerLostError: The rank died or left.
            TypeError, ValueError: An argument can't travel.
        """
        seconds = self._backend.timeout if timeout is None else check_timeout(timeout)
        signal = self._waits.signal()
        waiting = Waiting(self._rank_of(to), name, seconds, signal=signal)
        is_worker = self._workers.begin_wait()
        try:
            self._await(self._begin(waiting, Call(name, arguments, keywords)), waiting, signal)
        finally:
            if is_worker:
                self._workers.end_wait()
        if isinstance(waiting.found, BaseException):
            raise waiting.found
        return self._open(waiting, *waiting.found)

    def rpc_async(self, to: int, name: str, *arguments: Any, timeout: float | None = None, **keywords: Any) -> Future:
        """Call a function of a rank, as `rpc_sync`; its result, or what that raises, is the future's.

        Tensors must not be changed until the future is done.
        """
        seconds = self._backend.timeout if timeout is None else check_timeout(timeout)
        future = Future()
        waiting = Waiting(self._rank_of(to), name, seconds, future=future)
        try:
            self._begin(waiting, Call(name, arguments, keywords))
        except DistributedError as error:
            if not future.done():
                future.set_exception(error)
        return future

    def statistics(self) -> RpcStatistics:
        """How the calls of this agent, and those of others here, have gone so far."""
        return self._counters.look(self._calls.count)

    def broadcast_call(self, name: str, *arguments: Any, timeout: float | None = None, **keywords: Any) -> list[Any]:
        """Call a function of all ranks, this one too, and wait for all results.

        Args:
            name: As for `rpc_sync`, and so are the others.
            arguments: The same for all.
            timeout: For each call.
            keywords: The same for all.

        Returns:
            The results, by ranks.

        Raises:
            RpcError: Some calls failed; it says for each why.
        """
        futures = [self.rpc_async(to, name, *arguments, timeout=timeout, **keywords) for to in range(self.world_size)]
        failed = {to: error for to, future in enumerate(futures) if (error := future.exception()) is not None}
        if failed:
            texts = "; ".join(str(error) for error in failed.values())
            raise RpcError(
                f"{name!r} failed on {ranks_text(failed)} of {self.world_size}: {texts}", ranks=tuple(failed)
            ) from next(iter(failed.values()))
        return [future.result() for future in futures]

    def close(self) -> None:
        """End all calls that are under way, here and for those who wait for this rank."""
        if self._closed:
            return
        self._closed = True
        for caller in self._callers.values():
            caller.close()
        self._calls.close()
        self._workers.close()

    # Calls of this rank.

    def _rank_of(self, to: int) -> int:
        rank = to if type(to) is int else check_integer(to, "to")
        if not 0 <= rank < self.world_size:
            raise InvalidRankError(f"there is no rank {rank} to call: they are 0 to {self.world_size - 1}")
        return rank

    def _begin(self, waiting: Waiting, call: Call) -> int:
        """Make a call; what is raised is not told to who waits for it."""
        peer = waiting.peer
        caller = self._caller(peer)
        content = caller.write_call(call)
        if not caller.window.enter(waiting.seconds):
            raise DistributedTimeoutError(
                f"rank {peer} has as many calls without a result as may be, for {waiting.seconds:g} s", ranks=(peer,)
            )
        try:
            number = self._calls.add(waiting)
            try:
                caller.send_call(number, content)
            except BaseException:
                self._calls.take(number)
                raise
        except BaseException:
            caller.window.leave()
            raise
        return number

    def _await(self, number: int, waiting: Waiting, signal: Signal) -> None:
        """Wait for a result. One that is found while this gives up sets the signal, which is waited for then."""
        try:
            has_come = signal.wait(max(0.0, waiting.started + waiting.seconds - time.monotonic()))
        except BaseException:  # the handler of an interruption raised it
            if self._calls.give_up(number) is None:
                signal.wait(_AGES)
            raise
        if not has_come:
            if self._calls.give_up(number) is not None:
                raise late_error(waiting)
            signal.wait(_AGES)

    def _caller(self, peer: int) -> OwnCaller | Neighbor:
        if self._closed:
            raise GroupClosedError("the agent was closed")
        lost = self._lost.get(peer)
        if lost is not None:
            raise lost.fresh()
        return self._callers[peer]

    def _gave_up(self, number: int, waiting: Waiting) -> None:
        self._counters.count("timed_out")
        self._callers[waiting.peer].send_withdrawal(number)

    def _answered(self, peer: int, number: int, kind: MessageKind, content: Content) -> None:
        """See `Office`."""
        waiting = self._calls.take(number, peer)
        if waiting is None:
            return
        self._callers[peer].window.leave()
        if waiting.is_given_up:
            self._counters.count("late")
            return
        self._counters.count_answer(time.monotonic() - waiting.started)
        if waiting.signal is not None:
            waiting.found = kind, content
            waiting.signal.set()
            return
        assert waiting.future is not None
        try:
            value = self._open(waiting, kind, content)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            waiting.future.set_exception(error)
        else:
            waiting.future.set_result(value)

    def _open(self, waiting: Waiting, kind: MessageKind, content: Any) -> Any:
        if kind is MessageKind.RESULT:
            return unpack_result(content, waiting.peer, (ARRAYS,))
        failure = unpack_failure(content, waiting.peer)
        if failure.kind is FailureKind.EXPIRED:
            raise DistributedTimeoutError(f"rank {waiting.peer}: {failure.text}", ranks=(waiting.peer,))
        how = "{} failed on rank {}" if failure.kind is FailureKind.RAISED else "the call of {} on rank {}"
        raise RpcError(
            f"{how.format(repr(waiting.name), waiting.peer)}: {failure.text}",
            ranks=(waiting.peer,),
            type_name=failure.type_name,
            traceback=failure.traceback,
        )

    def _lose(self, peer: int, error: DistributedError) -> None:
        """See `Office`."""
        if not isinstance(error, PeerLostError):
            error = PeerLostError(f"rank {peer} can't be reached any more: {error}", ranks=(peer,))
        self._lost[peer] = error
        self._calls.fail(peer, error)
