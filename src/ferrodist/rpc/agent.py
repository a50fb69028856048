"""`RpcAgent`: a rank's calls to other ranks, and theirs to it; `RpcContext`: an agent for a with-block.

An agent owns a client (calls made), a server (calls served), the peers, the remote objects, and the graceful shutdown.
A call passes `RpcClient.call`, `RemotePeer.send` and the group of the two ranks. There `MessageDispatcher.on_message`
gives it to the `RpcServer`, which has a thread of the `Executor` call the function and send the result. Back here
`MessageDispatcher.on_message` gives that to `RpcClient.on_response`, which wakes the caller.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ferrodist.arguments import check_bool, check_int
from ferrodist.backends.base import Backend
from ferrodist.backends.lifecycle import ExitStage, at_exit, cancel_at_exit
from ferrodist.backends.non_member import NonMemberGroup, check_group
from ferrodist.collectives.pytree import is_encodable
from ferrodist.deadline import Deadline, check_timeout
from ferrodist.errors import DistributedError, InvalidRankError, RpcError, ranks_text
from ferrodist.resource_limits import naming_limits
from ferrodist.rpc.client import RpcClient
from ferrodist.rpc.executor import Executor, WaitEvents
from ferrodist.rpc.large_messages import TensorPool
from ferrodist.rpc.messages import OWN_NAMES, Call
from ferrodist.rpc.peer import PeerOptions
from ferrodist.rpc.peer_manager import PeerManager
from ferrodist.rpc.rref_manager import CREATE, RRefManager
from ferrodist.rpc.server import FunctionRegistry, MessageDispatcher, RpcServer, serving_agent
from ferrodist.rpc.shutdown import GracefulShutdown
from ferrodist.rpc.transport import GroupRpcBackend, RpcBackend
from ferrodist.rpc.worker_names import WorkerNames

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from types import TracebackType

    from ferrodist.rpc.future import Future
    from ferrodist.rpc.refcount_tables import ReferenceCounts
    from ferrodist.rpc.rref import RRef
    from ferrodist.rpc.statistics import RpcStatistics

_Function = TypeVar("_Function", bound="Callable[..., Any]")


DEFAULT_MESSAGE_LIMIT = 1 << 30
"""Default limit in bytes of a call's arguments, or its result."""

_MIN_MESSAGE_LIMIT = 8 << 10  # internal calls fit into that

_MAX_NAME_BYTES = 255


class RpcAgent:
    """Calls functions of other ranks, and serves the calls of others.

    Every rank makes one with the same arguments; any of them may call as soon as its own is made. Threads may share it,
    and functions that serve calls may make calls themselves.

    Args:
        backend: The transport between ranks; or a group, whose messages carry the calls.
        functions: The functions that other ranks may call, by name; see `register`.
        name: This rank's name, by which others may call it, beside its number.
        num_workers: Threads that serve calls at a time. A thread that waits for a call of its own does not count.
        most_outstanding: Calls to one rank that may be without a result; further calls wait. A rank that makes more
            than twice as many here, which no agent with the same number does, is refused.
        message_limit: Limit in bytes of a call's arguments, or its result; 8 KiB at least.
        allow_pickle: Whether values of all other types may be sent, pickled. A caller can then run anything here.

    Attributes:
        rank: This rank.
        world_size: The number of ranks.
        timeout: The default timeout of calls in seconds.

    Raises:
        TypeError, ValueError: An argument is wrong. The backend is closed, unless another agent has it.
        DistributedError: No more threads or files may be opened; the backend is closed as above.
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
        try:
            _check_options(name, num_workers, most_outstanding, message_limit, allow_pickle)
            self._registry = FunctionRegistry({} if functions is None else functions)
        except (TypeError, ValueError):
            backend.refuse()
            raise
        self.rank, self.world_size, self.timeout = backend.rank, backend.world_size, backend.timeout
        self._is_closed = False
        with _naming_limits(backend.rank), contextlib.ExitStack() as undo:  # each of these starts a thread
            undo.callback(backend.refuse)
            self._executor = Executor(
                num_workers,
                f"ferrodist-rpc-{self.rank}-worker",
                WaitEvents(backend.make_wait_event),
                functools.partial(serving_agent.set, self),
            )
            undo.callback(self._executor.close)
            self._rrefs = RRefManager(
                self.rank, self.world_size, self.timeout, self._executor, allow_pickle=allow_pickle
            )
            undo.callback(self._rrefs.close)
            self._peers = PeerManager(backend, name or "")
            undo.callback(self._peers.leave)
            self._client = RpcClient(self._peers, self._executor, self._rrefs)
            undo.callback(self._client.pending_calls.close)
            self._server = RpcServer(
                self._registry,
                self._executor,
                self._rrefs,
                self._client.metrics,
                max_outstanding=most_outstanding,
                timeout=self.timeout,
            )
            self._dispatcher = MessageDispatcher(self._server, self._client)
            self._rrefs.bind(self._client, self._server)  # a cycle: the client and the server use it, too
            self._names = WorkerNames(name or "", self._peers, self._server)
            self._shutdown = GracefulShutdown(self.rank, self.world_size, self._client, self._server)
            undo.pop_all()
        self._start(most_outstanding, message_limit)

    def _start(self, max_outstanding: int, message_limit: int) -> None:
        # A thread that is in torch while the interpreter ends would take the process down.
        at_exit(ExitStage.RPC_AGENTS, self.close)
        options = PeerOptions(
            executor=self._executor,
            tensor_pool=TensorPool(),
            tags=self._rrefs.tags,
            max_outstanding=max_outstanding,
            message_limit=message_limit,
        )
        try:
            with _naming_limits(self.rank):
                listeners = (self._client, self._rrefs.refcounts, self._shutdown, self._names)
                self._peers.start(options, self._dispatcher, listeners)
        except BaseException:
            self.close()
            raise

    @overload
    def register(self, name: str, function: _Function) -> _Function: ...

    @overload
    def register(self, name: str) -> Callable[[_Function], _Function]: ...

    def register(self, name: str, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Allow others to call a function; one that is ``async`` runs in an event loop of the agent's.

        Args:
            name: The name by which others call it.
            function: The function; without one this is a decorator: ``@agent.register("name")``. A class makes an
                instance, whose public methods others may call by a reference (see `remote`).

        Returns:
            The function itself.

        Raises:
            TypeError: The function can't be called, or the name is not a text.
            ValueError: The name is taken, empty, or reserved for the agents.
        """
        if function is None:
            if not isinstance(name, str):
                raise TypeError(f"@agent.register takes a name: @agent.register('name'), before {name!r}")
            return functools.partial(self.register, name)
        self._registry.register(name, function)
        return function

    def rpc_sync(
        self, to: int | str, name: str, /, *arguments: Any, timeout: float | None = None, **keywords: Any
    ) -> Any:
        """Call a function of a rank, and wait for its result.

        Args:
            to: The rank, or its name; this one's functions are called without the network.
            name: The name under which the function is registered there.
            arguments: Nested tuples, lists and dicts of tensors, numpy arrays, numbers, text, bytes and None.
            timeout: Seconds to wait; None takes the backend's timeout. A function that runs is not stopped by that,
                unless it is ``async``; one that has not begun by then is not called.
            keywords: More arguments, by name; ``timeout`` is this method's own.

        Raises:
            RpcError: The function raised, or its name is not registered.
            DistributedTimeoutError: There is no result in time.
            PeerLostError: The rank died or left.
            TypeError, ValueError: An argument can't be sent.
        """
        rank, seconds = self._find(to, timeout)
        return self._client.call(rank, Call(_check_function_name(name), arguments, keywords), seconds)

    def rpc_async(
        self, to: int | str, name: str, /, *arguments: Any, timeout: float | None = None, **keywords: Any
    ) -> Future:
        """Call a function of a rank, as `rpc_sync`; the future has the result, or the error.

        Tensors must not be changed until the future is done.
        """
        rank, seconds = self._find(to, timeout)
        return self._client.call_async(rank, Call(_check_function_name(name), arguments, keywords), seconds)

    def remote(
        self, to: int | str, name: str, /, *arguments: Any, timeout: float | None = None, **keywords: Any
    ) -> RRef:
        """Call a function of a rank, or make an instance of a class, and leave the result there; does not wait.

        Args:
            to: The rank, or its name; it may be this one.
            name: The name under which the function, or the class, is registered there.
            arguments: The arguments; see `rpc_sync`.
            timeout: Seconds within which the call must be sent, where the rank has not come yet, or has as many calls
                as it may; the function may take longer. None takes the backend's timeout.
            keywords: More arguments, by name.

        Returns:
            A reference to the result. If the call can't be sent, or fails, uses of the reference raise its error.

        Raises:
            InvalidRankError: The rank does not exist, or no rank has the name.
            TypeError, ValueError: An argument can't be sent.
        """
        rank, seconds = self._find(to, timeout)
        return self._rrefs.create(rank, CREATE, (_check_function_name(name), arguments, keywords), seconds)

    def reference(self, value: Any) -> RRef:
        """A reference to an object of this rank, which is its owner; the object is not copied."""
        return self._rrefs.own(value)

    def num_references(self) -> ReferenceCounts:
        """The number of objects that this rank owns, for others and for itself, and of those it has references to."""
        return self._rrefs.refcounts.table.snapshot()

    def wait_for_rank(self, rank: int | str, timeout: float | None = None) -> None:
        """Return when a rank can be called: one that was lost, when it has been started again.

        Args:
            rank: The rank, or its name; where the rank of that name was lost, the next one that joins with the name.
            timeout: Seconds to wait; None takes the backend's timeout.

        Raises:
            DistributedTimeoutError: The rank is not there in time.
            NoConnectionError: The rank is not there, and can't join any more.
            InvalidRankError: The rank does not exist; or no rank has the name, in time or once all are there.
        """
        deadline = Deadline(self._seconds(timeout))
        with self._executor.waiting(also_in_event_loop=True):
            peer = self._names.find(rank, deadline, among_lost=False) if isinstance(rank, str) else self._rank_of(rank)
            if peer != self.rank:
                self._peers.wait_for(peer, deadline)

    def statistics(self) -> RpcStatistics:
        """Counters and latencies of the calls made and served so far."""
        return self._client.metrics.snapshot(self._client.pending_calls.num_in_flight)

    def broadcast_call(self, name: str, /, *arguments: Any, timeout: float | None = None, **keywords: Any) -> list[Any]:
        """Call a function of all ranks, this one too, and wait for all results.

        Args:
            name: The function's name; see `rpc_sync`.
            arguments: The arguments, the same for all ranks.
            timeout: Seconds to wait for each call; None takes the backend's timeout.
            keywords: More arguments, by name.

        Returns:
            The results, by rank.

        Raises:
            RpcError: Some calls failed; the error says for each why.
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
            timeout: Seconds to wait; None takes the backend's timeout.

        Raises:
            DistributedTimeoutError: Draining takes longer. Rank 0's error names the ranks that keep the others waiting.
            PeerLostError: Rank 0, which coordinates this, is gone. Other ranks that are lost are not waited for.
        """
        self._shutdown.drain(Deadline(self._seconds(timeout)))

    def close(self) -> None:
        """End all calls that are under way, here and for those who wait for this rank."""
        cancel_at_exit(ExitStage.RPC_AGENTS, self.close)
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.ExitStack() as steps:  # all are taken, whatever one raises, the last one first
            steps.callback(self._rrefs.close)
            steps.callback(self._executor.close)
            steps.callback(self._peers.close)
            steps.callback(self._client.pending_calls.close)
            steps.callback(self._rrefs.stop)
            steps.callback(self._shutdown.close)
            steps.callback(self._names.close)
            steps.callback(self._server.close)
            steps.callback(self._peers.stop_waiting)

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else check_timeout(timeout)

    def _find(self, to: int | str, timeout: float | None) -> tuple[int, float]:
        """The rank to call, and the seconds left once its name is known."""
        seconds = self._seconds(timeout)
        if not isinstance(to, str):
            return self._rank_of(to), seconds
        deadline = Deadline(seconds)
        with self._executor.waiting(also_in_event_loop=True):
            return self._names.find(to, deadline), deadline.remaining()

    def _rank_of(self, to: int) -> int:
        rank = to if type(to) is int else check_int("the rank to call, where it is no name,", to)
        if not 0 <= rank < self.world_size:
            raise InvalidRankError(f"there is no rank {rank} to call: they are 0 to {self.world_size - 1}")
        return rank


def _naming_limits(rank: int) -> AbstractContextManager[None]:
    return naming_limits(f"the agent of rank {rank} can't start", (rank,), kind=DistributedError)


def _check_options(
    name: str | None, num_workers: int, most_outstanding: int, message_limit: int, allow_pickle: object
) -> None:
    check_int("num_workers", num_workers, min=1)
    check_int("most_outstanding", most_outstanding, min=1)
    check_int("message_limit", message_limit, min=_MIN_MESSAGE_LIMIT)
    check_bool("allow_pickle", allow_pickle)
    if name is None:
        return
    if not isinstance(name, str):
        raise TypeError(f"the name of a rank is a text, not {name!r}")
    if not is_encodable(name):
        raise ValueError(f"the name {name!r} holds half of a surrogate pair: take another one")
    if not 0 < len(name.encode()) <= _MAX_NAME_BYTES:
        raise ValueError(f"the name of a rank has 1 to {_MAX_NAME_BYTES} bytes, not {len(name.encode())}")


def _check_function_name(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name of a function is a text, not {name!r}")
    if name.startswith(OWN_NAMES):
        raise ValueError(f"names that begin with {OWN_NAMES!r} are the agents' own: {name!r} can't be called")
    return name


def current_agent() -> RpcAgent:
    """The agent whose call runs in this thread, or coroutine, for further calls.

    Raises:
        RuntimeError: No agent has called this function.
    """
    try:
        return serving_agent.get()  # type: ignore[no-any-return]
    except LookupError:
        raise RuntimeError("current_agent() is for functions that an agent serves, and this is none") from None


_OPTIONS = tuple(
    name for name, each in inspect.signature(RpcAgent).parameters.items() if each.kind is inspect.Parameter.KEYWORD_ONLY
)


def _check_option_names(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"RpcContext has no option {name!r}; there are drain_timeout, {', '.join(_OPTIONS)}")


class RpcContext:
    """Makes and serves calls in a with-block: ``with RpcContext(group, {"add": add}) as agent:``.

    The end of the block waits until all ranks have reached the end of theirs and no call is under way, and serves calls
    until then; a rank that only serves has an empty block. A block that raises ends at once, and its rank is lost to
    the others.

    Args:
        backend: The transport between ranks; or a group, whose messages carry the calls.
        functions: The functions that other ranks may call, by name.
        drain_timeout: Seconds that the end of the block may take; None takes the backend's timeout.
        options: The options of `RpcAgent`.

    Raises:
        TypeError: An option is unknown. The backend is closed, unless an agent uses it.
        DistributedTimeoutError: At the end: it takes too long. Rank 0's error names the ranks that the others wait for.
        PeerLostError: At the end: rank 0, which coordinates it, is gone.
    """

    def __init__(
        self,
        backend: RpcBackend | Backend,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        *,
        drain_timeout: float | None = None,
        **options: Any,
    ) -> None:
        try:
            self._drain_timeout = None if drain_timeout is None else check_timeout(drain_timeout)
            _check_option_names(options)
        except (TypeError, ValueError):
            if isinstance(backend, RpcBackend):
                backend.refuse()
            raise
        self._make = functools.partial(RpcAgent, backend, functions, **options)
        self._agent: RpcAgent | None = None

    def __enter__(self) -> RpcAgent:
        if self._agent is not None:
            raise RuntimeError("this RpcContext has been entered already: make another one")
        self._agent = self._make()
        return self._agent

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._agent is not None
        try:
            if kind is None:
                self._agent.drain(self._drain_timeout)
        finally:
            self._agent.close()
