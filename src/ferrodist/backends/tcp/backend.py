"""The TCP star as a backend.

One thread of each rank (`IoLoop`) reads and writes all of its connections and never blocks on one. So frames keep
moving, whatever the sizes of socket buffers and whichever ranks wait for each other: a rank that computes still relays,
receives and grants. Senders write straight from their own thread while the socket takes it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from functools import partial
from typing import TYPE_CHECKING

from typing_extensions import Self, override

from ferrodist.arguments import check_int
from ferrodist.backends.frame_type import FrameType
from ferrodist.backends.framed_backend import FramedBackend
from ferrodist.backends.group_observer import PeerExit
from ferrodist.backends.lifecycle import track
from ferrodist.backends.liveness import LivenessProbe
from ferrodist.backends.stragglers import Stragglers
from ferrodist.backends.tags import LOW_64_BITS, WORLD_GROUP_ID, group_of_tag
from ferrodist.backends.tcp.bootstrap import dial_hub, gather_links, join_members
from ferrodist.backends.tcp.connection import FramedConnection, QueuedFrame, Sink, tune
from ferrodist.backends.tcp.io_loop import BLOCK_BYTES, IoLoop
from ferrodist.backends.tcp.wire import MAX_PAYLOAD, Frame
from ferrodist.deadline import Deadline, check_timeout
from ferrodist.errors import DistributedError, ProtocolError, RendezvousError
from ferrodist.rendezvous.auth import Hello
from ferrodist.rendezvous.secret import resolve_secret
from ferrodist.resource_limits import naming_limits

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from ferrodist.backends.mailbox import Message
    from ferrodist.backends.mailbox_backend import Send
    from ferrodist.rendezvous import Membership
    from ferrodist.rendezvous.session import Connection

_HUB = 0
_CLOSE_SECONDS = 5.0  # how long `TcpBackend.close` goes on relaying messages between ranks that are still there
_ANSWER_GRACE_SECONDS = 0.5  # how long past its deadline a connected rank waits for rank 0 to name the missing rank
_FAREWELL_SECONDS = 0.2  # how long a rank that was not let in waits until its notices are sent
_FLUSH_POLL_INTERVAL_SECONDS = 0.01


class TcpBackend(FramedBackend):
    """A rank of a group connected by TCP through rank 0.

    Ranks other than 0 have one connection, to rank 0, which relays the messages between them. That needs no more than
    one reachable port, and costs rank 0 the traffic of all pairs. Returns when every rank is connected.

    A rank that is stopped, not killed, is found by a deadline: a rank whose wait has timed out asks its peers, and rank
    0, to answer within 0.2 s, and names those that don't; rank 0 alone if it is rank 0 that does not answer. If all
    answer, all peers are named.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        address: "host:port" that rank 0 binds and the others dial.
        secret: The job secret, the same on every rank; None takes the environment's FERRODIST_SECRET. Without one rank
            0 refuses to bind anything but a loopback address, and ranks prove that they know their user's secret.
        timeout: Default of blocking calls' ``timeout``, in seconds. On Linux a rank that takes no data for that long
            (10 to 300 s) is given up as dead, whatever timeout a call names: make this the longest that the program
            uses, if ranks may be stopped and go on. None takes FERRODIST_TIMEOUT's, or `DEFAULT_COLLECTIVE_TIMEOUT`.
        name: The group's name in error messages.
        job: Name of the job; ranks of another one are turned away.
        listener: For rank 0: a bound, listening socket to use in place of ``address``; the group closes it.
        connect_timeout: Seconds for all ranks to connect; None takes ``timeout``.
        socket_buffer_bytes: Size of the kernel's buffers, None for the kernel's own tuning.

    Raises:
        RendezvousError: On every rank, when some did not come in time; they are named.
        AuthenticationError: This rank's secret is not rank 0's.
        InvalidRankError, InvalidWorldSizeError: Rank 0 expects another rank or world size.
    """

    _max_payload = MAX_PAYLOAD

    def __init__(
        self,
        rank: int,
        world_size: int,
        address: str,
        *,
        secret: str | bytes | None = None,
        timeout: float | None = None,
        name: str = "world",
        job: str = "default",
        listener: socket.socket | None = None,
        connect_timeout: float | None = None,
        socket_buffer_bytes: int | None = None,
    ) -> None:
        if not isinstance(address, str):
            raise TypeError(f"address must be 'host:port', not {address!r}")
        if socket_buffer_bytes is not None:
            check_int("socket_buffer_bytes", socket_buffer_bytes, min=1)
        super().__init__(rank, world_size, timeout=timeout, name=name)
        self._links: dict[int, FramedConnection] = {}
        self._buffer_bytes = socket_buffer_bytes
        self._changed = threading.Condition()
        self._ready = False
        self.relays_messages = True  # whether messages between other ranks pass through rank 0
        self._handlers: dict[FrameType, Callable[[int, Frame, memoryview | bytes], None]] = {
            FrameType.OFFER: self._on_offer,
            FrameType.GRANT: self._on_grant,
            FrameType.DATA: self._on_data,
            FrameType.WITHDRAW: self._on_withdraw,
            FrameType.ABORT: self._on_abort,
            FrameType.LEFT: self._on_left,
            FrameType.DIED: self._on_died,
            FrameType.READY: self._on_ready,
            FrameType.PING: lambda source, *_: self._answer(source),
            FrameType.PONG: lambda source, *_: self._liveness.on_answer(source),
        }
        self._liveness = LivenessProbe(self._ping, self._wait_for_change, self._num_reads_from, self._is_unread)
        self._unwritten_answers: set[int] = set()  # ranks for which a PONG waits to be written
        self._process = os.getpid()
        track(self)
        with naming_limits(f"rank {rank} of group {name!r} can't be made", (rank,)):
            self._loop = IoLoop(self, world_size, name=f"ferrodist-tcp-{name}-{rank}")
        try:
            with naming_limits(f"rank {rank} of group {name!r} can't connect", (rank,)):
                if world_size > 1:
                    deadline = Deadline(self.timeout if connect_timeout is None else connect_timeout)
                    self._connect(address, resolve_secret(secret), job, listener, deadline)
                elif listener is not None:
                    listener.close()
        except BaseException as error:
            if isinstance(error, DistributedError) and self._links:
                self.abort(error)  # others may be waiting for this rank
            self._loop.stop()
            raise

    @classmethod
    def from_membership(cls, membership: Membership, timeout: float, deadline: Deadline) -> Self:
        """Make the group of all ranks that met.

        Rank 0 listens on a free port next to its store and publishes the address; the others dial it.

        Args:
            membership: The result of the rendezvous.
            timeout: Default of blocking calls' ``timeout``, in seconds.
            deadline: When all ranks must have connected.
        """
        return join_members(cls, membership, timeout, deadline)

    def _connect(
        self, address: str, secret: bytes, job: str, listener: socket.socket | None, deadline: Deadline
    ) -> None:
        hello = Hello(purpose="group", job=job, rank=self.rank, world_size=self.world_size, group=self.name)
        if self.rank != _HUB:
            self._begin({_HUB: dial_hub(hello, address, secret, deadline)})
            self._await_ready(deadline)
            return
        connections, error = gather_links(hello, address, secret, listener, deadline)
        self._begin(connections)
        if error is not None:
            self.abort(error)
            self.close()
            raise error
        for peer in list(self._links):
            self._push_frame(FrameType.READY, peer)

    def _begin(self, connections: dict[int, Connection]) -> None:
        try:
            for peer, sock in sorted(connections.items()):
                tune(sock, self.timeout, self._buffer_bytes)
                self._links[peer] = FramedConnection(sock, peer, sock.session)
        except BaseException:
            for sock in connections.values():  # their ranks would wait for this one
                sock.close()
            raise
        for link in list(self._links.values()):
            self._loop.wake_for(link)
        self._loop.start()

    def _await_ready(self, deadline: Deadline) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self.failure, deadline.remaining() + _ANSWER_GRACE_SECONDS)
            ready = self._ready
        if ready:
            return
        error = self.failure or RendezvousError(
            f"rank 0 of group {self.name!r} took this rank's connection, but did not say within {deadline.timeout:g} s"
            " that all ranks are there. Look at what rank 0 is doing.",
            ranks=(_HUB,),
        )
        self.close(_FAREWELL_SECONDS)  # rank 0 may not answer this either
        raise error

    # Sending.

    @override
    def _push_frame(
        self,
        kind: FrameType,
        rank: int,
        message: int = 0,
        *,
        group: int = 0,
        send: Send | None = None,
        offset: int = 0,
        payload: memoryview | bytes = b"",
        on_sent: Callable[[], object] | None = None,
    ) -> None:
        tag = size_bytes = 0
        if send is not None:
            group, tag, size_bytes = group_of_tag(send.tag), send.tag & LOW_64_BITS, len(send.data)
        frame = Frame(kind, len(payload), self.rank, rank, message, group, tag, size_bytes, offset)
        self._push(QueuedFrame(frame, payload, owner=send, on_written=on_sent))

    @override
    def _drop_frames(self, send: Send) -> bool | None:
        link = self._link_to(send.peer)
        return None if link is None else link.drop(send)

    def local_host(self) -> str:
        """This rank's address on the interface that leads to rank 0, or on rank 0 to another rank."""
        with contextlib.suppress(OSError):  # the loop's thread has just closed it: the next call says why
            for link in list(self._links.values()):
                return str(link.sock.getsockname()[0])
        return "127.0.0.1"

    def _link_to(self, rank: int) -> FramedConnection | None:
        return self._links.get(rank if self.rank == _HUB else _HUB)

    def _push(self, outgoing: QueuedFrame, source_link: FramedConnection | None = None) -> None:
        """Write or queue a frame for its destination, or drop it without a connection."""
        link = self._link_to(outgoing.frame.destination)
        if link is None:
            return
        try:
            has_more = link.push(outgoing)
        except BaseException:  # of a signal handler: the frame may be half written
            self._loop.wake_for(link)
            raise
        if has_more:
            if source_link is not None and link.relayed_bytes > BLOCK_BYTES:
                source_link.blocked_by = link
            self._loop.wake_for(link)

    def find_stragglers(self, peers: tuple[int, ...], within: float) -> Stragglers:
        """Put a timeout down to rank 0 if it relays nothing, else to the peers that don't answer.

        See [Note: liveness] in `liveness.py`.
        """
        if within == 0 or peers == (_HUB,) or self.failure is not None:
            return Stragglers(ranks=peers)
        silent = self._liveness.find_silent({*peers, _HUB} - {self.rank}, within)
        if _HUB in silent and not self.relays_messages:  # the others' answers are relayed: nothing is known
            return Stragglers(ranks=(_HUB,) if _HUB in peers else peers)
        if _HUB in silent:
            role = f"rank 0 of group {self.name!r}, which passes on what others send each other,"
            return Stragglers(ranks=(_HUB,), detail=f" ({role} does not answer)", is_relay=True)
        return self._silent_or_all(silent, peers)

    def _answer(self, rank: int) -> None:
        """Send a PONG to a rank, one for all PINGs that came before it was written."""
        if rank not in self._unwritten_answers:
            self._unwritten_answers.add(rank)
            self._push_frame(FrameType.PONG, rank, on_sent=partial(self._unwritten_answers.discard, rank))

    def _wait_for_change(self, is_done: Callable[[], bool], seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(is_done, seconds)

    def _num_reads_from(self, rank: int) -> int:
        link = self._links.get(rank)
        return 0 if link is None else link.num_reads

    def _is_unread(self, rank: int) -> bool:
        link = self._links.get(rank)
        return link is not None and link.blocked_by is not None

    # Incoming frames; the loop's thread calls these.

    def frame_begins(self, link: FramedConnection, frame: Frame) -> Sink:
        """Check a frame against this rank's role in the star; returns the consumer of its payload."""
        if self.rank == _HUB:
            legal = frame.source == link.peer and frame.kind not in (FrameType.READY, FrameType.DIED)
        else:
            legal = frame.destination == self.rank
        if not legal:
            raise ProtocolError(
                f"a frame of kind {frame.kind.name} from rank {frame.source} to rank {frame.destination} over the"
                f" connection of rank {link.peer} and rank {self.rank}"
            )
        if frame.destination != self.rank:
            return _Bytes(frame.length)
        if frame.kind is FrameType.EAGER:
            return self._message_sink(self._receive_eager(frame.source, frame))
        if frame.kind is FrameType.DATA:
            try:
                message = self._continued_message(frame.source, frame)
            except ProtocolError as error:
                self._refuse(link, frame, error)
            else:
                if message is not None:
                    return self._message_sink(message, frame.offset)
        return _Bytes(frame.length)

    def frame_ends(self, link: FramedConnection, frame: Frame, sink: Sink) -> None:
        """Handle a frame."""
        payload = sink.data if isinstance(sink, _Bytes) else b""
        if frame.destination != self.rank:
            self._push(QueuedFrame(frame, payload, relayed=True), link)
            return
        link.has_left |= frame.kind is FrameType.LEFT and frame.group == WORLD_GROUP_ID and frame.source == link.peer
        handler = self._handlers.get(frame.kind)
        if handler is not None:
            try:
                handler(frame.source, frame, payload)
            except ProtocolError as error:
                self._refuse(link, frame, error)
            with self._changed:
                self._changed.notify_all()

    def _refuse(self, link: FramedConnection, frame: Frame, error: ProtocolError) -> None:
        """Handle a violation of the protocol: end the sender's connection, or the group if rank 0 relayed the frame."""
        if frame.source == link.peer:
            raise error
        self.abort(
            ProtocolError(
                f"rank {frame.source} of group {self.name!r} broke the protocol: {error.message}",
                ranks=(frame.source,),
            )
        )

    def _on_data(self, source: int, frame: Frame, _payload: memoryview | bytes) -> None:
        if frame.offset + frame.length == frame.size_bytes:
            self._incoming.pop((source, frame.message), None)

    def _on_left(self, source: int, frame: Frame, _payload: memoryview | bytes) -> None:
        if self._accepts_notice(source, frame):
            for observer in self._observers:
                observer.await_sent(source, frame.message)
            self.peer_left(frame.group, source)

    def _on_died(self, source: int, _frame: Frame, _payload: memoryview | bytes) -> None:
        self.peer_died(source, _death(f"its connection to rank 0 of group {self.name!r} ended"))

    def _on_ready(self, _source: int, _frame: Frame, _payload: memoryview | bytes) -> None:
        self._ready = True

    def link_blocked(self, link: FramedConnection) -> None:
        """Tell a rank that this one is there: its PING can't be read while its messages pile up for another rank."""
        self._answer(link.peer)

    def link_ended(self, link: FramedConnection, reason: str, *, by_violation: bool) -> None:
        """Handle the end of a connection: the peer has left or died; without the hub no rank can be reached."""
        self._links.pop(link.peer, None)
        self._withdraw_from(None if link.peer == _HUB else link.peer)
        if not link.has_left:
            violation = PeerExit(kind=ProtocolError, what=f"broke the protocol: {reason}")
            self.peer_died(link.peer, violation if by_violation else _death(reason))
        if self.rank == _HUB:
            for other in () if link.has_left else tuple(self._links):
                self._push(QueuedFrame(Frame(kind=FrameType.DIED, source=link.peer, destination=other)))
        else:
            unreachable = PeerExit(what="can't be reached", relay=_HUB)
            for other in range(1, self.world_size):
                self.peer_left(WORLD_GROUP_ID, other, unreachable)
        with self._changed:
            self._changed.notify_all()

    def loop_broke(self, error: Exception) -> None:
        """Handle a defect of the loop: fail everything, rather than leave ranks waiting."""
        self._links.clear()
        for group_id in list(self._members):
            index, who = self.describe_rank(group_id, self.rank)
            failure = DistributedError(f"the connections of {who} ended by a defect: {error!r}", ranks=(index,))
            failure.__cause__ = error
            self.fail_group(group_id, failure)

    def _message_sink(self, message: Message, base: int = 0) -> Sink:
        return lambda fill, start, stop: self._mailbox.write(message, fill, base + start, base + stop)

    # Notices, and closing.

    def _notify_left(self, group_id: int, members: tuple[int, ...]) -> None:
        for rank in members:
            if rank != self.rank:
                num_sent = sum(observer.num_sent(rank) for observer in self._observers)
                self._push_frame(FrameType.LEFT, rank, num_sent, group=group_id)

    def close(self, timeout: float | None = None) -> None:
        """Leave the group; see `Backend.close`.

        Args:
            timeout: Seconds that rank 0 goes on relaying messages between ranks that are still there, and that other
                ranks wait until their last messages are sent; None for five.
        """
        deadline = Deadline(_CLOSE_SECONDS if timeout is None else check_timeout(timeout))
        if os.getpid() != self._process or not self._close_groups():
            return  # closed already, or in a forked child: the connections are the parent's
        try:
            self._leave_groups()
            self._drain(deadline)
        finally:
            self._loop.stop()
            self._run_close_callbacks()

    def _drain(self, deadline: Deadline) -> None:
        """Wait until all is written and the peers have closed their side too, so that no last message is lost.

        Closing a socket with unread input resets the connection, which would destroy data that the peer has not read
        yet.
        """
        for observer in self._observers:
            observer.drain(deadline)
        with self._changed:
            while self._links and not deadline.expired:
                for link in list(self._links.values()):
                    if not link.waiting and (self.rank != _HUB or link.has_left):
                        link.finish_writing()
                self._changed.wait(min(_FLUSH_POLL_INTERVAL_SECONDS, deadline.remaining()))


class _Bytes:
    """A sink that collects the payload."""

    __slots__ = ("data",)

    def __init__(self, length: int) -> None:
        self.data = memoryview(bytearray(length))

    def __call__(self, fill: Callable[[memoryview], int], start: int, stop: int) -> int:
        return fill(self.data[start:stop])


def _death(reason: str) -> PeerExit:
    return PeerExit(what=f"died: {reason} without leaving the group")
