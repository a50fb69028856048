"""What an agent consists of, put together: the calls of a rank, those it makes and those that come."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, cast

from ferrodist.deadline import Deadline
from ferrodist.errors import GroupClosedError
from ferrodist.rpc.buffers import Buffers
from ferrodist.rpc.caller import OwnCaller, Reply
from ferrodist.rpc.connector import Connector
from ferrodist.rpc.draining import COME, LEAVE, LOOK, Draining
from ferrodist.rpc.messages import HELLO, Call, Failure
from ferrodist.rpc.names import Names
from ferrodist.rpc.neighbor import Neighbor
from ferrodist.rpc.object_calls import ObjectCalls
from ferrodist.rpc.office import Office
from ferrodist.rpc.outgoing import Outgoing
from ferrodist.rpc.remote_objects import RemoteObjects
from ferrodist.rpc.serving import Served
from ferrodist.rpc.statistics import Counters
from ferrodist.rpc.waits import Waits
from ferrodist.rpc.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from ferrodist.backends.base import Backend
    from ferrodist.errors import DistributedError, PeerLostError
    from ferrodist.rpc.backends import RpcBackend
    from ferrodist.rpc.caller import Caller
    from ferrodist.rpc.functions import Functions
    from ferrodist.rpc.futures import Future

__all__ = ["Switchboard"]


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
