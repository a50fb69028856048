"""How messages begin on their way between two agents.

[Note: frames]
A message is a frame of `FRAME_BYTES`, which the other side has always asked for. What it holds is in the frame where
there is room, and else a message of its own, which is asked for when the frame has come; and so are its large tensors.
These have the message's number in their tag, so that frames need not wait for them, nor for each other.

    kind of message: u8 | form: u8 | flags: u16 | bytes of the content: u32 | number: u64 | content, if there is room
"""

from __future__ import annotations

import enum
import struct

from ferrodist.errors import ProtocolError
from ferrodist.rpc.messages import MessageKind

__all__ = ["FRAME_BYTES", "FRAME_TAG", "MOST_CONTENT_BYTES", "ROOM", "Form", "Frame", "pack_frame", "tag_of"]

FRAME_BYTES = 512
_HEAD = struct.Struct("<BBHIQ")

ROOM = FRAME_BYTES - _HEAD.size
"""Bytes of content that a frame has room for."""

FRAME_TAG = 0

MOST_CONTENT_BYTES = (1 << 32) - 1
"""Of what is no tensor."""

_KIND_BITS = 3
_HAS_REFERENCES = 1


class Form(enum.IntEnum):
    """How a message's content is written."""

    PLAIN = 0
    LETTER = 1


_FORMS = frozenset(Form)
_KINDS = {int(kind): kind for kind in MessageKind}


class Frame:
    """A frame that has come.

    Args:
        data: Its bytes.
        peer: The rank that sent it, for errors.

    Attributes:
        data: As given.
        kind: Of the message.
        form: Of its content.
        has_references: Whether there are any in it, for all that the sender says.
        size: Bytes of the content.
        number: Of the message.
        is_whole: Whether all of the message is in it.
        place: How many frames came before it, where it has to wait or is waited for.
        is_withdrawn: Whether its sender waits for no answer any more.

    Raises:
        ProtocolError: It is none of these.
    """

    __slots__ = ("data", "form", "has_references", "is_whole", "is_withdrawn", "kind", "number", "place", "size")

    def __init__(self, data: bytes, peer: int) -> None:
        kind, self.form, flags, self.size, self.number = _HEAD.unpack_from(data)
        if kind not in _KINDS or self.form not in _FORMS or flags > _HAS_REFERENCES:
            raise ProtocolError(f"rank {peer} sent what is no message of an agent", ranks=(peer,))
        self.data = data
        self.kind = _KINDS[kind]
        self.has_references = bool(flags)
        self.is_whole = self.size <= ROOM and self.form == Form.PLAIN
        self.place = 0
        self.is_withdrawn = False

    def content(self) -> bytes:
        """What is in it."""
        return self.data[_HEAD.size : _HEAD.size + self.size]


def pack_frame(kind: MessageKind, form: Form, number: int, content: memoryview, *, has_references: bool) -> bytes:
    """Write a frame, with the content if there is room."""
    size = content.nbytes
    head = _HEAD.pack(kind, form, _HAS_REFERENCES if has_references else 0, size, number)
    return (head + content if size <= ROOM else head).ljust(FRAME_BYTES, b"\0")


def tag_of(kind: MessageKind, number: int) -> int:
    """Of what is too large for a frame; never that of frames."""
    return ((number << _KIND_BITS | kind) + 1) & ((1 << 62) - 1)
