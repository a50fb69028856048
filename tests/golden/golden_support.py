"""What the recordings of the golden test share: fixed random numbers, taps on what is sent, and bytes in words.

Nothing here is known of how ferrodist's source is laid out. The taps sit at what is public or the system's: a group's
``isend`` and ``try_send``, and Python's sockets.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib.metadata
import random
import secrets
import socket
import struct
import threading
import time
import uuid
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec
import numpy as np
import torch

import ferrodist as fd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Fields = dict[str, str]
"""A message in parts, each with its name, in their order; the bytes as hexadecimal digits, or in short."""

Recording = dict[str, dict[str, list[Fields]]]
"""The messages of each stream of each scenario."""

_LONGEST_BYTES = 1024
_RANK_THREAD, _ANOTHER = "golden rank ", "another thread"
SECRET = b"a secret of thirty-two bytes...."
TIMEOUT = 30.0
NOW_NS = 1_700_000_000_000_000_000


def in_short(data: bytes | bytearray | memoryview) -> str:
    """Bytes as text that can be compared: all of them, or their number, first ones and hash."""
    data = bytes(data)
    if len(data) <= _LONGEST_BYTES:
        return data.hex()
    return f"{len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()}, first {data[:64].hex()}"


def split(data: bytes, *parts: tuple[str, int], rest: str = "payload") -> Fields:
    """Bytes in parts of given names and sizes; what follows them is called ``rest``."""
    fields, at = {}, 0
    for name, size in parts:
        fields[name] = in_short(data[at : at + size])
        at += size
    if at < len(data):
        fields[rest] = in_short(data[at:])
    return fields


def error_words(payload: bytes) -> Fields:
    """An error on its way: its class and ranks, for its text may change."""
    name, text, ranks = msgspec.msgpack.decode(payload)
    return {"class": name, "text": type(text).__name__, "ranks": repr(ranks)}


# Randomness.


def _who() -> str:
    name = threading.current_thread().name
    return name if name.startswith(_RANK_THREAD) else _ANOTHER


def _bytes_of(what: str, size: int) -> bytes:
    return hashlib.shake_256(f"{_who()}: {what}".encode()).digest(size)


@contextlib.contextmanager
def fixed_randomness() -> Iterator[None]:
    """Have random numbers, the clock of checkpoints and the version be the same in each run; ranks have their own."""
    made: Counter[str] = Counter()
    lock = threading.Lock()
    version = importlib.metadata.version

    def make_uuid() -> uuid.UUID:
        with lock:
            if _who() != _ANOTHER:  # a library may make some there
                made[_who()] += 1
            return uuid.UUID(bytes=_bytes_of(f"uuid {made[_who()]}", 16), version=4)

    with contextlib.ExitStack() as stack:
        for module, name, function in (
            (secrets, "token_bytes", lambda size=32: _bytes_of("bytes", size)),
            (secrets, "token_hex", lambda size=32: _bytes_of("bytes", size).hex()),
            (secrets, "randbits", lambda bits: int.from_bytes(_bytes_of("bits", 64), "little") % (1 << bits)),
            (uuid, "uuid4", make_uuid),
            (time, "time_ns", lambda: NOW_NS),
            (importlib.metadata, "version", lambda of: "0.0" if of == "ferrodist" else version(of)),
        ):
            stack.enter_context(mock.patch.object(module, name, function))
        yield


def seed_everything() -> None:
    """Seed what checkpoints of random state have."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


# Ranks as threads.


class Step:
    """A part of a program, before and after which all ranks wait for each other.

    Args:
        name: Of it.
        run: Called with what each rank has, in a thread of the rank.
    """

    def __init__(self, name: str, run: Callable[[Any], Any]) -> None:
        self.name = name
        self.run = run


def run_ranks(
    members: Sequence[Callable[[], Any]], steps: Sequence[Step], begin: Callable[[str], None] = lambda _: None
) -> None:
    """Run steps on each rank, one after the other.

    Args:
        members: For each rank what makes what its steps are called with.
        steps: Run in turn; each begins on all ranks when the one before has ended on all.
        begin: Told the name of each step before any rank begins it.
    """
    place = iter(steps)
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(members), action=lambda: begin(step.name if (step := next(place, None)) else ""))

    def run(make: Callable[[], Any]) -> None:
        try:
            given = make()
            for step in steps:
                barrier.wait(TIMEOUT)
                step.run(given)
            barrier.wait(TIMEOUT)
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [
        threading.Thread(target=run, args=(make,), name=f"{_RANK_THREAD}{rank}", daemon=True)
        for rank, make in enumerate(members)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT)
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError("a rank has not ended")


# What goes from rank to rank in memory.


class Tape:
    """What the ranks of a group have sent each other.

    Attributes:
        step: In which it is sent.
        words: Makes fields of a message, of its tag and bytes.
    """

    def __init__(self) -> None:
        self.step = ""
        self.lock = threading.Lock()
        self.messages: dict[str, dict[tuple[int, int, int], list[bytes]]] = defaultdict(lambda: defaultdict(list))

    def begin(self, step: str) -> None:
        """What is sent from now on belongs to a step."""
        with self.lock:
            self.step = step

    def note(self, source: int, destination: int, tag: int, data: Any) -> Callable[[], None]:
        """Keep a message; gives what forgets it again."""
        message = bytes(memoryview(data).cast("B"))
        with self.lock:
            stream = self.messages[self.step][source, destination, tag]
            stream.append(message)

        def forget() -> None:
            with self.lock:
                stream.reverse()
                stream.remove(message)
                stream.reverse()

        return forget

    def num_messages(self, step: str | None = None) -> int:
        """How many there are, of one step or of all."""
        with self.lock:
            steps = self.messages.values() if step is None else [self.messages[step]]
            return sum(len(found) for streams in steps for found in streams.values())

    def recording(self, words: Callable[[int, bytes], Fields]) -> Recording:
        """All of it, in words, by step and by source, destination and tag; of each of these in order."""
        return {
            step: {
                f"{source}->{destination} group {tag >> 64:016x} tag {tag & (1 << 64) - 1:016x}": [
                    words(tag, data) for data in found
                ]
                for (source, destination, tag), found in sorted(streams.items())
                if found
            }
            for step, streams in self.messages.items()
        }


def taped_group(world_size: int, tape: Tape) -> list[fd.SimulatedBackend]:
    """A group whose ranks are threads, and whose messages are on a tape."""

    class Taped(fd.SimulatedBackend):
        def isend(self, data: Any, dst: int, *, tag: int = 0) -> Any:
            tape.note(self.rank, dst, tag, data)
            return super().isend(data, dst, tag=tag)

        def try_send(self, data: bytes, dst: int, *, tag: int = 0) -> bool:
            forget = tape.note(self.rank, dst, tag, data)  # before it can have an answer
            is_sent = super().try_send(data, dst, tag=tag)
            if not is_sent:
                forget()
            return is_sent

    return Taped.create_group(world_size, timeout=TIMEOUT)


# What goes through sockets.


class SocketTap:
    """What this process has written to sockets, for each direction of each connection.

    Attributes:
        streams: By the addresses of both ends.
        unix_names: The names of sockets of the host that were bound, or connected to.
        sockets: Who wrote each stream.
    """

    def __init__(self) -> None:
        self.streams: dict[tuple[Any, Any], bytearray] = {}
        self.sockets: dict[tuple[Any, Any], socket.socket] = {}
        self.unix_names: set[bytes] = set()
        self.lock = threading.Lock()

    def _note(self, sock: socket.socket, data: bytes) -> None:
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            key: tuple[Any, Any] = ("unix", _who())
        else:
            try:
                key = sock.getsockname()[:2], sock.getpeername()[:2]
            except OSError:
                return
        with self.lock:
            self.streams.setdefault(key, bytearray()).extend(data)
            self.sockets[key] = sock

    @contextlib.contextmanager
    def attached(self) -> Iterator[SocketTap]:
        """Listen to what is written inside the block."""
        send, sendall, sendmsg = socket.socket.send, socket.socket.sendall, socket.socket.sendmsg
        bind, connect_ex = socket.socket.bind, socket.socket.connect_ex
        tap = self

        def tapped_send(self: socket.socket, data: Any, *rest: Any) -> int:
            count = send(self, data, *rest)
            tap._note(self, bytes(memoryview(data).cast("B")[:count]))
            return count

        def tapped_sendall(self: socket.socket, data: Any, *rest: Any) -> None:
            tap._note(self, bytes(memoryview(data).cast("B")))  # before, or the answer could be noted first
            sendall(self, data, *rest)

        def tapped_sendmsg(self: socket.socket, buffers: Any, *rest: Any) -> int:
            count = sendmsg(self, buffers, *rest)
            tap._note(self, b"".join(bytes(memoryview(each).cast("B")) for each in buffers)[:count])
            return count

        def tapped_bind(self: socket.socket, address: Any) -> None:
            if self.family == socket.AF_UNIX:
                tap.unix_names.add(bytes(address))
            bind(self, address)

        def tapped_connect_ex(self: socket.socket, address: Any) -> int:
            if self.family == socket.AF_UNIX:
                tap.unix_names.add(bytes(address))
            return connect_ex(self, address)

        with contextlib.ExitStack() as stack:
            for name, function in (
                ("send", tapped_send),
                ("sendall", tapped_sendall),
                ("sendmsg", tapped_sendmsg),
                ("bind", tapped_bind),
                ("connect_ex", tapped_connect_ex),
            ):
                stack.enter_context(mock.patch.object(socket.socket, name, function))
            yield self

    def conversations(self, secret: bytes) -> list[Conversation]:
        """The connections that begin with a handshake of ferrodist, in the order of what their clients say."""
        with self.lock:
            streams = {key: bytes(data) for key, data in self.streams.items()}
        found = [
            Conversation(data, streams.get((there, here), b""), secret, (here, there))
            for (here, there), data in streams.items()
            if data.startswith(_MAGIC + b"C")
        ]
        return sorted(found, key=lambda each: each.label)


_ABORT = 6


def _payload_words(header: bytes, payload: bytes) -> Fields:
    return error_words(payload) if header[3] == _ABORT else {"payload": in_short(payload)}


def _verdict_words(payload: bytes) -> Fields:
    (error,) = msgspec.msgpack.decode(payload)
    return {"payload": payload.hex()} if error is None else error_words(msgspec.msgpack.encode(error))


_MAGIC = b"ferrodist"
_INTRO_BYTES = len(_MAGIC) + 3
_PROOF_BYTES = _NONCE_BYTES = 32
_TAG_BYTES = 16
_VERSION = 3


class Conversation:
    """A connection with a handshake, read by what docs say of it, and by nothing of ferrodist.

    Args:
        client: What the client wrote.
        server: What the server wrote.
        secret: The job secret.
        ends: The addresses of client and server.

    Attributes:
        handshake: Its messages.
        hello: What the client says of itself.
        label: The connection in words.
    """

    def __init__(self, client: bytes, server: bytes, secret: bytes, ends: tuple[Any, Any]) -> None:
        self.ends = ends
        at = _INTRO_BYTES + _NONCE_BYTES
        nonces = client[_INTRO_BYTES:at] + server[_INTRO_BYTES:at]

        def proof(role: bytes) -> bytes:
            return hmac.digest(secret, b"%s %d %s\0" % (_MAGIC, _VERSION, role) + nonces, "sha256")

        self._key = proof(b"session")
        (size,) = struct.unpack_from("!I", client, at + _PROOF_BYTES)
        begin = at + _PROOF_BYTES + 4
        sealed = client[begin : begin + size]
        self.hello: dict[str, Any] = msgspec.msgpack.decode(sealed[_PROOF_BYTES:])
        self.label = f"rank {self.hello['rank']} for {self.hello['purpose']} {self.hello['group']}"
        seal_of_hello = hmac.digest(self._key, b"hello\0" + sealed[_PROOF_BYTES:], "sha256")
        hello_fields = {
            "seal": self._checked(seal_of_hello, sealed[:_PROOF_BYTES]),
            "payload": "has an address" if self.hello["address"] else sealed[_PROOF_BYTES:].hex(),
            "fields in order": repr(list(self.hello)),
            **{f"hello {key}": repr(value) for key, value in self.hello.items()},
        }
        rest = begin + size
        after = at + 1 + _PROOF_BYTES
        (verdict_size,) = struct.unpack_from("!I", server, after)
        verdict = server[after + 4 : after + 4 + verdict_size]
        self.handshake: list[Fields] = [
            {
                "message": "client's intro and proof",
                **split(client[:_INTRO_BYTES], ("magic", len(_MAGIC)), ("role", 1), ("version", 2)),
                "nonce": client[_INTRO_BYTES:at].hex(),
                "proof": self._checked(proof(b"client"), client[at : at + _PROOF_BYTES]),
            },
            {
                "message": "server's intro and proof",
                **split(server[:_INTRO_BYTES], ("magic", len(_MAGIC)), ("role", 1), ("version", 2)),
                "nonce": server[_INTRO_BYTES:at].hex(),
                "accepted": server[at : at + 1].hex(),
                "proof": self._checked(proof(b"server"), server[at + 1 : at + 1 + _PROOF_BYTES]),
            },
            {"message": "hello", **hello_fields},
            {
                "message": "verdict",
                "seal": self._checked(hmac.digest(self._key, b"verdict\0" + verdict[32:], "sha256"), verdict[:32]),
                **_verdict_words(verdict[32:]),
            },
        ]
        self.from_client = client[rest:]
        self.from_server = server[after + 4 + verdict_size :]

    @staticmethod
    def _checked(expected: bytes, found: bytes) -> str:
        return "right" if hmac.compare_digest(expected, found) else f"wrong: {found.hex()}"

    def _tag_maker(self, role: bytes) -> Callable[[int, bytes], bytes]:
        key = hmac.digest(self._key, b"from " + role, "sha256")

        def tag(number: int, covered: bytes) -> bytes:
            return hashlib.blake2b(struct.pack("!Q", number) + covered, key=key, digest_size=_TAG_BYTES).digest()

        return tag

    def _direction(self, *, of_client: bool) -> tuple[bytes, Callable[[int, bytes], bytes]]:
        if of_client:
            return self.from_client, self._tag_maker(b"client")
        return self.from_server, self._tag_maker(b"server")

    def group_frames(self, *, of_client: bool) -> list[Fields]:
        """One direction of a group's connection, as frames."""
        data, tag = self._direction(of_client=of_client)
        frames: list[Fields] = []
        at = 0
        while at < len(data):
            header, shown = data[at : at + 60], data[at + 60 : at + 76]
            (length,) = struct.unpack_from("<I", header, 8)
            payload = data[at + 76 : at + 76 + length]
            covered = {
                tag(len(frames), header): "of the header",
                tag(len(frames), header + payload): "of header and payload",
            }
            frames.append(
                {
                    **split(
                        header,
                        *(("magic", 2), ("version", 1), ("kind", 1), ("padding", 4), ("length", 4), ("source", 4)),
                        *(("destination", 4), ("message", 8), ("group", 8), ("tag", 8), ("size", 8), ("offset", 8)),
                    ),
                    **({"length": "any"} if header[3] == _ABORT else {}),
                    "seal": covered.get(shown, f"wrong: {shown.hex()}"),
                    **(_payload_words(header, payload) if length else {}),
                }
            )
            at += 76 + length
        return frames

    def store_frames(self, *, of_client: bool) -> list[tuple[str, bytes]]:
        """One direction of a store's connection: whether the tag is right, and the payload, of each frame."""
        data, tag = self._direction(of_client=of_client)
        frames: list[tuple[str, bytes]] = []
        at = 0
        while at < len(data):
            length_bytes, shown = data[at : at + 4], data[at + 4 : at + 20]
            payload = data[at + 20 : at + 20 + int.from_bytes(length_bytes, "big")]
            frames.append((self._checked(tag(len(frames), length_bytes + payload), shown), payload))
            at += 20 + len(payload)
        return frames
