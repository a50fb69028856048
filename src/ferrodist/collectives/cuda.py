"""Work on the host with what is on a GPU: segments come down, are worked on, and go up, all three at once.

[Note: staging]
Two streams copy, one in each direction. A segment passes through a *slot*, two buffers of pinned memory:

    down      copies of the input to the slot, in the one stream, after what the caller's stream had at the start
    work      by the calling thread, when it has seen the event after these copies
    up        copies of the result from the slot, in the other stream

While the host works on segment i, segment i+1 comes down and segment i-1 goes up, so there are three slots. A slot is
filled again only after the event behind its last copies up, which the stream down waits for by itself. The caller's
stream waits for the last copies up; the host does not.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ferrodist.backends.cuda import Streams
    from ferrodist.deadline import Deadline

SEGMENT_BYTES = 8 << 20
"""What passes through a slot at once, in each direction. A constant: ranks must divide their tensors alike. For two
ranks on one H100 it is the fastest: 14 GB/s, where 4 MiB give 10 and 16 MiB 11."""

_NUM_SLOTS = 3

# Between two looks at an event, for which no thread can wait for a limited time.
_NUM_LOOKS_AT_ONCE = 200
_FIRST_PAUSE_SECONDS = 20e-6
_LONGEST_PAUSE_SECONDS = 1e-3


class NotReachedError(Exception):
    """The device has not come to an event in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of an operation, as it passes through a slot.

    Args:
        down: Parts of the device's tensors that are copied to the near buffer, one after the other.
        near_count: Elements of the near buffer.
        far_count: Elements of the far one.
        work: ``work(near, far)`` is done on the host with the two buffers.
        up: Where the parts of the result go on the device, which lie one after the other in a buffer.
        is_far: Whether that is the far buffer.
    """

    down: Sequence[torch.Tensor]
    near_count: int
    far_count: int
    work: Callable[[torch.Tensor, torch.Tensor], None]
    up: Sequence[torch.Tensor]
    is_far: bool


class _PinnedSlot:
    """Pinned memory for one segment, and what was last copied to it and from it."""

    def __init__(self, streams: Streams, size_bytes: int) -> None:
        self._streams = streams
        self.size_bytes = size_bytes
        self._buffers: list[torch.Tensor | None] = [None, None]
        self.near = self.far = torch.empty(0, device="cpu")
        self.filled: Any = None
        self.emptied: Any = None

    def prepare(self, dtype: torch.dtype, near_count: int, far_count: int) -> None:
        """Make ``near`` and ``far`` tensors of so many elements."""
        self.near = self._view(0, dtype, near_count)
        self.far = self._view(1, dtype, far_count)

    def adopt(self, memory: torch.Tensor) -> None:
        """Have this as the near buffer, once its own is not in use any more."""
        self._buffers[0] = memory

    def _view(self, which: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        if not count:
            return torch.empty(0, dtype=dtype, device="cpu")
        size_bytes = count * dtype.itemsize
        memory = self._buffers[which]
        if memory is None or memory.numel() < size_bytes:
            memory = self._buffers[which] = self._streams.pinned(max(size_bytes, self.size_bytes))
        return memory[:size_bytes].view(dtype)


class CopyPipeline:
    """The streams and slots of one device, for one operation at a time; see [Note: staging].

    Args:
        streams: The device.
        size_bytes: Of a slot's buffers; a segment that is larger makes them so.
    """

    def __init__(self, streams: Streams, size_bytes: int = SEGMENT_BYTES) -> None:
        self._streams = streams
        self._down = streams.make()
        self._up = streams.make()
        self._slots = [_PinnedSlot(streams, size_bytes) for _ in range(_NUM_SLOTS)]
        self._last: list[Any] = []  # events, behind all that was put into the streams

    @property
    def shared_bytes(self) -> int:
        """What `share` takes."""
        return sum(slot.size_bytes for slot in self._slots)

    def share(self, memory: torch.Tensor) -> Callable[[], None] | None:
        """Use memory as the near buffers of all slots, which other ranks can read, if the device can copy to it.

        The buffers before are torch's, which keeps them until copies from them are done.

        Returns:
            What is to be called before the memory goes, when this is not used any more; None if it is not used.
        """
        if not self._streams.pin(memory):
            return None
        start = 0
        for slot in self._slots:
            slot.adopt(memory[start : start + slot.size_bytes])
            start += slot.size_bytes
        return partial(self._streams.unpin, memory)

    def run(
        self,
        segments: Sequence[Segment],
        dtype: torch.dtype,
        deadline: Deadline,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Do the segments, in order. What they write is there in the order of the caller's current stream.

        Args:
            segments: What to do.
            dtype: Of the elements.
            deadline: When all must be done.
            check: Called now and then while the device is waited for; what it raises ends the wait.

        Raises:
            NotReachedError: The device has not come to it within the deadline.
            Exception: What ``work`` raises; copies that were started then still are in the caller's stream's order.
        """
        streams = self._streams
        start = streams.record(streams.current())
        streams.order(self._down, start)
        streams.order(self._up, start)
        try:
            for i in range(min(_NUM_SLOTS - 1, len(segments))):
                self._fetch(i, segments[i], dtype)
            for i, segment in enumerate(segments):
                slot = self._slots[i % _NUM_SLOTS]
                wait_until_passed(streams, slot.filled, deadline, check)
                segment.work(slot.near, slot.far)
                self._bring(slot, segment)
                if i + _NUM_SLOTS - 1 < len(segments):
                    self._fetch(i + _NUM_SLOTS - 1, segments[i + _NUM_SLOTS - 1], dtype)
        finally:
            current = streams.current()
            self._last = [streams.record(stream) for stream in (self._down, self._up)]
            for event in self._last:  # what was started, if this raises
                streams.order(current, event)
            for segment in segments[:1]:
                self._keep(segment)

    def synchronize(self, deadline: Deadline) -> None:
        """Return when no copies are under way. Raises NotReachedError when that is not in time."""
        for event in self._last:
            wait_until_passed(self._streams, event, deadline)

    def _fetch(self, i: int, segment: Segment, dtype: torch.dtype) -> None:
        slot = self._slots[i % _NUM_SLOTS]
        slot.prepare(dtype, segment.near_count, segment.far_count)
        if slot.emptied is not None:
            self._streams.order(self._down, slot.emptied)
        start = 0
        for part in segment.down:
            if part.numel():
                self._streams.copy(slot.near[start : start + part.numel()], part, self._down)
            start += part.numel()
        slot.filled = self._streams.record(self._down)  # without copies, too: the last ones up are before it

    def _bring(self, slot: _PinnedSlot, segment: Segment) -> None:
        buffer = slot.far if segment.is_far else slot.near
        start = 0
        for part in segment.up:
            if part.numel():
                self._streams.copy(part, buffer[start : start + part.numel()], self._up)
            start += part.numel()
        slot.emptied = self._streams.record(self._up)

    def _keep(self, segment: Segment) -> None:
        """The memory that an operation touches is not reused too early where nobody orders a stream after it."""
        for stream, parts in ((self._down, segment.down), (self._up, segment.up)):
            for part in parts:
                self._streams.keep(part, stream)


def wait_until_passed(
    streams: Streams, event: Any, deadline: Deadline, check: Callable[[], None] = lambda: None
) -> None:
    """Return when a device has come to an event. Raises NotReachedError when the deadline passes first.

    ``check()`` is called between looks, once they are no longer close together.
    """
    num_looks, pause = 0, _FIRST_PAUSE_SECONDS
    while not streams.has_passed(event):
        if deadline.expired:
            raise NotReachedError
        num_looks += 1
        if num_looks < _NUM_LOOKS_AT_ONCE:
            time.sleep(0)
        else:
            check()
            time.sleep(min(pause, deadline.remaining()))
            pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)


class _OwnStreams(threading.local):
    """A stream for each thread that runs work for others, and device."""

    def __init__(self) -> None:
        self.by_device: dict[Streams, Any] = {}


_own = _OwnStreams()


class StreamHandoff:
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
