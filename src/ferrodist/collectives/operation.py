"""One collective call as a value: what runs it, now or later, and what its result is."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

import torch

from ferrodist.backends.agreement import left_reason
from ferrodist.collectives.device_streams import Handover, streams_of
from ferrodist.collectives.host_engine import collectives_of
from ferrodist.collectives.pending import EnqueuedCollective, OperationQueue, PendingCollective, QueuedCollective
from ferrodist.errors import DistributedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend
    from ferrodist.collectives.engine import Collectives, EnqueuingCollectives, TensorCollectives

__all__ = [
    "Collector",
    "Fusible",
    "Operation",
    "collector",
    "refuse_in_coalesce",
    "run_later",
    "run_now",
    "wait_for_started",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusible:
    """What operations of one kind need to travel as one: same ``key``, inputs and outputs laid end to end.

    Args:
        key: Equal for operations that can be fused.
        source: The flat input.
        out: The flat output.
        run: ``run(out, source, timeout, sequence)`` does the operation on other tensors, in other time.
    """

    key: tuple[object, ...]
    source: torch.Tensor
    out: torch.Tensor
    run: Callable[[torch.Tensor, torch.Tensor, float, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(Generic[T]):
    """A checked call.

    Args:
        name: The collective's name.
        group: Where it runs.
        engine: What runs it.
        device: Where its tensors are; None when it has none.
        timeout: Seconds that `run` may take.
        run: ``run(sequence)`` blocks until it is done, or with some engines until it is on a stream.
        finish: Makes the user's result, once `run` has returned; in the user's thread.
        fusible: How it can be joined with others of its kind, or None.
    """

    name: str
    group: Backend
    engine: TensorCollectives
    device: torch.device | None
    timeout: float
    run: Callable[[int], None]
    finish: Callable[[], T]
    fusible: Fusible | None = None


class Collector(Protocol):
    """Takes operations in place of the queue."""

    def collect(self, operation: Operation[object]) -> PendingCollective[object]:
        """Take it, and return its handle."""

    def check_open(self, name: str) -> None:
        """Raise RuntimeError when ``name`` is called in a copy of the context of a block that has ended."""


collector: ContextVar[Collector | None] = ContextVar("ferrodist_collector", default=None)
"""Set inside a `coalesce` block."""


def refuse_in_coalesce(name: str) -> None:
    """Raise RuntimeError inside a `coalesce` block: a blocking call would need a result that is not there yet."""
    block = collector.get()
    if block is not None:
        block.check_open(name)
        raise RuntimeError(
            f"{name} inside coalesce() must be async_{name}, if there is one: its result is there when the"
            " block has ended"
        )


def _run(operation: Operation[T], sequence: int) -> None:
    """Run it, in whatever thread, so that it may write to any tensor.

    What a caller makes inside of `torch.inference_mode` can only be written to inside of it, and what was made outside
    everywhere.
    """
    try:
        with torch.inference_mode():
            operation.run(sequence)
    except DistributedError:
        raise
    except BaseException as error:
        operation.group.abort(left_reason(operation.group.rank, operation.name, error))
        raise


def run_now(operation: Operation[T]) -> T:
    """Run in the calling thread. Operations that were started before may still be under way: they don't mix."""
    refuse_in_coalesce(operation.name)
    _run(operation, operation.engine.reserve())
    return operation.finish()


def run_later(operation: Operation[T]) -> PendingCollective[T]:
    """Start it: its place among the group's collectives is taken now."""
    block = collector.get()
    if block is not None:
        return block.collect(operation)  # type: ignore[arg-type, return-value]
    engine = operation.engine
    if getattr(engine, "enqueue", False):
        return _enqueue(operation, cast("EnqueuingCollectives", engine))
    pending: QueuedCollective[T] = QueuedCollective(operation.name, operation.group.name)
    if operation.group.failure is not None:
        _run_job(operation, pending, None, engine.reserve())  # it fails, and with it all that were joined into it
        return pending
    on_host = operation.device is None or operation.device.type == "cpu"
    handover = None if on_host or operation.device is None else Handover(streams_of(operation.device))
    OperationQueue.of(operation.group).submit(engine.reserve, partial(_run_job, operation, pending, handover))
    return pending


def wait_for_started(group: Backend) -> None:
    """Return when all that was started in a group has ended, well or not; no more may start in it."""
    operations = OperationQueue.find(group)
    if operations is not None:
        operations.close(timeout=None)
    engine = collectives_of(group)
    engine.await_turn(engine.reserve())


def _run_job(operation: Operation[T], pending: QueuedCollective[T], handover: Handover | None, sequence: int) -> None:
    """Run an operation for who waits for ``pending``; it does not raise."""
    try:
        with contextlib.nullcontext() if handover is None else handover.running():
            cast("Collectives", operation.engine).await_turn(sequence)
            _run(operation, sequence)
    except BaseException as error:  # noqa: BLE001 - it is raised in wait()
        pending.fail(error)
    else:
        pending.succeed(operation.finish, order=None if handover is None else handover.take)


def _enqueue(operation: Operation[T], engine: EnqueuingCollectives) -> PendingCollective[T]:
    """Put it on a stream, in the calling thread: no other one is needed, for that waits for nobody."""
    pending: EnqueuedCollective[T] = EnqueuedCollective(operation.name, operation.group.name)
    engine.begin_async()
    try:
        _run(operation, engine.reserve())
    except Exception as error:  # noqa: BLE001 - it is raised in wait()
        engine.end_async()
        pending.fail(error)
    except BaseException:
        engine.end_async()
        raise
    else:
        pending.succeed(engine.end_async(), operation.finish)
    return pending
