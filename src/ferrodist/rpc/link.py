"""The way to one other rank: a group of two, and what is asked for ahead in it.

[Note: frames]
A message is a frame of `FRAME_BYTES`, which the other side has always asked for. What it holds is in the frame where
there is room, and else a message of its own, which is asked for when the frame has come; and so are its large tensors.
These have the message's number in their tag, so that frames need not wait for them, nor for each other.

Small messages so overtake large ones. Agents' calls of each other don't overtake those before: one may make an object
that the next one uses. Notices overtake nothing: what they give back may be in a message that is on its way.

    kind of message: u8 | form: u8 | zero: u16 | bytes of the content: u32 | number: u64 | content, if there is room
"""

from __future__ import annotations

import enum
import functools
import math
import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ferrodist.collectives.letters import Apart, Parcel, read_letter_bytes, write_letter_bytes
from ferrodist.collectives.views import bytes_of
from ferrodist.errors import DistributedError, GroupClosedError, ProtocolError, SizeMismatchError, UnsupportedOpError
from ferrodist.rpc.messages import MessageKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.listening import Listener
    from ferrodist.backends.request import Request
    from ferrodist.rpc.buffers import Buffers
    from ferrodist.rpc.messages import Content

__all__ = ["FRAME_BYTES", "Link", "Receiver"]

FRAME_BYTES = 512
_HEAD = struct.Struct("<BBHIQ")
_ROOM = FRAME_BYTES - _HEAD.size
_FRAME_TAG = 0
_KIND_BITS = 3
_MOST_CONTENT_BYTES = (1 << 32) - 1  # of what is no tensor


_WAITED_FOR = {
    MessageKind.INTERNAL_CALL: frozenset({MessageKind.INTERNAL_CALL}),
    MessageKind.NOTICE: frozenset(MessageKind),
}
"""What messages of a kind must not overtake."""


class _Form(enum.IntEnum):
    PLAIN = 0
    LETTER = 1


@dataclass(slots=True, eq=False)
class _Held:
    """A frame that waits.

    Args:
        kind: Of the message.
        frame: It.
        waits: Tags of the messages before it that have not come whole.
        is_taken: Whether a thread takes it now.
    """

    kind: MessageKind
    frame: bytes
    waits: set[int]
    is_taken: bool = False


_FORMS = frozenset(_Form)
_KINDS = {int(kind): kind for kind in MessageKind}


class Receiver(Protocol):
    """Who is told of what comes, in any thread; frames of one link in the order in which they were sent.

    It must not block, for until it returns nothing else comes.
    """

    @property
    def buffers(self) -> Buffers:
        """Where large tensors arrive."""

    @property
    def marks(self) -> Sequence[str]:
        """Of the extensions that values may have."""

    def attend(self, change: int) -> None:
        """So many large messages more are on their way, and are moved by who waits for a `Signal`."""

    def received(self, peer: int, kind: MessageKind, number: int, content: Content) -> None:
        """A message has come."""

    def garbled(self, peer: int, kind: MessageKind, number: int, error: DistributedError) -> None:
        """Of a message no more could be read than this."""

    def lost(self, peer: int, error: DistributedError) -> None:
        """Nothing comes any more. Called once, and not after `Link.close`."""


class Link:
    """Sends messages to a rank, and receives from it.

    Args:
        pair: A group of this rank and the other one; the link closes it.
        peer: The other one's number for who uses this.
        receiver: Who is told of what comes.
        limit: Bytes that a message may have.
    """

    def __init__(self, pair: Backend, peer: int, receiver: Receiver, limit: int) -> None:
        self._pair = pair
        self._other = 1 - pair.rank
        self._peer = peer
        self._receiver = receiver
        self._limit = limit
        self._buffers = receiver.buffers
        self._lock = threading.Lock()
        self._over: DistributedError | None = None  # why it has ended
        self._listener: Listener | None = None
        self._arriving: set[int] = set()  # messages of which only the frame has come, by their tags
        self._held: list[_Held] = []  # and frames, in the order in which they came
        self._under_way: set[Request] = set()  # what is larger than a frame, both ways

    def start(self) -> None:
        """Receive from now on."""
        try:
            self._listener = self._pair.listen(self._other, FRAME_BYTES, self._heard, self._ended, tag=_FRAME_TAG)
        except DistributedError as error:
            self._ended(error)

    def send(self, kind: MessageKind, number: int, content: Content) -> None:
        """Send a message; its tensors are not to be changed until it is there.

        Raises:
            ValueError: It is too large.
            TypeError: A tensor can't travel.
            DistributedError: The rank was lost, or the link is closed.
        """
        if self._over is not None:  # looked at after whoever waits for an answer can be found by who is told of it
            raise self._over.fresh()
        apart: list[torch.Tensor] = []
        if isinstance(content, bytes):
            form, memory = _Form.PLAIN, memoryview(content)
        else:
            if any(content.is_on_gpu):
                raise UnsupportedOpError(
                    "what is sent has a tensor on a GPU: calls carry those on the CPU, pass tensor.cpu()"
                )
            letter, apart = write_letter_bytes(content, "what is sent")
            form, memory = _Form.LETTER, memoryview(letter)
        size = memory.nbytes
        if kind is not MessageKind.FAILURE or size > _ROOM:  # why there is no result is to be told in any case
            self._check_size(size + sum([tensor.nbytes for tensor in apart]), size)
        head = _HEAD.pack(kind, form, 0, size, number)
        if size <= _ROOM:
            self._send_frame((head + memory).ljust(FRAME_BYTES, b"\0"))
        else:
            self._send_frame(head.ljust(FRAME_BYTES, b"\0"))
            self._send_apart(memory, kind, number)
        for tensor in apart:
            self._send_apart(bytes_of(tensor), kind, number)

    def close(self, seconds: float) -> None:
        """Send nothing more, and receive nothing more.

        Args:
            seconds: How long the other side may take to take the goodbye.
        """
        self._over = GroupClosedError("the agent was closed")
        if self._listener is not None:
            self._listener.close()
        self._pair.close(seconds)

    def _check_size(self, size: int, size_of_content: int) -> None:
        if size > self._limit:
            raise ValueError(
                f"a message of {size:,} bytes is larger than {self._limit:,}, which agents take: send it in parts, or"
                " make the agents with a larger message_limit"
            )
        if size_of_content > _MOST_CONTENT_BYTES:
            raise ValueError(f"a message of {size:,} bytes has more than 4 GiB beside its tensors: send it in parts")

    def _send_frame(self, frame: bytes) -> None:
        if not self._pair.try_send(frame, self._other, tag=_FRAME_TAG):
            self._pair.isend(frame, self._other, tag=_FRAME_TAG)

    def _send_apart(self, memory: memoryview, kind: MessageKind, number: int) -> None:
        self._keep(self._pair.isend(memory, self._other, tag=_tag(kind, number)), lambda: None)

    def _keep(self, request: Request, then: Callable[[], None]) -> None:
        """Keep a transfer until it has ended, and do something then."""
        if request.done():  # a small one, most often
            then()
            return
        with self._lock:
            self._under_way.add(request)
        self._receiver.attend(1)

        def end() -> None:
            with self._lock:
                self._under_way.discard(request)
            self._receiver.attend(-1)
            then()

        request.add_done_callback(end)

    # What comes.

    def _heard(self, frames: list[bytes]) -> None:
        try:
            for frame in frames:
                self._take(frame)
        except ProtocolError as error:
            self._pair.abort(error)
        except DistributedError:
            pass  # the group has ended, which is told apart

    def _take(self, frame: bytes) -> None:
        kind_number, form, _, size, _ = _HEAD.unpack_from(frame)
        kind = _KINDS.get(kind_number)
        if kind is None or form not in _FORMS or size > max(self._limit, _ROOM):
            raise ProtocolError(f"rank {self._peer} sent what is no message of an agent", ranks=(self._peer,))
        if kind not in _WAITED_FOR or not self._is_held(kind, frame):
            self._take_checked(kind, frame)

    def _take_checked(self, kind: MessageKind, frame: bytes) -> None:
        _, form, _, size, number = _HEAD.unpack_from(frame)
        if size > _ROOM:
            self._arriving.add(_tag(kind, number))
            memory = bytes_of(torch.empty(size, dtype=torch.uint8, device="cpu"))
            request = self._pair.irecv(memory, self._other, tag=_tag(kind, number))
            self._keep(request, lambda: self._if_well(request, self._read, kind, number, form, memory))
        elif form == _Form.PLAIN:
            self._receiver.received(self._peer, kind, number, frame[_HEAD.size : _HEAD.size + size])
        else:
            self._read(kind, number, form, memoryview(bytearray(frame))[_HEAD.size : _HEAD.size + size])

    def _if_well(self, request: Request, then: Callable[..., None], *arguments: Any) -> None:
        """Go on with what has come. What has failed, failed with the group, but for its size."""
        try:
            request.wait(math.inf)
            then(*arguments)
        except (SizeMismatchError, ProtocolError) as error:
            self._pair.abort(ProtocolError(f"rank {self._peer} broke the protocol: {error}", ranks=(self._peer,)))
        except DistributedError:
            pass

    def _read(self, kind: MessageKind, number: int, form: _Form, memory: memoryview) -> None:
        if form == _Form.PLAIN:
            self._receiver.received(self._peer, kind, number, bytes(memory))
            self._settle(kind, number)
            return
        try:
            parcel, apart = read_letter_bytes(memory, self._receiver.marks)
        except Exception as error:  # noqa: BLE001 - whatever it is, it was sent
            text = f"rank {self._peer} sent what is no value: {error}"
            self._receiver.garbled(self._peer, kind, number, ProtocolError(text, ranks=(self._peer,)))
            self._settle(kind, number)
            return
        if apart:
            self._check_apart(memory.nbytes, apart)
            self._arriving.add(_tag(kind, number))
        self._receive_apart(kind, number, parcel, apart)

    def _check_apart(self, size: int, apart: list[Apart]) -> None:
        for each in apart:
            size += math.prod(each.shape) * each.dtype.itemsize
            if min(each.shape, default=0) < 0 or size > self._limit:
                text = f"rank {self._peer} sent a tensor of shape {each.shape} in a message of {size:,} bytes"
                raise ProtocolError(text, ranks=(self._peer,))

    def _receive_apart(self, kind: MessageKind, number: int, parcel: Parcel, apart: list[Apart]) -> None:
        if not apart:
            self._receiver.received(self._peer, kind, number, parcel)
            self._settle(kind, number)
            return
        first, rest = apart[0], apart[1:]
        tensor = self._buffers.make(first.shape, first.dtype)
        parcel.tensors[first.number] = tensor
        request = self._pair.irecv(bytes_of(tensor), self._other, tag=_tag(kind, number))
        next_one = functools.partial(self._receive_apart, kind, number, parcel, rest)
        self._keep(request, lambda: self._if_well(request, next_one))

    def _is_held(self, kind: MessageKind, frame: bytes) -> bool:
        """Whether a frame has to wait for what was sent before it: see [Note: frames]."""
        if not (self._arriving or self._held):
            return False
        with self._lock:
            waits = {tag for tag in self._arriving if _kind_of(tag) in _WAITED_FOR[kind]}
            is_held = bool(waits) or any(each.kind in _WAITED_FOR[kind] for each in self._held)
            if is_held:
                self._held.append(_Held(kind, frame, waits))
            return is_held

    def _settle(self, kind: MessageKind, number: int) -> None:
        """A message has come whole: take the frames that waited for it."""
        if not self._arriving:
            return
        with self._lock:
            self._arriving.discard(_tag(kind, number))
            for each in self._held:
                each.waits.discard(_tag(kind, number))
        while (ready := self._next_ready()) is not None:
            self._take_checked(ready.kind, ready.frame)
            self._let_go(ready)

    def _next_ready(self) -> _Held | None:
        """A frame that nothing before it keeps any more, for one thread to take."""
        with self._lock:
            before: set[MessageKind] = set()
            for each in self._held:
                if not (each.waits or each.is_taken or before & _WAITED_FOR[each.kind]):
                    each.is_taken = True
                    return each
                before.add(each.kind)
            return None

    def _let_go(self, held: _Held) -> None:
        """A frame was taken: those that came after it wait no more, but for what follows it."""
        tag = _tag(held.kind, _HEAD.unpack_from(held.frame)[-1])
        with self._lock:
            place = self._held.index(held)
            if tag in self._arriving:
                for each in self._held[place + 1 :]:
                    if held.kind in _WAITED_FOR[each.kind]:
                        each.waits.add(tag)
            del self._held[place]

    def _ended(self, error: DistributedError) -> None:
        if self._over is None:
            self._over = error
            self._receiver.lost(self._peer, error)


def _tag(kind: MessageKind, number: int) -> int:
    """Of what is too large for a frame; never that of frames."""
    return ((number << _KIND_BITS | kind) + 1) & ((1 << 62) - 1)


def _kind_of(tag: int) -> int:
    return (tag - 1) & ((1 << _KIND_BITS) - 1)
