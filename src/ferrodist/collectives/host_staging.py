"""Pipelined copies between a GPU and the host, for work on the host with tensors on a GPU.

[Note: staging]
Two streams copy, one in each direction. A segment passes through a *slot*, two buffers of pinned memory:

    to host     copies of the input to the slot, in the first stream, after the caller's stream as it was at the start
    work        in the calling thread, after the event behind these copies
    to device   copies of the result from the slot, in the second stream

While the host works on segment i, segment i+1 is copied to the host and segment i-1 to the device, so there are three
slots. A slot is filled again only after the event behind its last copies to the device, for which the first stream
waits. The caller's stream waits for the last copies to the device; the host does not.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.backends.polling import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ferrodist.backends.cuda_streams import Streams
    from ferrodist.deadline import Deadline

SEGMENT_BYTES = 8 << 20
"""The size of a slot's buffers. A constant, for ranks must divide their tensors in the same way. With two ranks on one
H100 it is the fastest: 14 GB/s, where 4 MiB give 10 and 16 MiB 11."""

_NUM_SLOTS = 3


class NotReachedError(Exception):
    """The device has not passed an event in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of an operation that passes through a slot."""

    inputs: Sequence[torch.Tensor]  # on the device, copied to the `host_in` buffer, concatenated
    in_count: int  # elements of `host_in`
    out_count: int  # elements of `host_out`
    work: Callable[[torch.Tensor, torch.Tensor], None]  # called on the host with `host_in` and `host_out`
    outputs: Sequence[torch.Tensor]  # on the device, to which the result is copied
    in_place: bool  # whether the result is in `host_in`


class _PinnedSlot:
    """Pinned memory for one segment, and the events behind the last copies to it and from it."""

    def __init__(self, streams: Streams, size_bytes: int) -> None:
        self._streams = streams
        self.size_bytes = size_bytes
        self.buffers: list[torch.Tensor | None] = [None, None]  # of `host_in` and `host_out`
        self.host_in = self.host_out = torch.empty(0, device="cpu")
        self.filled: Any = None
        self.emptied: Any = None

    def prepare(self, dtype: torch.dtype, in_count: int, out_count: int) -> None:
        """Make ``host_in`` and ``host_out`` tensors of these numbers of elements."""
        self.host_in = self._view(0, dtype, in_count)
        self.host_out = self._view(1, dtype, out_count)

    def _view(self, which: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        if not count:
            return torch.empty(0, dtype=dtype, device="cpu")
        size_bytes = count * dtype.itemsize
        memory = self.buffers[which]
        if memory is None or memory.numel() < size_bytes:
            memory = self.buffers[which] = self._streams.pinned(max(size_bytes, self.size_bytes))
        return memory[:size_bytes].view(dtype)


class CopyPipeline:
    """The streams and slots of one device, for one operation at a time; see [Note: staging]."""

    def __init__(self, streams: Streams, size_bytes: int = SEGMENT_BYTES) -> None:
        self._streams = streams
        self._to_host = streams.make()
        self._to_device = streams.make()
        self._slots = [_PinnedSlot(streams, size_bytes) for _ in range(_NUM_SLOTS)]
        self._last: list[Any] = []  # events behind all copies

    @property
    def shared_bytes(self) -> int:
        """The size of the memory that `share` takes."""
        return sum(slot.size_bytes for slot in self._slots)

    def share(self, memory: torch.Tensor) -> Callable[[], None] | None:
        """Use memory that other ranks can read as the ``host_in`` buffers of all slots, if the device can copy to it.

        Returns a function to call before the memory is freed, when this is not used any more; None if it is not used.
        torch keeps the former buffers until copies from them are done.
        """
        if not self._streams.pin(memory):
            return None
        start = 0
        for slot in self._slots:
            slot.buffers[0] = memory[start : start + slot.size_bytes]
            start += slot.size_bytes
        return partial(self._streams.unpin, memory)

    def run(
        self,
        segments: Sequence[Segment],
        dtype: torch.dtype,
        deadline: Deadline,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Run segments in order; the caller's current stream is ordered after their copies, whatever ``work`` raises.

        ``check`` is called while waiting for the device; its error ends the wait. Raises NotReachedError at the
        deadline.
        """
        streams = self._streams
        start = streams.record(streams.current())
        streams.order(self._to_host, start)
        streams.order(self._to_device, start)
        try:
            for i in range(min(_NUM_SLOTS - 1, len(segments))):
                self._copy_in(i, segments[i], dtype)
            for i, segment in enumerate(segments):
                slot = self._slots[i % _NUM_SLOTS]
                wait_until_passed(streams, slot.filled, deadline, check)
                segment.work(slot.host_in, slot.host_out)
                self._copy_out(slot, segment)
                if i + _NUM_SLOTS - 1 < len(segments):
                    self._copy_in(i + _NUM_SLOTS - 1, segments[i + _NUM_SLOTS - 1], dtype)
        finally:
            current = streams.current()
            self._last = [streams.record(stream) for stream in (self._to_host, self._to_device)]
            for event in self._last:  # also if this raises
                streams.order(current, event)
            for segment in segments[:1]:
                self._keep(segment)

    def synchronize(self, deadline: Deadline) -> None:
        """Wait until all copies are done; raises NotReachedError when the deadline passes."""
        for event in self._last:
            wait_until_passed(self._streams, event, deadline)

    def _copy_in(self, i: int, segment: Segment, dtype: torch.dtype) -> None:
        slot = self._slots[i % _NUM_SLOTS]
        slot.prepare(dtype, segment.in_count, segment.out_count)
        if slot.emptied is not None:
            self._streams.order(self._to_host, slot.emptied)
        start = 0
        for part in segment.inputs:
            if part.numel():
                self._streams.copy(slot.host_in[start : start + part.numel()], part, self._to_host)
            start += part.numel()
        slot.filled = self._streams.record(self._to_host)  # also without copies

    def _copy_out(self, slot: _PinnedSlot, segment: Segment) -> None:
        buffer = slot.host_in if segment.in_place else slot.host_out
        start = 0
        for part in segment.outputs:
            if part.numel():
                self._streams.copy(part, buffer[start : start + part.numel()], self._to_device)
            start += part.numel()
        slot.emptied = self._streams.record(self._to_device)

    def _keep(self, segment: Segment) -> None:
        """Let the allocator not reuse the operation's memory before the copies are done."""
        for stream, parts in ((self._to_host, segment.inputs), (self._to_device, segment.outputs)):
            for part in parts:
                self._streams.keep(part, stream)


def wait_until_passed(
    streams: Streams, event: Any, deadline: Deadline, check: Callable[[], None] = lambda: None
) -> None:
    """Wait until the device has passed an event, with ``check()`` between polls; raises NotReachedError."""

    def check_again() -> bool:
        check()
        return False

    if not wait_until(lambda: streams.has_passed(event), deadline, check_again):
        raise NotReachedError


class _OwnStreams(threading.local):
    """The calling thread's streams for the work of others, by device."""

    def __init__(self) -> None:
        self.by_device: dict[Streams, Any] = {}


_own = _OwnStreams()


class StreamHandoff:
    """Orders work on a device that one thread starts, another runs, and any thread waits for."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._started = streams.record(streams.current())
        self._ended: Any = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the work in the calling thread, on a stream of its own, ordered after the starting thread's stream."""
        stream = _own.by_device.get(self._streams)
        if stream is None:
            stream = _own.by_device[self._streams] = self._streams.make()
        self._streams.order(stream, self._started)
        with self._streams.using(stream):
            yield
        self._ended = self._streams.record(stream)

    def wait_on_stream(self) -> None:
        """Order the calling thread's current stream after the work, which has run."""
        self._streams.order(self._streams.current(), self._ended)
