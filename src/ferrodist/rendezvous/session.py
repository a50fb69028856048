"""A connection whose peer has proved itself, and the tags by which each side knows what the other one wrote.

[Note: session keys]
The handshake gives both sides a key of this one connection, made of the job secret and the nonces of both. Each
direction has a key of its own, so nothing can be sent back to its writer; a tag covers the number of its frame, so
nothing can be repeated, left out or put in another order. Who stands between the two, such as a proxy, passes all on or
ends the connection: what it changes is an error.
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
_NUMBER = struct.Struct("!Q")


class Seal:
    """The tags of one direction of a connection, frame by frame.

    Args:
        key: Of this direction, at most 64 bytes.
    """

    __slots__ = ("_keyed", "_number")

    def __init__(self, key: bytes) -> None:
        self._keyed = hashlib.blake2b(key=key, digest_size=TAG_BYTES)
        self._number = 0

    def tag(self, *parts: Buffer) -> bytes:
        """The tag of the next frame, whose bytes these are; the same until `advance`."""
        state = self._keyed.copy()
        state.update(_NUMBER.pack(self._number))
        for part in parts:
            state.update(part)
        return state.digest()

    def advance(self) -> None:
        """Go on to the frame after this."""
        self._number += 1

    def check(self, tag: Buffer, *parts: Buffer) -> None:
        """Compare the next frame that has come with its tag, and go on to the one after it.

        Raises:
            AuthenticationError: They don't belong together.
        """
        if not hmac.compare_digest(tag, self.tag(*parts)):
            raise AuthenticationError("a frame was altered, repeated, left out or put in another order on its way")
        self.advance()


class Session:
    """Both directions of a connection; see [Note: session keys].

    Args:
        key: What the handshake has given both sides.
        is_server: Which of them this is.
    """

    __slots__ = ("incoming", "outgoing")

    def __init__(self, key: bytes, *, is_server: bool) -> None:
        seals = [Seal(hmac.digest(key, b"from " + role, "sha256")) for role in (b"client", b"server")]
        self.incoming, self.outgoing = seals if is_server else reversed(seals)


class Connection(socket.socket):
    """A TCP connection that is to be, or has been, authenticated.

    Attributes:
        session: Its keys, from the handshake on.
    """

    session: Session

    @classmethod
    def take_over(cls, sock: socket.socket) -> Connection:
        """Make one of a connected socket, which is detached."""
        return cls(sock.family, sock.type, sock.proto, fileno=sock.detach())

    def send_frame(self, payload: bytes, deadline: Deadline | None) -> None:
        """Send one frame with its tag; TimeoutError or OSError where that fails."""
        length = _LENGTH.pack(len(payload))
        tag = self.session.outgoing.tag(length, payload)
        self.session.outgoing.advance()
        write(self, length + tag + payload, deadline)

    def receive_frame(self, limit: int, deadline: Deadline | None) -> bytes:
        """Read one frame; one that announces more than ``limit`` bytes is refused before memory is taken.

        Raises:
            AuthenticationError: It is not the frame that the other side has sent next.
            ProtocolError: It is too large.
            ConnectionError, TimeoutError: As `read_exactly`.
        """
        length = read_exactly(self, _LENGTH.size, deadline)
        (size,) = _LENGTH.unpack(length)
        if size > limit:
            raise ProtocolError(f"a frame of {size} bytes was announced, the limit is {limit}")
        data = read_exactly(self, TAG_BYTES + size, deadline)
        tag, payload = data[:TAG_BYTES], data[TAG_BYTES:]
        self.session.incoming.check(tag, length, payload)
        return payload
