"""Frames: the unit of bytes on a connection, and the checks before any of it is trusted.

A frame is a header of 60 bytes, an authentication tag, and up to `MAX_PAYLOAD` bytes. The tag proves that it is the
next frame of the peer (see [Note: session keys] in `rendezvous/session.py`). It covers header and payload, but only the
header of large pieces of tensors and messages, for which computing it would take longer than sending them. Frames of
messages are described in [Note: message frames].
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ferrodist.backends.frame_type import FrameType
from ferrodist.backends.mailbox import EAGER_LIMIT
from ferrodist.backends.tags import Channel, channel_of_tag
from ferrodist.errors import ProtocolError

WIRE_VERSION = 2

MAX_PAYLOAD = 512 * 1024
"""Maximum payload of a frame in bytes: large enough to hide its cost, small enough to let urgent frames through."""

COVERED_BYTES = 16 * 1024
"""Size in bytes up to which the tag covers users' data in a frame: 20 us of work, beside the 100 us of a
call. For 8 MiB the tags would take several times as long as the transfer."""

_USERS_CHANNELS = frozenset({Channel.BYTES, Channel.DATA, Channel.TENSOR_PAYLOAD})

MAX_MESSAGE = 1 << 48  # maximum size of a message in bytes

# magic, version, kind, padding, payload length, source, destination, message, group, tag, message size, offset
_HEADER = struct.Struct("<2sBBIIIIQQQQQ")
_MAGIC = b"fd"

HEADER_SIZE = _HEADER.size

_OF_MESSAGES = frozenset({FrameType.EAGER, FrameType.DATA})
_WITH_PAYLOAD = frozenset({FrameType.EAGER, FrameType.DATA, FrameType.ABORT})


class Frame(NamedTuple):
    """A frame's header; the fields are in the order of the wire."""

    kind: FrameType
    length: int = 0  # size of the payload in bytes
    source: int = 0
    destination: int = 0  # rank 0 relays frames for other ranks
    message: int = 0  # the source's id of the message
    group: int = 0  # upper half of the message's tag
    tag: int = 0  # lower half of the message's tag
    size_bytes: int = 0  # of the whole message
    offset: int = 0  # of the payload in the message

    @property
    def is_covered(self) -> bool:
        """Return whether the tag covers the payload."""
        is_users = self.kind in _OF_MESSAGES and channel_of_tag(self.tag) in _USERS_CHANNELS
        return self.length <= COVERED_BYTES or not is_users

    def pack(self) -> bytes:
        """Encode the header."""
        return _HEADER.pack(_MAGIC, WIRE_VERSION, self.kind, 0, *self[1:])

    @staticmethod
    def unpack(data: memoryview, world_size: int) -> Frame:
        """Decode a header; ProtocolError if no rank of this version, in a group of this size, writes such a one."""
        magic, version, kind, zero, *fields = _HEADER.unpack(data)
        length, source, destination, *_, size, offset = fields
        if magic != _MAGIC or zero != 0:
            raise ProtocolError("bytes that are not a frame")
        if version != WIRE_VERSION:
            raise ProtocolError(f"a frame of wire version {version}; this rank speaks version {WIRE_VERSION}")
        if source >= world_size or destination >= world_size or source == destination:
            raise ProtocolError(f"a frame from rank {source} to rank {destination} in a group of {world_size}")
        try:
            known = FrameType(kind)
        except ValueError:
            raise ProtocolError(f"a frame of unknown kind {kind}") from None
        if length > MAX_PAYLOAD or size > MAX_MESSAGE or (length and known not in _WITH_PAYLOAD):
            raise ProtocolError(f"a frame of kind {known.name} with {length} bytes of a message of {size}: too many")
        if known is FrameType.EAGER and not (length == size <= EAGER_LIMIT):
            raise ProtocolError(f"an EAGER frame with {length} bytes of a message of {size}")
        if known is FrameType.DATA and not (length > 0 and offset + length <= size):
            raise ProtocolError(f"a DATA frame with bytes {offset} to {offset + length} of a message of {size}")
        return Frame(known, *fields)
