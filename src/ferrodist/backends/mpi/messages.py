"""Messages as frames, on their way out and in; `frame.py` says which frames a message is."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from typing import TYPE_CHECKING

from ferrodist.backends.mailbox import EAGER_LIMIT, Mailbox, Message, copy_bytes
from ferrodist.backends.mpi.frame import MAX_PAYLOAD, Frame, Kind
from ferrodist.backends.mpi.messenger import Outgoing
from ferrodist.backends.tags import group_of_tag, group_tag
from ferrodist.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.mailbox_backend import Send
    from ferrodist.backends.mpi.messenger import Messenger

__all__ = ["MessagesIn", "MessagesOut"]

_LOW_64 = (1 << 64) - 1


class MessagesOut:
    """One rank's messages to others.

    Args:
        messenger: What takes frames back.
        push: ``push(rank, outgoing)`` sends one.
        finish: Ends a send, the data of which may change from then on.
    """

    def __init__(
        self, messenger: Messenger, push: Callable[[int, Outgoing], None], finish: Callable[[Send], object]
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
            frame = _frame_of(Kind.EAGER, send, number)
            self._push(send.peer, Outgoing(frame, send.data, send, partial(self._given, send)))
        else:
            self._offers[number] = send
            self._push(send.peer, Outgoing(_frame_of(Kind.OFFER, send, number), owner=send))

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
            self._push(send.peer, Outgoing(_frame_of(Kind.WITHDRAW, send, number)))
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
            frame = _frame_of(Kind.DATA, send, number, offset=start)
            self._push(send.peer, Outgoing(frame, send.data[start:stop], send, on_taken))

    def _given(self, send: Send) -> None:
        """MPI has a message's last bytes."""
        if self._sent.pop(send, None) is not None:
            self._finish(send)


class MessagesIn:
    """One rank's messages from others.

    Args:
        mailbox: Where they go.
        accept: Whether to keep one that is announced.
        push: ``push(rank, outgoing)`` sends a frame.
    """

    def __init__(
        self, mailbox: Mailbox, accept: Callable[[Message], bool], push: Callable[[int, Outgoing], None]
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
        self._push(message.source, Outgoing(Frame(Kind.GRANT, number)))

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


def _frame_of(kind: Kind, send: Send, number: int, *, offset: int = 0) -> Frame:
    return Frame(kind, number, group_of_tag(send.tag), send.tag & _LOW_64, len(send.data), offset)


def _message_of(source: int, frame: Frame) -> Message:
    return Message(source, group_tag(frame.group, frame.tag), frame.size_bytes)


def _copy(source: memoryview, target: memoryview) -> int:
    copy_bytes(target, source)
    return len(source)
