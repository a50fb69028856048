"""One group's work on its GPUs: where it is put on a stream, kept track of, and ended.

[Note: launching]
`StreamExecutor.launch` puts work on the group's stream and returns: no rank waits for another there. Whatever thread
comes, work goes out in the order of the tickets of its `Sequencer`, the same on all ranks, for NCCL
matches by order alone. A *launched* operation is kept until the GPU has come past its end. Before its own work, the
stream waits for what the caller's stream has been given; after it, the caller's stream waits for it, unless the
operation was begun with `begin_async`: then `EnqueuedOp.wait_on_stream` does that.

[Note: lifetimes]
torch's allocator gives memory that was let go of to what comes next on the stream on which it was made. After
synchronous work that stream is behind the group's. What is launched asynchronously keeps its tensors until it has
ended. Where neither holds, because a launch broke off or a group failed, or because a tensor is taken over on another
stream than the one it was made on, `Streams.keep` tells the allocator.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from ferrodist.backends.nccl.communicator import CommunicatorHandle, NcclError, backoff
from ferrodist.backends.nccl.streams import EnqueuedOp, InFlightOp, OpInfo
from ferrodist.backends.nccl.verification import RingVerifier
from ferrodist.backends.nccl.watchdog import NcclLivenessProbe
from ferrodist.backends.sequencer import Sequencer
from ferrodist.backends.signature import CollectiveSignature
from ferrodist.backends.verification import left_reason
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
    from ferrodist.backends.nccl.communicator import Communicator, Library
    from ferrodist.backends.nccl.streams import Stream, Streams
    from ferrodist.backends.nccl.watchdog import Watchdog

if TYPE_CHECKING:
    Work = Callable[["StreamContext"], None]


class StreamContext:
    """What work is given: the communicator, and the stream to put it on.

    ``grouped`` calls to NCCL go to the GPU as one. When it returns they are on the stream: torch may put more there.
    """

    __slots__ = ("_await_ready", "communicator", "stream")

    def __init__(self, communicator: Communicator, stream: Stream, await_ready: Callable[[], None]) -> None:
        self.communicator = communicator
        self.stream = stream.cuda_stream
        self._await_ready = await_ready

    def grouped(self, call: Callable[[Communicator, int], None]) -> None:
        """Have ``call(communicator, stream)`` ask NCCL for any number of operations."""
        self.communicator.begin_group()
        try:
            call(self.communicator, self.stream)
        finally:
            self.communicator.end_group()
        self._await_ready()


class StreamExecutor:
    """Puts a group's work on its stream; see [Note: launching].

    Args:
        group: The group.
        library: Gives NCCL, or raises BackendUnavailable.
        streams: CUDA's.
        watch: Looks after what has been launched.
        stream: Where the work goes in place of a stream of the group's own, or None.
    """

    def __init__(
        self,
        group: Backend,
        library: Callable[[], Library],
        streams: Streams,
        watch: Watchdog,
        stream: Stream | None = None,
    ) -> None:
        self._group = group
        self._streams = streams
        self._watch = watch
        self._stream = stream
        self.sequencer = Sequencer(lambda: group.failure is not None)
        self.num_called = 0
        self._connection = CommunicatorHandle(group, library)
        self._outstanding: deque[InFlightOp] = deque()
        self._looking = threading.Lock()
        self._local = threading.local()
        # The group's listeners keep these for as long as it lasts: they must not keep a group that was dropped.
        self._calls = RingVerifier(group, self.reporter())
        self._progress = NcclLivenessProbe(group, partial(_num_called_by, weakref.ref(self)))
        self._found: DistributedError | None = None  # what comparisons have found, and the watch not yet told

    def reporter(self) -> Callable[[DistributedError], None]:
        """What takes errors that end the group, in any thread."""
        return partial(_report, weakref.ref(self))

    # Work.

    def launch(self, call: CollectiveSignature, tensors: Sequence[torch.Tensor], work: Work, *, timeout: float) -> None:
        """Put a collective's work on the stream.

        Args:
            call: What the other ranks must call, too, at its place.
            tensors: What the work reads and writes.
            work: Puts it on the stream of the lane that it is given.
            timeout: Seconds from when the GPU has come to it.
        """
        deadline = Deadline(timeout)
        operation = OpInfo(what=call, sequence=call.sequence, timeout=timeout)
        with (
            self._ended_by(call),
            self.sequencer.hold(call.sequence, deadline.remaining()) as has_turn,
            self._connection.lock,
        ):
            self._check()
            if not has_turn:
                raise DistributedTimeoutError(
                    f"operation {call.sequence} on group {self._group.name!r}: operations that other threads began"
                    f" before it were not launched within {deadline.timeout:g} s"
                )
            self._open(tensors[0].device, call, operation, deadline)
            self.num_called = call.sequence + 1
            self._calls.tell(self._group, call)
            started: list[InFlightOp] | None = getattr(self._local, "started", None)
            launched = self._put(operation, tensors, work, deadline, holds_caller=started is None)
            if started is not None:
                started.append(launched)

    def launch_message(
        self, what: str, tensors: Sequence[torch.Tensor], work: Work, *, timeout: float, peers: Sequence[int]
    ) -> InFlightOp:
        """Put messages on the stream, which have no place among the collectives; ``peers`` are the other sides.

        The caller's stream goes on until `order_after`, so that messages with several ranks are under way at once.
        """
        deadline = Deadline(timeout)
        operation = OpInfo(what=what, timeout=timeout, peers=tuple(peers))
        with self._ended_by(what), self._connection.lock:
            self._check()
            self._open(tensors[0].device, CollectiveSignature(operation="messages"), operation, deadline)
            return self._put(operation, tensors, work, deadline, holds_caller=False)

    def order_after(self, launched: InFlightOp, device: torch.device) -> None:
        """Put the caller's stream behind what has been launched."""
        stream, caller = self._stream_on(device), self._streams.current(device)
        if stream.cuda_stream != caller.cuda_stream:
            caller.wait_event(launched.end)
        launched.kept = ()

    def take_over(self, tensor: torch.Tensor) -> None:
        """Put the caller's stream behind all that has been launched, for it to read ``tensor``, which that wrote."""
        caller = self._streams.current(tensor.device)
        caller.wait_event(self._streams.record(self._stream_on(tensor.device)))
        self._streams.keep(tensor, caller)

    def begin_async(self) -> None:
        """From now to `end_async` this thread's stream is not put behind what it launches."""
        assert getattr(self._local, "started", None) is None
        self._local.started = []

    def end_async(self) -> EnqueuedOp:
        """What has been launched since `begin_async`."""
        started: list[InFlightOp] = self._local.started
        self._local.started = None
        return EnqueuedOp(
            started, self._streams, failure=lambda: self.failure or self._found, is_compared=self._calls.is_compared
        )

    def note(self, error: DistributedError) -> None:
        """Have the group end for what a comparison has found: who found it must not block."""
        self._found = error
        self._watch.report(self, error)

    @property
    def failure(self) -> DistributedError | None:
        """What the group has failed with."""
        return self._group.failure

    @property
    def has_outstanding(self) -> bool:
        """Whether something has been launched whose end has not been seen."""
        return bool(self._outstanding)

    def _put(
        self,
        operation: OpInfo,
        tensors: Sequence[torch.Tensor],
        work: Work,
        deadline: Deadline,
        *,
        holds_caller: bool,
    ) -> InFlightOp:
        """Put work on the stream, after what the caller's stream has been given, and that behind it if asked to."""
        device = tensors[0].device
        stream, caller = self._stream_on(device), self._streams.current(device)
        is_elsewhere = stream.cuda_stream != caller.cuda_stream
        lane = StreamContext(self._connection.communicator, stream, partial(self._await_ready, operation, deadline))
        with self._streams.on(stream):
            if is_elsewhere:
                stream.wait_event(self._streams.record(caller))
            start = self._streams.record(stream)
            try:
                work(lane)
            except BaseException:
                self._keep(tensors)
                raise
            end = self._streams.record(stream)
        if is_elsewhere and holds_caller:
            caller.wait_event(end)
        kept = () if holds_caller else tuple(tensors)
        launched = InFlightOp(operation, start=start, end=end, kept=kept, caller=caller.cuda_stream)
        self._outstanding.append(launched)
        self._watch.look_after(self)
        return launched

    def _keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """See [Note: lifetimes]; for the group's stream. In a forked child there is nothing to keep."""
        if self._connection.is_of_parent:
            return
        with contextlib.suppress(RuntimeError):  # of a GPU that is lost, whose memory nobody gets again
            for tensor in tensors:
                self._streams.keep(tensor, self._stream_on(tensor.device))

    def _stream_on(self, device: torch.device) -> Stream:
        if self._stream is None:
            self._stream = self._streams.make(device)
        return self._stream

    # The communicator.

    def _open(self, device: torch.device, call: CollectiveSignature, operation: OpInfo, deadline: Deadline) -> None:
        """Have the communicator, which is made with the other ranks when this is the first work of the group."""
        if self._connection.device is None:
            if self._stream is not None:
                self._check_device(self._stream.device, device, call, "has stream= on")
            self._connection.begin(device, call, deadline)
            self._calls.open(self._group)
            self._progress.open(self._group)
            self._await_ready(operation, deadline)
        self._check_device(self._connection.device, device, call, "uses")

    def _check_device(
        self, used: torch.device | None, given: torch.device, call: CollectiveSignature, has: str
    ) -> None:
        if used != given:
            raise UnsupportedOpError(
                f"{call} on group {self._group.name!r}: rank {self._group.rank} {has} {used} in this group, and was"
                f" given a tensor on {given}. A rank has one GPU in a group: call torch.cuda.set_device(local_rank)"
                " first, and make tensors there."
            )

    def _await_ready(self, operation: OpInfo, deadline: Deadline) -> None:
        """Return when what was begun is there; in a failed group, or when another rank is late, it never is."""
        if self._connection.is_ready():
            return
        for pause in backoff():
            self._check()
            if deadline.expired:
                raise self._progress.late_error(self._group, operation)
            time.sleep(pause)
            if self._connection.is_ready():
                return

    # Ends.

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until all that was launched has ended, and been compared."""
        deadline = Deadline(self._group.timeout if timeout is None else timeout)
        for pause in backoff():
            self._check()
            self._look()
            if not self._outstanding and not self._calls.num_uncompared:
                self._check()
                return
            if deadline.expired:
                raise DistributedTimeoutError(
                    f"the work of group {self._group.name!r} on the GPU is still under way after {deadline.timeout:g}"
                    " s: synchronize again"
                )
            time.sleep(pause)

    def look(self, now: float) -> bool:
        """Let go of what has ended, and end the group for what is late. For the watch; whether anything is left."""
        if self._group.failure is None:
            error = self._connection.find_error()
            if error is not None:
                self._group.abort(self._worded(error))
        if self._group.failure is not None:
            self.end()
            return False
        self._look()
        oldest = next(iter(self._outstanding), None)
        if oldest is not None and oldest.is_late(now):
            self._group.abort(self._progress.late_error(self._group, oldest.operation))
        return bool(self._outstanding)

    def fail(self, error: DistributedError) -> None:
        """End the group for what the watch was told."""
        self._group.abort(error)
        self.end()

    def _look(self) -> None:
        with self._looking:
            while self._outstanding and self._outstanding[0].end.query():
                self._outstanding.popleft()

    def end(self) -> None:
        """Abort the communicator, so that what waits on the GPU for other ranks ends; the group has failed."""
        self._connection.abort()
        with self._looking:
            for launched in self._outstanding:
                self._keep(launched.kept)
            self._outstanding.clear()

    def release(self, failure: DistributedError | None) -> None:
        """Let go of the communicator, when this rank closes the group.

        Args:
            failure: What the group had failed with before, if it had: then nothing is waited for.
        """
        self._calls.close()
        self._progress.close()
        if failure is None:
            self._connection.release()
        else:
            self.end()

    def _check(self) -> None:
        if self._connection.is_of_parent:
            raise GroupClosedError(
                f"group {self._group.name!r} belongs to the process that this one was forked from: CUDA does not"
                " survive a fork"
            )
        if self._found is not None and self._group.failure is None:
            self._group.abort(self._found)
        failure = self._group.failure
        if failure is not None:
            raise failure.fresh()

    def _worded(self, error: NcclError) -> NcclError:
        return NcclError(
            f"{error.message} on rank {self._group.rank} of group {self._group.name!r}. NCCL_DEBUG=WARN tells more.",
            ranks=(self._group.rank,),
        )

    @contextlib.contextmanager
    def _ended_by(self, call: CollectiveSignature | str) -> Iterator[None]:
        """End the group for what ends a launch on this rank: the others count on it, and the GPU may wait for them."""
        try:
            yield
        except (BackendUnavailable, GroupClosedError):
            raise  # the one on all ranks, before any has launched; the other where nothing is left to end
        except DistributedError as error:
            told = self._worded(error) if isinstance(error, NcclError) else error
            self._group.abort(told)
            self.end()
            raise (self._group.failure or told).fresh() from None
        except BaseException as error:
            self._group.abort(left_reason(self._group.rank, call, error))
            self.end()
            raise


def _report(launcher: Callable[[], StreamExecutor | None], error: DistributedError) -> None:
    found = launcher()
    if found is not None:
        found.note(error)


def _num_called_by(launcher: Callable[[], StreamExecutor | None]) -> int:
    found = launcher()
    return 0 if found is None else found.num_called
