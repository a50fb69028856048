"""Frames: what ranks tell each other beside the data of collectives, each in one MPI message.

A message of up to `EAGER_LIMIT` bytes is one EAGER frame. A larger one is an OFFER, answered by a GRANT when the other
rank has a buffer, then DATA frames in order; the sender may take it back with WITHDRAW before it starts the last one.

Frames over an MPI communicator: what goes out waits in order, what comes in is handed over in order.

MPI gets copies, so whatever becomes of a message, no user's buffer is MPI's. What it has been given can't be taken
back; so of each rank's messages only `_WINDOW_BYTES` are given to it at a time, and the rest can be.

Messages as frames, on their way out and in; `transport.py` says which frames a message is.

The thread that moves a group's frames, and waits that move them too.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ferrodist.backends.mailbox import EAGER_LIMIT, Mailbox, Message, copy_bytes
from ferrodist.backends.mpi.collectives import leak_request
from ferrodist.backends.polling import Backoff
from ferrodist.backends.tags import group_of_tag, group_tag
from ferrodist.deadline import Deadline
from ferrodist.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.mailbox_backend import Send

MAX_PAYLOAD = 1 << 20
"""Bytes of a message that a frame may carry: they are copied, so that neither side's buffer is MPI's."""

# magic, kind, message, group, tag, message size, offset
_HEADER = struct.Struct("<2sB5xQQQQQ")
_MAGIC = b"fm"

HEADER_SIZE = _HEADER.size
MAX_FRAME = HEADER_SIZE + MAX_PAYLOAD


class FrameType(IntEnum):
    """What a frame says."""

    EAGER = 1  # a whole message
    OFFER = 2  # a large message exists
    GRANT = 3  # ... and may come
    DATA = 4  # ... a piece of it
    WITHDRAW = 5  # ... and will not be completed
    ABORT = 6  # the group has failed: payload says why
    LEFT = 7  # the source has closed its handle on the group, having entered `message` collectives of the world
    PING = 8  # the source asks for a PONG
    PONG = 9  # the source is there, and has entered `message` collectives


_KINDS = {kind.value: kind for kind in FrameType}


class Frame(NamedTuple):
    """A frame's header.

    Args:
        kind: What it says.
        message: The source's number of the message it belongs to.
        group: Group id, the upper half of the message's tag.
        tag: The lower half of the message's tag.
        size_bytes: Length of the whole message.
        offset: Where in the message the payload starts.
    """

    kind: FrameType
    message: int = 0
    group: int = 0
    tag: int = 0
    size_bytes: int = 0
    offset: int = 0

    def pack(self) -> bytes:
        """The header as bytes."""
        return _HEADER.pack(_MAGIC, self.kind, self.message, self.group, self.tag, self.size_bytes, self.offset)

    @staticmethod
    def unpack(data: memoryview) -> Frame:
        """Read a whole frame's header and check it against the frame.

        Raises:
            ProtocolError: It is not one that a rank of this version sends.
        """
        if len(data) < HEADER_SIZE:
            raise ProtocolError(f"a message of {len(data)} bytes where a frame has at least {HEADER_SIZE}")
        magic, number, message, group, tag, size_bytes, offset = _HEADER.unpack_from(data)
        kind = _KINDS.get(number)
        if magic != _MAGIC or kind is None:
            raise ProtocolError("bytes that are not a frame of this version")
        length = len(data) - HEADER_SIZE
        if kind is FrameType.EAGER and not length == size_bytes <= EAGER_LIMIT:
            raise ProtocolError(f"an EAGER frame with {length} bytes of a message of {size_bytes}")
        if kind is FrameType.DATA and not 0 < length <= min(MAX_PAYLOAD, size_bytes - offset):
            raise ProtocolError(f"a DATA frame with {length} bytes from {offset} on of a message of {size_bytes}")
        return Frame(kind, message, group, tag, size_bytes, offset)


_WINDOW_BYTES = 4 << 20
_TAG = 0
_MOST_AT_ONCE = 64

_URGENT = frozenset({FrameType.GRANT, FrameType.ABORT, FrameType.PING, FrameType.PONG})
"""Frames that may overtake others on their way."""


@dataclass(slots=True, eq=False)
class QueuedFrame:
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
class _PeerQueue:
    """To and from one rank."""

    waiting: deque[QueuedFrame] = field(default_factory=deque)
    taken: deque[tuple[Any, int]] = field(default_factory=deque)  # requests of MPI's, and their bytes
    taken_bytes: int = 0
    coming: deque[tuple[Any, Any]] = field(default_factory=deque)  # requests of MPI's, and their buffers
    is_lost: bool = False


class FrameTransport:
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
        self._ways = [_PeerQueue() for _ in range(communicator.Get_size())]
        self._sending = threading.Lock()  # not held while anyone is told of anything
        self._receiving = threading.Lock()
        self._status = mpi.Status()
        self._has_ended = False
        self.num_coming = 0

    def push(self, destination: int, outgoing: QueuedFrame) -> None:
        """Send a frame as soon as MPI may have it; to a rank that is lost, nowhere."""
        way = self._ways[destination]
        taken: list[QueuedFrame] = []
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
                leak_request(request)
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
        taken: list[QueuedFrame] = []
        with self._sending:
            for destination, way in enumerate(self._ways):
                while way.taken and way.taken[0][0].Test():
                    way.taken_bytes -= way.taken.popleft()[1]
                    moved = True
                if way.waiting:
                    self._give_more(way, destination, taken)
        _tell(taken)
        return moved or bool(taken)

    def _give_more(self, way: _PeerQueue, destination: int, taken: list[QueuedFrame]) -> None:
        while way.waiting and way.taken_bytes <= _WINDOW_BYTES:
            self._give(way, destination, way.waiting.popleft(), taken)

    def _give(self, way: _PeerQueue, destination: int, outgoing: QueuedFrame, taken: list[QueuedFrame]) -> None:
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

    def _has_come(self, way: _PeerQueue) -> bool:
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

    def _forget_coming(self, way: _PeerQueue) -> None:
        self.num_coming -= len(way.coming)
        for request, _ in way.coming:
            leak_request(request)
        way.coming.clear()


def _tell(taken: list[QueuedFrame]) -> None:
    for outgoing in taken:
        if outgoing.on_taken is not None:
            outgoing.on_taken()


_LOW_64 = (1 << 64) - 1


class OutgoingMessages:
    """One rank's messages to others.

    Args:
        messenger: What takes frames back.
        push: ``push(rank, outgoing)`` sends one.
        finish: Ends a send, the data of which may change from then on.
    """

    def __init__(
        self, messenger: FrameTransport, push: Callable[[int, QueuedFrame], None], finish: Callable[[Send], object]
    ) -> None:
        self._messenger = messenger
        self._push = push
        self._finish = finish
        self._numbers = itertools.count(1)
        self._sent: dict[Send, int] = {}  # by send that can still be taken back: its number
        self._offers: dict[int, Send] = {}  # by message number: waiting for a GRANT
        self._streaming = threading.RLock()  # a message's pieces are queued as one

    @property
    def is_any_left(self) -> bool:
        """Whether there is a message that MPI has not taken whole."""
        return bool(self._sent)

    def start(self, send: Send) -> None:
        """Send a message, or offer it."""
        number = next(self._numbers)
        self._sent[send] = number
        if len(send.data) <= EAGER_LIMIT:
            frame = _frame_of(FrameType.EAGER, send, number)
            self._push(send.peer, QueuedFrame(frame, send.data, send, partial(self._given, send)))
        else:
            self._offers[number] = send
            self._push(send.peer, QueuedFrame(_frame_of(FrameType.OFFER, send, number), owner=send))

    def take_back(self, send: Send) -> bool:
        """Undo `start`; False when it is too late for that, and the send has ended."""
        with self._streaming:
            number = self._sent.pop(send, None)
            if number is None:
                return False  # MPI has it
            offered = self._offers.pop(number, None)
            num_dropped = self._messenger.drop(send.peer, send)
        if self._messenger.is_lost(send.peer):
            return True
        if offered is None and num_dropped == 0:
            self._finish(send)  # MPI has taken the last frame just now
            return False
        if len(send.data) > EAGER_LIMIT:
            self._push(send.peer, QueuedFrame(_frame_of(FrameType.WITHDRAW, send, number)))
        return True

    def on_grant(self, source: int, frame: Frame, _payload: memoryview) -> None:
        """A rank has a buffer for a message that it was offered."""
        with self._streaming:
            send = self._offers.get(frame.message)
            if send is not None and send.peer == source:  # else taken back meanwhile
                del self._offers[frame.message]
                self._stream(send, frame.message)

    def _stream(self, send: Send, number: int) -> None:
        size = len(send.data)
        for start in range(0, size, MAX_PAYLOAD):
            stop = min(start + MAX_PAYLOAD, size)
            on_taken = partial(self._given, send) if stop == size else None
            frame = _frame_of(FrameType.DATA, send, number, offset=start)
            self._push(send.peer, QueuedFrame(frame, send.data[start:stop], send, on_taken))

    def _given(self, send: Send) -> None:
        """MPI has a message's last bytes."""
        if self._sent.pop(send, None) is not None:
            self._finish(send)


class IncomingMessages:
    """One rank's messages from others.

    Args:
        mailbox: Where they go.
        accept: Whether to keep one that is announced.
        push: ``push(rank, outgoing)`` sends a frame.
    """

    def __init__(
        self, mailbox: Mailbox, accept: Callable[[Message], bool], push: Callable[[int, QueuedFrame], None]
    ) -> None:
        self._mailbox = mailbox
        self._accept = accept
        self._push = push
        self._offered: dict[tuple[int, int], Message] = {}  # by source and number: not whole

    def on_eager(self, source: int, frame: Frame, payload: memoryview) -> None:
        """A whole message has come."""
        message = _message_of(source, frame)
        if self._accept(message) and len(payload):
            self._mailbox.write(message, partial(_copy, payload), 0, len(payload))

    def on_offer(self, source: int, frame: Frame, _payload: memoryview) -> None:
        """A large one is announced."""
        message = _message_of(source, frame)
        message.grant = partial(self._grant, message, frame.message)
        self._offered[source, frame.message] = message  # before it may be granted
        if not self._accept(message):
            self._offered.pop((source, frame.message), None)

    def _grant(self, message: Message, number: int) -> None:
        message.granted = True
        self._push(message.source, QueuedFrame(Frame(FrameType.GRANT, number)))

    def on_data(self, source: int, frame: Frame, payload: memoryview) -> None:
        """A piece of it has come."""
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
        """It will not come, or not whole."""
        message = self._offered.pop((source, frame.message), None)
        if message is not None:
            self._mailbox.withdraw(message)

    def forget(self, applies: Callable[[Message], bool]) -> list[Message]:
        """Drop those that have not come whole and ``applies(message)``; returns them."""
        forgotten = [(key, message) for key, message in self._offered.copy().items() if applies(message)]
        for key, _ in forgotten:
            self._offered.pop(key, None)  # other threads take from it too
        return [message for _, message in forgotten]


def _frame_of(kind: FrameType, send: Send, number: int, *, offset: int = 0) -> Frame:
    return Frame(kind, number, group_of_tag(send.tag), send.tag & _LOW_64, len(send.data), offset)


def _message_of(source: int, frame: Frame) -> Message:
    return Message(source, group_tag(frame.group, frame.tag), frame.size_bytes)


def _copy(source: memoryview, target: memoryview) -> int:
    copy_bytes(target, source)
    return len(source)


_BUSY_SECONDS = 2e-3
"""How long the thread goes on looking often after something has come."""

_BUSY_REST_SECONDS = 50e-6
_AWAITED_REST_SECONDS = 0.5e-3
_IDLE_REST_SECONDS = 2e-3

_PATROL_SECONDS = 0.05
"""How often it is looked whether a rank has died."""


class ProgressThread:
    """Looks after a group's frames until told to stop.

    Args:
        look: Moves what can be moved, and says whether there was anything; does not raise.
        patrol: Called from time to time.
        is_awaited: Whether something is expected, so that it pays to look often.
        is_over: Whether nothing will come any more.
        ended: Called when the thread ends.
        name: Of the thread.
    """

    def __init__(
        self,
        *,
        look: Callable[[], bool],
        patrol: Callable[[], None],
        is_awaited: Callable[[], bool],
        is_over: Callable[[], bool],
        ended: Callable[[], None],
        name: str,
    ) -> None:
        self._look = look
        self._patrol = patrol
        self._is_awaited = is_awaited
        self._is_over = is_over
        self._ended = ended
        self._num_lookers = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for the thread's end; whether it has come."""
        if self._thread is not threading.current_thread():
            self._thread.join(Deadline(timeout).remaining())
        return not self._thread.is_alive()

    def wait_until(self, done: Callable[[], bool], timeout: float) -> bool:
        """Move frames until ``done()``; False when that has not come within so many seconds."""
        if done():
            return True
        deadline = Deadline(timeout)
        pace = Backoff()
        self._num_lookers += 1
        try:
            while not done():
                if deadline.expired:
                    return done()
                if self._look():
                    pace.begin_again()
                else:
                    pace.rest(deadline.remaining())
        finally:
            self._num_lookers -= 1
        return True

    def _run(self) -> None:
        busy_until = next_patrol = 0.0
        while not self._is_over():
            now = time.monotonic()
            if now >= next_patrol:
                self._patrol()
                next_patrol = now + _PATROL_SECONDS
            if self._look():
                busy_until = now + _BUSY_SECONDS
            if self._num_lookers:  # they do the work
                time.sleep(_IDLE_REST_SECONDS)
            elif now < busy_until:
                time.sleep(_BUSY_REST_SECONDS)
            else:
                time.sleep(_AWAITED_REST_SECONDS if self._is_awaited() else _IDLE_REST_SECONDS)
        self._ended()
