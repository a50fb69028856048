"""`RpcAgent`: one rank's part of all calls, to other ranks and from them."""

from __future__ import annotations

import functools
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ferrodist.backends.base import Backend
from ferrodist.collectives.prepare import check_integer
from ferrodist.deadline import Deadline, check_timeout
from ferrodist.errors import (
    DistributedError,
    DistributedTimeoutError,
    GroupClosedError,
    InvalidRankError,
    PeerLostError,
    ProtocolError,
    RpcError,
    ranks_text,
)
from ferrodist.rpc.backends import GroupRpcBackend, RpcBackend
from ferrodist.rpc.calls import Calls, Future, Waiting
from ferrodist.rpc.link import Link
from ferrodist.rpc.messages import Call, Failure, FailureKind, Result, pack, unpack
from ferrodist.rpc.serving import Functions, Served, Workers
from ferrodist.rpc.statistics import Counters

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.collectives.letters import Parcel
    from ferrodist.rpc.messages import Message
    from ferrodist.rpc.statistics import RpcStatistics

_Function = TypeVar("_Function", bound="Callable[..., Any]")

__all__ = ["DEFAULT_MESSAGE_LIMIT", "RpcAgent"]

DEFAULT_MESSAGE_LIMIT = 1 << 30
"""Bytes that the arguments of a call, or its result, may have."""


class RpcAgent:
    """Calls functions of other ranks, and serves the calls of others.

    Every rank makes one with the same arguments; any of them may call as soon as its own is made. Threads may share it,
    and functions that serve calls may make calls themselves.

    Args:
        backend: How ranks reach each other; or a group, whose messages then do.
        num_workers: Threads that serve calls.
        most_outstanding: Calls to one rank that may be without a result; who makes more waits.
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
        label = f"ferrodist-rpc-{backend.rank}"
        self._counters = Counters()
        self._calls = Calls(f"{label}-timeouts", self._counters)
        self._workers = Workers(self._functions, num_workers, f"{label}-worker")
        self._closed = False
        others = [peer for peer in range(backend.world_size) if peer != backend.rank]
        self._lost: dict[int, DistributedError] = {}
        self._room = {peer: threading.BoundedSemaphore(most_outstanding) for peer in range(backend.world_size)}
        self._links = {peer: Link(backend.connect(peer), peer, self, message_limit) for peer in others}
        for link in self._links.values():
            link.start()

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
            timeout: Seconds until this gives up; None takes the backend's. The function is not stopped by that, but one
                whose turn has not come by then is not called.
            keywords: More arguments, by name.

        Raises:
            RpcError: The function raised, or there is none of that name.
            DistributedTimeoutError: There is no result in time.
            PeerLostError: The rank died or left.
            TypeError, ValueError: An argument can't travel.
        """
        return self.rpc_async(to, name, *arguments, timeout=timeout, **keywords).result()

    def rpc_async(self, to: int, name: str, *arguments: Any, timeout: float | None = None, **keywords: Any) -> Future:
        """Call a function of a rank, as `rpc_sync`; its result, or what that raises, is the future's.

        Tensors must not be changed until the future is done.
        """
        to = self._rank_of(to)
        seconds = self._backend.timeout if timeout is None else check_timeout(timeout)
        started, deadline = time.monotonic(), Deadline(seconds)
        room, future = self._room[to], Future()
        if not room.acquire(timeout=deadline.remaining()):
            raise DistributedTimeoutError(
                f"rank {to} has as many calls without a result as may be, for {seconds:g} s", ranks=(to,)
            )
        number = self._calls.add(Waiting(future, to, name, started, seconds, room.release))
        call = Call(number, deadline.remaining(), name, arguments, keywords)
        try:
            if to == self.rank:
                self._serve(unpack(pack(call), to), self._answered)
            else:
                self._link(to).send(pack(call))
        except BaseException as error:
            if self._calls.take(number) is None:  # its future has an exception already
                return future
            if not isinstance(error, DistributedError):
                raise
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
        for link in self._links.values():
            link.close()
        self._calls.close(GroupClosedError("the agent was closed"))
        self._workers.close()

    def _rank_of(self, to: int) -> int:
        rank = check_integer(to, "to")
        if not 0 <= rank < self.world_size:
            raise InvalidRankError(f"there is no rank {rank} to call: they are 0 to {self.world_size - 1}")
        return rank

    def _link(self, peer: int) -> Link:
        if self._closed:
            raise GroupClosedError("the agent was closed")
        if peer in self._lost:
            raise self._lost[peer].fresh()
        return self._links[peer]

    # What links tell.

    def received(self, peer: int, parcel: Parcel) -> None:
        """See `Receiver`."""
        try:
            message = unpack(parcel, peer)
        except ProtocolError as error:
            self.garbled(peer, error)
            return
        if isinstance(message, Call):
            self._serve(message, lambda answer: self._send_answer(peer, answer))
        else:
            self._answered(message)

    def garbled(self, peer: int, error: DistributedError) -> None:
        """See `Receiver`."""
        self._send_answer(peer, Failure(-1, FailureKind.UNDECODABLE, "", str(error), ""))

    def lost(self, peer: int, error: DistributedError) -> None:
        """See `Receiver`."""
        if not isinstance(error, PeerLostError):
            error = PeerLostError(f"rank {peer} can't be reached any more: {error}", ranks=(peer,))
        self._lost[peer] = error
        self._calls.fail(peer, error)

    def _serve(self, call: Message, answer: Callable[[Result | Failure], None]) -> None:
        assert isinstance(call, Call)

        def count(found: Result | Failure) -> None:
            self._counters.count("served" if isinstance(found, Result) else "failed")
            answer(found)

        self._workers.submit(Served(call, Deadline(call.seconds), count))

    def _send_answer(self, peer: int, answer: Result | Failure) -> None:
        try:
            parcel = pack(answer)
        except TypeError as error:
            parcel = pack(Failure(answer.number, FailureKind.UNENCODABLE, "TypeError", str(error), ""))
        try:
            self._link(peer).send(parcel)
        except ValueError as error:  # it is too large
            failure = Failure(answer.number, FailureKind.UNENCODABLE, "ValueError", str(error), "")
            self._send_answer(peer, failure)
        except DistributedError:
            pass  # whoever waited is gone

    def _answered(self, message: Message) -> None:
        assert not isinstance(message, Call)
        waiting = self._calls.take(message.number)
        if waiting is None:
            self._counters.count("late")
            return
        self._counters.count_answer(time.monotonic() - waiting.started)
        if isinstance(message, Result):
            waiting.future.set_result(message.value)
        else:
            waiting.future.set_exception(_error_of(waiting, message))


def _error_of(waiting: Waiting, failure: Failure) -> Exception:
    if failure.kind is FailureKind.EXPIRED:
        return DistributedTimeoutError(f"rank {waiting.peer}: {failure.text}", ranks=(waiting.peer,))
    if failure.kind is FailureKind.RAISED:
        text = f"{waiting.name!r} failed on rank {waiting.peer}: {failure.text}"
    else:
        text = f"the call of {waiting.name!r} on rank {waiting.peer}: {failure.text}"
    return RpcError(text, ranks=(waiting.peer,), type_name=failure.type_name, traceback=failure.traceback)
