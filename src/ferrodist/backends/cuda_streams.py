"""Streams and events of one GPU, behind a protocol that tests implement without a GPU.

Collectives that are staged through the host, NCCL's work and asynchronous handles all use these.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import torch


class Streams(Protocol):
    """One device: streams, which run work in order, and events, which mark positions in them.

    Streams and events are opaque, but for a stream's ``cuda_stream`` and ``device``. Only `pinned` blocks the host.
    """

    def current(self) -> Any:
        """The calling thread's current stream."""

    def make(self, priority: int = 0) -> Any:
        """Make a stream; -1 is a higher priority than 0."""

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Make ``stream`` the calling thread's current one inside the block."""

    def record(self, stream: Any) -> Any:
        """An event after everything enqueued on ``stream`` so far."""

    def order(self, stream: Any, event: Any) -> None:
        """Make later work on ``stream`` wait for ``event``."""

    def has_passed(self, event: Any) -> bool:
        """Return whether the device has reached ``event``; raises the device's error if it has failed."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Copy between the device and pinned memory, on ``stream``."""

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the tensor's memory from being reused before the present work of ``stream`` is done."""

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Allocate pinned host memory, as bytes."""

    def pin(self, memory: torch.Tensor) -> bool:
        """Pin existing host memory until `unpin`; False if the driver refuses it."""

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo `pin`, before the memory is freed."""


class CudaStreams:
    """`Streams` of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Any:
        """See `Streams`, here and below."""
        return torch.cuda.current_stream(self._device)

    def make(self, priority: int = 0) -> Any:
        """Take a stream of torch's pool."""
        return torch.cuda.Stream(self._device, priority=priority)  # type: ignore[no-untyped-call]

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream the current one."""
        return torch.cuda.stream(stream)

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
        """Unregister it."""
        with torch.cuda.device(self._device):
            _runtime().cudaHostUnregister(memory.data_ptr())

    def _drop_error(self) -> None:
        """Launch something, which raises the error that a failed runtime call has left for the next launch."""
        with suppress(RuntimeError):
            torch.empty(1, device=self._device).fill_(0)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def is_capturing() -> bool:
    """Return whether a CUDA graph is capturing the calling thread's current stream."""
    # Without a driver, which torch for CUDA may run without, asking is an error.
    if torch.version.cuda is None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return torch.cuda.is_current_stream_capturing()


def allow_queries_during_capture() -> None:
    """Let the calling thread query events while another thread captures a graph, which a query would break."""
    with suppress(ImportError):  # the binding comes with nccl4py: without it there is no NCCL either
        runtime = importlib.import_module("cuda.bindings.runtime")
        runtime.cudaThreadExchangeStreamCaptureMode(runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed)


_known: dict[torch.device, CudaStreams] = {}


def streams_of(device: torch.device) -> Streams:
    """The streams of a device."""
    found = _known.get(device)
    return found if found is not None else _known.setdefault(device, CudaStreams(device))


def record_use_on_streams(tensor: torch.Tensor) -> None:
    """Keep a GPU tensor's memory from being reused before the current stream's present work is done.

    For a tensor that was made on another stream and is dropped here.
    """
    if tensor.is_cuda:
        streams = streams_of(tensor.device)
        streams.keep(tensor, streams.current())
