"""One group's work on its GPUs: where it is put on a stream, kept track of, and ended.

[Note: launching]
`Launcher.launch` puts work on the group's stream and returns: no rank waits for another there. Whatever thread comes,
work goes out in the order of the places that `reserve` gave, the same on all ranks, for NCCL matches by order alone.
A *launched* operation is kept until the GPU has come past its end. Before its own work, the stream waits for what the
caller's stream has been given; after it, the caller's stream waits for it, unless the operation was begun with
`begin_async`: then `Enqueued.wait_on_stream` does that.

What is launched asynchronously keeps its tensors until it has ended, for torch's allocator would otherwise give their
memory to others when the caller lets go of them. Synchronous work needs that not: the caller's stream, on which memory
is used again, is behind it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from ferrodist.backends.call import MAX_PAYLOAD, Call
from ferrodist.backends.nccl.call_ring import CallRing
from ferrodist.backends.nccl.communicator import NcclError
from ferrodist.backends.nccl.launched import Enqueued, Launched, Launching
from ferrodist.backends.nccl.progress import Progress
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    BackendUnavailable,
    DistributedError,
    DistributedTimeoutError,
    GroupClosedError,
    UnsupportedOpError,
    describe_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from ferrodist.backends.base import Backend
    from ferrodist.backends.nccl.communicator import Communicator, Library
    from ferrodist.backends.nccl.streams import Stream, Streams
    from ferrodist.backends.nccl.watch import Watch

    Work = Callable[["Lane"], None]

__all__ = ["Lane", "Launcher"]

_NUM_QUICK_LOOKS = 100
_FIRST_PAUSE_SECONDS = 20e-6
_LONGEST_PAUSE_SECONDS = 1e-3
_LOOK_SECONDS = 0.05
_ABORT_SECONDS = 2.0
"""How long the end of a group waits for a thread that is launching, which sees the end by itself."""

_FINALIZE_SECONDS = 5.0
"""How long closing a group waits for other ranks to take what this one sends; then it lets go all the same."""


class Lane:
    """What work is given: the communicator, and the stream to put it on.

    ``grouped`` calls to NCCL go to the GPU as one. When it returns they are on the stream: torch may put more there.
    """

    def __init__(self, communicator: Communicator, stream: Stream, await_ready: Callable[[], None]) -> None:
        self.communicator = communicator
        self.stream = stream.cuda_stream
        self._await_ready = await_ready

    def grouped(self, call: Callable[[Communicator, int], None]) -> None:
        """Have ``call(communicator, stream)`` ask NCCL for any number of operations."""
        with self.communicator.group():
            call(self.communicator, self.stream)
        self._await_ready()


class Launcher:
    """Puts a group's work on its stream; see [Note: launching].

    The communicator is made when the first work comes, on the GPU that it is for: making a group takes no memory of a
    GPU. All ranks then compare that they come to it with the same call, and whether each has NCCL.

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
        watch: Watch,
        stream: Stream | None = None,
    ) -> None:
        self._group = group
        self._library = library
        self._streams = streams
        self.watch = watch
        self._stream = stream
        self._turn = threading.Condition()
        self._num_reserved = self._num_begun = self.num_called = 0
        self._launching = threading.RLock()
        self._lane: Lane | None = None
        self._device: torch.device | None = None
        self._communicator: Communicator | None = None
        self._outstanding: deque[Launched] = deque()
        self._looking = threading.Lock()
        self._local = threading.local()
        # The group's listeners keep these for as long as it lasts: they must not keep a group that was dropped.
        self._calls = CallRing(group, self.reporter())
        self._progress = Progress(group, partial(_num_called_by, weakref.ref(self)))
        self._now: tuple[Launching, Deadline] | None = None  # what is being launched
        self._found: DistributedError | None = None  # what comparisons have found, and the watch not yet told
        self._process = os.getpid()

    def reporter(self) -> Callable[[DistributedError], None]:
        """What takes errors that end the group, in any thread."""
        return partial(_report, weakref.ref(self))

    # Places.

    def reserve(self) -> int:
        """Take the next position among the group's collectives."""
        with self._turn:
            self._num_reserved += 1
            return self._num_reserved - 1

    def await_turn(self, sequence: int, deadline: Deadline | None = None) -> None:
        """Return when all before have been launched, or the group has ended."""
        with self._turn:
            while self._num_begun < sequence and self._group.failure is None:
                self._turn.wait(_LOOK_SECONDS if deadline is None else min(_LOOK_SECONDS, deadline.remaining()))
                if deadline is not None and deadline.expired:
                    raise DistributedTimeoutError(
                        f"operation {sequence} on group {self._group.name!r}: operations that other threads began"
                        f" before it were not launched within {deadline.timeout:g} s"
                    )

    def _pass_turn(self, sequence: int) -> None:
        with self._turn:
            self._num_begun = max(self._num_begun, sequence + 1)
            self._turn.notify_all()

    # Work.

    def launch(
        self,
        call: Call,
        tensors: Sequence[torch.Tensor],
        work: Work,
        *,
        timeout: float,
        sequence: int,
    ) -> None:
        """Put a collective's work on the stream.

        Args:
            call: What the other ranks must call, too.
            tensors: What the work reads and writes.
            work: Puts it on the stream of the lane that it is given.
            timeout: Seconds from when the GPU has come to it.
            sequence: Its place.
        """
        deadline = Deadline(timeout)
        call = call.at(sequence)
        operation = Launching(what=call, sequence=sequence, timeout=timeout)
        with self._ended_by(call):
            self.await_turn(sequence, deadline)
            try:
                with self._launching:
                    self._check()
                    self._now = operation, deadline
                    lane = self.open(tensors[0].device, call, deadline)
                    self.num_called = sequence + 1
                    self._calls.tell(self._group, call)
                    self._put(operation, tensors, work, lane)
            finally:
                self._pass_turn(sequence)

    def launch_message(
        self, what: str, tensors: Sequence[torch.Tensor], work: Work, *, timeout: float, peers: Sequence[int]
    ) -> None:
        """Put messages on the stream, which have no place among the collectives; ``peers`` are the other sides."""
        deadline = Deadline(timeout)
        operation = Launching(what=what, timeout=timeout, peers=tuple(peers))
        with self._ended_by(what), self._launching:
            self._check()
            self._now = operation, deadline
            lane = self.open(tensors[0].device, Call(operation="messages"), deadline)
            self._put(operation, tensors, work, lane)

    def catch_up(self, device: torch.device) -> None:
        """Put the caller's stream behind all that has been launched."""
        self._streams.current(device).wait_event(self._streams.record(self._stream_on(device)))

    def agree(self, operation: str, payload: bytes, *, timeout: float, sequence: int) -> list[bytes]:
        """Have all ranks give each other bytes on the host, in their turn."""
        deadline = Deadline(timeout)
        with self._ended_by(operation):
            self.await_turn(sequence, deadline)
            try:
                self._check()
                return self._share(operation, payload, deadline.remaining())
            finally:
                self._pass_turn(sequence)

    def begin_async(self) -> None:
        """From now to `end_async` this thread's stream is not put behind what it launches."""
        assert getattr(self._local, "started", None) is None
        self._local.started = []

    def end_async(self) -> Enqueued:
        """What has been launched since `begin_async`."""
        started: list[Launched] = self._local.started
        self._local.started = None
        return Enqueued(
            started,
            self._streams,
            self._device,
            failure=lambda: self.failure or self._found,
            is_compared=self._calls.is_compared,
        )

    def note(self, error: DistributedError) -> None:
        """Have the group end for what a comparison has found: who found it must not block."""
        self._found = error
        self.watch.report(self, error)

    @property
    def failure(self) -> DistributedError | None:
        """What the group has failed with."""
        return self._group.failure

    @property
    def has_outstanding(self) -> bool:
        """Whether something has been launched whose end has not been seen."""
        return bool(self._outstanding)

    def _put(self, operation: Launching, tensors: Sequence[torch.Tensor], work: Work, lane: Lane) -> None:
        device = tensors[0].device
        self._streams.check(device)
        stream, caller = self._stream_on(device), self._streams.current(device)
        is_elsewhere = stream.cuda_stream != caller.cuda_stream
        started: list[Launched] | None = getattr(self._local, "started", None)
        with self._streams.on(stream):
            if is_elsewhere:
                stream.wait_event(self._streams.record(caller))
            start = self._streams.record(stream)
            work(lane)
            end = self._streams.record(stream)
        if is_elsewhere and started is None:
            caller.wait_event(end)
        launched = Launched(operation, start=start, end=end, kept=() if started is None else tuple(tensors))
        if started is not None:
            started.append(launched)
        self._outstanding.append(launched)
        self.watch.look_after(self)

    def _stream_on(self, device: torch.device) -> Stream:
        if self._stream is None:
            self._stream = self._streams.make(device)
        return self._stream

    # The communicator.

    def open(self, device: torch.device, call: Call, deadline: Deadline) -> Lane:
        """The lane, made with the other ranks when this is the first work of the group."""
        with self._launching:
            if self._lane is None:
                self._lane = self._open(device, call, deadline)
            if device != self._device:
                raise UnsupportedOpError(
                    f"{call} on group {self._group.name!r}: rank {self._group.rank} uses {self._device} in this group,"
                    f" and was given a tensor on {device}. A rank has one GPU in a group: call"
                    " torch.cuda.set_device(local_rank) first, and make tensors there."
                )
            return self._lane

    def _open(self, device: torch.device, call: Call, deadline: Deadline) -> Lane:
        self._streams.check(device)
        group = self._group
        library, reason, unique_id = None, "", b""
        try:
            library = self._library()
            if group.rank == 0:
                unique_id = library.unique_id()
        except DistributedError as error:
            reason = describe_error(error)
        half = MAX_PAYLOAD - 1
        head = b"\0" + reason.encode()[:half] if reason else b"\1" + unique_id[:half]
        said = self._share(call.operation, head, deadline.remaining(), what="on GPUs")
        without = [rank for rank, answer in enumerate(said) if answer[:1] != b"\1"]
        if without:
            raise BackendUnavailable(
                f"{call} on group {group.name!r}: rank {without[0]} has no NCCL:"
                f" {reason or said[without[0]][1:].decode(errors='replace')}",
                ranks=tuple(without),
            )
        rest = self._share("unique id of NCCL", unique_id[half:], deadline.remaining())
        assert library is not None
        communicator = library.open(said[0][1:] + rest[0], group.rank, group.world_size, device)
        self._communicator, self._device = communicator, device
        self._finalizer = weakref.finalize(self, communicator.abort)
        self._finalizer.atexit = False
        self._calls.open(group)
        self._progress.open(group)
        self._await_ready(communicator)
        return Lane(communicator, self._stream_on(device), partial(_await_launch, weakref.ref(self)))

    def _share(self, operation: str, payload: bytes, timeout: float, *, what: str = "") -> list[bytes]:
        """As `Collectives.share`, by what compares the calls of the group's host."""
        engine = self._group.collectives
        if engine is None:
            return self._group.agreement.reach(Call(operation=operation, reduce_op=what, payload=payload), timeout)
        name = f"{operation} {what}" if what else operation
        shared: list[bytes] = engine.share(name, payload, timeout=timeout, sequence=engine.reserve())
        return shared

    def await_launch(self) -> None:
        """Return when NCCL has put on the stream what it was asked for."""
        assert self._communicator is not None
        self._await_ready(self._communicator)

    def _await_ready(self, communicator: Communicator) -> None:
        """Return when what was begun is there; in a failed group, or when another rank is late, it never is."""
        assert self._now is not None
        operation, deadline = self._now
        for pause in _pauses():
            if communicator.is_ready():
                return
            self._check()
            if deadline.expired:
                raise self._progress.late_error(self._group, operation)
            time.sleep(pause)

    # Ends.

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until all that was launched has ended, and been compared."""
        deadline = Deadline(self._group.timeout if timeout is None else timeout)
        for pause in _pauses():
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
        error = self._nccl_error()
        if error is not None:
            self._group.abort(error)
        if self._group.failure is not None:
            self.end()
            return False
        self._look()
        oldest = next(iter(self._outstanding), None)
        if oldest is not None and oldest.is_late(now):
            self._group.abort(self._progress.late_error(self._group, oldest.operation))
        return bool(self._outstanding)

    def _nccl_error(self) -> NcclError | None:
        """What NCCL has failed with, as far as that can be asked now.

        Only one thread at a time may ask: that also ends what the question finds to be done.
        """
        if self._group.failure is not None or not self._launching.acquire(blocking=False):
            return None  # who launches asks, too
        try:
            if self._communicator is not None:
                self._communicator.is_ready()
        except NcclError as error:
            return self._worded(error)
        finally:
            self._launching.release()
        return None

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
        has_lock = self._launching.acquire(timeout=_ABORT_SECONDS)
        try:
            communicator = self._take_communicator()
            if communicator is not None:
                communicator.abort()
            with self._looking:
                self._outstanding.clear()
        finally:
            if has_lock:
                self._launching.release()

    def release(self, failure: DistributedError | None) -> None:
        """Let go of the communicator: when what it sends has been taken, or was not in time, or the group has failed.

        Args:
            failure: What the group had failed with before this rank closed it, if it had.
        """
        self._calls.close()
        self._progress.close()
        if failure is not None:
            self.end()
            return
        with self._launching:
            communicator = self._take_communicator()
            if communicator is None:
                return
            if self._finalize(communicator):
                communicator.destroy()
            else:
                communicator.abort()

    def _take_communicator(self) -> Communicator | None:
        """The communicator, for who ends it: once, and not in a forked child, where CUDA does not work."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            self._finalizer.detach()
        return communicator if self._process == os.getpid() else None

    def _finalize(self, communicator: Communicator) -> bool:
        deadline = Deadline(_FINALIZE_SECONDS)
        try:
            communicator.finalize()
            for pause in _pauses():
                if communicator.is_ready():
                    return True
                if deadline.expired:
                    break
                time.sleep(pause)
        except NcclError:
            pass
        return False

    def _check(self) -> None:
        if self._process != os.getpid():
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
    def _ended_by(self, call: Call | str) -> Iterator[None]:
        """End the group for what ends a launch on this rank: the others count on it."""
        try:
            yield
        except BackendUnavailable:
            raise  # all ranks raise it, before any has launched
        except DistributedError as error:
            told = self._worded(error) if isinstance(error, NcclError) else error
            self._group.abort(told)
            raise (self._group.failure or told).fresh() from None
        except BaseException as error:
            self._group.abort(f"rank {self._group.rank} left {call} by {type(error).__name__}")
            raise


def _report(launcher: Callable[[], Launcher | None], error: DistributedError) -> None:
    found = launcher()
    if found is not None:
        found.note(error)


def _num_called_by(launcher: Callable[[], Launcher | None]) -> int:
    found = launcher()
    return 0 if found is None else found.num_called


def _await_launch(launcher: Callable[[], Launcher | None]) -> None:
    found = launcher()
    assert found is not None
    found.await_launch()


def _pauses() -> Iterator[float]:
    """Seconds between looks at what no thread can wait for: none at first, then more and more."""
    pause = _FIRST_PAUSE_SECONDS
    for _ in range(_NUM_QUICK_LOOKS):
        yield 0.0
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
