"""A rank's mailbox: matches messages that arrive with posted receives.

[Note: eager and offered messages]
A message of up to `EAGER_LIMIT` bytes is sent at once, and kept by the receiving rank until a receive is posted for it.
A larger one is only offered: its bytes move when the receiving rank has a buffer for them, straight into that buffer.
So a rank holds little for unexpected messages, whatever others send, and ``send`` of a large message waits for its
receiver.

[Note: who may write into a receive's buffer]
Bytes go into a user's buffer only while the mailbox's lock is held and the message is still matched with the receive.
So once `Mailbox.cancel` has returned, the buffer is the user's again; bytes that had come are kept with the message,
which waits for the next receive. Callbacks and grants run after the lock is released.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ferrodist.backends.request import BaseRequest
from ferrodist.backends.stragglers import Stragglers
from ferrodist.backends.tags import ANY_SOURCE
from ferrodist.errors import DistributedError, DistributedTimeoutError, SizeMismatchError
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

EAGER_LIMIT = 256 * 1024  # size in bytes up to which a message is sent before a receive is posted for it
INLINE_LIMIT = 16 * 1024  # size in bytes up to which a tensor's elements are sent in one message with its header

MAX_UNEXPECTED_BYTES = 1 << 30
"""Bytes of unexpected messages that a mailbox keeps; more means that a rank sends messages that nobody receives."""

_MESSAGE_COST = 512
"""Bytes that a waiting message counts for in addition to its own, so that empty ones and offers are bounded, too."""


def read_view(data: Buffer) -> memoryview:
    """``data`` as a flat view of its bytes; raises TypeError or ValueError unless it is a contiguous buffer."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError("the data to send must be C-contiguous: copy it first")
    return view.cast("B") if view.nbytes else memoryview(b"")


def write_view(buffer: Buffer) -> memoryview:
    """``buffer`` as a flat writable view of its bytes; raises if it is read-only or not contiguous."""
    view = memoryview(buffer)
    if view.readonly:
        raise ValueError("the buffer to receive into is read-only: pass a bytearray or a writable array")
    if not view.c_contiguous:
        raise ValueError("the buffer to receive into must be C-contiguous")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy between views of equal length; releases the interpreter lock for large ones."""
    if len(source) < 1 << 15:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class Receive(BaseRequest):
    """A posted receive; see `Mailbox.post`."""

    __slots__ = ("_mailbox", "accepts_shorter", "buffer", "message", "message_bytes", "order", "source", "tag")

    def __init__(self, mailbox: Mailbox, buffer: memoryview, source: int, tag: int) -> None:
        super().__init__(source)
        self._mailbox = mailbox
        self.buffer = buffer
        self.source = source
        self.tag = tag
        self.accepts_shorter = False  # whether the message may be shorter than the buffer
        self.message_bytes = 0  # size of the message that it was matched with
        self.message: Message | None = None
        self.order = 0  # among all receives

    def matches(self, message: Message) -> bool:
        """Return whether this receive may take ``message``, which has its tag."""
        return self.source in (ANY_SOURCE, message.source)

    def cancel(self) -> bool:
        """Cancel the receive; see `Request.cancel`."""
        return self._mailbox.cancel(self)

    def find_stragglers(self, peers: tuple[int, ...], within: float) -> Stragglers:
        """Ask the group; see `Backend.find_stragglers`."""
        return self._mailbox.find_stragglers(peers, within)


@dataclass(slots=True, eq=False)
class Message:
    """A message that has been announced, has partly arrived, or waits for a receive."""

    source: int
    tag: int
    size_bytes: int
    grant: Callable[[], None] | None = None  # of an offered message: called once a receive is posted for it
    granted: bool = False  # whether the transport has sent the grant
    num_received: int = 0
    buffered: bytearray | None = None  # its bytes, unless they go to a receive's buffer
    receive: Receive | None = None
    arrival: int = 0  # among all messages

    @property
    def buffered_bytes(self) -> int:
        """Bytes that the mailbox holds while no receive is posted: 0 for an offered message, which is not sent yet."""
        return self.size_bytes if self.grant is None else 0


def size_error(rank: int, sender: str, size_bytes: int, room_bytes: int) -> SizeMismatchError:
    """The error of a receive of ``room_bytes`` for a message of another size from ``rank`` of its group."""
    return SizeMismatchError(
        f"{sender} sent {counted(size_bytes, 'byte')}, the buffer to receive them has {room_bytes}: receive into one of"
        " that size. The message stays queued.",
        ranks=(rank,),
    )


class Mailbox:
    """Messages and receives of one rank, matched by tag and source in order of arrival.

    ``describe(tag, source)`` returns the rank and the words by which errors name the sender of a message;
    ``find_stragglers`` is the group's.
    """

    def __init__(
        self,
        describe: Callable[[int, int], tuple[int, str]] = lambda _, source: (source, f"rank {source}"),
        find_stragglers: Callable[[tuple[int, ...], float], Stragglers] = lambda peers, _: Stragglers(ranks=peers),
    ) -> None:
        self._describe = describe
        self.find_stragglers = find_stragglers
        self._lock = threading.Lock()
        self._receives: dict[int, dict[int, Receive]] = {}  # by tag, then by order, ascending
        self._messages: dict[int, dict[int, Message]] = {}  # by tag, then by arrival, ascending
        self._matched: set[Receive] = set()  # with a message that is arriving
        self._num_receives = 0
        self._num_arrivals = 0
        self._unexpected_bytes = 0  # with a fixed cost for each message

    @property
    def is_awaited(self) -> bool:
        """Return whether a receive is posted whose message has not arrived."""
        return bool(self._receives or self._matched)

    def post(self, receive: Receive, refusal: Callable[[], DistributedError | None]) -> None:
        """Post a new receive.

        If no message is there, ``refusal()``, called under the lock, says why none will come, or None.
        """
        after: list[Callable[[], None]] = []
        with self._lock:
            self._num_receives += 1
            receive.order = self._num_receives
            if not self._match_message(receive, after):
                error = refusal()
                if error is None:
                    self._receives.setdefault(receive.tag, {})[receive.order] = receive
                else:
                    after.append(partial(receive.end, error))
        _run(after)

    def arrive(self, message: Message) -> bool:
        """Add a message, whose bytes follow through `write`; False if no receive waits and the mailbox is full."""
        after: list[Callable[[], None]] = []
        with self._lock:
            self._num_arrivals += 1
            message.arrival = self._num_arrivals
            is_matched = self._match_receive(message, after)
            has_room = self._unexpected_bytes + message.buffered_bytes + _MESSAGE_COST <= MAX_UNEXPECTED_BYTES
            if not is_matched and has_room:
                self._enqueue(message)
        _run(after)
        return is_matched or has_room

    def write(self, message: Message, fill: Callable[[memoryview], int], start: int, stop: int) -> int:
        """Let ``fill(target)`` write bytes ``start`` to ``stop``; returns its result, how many bytes it wrote.

        ``fill`` runs under the lock: it must not block or call the mailbox. An exception from it changes nothing.
        """
        after: list[Callable[[], None]] = []
        with self._lock:
            if message.buffered is not None:
                target = memoryview(message.buffered)[start:stop]
            elif message.receive is not None:
                target = message.receive.buffer[start:stop]
            else:  # withdrawn, or its receive has failed: drop the bytes
                target = memoryview(bytearray(stop - start))
            count = fill(target)
            message.num_received += count
            if message.num_received == message.size_bytes and message.receive is not None:
                self._complete(message.receive, message, after)
        _run(after)
        return count

    def write_bytes(self, message: Message, data: memoryview, start: int = 0) -> None:
        """Write a part of a message, from byte ``start`` on."""

        def fill(target: memoryview) -> int:
            copy_bytes(target, data)
            return len(data)

        self.write(message, fill, start, start + len(data))

    def cancel(self, receive: Receive, reason: DistributedError | None = None) -> bool:
        """Cancel a receive; bytes of its message that have come are kept for the next one. False if it was done."""
        after: list[Callable[[], None]] = []
        with self._lock:
            message = receive.message
            if message is not None:
                self._matched.discard(receive)
                message.receive = receive.message = None
                if message.buffered is None:
                    message.buffered = bytearray(message.size_bytes)
                    message.buffered[: message.num_received] = receive.buffer[: message.num_received]
                if not self._match_receive(message, after):
                    self._enqueue(message)
            elif receive.order in self._receives.get(receive.tag, {}):
                self._drop_receive(receive)
            else:
                return False
        receive.end(reason or DistributedTimeoutError("the receive was cancelled"))
        _run(after)
        return True

    def withdraw(self, message: Message) -> None:
        """Remove a message that its sender has taken back; the receive that it was matched with waits for the next."""
        after: list[Callable[[], None]] = []
        with self._lock:
            self._drop_message(message)
            receive, message.receive, message.buffered = message.receive, None, None
            if receive is not None:
                self._matched.discard(receive)
                receive.message = None
                receive.peer = receive.source
                if not self._match_message(receive, after):
                    _put_back(self._receives.setdefault(receive.tag, {}), receive.order, receive)
        _run(after)

    def fail(self, why: Callable[[Receive], DistributedError | None]) -> None:
        """End every receive for which ``why(receive)`` is an error, with that error."""
        with self._lock:
            waiting = [receive for queue in self._receives.values() for receive in queue.values()]
            failed = [(receive, error) for receive in (*waiting, *self._matched) if (error := why(receive)) is not None]
            for receive, _ in failed:
                message, receive.message = receive.message, None
                if message is not None:
                    self._matched.discard(receive)
                    message.receive = None
                else:
                    self._drop_receive(receive)
        for receive, error in failed:
            receive.end(error)

    def forget(self, applies: Callable[[Message], bool]) -> None:
        """Drop every waiting message for which ``applies(message)``."""
        with self._lock:
            for message in [m for queue in self._messages.values() for m in queue.values() if applies(m)]:
                self._drop_message(message)
                message.buffered = None

    def fullest_source(self, newest: Message) -> int:
        """The rank that sent the most bytes of unexpected messages, including ``newest``, which was not added."""
        filled = Counter({newest.source: newest.buffered_bytes + _MESSAGE_COST})
        with self._lock:
            for queue in self._messages.values():
                for message in queue.values():
                    filled[message.source] += message.buffered_bytes + _MESSAGE_COST
        return max(filled, key=lambda source: filled[source])

    # Below, the lock is held; actions to run after its release are added to ``after``.

    def _match_message(self, receive: Receive, after: list[Callable[[], None]]) -> bool:
        """Match a receive with the first message that fits it, or end it with an error; False if there is none."""
        message = next((m for m in self._messages.get(receive.tag, {}).values() if receive.matches(m)), None)
        if message is None:
            return False
        error = self._size_error(receive, message)
        if error is not None:
            after.append(partial(receive.end, error))
        else:
            self._drop_message(message)
            self._pair(receive, message, after)
        return True

    def _match_receive(self, message: Message, after: list[Callable[[], None]]) -> bool:
        """Match a message with the first receive that fits it; False if there is none."""
        while True:
            queue = self._receives.get(message.tag, {})
            receive = next((r for r in queue.values() if r.matches(message)), None)
            if receive is None:
                return False
            self._drop_receive(receive)
            error = self._size_error(receive, message)
            if error is None:
                self._pair(receive, message, after)
                return True
            after.append(partial(receive.end, error))

    def _enqueue(self, message: Message) -> None:
        """Make a message wait for a receive."""
        if message.grant is None and message.buffered is None:
            message.buffered = bytearray(message.size_bytes)
        self._unexpected_bytes += message.buffered_bytes + _MESSAGE_COST
        _put_back(self._messages.setdefault(message.tag, {}), message.arrival, message)

    def _pair(self, receive: Receive, message: Message, after: list[Callable[[], None]]) -> None:
        receive.message, message.receive = message, receive
        receive.peer, receive.message_bytes = message.source, message.size_bytes
        if message.num_received == message.size_bytes:
            self._complete(receive, message, after)
            return
        self._matched.add(receive)
        if message.grant is not None and message.buffered is None:
            after.append(message.grant)

    def _complete(self, receive: Receive, message: Message, after: list[Callable[[], None]]) -> None:
        if message.buffered:
            copy_bytes(receive.buffer[: message.size_bytes], memoryview(message.buffered))
        self._matched.discard(receive)
        message.receive = receive.message = None
        after.append(receive.end)

    def _size_error(self, receive: Receive, message: Message) -> SizeMismatchError | None:
        room = len(receive.buffer)
        if room == message.size_bytes or (receive.accepts_shorter and room > message.size_bytes):
            return None
        rank, sender = self._describe(message.tag, message.source)
        return size_error(rank, sender, message.size_bytes, len(receive.buffer))

    def _drop_message(self, message: Message) -> None:
        queue = self._messages.get(message.tag, {})
        if queue.pop(message.arrival, None) is not None:
            if not queue:
                del self._messages[message.tag]
            self._unexpected_bytes -= message.buffered_bytes + _MESSAGE_COST

    def _drop_receive(self, receive: Receive) -> None:
        queue = self._receives[receive.tag]
        del queue[receive.order]
        if not queue:
            del self._receives[receive.tag]


_Waiting = TypeVar("_Waiting")


def _put_back(queue: dict[int, _Waiting], order: int, waiting: _Waiting) -> None:
    """Insert into a queue that is ordered by key: at its end, or in its old position if it was removed before."""
    is_last = not queue or next(reversed(queue)) < order
    queue[order] = waiting
    if not is_last:
        ordered = sorted(queue.items())
        queue.clear()
        queue.update(ordered)


def _run(actions: list[Callable[[], None]]) -> None:
    for action in actions:
        action()
