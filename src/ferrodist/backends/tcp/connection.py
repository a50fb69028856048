"""A link: one non-blocking connection, with what is still to be written to it and what has been read ahead.

Kernel settings of a group's connections.

How the ranks of a star come together: rank 0 listens, the others dial, all prove themselves.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

from ferrodist.backends.tcp.wire import HEADER_SIZE, URGENT, Frame
from ferrodist.errors import (
    AuthenticationError,
    DistributedError,
    DistributedTimeoutError,
    InvalidRankError,
    InvalidWorldSizeError,
    ProtocolError,
    RendezvousError,
    ranks_text,
)
from ferrodist.rendezvous.auth import Hello, check_hello, connect
from ferrodist.rendezvous.listener import Listener, parse_address
from ferrodist.rendezvous.session import TAG_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.deadline import Deadline
    from ferrodist.rendezvous.session import Connection, Session

_READ_AHEAD = 64 * 1024
_FRAME_COST = 512  # bytes a waiting frame counts for beside its payload, so that empty ones don't pile up either
_DIRECT_READ = 16 * 1024  # from here on a read goes straight to where the bytes belong


class Sink(Protocol):
    """Where a frame's payload goes."""

    def __call__(self, fill: Callable[[memoryview], int], start: int, stop: int, /) -> int:
        """Let ``fill`` write payload bytes ``start`` to ``stop``; returns how many it wrote."""


class QueuedFrame:
    """A frame to be written.

    Args:
        frame: Its header.
        payload: ``frame.length`` bytes that stay unchanged until it is written.
        owner: Whom the payload belongs to, for `FramedConnection.drop`.
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


class FramedConnection:
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
        self.blocked_by: FramedConnection | None = None  # not read from while that link has too much relayed_bytes
        self.frame: Frame | None = None  # whose payload is being read
        self.covered: memoryview | None = None  # its payload, where its tag has to be looked at first
        self.sink: Sink | None = None  # where its payload goes
        self.num_read = 0  # bytes of its payload
        self.header = memoryview(bytearray(HEADER_SIZE + TAG_BYTES))
        self.num_header = 0
        self._ahead = memoryview(bytearray(_READ_AHEAD))
        self._ahead_start = self._ahead_stop = 0
        self._lock = threading.Lock()
        self._urgent: deque[QueuedFrame] = deque()
        self._queue: deque[QueuedFrame] = deque()
        self._current: QueuedFrame | None = None
        self._closed = False
        sock.setblocking(False)

    def push(self, outgoing: QueuedFrame) -> bool:
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

    def drop(self, owner: object, last: QueuedFrame | None) -> bool:
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


# These end a connection to a host that has vanished without closing it: probes after 5 idle seconds, one a second,
# given up after five. A killed process is seen at once, by its closed connection; a stopped one answers probes.
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 5))

# Data that is not taken for this long ends the connection too. The kernel can't tell a vanished host from a process
# that is stopped, so it is not before a call with the group's own timeout may run out of time. A call that names a
# longer one changes nothing here: the connection that waits for it may be another rank's. A host that has vanished is
# noticed after five minutes all the same, though calls may take half an hour.
_SHORTEST_UNTAKEN_SECONDS = 10.0
_LONGEST_UNTAKEN_SECONDS = 300.0


def tune(sock: socket.socket, timeout: float, buffer_bytes: int | None) -> None:
    """Set how a connection notices that its other end is gone, and how much the kernel buffers.

    Args:
        sock: The connection.
        timeout: Seconds a blocking call of the group may take when it names no timeout itself.
        buffer_bytes: Size of each of the kernel's buffers, None for its own tuning.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        untaken = min(max(timeout, _SHORTEST_UNTAKEN_SECONDS), _LONGEST_UNTAKEN_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(untaken * 1000))
    for option, value in _KEEPALIVE:
        if hasattr(socket, option):  # Linux has all of them, other systems some
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)


_PURPOSE = "group"
_REFUSAL = b"!"

_LOOK_SECONDS = 0.2
_SHORTAGE_SECONDS = 2.0
"""How long rank 0, which can take in no more connections, goes on telling so those that come."""


def refusal_of(error: DistributedError) -> bytes:
    """What rank 0 puts into a store in place of its address, when it can't listen."""
    return _REFUSAL + error.message.encode()


class _PublishedAddress(str):
    """Where rank 0 listens, as it has told itself; not where the user has the ranks find it, by whatever ways."""

    __slots__ = ()


def read_published(data: bytes) -> str:
    """The address that rank 0 has put into a store.

    Raises:
        RendezvousError: It is why there is none.
        ProtocolError: It is none.
    """
    if data.startswith(_REFUSAL):
        raise RendezvousError(data.removeprefix(_REFUSAL).decode(errors="replace"), ranks=(0,))
    try:
        parse_address(data.decode())
    except ValueError:
        raise ProtocolError(f"the store has {data[:100]!r} where rank 0 writes its address", ranks=(0,)) from None
    return _PublishedAddress(data.decode())


def gather_links(
    world_size: int,
    address: str,
    *,
    secret: bytes,
    job: str,
    group: str,
    listener: socket.socket | None,
    deadline: Deadline,
) -> tuple[dict[int, Connection], DistributedError | None]:
    """Rank 0: wait for every other rank.

    Returns:
        The authenticated connection of each rank that came, and why the others did not, if any are missing.
    """
    host, port = parse_address(address)
    check_hello(Hello(purpose=_PURPOSE, job=job, rank=world_size - 1, world_size=world_size, group=group))
    connections: dict[int, Connection] = {}
    admitted: set[int] = set()  # those, and ranks that are about to be told that they are let in
    changed = threading.Condition()

    def admit(hello: Hello) -> None:
        if hello.purpose != _PURPOSE or hello.job != job or hello.group != group:
            raise RendezvousError(
                f"rank {hello.rank} came for {hello.purpose} {hello.group!r} of job {hello.job!r}, but this is"
                f" group {group!r} of job {job!r}: two jobs share an address"
            )
        if hello.world_size != world_size:
            raise InvalidWorldSizeError(
                f"rank {hello.rank} was told a world size of {hello.world_size}, rank 0 one of {world_size}:"
                " start every rank with the same"
            )
        if not 1 <= hello.rank < world_size:
            raise InvalidRankError(f"rank {hello.rank} is not in 1..{world_size - 1}, the ranks that rank 0 waits for")
        with changed:
            if hello.rank in admitted:
                raise RendezvousError(
                    f"rank {hello.rank} is here already: two processes were started with this rank",
                    ranks=(hello.rank,),
                )
            admitted.add(hello.rank)

    def dismiss(hello: Hello) -> None:
        with changed:
            admitted.discard(hello.rank)

    def take(sock: Connection, hello: Hello) -> None:
        with changed:
            connections[hello.rank] = sock
            changed.notify()

    server = Listener(host, port, secret=secret, sock=listener, deadline=deadline)
    try:
        server.serve(admit, take, dismiss)
        with changed:
            while not _is_over(server, deadline, len(connections) == world_size - 1):
                changed.wait(min(deadline.remaining(), _LOOK_SECONDS))
            if server.shortage is not None:  # which peers that dial now are told
                changed.wait_for(lambda: len(connections) == world_size - 1, _SHORTAGE_SECONDS)
    finally:
        server.close()
    return connections, _error_of_missing(server, connections, world_size, group, deadline)


def _error_of_missing(
    server: Listener, connections: dict[int, Connection], world_size: int, group: str, deadline: Deadline
) -> RendezvousError | None:
    missing = tuple(rank for rank in range(1, world_size) if rank not in connections)
    if not missing:
        return None
    if server.shortage is not None:
        return RendezvousError(f"rank 0 of group {group!r}: {server.shortage.message}", ranks=(0,))
    turned_away = f" Turned away: {'; '.join(server.rejections)}." if server.rejections else ""
    names = f"{ranks_text(missing)} {'has' if len(missing) == 1 else 'have'}"
    return RendezvousError(
        f"{names} not connected to rank 0 of group {group!r} at {server.address} within {deadline.timeout:g} s."
        f"{turned_away} Check that every rank was started, with this address, world size and secret.",
        ranks=missing,
    )


def _is_over(server: Listener, deadline: Deadline, are_all_there: bool) -> bool:  # noqa: FBT001 - found out under a lock
    return are_all_there or server.shortage is not None or deadline.expired


def dial_hub(
    rank: int, world_size: int, address: str, *, secret: bytes, job: str, group: str, deadline: Deadline
) -> Connection:
    """Every other rank: connect to rank 0."""
    host, port = parse_address(address)
    told = str(address) if isinstance(address, _PublishedAddress) else ""
    hello = Hello(purpose=_PURPOSE, job=job, rank=rank, world_size=world_size, group=group, address=told)
    try:
        return connect(host, port, secret=secret, hello=hello, deadline=deadline)
    except DistributedTimeoutError as error:
        raise RendezvousError(
            f"rank 0 of group {group!r} did not take rank {rank}'s connection: {error.message}", ranks=(0,)
        ) from error
