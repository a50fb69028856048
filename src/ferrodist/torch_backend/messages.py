"""torch's sends and receives: their `Work` objects, and how a group starts and drains them.

A message carries a tensor's elements as bytes, in the order of its dims.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from ferrodist.backends.cuda_streams import record_use_on_streams, streams_of
from ferrodist.backends.native.binding import compiled
from ferrodist.backends.tags import ANY_SOURCE
from ferrodist.collectives import fast_p2p  # noqa: F401 - which tells the compiled functions what they look into
from ferrodist.collectives.arguments import bytes_of
from ferrodist.collectives.engines.gpu_staged import HostStagedP2P
from ferrodist.collectives.engines.select import engine_of
from ferrodist.collectives.host_staging import StreamHandoff
from ferrodist.collectives.work import wait_for_started
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, DistributedTimeoutError
from ferrodist.torch_backend.argument_forms import recorded
from ferrodist.torch_backend.general_calls import check_movable
from ferrodist.torch_backend.layouts import Target, source_of
from ferrodist.torch_backend.work import DoneWork, FerrodistWork
from ferrodist.torch_private.compilers import not_compiled
from ferrodist.torch_private.profiling import is_profiling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import Request
    from ferrodist.torch_backend.futures import ThreadPool

_DRAIN_SECONDS = 10.0  # how long leaving a group waits for its messages to be received


@not_compiled
class DoneMessage(DoneWork):
    """A send or receive that had ended before its call returned."""

    def __init__(self, tensor: torch.Tensor, peer: int, threads: ThreadPool) -> None:
        super().__init__([tensor], threads)
        self._peer = peer

    def source_rank(self) -> int:
        """The sender's rank."""
        return self._peer

    _source_rank = source_rank


@not_compiled
class MessageWork(FerrodistWork):
    """A send or receive that has been started.

    ``what`` is the error's text when a wait times out, after ``seconds`` by default. ``finish`` is called once, when
    the message has arrived; ``handoff`` orders the waiting thread's stream after it, on a GPU.
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
        handoff: StreamHandoff | None = None,
    ) -> None:
        super().__init__([tensor], threads)
        self._request = request
        self._seconds = seconds
        self._what = what
        self._finish = finish
        self._handoff = handoff
        self._lock = threading.Lock()

    def source_rank(self) -> int:
        """The sender's rank, when the message has arrived."""
        return self._request.peer

    _source_rank = source_rank

    @override
    def is_completed(self) -> bool:
        if not self._request.done():
            return False
        with contextlib.suppress(DistributedError):  # which a wait raises
            self.wait_for(None)  # the caller may look at the tensor now
        return True

    @override
    def wait_for(self, seconds: float | None) -> None:
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
            if self._handoff is not None:
                self._handoff.wait_on_stream()

    @override
    def run_in_thread(self, callback: Callable[[], None]) -> None:
        self.threads.run(callback)  # which waits no longer than a wait does, also for a message that never comes


def send_message(group: Backend, tensor: torch.Tensor, dst: int, tag: int, threads: ThreadPool) -> FerrodistWork:
    """Send a tensor, at once if it is small and nothing is in its way."""
    if not is_profiling() and compiled.fast_send_bytes(tensor, dst, tag, group):
        return DoneMessage(tensor, dst, threads)
    with recorded("send"):
        return start_send(group, tensor, dst, tag, threads)


def receive_message(  # noqa: PLR0917
    name: str, group: Backend, tensor: torch.Tensor, src: int | None, tag: int, threads: ThreadPool
) -> FerrodistWork:
    """Receive a tensor, at once if it is small and has come; without ``src`` from any rank.

    ``name`` is the call's, for torch's profiler.
    """
    source = None if is_profiling() else compiled.fast_recv_bytes(tensor, src, tag, group)
    if source is not None:
        return DoneMessage(tensor, source, threads)
    with recorded(name):
        return start_receive(group, tensor, src, tag, threads)


def start_send(group: Backend, tensor: torch.Tensor, dst: int, tag: int, threads: ThreadPool) -> FerrodistWork:
    """Start sending a tensor."""
    data = compiled.view_bytes(tensor)
    if data is None:
        engine_of(group, tensor.device)  # raises for devices that the group has no engine for
        check_movable(tensor)
        if tensor.device.type == "cpu":
            flat = source_of(tensor)
        else:
            flat = HostStagedP2P(group).on_host(tensor.data, timeout=group.timeout)
        data = bytes_of(flat)
    request = group.isend(data, dst, tag=tag)
    if _has_succeeded(request):
        return DoneMessage(tensor, dst, threads)
    _pin(data, tensor)
    what = f"send by rank {group.rank} of group {group.name!r}: rank {dst} did not receive it"
    return MessageWork(request, tensor, seconds=group.timeout, what=what, threads=threads)


def start_receive(
    group: Backend, tensor: torch.Tensor, src: int | None, tag: int, threads: ThreadPool
) -> FerrodistWork:
    """Start receiving a tensor from a rank, or from any rank."""
    handoff = finish = None
    buffer = compiled.view_bytes(tensor)
    if buffer is None:
        engine_of(group, tensor.device)
        check_movable(tensor)
        target = Target(tensor)
        flat, finish = target.flat, target.finish
        if tensor.device.type != "cpu":
            handoff = StreamHandoff(streams_of(tensor.device))
            flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
            finish = partial(_copy_to_device, handoff, target, flat)
        buffer = bytes_of(flat)
    request = group.irecv(buffer, ANY_SOURCE if src is None else src, tag=tag)
    if finish is None and _has_succeeded(request):
        return DoneMessage(tensor, request.peer, threads)
    _pin(buffer, tensor)
    sender = "any rank" if src is None else f"rank {src}"
    what = f"recv by rank {group.rank} of group {group.name!r}: nothing came from {sender}"
    return MessageWork(
        request, tensor, seconds=group.timeout, what=what, finish=finish, handoff=handoff, threads=threads
    )


def _has_succeeded(request: Request) -> bool:
    """Return whether a transfer has ended without an error, which its work would raise."""
    if not request.done():
        return False
    try:
        request.wait(0.0)
    except DistributedError:
        return False
    return True


def _pin(data: Any, tensor: torch.Tensor) -> None:
    """Keep the storage of a tensor that is viewed as ``data`` from being resized, for a message that goes on."""
    if isinstance(data, memoryview):  # one of `bytes_of` is pinned
        return
    if tensor.dtype is torch.bfloat16:  # which NumPy lacks; others take a third of the time
        bytes_of(tensor.data)
    else:
        tensor.detach().numpy()


def _copy_to_device(handoff: StreamHandoff, target: Target, buffer: torch.Tensor) -> None:
    with handoff.running():
        target.flat.copy_(buffer)
        target.finish()
        record_use_on_streams(target.flat)


class PendingSends:
    """The sends of a group that may not have been received yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: deque[MessageWork] = deque()
        self._limit = 0

    def add(self, work: MessageWork) -> None:
        """Keep a send until it has ended, or little longer."""
        with self._lock:
            while self._works and self._works[0].is_completed():
                self._works.popleft()
            if len(self._works) >= self._limit:  # behind an old one; rare, for this looks at all of them
                self._works = deque(each for each in self._works if not each.is_completed())
                self._limit = 2 * len(self._works) + 8
            if not work.is_completed():
                self._works.append(work)

    def drain(self) -> None:
        """Wait for the sends for up to `_DRAIN_SECONDS`."""
        deadline = Deadline(_DRAIN_SECONDS)
        with self._lock:
            works = list(self._works)
        for work in works:
            with contextlib.suppress(DistributedError):
                work.wait_for(deadline.remaining())


def drain_pending(groups: Iterable[Backend], sends: PendingSends) -> None:
    """Wait until the collectives and sends that were started have ended, successfully or not."""
    for group in groups:
        if group.failure is None:
            wait_for_started(group)
    sends.drain()
