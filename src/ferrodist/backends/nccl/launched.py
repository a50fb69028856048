"""Operations that are on a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ferrodist.backends.nccl.streams import Event, Streams
    from ferrodist.errors import DistributedError

__all__ = ["NO_PLACE", "Enqueued", "Launched", "Launching"]

NO_PLACE = -1
"""In place of a sequence number: messages have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launching:
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


class Launched:
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
        self, operation: Launching, *, start: Event, end: Event, kept: tuple[torch.Tensor, ...], caller: int
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


class Enqueued:
    """What a thread has launched asynchronously; see `Enqueued` of collectives/engine.py.

    Args:
        launched: In order; of one stream and device.
        streams: CUDA's.
        failure: Tells why the group has failed, or will.
        is_compared: Tells whether the call of a place has been compared.
    """

    __slots__ = ("_failure", "_is_compared", "_launched", "_streams")

    def __init__(
        self,
        launched: Sequence[Launched],
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
        """Have the current stream wait for it; the host does not. See [Note: lifetimes] in `launcher.py`."""
        if not self._launched:
            return
        current = self._streams.current(self._launched[-1].kept[0].device)
        current.wait_event(self._launched[-1].end)  # of one stream, so it is the last to be passed
        for launched in self._launched:
            if launched.caller != current.cuda_stream:
                for tensor in launched.kept:
                    self._streams.keep(tensor, current)
