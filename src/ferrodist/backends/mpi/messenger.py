"""Frames over an MPI communicator: what goes out waits in order, what comes in is handed over in order.

MPI gets copies, so whatever becomes of a message, no user's buffer is MPI's. What it has been given can't be taken
back; so of each rank's messages only `_WINDOW_BYTES` are given to it at a time, and the rest can be.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ferrodist.backends.mpi.frame import HEADER_SIZE, MAX_FRAME, Frame, Kind
from ferrodist.backends.mpi.kept import keep_for_ever
from ferrodist.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Messenger", "Outgoing"]

_WINDOW_BYTES = 4 << 20
_TAG = 0
_MOST_AT_ONCE = 64

_URGENT = frozenset({Kind.GRANT, Kind.ABORT, Kind.PING, Kind.PONG})
"""Frames that may overtake others on their way."""


@dataclass(slots=True, eq=False)
class Outgoing:
    """A frame on its way out.

    Args:
        frame: Its header.
        payload: Bytes that go along, read when MPI takes the frame.
        owner: What it is a part of.
        on_taken: Called when MPI has the frame, and the payload may change.
    """

    frame: Frame
    payload: memoryview | bytes = b""
    owner: object = None
    on_taken: Callable[[], None] | None = None


@dataclass(slots=True)
class _Way:
    """To and from one rank."""

    waiting: deque[Outgoing] = field(default_factory=deque)
    taken: deque[tuple[Any, int]] = field(default_factory=deque)  # requests of MPI's, and their bytes
    taken_bytes: int = 0
    coming: deque[tuple[Any, Any]] = field(default_factory=deque)  # requests of MPI's, and their buffers
    is_lost: bool = False


class Messenger:
    """One rank's frames to and from the others of a communicator.

    Args:
        mpi: The module ``mpi4py.MPI``.
        communicator: One that nothing else uses.
        take: ``take(source, frame, payload)`` acts on a frame that has come; one at a time, in order.
    """

    def __init__(self, mpi: Any, communicator: Any, take: Callable[[int, Frame, memoryview], None]) -> None:
        self._mpi = mpi
        self._communicator = communicator
        self._take = take
        self._ways = [_Way() for _ in range(communicator.Get_size())]
        self._sending = threading.Lock()  # not held while anyone is told of anything
        self._receiving = threading.Lock()
        self._status = mpi.Status()
        self._has_ended = False
        self.num_coming = 0

    def push(self, destination: int, outgoing: Outgoing) -> None:
        """Send a frame as soon as MPI may have it; to a rank that is lost, nowhere."""
        way = self._ways[destination]
        taken: list[Outgoing] = []
        with self._sending:
            if way.is_lost or self._has_ended:
                return
            if outgoing.frame.kind in _URGENT:
                self._give(way, destination, outgoing, taken)
            else:
                way.waiting.append(outgoing)
                self._give_more(way, destination, taken)
        _tell(taken)

    def drop(self, destination: int, owner: object) -> int:
        """Take back what MPI has not been given of an owner's frames; returns how many those are."""
        way = self._ways[destination]
        with self._sending:
            kept = [outgoing for outgoing in way.waiting if outgoing.owner is not owner]
            num_dropped = len(way.waiting) - len(kept)
            way.waiting = deque(kept)
        return num_dropped

    def is_lost(self, rank: int) -> bool:
        """Whether a rank is gone."""
        return self._ways[rank].is_lost

    def lose(self, rank: int) -> None:
        """A rank is gone: nothing goes to it any more, and what is under way may never end."""
        way = self._ways[rank]
        with self._sending:
            way.is_lost = True
            way.waiting.clear()
            for request, _ in way.taken:
                keep_for_ever(request)
            way.taken.clear()

    def is_idle(self) -> bool:
        """Whether all that was pushed has been sent."""
        return not any(way.waiting or way.taken for way in self._ways)

    def end(self) -> None:
        """Return when no thread uses the communicator, and none will: it may be freed."""
        with self._receiving, self._sending:
            self._has_ended = True

    def look(self, patience: float = 0) -> bool:
        """Move what can be moved; whether there was anything. Raises what MPI raises.

        Args:
            patience: Seconds to wait for another thread that is looking; without, it does the work.
        """
        if not self._receiving.acquire(timeout=patience):
            return False
        try:
            return False if self._has_ended else self._look_out() | self._look_in()
        finally:
            self._receiving.release()

    # Out.

    def _look_out(self) -> bool:
        moved = False
        taken: list[Outgoing] = []
        with self._sending:
            for destination, way in enumerate(self._ways):
                while way.taken and way.taken[0][0].Test():
                    way.taken_bytes -= way.taken.popleft()[1]
                    moved = True
                if way.waiting:
                    self._give_more(way, destination, taken)
        _tell(taken)
        return moved or bool(taken)

    def _give_more(self, way: _Way, destination: int, taken: list[Outgoing]) -> None:
        while way.waiting and way.taken_bytes <= _WINDOW_BYTES:
            self._give(way, destination, way.waiting.popleft(), taken)

    def _give(self, way: _Way, destination: int, outgoing: Outgoing, taken: list[Outgoing]) -> None:
        size = HEADER_SIZE + len(outgoing.payload)
        data = np.empty(size, np.uint8)
        data[:HEADER_SIZE] = np.frombuffer(outgoing.frame.pack(), np.uint8)
        if size > HEADER_SIZE:
            data[HEADER_SIZE:] = np.frombuffer(outgoing.payload, np.uint8)
        way.taken.append((self._communicator.Isend([data, size, self._mpi.BYTE], destination, _TAG), size))
        way.taken_bytes += size
        taken.append(outgoing)

    # In.

    def _look_in(self) -> bool:
        mpi, status = self._mpi, self._status
        moved = False
        for _ in range(_MOST_AT_ONCE):
            message = self._communicator.Improbe(mpi.ANY_SOURCE, _TAG, status)
            if message is None:
                break
            moved = True
            source, size = status.Get_source(), status.Get_count(mpi.BYTE)
            data = np.empty(size, np.uint8)
            self._ways[source].coming.append((message.Irecv([data, size, mpi.BYTE]), data))
            self.num_coming += 1
            if size > MAX_FRAME:
                raise ProtocolError(f"a frame of {size} bytes; they have at most {MAX_FRAME}", ranks=(source,))
        if self.num_coming:
            for source, way in enumerate(self._ways):
                while self._has_come(way):
                    data = way.coming.popleft()[1].data
                    self.num_coming -= 1
                    moved = True
                    self._act_on(source, data)
        return moved

    def _act_on(self, source: int, data: memoryview) -> None:
        try:
            self._take(source, Frame.unpack(data), data[HEADER_SIZE:])
        except ProtocolError as error:
            raise ProtocolError(f"rank {source} broke the protocol: {error.message}", ranks=(source,)) from None

    def _has_come(self, way: _Way) -> bool:
        """Whether a rank's next frame is here.

        What has begun to come from one that is gone may never be: MPI raises, once, and then calls it done.
        """
        if not way.coming:
            return False
        try:
            has_come = bool(way.coming[0][0].Test())
        except self._mpi.Exception:
            self._forget_coming(way)
            raise
        if way.is_lost and not has_come:
            self._forget_coming(way)
        return has_come

    def _forget_coming(self, way: _Way) -> None:
        self.num_coming -= len(way.coming)
        for request, _ in way.coming:
            keep_for_ever(request)
        way.coming.clear()


def _tell(taken: list[Outgoing]) -> None:
    for outgoing in taken:
        if outgoing.on_taken is not None:
            outgoing.on_taken()
