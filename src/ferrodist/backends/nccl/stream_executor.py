"""Enqueue a group's NCCL work on its CUDA stream, track it until the GPU has done it, and abort it.

[Note: launching]
`StreamExecutor.launch` enqueues work on the group's stream and returns: no rank waits for another there. NCCL matches
operations by order alone, so whatever threads call, work is enqueued in the order of the sequence numbers that
`reserve` gave, which is the same on all ranks. A launched operation is tracked until the GPU has passed its end. The
group's stream first waits for the caller's stream; afterwards the caller's stream waits for the operation, unless it
was started after `begin_async`: then `LaunchedOps.wait_on_stream` does that.

[Note: lifetimes]
torch's allocator reuses freed memory on the stream where it was allocated. After synchronous work that stream is
behind the group's. Asynchronous operations keep their tensors until they have ended. Where neither holds, because a
launch broke off, a group failed, or a tensor is used on another stream than its own, `Streams.keep` tells the
allocator.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ferrodist.backends.nccl.communicator import Communicator, GroupCommunicator, Library, NcclError
from ferrodist.backends.nccl.in_flight import InFlightOp, LaunchedOps, OpInfo
from ferrodist.backends.nccl.verification import RingVerifier
from ferrodist.backends.nccl.watchdog import NcclProgressProbe, Watchdog
from ferrodist.backends.polling import Backoff
from ferrodist.backends.sequencer import Sequencer
from ferrodist.backends.signature import CollectiveSignature
from ferrodist.backends.verification import left_reason
from ferrodist.backends.weak import weak_method
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    BackendUnavailable,
    DistributedError,
    DistributedTimeoutError,
    GroupClosedError,
    UnsupportedOpError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from ferrodist.backends.base import Backend
    from ferrodist.backends.cuda_streams import Streams

    Work = Callable[["StreamContext"], None]


class StreamContext(NamedTuple):
    """The communicator and the stream that work is enqueued on."""

    communicator: Communicator
    stream: int
    await_ready: Callable[[], None]

    def grouped(self, call: Callable[[Communicator, int], None]) -> None:
        """Run ``call(communicator, stream)`` as one NCCL group; afterwards torch may enqueue more on the stream."""
        self.communicator.begin_group()
        try:
            call(self.communicator, self.stream)
        finally:
            self.communicator.end_group()
        self.await_ready()


class StreamExecutor:
    """Enqueues the NCCL work of one group; see [Note: launching].

    ``library()`` may raise BackendUnavailable. The work goes to ``stream``; if that is None, to one of the group's own.
    """

    def __init__(
        self,
        group: Backend,
        library: Callable[[], Library],
        streams_of: Callable[[torch.device], Streams],
        watchdog: Watchdog,
        stream: Any = None,
    ) -> None:
        self._group = group
        self._streams_of = streams_of
        self._watchdog = watchdog
        self._stream = stream
        self.sequencer = Sequencer(lambda: group.failure is not None)
        self.num_called = 0
        self._handle = GroupCommunicator(group, library)
        self._outstanding: deque[InFlightOp] = deque()
        self._outstanding_lock = threading.Lock()
        self._local = threading.local()
        # The group's listeners hold these for as long as it lasts, so they must not keep a dropped group alive.
        self._verifier = RingVerifier(group, self.reporter())
        executor = weakref.ref(self)
        self._liveness = NcclProgressProbe(group, lambda: getattr(executor(), "num_called", 0))
        self._mismatch: DistributedError | None = None  # found by a verifier, not yet handled by the watchdog

    def reporter(self) -> Callable[[DistributedError], None]:
        """A callback for errors that end the group; it may be called in any thread and does not block."""
        return weak_method(self.report)

    # Launching.

    def launch(self, call: CollectiveSignature, tensors: Sequence[torch.Tensor], work: Work, *, timeout: float) -> None:
        """Enqueue a collective, the same on all ranks, that reads and writes ``tensors``, by ``work``.

        ``timeout`` is in seconds, from when the GPU has reached it.
        """
        deadline = Deadline(timeout)
        info = OpInfo(what=call, sequence=call.sequence, timeout=timeout)
        with (
            self._abort_on_error(call),
            self.sequencer.hold(call.sequence, deadline.remaining()) as has_turn,
            self._handle.lock,
        ):
            self._check()
            if not has_turn:
                raise DistributedTimeoutError(
                    f"{call} on group {self._group.name!r}: operations that other threads of rank {self._group.rank}"
                    f" began before it were not launched within {deadline.timeout:g} s. Look for a thread that hangs in"
                    " one of them, or pass a larger timeout.",
                    ranks=(self._group.rank,),
                )
            self._open(tensors[0].device, call, info, deadline)
            self.num_called = call.sequence + 1
            self._verifier.send(self._group, call)
            started: list[InFlightOp] | None = getattr(self._local, "started", None)
            launched = self._enqueue(info, tensors, work, deadline, blocks_caller=started is None)
            if started is not None:
                started.append(launched)

    def launch_message(
        self, what: str, tensors: Sequence[torch.Tensor], work: Work, *, timeout: float, peers: Sequence[int]
    ) -> InFlightOp:
        """Enqueue messages with ``peers``, which have no sequence number among the collectives.

        The caller's stream does not wait for them before `order_after`, so that messages with several ranks overlap.
        """
        deadline = Deadline(timeout)
        info = OpInfo(what=what, timeout=timeout, peers=tuple(peers))
        with self._abort_on_error(what), self._handle.lock:
            self._check()
            self._open(tensors[0].device, CollectiveSignature(operation="messages"), info, deadline)
            return self._enqueue(info, tensors, work, deadline, blocks_caller=False)

    def order_after(self, launched: InFlightOp, device: torch.device) -> None:
        """Make the caller's stream wait for a launched operation, which then need not keep its tensors alive."""
        streams = self._streams_of(device)
        caller = streams.current()
        if self._stream_on(device).cuda_stream != caller.cuda_stream:
            streams.order(caller, launched.end)
        launched.kept = ()

    def take_over(self, tensor: torch.Tensor) -> None:
        """Make ``tensor``, which the operations launched so far wrote, safe to read on the caller's stream."""
        streams = self._streams_of(tensor.device)
        caller = streams.current()
        streams.order(caller, streams.record(self._stream_on(tensor.device)))
        streams.keep(tensor, caller)

    def begin_async(self) -> None:
        """Until `end_async`, don't make this thread's stream wait for the operations that it launches."""
        assert getattr(self._local, "started", None) is None
        self._local.started = []

    def end_async(self) -> LaunchedOps:
        """End `begin_async` in this thread; returns the operations launched since."""
        started: list[InFlightOp] = self._local.started
        self._local.started = None
        return LaunchedOps(
            started,
            failure=lambda: self._group.failure or self._mismatch,
            is_compared=self._verifier.is_compared,
        )

    @property
    def needs_polling(self) -> bool:
        """True if an operation is not known to have ended, or a mismatch was found."""
        return bool(self._outstanding) or (self._mismatch is not None and self._group.failure is None)

    def _enqueue(
        self, info: OpInfo, tensors: Sequence[torch.Tensor], work: Work, deadline: Deadline, *, blocks_caller: bool
    ) -> InFlightOp:
        """Enqueue work behind the caller's stream, which then waits for it if ``blocks_caller``."""
        device = tensors[0].device
        streams = self._streams_of(device)
        stream, caller = self._stream_on(device), streams.current()
        is_elsewhere = stream.cuda_stream != caller.cuda_stream
        context = StreamContext(
            self._handle.communicator, stream.cuda_stream, partial(self._await_ready, info, deadline)
        )
        with streams.using(stream):
            if is_elsewhere:
                streams.order(stream, streams.record(caller))
            start = streams.record(stream)
            try:
                work(context)
            except BaseException:
                self._keep(tensors)
                raise
            end = streams.record(stream)
        if is_elsewhere and blocks_caller:
            streams.order(caller, end)
        kept = () if blocks_caller else tuple(tensors)
        launched = InFlightOp(info, streams, start=start, end=end, kept=kept, caller=caller.cuda_stream)
        with self._outstanding_lock:  # the watchdog looks through them
            self._outstanding.append(launched)
        self._watchdog.watch(self)
        return launched

    def _keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep tensors for the group's stream, see [Note: lifetimes]; a forked child has nothing to keep."""
        if self._handle.is_of_parent:
            return
        with contextlib.suppress(RuntimeError):  # the GPU is lost, and its memory with it
            for tensor in tensors:
                self._streams_of(tensor.device).keep(tensor, self._stream_on(tensor.device))

    def _stream_on(self, device: torch.device) -> Any:
        if self._stream is None:
            self._stream = self._streams_of(device).make(priority=-1)  # high, for other ranks wait for it
        return self._stream

    # The communicator.

    def _open(self, device: torch.device, call: CollectiveSignature, info: OpInfo, deadline: Deadline) -> None:
        """Make the communicator with the other ranks if this is the group's first operation."""
        if self._handle.device is None:
            if self._stream is not None:
                self._check_device(self._stream.device, device, call, "has stream= on")
            self._handle.begin(device, call, deadline)
            self._verifier.open(self._group)
            self._liveness.open(self._group)
            self._await_ready(info, deadline)
        self._check_device(self._handle.device, device, call, "uses")

    def _check_device(
        self, used: torch.device | None, given: torch.device, call: CollectiveSignature, has: str
    ) -> None:
        if used != given:
            raise UnsupportedOpError(
                f"{call} on group {self._group.name!r}: rank {self._group.rank} {has} {used} in this group, and was"
                f" given a tensor on {given}. A rank has one GPU in a group: call torch.cuda.set_device(local_rank)"
                " first, and make tensors there."
            )

    def _await_ready(self, info: OpInfo, deadline: Deadline) -> None:
        """Wait until NCCL has enqueued the last calls; it never does while another rank is late or the group failed."""
        if self._handle.is_ready():
            return
        backoff = Backoff()
        while not self._handle.is_ready():
            self._check()
            if deadline.expired:
                raise self._liveness.timeout_error(self._group, info)
            backoff.pause(deadline.remaining())

    # Completion and failure.

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until every launched operation has ended and been compared."""
        deadline = Deadline(self._group.timeout if timeout is None else timeout)
        backoff = Backoff()
        while True:
            self._check()
            self._reap()
            if not self._outstanding and not self._verifier.num_uncompared:
                self._check()
                return
            if deadline.expired:
                raise DistributedTimeoutError(
                    f"the work of group {self._group.name!r} on the GPU is still under way after {deadline.timeout:g}"
                    " s: synchronize again"
                )
            backoff.pause(deadline.remaining())

    def poll(self, now: float) -> bool:
        """Drop operations that have ended, and abort the group for errors; whether operations are left."""
        if self._group.failure is None:
            error = self._handle.find_error()
            reason = self._mismatch if error is None else self._with_context(error)
            if reason is not None:
                self._group.abort(reason)
        if self._group.failure is not None:
            self.abort()
            return False
        self._reap()
        with self._outstanding_lock:
            oldest = self._outstanding[0] if self._outstanding else None
        if oldest is not None and oldest.is_overdue(now):
            self._group.abort(self._liveness.timeout_error(self._group, oldest.info))
        return bool(self._outstanding)

    def fail(self, error: DistributedError) -> None:
        """Abort the group; called by the watchdog."""
        self._group.abort(error)
        self.abort()

    def report(self, error: DistributedError) -> None:
        """Have the watchdog abort the group for a mismatch; does not block."""
        self._mismatch = error
        self._watchdog.watch(self, at_once=True)

    def _reap(self) -> None:
        with self._outstanding_lock:
            while self._outstanding and self._outstanding[0].done():
                self._outstanding.popleft()

    def abort(self) -> None:
        """Abort the failed group's communicator, which ends kernels that wait for other ranks."""
        self._handle.abort()
        with self._outstanding_lock:
            for launched in self._outstanding:
                self._keep(launched.kept)
            self._outstanding.clear()

    def release(self, failure: DistributedError | None) -> None:
        """Release the communicator when this rank closes the group; after a ``failure`` nothing is waited for."""
        self._verifier.close()
        self._liveness.close()
        if failure is None:
            self._handle.release()
        else:
            self.abort()

    def _check(self) -> None:
        if self._handle.is_of_parent:
            raise GroupClosedError(
                f"group {self._group.name!r} belongs to the process that this one was forked from: CUDA does not"
                " survive a fork"
            )
        if self._mismatch is not None and self._group.failure is None:
            self._group.abort(self._mismatch)
        failure = self._group.failure
        if failure is not None:
            raise failure.fresh()

    def _with_context(self, error: NcclError) -> NcclError:
        return NcclError(
            f"{error.message} on rank {self._group.rank} of group {self._group.name!r}. NCCL_DEBUG=WARN tells more.",
            ranks=(self._group.rank,),
        )

    @contextlib.contextmanager
    def _abort_on_error(self, call: CollectiveSignature | str) -> Iterator[None]:
        """Abort the group when a launch fails on this rank: the others wait for it, perhaps on their GPUs."""
        try:
            yield
        except (BackendUnavailable, GroupClosedError):
            raise  # the first is raised on all ranks before any launch; after the second nothing is left to abort
        except DistributedError as error:
            reason = self._with_context(error) if isinstance(error, NcclError) else error
            self._group.abort(reason)
            self.abort()
            raise (self._group.failure or reason).fresh() from None
        except BaseException as error:
            self._group.abort(left_reason(self._group.rank, call, error))
            self.abort()
            raise
