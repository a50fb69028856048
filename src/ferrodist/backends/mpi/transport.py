"""Messages as frames over an MPI communicator: sent in order and handed over in order.

MPI gets copies, so a user's buffer is never MPI's, whatever becomes of a message. A send that MPI has started can't be
taken back; so MPI gets only `_WINDOW_BYTES` per rank at a time, and the rest waits in a queue.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ferrodist.backends.mailbox import EAGER_LIMIT, Mailbox, Message, copy_bytes
from ferrodist.backends.mpi.runtime import leak_request
from ferrodist.backends.mpi.wire import HEADER_SIZE, MAX_FRAME, MAX_PAYLOAD, URGENT, Frame, FrameType
from ferrodist.backends.tags import group_of_tag, group_tag
from ferrodist.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.mailbox_backend import Send

_WINDOW_BYTES = 4 << 20
_TAG = 0
_MAX_FRAMES_PER_POLL = 64
_LOW_64 = (1 << 64) - 1


@dataclass(slots=True, eq=False)
class QueuedFrame:
    """A frame to be sent."""

    frame: Frame
    payload: memoryview | bytes = b""  # read when MPI gets the frame
    owner: object = None  # the object for which `FrameTransport.drop` drops it
    on_sent: Callable[[], None] | None = None  # called when MPI has a copy, so that the payload may change


@dataclass(slots=True)
class _PeerQueue:
    """The frames to and from one rank."""

    waiting: deque[QueuedFrame] = field(default_factory=deque)
    sending: deque[tuple[Any, int]] = field(default_factory=deque)  # MPI's requests, and their sizes in bytes
    sending_bytes: int = 0
    receiving: deque[tuple[Any, Any]] = field(default_factory=deque)  # MPI's requests, and their buffers
    is_lost: bool = False


class FrameTransport:
    """One rank's frames to and from the others of a communicator, which nothing else uses.

    ``on_frame(source, frame, payload)`` acts on a received frame; it is called for one at a time, in order.
    """

    def __init__(self, mpi: Any, communicator: Any, on_frame: Callable[[int, Frame, memoryview], None]) -> None:
        self._mpi = mpi
        self._communicator = communicator
        self._on_frame = on_frame
        self._peers = [_PeerQueue() for _ in range(communicator.Get_size())]
        self._send_lock = threading.Lock()  # not held during callbacks
        self._receive_lock = threading.Lock()
        self._status = mpi.Status()
        self._is_closed = False
        self.num_receiving = 0

    def push(self, destination: int, queued: QueuedFrame) -> None:
        """Send a frame as soon as the window allows; frames to a lost rank are dropped."""
        peer = self._peers[destination]
        sent: list[QueuedFrame] = []
        with self._send_lock:
            if peer.is_lost or self._is_closed:
                return
            if queued.frame.kind in URGENT:
                self._send(peer, destination, queued, sent)
            else:
                peer.waiting.append(queued)
                self._fill_window(peer, destination, sent)
        _notify_sent(sent)

    def drop(self, destination: int, owner: object) -> int:
        """Drop an owner's frames that MPI has not been given; returns their number."""
        peer = self._peers[destination]
        with self._send_lock:
            others = [queued for queued in peer.waiting if queued.owner is not owner]
            num_dropped = len(peer.waiting) - len(others)
            peer.waiting = deque(others)
        return num_dropped

    def is_lost(self, rank: int) -> bool:
        """Return whether a rank is lost."""
        return self._peers[rank].is_lost

    def lose(self, rank: int) -> None:
        """Note that a rank is lost: nothing is sent to it any more, and pending requests may never end."""
        peer = self._peers[rank]
        with self._send_lock:
            peer.is_lost = True
            peer.waiting.clear()
            for request, _ in peer.sending:
                leak_request(request)
            peer.sending.clear()

    def is_idle(self) -> bool:
        """Return whether every frame has been sent."""
        return not any(peer.waiting or peer.sending for peer in self._peers)

    def close(self) -> None:
        """Stop using the communicator, in all threads, so that it can be freed."""
        with self._receive_lock, self._send_lock:
            self._is_closed = True

    def poll(self, patience: float = 0) -> bool:
        """Move frames; whether there were any. Raises MPI's exceptions.

        While another thread polls, this waits for it, ``patience`` seconds at most.
        """
        if not self._receive_lock.acquire(timeout=patience):
            return False
        try:
            return False if self._is_closed else self._poll_sends() | self._poll_receives()
        finally:
            self._receive_lock.release()

    # Sending.

    def _poll_sends(self) -> bool:
        moved = False
        sent: list[QueuedFrame] = []
        with self._send_lock:
            for destination, peer in enumerate(self._peers):
                while peer.sending and peer.sending[0][0].Test():
                    peer.sending_bytes -= peer.sending.popleft()[1]
                    moved = True
                if peer.waiting:
                    self._fill_window(peer, destination, sent)
        _notify_sent(sent)
        return moved or bool(sent)

    def _fill_window(self, peer: _PeerQueue, destination: int, sent: list[QueuedFrame]) -> None:
        while peer.waiting and peer.sending_bytes <= _WINDOW_BYTES:
            self._send(peer, destination, peer.waiting.popleft(), sent)

    def _send(self, peer: _PeerQueue, destination: int, queued: QueuedFrame, sent: list[QueuedFrame]) -> None:
        size = HEADER_SIZE + len(queued.payload)
        data = np.empty(size, np.uint8)
        data[:HEADER_SIZE] = np.frombuffer(queued.frame.pack(), np.uint8)
        if size > HEADER_SIZE:
            data[HEADER_SIZE:] = np.frombuffer(queued.payload, np.uint8)
        peer.sending.append((self._communicator.Isend([data, size, self._mpi.BYTE], destination, _TAG), size))
        peer.sending_bytes += size
        sent.append(queued)

    # Receiving.

    def _poll_receives(self) -> bool:
        mpi, status = self._mpi, self._status
        moved = False
        for _ in range(_MAX_FRAMES_PER_POLL):
            message = self._communicator.Improbe(mpi.ANY_SOURCE, _TAG, status)
            if message is None:
                break
            moved = True
            source, size = status.Get_source(), status.Get_count(mpi.BYTE)
            data = np.empty(size, np.uint8)
            self._peers[source].receiving.append((message.Irecv([data, size, mpi.BYTE]), data))
            self.num_receiving += 1
            if size > MAX_FRAME:
                raise ProtocolError(f"a frame of {size} bytes; they have at most {MAX_FRAME}", ranks=(source,))
        if self.num_receiving:
            for source, peer in enumerate(self._peers):
                while self._has_next(peer):
                    data = peer.receiving.popleft()[1].data
                    self.num_receiving -= 1
                    moved = True
                    self._act_on(source, data)
        return moved

    def _act_on(self, source: int, data: memoryview) -> None:
        try:
            self._on_frame(source, Frame.unpack(data), data[HEADER_SIZE:])
        except ProtocolError as error:
            raise ProtocolError(f"rank {source} broke the protocol: {error.message}", ranks=(source,)) from None

    def _has_next(self, peer: _PeerQueue) -> bool:
        """Return whether a rank's next frame has come.

        A frame that a lost rank had begun to send may never come: MPI raises, once, and then says that it has.
        """
        if not peer.receiving:
            return False
        try:
            has_come = bool(peer.receiving[0][0].Test())
        except self._mpi.Exception:
            self._leak_receives(peer)
            raise
        if peer.is_lost and not has_come:
            self._leak_receives(peer)
        return has_come

    def _leak_receives(self, peer: _PeerQueue) -> None:
        self.num_receiving -= len(peer.receiving)
        for request, _ in peer.receiving:
            leak_request(request)
        peer.receiving.clear()


def _notify_sent(sent: list[QueuedFrame]) -> None:
    for queued in sent:
        if queued.on_sent is not None:
            queued.on_sent()


class OutgoingMessages:
    """One rank's messages to others. ``finish(send)`` ends a send, whose data may change from then on."""

    def __init__(
        self, transport: FrameTransport, push: Callable[[int, QueuedFrame], None], finish: Callable[[Send], object]
    ) -> None:
        self._transport = transport
        self._push = push
        self._finish = finish
        self._ids = itertools.count(1)
        self._unsent: dict[Send, int] = {}  # sends that can still be taken back, and their message ids
        self._offers: dict[int, Send] = {}  # by message id: waiting for a GRANT
        self._streaming = threading.RLock()  # held while a message's pieces are queued, so that all or none are

    @property
    def has_unsent(self) -> bool:
        """True if MPI has not been given all of some message."""
        return bool(self._unsent)

    def start(self, send: Send) -> None:
        """Send a message, or offer it."""
        message_id = next(self._ids)
        self._unsent[send] = message_id
        if len(send.data) <= EAGER_LIMIT:
            frame = _message_frame(FrameType.EAGER, send, message_id)
            self._push(send.peer, QueuedFrame(frame, send.data, send, partial(self._on_sent, send)))
        else:
            self._offers[message_id] = send
            self._push(send.peer, QueuedFrame(_message_frame(FrameType.OFFER, send, message_id), owner=send))

    def take_back(self, send: Send) -> bool:
        """Undo `start`; False when it is too late, and the send has ended."""
        with self._streaming:
            message_id = self._unsent.pop(send, None)
            if message_id is None:
                return False
            offered = self._offers.pop(message_id, None)
            num_dropped = self._transport.drop(send.peer, send)
        if self._transport.is_lost(send.peer):
            return True
        if offered is None and num_dropped == 0:
            self._finish(send)  # MPI has been given the last frame just now
            return False
        if len(send.data) > EAGER_LIMIT:
            self._push(send.peer, QueuedFrame(_message_frame(FrameType.WITHDRAW, send, message_id)))
        return True

    def on_grant(self, source: int, frame: Frame, _payload: memoryview) -> None:
        """Send an offered message for which the other rank has a buffer."""
        with self._streaming:
            send = self._offers.get(frame.message)
            if send is not None and send.peer == source:  # or it was taken back meanwhile
                del self._offers[frame.message]
                self._stream(send, frame.message)

    def _stream(self, send: Send, message_id: int) -> None:
        size = len(send.data)
        for start in range(0, size, MAX_PAYLOAD):
            stop = min(start + MAX_PAYLOAD, size)
            on_sent = partial(self._on_sent, send) if stop == size else None
            frame = _message_frame(FrameType.DATA, send, message_id, offset=start)
            self._push(send.peer, QueuedFrame(frame, send.data[start:stop], send, on_sent))

    def _on_sent(self, send: Send) -> None:
        if self._unsent.pop(send, None) is not None:
            self._finish(send)


class IncomingMessages:
    """One rank's messages from others. ``accept(message)`` announces one; whether to receive it."""

    def __init__(
        self, mailbox: Mailbox, accept: Callable[[Message], bool], push: Callable[[int, QueuedFrame], None]
    ) -> None:
        self._mailbox = mailbox
        self._accept = accept
        self._push = push
        self._offered: dict[tuple[int, int], Message] = {}  # by source and message id: not complete

    def on_eager(self, source: int, frame: Frame, payload: memoryview) -> None:
        """Receive a whole message."""
        message = _message_of(source, frame)
        if self._accept(message) and len(payload):
            self._mailbox.write(message, partial(_copy, payload), 0, len(payload))

    def on_offer(self, source: int, frame: Frame, _payload: memoryview) -> None:
        """Announce a large message."""
        message = _message_of(source, frame)
        message.grant = partial(self._grant, message, frame.message)
        self._offered[source, frame.message] = message  # before it may be granted
        if not self._accept(message):
            self._offered.pop((source, frame.message), None)

    def _grant(self, message: Message, message_id: int) -> None:
        message.granted = True
        self._push(message.source, QueuedFrame(Frame(FrameType.GRANT, message_id)))

    def on_data(self, source: int, frame: Frame, payload: memoryview) -> None:
        """Receive a piece of a large message."""
        message = self._offered.get((source, frame.message))
        if message is None:
            return  # withdrawn, or its group has failed
        if not message.granted or frame.offset != message.num_received or frame.size_bytes != message.size_bytes:
            raise ProtocolError(
                f"a piece of message {frame.message} of rank {source} out of its order", ranks=(source,)
            )
        end = frame.offset + len(payload)
        if end == frame.size_bytes:
            self._offered.pop((source, frame.message), None)
        self._mailbox.write(message, partial(_copy, payload), frame.offset, end)

    def on_withdraw(self, source: int, frame: Frame, _payload: memoryview) -> None:
        """Drop a large message that its sender has taken back."""
        message = self._offered.pop((source, frame.message), None)
        if message is not None:
            self._mailbox.withdraw(message)

    def forget(self, applies: Callable[[Message], bool]) -> list[Message]:
        """Drop incomplete messages for which ``applies(message)``; returns them."""
        forgotten = [(key, message) for key, message in self._offered.copy().items() if applies(message)]
        for key, _ in forgotten:
            self._offered.pop(key, None)  # other threads remove messages too
        return [message for _, message in forgotten]


def _message_frame(kind: FrameType, send: Send, message_id: int, *, offset: int = 0) -> Frame:
    return Frame(kind, message_id, group_of_tag(send.tag), send.tag & _LOW_64, len(send.data), offset)


def _message_of(source: int, frame: Frame) -> Message:
    return Message(source, group_tag(frame.group, frame.tag), frame.size_bytes)


def _copy(source: memoryview, target: memoryview) -> int:
    copy_bytes(target, source)
    return len(source)
