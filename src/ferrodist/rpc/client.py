"""`RpcClient`: the calls that a rank makes, their results and timeouts."""

from __future__ import annotations

import contextlib
import functools
import heapq
import threading
import time
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, DistributedTimeoutError, GroupClosedError, PeerLostError, RpcError
from ferrodist.rpc.future import Future, OneShot
from ferrodist.rpc.messages import (
    NO_CALL_ID,
    OWN_NAMES,
    Call,
    Content,
    MessageKind,
    ReferenceTransfer,
    ValueCodec,
    error_of,
    pack_call,
    pack_plain_call,
    unpack_failure,
    unpack_result,
)
from ferrodist.rpc.peer_manager import PeerListener, PeerManager, lost_error
from ferrodist.rpc.statistics import RpcMetrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.persistent_recv import WaitEvent
    from ferrodist.rpc.executor import Executor
    from ferrodist.rpc.peer import Peer

_MAX_ENDED_TIMEOUTS = 1000  # timeouts of calls that have ended which may be in the heap

_POLL_INTERVAL_SECONDS = 1.0  # how long a thread sleeps whose wake-up may be lost, when an interruption came between

_RESULT_POLL_SECONDS = 0.01
_RESULT_TIMEOUT_SECONDS = 10.0  # how long another thread that has received a call's result may take to hand it over


class RpcClient(PeerListener):
    """Makes calls, and takes their results."""

    def __init__(self, peers: PeerManager, executor: Executor, codec: ValueCodec) -> None:
        self._peers = peers
        self._executor = executor
        self._codec = codec  # the agent's `RRefManager`, which packs only what is not plain
        self.metrics = RpcMetrics()
        self.pending_calls = PendingCalls(f"ferrodist-rpc-{peers.rank}-timeouts", self._on_give_up)

    def call(self, rank: int, call: Call, timeout: float) -> Any:
        """Call a function, and wait for its result; see `RpcAgent.rpc_sync`."""
        event = self._executor.wait_events.current()
        pending = PendingCall(rank, call.name, timeout, event=event)
        is_worker = self._executor.begin_wait()  # also for sending, which may wait for a connection
        try:
            self._await(self._start(pending, call), pending, event)
        finally:
            if is_worker:
                self._executor.end_wait()
        if pending.error is not None:
            try:
                raise pending.error
            finally:
                del pending  # its error holds this frame, and the caller's with everything in it
        return pending.value

    def call_async(self, rank: int, call: Call, timeout: float) -> Future:
        """Call a function; see `RpcAgent.rpc_async`."""
        return self._call_async(rank, call, timeout, in_window=True)

    def call_internal(self, rank: int, call: Call, timeout: float) -> Future:
        """Make an internal call, however many calls have no result."""
        return self._call_async(rank, call, timeout, in_window=False)

    def _call_async(self, rank: int, call: Call, timeout: float, *, in_window: bool) -> Future:
        future = Future(self._executor)
        try:
            self._start(PendingCall(rank, call.name, timeout, future=future), call, in_window=in_window)
        except DistributedError as error:  # whose frames hold what its callers have, such as references
            copy = error.fresh()
            copy.__cause__ = None  # it has frames too, and its text is in the error's
            future._sent = OneShot()
            future._sent.set(copy)
            future.settle(None, copy)
        return future

    def notify(self, rank: int, name: str, make_arguments: Callable[[], tuple[Any, ...] | None]) -> None:
        """Make an internal call without a response; raises DistributedError if the rank is not there.

        The arguments are made once the connection is known, so that they belong to it; None sends nothing.
        """
        peer = self._peers.get(rank, 0.0)
        arguments = make_arguments()
        if arguments is not None:
            content, _ = self._codec.pack(rank, pack_call, Call(name, arguments, {}))
            peer.send(MessageKind.NOTICE, NO_CALL_ID, content)

    def on_response(self, rank: int, call_id: int, kind: MessageKind, content: Content) -> None:
        """Take the result or the failure of a call, in the thread that receives it."""
        pending = self.pending_calls.pop(call_id, rank)
        if pending is None:  # it has ended with its rank, or with this agent
            if kind is MessageKind.RESULT:
                with contextlib.suppress(Exception):  # as below
                    unpack_result(content, rank, self._codec.leaf_codecs[rank])
            return
        pending.release()
        if pending.is_given_up:
            if pending.is_user_call:
                self.metrics.count("late")
            with contextlib.suppress(Exception):  # references in it have been counted for this rank
                self._unpack(pending, kind, content)
            return
        if pending.is_user_call:
            self.metrics.count("answered", time.monotonic() - pending.started)
        # At once, in the order of messages: the next one may give back a reference in this.
        try:
            value = self._unpack(pending, kind, content)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            pending.end(None, error)
        except BaseException:  # the handler of an interruption raised it in this thread, which need not be the caller's
            name = pending.name.removeprefix(OWN_NAMES)
            pending.end(None, RpcError(f"the result of {name!r} was lost by an interruption", ranks=(rank,)))
            raise
        else:
            pending.end(value)

    @override
    def on_lost(self, rank: int, error: PeerLostError) -> None:
        self.pending_calls.fail(rank, error)

    def _start(self, pending: PendingCall, call: Call, *, in_window: bool = True) -> int:
        """Send a call, once there is a slot for it, and return its id; errors are not given to the pending call."""
        peer = self._peers.get(pending.rank, pending.timeout)
        content: Content | None = pack_plain_call(call)  # which has no references to count
        if content is None:
            content, pending.transfer = self._codec.pack(pending.rank, pack_call, call)
        if in_window:
            if not peer.window.acquire(0.0):
                self._await_slot(peer, pending)
            pending.peer = peer
        kind = MessageKind.INTERNAL_CALL if call.name.startswith(OWN_NAMES) else MessageKind.CALL
        try:
            call_id = self.pending_calls.add(pending)
        except BaseException:
            pending.release()
            raise
        try:
            if pending.transfer is None:
                peer.send(kind, call_id, content)
            else:
                self._send_references(pending, call_id, functools.partial(peer.send, kind, call_id, content))
        except BaseException as error:
            if self.pending_calls.pop(call_id) is None:  # the caller has the error already
                return call_id
            pending.release()
            # UnsupportedOpError and SizeMismatchError are the caller's fault; others mean that the group has ended.
            is_wrong_argument = isinstance(error, (TypeError, ValueError))
            if isinstance(error, DistributedError) and not is_wrong_argument and self.pending_calls.closed is None:
                raise lost_error(pending.rank, error) from error
            raise
        return call_id

    def _await_slot(self, peer: Peer, pending: PendingCall) -> None:
        with self._executor.waiting():  # once more within `call`, where that changes nothing
            has_slot = peer.window.acquire(pending.remaining)
        if not has_slot:
            raise DistributedTimeoutError(
                f"rank {pending.rank} has had most_outstanding calls without a result for {pending.timeout:g} s: pass a"
                " longer timeout, or make the agents with a larger most_outstanding",
                ranks=(pending.rank,),
            )

    def _send_references(self, pending: PendingCall, call_id: int, send: Callable[[], None]) -> None:
        def on_error(error: BaseException) -> None:
            if self.pending_calls.pop(call_id) is not None:
                pending.release()
                if not pending.is_given_up:
                    pending.end(None, error)

        assert pending.transfer is not None
        sent = pending.transfer.send(send, on_error, Deadline(pending.remaining))
        if pending.future is not None:
            pending.future._sent = sent

    def _await(self, call_id: int, pending: PendingCall, event: WaitEvent) -> None:
        """Wait for a result; where waiting moves messages, this thread may itself run `on_response`.

        The event may also be set for something that this thread has waited for before.
        """
        try:
            while not pending.has_ended and (left := pending.remaining) > 0:
                self._executor.wait_events.wait(event, min(left, _POLL_INTERVAL_SECONDS))
        except BaseException:  # the handler of an interruption raised it
            self.pending_calls.give_up(call_id)
            raise
        deadline = Deadline(_RESULT_TIMEOUT_SECONDS)
        while not pending.has_ended:
            if self.pending_calls.give_up(call_id) is not None or deadline.expired:
                raise _timeout_error(pending)
            event.wait(_RESULT_POLL_SECONDS)  # another thread has it, and is about to hand it over

    def _on_give_up(self, call_id: int, pending: PendingCall) -> None:
        if pending.peer is not None:
            self.metrics.count("timed_out")
            with contextlib.suppress(DistributedError):  # or there is nobody who serves it
                pending.peer.send(MessageKind.CANCEL, call_id, b"")

    def _unpack(self, pending: PendingCall, kind: MessageKind, content: Content) -> Any:
        if kind is MessageKind.RESULT:
            return unpack_result(content, pending.rank, self._codec.leaf_codecs[pending.rank])
        raise error_of(pending.name, pending.rank, unpack_failure(content, pending.rank))


class PendingCall:
    """A call whose result has not come: its future, or the event of the thread that waits, receives it."""

    def __init__(
        self, rank: int, name: str, timeout: float, *, future: Future | None = None, event: WaitEvent | None = None
    ) -> None:
        self.rank = rank
        self.name = name
        self.timeout = timeout
        self.future = future
        self.event = event
        self.started = time.monotonic()
        self.value: Any = None
        self.error: BaseException | None = None
        self.has_ended = self.is_given_up = False
        self.peer: Peer | None = None  # whose flow-control slot this call occupies; None for internal calls
        self.transfer: ReferenceTransfer | None = None

    @property
    def is_user_call(self) -> bool:
        """True for a call of a user, which counts in statistics and occupies a slot; False for an agent's own."""
        return self.peer is not None

    @property
    def remaining(self) -> float:
        """Seconds left."""
        return max(0.0, self.started + self.timeout - time.monotonic())

    def release(self) -> None:
        """Give back the call's slot and references, when it was answered or will not be."""
        if self.peer is not None:
            self.peer.window.release()
        if self.transfer is not None:
            self.transfer.forget()

    def end(self, value: Any, error: BaseException | None = None) -> None:
        """Give the caller the result, or the error."""
        if self.future is not None:
            # A future lasts: an error's frames would keep alive all that a user's calling functions have.
            each = error
            if error is not None:
                error.__context__ = None
            while each is not None:
                each = each.with_traceback(None).__cause__
            self.future.settle(value, error)
        elif self.event is not None:
            self.value, self.error = value, error
            self.has_ended = True
            self.event.set()


class PendingCalls:
    """All calls of one agent that have not been answered, by call id, and a thread for their timeouts.

    A call that its caller has given up stays until it is answered: until then it takes up room at the other side.
    """

    def __init__(self, name: str, on_give_up: Callable[[int, PendingCall], None]) -> None:
        self._on_give_up = on_give_up
        self._last_call_id = 0
        self.num_made = self.num_ended = 0  # calls of users; those answered, or never to be
        self._calls: dict[int, PendingCall] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._timeouts: list[tuple[float, int]] = []  # a heap of times and numbers
        self._next_timeout = float("inf")  # until which the thread sleeps
        self.closed: DistributedError | None = None  # the error of further calls, once the agent is closed
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._thread.start()

    def add(self, pending: PendingCall) -> int:
        """Register a call that is about to be sent; returns its id."""
        with self._lock:
            if self.closed is not None:
                raise self.closed.fresh()
            self._last_call_id += 1
            call_id = self._last_call_id
            self.num_made += pending.is_user_call
            self._calls[call_id] = pending
            if pending.future is None:  # a thread that waits for its event checks the time itself
                return call_id
            if len(self._timeouts) > 2 * len(self._calls) + _MAX_ENDED_TIMEOUTS:
                self._timeouts = [each for each in self._timeouts if each[1] in self._calls]
                heapq.heapify(self._timeouts)
            end = pending.started + pending.timeout
            heapq.heappush(self._timeouts, (end, call_id))
            if end < self._next_timeout:
                self._next_timeout = end
                self._changed.notify()
        return call_id

    def pop(self, call_id: int, rank: int | None = None) -> PendingCall | None:
        """Remove a call (to this rank) whose result has come, for the caller to end unless it was given up."""
        with self._lock:
            pending = self._calls.pop(call_id, None)
            if pending is not None and rank is not None and pending.rank != rank:
                self._calls[call_id] = pending
                return None
            self.num_ended += pending is not None and pending.is_user_call
            return pending

    def give_up(self, call_id: int) -> PendingCall | None:
        """Give a call up, for the caller to end it; None if its result has come after all."""
        with self._lock:
            pending = self._calls.get(call_id)
            if pending is None or pending.is_given_up:
                return None
            pending.is_given_up = True
        if pending.transfer is not None:
            pending.transfer.forget()
        self._on_give_up(call_id, pending)
        return pending

    @property
    def num_in_flight(self) -> int:
        """The number of users' calls without a result."""
        with self._lock:
            return sum(pending.is_user_call and not pending.is_given_up for pending in self._calls.values())

    def fail(self, rank: int | None, error: DistributedError) -> None:
        """Fail the calls to a rank, or all."""
        with self._lock:
            calls = list(self._calls.items())
        for call_id, each in calls:
            if rank is None or each.rank == rank:
                pending = self.pop(call_id)
                if pending is not None:
                    pending.release()
                    if not pending.is_given_up:
                        pending.end(None, error.fresh())

    def close(self) -> None:
        """Fail all calls, and end the thread."""
        with self._changed:
            self.closed = GroupClosedError("the agent was closed")
            self._changed.notify()
        self.fail(None, self.closed)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self.closed is not None:
                    return
                now = time.monotonic()
                expired = []
                while self._timeouts and (self._timeouts[0][0] <= now or self._timeouts[0][1] not in self._calls):
                    expired.append(heapq.heappop(self._timeouts)[1])
                self._next_timeout = self._timeouts[0][0] if self._timeouts else float("inf")
                if not expired:
                    self._changed.wait(min(self._next_timeout - now, threading.TIMEOUT_MAX))
            for call_id in expired:
                self._expire(call_id)

    def _expire(self, call_id: int) -> None:
        # A function of its own, so that no local of the loop keeps the call alive: it may hold references.
        pending = self.give_up(call_id)
        if pending is not None:
            pending.end(None, _timeout_error(pending))


def _timeout_error(pending: PendingCall) -> DistributedTimeoutError:
    return DistributedTimeoutError(
        f"rank {pending.rank} did not answer the call of {pending.name.removeprefix(OWN_NAMES)!r} within"
        f" {pending.timeout:g} s. Is it busy, or does the function wait for something? Pass a longer timeout where"
        " it may",
        ranks=(pending.rank,),
    )
