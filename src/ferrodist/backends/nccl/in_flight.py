"""Operations that have been enqueued on a stream, until the GPU has done them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ferrodist.backends.cuda_streams import Streams
    from ferrodist.errors import DistributedError

NO_SEQUENCE = -1  # the sequence number of messages, which have none


@dataclass(frozen=True, slots=True, kw_only=True)
class OpInfo:
    """An operation, as error messages need it."""

    what: object  # the call; converted to text only when needed
    sequence: int = NO_SEQUENCE  # its position among the group's collectives, or `NO_SEQUENCE`
    timeout: float  # seconds it may take, from when the GPU has reached it
    peers: tuple[int, ...] = ()  # the other ranks of a message


@dataclass(slots=True, eq=False)
class InFlightOp:
    """One operation on a stream, between two events."""

    info: OpInfo
    streams: Streams
    start: Any
    end: Any
    kept: tuple[torch.Tensor, ...]  # tensors that must live until it has ended
    caller: int  # the stream that was current at its launch
    started_at: float | None = None  # when the GPU was first seen to have reached it

    def done(self) -> bool:
        """Return whether the GPU has passed its end; never blocks."""
        return self.streams.has_passed(self.end)

    def is_overdue(self, now: float) -> bool:
        """Return whether its timeout has passed, counted from when the GPU was first seen to have reached it."""
        if self.started_at is None:
            if self.streams.has_passed(self.start):
                self.started_at = now
            return False
        return now - self.started_at > self.info.timeout


class LaunchedOps:
    """The operations, in order and on one stream, that a thread has launched asynchronously; a `StreamWork`."""

    __slots__ = ("_failure", "_is_compared", "_launched")

    def __init__(
        self,
        launched: Sequence[InFlightOp],
        *,
        failure: Callable[[], DistributedError | None],  # the error with which the group has failed, or is about to
        is_compared: Callable[[int], bool],  # whether a call has been compared with the other ranks'
    ) -> None:
        self._launched = launched
        self._failure = failure
        self._is_compared = is_compared

    @property
    def error(self) -> DistributedError | None:
        """The error because of which their results are missing or worthless."""
        return self._failure()

    def done(self) -> bool:
        """Return whether the GPU has done them and the calls have been compared, or the group has failed."""
        return self._failure() is not None or all(
            launched.done() and self._is_compared(launched.info.sequence) for launched in self._launched
        )

    def wait_on_stream(self) -> None:
        """Make the current stream wait for them, but not the host. See [Note: lifetimes] in `stream_executor.py`."""
        if not self._launched:
            return
        streams = self._launched[-1].streams
        current = streams.current()
        streams.order(current, self._launched[-1].end)  # all are on one stream, so the last one ends last
        for launched in self._launched:
            if launched.caller != current.cuda_stream:
                for tensor in launched.kept:
                    streams.keep(tensor, current)
