"""Streams of GPUs, as far as collectives need them: the one place that calls torch.cuda for them."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

__all__ = ["CudaStreams", "Handover", "Streams", "is_capturing", "keep_until_now", "streams_of"]


class Streams(Protocol):
    """One device: streams of work that runs in order, and events, which are places in them.

    Streams and events are opaque. Nothing here blocks the host but `pinned`.
    """

    def current(self) -> Any:
        """The calling thread's current stream."""

    def make(self) -> Any:
        """A stream of its own."""

    def using(self, stream: Any) -> AbstractContextManager[None]:
        """Make ``stream`` the calling thread's current one inside the block."""

    def record(self, stream: Any) -> Any:
        """The event after all that is in a stream now."""

    def order(self, stream: Any, event: Any) -> None:
        """Let what comes to ``stream`` from now on wait for an event."""

    def has_passed(self, event: Any) -> bool:
        """Whether an event has happened; raises what the device has failed with."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Copy between the device and pinned memory in ``stream``."""

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Let the memory of a tensor not be reused before what is in ``stream`` now is done."""

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Make host memory that the device copies from and to by itself: bytes."""

    def pin(self, memory: torch.Tensor) -> bool:
        """Let the device do so with memory of others, until `unpin`; False when it can't."""

    def unpin(self, memory: torch.Tensor) -> None:
        """End that, before the memory goes."""


class CudaStreams:
    """`Streams` of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Any:
        """See `Streams`, here and below."""
        return torch.cuda.current_stream(self._device)

    def make(self) -> Any:
        """A stream of torch's pool."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        """Make a stream the current one."""
        with torch.cuda.stream(stream):
            yield

    def record(self, stream: Any) -> Any:
        """Record an event."""
        return stream.record_event()

    def order(self, stream: Any, event: Any) -> None:
        """Let a stream wait."""
        stream.wait_event(event)

    def has_passed(self, event: Any) -> bool:
        """Query an event."""
        return bool(event.query())

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Copy asynchronously."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Tell the caching allocator."""
        tensor.record_stream(stream)

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Allocate page-locked memory."""
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def pin(self, memory: torch.Tensor) -> bool:
        """Register it with the driver."""
        with torch.cuda.device(self._device):
            if int(_runtime().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0:
                return True
            self._drop_error()
            return False

    def unpin(self, memory: torch.Tensor) -> None:
        """Take it from the driver."""
        with torch.cuda.device(self._device):
            _runtime().cudaHostUnregister(memory.data_ptr())

    def _drop_error(self) -> None:
        """Have a launch of our own raise the error that a call of CUDA's has left, which the next launch would."""
        with suppress(RuntimeError):
            torch.empty(1, device=self._device).fill_(0)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def is_capturing() -> bool:
    """Whether a CUDA graph captures what the calling thread puts into its current stream."""
    # Without a driver, which torch for CUDA may run without, asking is an error.
    if torch.version.cuda is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return torch.cuda.is_current_stream_capturing()


_known: dict[torch.device, CudaStreams] = {}


def streams_of(device: torch.device) -> Streams:
    """The streams of a device."""
    found = _known.get(device)
    return found if found is not None else _known.setdefault(device, CudaStreams(device))


def keep_until_now(tensor: torch.Tensor) -> None:
    """Let a tensor's memory not be reused before what is in the current stream now is done, if it is on a GPU.

    For one that was made in another stream, and ends here.
    """
    if tensor.is_cuda:
        streams = streams_of(tensor.device)
        streams.keep(tensor, streams.current())


class _OwnStreams(threading.local):
    """A stream for each thread that runs work for others, and device."""

    def __init__(self) -> None:
        self.by_device: dict[Streams, Any] = {}


_own = _OwnStreams()


class Handover:
    """Work on a device that one thread starts, another runs, and any waits for, in the order of their streams.

    Args:
        streams: The device.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._started = streams.record(streams.current())
        self._ended: Any = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the work in the calling thread, on a stream of that thread: after what the starter's stream had then."""
        stream = _own.by_device.get(self._streams)
        if stream is None:
            stream = _own.by_device[self._streams] = self._streams.make()
        self._streams.order(stream, self._started)
        with self._streams.using(stream):
            yield
        self._ended = self._streams.record(stream)

    def take(self) -> None:
        """Order the calling thread's current stream after the work, which has been run."""
        self._streams.order(self._streams.current(), self._ended)
