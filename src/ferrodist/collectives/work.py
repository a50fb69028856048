"""Runs prepared collective calls: `execute` in the calling thread, `submit` in the background.

`submit` returns a `PendingCollective`. On the host a group's `OperationQueue` runs it in a thread; an engine that puts
work on a GPU stream is called at once; inside `coalesce` the block collects it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

import msgspec
import torch
from typing_extensions import override

from ferrodist.backends.collective_op import CollectiveKind
from ferrodist.backends.cuda_streams import streams_of
from ferrodist.backends.lifecycle import ExitStage, close_at_exit
from ferrodist.backends.polling import wait_until
from ferrodist.backends.verification import left_reason
from ferrodist.collectives.arguments import bytes_of
from ferrodist.collectives.engines.host import attached_to, host_engine_of
from ferrodist.collectives.engines.select import engine_of
from ferrodist.collectives.graphs import add_to_graph, define_operator
from ferrodist.collectives.host_staging import StreamHandoff
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, DistributedTimeoutError, GroupClosedError
from ferrodist.resource_limits import naming_limits
from ferrodist.torch_private.compilers import is_traced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ferrodist.backends.base import Backend
    from ferrodist.backends.collective_op import CollectiveOp
    from ferrodist.backends.interfaces import CollectiveEngine, HostEngine, StreamEngine, StreamWork

_JOIN_SECONDS = 1.0
"""How long closing a queue waits for its thread, which ends at once unless a call ignores that its group has ended."""

T_co = TypeVar("T_co", covariant=True)

_process = os.getpid()  # cached: getpid is a system call


def _update_process() -> None:
    global _process  # noqa: PLW0603 - one id per process
    _process = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_update_process)


class PendingCollective(ABC, Generic[T_co]):
    """A collective that was started and may not have ended.

    Its input and output must not be changed, and its output not be read, until `wait` has returned. Any number may be
    outstanding; those of one group run in the order in which they were started, which must be the same on all ranks.

    For tensors on a GPU, `wait` also orders the current stream after it, whether or not the host waits for the device.
    """

    def __init__(self, op_name: str, group_name: str) -> None:
        self._op_name = op_name
        self._group_name = group_name
        self._process = _process

    def __repr__(self) -> str:
        state = "done" if self.done() else "under way"
        return f"PendingCollective({self._op_name} on group {self._group_name!r}, {state})"

    @property
    def op_name(self) -> str:
        """The collective's name, such as "allreduce"."""
        return str(self._op_name)  # it may be a CollectiveKind

    @abstractmethod
    def done(self) -> bool:
        """Return whether the collective has ended, successfully or not; `wait` then returns or raises at once."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> T_co:
        """Block until it has ended and return its result. Any number of threads may wait, any number of times.

        Args:
            timeout: Seconds; None waits for as long as the collective may take, counted from the end of those before it
                in the group.

        Raises:
            DistributedTimeoutError: ``timeout`` passed; the collective goes on and may be waited for again.
            DistributedError: The collective failed.
            GroupClosedError: This process was forked after the start: only the parent can wait.
            RuntimeError: The collective was started in a `coalesce` block that has not ended.
        """

    def _check_process(self) -> None:
        """Raise in a forked child, which has no thread that could end it."""
        if self._process != _process:
            raise GroupClosedError(
                f"{self._op_name} on group {self._group_name!r} belongs to the process that this one was forked from:"
                " wait for it there"
            )

    def _still_running(self, timeout: float | None) -> DistributedTimeoutError:
        return DistributedTimeoutError(
            f"{self._op_name} on group {self._group_name!r} is still under way after {timeout:g} s: wait for it again"
        )


class _StartedCollective(PendingCollective[T_co]):
    """A collective whose first `wait` makes the user's result."""

    def __init__(self, op_name: str, group_name: str) -> None:
        super().__init__(op_name, group_name)
        self._lock = threading.Lock()
        self._finish: Callable[[], T_co] | None = None
        self._result: T_co | None = None
        self._error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """End it with an error."""
        self._error = error

    def _get_result(self, order: Callable[[], None] | None) -> T_co:
        """Call ``order()``, which orders the current stream after the collective, and return the result."""
        with self._lock:
            if order is not None:  # each time: another thread has another current stream
                order()
            if self._finish is not None:
                # In the waiting thread: it records autograd history, which belongs to the thread that goes on with it.
                self._result = self._finish()
                self._finish = None
        return self._result  # type: ignore[return-value]


class ThreadCollective(_StartedCollective[T_co]):
    """A collective that an `OperationQueue` runs."""

    def __init__(self, op_name: str, group_name: str) -> None:
        super().__init__(op_name, group_name)
        self._ended = threading.Event()
        self.is_started = True  # False inside a `coalesce` block
        self.fused_into: PendingCollective[object] | None = None  # ends and fails with this one
        self._order: Callable[[], None] | None = None

    @override
    def done(self) -> bool:
        return self._ended.is_set() and (self.fused_into is None or self.fused_into.done())

    @override
    def wait(self, timeout: float | None = None) -> T_co:
        self._check_process()
        if not self.is_started:
            raise RuntimeError(f"{self._op_name} starts when the coalesce() block ends: wait for it after the block")
        if not self._ended.wait(None if timeout is None else Deadline(timeout).remaining()):
            raise self._still_running(timeout)
        if self._error is not None:
            raise self._error.fresh() if isinstance(self._error, DistributedError) else self._error
        if self.fused_into is not None:
            self.fused_into.wait(timeout)
        return self._get_result(self._order)

    def succeed(self, finish: Callable[[], T_co], *, order: Callable[[], None] | None = None) -> None:
        """End it: the first `wait` calls ``finish`` for the result; each one calls ``order``, for its stream."""
        self._order = order
        self._finish = finish
        self._ended.set()

    @override
    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self._ended.set()


class StreamCollective(_StartedCollective[T_co]):
    """A collective on a GPU stream: `wait` orders the current stream after it, and with a timeout the host waits."""

    _work: StreamWork | None = None

    @override
    def done(self) -> bool:
        return self._error is not None or self._work is None or self._work.error is not None or self._work.done()

    @override
    def wait(self, timeout: float | None = None) -> T_co:
        """Order the current stream after it and return its result; see `PendingCollective.wait`.

        Errors of other ranks may be raised later, by `Backend.synchronize` or the next call in the group; with a
        ``timeout`` they are raised here.
        """
        self._check_process()
        # Streams are polled: there is no wait with a timeout.
        if timeout is not None and not wait_until(self.done, Deadline(timeout)):
            raise self._still_running(timeout)
        error = self._error or (None if self._work is None else self._work.error)
        if error is not None:
            raise error.fresh() if isinstance(error, DistributedError) else error
        return self._get_result(None if self._work is None else self._work.wait_on_stream)

    def succeed(self, work: StreamWork, finish: Callable[[], T_co]) -> None:
        """Set the work, now that it is on a stream; the first `wait` calls ``finish()`` for the result."""
        self._work = work
        self._finish = finish


class OperationQueue:
    """Runs the submitted collectives of one group in a thread, first in, first out; ends with the group."""

    _KEY = "collectives.queue"

    def __init__(self, group: Backend) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"ferrodist-queue-{group.name}", daemon=True)
        with naming_limits(f"the operations of group {group.name!r} have no thread", kind=DistributedError):
            self._thread.start()
        # The interpreter kills daemon threads, which in the middle of torch's code aborts the process; so the queues of
        # groups that were never closed are stopped first.
        close_at_exit(ExitStage.OPERATION_QUEUES, self)
        group.on_close(self.close)
        weakref.finalize(group, self.stop).atexit = False  # a group that nobody closed

    @classmethod
    def of(cls, group: Backend) -> OperationQueue:
        """The group's queue, made when first needed."""
        return attached_to(group, cls._KEY, cls)

    @classmethod
    def find(cls, group: Backend) -> OperationQueue | None:
        """The group's queue, if there is one."""
        return group.attachments.get(cls._KEY)

    def submit(self, reserve: Callable[[], int], job: Callable[[int], None]) -> None:
        """Reserve a position among the group's collectives and queue ``job(sequence)``, which must not raise.

        Both under one lock: otherwise two threads could queue a pair of collectives in another order than on other
        ranks, which would deadlock.
        """
        with self._lock:
            sequence = reserve()
            if not self._closed:
                self._jobs.put(partial(job, sequence))
                return
        job(sequence)  # the group is closed, so the job fails at once

    def stop(self) -> None:
        """Let the thread end after the queued jobs, without waiting for it."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)

    def close(self, timeout: float | None = _JOIN_SECONDS) -> None:
        """End the thread after the queued jobs, which in a closed group fail at once; None waits without a limit."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            job()
            del job  # or a result would live until the next job comes


T = TypeVar("T")


class CollectiveCall(msgspec.Struct, Generic[T_co], frozen=True, kw_only=True, eq=False):
    """A collective call, ready to run."""

    op: CollectiveOp
    group: Backend
    engine: CollectiveEngine
    run: Callable[[int], object] | None = None  # at a position among the group's collectives; None runs `op` as it is
    finish: Callable[[], T_co]  # makes the user's result, in the thread that waits for it


class CoalescingContext(Protocol):
    """Collects calls inside a `coalesce` block, in place of the queue."""

    def collect(self, prepared: CollectiveCall[object]) -> PendingCollective[object]:
        """Collect a call and return its handle."""

    def check_open(self, name: str) -> None:
        """Raise RuntimeError when ``name`` is called in a copy of the context of a block that has ended."""


collector: ContextVar[CoalescingContext | None] = ContextVar("ferrodist_collector", default=None)
"""The `coalesce` block that the caller is in, if any."""


def refuse_in_coalesce(name: str) -> None:
    """Raise RuntimeError inside a `coalesce` block: a blocking call would need a result that is not there yet."""
    block = collector.get()
    if block is not None:
        block.check_open(name)
        raise RuntimeError(
            f"{name} inside coalesce() must be async_{name}, if there is one: its result is there when the"
            " block has ended"
        )


def run_at(prepared: CollectiveCall[object], sequence: int) -> None:
    """Run a call at a position among the group's collectives."""
    op = prepared.op
    if prepared.run is not None:
        prepared.run(sequence)
        return
    if op.kind is CollectiveKind.BROADCAST and op.source.data_ptr() != op.out.data_ptr():
        op.out.copy_(op.source)
    prepared.engine.run(op, sequence)


def _run(prepared: CollectiveCall[object], sequence: int) -> None:
    """Run a call in inference mode: inference tensors can only be written to there, other tensors everywhere."""
    try:
        with torch.inference_mode():
            run_at(prepared, sequence)
    except DistributedError:
        raise
    except BaseException as error:
        prepared.group.abort(left_reason(prepared.group.rank, prepared.op.operation, error))
        raise


def execute(prepared: CollectiveCall[T]) -> T:
    """Run a call in the calling thread; calls that were submitted before may still be running."""
    refuse_in_coalesce(prepared.op.operation)
    if prepared.op.source is not None and is_traced(prepared.op.source):
        add_to_graph(prepared.op, prepared.group)
    else:
        _run(prepared, prepared.engine.reserve())
    return prepared.finish()


def complete(prepared: CollectiveCall[T], elements: Iterable[bytes | memoryview]) -> T:
    """Finish a call without running it: the elements of its output, part after part, have come otherwise."""
    if prepared.op.out is not None:
        with torch.inference_mode():
            bytes_of(prepared.op.out)[:] = b"".join(elements)
    return prepared.finish()


def _run_in_graph(op: CollectiveOp, group: Backend) -> None:
    """Run a call that a compiled graph contains."""
    execute(CollectiveCall(op=op, group=group, engine=engine_of(group, op.tensor.device), finish=lambda: None))


define_operator(_run_in_graph)


def submit(prepared: CollectiveCall[T]) -> PendingCollective[T]:
    """Start a call: its position among the group's collectives is reserved now."""
    block = collector.get()
    if block is not None:
        return block.collect(prepared)  # type: ignore[return-value]
    engine = prepared.engine
    if prepared.op.source is not None and is_traced(prepared.op.source):
        raise NotImplementedError(
            f"async_{prepared.op.operation} in a graph that a compiler traces: call {prepared.op.operation}"
        )
    if getattr(engine, "enqueue", False):
        return _enqueue(prepared, cast("StreamEngine", engine))
    pending: ThreadCollective[T] = ThreadCollective(prepared.op.operation, prepared.group.name)
    if prepared.group.failure is not None:
        _run_job(prepared, pending, None, engine.reserve())  # it fails, and so do the calls that were fused into it
        return pending
    device = prepared.op.device
    handoff = None if device is None or device.type == "cpu" else StreamHandoff(streams_of(device))
    OperationQueue.of(prepared.group).submit(engine.reserve, partial(_run_job, prepared, pending, handoff))
    return pending


def wait_for_started(group: Backend) -> None:
    """Wait until all collectives that were started in a group have ended; no more may be started."""
    operations = OperationQueue.find(group)
    if operations is not None:
        operations.close(timeout=None)
    engine = host_engine_of(group)
    engine.await_turn(engine.reserve())


def _run_job(
    prepared: CollectiveCall[T], pending: ThreadCollective[T], handoff: StreamHandoff | None, sequence: int
) -> None:
    """Run a call and set its outcome in ``pending``; does not raise."""
    try:
        with contextlib.nullcontext() if handoff is None else handoff.running():
            cast("HostEngine", prepared.engine).await_turn(sequence)
            _run(prepared, sequence)
    except BaseException as error:  # noqa: BLE001 - wait() raises it
        pending.fail(error)
    else:
        pending.succeed(prepared.finish, order=None if handoff is None else handoff.wait_on_stream)


def _enqueue(prepared: CollectiveCall[T], engine: StreamEngine) -> PendingCollective[T]:
    """Put a call on a stream in the calling thread, which does not block."""
    pending: StreamCollective[T] = StreamCollective(prepared.op.operation, prepared.group.name)
    engine.begin_async()
    try:
        _run(prepared, engine.reserve())
    except Exception as error:  # noqa: BLE001 - wait() raises it
        engine.end_async()
        pending.fail(error)
    except BaseException:
        engine.end_async()
        raise
    else:
        pending.succeed(engine.end_async(), prepared.finish)
    return pending
