"""The message protocol of the TCP and MPI backends, whose messages travel as frames: see [Note: message frames]."""

from __future__ import annotations

import itertools
import threading
from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import Buffer, override

from ferrodist.backends.abort_reason import pack_reason, unpack_reason
from ferrodist.backends.frame_type import FrameType
from ferrodist.backends.mailbox import EAGER_LIMIT, Message
from ferrodist.backends.mailbox_backend import MAX_AHEAD, MailboxBackend, Send
from ferrodist.backends.tags import group_tag
from ferrodist.errors import DistributedError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable


class FramedBackend(MailboxBackend):
    """A `MailboxBackend` whose messages and notices are frames.

    A transport below it implements the two methods that follow, and calls ``_on_...(source, frame, payload)`` for the
    frames that arrive, one at a time. They raise ProtocolError for a frame that no rank sends.
    """

    _max_payload: int  # bytes of a message in one DATA frame

    def __init__(self, rank: int, world_size: int, *, timeout: float | None, name: str) -> None:
        super().__init__(rank, world_size, timeout=timeout, name=name)
        self._message_ids = itertools.count(1)
        self._unsent: dict[Send, int] = {}  # message ids of sends that can still be taken back
        self._offers: dict[int, Send] = {}  # by message id: sends that wait for a GRANT
        # A message's frames are queued together, or it could be taken back between two and lose the first ones.
        self._streaming = threading.RLock()
        self._incoming: dict[tuple[int, int], Message] = {}  # by source and id: offered to this rank, not complete

    @abstractmethod
    def _push_frame(
        self,
        kind: FrameType,
        rank: int,
        message: int = 0,  # the message's id, or the number that a notice carries
        *,
        group: int = 0,
        send: Send | None = None,  # the message of the frame, which gives its group, tag and size
        offset: int = 0,
        payload: memoryview | bytes = b"",  # stays unchanged until it is sent
        on_sent: Callable[[], object] | None = None,  # called once the payload may be changed
    ) -> None:
        """Send a frame to a rank as soon as possible, or drop it if the rank can't be reached."""

    @abstractmethod
    def _drop_frames(self, send: Send) -> bool | None:
        """Drop a message's frames that are not on their way yet.

        Returns whether its last one, which has ``on_sent``, was among them; None if the rank can't be reached.
        """

    # Sending.

    @override
    def _start_send(self, send: Send) -> None:
        message_id = next(self._message_ids)
        self._unsent[send] = message_id
        if len(send.data) <= EAGER_LIMIT:
            on_sent = partial(self._on_sent, send)
            self._push_frame(FrameType.EAGER, send.peer, message_id, send=send, payload=send.data, on_sent=on_sent)
        else:
            self._offers[message_id] = send
            self._push_frame(FrameType.OFFER, send.peer, message_id, send=send)

    def _on_grant(self, source: int, frame: Any, _payload: memoryview | bytes) -> None:
        send = self._offers.get(frame.message)
        if send is None:
            return  # taken back meanwhile
        if send.peer != source:
            raise ProtocolError(f"a grant of message {frame.message}, which was offered to another rank")
        with self._streaming:
            if self._offers.pop(frame.message, None) is None:
                return
            size = len(send.data)
            for start in range(0, size, self._max_payload):
                payload = send.data[start : start + self._max_payload]
                on_sent = partial(self._on_sent, send) if start + len(payload) == size else None
                self._push_frame(
                    FrameType.DATA, source, frame.message, send=send, offset=start, payload=payload, on_sent=on_sent
                )

    def _on_sent(self, send: Send) -> None:
        if self._unsent.pop(send, None) is not None:
            self._finish_send(send)

    @override
    def _take_back(self, send: Send) -> bool:
        with self._streaming:
            message_id = self._unsent.pop(send, None)
            if message_id is None:
                return False  # its last byte is sent
            was_offered = self._offers.pop(message_id, None) is not None
            was_dropped = self._drop_frames(send)
        if was_dropped is None:
            return True
        if not was_offered and not was_dropped:
            self._finish_send(send)  # it arrives
            return False
        if len(send.data) > EAGER_LIMIT:
            self._push_frame(FrameType.WITHDRAW, send.peer, message_id, send=send)
        return True

    # Receiving.

    def _receive_eager(self, source: int, frame: Any) -> Message:
        """Announce a whole message, whose bytes are written next."""
        message = Message(source, group_tag(frame.group, frame.tag), frame.size_bytes)
        self._accept(message)
        return message

    def _on_offer(self, source: int, frame: Any, _payload: memoryview | bytes) -> None:
        key = source, frame.message
        if key in self._incoming:
            raise ProtocolError(f"a second offer of message {frame.message}")
        message = Message(source, group_tag(frame.group, frame.tag), frame.size_bytes)
        message.grant = partial(self._grant, message, frame.message)
        # Before it may be granted. Messages that the mailbox refuses are removed, so the mailbox's bounds apply: that
        # of unexpected messages, and the number of posted receives.
        self._incoming[key] = message
        if not self._accept(message):
            self._incoming.pop(key, None)

    def _grant(self, message: Message, message_id: int) -> None:
        message.granted = True
        self._push_frame(FrameType.GRANT, message.source, message_id)

    def _continued_message(self, source: int, frame: Any) -> Message | None:
        """The message of a DATA frame that has come; None if it was withdrawn, or its group has failed."""
        message = self._incoming.get((source, frame.message))
        if message is None:
            return None
        if not message.granted or frame.offset != message.num_received or frame.size_bytes != message.size_bytes:
            raise ProtocolError(f"a piece of message {frame.message} of rank {source} out of its order")
        return message

    def _on_withdraw(self, source: int, frame: Any, _payload: memoryview | bytes) -> None:
        message = self._incoming.pop((source, frame.message), None)
        if message is not None:
            self._mailbox.withdraw(message)

    def _withdraw_from(self, rank: int | None) -> None:
        """Withdraw the incomplete messages of a rank that is gone; None: of all."""
        for key, message in self._incoming.copy().items():  # other threads remove entries
            if rank in (key[0], None):
                self._incoming.pop(key, None)
                self._mailbox.withdraw(message)

    @override
    def _forget_messages(self, applies: Callable[[Message], bool]) -> None:
        super()._forget_messages(applies)
        for key, message in self._incoming.copy().items():
            if applies(message):
                self._incoming.pop(key, None)

    # Notices.

    @override
    def _notify_abort(self, group_id: int, members: tuple[int, ...], error: DistributedError) -> None:
        payload = pack_reason(error)
        for rank in members:
            if rank != self.rank:
                self._push_frame(FrameType.ABORT, rank, group=group_id, payload=payload)

    def _on_abort(self, source: int, frame: Any, payload: Buffer) -> None:
        try:
            reason = unpack_reason(payload, self.world_size)
        except ValueError as error:
            raise ProtocolError(f"an ABORT frame with {error}") from None
        if self._accepts_notice(source, frame):
            self._act_on_abort(frame.group, reason)

    def _act_on_abort(self, group_id: int, error: DistributedError) -> None:
        self.fail_group(group_id, error)

    def _accepts_notice(self, source: int, frame: Any) -> bool:
        """Return whether to act on a notice of a group's end: only if its sender is a member of the group."""
        if not self._may_be_ahead(frame.group, source):
            raise ProtocolError(f"the ends of more than {MAX_AHEAD} groups that rank {self.rank} has not made")
        return self._is_member(frame.group, source)

    def _ping(self, rank: int) -> None:
        self._push_frame(FrameType.PING, rank)
