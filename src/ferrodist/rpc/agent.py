"""`RpcAgent`: one rank's part of all calls, to other ranks and from them.

What an agent consists of, put together: the calls of a rank, those it makes and those that come.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from ferrodist.arguments import check_int
from ferrodist.backends.base import Backend
from ferrodist.backends.lifecycle import ExitStage, at_exit, cancel_at_exit
from ferrodist.backends.non_member import NonMemberGroup, check_group
from ferrodist.collectives.pytree import is_encodable
from ferrodist.deadline import Deadline, check_timeout
from ferrodist.errors import DistributedError, GroupClosedError, InvalidRankError, RpcError, ranks_text
from ferrodist.resource_limits import naming_limits
from ferrodist.rpc.agent_context import Office
from ferrodist.rpc.client import Outgoing
from ferrodist.rpc.executor import Waits, Workers
from ferrodist.rpc.large_messages import Buffers
from ferrodist.rpc.messages import HELLO, OWN_NAMES, Call, Failure
from ferrodist.rpc.metrics import Counters
from ferrodist.rpc.peer import Neighbor, OwnCaller, Reply
from ferrodist.rpc.remote_objects import CREATE, ObjectCalls, RemoteObjects
from ferrodist.rpc.server import Functions, Served, serving
from ferrodist.rpc.shutdown import COME, LEAVE, LOOK, Draining
from ferrodist.rpc.transport import Connector, GroupRpcBackend, RpcBackend
from ferrodist.rpc.worker_names import Names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from ferrodist.errors import PeerLostError
    from ferrodist.rpc.future import Future
    from ferrodist.rpc.metrics import RpcStatistics
    from ferrodist.rpc.peer import Caller
    from ferrodist.rpc.refcount_tables import ReferenceCounts
    from ferrodist.rpc.rref import RRef


class Switchboard:
    """Where calls go out and come in. It is what the connector, remote objects and draining have of an agent.

    Args:
        agent: Whose this is.
        backend: How ranks reach each other.
        functions: What may be called.
        name: Of this rank, if it has one.
        num_workers: As for `RpcAgent`, and so are the others.
        most_outstanding: Calls to one rank without a result.
        message_limit: Bytes that a message may have.
        allow_pickle: Whether values of any other types may travel.
    """

    def __init__(
        self,
        agent: object,
        backend: RpcBackend,
        functions: Functions,
        *,
        name: str | None,
        num_workers: int,
        most_outstanding: int,
        message_limit: int,
        allow_pickle: bool,
    ) -> None:
        self.rank, self.world_size, self.timeout = backend.rank, backend.world_size, backend.timeout
        label = f"ferrodist-rpc-{self.rank}"
        self._functions = functions
        self._is_closed = False
        self.counters = Counters()
        self.workers = Workers(agent, functions, num_workers, f"{label}-worker", Waits(backend.signal))
        self.names = Names(self._tells_no_name)
        self.names.add(self.rank, name or "")
        self.draining = Draining(self)
        self.objects = RemoteObjects(self, allow_pickle=allow_pickle)
        self._object_calls = ObjectCalls(self.objects, self)
        self.outgoing = Outgoing(
            self.workers, self.counters, self._caller, self.objects.extensions, f"{label}-timeouts"
        )
        self._office = Office(
            workers=self.workers,
            waits=self.workers.waits,
            counters=self.counters,
            buffers=Buffers(),
            objects=self.objects,
            serve_internal=self._serve_internal,
            answered=self.outgoing.answered,
            name=name,
            timeout=self.timeout,
            most_outstanding=most_outstanding,
            message_limit=message_limit,
        )
        self.own = OwnCaller(self.rank, self._office)
        self.draining.add(self.own)
        self.connector = Connector(backend, self, f"{label}-ends")

    def close(self) -> None:
        """End all calls that are under way, here and for those who wait for this rank."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.ExitStack() as parts:  # each of them, whatever another one raises; the last one first
            parts.callback(self.objects.close)
            parts.callback(self.workers.close)
            parts.callback(self.own.close, 0)
            parts.callback(self.connector.close)
            parts.callback(self.outgoing.close)
            parts.callback(self.objects.refuse)
            parts.callback(self.draining.close)
            parts.callback(self.names.close)

    def _caller(self, peer: int, seconds: float) -> Caller:
        """A rank that is called; see `Outgoing`."""
        if self._is_closed:
            raise GroupClosedError("the agent was closed")
        if peer == self.rank:
            return self.own
        found = self.connector.neighbors.get(peer) or self.connector.neighbor(peer, Deadline(seconds))
        return cast("Caller", found)  # which `meet` has made

    def _tells_no_name(self) -> bool:
        """Whether no rank is going to tell its name, for all have that are there, and no other can come."""
        return all(
            self.names.has_told(rank) or self.connector.is_absent_for_good(rank) for rank in range(self.world_size)
        )

    def _serve_internal(self, peer: int, call: Call, answer: Callable[[Any], None]) -> None:
        """See `Office`."""
        if call.name == HELLO:
            if len(call.arguments) == 1 and isinstance(call.arguments[0], str):
                self.names.add(peer, call.arguments[0])
            answer(None)
        elif call.name in (COME, LOOK, LEAVE):
            answer(self.draining.serve(peer, call))
        else:
            self._object_calls.serve(peer, call, answer)

    # What remote objects need, and draining; see `Requester`, `Server` and `Drainer`.

    def num_calls(self) -> tuple[int, int]:
        """How many calls this rank has made, and how many of these have ended."""
        return self.outgoing.calls.num_made, self.outgoing.calls.num_ended

    def call_async(self, to: int, call: Call, seconds: float) -> Future:
        """Call a function."""
        return self.outgoing.call_async(to, call, seconds)

    def start(self, to: int, call: Call, seconds: float) -> Future:
        """Call a function of the agents' own, however many calls have no result."""
        return self.outgoing.start(to, call, seconds)

    def send_unanswered(self, to: int, name: str, make: Callable[[], tuple[Any, ...] | None]) -> None:
        """Call a function of the agents' own that has no answer; see `Outgoing.send_unanswered`."""
        self.outgoing.send_unanswered(to, name, make)

    def submit(self, call: Call, answer: Callable[[Any], None], function: Callable[..., Any] | None = None) -> None:
        """Have a worker call a function: that of the call's name, or another one."""
        prepared = _Prepared(call, answer, function, self.counters)
        self.draining.add(prepared)
        if isinstance(answer, Reply):
            answer.leave_to(prepared)
        self.workers.submit(prepared)

    def resting(self) -> AbstractContextManager[None]:
        """Within it a thread waits for what calls bring: another one serves in its place, if it is a worker."""
        return self.workers.resting()

    def classes(self) -> set[type]:
        """The classes that were registered."""
        return self._functions.classes()

    # What the connector needs; see `Owner`.

    def meet(self, peer: int, pair: Backend, ended: Callable[[Neighbor, DistributedError], None]) -> Neighbor:
        """Make a neighbor of a rank."""
        neighbor = Neighbor(peer, self._office, pair, ended)
        self.draining.add(neighbor)
        return neighbor

    def joined(self, peer: int, incarnation: int) -> None:
        """A rank is there, for the first time or again, as such a process of it."""
        self.objects.counting.joined(peer, incarnation)
        self.draining.joined(peer)
        self.names.joined(peer)

    def lost(self, peer: int, error: PeerLostError) -> None:
        """Nothing more will come for what was sent to a rank until now."""
        self.outgoing.lost(peer, error)
        self.objects.counting.lost(peer)
        self.draining.lost(peer)
        self.names.lost(peer)


class _Prepared(Served):
    """A call that has been read."""

    __slots__ = ("__weakref__", "_answer", "_call", "_counters", "_is_answered")

    def __init__(
        self,
        call: Call,
        answer: Callable[[Any], None],
        function: Callable[..., Any] | None,
        counters: Counters,
    ) -> None:
        super().__init__()
        self.function = function
        self._call: Call | None = call
        self._answer = answer
        self._counters = counters
        self._is_answered = False

    def num_served(self) -> int:
        """One, until what follows from it has begun."""
        return not self._is_answered

    def read(self) -> Call:
        call, self._call = self._call, None
        assert call is not None
        return call

    def answer(self, found: Any) -> None:
        self._counters.count("failed" if isinstance(found, Failure) else "served")
        self._answer(found)
        self._is_answered = True


_Function = TypeVar("_Function", bound="Callable[..., Any]")


DEFAULT_MESSAGE_LIMIT = 1 << 30
"""Bytes that the arguments of a call, or its result, may have."""

LEAST_MESSAGE_LIMIT = 8 << 10
"""What agents say to each other of their own has room in that."""

_MOST_OF_A_NAME = 255


class RpcAgent:
    """Calls functions of other ranks, and serves the calls of others.

    Every rank makes one with the same arguments; any of them may call as soon as its own is made. Threads may share it,
    and functions that serve calls may make calls themselves.

    Args:
        backend: How ranks reach each other; or a group, whose messages then do.
        functions: What others may call, by name, from the start; see `register`.
        name: By which others may call this rank, beside its number.
        num_workers: Threads that serve calls at a time. One that waits for a call of its own does not count.
        most_outstanding: Calls to one rank that may be without a result; who makes more waits. A rank that makes more
            than twice as many here, which no agent with the same number does, is refused.
        message_limit: Bytes that the arguments of a call, or its result, may have; 8 KiB at least.
        allow_pickle: Whether values of any other types may travel, pickled. Whoever calls can then run anything here.

    Raises:
        TypeError, ValueError: An argument is wrong. The backend is closed, unless another agent has it.
    """

    def __init__(
        self,
        backend: RpcBackend | Backend,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        *,
        name: str | None = None,
        num_workers: int = 8,
        most_outstanding: int = 1024,
        message_limit: int = DEFAULT_MESSAGE_LIMIT,
        allow_pickle: bool = False,
    ) -> None:
        if isinstance(backend, Backend | NonMemberGroup):
            backend = GroupRpcBackend(check_group(backend))
        if not isinstance(backend, RpcBackend):
            raise TypeError(f"an RpcAgent is made with an RpcBackend or a group, not {type(backend).__name__}")
        self._functions = Functions()
        try:
            check_int("num_workers", num_workers, min=1)
            check_int("most_outstanding", most_outstanding, min=1)
            check_int("message_limit", message_limit, min=LEAST_MESSAGE_LIMIT)
            _check_name(name)
            _check_bool("allow_pickle", allow_pickle)
            self._functions.register_all({} if functions is None else functions)
        except (TypeError, ValueError):
            backend.refuse()
            raise
        with _naming_limits(backend.rank):
            self._switchboard = Switchboard(
                self,
                backend,
                self._functions,
                name=name,
                num_workers=num_workers,
                most_outstanding=most_outstanding,
                message_limit=message_limit,
                allow_pickle=allow_pickle,
            )
        at_exit(
            ExitStage.RPC_AGENTS, self.close
        )  # a thread that is in torch while the interpreter ends takes the process down
        try:
            with _naming_limits(backend.rank):
                self._switchboard.connector.start()
        except BaseException:
            self.close()
            raise

    @property
    def rank(self) -> int:
        """This rank."""
        return self._switchboard.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._switchboard.world_size

    @property
    def timeout(self) -> float:
        """Seconds a call may take that names no timeout itself."""
        return self._switchboard.timeout

    @overload
    def register(self, name: str, function: _Function) -> _Function: ...

    @overload
    def register(self, name: str) -> Callable[[_Function], _Function]: ...

    def register(self, name: str, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Allow others to call a function; one that is ``async`` runs in an event loop of the agent's.

        Args:
            name: By which it is called.
            function: It; without one this is a decorator: ``@agent.register("name")``. A class makes an instance, of
                which others may call public methods by a reference (see `remote`).

        Returns:
            The function, as it is.

        Raises:
            TypeError: It is no function, or the name is no text.
            ValueError: There is another one of that name, it is empty, or agents have such names for themselves.
        """
        if function is None:
            if not isinstance(name, str):
                raise TypeError(f"@agent.register takes a name: @agent.register('name'), before {name!r}")
            return functools.partial(self.register, name)
        self._functions.register(name, function)
        return function

    def rpc_sync(
        self, to: int | str, name: str, /, *arguments: Any, timeout: float | None = None, **keywords: Any
    ) -> Any:
        """Call a function of a rank, and wait for its result.

        Args:
            to: The rank, or its name; this one's functions are called without the network.
            name: That the function was registered with there.
            arguments: Nested tuples, lists and dicts of tensors, numpy arrays, numbers, text, bytes and None.
            timeout: Seconds until this gives up; None takes the backend's. The function is not stopped by that, unless
                it is ``async``, but one whose turn has not come by then is not called.
            keywords: More arguments, by name; one called ``timeout`` is this call's own.

        Raises:
            RpcError: The function raised, or there is none of that name.
            DistributedTimeoutError: There is no result in time.
            PeerLostError: The rank died or left.
            TypeError, ValueError: An argument can't travel.
        """
        rank, seconds = self._find(to, timeout)
        return self._switchboard.outgoing.call(rank, Call(_named(name), arguments, keywords), seconds)

    def rpc_async(
        self, to: int | str, name: str, /, *arguments: Any, timeout: float | None = None, **keywords: Any
    ) -> Future:
        """Call a function of a rank, as `rpc_sync`; its result, or what that raises, is the future's.

        Tensors must not be changed until the future is done.
        """
        rank, seconds = self._find(to, timeout)
        return self._switchboard.outgoing.call_async(rank, Call(_named(name), arguments, keywords), seconds)

    def remote(
        self, to: int | str, name: str, /, *arguments: Any, timeout: float | None = None, **keywords: Any
    ) -> RRef:
        """Call a function of a rank, or make an instance of a class, and leave the result there; does not wait.

        Args:
            to: The rank, or its name; it may be this one.
            name: That the function, or class, was registered with there.
            arguments: As for `rpc_sync`.
            timeout: Seconds until what uses the reference is told that there is no result; None takes the backend's.
            keywords: More arguments, by name.

        Returns:
            A reference to the result. Where there is none, what uses the reference raises why.

        Raises:
            DistributedTimeoutError: As many calls as may be have had no result for that time.
            TypeError, ValueError: An argument can't travel.
        """
        rank, seconds = self._find(to, timeout)
        return self._switchboard.objects.create(rank, CREATE, (_named(name), arguments, keywords), seconds)

    def reference(self, value: Any) -> RRef:
        """A reference to something here, whose owner is this rank; the object is not copied."""
        return self._switchboard.objects.keep(value)

    def num_references(self) -> ReferenceCounts:
        """How many objects this rank keeps for others and for itself, and how many other ranks keep for it."""
        return self._switchboard.objects.counting.tables.look()

    def wait_for_rank(self, rank: int | str, timeout: float | None = None) -> None:
        """Return when a rank can be called: one that was lost, when it has been started again.

        Args:
            rank: The rank, or its name; where the rank of that name was lost, the next one that comes with the name.
            timeout: Seconds; None takes the backend's.

        Raises:
            DistributedTimeoutError: It is not there in time.
            NoConnectionError: It is not there, and can't come any more.
            InvalidRankError: There is no such rank, or none of that name in time, or once all are there.
        """
        deadline = Deadline(self._seconds(timeout))
        names = self._switchboard.names
        peer = names.wait_for(rank, deadline) if isinstance(rank, str) else self._rank_of(rank)
        if peer != self.rank:
            self._switchboard.connector.wait_for(peer, deadline)

    def statistics(self) -> RpcStatistics:
        """How the calls of this agent, and those of others here, have gone so far."""
        return self._switchboard.counters.look(self._switchboard.outgoing.calls.count)

    def broadcast_call(self, name: str, /, *arguments: Any, timeout: float | None = None, **keywords: Any) -> list[Any]:
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

    def drain(self, timeout: float | None = None) -> None:
        """Return when all ranks have called this and no call is under way anywhere; until then calls are served.

        Args:
            timeout: Seconds until this gives up; None takes the backend's.

        Raises:
            DistributedTimeoutError: It takes longer. Rank 0's says who keeps the others waiting.
            PeerLostError: Rank 0 is gone, which sees to this. Other ranks that are lost are not waited for.
        """
        self._switchboard.draining.wait(Deadline(self._seconds(timeout)))

    def close(self) -> None:
        """End all calls that are under way, here and for those who wait for this rank."""
        cancel_at_exit(ExitStage.RPC_AGENTS, self.close)
        self._switchboard.close()

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else check_timeout(timeout)

    def _find(self, to: int | str, timeout: float | None) -> tuple[int, float]:
        """The rank that is meant, and how many seconds are left when its name is known."""
        seconds = self._seconds(timeout)
        if not isinstance(to, str):
            return self._rank_of(to), seconds
        deadline = Deadline(seconds)
        return self._switchboard.names.find(to, deadline), deadline.remaining()

    def _rank_of(self, to: int) -> int:
        rank = to if type(to) is int else check_int("the rank to call, where it is no name,", to)
        if not 0 <= rank < self.world_size:
            raise InvalidRankError(f"there is no rank {rank} to call: they are 0 to {self.world_size - 1}")
        return rank


def _naming_limits(rank: int) -> AbstractContextManager[None]:
    return naming_limits(f"the agent of rank {rank} can't start", (rank,), kind=DistributedError)


def _check_bool(option: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{option} is True or False, not {value!r}")


def _check_name(name: str | None) -> None:
    if name is None:
        return
    if not isinstance(name, str):
        raise TypeError(f"the name of a rank is a text, not {name!r}")
    if not is_encodable(name):
        raise ValueError(f"the name {name!r} holds half of a surrogate pair: take another one")
    if not 0 < len(name.encode()) <= _MOST_OF_A_NAME:
        raise ValueError(f"the name of a rank has 1 to {_MOST_OF_A_NAME} bytes, not {len(name.encode())}")


def _named(name: str) -> str:
    """The name of a function that users may call."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a function is a text, not {name!r}")
    if name.startswith(OWN_NAMES):
        raise ValueError(f"names that begin with {OWN_NAMES!r} are the agents' own: {name!r} can't be called")
    return name


def current_agent() -> RpcAgent:
    """The agent that serves the call this function is called in, for calls of its own.

    Raises:
        RuntimeError: No agent calls this.
    """
    try:
        return serving.get()  # type: ignore[no-any-return]
    except LookupError:
        raise RuntimeError("current_agent() is for functions that an agent serves, and this is none") from None
