"""A link: one non-blocking connection, with what is still to be written to it and what has been read ahead."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

from ferrodist.backends.tcp.frame import HEADER_SIZE, URGENT, Frame
from ferrodist.errors import AuthenticationError, ProtocolError
from ferrodist.rendezvous.session import TAG_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.rendezvous.session import Session

__all__ = ["Link", "Outgoing", "Sink"]

_READ_AHEAD = 64 * 1024
_FRAME_COST = 512  # bytes a waiting frame counts for beside its payload, so that empty ones don't pile up either
_DIRECT_READ = 16 * 1024  # from here on a read goes straight to where the bytes belong


class Sink(Protocol):
    """Where a frame's payload goes."""

    def __call__(self, fill: Callable[[memoryview], int], start: int, stop: int, /) -> int:
        """Let ``fill`` write payload bytes ``start`` to ``stop``; returns how many it wrote."""


class Outgoing:
    """A frame to be written.

    Args:
        frame: Its header.
        payload: ``frame.length`` bytes that stay unchanged until it is written.
        owner: Whom the payload belongs to, for `Link.drop`.
        on_written: Called once the last byte has been given to the kernel.
        relayed: Whether it passes through this rank only.
    """

    __slots__ = ("begun", "cost", "frame", "on_written", "owner", "payload", "relayed", "views")

    def __init__(
        self,
        frame: Frame,
        payload: memoryview | bytes = b"",
        *,
        owner: object = None,
        on_written: Callable[[], object] | None = None,
        relayed: bool = False,
    ) -> None:
        self.frame = frame
        self.payload = payload
        self.owner = owner
        self.on_written = on_written
        self.relayed = relayed
        self.cost = frame.length + _FRAME_COST
        self.begun = False  # a byte of it has been given to the kernel, so the rest must follow
        self.views: list[memoryview] = []


class Link:
    """A connection to a peer. Any thread may `push`; one thread reads and calls `flush`.

    Args:
        sock: A connected, authenticated socket; the link owns it.
        peer: The rank on the other side.
        session: The connection's keys.
    """

    def __init__(self, sock: socket.socket, peer: int, session: Session) -> None:
        self.sock = sock
        self.peer = peer
        self._session = session
        self.has_left = False  # LEFT for the whole group has come from the peer
        self.num_reads = 0  # how often something has come
        self.relayed_bytes = 0  # waiting to be written, on behalf of others
        self.blocked_by: Link | None = None  # not read from while that link has too much relayed_bytes
        self.frame: Frame | None = None  # whose payload is being read
        self.covered: memoryview | None = None  # its payload, where its tag has to be looked at first
        self.sink: Sink | None = None  # where its payload goes
        self.num_read = 0  # bytes of its payload
        self.header = memoryview(bytearray(HEADER_SIZE + TAG_BYTES))
        self.num_header = 0
        self._ahead = memoryview(bytearray(_READ_AHEAD))
        self._ahead_start = self._ahead_stop = 0
        self._lock = threading.Lock()
        self._urgent: deque[Outgoing] = deque()
        self._queue: deque[Outgoing] = deque()
        self._current: Outgoing | None = None
        self._closed = False
        sock.setblocking(False)

    def push(self, outgoing: Outgoing) -> bool:
        """Write a frame, or queue it. True when something waits to be written: see to it that `flush` is called."""
        with self._lock:
            if self._closed:
                return False
            was_waiting = self._waiting()
            (self._urgent if outgoing.frame.kind in URGENT else self._queue).append(outgoing)
            if outgoing.relayed:
                self.relayed_bytes += outgoing.cost
            if was_waiting:
                return True
            written = self._write()
            waiting = self._waiting()
        for callback in written:
            callback()
        return waiting

    def flush(self) -> None:
        """Write what the socket takes now. Connection errors show when reading."""
        with self._lock:
            written = self._write()
        for callback in written:
            callback()

    @property
    def waiting(self) -> bool:
        """Whether frames wait to be written."""
        with self._lock:
            return self._waiting()

    @property
    def has_read_ahead(self) -> bool:
        """Whether bytes have been read that `read_into` has not given out."""
        return self._ahead_start < self._ahead_stop

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    def drop(self, owner: object, last: Outgoing | None) -> bool:
        """Take a message back: forget its frames that are not begun; of one that is, the rest goes out from a copy.

        Args:
            owner: Whose frames.
            last: The frame that completes the message, once it has been pushed.

        Returns:
            False when ``last`` is begun: the message will arrive.
        """
        with self._lock:
            self._queue = deque(outgoing for outgoing in self._queue if outgoing.owner is not owner)
            current = self._current
            if current is not None and current.owner is owner:
                current.on_written = None
                if current.begun:
                    current.views = [memoryview(bytes(view)) for view in current.views]
                else:
                    self._current = None
            return last is None or not last.begun

    def read_into(self, target: memoryview) -> int:
        """Read at least one byte into ``target``.

        Returns:
            How many; 0 when the peer has closed the connection.

        Raises:
            BlockingIOError: Nothing is there now.
            OSError: The connection is broken.
        """
        if self._ahead_start == self._ahead_stop:
            if len(target) >= _DIRECT_READ:
                count = self.sock.recv_into(target)
                self.num_reads += 1
                return count
            self._ahead_start = self._ahead_stop = 0
            self._ahead_stop = self.sock.recv_into(self._ahead)
            self.num_reads += 1
        count = min(len(target), self._ahead_stop - self._ahead_start)
        target[:count] = self._ahead[self._ahead_start : self._ahead_start + count]
        self._ahead_start += count
        return count

    def check(self, payload: memoryview | bytes) -> None:
        """Compare a frame that has come, its header and the payload that its tag covers, with the tag.

        Raises:
            ProtocolError: It is not the next frame that the peer has written.
        """
        try:
            self._session.incoming.check(self.header[HEADER_SIZE:], self.header[:HEADER_SIZE], payload)
        except AuthenticationError as error:
            raise ProtocolError(f"{error.message}, by whoever passes on this connection, or by the rank") from None

    def close(self) -> None:
        """Close the connection; what waits to be written is dropped."""
        with self._lock:
            self._closed = True
            self._forget_queued()
            self.sock.close()

    def finish_writing(self) -> None:
        """Tell the peer that nothing more will come."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def _waiting(self) -> bool:
        return self._current is not None or bool(self._urgent) or bool(self._queue)

    def _write(self) -> list[Callable[[], object]]:
        """Under the lock: write until the socket is full; returns what to call after."""
        written: list[Callable[[], object]] = []
        try:
            while self._current is not None or self._take_next():
                current = self._current
                assert current is not None
                _advance(current.views, self.sock.sendmsg(current.views))
                if not current.begun:
                    current.begun = True
                    self._session.outgoing.advance()
                if current.views:
                    continue
                if current.relayed:
                    self.relayed_bytes -= current.cost
                if current.on_written is not None:
                    written.append(current.on_written)
                self._current = None
        except BlockingIOError:
            pass
        except OSError:  # the reader sees the same and reports it
            self._forget_queued()
        return written

    def _take_next(self) -> bool:
        queue = self._urgent or self._queue
        if not queue:
            return False
        self._current = queue.popleft()
        frame, payload = self._current.frame, self._current.payload
        header = frame.pack()
        tag = self._session.outgoing.tag(header, payload if frame.is_covered else b"")
        self._current.views = [memoryview(header + tag)]
        if frame.length:
            self._current.views.append(memoryview(payload))
        return True

    def _forget_queued(self) -> None:
        self._queue.clear()
        self._urgent.clear()
        self._current = None


def _advance(views: list[memoryview], count: int) -> None:
    """Drop the first ``count`` bytes of ``views``."""
    while views and count >= len(views[0]):
        count -= len(views.pop(0))
    if views:
        views[0] = views[0][count:]
