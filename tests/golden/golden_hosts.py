"""What the native engine sends from host to host: its messages and its collectives, on connections of their own."""

from __future__ import annotations

import contextlib
import hmac
import re
import socket
import struct
import threading
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from golden_collectives import machine_words, said_with
from golden_support import SECRET, TIMEOUT, Recording, SocketTap, Step, in_short, run_ranks, split

import ferrodist as fd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from golden_support import Fields

_CALLS = 1  # the channel of their tags
_ADDRESS = re.compile(r"127\.0\.0\.1:\d+")


class _Relay:
    """Stands between two ends of a connection, and keeps what goes through.

    Args:
        near: The end of this side, which is given to somebody else then.
        end: What that one gets in its place.
    """

    def __init__(self, near: socket.socket) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            inner = socket.create_connection(listener.getsockname())
            outer, _ = listener.accept()
        self.end = outer
        self.outgoing, self.incoming = bytearray(), bytearray()
        for one in (inner, outer):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._threads = [
            threading.Thread(target=self._pump, args=(inner, near, self.outgoing), daemon=True),
            threading.Thread(target=self._pump, args=(near, inner, self.incoming), daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._sockets = [inner, near]

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                kept.extend(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Wait for both ends."""
        for thread in self._threads:
            thread.join(TIMEOUT)
        for sock in self._sockets:
            sock.close()


@contextlib.contextmanager
def _relayed(tap: SocketTap, relays: dict[str, _Relay], rank: int) -> Iterator[None]:
    """Have a relay in each connection that a rank has made and gives to the engine."""
    detach = socket.socket.detach

    def detach_relay(self: socket.socket) -> int:
        if type(self) is socket.socket or threading.current_thread().name != f"golden rank {rank}":
            return detach(self)
        ends = self.getsockname()[:2], self.getpeername()[:2]
        purpose = next(each.hello["purpose"] for each in tap.conversations(SECRET) if each.ends == ends)
        near = socket.socket(fileno=detach(self))
        near.setblocking(True)
        relays[purpose] = _Relay(near)
        return detach(relays[purpose].end)

    with mock.patch.object(socket.socket, "detach", detach_relay):
        yield


def _messages(group: Any) -> None:
    """One after the other, each answered before the next."""
    other = 1 - group.rank
    for size in (0, 5, 70_000, 300_000):
        for sender in range(2):
            if group.rank == sender:
                group.send(bytes(range(256)) * (size // 256) + bytes(size % 256), other, tag=7)
            else:
                group.recv(bytearray(size), other, tag=7)
    if group.rank == 0:
        fd.send(torch.arange(3.0), 1, tag=2, group=group)
    else:
        fd.recv(None, None, 0, tag=2, group=group)


def _collectives(group: Any) -> None:
    fd.barrier(group)
    fd.allreduce(torch.arange(3.0), group=group)
    fd.allreduce(torch.arange(3), fd.ReduceOp.MAX, group=group)
    fd.broadcast(torch.arange(5, dtype=torch.bfloat16), 1, group=group)
    fd.reduce(torch.arange(2.0), 1, group=group)
    fd.all_gather(torch.arange(2, dtype=torch.uint8), group=group)
    fd.gather(torch.arange(2.0), 0, group=group)
    fd.scatter(torch.arange(4.0) if group.rank == 0 else None, 0, group=group)
    fd.reduce_scatter(torch.arange(4.0), group=group)
    fd.all_to_all(torch.arange(4.0), group=group)
    fd.all_gather_uneven(torch.arange(group.rank + 1.0), group=group)


def _agreement_key(tap: SocketTap) -> bytes:
    """Of what the ranks have said of their hosts, with the secret."""
    (group,) = [each for each in tap.conversations(SECRET) if each.hello["purpose"] == "group"]
    frame = next(each for each in group.group_frames(of_client=False) if "payload" in each)
    table = bytes.fromhex(frame["payload"])
    said = b"".join(said_with(table[at : at + 192]) for at in range(0, len(table), 192))
    return hmac.digest(SECRET, b"agreement\0" + said, "sha256")


def _frames(data: bytes, key: bytes) -> list[Fields]:
    found: list[Fields] = []
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at + 4)
        parts = ("kind", 4), ("length", 4), ("message", 8), ("group", 8), ("tag", 8), ("size", 8), ("offset", 8)
        payload = data[at + 48 : at + 48 + length]
        is_call = data[at + 31] == _CALLS
        said = machine_words(payload, key) if is_call else {"payload": in_short(payload)}
        found.append({**split(data[at : at + 48], *parts), **said})
        at += 48 + length
    return found


def _parts(data: bytes) -> list[Fields]:
    found: list[Fields] = []
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at + 24)
        parts = ("magic", 4), ("kind", 4), ("number", 8), ("offset", 8), ("size", 8)
        found.append({**split(data[at : at + 32], *parts), "payload": in_short(data[at + 32 : at + 32 + size])})
        at += 32 + size
    return found


def record() -> Recording:
    """Two ranks that share no memory; nothing where there is no engine."""
    if not fd.is_native_available():
        return {}
    tap = SocketTap()
    relays: dict[str, _Relay] = {}
    listener = socket.create_server(("127.0.0.1", 0))
    address = "{}:{}".format(*listener.getsockname()[:2])
    groups: dict[int, Any] = {}

    def member(rank: int) -> Any:
        groups[rank] = fd.NativeBackend(
            *(rank, 2, address),
            secret=SECRET,
            timeout=TIMEOUT,
            listener=listener if rank == 0 else None,
            shares_memory=False,
        )
        return groups[rank]

    with tap.attached(), _relayed(tap, relays, 1):
        steps = [Step("messages", _messages), Step("collectives", _collectives)]
        run_ranks([lambda rank=rank: member(rank) for rank in range(2)], steps)
        for rank in range(2):
            groups[rank].close(0.2)
    for relay in relays.values():
        relay.close()
    key = _agreement_key(tap)
    hellos = sorted(_ADDRESS.sub("HOST:PORT", repr(each.hello)) for each in tap.conversations(SECRET))
    return {
        "connections between hosts": {"hellos": [{"hello": hello} for hello in hellos]},
        "messages between hosts": {
            "from rank 1": _frames(bytes(relays["messages"].outgoing), key),
            "from rank 0": _frames(bytes(relays["messages"].incoming), key),
        },
        "collectives between hosts": {
            "from rank 1": _parts(bytes(relays["collectives"].outgoing)),
            "from rank 0": _parts(bytes(relays["collectives"].incoming)),
        },
    }
