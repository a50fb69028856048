"""How collectives of torch's groups go: at once or in a thread, in an order for each depth of callbacks.

What torch's functions return when they don't wait.

What a group waits for before it is left.

torch's messages: a tensor's elements as bytes, in the order of its dims.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections import deque
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ferrodist.backends.cuda import record_use_on_streams, streams_of
from ferrodist.backends.subgroup import SubBackend
from ferrodist.backends.tags import ANY_SOURCE
from ferrodist.collectives.arguments import bytes_of
from ferrodist.collectives.cuda import StreamHandoff
from ferrodist.collectives.engines.gpu_staged import HostStagedP2P
from ferrodist.collectives.engines.host import host_engine_of
from ferrodist.collectives.engines.select import engine_of
from ferrodist.collectives.work import Operation, run_later, run_now, wait_for_started
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, DistributedTimeoutError, describe_error
from ferrodist.torch_backend.futures import ResultFuture, SerialQueue, ThreadPool, here
from ferrodist.torch_backend.layouts import Target, source_of
from ferrodist.torch_private.compilers import not_compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import FrameType

    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import Request
    from ferrodist.collectives.engines.base import CollectiveEngine
    from ferrodist.collectives.work import PendingCollective
    from ferrodist.torch_backend.collectives import CheckedCall

_NO_TIMEOUT = timedelta(0)


def seconds_of(timeout: timedelta | None) -> float | None:
    """A timeout of torch's in seconds; None where it means none, which it says by 0 or less."""
    if timeout is None or timeout <= _NO_TIMEOUT:
        return None
    return timeout.total_seconds()


def tensors_in(results: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors of results, some of which are lists of them."""
    found: list[Any] = []
    for each in results:
        found += tensors_in(each) if isinstance(each, (list, tuple)) else [each]
    return [each for each in found if isinstance(each, torch.Tensor)]


@not_compiled
class FerrodistWork(dist.Work):
    """Something that is under way.

    Args:
        results: What it gives.
        threads: Of its group.
    """

    def __init__(self, results: list[Any], threads: ThreadPool) -> None:
        super().__init__()
        self.results = results
        self.threads = threads
        self._future: ResultFuture | None = None

    # What the kinds of it differ in.

    def has_ended(self) -> bool:
        """Whether it has ended, well or not."""
        raise NotImplementedError

    def wait_for(self, seconds: float | None) -> None:
        """Wait until it has ended, and raise what it has failed with."""
        raise NotImplementedError

    def tell(self, settle: Callable[[], None]) -> None:
        """Have something called, not by an engine's thread, when it has ended or is about to."""
        raise NotImplementedError

    # What torch calls.

    def wait(self, timeout: timedelta | None = _NO_TIMEOUT) -> bool:
        """Return when it has ended; raises what it has failed with.

        Raises:
            DistributedTimeoutError: ``timeout`` passed; it goes on and may be waited for again.
        """
        self.wait_for(seconds_of(timeout))
        return True

    def end(self) -> list[Any]:
        """Wait until it has ended, and give what it came to."""
        self.wait_for(None)
        return self.results

    def get_future(self) -> torch.futures.Future[Any]:
        """Its results as a future; made when first asked for."""
        if self._future is None:
            devices: list[int | str | torch.device] = [each.device for each in tensors_in(self.results) if each.is_cuda]
            future = self._future = ResultFuture(self.threads, devices)
            if self.has_ended():  # then it is done at once, which torch's reducer counts on
                future.settle(self.end)
            else:
                self.tell(lambda: future.settle(self.end))
        return self._future

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self.has_ended()

    def is_success(self) -> bool:
        """Whether it has ended, and well."""
        return self.has_ended() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What it has failed with, if it has."""
        if not self.has_ended():
            return None
        try:
            self.wait_for(None)
        except Exception as error:  # noqa: BLE001 - it is given back
            return error
        return None

    def result(self) -> list[Any]:
        """Its results; waits for them."""
        return self.end()

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()


@not_compiled
class DoneWork(FerrodistWork):
    """What has ended before its call returned."""

    def has_ended(self) -> bool:
        """See `FerrodistWork`."""
        return True

    def wait_for(self, seconds: float | None) -> None:
        """See `FerrodistWork`."""

    def tell(self, settle: Callable[[], None]) -> None:
        """See `FerrodistWork`."""
        settle()


@not_compiled
class CollectiveWork(FerrodistWork):
    """A collective that was started.

    Args:
        pending: It.
        results: What it gives.
        threads: Of its group.
        line: Of those that end in the order in which they were started.
    """

    def __init__(
        self, pending: PendingCollective[Any], results: list[Any], threads: ThreadPool, line: SerialQueue
    ) -> None:
        super().__init__(results, threads)
        self._pending = pending
        self._line = line

    def has_ended(self) -> bool:
        """See `FerrodistWork`."""
        return self._pending.done()

    def wait_for(self, seconds: float | None) -> None:
        """See `FerrodistWork`."""
        self._pending.wait(seconds)

    def tell(self, settle: Callable[[], None]) -> None:
        """See `FerrodistWork`."""
        self._line.run(settle, self.threads)


@not_compiled
class JoinedWork(FerrodistWork):
    """Several as one.

    Args:
        works: They, in the order in which they were started.
        threads: Of their group.
    """

    def __init__(self, works: Sequence[FerrodistWork], threads: ThreadPool) -> None:
        super().__init__([result for work in works for result in work.results], threads)
        self._works = works

    def has_ended(self) -> bool:
        """See `FerrodistWork`."""
        return all(work.has_ended() for work in self._works)

    def wait_for(self, seconds: float | None) -> None:
        """See `FerrodistWork`."""
        deadline = None if seconds is None else Deadline(seconds)
        errors = [error for work in self._works if (error := _error_of(work, deadline)) is not None]
        if errors:
            raise errors[0]

    def tell(self, settle: Callable[[], None]) -> None:
        """See `FerrodistWork`."""
        self.threads.run(settle)


def _error_of(work: FerrodistWork, deadline: Deadline | None) -> BaseException | None:
    """Wait for one of several; raises only that it has not ended yet."""
    try:
        work.wait_for(None if deadline is None else deadline.remaining())
    except DistributedTimeoutError as error:
        if not work.has_ended():
            raise
        return error
    except Exception as error:  # noqa: BLE001 - it is raised when all have ended
        return error
    return None


class CallbackStream:
    """Collectives that have an order among each other.

    Args:
        group: What they are called in.
        threads: Who complete their futures.
    """

    __slots__ = ("_line", "_threads", "group")

    def __init__(self, group: Backend, threads: ThreadPool) -> None:
        self.group = group
        self._threads = threads
        self._line = SerialQueue()  # of their ends

    def work_of(self, started: PendingCollective[Any], results: list[Any]) -> CollectiveWork:
        """What torch waits for, of a collective that was started here."""
        return CollectiveWork(started, results, self._threads, self._line)

    def run_all(self, calls: list[CheckedCall], opts: Any) -> CollectiveWork | None:
        """Do calls that are one for the user, whose error and results are the last one's; see `run`."""
        for call in calls:
            if call.device is not None:
                engine_of(self.group, call.device)  # which may refuse, before anything is sent
        if opts.asyncOp:
            return [self.run(call, opts) for call in calls][-1]
        # All of them, as ranks that don't wait do: each takes a place in the group.
        errors = [error for call in calls if (error := self._error_of(call, opts)) is not None]
        if errors:
            raise errors[0]
        return None

    def _error_of(self, call: CheckedCall, opts: Any) -> DistributedError | None:
        try:
            self.run(call, opts)
        except DistributedError as error:
            return error
        return None

    def run(self, call: CheckedCall, opts: Any) -> CollectiveWork | None:
        """Do what was checked: now, which gives None, or by a thread, as the options of torch's say."""
        group = self.group
        engine = host_engine_of(group) if call.device is None else engine_of(group, call.device)
        limit = seconds_of(opts.timeout)
        seconds = group.timeout if limit is None else limit
        operation: Operation[None] = Operation(
            name=call.name,
            group=group,
            engine=engine,
            device=call.device,
            timeout=seconds,
            run=partial(self._run_at, call, engine, seconds),
            finish=call.finish,
        )
        if opts.asyncOp:
            return self.work_of(run_later(operation), call.results)
        run_now(operation)
        return None

    def _run_at(self, call: CheckedCall, engine: CollectiveEngine, seconds: float, place: int) -> None:
        try:
            call.run(engine, seconds, place)
        except DistributedError:
            raise
        except BaseException as error:
            # Others wait for what may not have been called at all: no memory for a copy, an interruption before.
            self.group.abort(f"{call.name} failed with {describe_error(error)}")
            raise


class CallbackStreams:
    """Those of a group, by the depth of the callbacks that call in them: [Note: callbacks] in `completion`.

    Args:
        group: It.
        threads: Its.
    """

    def __init__(self, group: Backend, threads: ThreadPool) -> None:
        self._group = group
        self._threads = threads
        self._lanes = [CallbackStream(group, threads)]
        self._lock = threading.Lock()

    def here(self) -> CallbackStream:
        """Where this thread's collectives go."""
        depth = here.line.depth
        return self._lanes[depth] if depth < len(self._lanes) else self._made(depth)

    @property
    def groups(self) -> list[Backend]:
        """What they are called in, the group itself first."""
        return [lane.group for lane in self._lanes]

    def _made(self, depth: int) -> CallbackStream:
        with self._lock:
            for missing in range(len(self._lanes), depth + 1):
                label = f"callbacks of depth {missing}"
                name = f"{self._group.name}, {label}"
                ranks = range(self._group.world_size)
                beside = SubBackend(self._group, ranks, name=name, label=label, ends_with_parent=True)
                self._lanes.append(CallbackStream(beside, self._threads))
        return self._lanes[depth]


_SEND_SECONDS = 10.0
"""How long messages may take to be received."""

_ENDS = {"shutdown", "_leave_at_exit", "_run_exit_stage", "_run_first_stages"}

_CALLING = ("ferrodist.backends.", "ferrodist.collectives.", "ferrodist.torch_backend.")
_CALLED_BACK = "ferrodist.torch_backend.futures"


def can_drain() -> bool:
    """Whether the caller's caller may wait for what was started: not where an exception is why it leaves.

    Nor in the middle of a call: handlers of signals run there, and what waits for it to go on would do so for ever.
    """
    if sys.exc_info()[1] is not None:
        return False
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the way to it that costs calls nothing
    while frame is not None and frame.f_code.co_name in _ENDS:
        frame = frame.f_back
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_CALLING) and module != _CALLED_BACK:
            return False
        frame = frame.f_back
    return True


class PendingSends:
    """Messages of a group that may not have been received yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: deque[MessageWork] = deque()
        self._limit = 0

    def add(self, work: MessageWork) -> None:
        """Keep one until it has ended, or not much longer."""
        with self._lock:
            while self._works and self._works[0].has_ended():
                self._works.popleft()
            if len(self._works) >= self._limit:  # behind one that has not: seldom, for that looks at all of them
                self._works = deque(each for each in self._works if not each.has_ended())
                self._limit = 2 * len(self._works) + 8
            if not work.has_ended():
                self._works.append(work)

    def finish(self) -> None:
        """Wait for them, not for long."""
        deadline = Deadline(_SEND_SECONDS)
        with self._lock:
            works = list(self._works)
        for work in works:
            with contextlib.suppress(DistributedError):
                work.wait_for(deadline.remaining())


def drain_pending(groups: Iterable[Backend], sends: PendingSends) -> None:
    """Return when collectives and sends that were started have ended, well or not."""
    for group in groups:
        if group.failure is None:
            wait_for_started(group)
    sends.finish()


@not_compiled
class MessageWork(FerrodistWork):
    """A message under way.

    Args:
        request: Its transfer.
        tensor: The user's.
        seconds: How long a wait may take that does not say it.
        what: It, for errors.
        threads: Of its group.
        finish: Called once, when it is there.
        handover: What `finish` does on a device.
    """

    def __init__(
        self,
        request: Request,
        tensor: torch.Tensor,
        *,
        seconds: float,
        what: str,
        threads: ThreadPool,
        finish: Callable[[], None] | None = None,
        handover: StreamHandoff | None = None,
    ) -> None:
        super().__init__([tensor], threads)
        self._request = request
        self._seconds = seconds
        self._what = what
        self._finish = finish
        self._handover = handover
        self._lock = threading.Lock()

    def source_rank(self) -> int:
        """The rank that sent it, when it is there."""
        return self._request.peer

    def _source_rank(self) -> int:
        return self.source_rank()

    def has_ended(self) -> bool:
        """See `FerrodistWork`."""
        if not self._request.done():
            return False
        with contextlib.suppress(DistributedError):  # which a wait raises
            self.wait_for(None)  # who asks may look at the tensor, so it is to be there
        return True

    def wait_for(self, seconds: float | None) -> None:
        """See `FerrodistWork`."""
        limit = self._seconds if seconds is None else seconds
        try:
            self._request.wait(limit)
        except DistributedTimeoutError as error:
            if self._request.done():
                self._request.wait(math.inf)
            raise DistributedTimeoutError(f"{self._what} within {limit:g} s", ranks=error.ranks) from None
        with self._lock:
            if self._finish is not None:
                self._finish()
                self._finish = None
            if self._handover is not None:
                self._handover.take()

    def tell(self, settle: Callable[[], None]) -> None:
        """See `FerrodistWork`."""
        self.threads.run(settle)  # it waits no longer than a wait does, also for what never comes


def start_send(group: Backend, tensor: torch.Tensor, dst: int, tag: int, threads: ThreadPool) -> MessageWork:
    """Begin to send a tensor."""
    engine_of(group, tensor.device)  # says whether that may be
    if tensor.device.type == "cpu":
        flat = source_of(tensor)
    else:
        flat = HostStagedP2P(group).on_host(tensor.data, timeout=group.timeout)
    request = group.isend(bytes_of(flat), dst, tag=tag)
    return MessageWork(request, tensor, seconds=group.timeout, what=f"rank {dst} did not receive it", threads=threads)


def start_receive(group: Backend, tensor: torch.Tensor, src: int | None, tag: int, threads: ThreadPool) -> MessageWork:
    """Begin to receive a tensor, from a rank or from any."""
    engine_of(group, tensor.device)
    target = Target(tensor)
    handover, landing, finish = None, target.flat, target.finish
    if tensor.device.type != "cpu":
        handover = StreamHandoff(streams_of(tensor.device))
        landing = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
        finish = partial(_bring, handover, target, landing)
    request = group.irecv(bytes_of(landing), ANY_SOURCE if src is None else src, tag=tag)
    what = f"nothing came from {'any rank' if src is None else f'rank {src}'}"
    return MessageWork(
        request, tensor, seconds=group.timeout, what=what, finish=finish, handover=handover, threads=threads
    )


def _bring(handover: StreamHandoff, target: Target, landing: torch.Tensor) -> None:
    with handover.running():
        target.flat.copy_(landing)
        target.finish()
        record_use_on_streams(target.flat)
