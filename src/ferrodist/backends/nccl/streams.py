"""Streams and events of CUDA, behind a protocol that tests can do without a GPU."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, Protocol

import torch

__all__ = ["CudaStreams", "Event", "Stream", "Streams"]


class Event(Protocol):
    """A place in a stream's work."""

    def query(self) -> bool:
        """Whether the stream has come past it; never blocks."""


class Stream(Protocol):
    """Work of a GPU that is done in order; a `torch.cuda.Stream` is one."""

    @property
    def cuda_stream(self) -> int:
        """The ``cudaStream_t``."""

    @property
    def device(self) -> torch.device:
        """Where it is."""

    def wait_event(self, event: Any) -> None:
        """Do what comes after this call when ``event`` is past."""


class Streams(Protocol):
    """What the engine asks of CUDA."""

    def begin_watching(self) -> None:
        """Prepare the calling thread for nothing but looks at events."""

    def make(self, device: torch.device) -> Stream:
        """A stream of the group's own."""

    def current(self, device: torch.device) -> Stream:
        """The calling thread's current stream."""

    def record(self, stream: Stream) -> Event:
        """An event at the end of what ``stream`` has been given."""

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Let the memory of a tensor not be used again before what ``stream`` has, when it is let go of, is done."""

    def on(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        """Put what torch does inside on ``stream``, in the calling thread."""


class CudaStreams:
    """`Streams` of torch."""

    def begin_watching(self) -> None:
        """See `Streams`: a look at an event would break what another thread captures as a graph."""
        with contextlib.suppress(ImportError):  # of the binding's own needs: without it there is no NCCL either
            runtime = importlib.import_module("cuda.bindings.runtime")
            runtime.cudaThreadExchangeStreamCaptureMode(runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed)

    def make(self, device: torch.device) -> Stream:
        """See `Streams`; of high priority, for other ranks wait for it."""
        return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def current(self, device: torch.device) -> Stream:
        """See `Streams`."""
        return torch.cuda.current_stream(device)

    def record(self, stream: Stream) -> Event:
        """See `Streams`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)  # type: ignore[arg-type] # it is one of torch's
        return event

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """See `Streams`."""
        tensor.record_stream(stream)  # type: ignore[arg-type] # it is one of torch's

    def on(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        """See `Streams`."""
        return torch.cuda.stream(stream)  # type: ignore[arg-type] # it is one of torch's
