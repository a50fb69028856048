"""A rank's mailbox: where messages that arrive meet the receives that were asked for.

[Note: eager and offered messages]
A message of up to `EAGER_LIMIT` bytes is sent at once and kept by the receiving rank until it is asked for. A larger
one is only offered: its elements move when the receiving rank has a buffer for them, straight into that buffer. So a
rank holds little for messages it has not asked for, whatever others send, and ``send`` of a large message waits for
its receiver.

[Note: who may write into a receive's buffer]
Bytes go into a user's buffer only while the mailbox's lock is held and the message is still matched with the
receive. So once `Mailbox.cancel` has returned, the buffer is the user's again; what had come already is kept with
the message, which waits for the next receive. Callbacks and grants run after the lock is released.
"""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ferrodist.backends.request import BaseRequest
from ferrodist.backends.tags import ANY_SOURCE
from ferrodist.errors import DistributedError, DistributedTimeoutError, SizeMismatchError
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

EAGER_LIMIT = 256 * 1024
"""Bytes up to which a message is sent before it is asked for."""

MAX_UNASKED_BYTES = 1 << 30
"""Bytes of messages a mailbox keeps unasked; more means that a rank sends what nobody receives."""

_MESSAGE_COST = 512
"""Bytes a waiting message counts for beside its own, so that empty ones and offers don't pile up for ever either."""


def read_view(data: Buffer) -> memoryview:
    """``data`` as a flat view of its bytes; raises TypeError or ValueError when it is no contiguous buffer."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError("the data to send must be C-contiguous: copy it first")
    return view.cast("B") if view.nbytes else memoryview(b"")


def write_view(buffer: Buffer) -> memoryview:
    """``buffer`` as a flat writable view of its bytes; raises when it is read-only or not contiguous."""
    view = memoryview(buffer)
    if view.readonly:
        raise ValueError("the buffer to receive into is read-only: pass a bytearray or a writable array")
    if not view.c_contiguous:
        raise ValueError("the buffer to receive into must be C-contiguous")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy equally long views; large ones without the interpreter lock."""
    if len(source) < 1 << 15:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class Receive(BaseRequest):
    """A receive that was asked for; see `Mailbox.post`."""

    __slots__ = ("_mailbox", "buffer", "message", "number", "source", "tag")

    def __init__(self, mailbox: Mailbox, buffer: memoryview, source: int, tag: int) -> None:
        super().__init__(source)
        self._mailbox = mailbox
        self.buffer = buffer
        self.source = source
        self.tag = tag
        self.message: Message | None = None
        self.number = 0  # in the order in which receives were asked for

    def matches(self, message: Message) -> bool:
        """Whether this receive may take ``message``, which has its tag."""
        return self.source in (ANY_SOURCE, message.source)

    def cancel(self) -> bool:
        """Give the receive up; see `Request.cancel`."""
        return self._mailbox.cancel(self)


class Message:
    """A message that has been announced, has partly come, or waits whole.

    Args:
        source: The rank that sent it.
        tag: Its tag.
        size_bytes: Its length.
        grant: For an offered message: called once a receive is there for it.
    """

    __slots__ = ("arrival", "grant", "granted", "kept", "num_received", "receive", "size_bytes", "source", "tag")

    def __init__(self, source: int, tag: int, size_bytes: int, grant: Callable[[], None] | None = None) -> None:
        self.source = source
        self.tag = tag
        self.size_bytes = size_bytes
        self.grant = grant
        self.granted = False  # whether its sender has been told; kept by the transport
        self.num_received = 0
        self.kept: bytearray | None = None  # its bytes, when they could not go to a receive's buffer
        self.receive: Receive | None = None
        self.arrival = 0

    @property
    def size_kept(self) -> int:
        """Bytes of it that a mailbox holds unasked: none of an offered one, which moves once it is asked for."""
        return self.size_bytes if self.grant is None else 0


def size_error(number: int, who: str, size_bytes: int, room_bytes: int) -> SizeMismatchError:
    """The error of a receive for a message of another size.

    Args:
        number: The sender's, in the group of the message.
        who: What the group's errors call it.
        size_bytes: Of the message.
        room_bytes: Of the receive's buffer.
    """
    return SizeMismatchError(
        f"{who} sent {counted(size_bytes, 'byte')}, the buffer to receive them has {room_bytes}: receive into one of"
        " that size."
        " The message is kept.",
        ranks=(number,),
    )


class Mailbox:
    """Messages and receives of one rank, matched by tag and source in order of arrival.

    Args:
        describe: ``describe(tag, source)`` returns the number and the name that an error gives to the sender of a
            message with this tag.
    """

    def __init__(
        self, describe: Callable[[int, int], tuple[int, str]] = lambda _, source: (source, f"rank {source}")
    ) -> None:
        self._describe = describe
        self._lock = threading.Lock()
        self._receives: dict[int, dict[int, Receive]] = {}  # by tag, then by number, ascending
        self._messages: dict[int, dict[int, Message]] = {}  # by tag, then by arrival, ascending
        self._matched: set[Receive] = set()  # their message is on its way
        self._num_receives = 0
        self._num_arrivals = 0
        self._unasked_bytes = 0

    @property
    def unasked_bytes(self) -> int:
        """Bytes of messages that nobody has asked for, with what each counts for beside its own."""
        return self._unasked_bytes

    @property
    def is_awaited(self) -> bool:
        """Whether somebody has asked for a message that has not come."""
        return bool(self._receives or self._matched)

    def post(self, receive: Receive, refusal: Callable[[], DistributedError | None]) -> None:
        """Ask for a message.

        Args:
            receive: A fresh receive.
            refusal: Looked at under the lock when no message is there: why none will ever come, or None.
        """
        after: list[Callable[[], None]] = []
        with self._lock:
            self._num_receives += 1
            receive.number = self._num_receives
            if not self._take_message(receive, after):
                error = refusal()
                if error is None:
                    self._receives.setdefault(receive.tag, {})[receive.number] = receive
                else:
                    after.append(partial(receive.end, error))
        _run(after)

    def arrive(self, message: Message) -> bool:
        """Take a message's announcement; its bytes, if any, follow through `write`.

        Returns:
            False when nobody has asked for it either and the mailbox is full; the message is not taken.
        """
        after: list[Callable[[], None]] = []
        with self._lock:
            self._num_arrivals += 1
            message.arrival = self._num_arrivals
            is_taken = self._take_receive(message, after)
            if not is_taken and self._unasked_bytes + message.size_kept + _MESSAGE_COST <= MAX_UNASKED_BYTES:
                self._keep(message)
                is_taken = True
        _run(after)
        return is_taken

    def write(self, message: Message, fill: Callable[[memoryview], int], start: int, stop: int) -> int:
        """Let ``fill(target)`` write bytes ``start`` to ``stop``; returns its result, the number it wrote.

        ``fill`` runs under the lock: it must not block or call the mailbox. An exception from it changes nothing.
        """
        after: list[Callable[[], None]] = []
        with self._lock:
            if message.kept is not None:
                target = memoryview(message.kept)[start:stop]
            elif message.receive is not None:
                target = message.receive.buffer[start:stop]
            else:  # withdrawn, or its receive has failed: the bytes go nowhere
                target = memoryview(bytearray(stop - start))
            count = fill(target)
            message.num_received += count
            if message.num_received == message.size_bytes and message.receive is not None:
                self._complete(message.receive, message, after)
        _run(after)
        return count

    def cancel(self, receive: Receive, reason: DistributedError | None = None) -> bool:
        """Give a receive up; what has come of its message is kept for the next one. False when it was done."""
        after: list[Callable[[], None]] = []
        with self._lock:
            message = receive.message
            if message is not None:
                self._matched.discard(receive)
                message.receive = receive.message = None
                if message.kept is None:
                    message.kept = bytearray(message.size_bytes)
                    message.kept[: message.num_received] = receive.buffer[: message.num_received]
                if not self._take_receive(message, after):
                    self._keep(message)
            elif receive.number in self._receives.get(receive.tag, {}):
                self._drop_receive(receive)
            else:
                return False
        receive.end(reason or DistributedTimeoutError("the receive was cancelled"))
        _run(after)
        return True

    def withdraw(self, message: Message) -> None:
        """Forget a message that its sender took back; a receive it was matched with waits for the next one."""
        after: list[Callable[[], None]] = []
        with self._lock:
            self._drop_message(message)
            receive, message.receive, message.kept = message.receive, None, None
            if receive is not None:
                self._matched.discard(receive)
                receive.message = None
                receive.peer = receive.source
                if not self._take_message(receive, after):
                    _put_back(self._receives.setdefault(receive.tag, {}), receive.number, receive)
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
        """Free every waiting message for which ``applies(message)``."""
        with self._lock:
            for message in [m for queue in self._messages.values() for m in queue.values() if applies(m)]:
                self._drop_message(message)
                message.kept = None

    def fullest_source(self, newest: Message) -> int:
        """The rank that sent most of what nobody has asked for, with a message that is not taken yet."""
        filled = Counter({newest.source: newest.size_kept + _MESSAGE_COST})
        with self._lock:
            for queue in self._messages.values():
                for message in queue.values():
                    filled[message.source] += message.size_kept + _MESSAGE_COST
        return max(filled, key=lambda source: filled[source])

    # Below here the lock is held, and what must happen after its release is added to ``after``.

    def _take_message(self, receive: Receive, after: list[Callable[[], None]]) -> bool:
        """Match a receive with the first message that fits it, or refuse it; False when there is none."""
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

    def _take_receive(self, message: Message, after: list[Callable[[], None]]) -> bool:
        """Match a message with the first receive that fits it; False when there is none."""
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

    def _keep(self, message: Message) -> None:
        """Have a message wait for a receive."""
        if message.grant is None and message.kept is None:
            message.kept = bytearray(message.size_bytes)
        self._unasked_bytes += message.size_kept + _MESSAGE_COST
        _put_back(self._messages.setdefault(message.tag, {}), message.arrival, message)

    def _pair(self, receive: Receive, message: Message, after: list[Callable[[], None]]) -> None:
        receive.message, message.receive = message, receive
        receive.peer = message.source
        if message.num_received == message.size_bytes:
            self._complete(receive, message, after)
            return
        self._matched.add(receive)
        if message.grant is not None and message.kept is None:
            after.append(message.grant)

    def _complete(self, receive: Receive, message: Message, after: list[Callable[[], None]]) -> None:
        if message.kept:
            copy_bytes(receive.buffer, memoryview(message.kept))
        self._matched.discard(receive)
        message.receive = receive.message = None
        after.append(receive.end)

    def _size_error(self, receive: Receive, message: Message) -> SizeMismatchError | None:
        if len(receive.buffer) == message.size_bytes:
            return None
        number, who = self._describe(message.tag, message.source)
        return size_error(number, who, message.size_bytes, len(receive.buffer))

    def _drop_message(self, message: Message) -> None:
        queue = self._messages.get(message.tag, {})
        if queue.pop(message.arrival, None) is not None:
            if not queue:
                del self._messages[message.tag]
            self._unasked_bytes -= message.size_kept + _MESSAGE_COST

    def _drop_receive(self, receive: Receive) -> None:
        queue = self._receives[receive.tag]
        del queue[receive.number]
        if not queue:
            del self._receives[receive.tag]


_Waiting = TypeVar("_Waiting")


def _put_back(queue: dict[int, _Waiting], number: int, waiting: _Waiting) -> None:
    """Add to a queue that is ordered by number: at its end, or, for one that was taken out before, in its old place."""
    is_last = not queue or next(reversed(queue)) < number
    queue[number] = waiting
    if not is_last:
        ordered = sorted(queue.items())
        queue.clear()
        queue.update(ordered)


def _run(actions: list[Callable[[], None]]) -> None:
    for action in actions:
        action()
