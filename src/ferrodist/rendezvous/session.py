"""Authenticated connections: each frame carries a tag under the connection's session keys.

[Note: session keys]
The handshake gives both sides a key of this one connection, made of the job secret and both nonces. Each direction has
a key of its own, so that no frame can be reflected; a tag covers the frame's sequence number, so that none can be
repeated, dropped or reordered. A proxy in between can forward everything or end the connection: any change is an error.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
from typing import TYPE_CHECKING

from ferrodist.errors import AuthenticationError, ProtocolError
from ferrodist.rendezvous.sockets import read_exactly, write

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ferrodist.deadline import Deadline

TAG_BYTES = 16

_LENGTH = struct.Struct("!I")
_SEQUENCE_NUMBER = struct.Struct("!Q")


class FrameAuthenticator:
    """Computes the tags of one direction of a connection, frame by frame."""

    __slots__ = ("_mac", "_sequence_number")

    def __init__(self, key: bytes) -> None:
        self._mac = hashlib.blake2b(key=key, digest_size=TAG_BYTES)
        self._sequence_number = 0

    def tag(self, *parts: Buffer) -> bytes:
        """Return the tag of the next frame with these bytes; the same until `advance`."""
        state = self._mac.copy()
        state.update(_SEQUENCE_NUMBER.pack(self._sequence_number))
        for part in parts:
            state.update(part)
        return state.digest()

    @property
    def sequence_number(self) -> int:
        """The number of the next frame."""
        return self._sequence_number

    def advance(self, sequence_number: int | None = None) -> None:
        """Advance past the next frame, or past the one of a number, which may be done already."""
        self._sequence_number = (self._sequence_number if sequence_number is None else sequence_number) + 1

    def check(self, tag: Buffer, *parts: Buffer) -> None:
        """Check the tag of the next received frame, and advance."""
        if not hmac.compare_digest(tag, self.tag(*parts)):
            raise AuthenticationError("a frame was altered, repeated, left out or put in another order on its way")
        self.advance()


class Session:
    """Both directions of a connection; see [Note: session keys]."""

    __slots__ = ("incoming", "outgoing")

    def __init__(self, key: bytes, *, is_server: bool) -> None:
        authenticators = [
            FrameAuthenticator(hmac.digest(key, b"from " + role, "sha256")) for role in (b"client", b"server")
        ]
        self.incoming, self.outgoing = authenticators if is_server else reversed(authenticators)


class Connection(socket.socket):
    """A TCP connection; it has a session once it is authenticated."""

    session: Session

    @classmethod
    def take_over(cls, sock: socket.socket) -> Connection:
        """Take over a connected socket, which is detached."""
        return cls(sock.family, sock.type, sock.proto, fileno=sock.detach())

    def send_frame(self, payload: bytes, deadline: Deadline | None) -> None:
        """Send one frame with its tag; TimeoutError or OSError on failure."""
        length = _LENGTH.pack(len(payload))
        tag = self.session.outgoing.tag(length, payload)
        self.session.outgoing.advance()
        write(self, length + tag + payload, deadline)

    def receive_frame(self, limit: int, deadline: Deadline | None) -> bytes:
        """Read one frame; one that announces more than ``limit`` bytes is refused before memory is allocated."""
        length = read_exactly(self, _LENGTH.size, deadline)
        (size,) = _LENGTH.unpack(length)
        if size > limit:
            raise ProtocolError(f"a frame of {size} bytes was announced, the limit is {limit}")
        data = read_exactly(self, TAG_BYTES + size, deadline)
        tag, payload = data[:TAG_BYTES], data[TAG_BYTES:]
        self.session.incoming.check(tag, length, payload)
        return payload
