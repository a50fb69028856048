"""Streams and events of CUDA, behind a protocol that tests can do without a GPU.

Operations that are on a stream.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.errors import DistributedError

NO_PLACE = -1
"""In place of a sequence number: messages have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpInfo:
    """An operation, for messages of errors.

    Args:
        what: Put into words when needed.
        sequence: Its place among the group's collectives, or `NO_PLACE`.
        timeout: Seconds it may take from when the GPU has come to it.
        peers: The other sides of messages.
    """

    what: object
    sequence: int = NO_PLACE
    timeout: float
    peers: tuple[int, ...] = ()


class InFlightOp:
    """One operation on a stream, until the GPU has come past its end.

    Args:
        operation: Which it is.
        start: Where it begins.
        end: Where it ends.
        kept: Tensors that must live until it has ended.
        caller: The ``cudaStream_t`` that was current where it was launched.
    """

    __slots__ = ("_came_at", "_start", "caller", "end", "kept", "operation")

    def __init__(
        self, operation: OpInfo, *, start: Event, end: Event, kept: tuple[torch.Tensor, ...], caller: int
    ) -> None:
        self.operation = operation
        self._start = start
        self.end = end
        self.kept = kept
        self.caller = caller
        self._came_at: float | None = None

    def is_late(self, now: float) -> bool:
        """Whether its time has passed, which begins when the GPU is seen to have come to it."""
        if self._came_at is None:
            if self._start.query():
                self._came_at = now
            return False
        return now - self._came_at > self.operation.timeout


class EnqueuedOp:
    """What a thread has launched asynchronously; see `EnqueuedOp` of collectives/engine.py.

    Args:
        launched: In order; of one stream and device.
        streams: CUDA's.
        failure: Tells why the group has failed, or will.
        is_compared: Tells whether the call of a place has been compared.
    """

    __slots__ = ("_failure", "_is_compared", "_launched", "_streams")

    def __init__(
        self,
        launched: Sequence[InFlightOp],
        streams: Streams,
        *,
        failure: Callable[[], DistributedError | None],
        is_compared: Callable[[int], bool],
    ) -> None:
        self._launched = launched
        self._streams = streams
        self._failure = failure
        self._is_compared = is_compared

    @property
    def error(self) -> DistributedError | None:
        """Why it will not be done, or was done for nothing."""
        return self._failure()

    def done(self) -> bool:
        """Whether the GPU has come past it and the calls have been compared, or the group has failed."""
        return self._failure() is not None or all(
            launched.end.query() and self._is_compared(launched.operation.sequence) for launched in self._launched
        )

    def wait_on_stream(self) -> None:
        """Have the current stream wait for it; the host does not. See [Note: lifetimes] in `stream_executor.py`."""
        if not self._launched:
            return
        current = self._streams.current(self._launched[-1].kept[0].device)
        current.wait_event(self._launched[-1].end)  # of one stream, so it is the last to be passed
        for launched in self._launched:
            if launched.caller != current.cuda_stream:
                for tensor in launched.kept:
                    self._streams.keep(tensor, current)


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
