"""A non-blocking connection of a star: its write queue, its read-ahead buffer and its kernel settings.

[Note: interrupted writes]
Frames are also written by the threads that send, the main thread among them, where a signal handler may raise between
any two steps: as Ctrl-C does, and the alarm of a test's timeout. Bytes that are written twice, or a frame that is lost,
would end the connection, and with it the group. So whoever writes next finds out how far the last one came:

- A frame stays in its queue until it has been written and finished, and each step of finishing it can be done again.
- The numbers of bytes that the kernel has taken are appended to the frame's list by the same call that writes them, in
  C (`list.extend` of a `map`), where no handler runs in between.
- Callbacks move to `_due` in the same way; any thread calls them, at most once. A callback that is interrupted, or is
  about to be called then, is lost: mostly its send is the one whose call the handler ends.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ferrodist.backends.frame_type import URGENT
from ferrodist.backends.tcp.wire import HEADER_SIZE, Frame
from ferrodist.errors import AuthenticationError, ProtocolError
from ferrodist.rendezvous.session import TAG_BYTES, Session

if TYPE_CHECKING:
    from collections.abc import Callable

_READ_AHEAD = 64 * 1024
_MOST_COUNTS = 32  # of a frame: then they are added up
_FRAME_COST = 512  # bytes that a waiting frame counts for beside its payload, so that empty ones are bounded, too
_DIRECT_READ = 16 * 1024  # reads of at least so many bytes bypass the read-ahead buffer


class Sink(Protocol):
    """The consumer of a frame's payload, such as the buffer of a receive."""

    def __call__(self, fill: Callable[[memoryview], int], start: int, stop: int, /) -> int:
        """Have ``fill(buffer)`` write the payload's bytes from ``start`` to ``stop``; return how many it wrote."""


@dataclass(slots=True, eq=False)
class QueuedFrame:
    """A frame to be written."""

    frame: Frame
    payload: memoryview | bytes = b""  # ``frame.length`` bytes that stay unchanged until they are written
    owner: object = None  # the payload's owner, for `FramedConnection.drop`
    on_written: Callable[[], object] | None = None  # called once the last byte has been given to the kernel
    relayed: bool = False  # whether it only passes through this rank
    number: int = 0  # in its session, once it is the current one
    views: list[memoryview] = field(default_factory=list)  # its bytes, from then on
    counts: list[int] = field(default_factory=list)  # of bytes that the kernel has taken, per write
    callbacks: list[Callable[[], object]] = field(default_factory=list)  # `on_written`, until it is due

    @property
    def begun(self) -> bool:
        """Return whether the kernel has taken any byte of it: then the rest must follow."""
        return bool(self.counts)


class FramedConnection:
    """A connection to a peer, which owns its socket. Any thread may `push`; one thread reads and calls `flush`."""

    def __init__(self, sock: socket.socket, peer: int, session: Session) -> None:
        self.sock = sock
        self.peer = peer
        self._session = session
        self.has_left = False  # LEFT for the whole group has come from the peer
        self.num_reads = 0  # reads that returned bytes
        self.relayed_bytes = 0  # queued on behalf of other ranks
        self.blocked_by: FramedConnection | None = None  # not read from while that link has too much relayed_bytes
        self.frame: Frame | None = None  # the frame whose payload is being read
        self.covered: memoryview | None = None  # its payload, if its tag must be checked first
        self.sink: Sink | None = None  # the consumer of its payload
        self.num_read = 0  # bytes of its payload so far
        self.header = memoryview(bytearray(HEADER_SIZE + TAG_BYTES))
        self.num_header = 0
        self._ahead = memoryview(bytearray(_READ_AHEAD))
        self._ahead_start = self._ahead_stop = 0
        self._lock = threading.Lock()
        self._urgent: deque[QueuedFrame] = deque()
        self._queue: deque[QueuedFrame] = deque()
        self._current: QueuedFrame | None = None  # the first one of its queue
        self._due: deque[Callable[[], object]] = deque()
        self.closed = False
        sock.setblocking(False)

    def push(self, outgoing: QueuedFrame) -> bool:
        """Write a frame, or queue it. True if frames wait to be written: then the caller must have `flush` called."""
        with self._lock:
            if self.closed:
                return False
            was_waiting = self._waiting()
            if outgoing.on_written is not None:
                outgoing.callbacks.append(outgoing.on_written)
            self._queue_of(outgoing).append(outgoing)
            if outgoing.relayed:
                self.relayed_bytes += outgoing.frame.length + _FRAME_COST
            if was_waiting:
                return True
            self._write()
            waiting = self._waiting()
        self._call_due()
        return waiting

    def flush(self) -> None:
        """Write as much as the socket takes. Connection errors show when reading."""
        with self._lock:
            self._write()
        self._call_due()

    @property
    def waiting(self) -> bool:
        """Return whether frames wait to be written."""
        with self._lock:
            return self._waiting()

    @property
    def has_read_ahead(self) -> bool:
        """Return whether bytes have been read that `read_into` has not returned."""
        return self._ahead_start < self._ahead_stop

    def drop(self, owner: object) -> bool:
        """Take a message back: drop an owner's frames that are not begun, and finish one that is from a copy.

        Returns whether the frame that completes the message, which has ``on_written``, was dropped.
        """
        with self._lock:
            current = self._current
            if current is not None and current.owner is owner:
                if current.begun:
                    current.views = [memoryview(bytes(view)) for view in current.views]
                    current.callbacks.clear()
                else:
                    self._current = current = None
            dropped = [outgoing for outgoing in self._queue if outgoing.owner is owner and outgoing is not current]
            if dropped:
                self._queue = deque(each for each in self._queue if each.owner is not owner or each is current)
            return any(outgoing.callbacks for outgoing in dropped)

    def read_into(self, target: memoryview) -> int:
        """Read into ``target``; the number of bytes, or 0 if the peer has closed. BlockingIOError: none are there."""
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
        """Check a received frame's tag; ProtocolError if the frame is not the next one that the peer has written."""
        try:
            self._session.incoming.check(self.header[HEADER_SIZE:], self.header[:HEADER_SIZE], payload)
        except AuthenticationError as error:
            raise ProtocolError(f"{error.message}, by whoever relays this connection, or by the rank") from None

    def close(self) -> None:
        """Close the connection; frames that wait to be written are dropped."""
        with self._lock:
            self.closed = True
            self._forget_queued()
            self.sock.close()

    def finish_writing(self) -> None:
        """Signal the peer that nothing more will come."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def _waiting(self) -> bool:
        return bool(self._urgent) or bool(self._queue)

    def _queue_of(self, outgoing: QueuedFrame) -> deque[QueuedFrame]:
        return self._urgent if outgoing.frame.kind in URGENT else self._queue

    def _write(self) -> None:
        """Write until the socket is full. The lock is held. See [Note: interrupted writes]."""
        try:
            while self._current is not None or self._take_next():
                current = self._current
                assert current is not None
                if len(current.counts) > _MOST_COUNTS:
                    current.counts = [sum(current.counts)]
                views = _rest(current.views, sum(current.counts))
                if views:
                    current.counts.extend(map(self.sock.sendmsg, (views,)))
                else:
                    self._finish(current)
        except BlockingIOError:
            pass
        except OSError:  # the reader sees the same and reports it
            self._forget_queued()

    def _take_next(self) -> bool:
        queue = self._urgent or self._queue
        if not queue:
            return False
        following = queue[0]
        frame, payload = following.frame, following.payload
        header = frame.pack()
        following.number = self._session.outgoing.sequence_number
        tag = self._session.outgoing.tag(header, payload if frame.is_covered else b"")
        following.views = [memoryview(header + tag)]
        if frame.length:
            following.views.append(memoryview(payload))
        self._current = following
        return True

    def _finish(self, current: QueuedFrame) -> None:
        self._session.outgoing.advance(current.number)
        if current.callbacks:
            self._due.extend(map(list.pop, (current.callbacks,)))
        if current.relayed:
            current.relayed = False
            self.relayed_bytes -= current.frame.length + _FRAME_COST
        queue = self._queue_of(current)
        if queue and queue[0] is current:
            queue.popleft()
        self._current = None

    def _call_due(self) -> None:
        """Call the callbacks of frames that have been written. The lock is not held."""
        while self._due:
            try:
                callback = self._due.popleft()
            except IndexError:  # another thread has called it
                return
            callback()

    def _forget_queued(self) -> None:
        self._queue.clear()
        self._urgent.clear()
        self._current = None


def _rest(views: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of ``views`` without their first ``count`` bytes."""
    if count == 0:
        return views
    rest = []
    for view in views:
        if count < len(view):
            rest.append(view[count:])
        count = max(0, count - len(view))
    return rest


# Keep-alive ends a connection to a host that has vanished without closing it: probes after 5 idle seconds, one a
# second, given up after five. A killed process is seen at once, by its closed connection; a stopped one answers probes.
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 5))

# Data that is not acknowledged for this long ends the connection, too. The kernel can't tell a vanished host from a
# stopped process, so this must not be shorter than the group's own timeout. A call with a longer timeout changes
# nothing: the connection that waits for it may be another rank's. A vanished host is noticed after five minutes all the
# same, though calls may take half an hour.
_MIN_UNACKNOWLEDGED_SECONDS = 10.0
_MAX_UNACKNOWLEDGED_SECONDS = 300.0


def tune(sock: socket.socket, timeout: float, buffer_bytes: int | None) -> None:
    """Set how a connection detects that its peer is gone, and how much the kernel buffers; None lets it choose."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        seconds = min(max(timeout, _MIN_UNACKNOWLEDGED_SECONDS), _MAX_UNACKNOWLEDGED_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
    for option, value in _KEEPALIVE:
        if hasattr(socket, option):  # Linux has all of them, other systems some
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
