"""`RpcAgent`: one rank's part of all calls, to other ranks and from them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from ferrodist.backends.base import Backend
from ferrodist.collectives.prepare import check_integer
from ferrodist.deadline import Deadline, check_timeout
from ferrodist.errors import (
    DistributedError,
    DistributedTimeoutError,
    GroupClosedError,
    InvalidRankError,
    RpcError,
    ranks_text,
)
from ferrodist.rpc.backends import GroupRpcBackend, RpcBackend
from ferrodist.rpc.buffers import Buffers
from ferrodist.rpc.callers import Neighbor, Office, OwnCaller, Reply
from ferrodist.rpc.calls import Calls, Future, Waiting, Waits, late_error
from ferrodist.rpc.connector import Connector, lost_error
from ferrodist.rpc.counting import REGISTER
from ferrodist.rpc.draining import COME, LEAVE, LOOK, Draining
from ferrodist.rpc.messages import (
    HELLO,
    NO_NUMBER,
    OWN_NAMES,
    Call,
    Failure,
    FailureKind,
    MessageKind,
    unpack_failure,
    unpack_result,
)
from ferrodist.rpc.names import Names
from ferrodist.rpc.object_calls import ObjectCalls
from ferrodist.rpc.remote_objects import CREATE, RemoteObjects
from ferrodist.rpc.serving import Functions, Served, Workers, serving
from ferrodist.rpc.statistics import Counters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ferrodist.backends.listening import Signal
    from ferrodist.errors import PeerLostError
    from ferrodist.rpc.callers import Caller
    from ferrodist.rpc.messages import Content
    from ferrodist.rpc.reference_tables import ReferenceCounts
    from ferrodist.rpc.references import RRef
    from ferrodist.rpc.statistics import RpcStatistics

_Function = TypeVar("_Function", bound="Callable[..., Any]")

__all__ = ["DEFAULT_MESSAGE_LIMIT", "RpcAgent", "current_agent"]

DEFAULT_MESSAGE_LIMIT = 1 << 30
"""Bytes that the arguments of a call, or its result, may have."""

_AGES = 1e6  # seconds


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
        message_limit: Bytes that the arguments of a call, or its result, may have.
        allow_pickle: Whether values of any other types may travel, pickled. Whoever calls can then run anything here.

    Raises:
        TypeError, ValueError: An argument is wrong.
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
        numbers = {"num_workers": num_workers, "most_outstanding": most_outstanding, "message_limit": message_limit}
        for option, number in numbers.items():
            if check_integer(number, option) < 1:
                raise ValueError(f"{option} must be at least 1, not {number}")
        if isinstance(backend, Backend):
            backend = GroupRpcBackend(backend)
        if not isinstance(backend, RpcBackend):
            raise TypeError(f"an RpcAgent is made with an RpcBackend or a group, not {type(backend).__name__}")
        self._backend = backend
        if name is not None and not isinstance(name, str):
            raise TypeError(f"the name of a rank is a text, not {name!r}")
        self._functions = Functions()
        for each, function in (functions or {}).items():
            self.register(each, function)
        self._waits = waits = Waits(backend.signal)
        self._counters = Counters()
        label = f"ferrodist-rpc-{backend.rank}"
        self._calls = Calls(f"{label}-timeouts", self._gave_up)
        self._workers = Workers(self, self._functions, num_workers, f"{label}-worker", waits)
        self._names = Names()
        if name is not None:
            self._names.add(backend.rank, name)
        self._draining = Draining(self)
        self._objects = RemoteObjects(self, allow_pickle=allow_pickle)
        self._object_calls = ObjectCalls(self._objects, self)
        self._office = Office(
            self._workers,
            waits,
            self._counters,
            Buffers(),
            self._objects,
            self._serve_internal,
            self._answered,
            name,
            backend.timeout,
            most_outstanding,
            message_limit,
        )
        self._closed = False
        atexit.register(self.close)  # a thread that is in torch while the interpreter ends takes the process down
        self._own = OwnCaller(backend.rank, self._office)
        self._connector = Connector(backend, self, f"{label}-ends")
        try:
            self._connector.start()
        except BaseException:
            self.close()
            raise

    @property
    def rank(self) -> int:
        """This rank."""
        return self._backend.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._backend.world_size

    @property
    def timeout(self) -> float:
        """Seconds a call may take that names no timeout itself."""
        return self._backend.timeout

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
            ValueError: There is another one of that name, or agents have such names for themselves.
        """
        if function is None:
            return functools.partial(self.register, name)
        if isinstance(name, str) and name.startswith(OWN_NAMES):
            raise ValueError(f"names that begin with {OWN_NAMES!r} are the agents' own: take another one")
        self._functions.register(name, function)
        return function

    def rpc_sync(self, to: int | str, name: str, *arguments: Any, timeout: float | None = None, **keywords: Any) -> Any:
        """Call a function of a rank, and wait for its result.

        Args:
            to: The rank, or its name; this one's functions are called without the network.
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
        rank, seconds = self._find(to, seconds)
        waiting = Waiting(rank, name, seconds, signal=signal)
        is_worker = self._workers.begin_wait()
        try:
            self._await(self._begin(waiting, Call(name, arguments, keywords)), waiting, signal)
        finally:
            if is_worker:
                self._workers.end_wait()
        if waiting.error is not None:
            try:
                raise waiting.error
            finally:
                del waiting  # its error holds this frame, and the caller's with all that is there
        return waiting.value

    def rpc_async(
        self, to: int | str, name: str, *arguments: Any, timeout: float | None = None, **keywords: Any
    ) -> Future:
        """Call a function of a rank, as `rpc_sync`; its result, or what that raises, is the future's.

        Tensors must not be changed until the future is done.
        """
        seconds = self._backend.timeout if timeout is None else check_timeout(timeout)
        future = Future(self._workers)
        rank, seconds = self._find(to, seconds)
        waiting = Waiting(rank, name, seconds, future=future)
        try:
            self._begin(waiting, Call(name, arguments, keywords))
        except DistributedError as error:
            if not future.done():
                future.set_exception(_without_frames(error))
        return future

    def remote(self, to: int | str, name: str, *arguments: Any, timeout: float | None = None, **keywords: Any) -> RRef:
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
        if not isinstance(name, str) or name.startswith(OWN_NAMES):
            raise ValueError(f"remote() takes the name of a function that was registered, not {name!r}")
        rank, seconds = self._find(to, self.timeout if timeout is None else check_timeout(timeout))
        return self._objects.create(rank, CREATE, (name, arguments, keywords), seconds)

    def reference(self, value: Any) -> RRef:
        """A reference to something here, whose owner is this rank; the object is not copied."""
        return self._objects.keep(value)

    def num_references(self) -> ReferenceCounts:
        """How many objects this rank keeps for others and for itself, and how many other ranks keep for it."""
        return self._objects.counting.tables.look()

    def wait_for_rank(self, rank: int, timeout: float | None = None) -> None:
        """Return when a rank can be called: one that was lost, when it has been started again.

        Args:
            rank: It.
            timeout: Seconds; None takes the backend's.

        Raises:
            DistributedTimeoutError: It is not there in time.
        """
        peer = self._rank_of(rank)
        if peer != self.rank:
            self._connector.wait_for(peer, Deadline(self.timeout if timeout is None else check_timeout(timeout)))

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

    def drain(self, timeout: float | None = None) -> None:
        """Return when all ranks have called this and no call is under way anywhere; until then calls are served.

        Args:
            timeout: Seconds until this gives up; None takes the backend's.

        Raises:
            DistributedTimeoutError: It takes longer. Rank 0's says who keeps the others waiting.
            PeerLostError: Rank 0 is gone, which sees to this. Other ranks that are lost are not waited for.
        """
        self._draining.wait(Deadline(self.timeout if timeout is None else check_timeout(timeout)))

    def close(self) -> None:
        """End all calls that are under way, here and for those who wait for this rank."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._connector.close()
        self._own.close(0)
        self._calls.close()
        self._workers.close()
        self._objects.close()

    # Calls of this rank.

    def _find(self, to: int | str, seconds: float) -> tuple[int, float]:
        """The rank that is meant, and how many of so many seconds are left when its name is known."""
        if not isinstance(to, str):
            return self._rank_of(to), seconds
        deadline = Deadline(seconds)
        return self._names.find(to, deadline), deadline.remaining()

    def _rank_of(self, to: int) -> int:
        rank = to if type(to) is int else check_integer(to, "to")
        if not 0 <= rank < self.world_size:
            raise InvalidRankError(f"there is no rank {rank} to call: they are 0 to {self.world_size - 1}")
        return rank

    def _begin(self, waiting: Waiting, call: Call) -> int:
        """Make a call; what is raised is not told to who waits for it."""
        if not isinstance(call.name, str):
            raise TypeError(f"the name of a function is a text, not {call.name!r}")
        caller = self._caller(waiting)
        content, waiting.passing = caller.write_call(call)
        if not caller.window.enter(0.0) and not self._await_place(caller, waiting.seconds):
            raise DistributedTimeoutError(
                f"rank {waiting.peer} has as many calls without a result as may be, for {waiting.seconds:g} s",
                ranks=(waiting.peer,),
            )
        waiting.caller = caller
        return self._send(
            waiting, MessageKind.INTERNAL_CALL if call.name.startswith(OWN_NAMES) else MessageKind.CALL, content
        )

    def _await_place(self, caller: Caller, seconds: float) -> bool:
        with self.resting():
            return caller.window.enter(seconds)

    def _send(self, waiting: Waiting, kind: MessageKind, content: Content) -> int:
        try:
            number = self._calls.add(waiting)
        except BaseException:
            waiting.end()
            raise
        caller, passing = waiting.caller or self._caller(waiting), waiting.passing

        def failed(error: BaseException) -> None:
            if self._calls.take(number) is not None:
                waiting.end()
                if not waiting.is_given_up:
                    waiting.fail(error)

        try:
            if passing is None:
                caller.send(kind, number, content)
            else:
                send = functools.partial(caller.send, kind, number, content)
                sent = passing.send(send, failed, Deadline(waiting.seconds))
                if waiting.future is not None:
                    waiting.future.sent = sent
        except BaseException as error:
            if self._calls.take(number) is None:  # whoever waits has been told already
                return number
            waiting.end()
            is_wrong_argument = isinstance(error, (TypeError, ValueError))
            if isinstance(error, DistributedError) and not is_wrong_argument and not self._closed:
                raise lost_error(waiting.peer, error) from error
            raise
        return number

    def _await(self, number: int, waiting: Waiting, signal: Signal) -> None:
        """Wait for a result. One that is found while this gives up sets the signal, which is waited for then."""
        end = waiting.started + waiting.seconds
        while not waiting.has_ended:
            try:
                has_come = self._waits.wait(signal, max(0.0, end - time.monotonic()))
            except BaseException:  # the handler of an interruption raised it
                if self._calls.give_up(number) is None:
                    signal.wait(_AGES)
                raise
            if not has_come:
                if self._calls.give_up(number) is not None:
                    raise late_error(waiting)
                signal.wait(_AGES)

    def _caller(self, waiting: Waiting) -> Caller:
        if self._closed:
            raise GroupClosedError("the agent was closed")
        if waiting.peer == self.rank:
            return self._own
        found = self._connector.neighbors.get(waiting.peer)
        found = found or self._connector.neighbor(waiting.peer, Deadline(waiting.seconds))
        return cast("Caller", found)  # which `meet` has made

    def _gave_up(self, number: int, waiting: Waiting) -> None:
        self._counters.count("timed_out")
        if waiting.caller is not None:
            with contextlib.suppress(DistributedError):  # or there is nobody who serves it
                waiting.caller.send(MessageKind.WITHDRAWAL, number, b"")

    def _answered(self, peer: int, number: int, kind: MessageKind, content: Content) -> None:
        """See `Office`."""
        waiting = self._calls.take(number, peer)
        if waiting is None:  # it has ended with its rank, or with this agent
            if kind is MessageKind.RESULT:
                with contextlib.suppress(Exception):
                    unpack_result(content, peer, self._objects.extensions[peer])  # as below
            return
        waiting.end()
        if waiting.is_given_up:
            self._counters.count("late")
            with contextlib.suppress(Exception):
                self._open(waiting, kind, content)  # references in it have been counted for this rank
            return
        if waiting.name != REGISTER:
            self._counters.count_answer(time.monotonic() - waiting.started)
        # At once, in the order in which messages come: what comes next may give back a reference in this.
        try:
            value = self._open(waiting, kind, content)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            waiting.fail(error)
        else:
            waiting.succeed(value)

    def _open(self, waiting: Waiting, kind: MessageKind, content: Any) -> Any:
        if kind is MessageKind.RESULT:
            return unpack_result(content, waiting.peer, self._objects.extensions[waiting.peer])
        raise self.error_of(waiting.name, waiting.peer, unpack_failure(content, waiting.peer))

    def _serve_internal(self, peer: int, call: Call, answer: Callable[[Any], None]) -> None:
        """See `Office`."""
        if call.name == HELLO:
            if len(call.arguments) == 1 and isinstance(call.arguments[0], str):
                self._names.add(peer, call.arguments[0])
        elif call.name in (COME, LOOK, LEAVE):
            answer(self._draining.serve(peer, call))
        else:
            self._object_calls.serve(peer, call, answer)

    # What remote objects need, and draining; see `Requester`, `Server` and `Drainer`.

    def num_calls(self) -> tuple[int, int]:
        """How many calls this rank has made, and how many of these have ended."""
        return self._calls.num_made, self._calls.num_ended

    def start(self, to: int, call: Call, seconds: float) -> Future:
        """Call a function of the agents' own, however many calls have no result."""
        future = Future(self._workers)
        waiting = Waiting(to, call.name, seconds, future=future)
        try:
            content, waiting.passing = self._caller(waiting).write_call(call)
            self._send(waiting, MessageKind.INTERNAL_CALL, content)
        except DistributedError as error:
            if not future.done():
                future.set_exception(_without_frames(error))
        return future

    def send_unanswered(self, to: int, name: str, make: Callable[[], tuple[Any, ...] | None]) -> None:
        """Call a function of the agents' own that has no answer.

        Args:
            to: The rank.
            name: Of the function.
            make: Makes the arguments, or None if there is nothing to call it for. It is called when the connection is
                known, so that it may make what belongs to that.
        """
        caller = self._caller(Waiting(to, name, 0.0))
        arguments = make()
        if arguments is not None:
            content, _ = caller.write_call(Call(name, arguments, {}))
            caller.send(MessageKind.NOTICE, NO_NUMBER, content)

    def submit(self, call: Call, answer: Callable[[Any], None], function: Callable[..., Any] | None = None) -> None:
        """Have a worker call a function: that of the call's name, or another one."""
        prepared = _Prepared(call, answer, function, self._counters)
        if isinstance(answer, Reply):
            answer.leave_to(prepared)
        self._workers.submit(prepared)

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Within it a thread waits for what calls bring: another one serves in its place, if it is a worker."""
        is_worker = self._workers.begin_wait()
        try:
            yield
        finally:
            if is_worker:
                self._workers.end_wait()

    def classes(self) -> set[type]:
        """The classes that were registered."""
        return self._functions.classes()

    def error_of(self, name: str, peer: int, failure: Failure) -> Exception:
        """What a call raises that has failed."""
        if failure.kind is FailureKind.EXPIRED:
            return DistributedTimeoutError(f"rank {peer}: {failure.text}", ranks=(peer,))
        how = "{} failed on rank {}" if failure.kind is FailureKind.RAISED else "the call of {} on rank {}"
        return RpcError(
            f"{how.format(repr(name.removeprefix(OWN_NAMES)), peer)}: {failure.text}",
            ranks=(peer,),
            type_name=failure.type_name,
            traceback=failure.traceback,
        )

    # What the connector needs; see `Owner`.

    def meet(self, peer: int, pair: Backend, ended: Callable[[Neighbor, DistributedError], None]) -> Neighbor:
        """Make a neighbor of a rank."""
        return Neighbor(peer, self._office, pair, ended)

    def joined(self, peer: int, incarnation: int) -> None:
        """A rank is there, for the first time or again, as such a process of it."""
        self._objects.counting.joined(peer, incarnation)
        self._draining.joined(peer)

    def lost(self, peer: int, error: PeerLostError) -> None:
        """Nothing more will come for what was sent to a rank until now."""
        self._calls.fail(peer, error)
        self._objects.counting.lost(peer)
        self._draining.lost(peer)


def _without_frames(error: DistributedError) -> DistributedError:
    """An error for a future. The frames it was raised in hold what their callers have, references for one."""
    copy = error.fresh()
    copy.__cause__ = None  # has frames too, and its text is in the error's
    return copy


def current_agent() -> RpcAgent:
    """The agent that serves the call this function is called in, for calls of its own.

    Raises:
        RuntimeError: No agent calls this.
    """
    try:
        return serving.get()  # type: ignore[no-any-return]
    except LookupError:
        raise RuntimeError("current_agent() is for functions that an agent serves, and this is none") from None


class _Prepared(Served):
    """A call that has been read."""

    __slots__ = ("_answer", "_call", "_counters")

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

    def read(self) -> Call:
        call, self._call = self._call, None
        assert call is not None
        return call

    def answer(self, found: Any) -> None:
        self._counters.count("failed" if isinstance(found, Failure) else "served")
        self._answer(found)
