"""Frames of an MPI group: messages and notices between ranks, apart from the data of collectives.

Each frame is one MPI message: a header of 48 bytes and up to `MAX_PAYLOAD` bytes. See [Note: message frames].
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ferrodist.backends.frame_type import FrameType
from ferrodist.backends.mailbox import EAGER_LIMIT
from ferrodist.errors import ProtocolError

MAX_PAYLOAD = 1 << 20  # bytes of a message in one frame: they are copied, so that neither side's buffer is MPI's

# magic, type, message, group, tag, message size, offset
_HEADER = struct.Struct("<2sB5xQQQQQ")
_MAGIC = b"fm"

HEADER_SIZE = _HEADER.size
MAX_FRAME = HEADER_SIZE + MAX_PAYLOAD


# MPI's frames lack DIED and READY, so that the codes of PING and PONG are not those of TCP's frames. In a LEFT frame,
# `message` is the number of the world's collectives that the source has entered, and in a PONG too.
_CODES = {kind: kind.value for kind in FrameType if kind <= FrameType.LEFT} | {FrameType.PING: 8, FrameType.PONG: 9}
_TYPES = {code: kind for kind, code in _CODES.items()}


class Frame(NamedTuple):
    """A frame's header."""

    kind: FrameType
    message: int = 0  # its id, unique at the source
    group: int = 0  # upper half of the message's tag
    tag: int = 0  # lower half of the message's tag
    size_bytes: int = 0  # of the whole message
    offset: int = 0  # of the payload in the message, in bytes

    def pack(self) -> bytes:
        """The header as bytes."""
        return _HEADER.pack(_MAGIC, _CODES[self.kind], self.message, self.group, self.tag, self.size_bytes, self.offset)

    @staticmethod
    def unpack(data: memoryview) -> Frame:
        """Decode the header of a whole frame; raises ProtocolError if no rank of this version sends such a frame."""
        if len(data) < HEADER_SIZE:
            raise ProtocolError(f"a message of {len(data)} bytes where a frame has at least {HEADER_SIZE}")
        magic, number, message, group, tag, size_bytes, offset = _HEADER.unpack_from(data)
        kind = _TYPES.get(number)
        if magic != _MAGIC or kind is None:
            raise ProtocolError("bytes that are not a frame of this version")
        length = len(data) - HEADER_SIZE
        if kind is FrameType.EAGER and not length == size_bytes <= EAGER_LIMIT:
            raise ProtocolError(f"an EAGER frame with {length} bytes of a message of {size_bytes}")
        if kind is FrameType.DATA and not 0 < length <= min(MAX_PAYLOAD, size_bytes - offset):
            raise ProtocolError(f"a DATA frame with {length} bytes from {offset} on of a message of {size_bytes}")
        return Frame(kind, message, group, tag, size_bytes, offset)
