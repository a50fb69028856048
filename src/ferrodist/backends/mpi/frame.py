"""Frames: what ranks tell each other beside the data of collectives, each in one MPI message.

A message of up to `EAGER_LIMIT` bytes is one EAGER frame. A larger one is an OFFER, answered by a GRANT when the other
rank has a buffer, then DATA frames in order; the sender may take it back with WITHDRAW before it starts the last one.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from ferrodist.backends.mailbox import EAGER_LIMIT
from ferrodist.errors import ProtocolError

__all__ = ["HEADER_SIZE", "MAX_FRAME", "MAX_PAYLOAD", "Frame", "Kind"]

MAX_PAYLOAD = 1 << 20
"""Bytes of a message that a frame may carry: they are copied, so that neither side's buffer is MPI's."""

# magic, kind, message, group, tag, message size, offset
_HEADER = struct.Struct("<2sB5xQQQQQ")
_MAGIC = b"fm"

HEADER_SIZE = _HEADER.size
MAX_FRAME = HEADER_SIZE + MAX_PAYLOAD


class Kind(IntEnum):
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


_KINDS = {kind.value: kind for kind in Kind}


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

    kind: Kind
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
        if kind is Kind.EAGER and not length == size_bytes <= EAGER_LIMIT:
            raise ProtocolError(f"an EAGER frame with {length} bytes of a message of {size_bytes}")
        if kind is Kind.DATA and not 0 < length <= min(MAX_PAYLOAD, size_bytes - offset):
            raise ProtocolError(f"a DATA frame with {length} bytes from {offset} on of a message of {size_bytes}")
        return Frame(kind, message, group, tag, size_bytes, offset)
