"""A recorded fake of the streams of a GPU: its tensors are on the CPU, and its work is done when the schedule says.

What nobody waits for may be done at any later time, and what nothing holds back at once; so a copy that is not ordered
as it must be gives wrong elements with one of the schedules.
"""

from __future__ import annotations

import contextlib
import random
import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCHEDULES = ("late", "early", "random")


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.inference_mode():  # a device knows no modes
        target.copy_(source)


class FakeStream:
    """Work in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.work: list[Callable[[], None]] = []
        self.waits: list[FakeEvent | None] = []
        self.num_done = 0


class FakeEvent:
    """A place in a stream."""

    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream
        self.place = len(stream.work)

    @property
    def has_passed(self) -> bool:
        return self.stream.num_done >= self.place


class FakeStreams:
    """`Streams` of a device that does what is in its streams late, early, or at random."""

    def __init__(self, schedule: str = "late", seed: int = 0) -> None:
        self.schedule = schedule
        self.streams: list[FakeStream] = []
        self.log: list[str] = []
        self.pinned_bytes: list[int] = []
        self.kept: list[tuple[int, str]] = []
        self.pins: list[int] = []
        self.can_pin = True
        self.is_stuck = False
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._local = threading.local()
        self._default = self.make("default")

    def current(self) -> FakeStream:
        return getattr(self._local, "stream", self._default)

    def make(self, name: str = "") -> FakeStream:
        with self._lock:
            self.streams.append(FakeStream(name or f"stream {len(self.streams)}"))
            return self.streams[-1]

    @contextlib.contextmanager
    def using(self, stream: FakeStream) -> Iterator[None]:
        before, self._local.stream = self.current(), stream
        try:
            yield
        finally:
            self._local.stream = before

    def record(self, stream: FakeStream) -> FakeEvent:
        with self._lock:
            return FakeEvent(stream)

    def order(self, stream: FakeStream, event: FakeEvent) -> None:
        self.put(stream, lambda: None, "order", wait=event)

    def has_passed(self, event: FakeEvent) -> bool:
        with self._lock:
            if not self.is_stuck:
                self.run_until(event)
            return event.has_passed

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: FakeStream) -> None:
        assert not target.is_inference() or torch.is_inference_mode_enabled(), "torch would refuse"
        self.put(stream, lambda: _copy(target, source), f"copy {source.numel()}")

    def keep(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        self.kept.append((tensor.data_ptr(), stream.name))

    def pinned(self, size_bytes: int) -> torch.Tensor:
        self.pinned_bytes.append(size_bytes)
        return torch.full((size_bytes,), 0xA5, dtype=torch.uint8)

    def pin(self, memory: torch.Tensor) -> bool:
        self.pins.append(memory.data_ptr())
        return self.can_pin

    def unpin(self, memory: torch.Tensor) -> None:
        self.pins.remove(memory.data_ptr())

    # For tests: work of the caller's, and what the device does.

    def put(self, stream: FakeStream, work: Callable[[], None], what: str = "", *, wait: Any = None) -> None:
        """Put work into a stream."""
        with self._lock:
            self.log.append(f"{stream.name}: {what}")
            stream.work.append(work)
            stream.waits.append(wait)
            self._advance()

    def run_until(self, event: FakeEvent) -> None:
        """Do what must be done for an event, and nothing else."""
        with self._lock:
            while not event.has_passed:
                self._do_next(event.stream)

    def _do_next(self, stream: FakeStream) -> None:
        wait = stream.waits[stream.num_done]
        if wait is not None:
            self.run_until(wait)
        stream.work[stream.num_done]()
        stream.num_done += 1

    def _advance(self) -> None:
        """Do what may be done, as far as the schedule says; the default stream is always late."""
        if self.schedule == "late" or self.is_stuck:
            return
        moved = True
        while moved:
            moved = False
            for stream in self._random.sample(self.streams, len(self.streams)):
                if stream is self._default or stream.num_done == len(stream.work):
                    continue
                wait = stream.waits[stream.num_done]
                if wait is not None and not wait.has_passed:
                    continue
                if self.schedule == "random" and self._random.random() < 0.5:
                    continue
                self._do_next(stream)
                moved = True
