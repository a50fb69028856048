"""Input and output of all connections of a rank, in one thread that never blocks on any of them."""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import threading
from typing import TYPE_CHECKING, Protocol

from ferrodist.backends.mailbox import copy_bytes
from ferrodist.backends.tcp.wire import HEADER_SIZE, Frame
from ferrodist.deadline import Deadline
from ferrodist.errors import ProtocolError

if TYPE_CHECKING:
    from ferrodist.backends.tcp.connection import FramedConnection, Sink

_READ_BUDGET = 4 << 20  # bytes read from one connection before the others get their turn

BLOCK_BYTES = 8 << 20  # a connection is not read from while this many bytes from it are queued for one other rank
_UNBLOCK_BYTES = 4 << 20  # ... until no more than this many are left

_BLOCKED_SECONDS = 0.05
"""Interval of reports of blocked connections: less than the time in which a rank must answer a PING."""


class ConnectionHandler(Protocol):
    """Handles everything that comes in. All calls come from the loop's thread."""

    def frame_begins(self, link: FramedConnection, frame: Frame) -> Sink:
        """A header has come; raises ProtocolError when the frame may not be."""

    def frame_ends(self, link: FramedConnection, frame: Frame, sink: Sink) -> None:
        """A whole frame has come."""

    def link_blocked(self, link: FramedConnection) -> None:
        """The connection is not read from at the moment; called repeatedly."""

    def link_ended(self, link: FramedConnection, reason: str, *, by_violation: bool) -> None:
        """The connection is closed; ``by_violation`` if this side closed it because of data that it received."""

    def loop_broke(self, error: Exception) -> None:
        """The loop's thread ends because of a defect."""


class IoLoop:
    """Reads frames from connections and writes the frames queued on them, until `stop`."""

    def __init__(self, handler: ConnectionHandler, world_size: int, name: str) -> None:
        self._handler = handler
        self._world_size = world_size
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ, None)
        # A blocked connection is watched only for its end: a killed rank must be seen, whatever is queued before that.
        self._ends = select.epoll() if hasattr(select, "epoll") else None
        if self._ends is not None:
            self._selector.register(self._ends, selectors.EVENT_READ, self._ends)
        self._blocked: dict[int, FramedConnection] = {}  # by descriptor
        self._next_report = Deadline(0.0)  # when blocked connections are reported next
        self._lock = threading.Lock()
        self._touched: set[FramedConnection] = set()
        self._links: dict[FramedConnection, int] = {}  # and the events registered for them
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake_for(self, link: FramedConnection) -> None:
        """Watch a new connection, or write to one with queued frames. Any thread may call."""
        with self._lock:
            self._touched.add(link)
        self._wake()

    def stop(self) -> None:
        """End the thread and close all connections."""
        self._stopping = True
        if self._thread.ident is None:
            self._release()
            return
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # if full, it will wake up; if closed, it has ended
            self._wake_out.send(b"\0")

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._watch_touched()
                self._report_blocked()
                for key, events in self._selector.select(_BLOCKED_SECONDS if self._blocked else None):
                    if key.data is None:
                        with contextlib.suppress(BlockingIOError):
                            self._wake_in.recv(4096)
                    elif key.data is self._ends:
                        self._serve_ends()
                    else:
                        self._serve(key.data, events)
        except Exception as error:  # noqa: BLE001 - ranks must not wait for a thread that is gone
            self._handler.loop_broke(error)
        finally:
            self._release()

    def _release(self) -> None:
        with self._lock:
            unwatched = self._touched - self._links.keys()  # new ones, if the loop was stopped at once
        for link in (*self._links, *unwatched):
            link.close()
        self._selector.close()
        if self._ends is not None:
            self._ends.close()
        self._wake_in.close()
        self._wake_out.close()

    def _watch_touched(self) -> None:
        with self._lock:
            touched, self._touched = self._touched, set()
        for link in touched:
            if link not in self._links and not link.closed:
                self._links[link] = 0
            self._watch(link)

    def _watch(self, link: FramedConnection) -> None:
        """Register with the selector the events that a connection needs."""
        before = self._links.get(link)
        if before is None:
            return
        self._watch_end(link)
        wanted = 0 if link.blocked_by else selectors.EVENT_READ
        if link.waiting:
            wanted |= selectors.EVENT_WRITE
        if wanted == before:
            return
        if not before:
            self._selector.register(link.sock, wanted, link)
        elif not wanted:
            self._selector.unregister(link.sock)
        else:
            self._selector.modify(link.sock, wanted, link)
        self._links[link] = wanted

    def _watch_end(self, link: FramedConnection) -> None:
        """Watch for a connection's end while it is blocked, and only then."""
        if self._ends is None:
            link.blocked_by = None
            return
        descriptor = link.sock.fileno()
        if link.blocked_by is not None and descriptor not in self._blocked:
            self._blocked[descriptor] = link
            self._ends.register(descriptor, select.EPOLLRDHUP)
        elif link.blocked_by is None and descriptor in self._blocked:
            del self._blocked[descriptor]
            self._ends.unregister(descriptor)

    def _report_blocked(self) -> None:
        if self._blocked and self._next_report.expired:
            self._next_report = Deadline(_BLOCKED_SECONDS)
            for link in list(self._blocked.values()):
                self._handler.link_blocked(link)

    def _serve_ends(self) -> None:
        """A blocked connection has ended: read the rest of its data, regardless of the room, to reach its end."""
        assert self._ends is not None
        for descriptor, _ in self._ends.poll(0):
            link = self._blocked.get(descriptor)
            if link is None:
                continue  # the end of another one, served just before, has unblocked it and read from it
            while link in self._links:
                link.blocked_by = None
                if not self._read(link):
                    break
            self._watch(link)

    def _serve(self, link: FramedConnection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            link.flush()
            if link.relayed_bytes <= _UNBLOCK_BYTES:
                self._unblock(link)
        if events & selectors.EVENT_READ:
            self._read(link)
        self._watch(link)

    def _unblock(self, full: FramedConnection) -> None:
        for link in [link for link in self._links if link.blocked_by is full]:
            link.blocked_by = None
            self._read(link)  # the selector does not announce read-ahead bytes again
            self._watch(link)

    def _read(self, link: FramedConnection) -> bool:
        """Read the data that is there, frame by frame, up to the budget; False if no more is there now."""
        budget = _READ_BUDGET
        try:
            # Without epoll no connection is ever blocked, for its end could not be seen meanwhile.
            while (link.blocked_by is None or self._ends is None) and (budget > 0 or link.has_read_ahead):
                if link.frame is None:
                    count = link.read_into(link.header[link.num_header :])
                    link.num_header += count
                    if link.num_header == len(link.header):
                        self._begin(link)
                elif link.covered is not None:
                    count = link.read_into(link.covered[link.num_read :])
                    link.num_read += count
                    if link.num_read == len(link.covered):
                        self._begin_covered(link, link.frame, link.covered)
                else:
                    assert link.sink is not None
                    count = link.sink(link.read_into, link.num_read, link.frame.length)
                    link.num_read += count
                    self._end_if_whole(link)
                budget -= count
                if count == 0:
                    self.end(link, "its connection closed")
                    return False
        except BlockingIOError:
            return False
        except ProtocolError as error:
            self.end(link, error.message, by_violation=True)
        except OSError as error:
            self.end(link, f"its connection broke ({error.strerror or error})")
        return link in self._links

    def _begin(self, link: FramedConnection) -> None:
        link.num_header = link.num_read = 0
        frame = Frame.unpack(link.header[:HEADER_SIZE], self._world_size)
        if frame.length and frame.is_covered:
            link.covered = memoryview(bytearray(frame.length))
        else:
            link.check(b"")
            link.sink = self._handler.frame_begins(link, frame)
        link.frame = frame
        self._end_if_whole(link)

    def _begin_covered(self, link: FramedConnection, frame: Frame, payload: memoryview) -> None:
        """Check a payload before anything else sees it, then hand it over."""
        link.check(payload)
        link.covered = None
        link.sink = self._handler.frame_begins(link, frame)
        link.num_read = 0
        while link.num_read < frame.length:
            rest = payload[link.num_read :]

            def fill(target: memoryview, rest: memoryview = rest) -> int:
                copy_bytes(target, rest[: len(target)])
                return len(target)

            link.num_read += link.sink(fill, link.num_read, frame.length)
        self._end_if_whole(link)

    def _end_if_whole(self, link: FramedConnection) -> None:
        frame, sink = link.frame, link.sink
        if frame is not None and sink is not None and link.num_read == frame.length:
            link.frame = link.sink = None
            self._handler.frame_ends(link, frame, sink)

    def end(self, link: FramedConnection, reason: str, *, by_violation: bool = False) -> None:
        """Close a connection from the loop's thread and report it."""
        if self._links.pop(link, 0):
            self._selector.unregister(link.sock)
        link.blocked_by = None
        self._watch_end(link)
        link.close()
        self._unblock(link)
        self._handler.link_ended(link, reason, by_violation=by_violation)
