"""What a TCP group, a native group and a store write to their connections, and how MPI's frames look."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import golden_names as names
from golden_collectives import machine_words
from golden_support import SECRET, TIMEOUT, Recording, SocketTap, Step, run_ranks, split

import ferrodist as fd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from golden_support import Fields

_ANSWER = "0b"
_GOODBYE = "07", "00" * 8


def _until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + TIMEOUT
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError("it does not come to that")
        time.sleep(0.001)


def _address(listener: socket.socket) -> str:
    return "{}:{}".format(*listener.getsockname()[:2])


# A TCP group.


class _Cable:
    """The sockets that belong to a group's ranks."""

    def __init__(self, tap: SocketTap) -> None:
        self.tap = tap

    def num_answers(self, client: int) -> int:
        """How many answers a rank was sent to its questions whether others are there."""
        found = [each for each in self.tap.conversations(SECRET) if each.hello["rank"] == client]
        return [frame["kind"] for frame in found[0].group_frames(of_client=False)].count(_ANSWER)

    def cut(self, client: int) -> None:
        """End the connection of a rank, as the end of its process would."""
        for conversation in self.tap.conversations(SECRET):
            if conversation.hello["rank"] == client:
                self.tap.sockets[conversation.ends].shutdown(socket.SHUT_RDWR)


def _record_tcp() -> Recording:
    tap = SocketTap()
    cable = _Cable(tap)
    listener = socket.create_server(("127.0.0.1", 0))
    address = _address(listener)
    kept: dict[str, Any] = {}

    def member(rank: int) -> Any:
        found = fd.TcpBackend(
            *(rank, 3, address),
            secret=SECRET,
            timeout=TIMEOUT,
            name="golden group",
            job="golden job",
            listener=listener if rank == 0 else None,
        )
        kept[f"group {rank}"] = found
        return found

    def only(rank: int, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda group: run(group) if group.rank == rank else None

    def post_offer(group: Any) -> None:
        kept["offer"] = group.isend(bytes(range(256)) * 2500, 0, tag=3)  # two frames of data

    def fail_sub(group: Any) -> None:
        if group.rank:
            kept[f"sub {group.rank}"] = fd.new_group([1, 2], group=group)

    def time_out(group: Any) -> None:
        with contextlib.suppress(fd.DistributedTimeoutError):
            group.recv(bytearray(1), 2, timeout=0.05)
        _until(lambda: cable.num_answers(group.rank) == 2)

    steps = [
        Step("small to rank 0", only(1, lambda group: group.send(b"hello", 0, tag=7))),
        Step("it comes", only(0, lambda group: group.recv(bytearray(5), 1, tag=7))),
        Step("small from rank 0", only(0, lambda group: group.send(b"", 1, tag=(1 << 56) - 1))),
        Step("passed on", only(2, lambda group: group.send(bytes(20_000), 1))),
        Step("it comes", only(1, lambda group: group.recv(bytearray(20_000), 2))),
        Step("an offer", only(1, post_offer)),
        Step("it is taken", only(0, lambda group: group.recv(bytearray(640_000), 1, tag=3))),
        Step("an offer", only(1, post_offer)),
        Step("it is taken back", only(1, lambda _: kept["offer"].cancel())),
        Step("an agreement", lambda group: group.barrier()),
        Step("a sub-group", fail_sub),
        Step("its barrier", lambda group: kept[f"sub {group.rank}"].barrier() if group.rank else None),
        Step("its end by one", only(2, lambda _: kept["sub 2"].abort("a reason"))),
        Step("is known", only(1, lambda _: _until(lambda: kept["sub 1"].failure))),
        Step("another sub-group", fail_sub),
        Step("is left", only(1, lambda _: kept["sub 1"].close())),
        Step("a question", only(1, time_out)),
        Step("a death", only(2, lambda _: cable.cut(2))),
        Step("is known", lambda group: _until(lambda: group.failure)),
        Step("a rank leaves", only(1, lambda group: group.close(0.2))),
    ]
    with tap.attached():
        run_ranks([lambda rank=rank: member(rank) for rank in range(3)], steps)
        for rank in range(3):
            kept[f"group {rank}"].close(0.1)
    found: Recording = {}
    for conversation in tap.conversations(SECRET):
        found[f"tcp group, {conversation.label}"] = {
            "handshake": conversation.handshake,
            "from the client": conversation.group_frames(of_client=True),
            # But for goodbyes of rank 0 to ranks that have gone, which may be written or not.
            "from the server": [
                frame
                for frame in conversation.group_frames(of_client=False)
                if (frame["kind"], frame["group"]) != _GOODBYE
            ],
        }
    return found


# Refusals.


def _record_refusal() -> Recording:
    """A rank of another job is refused, with an error in its verdict."""
    tap = SocketTap()
    listener = socket.create_server(("127.0.0.1", 0))
    address = _address(listener)

    def member(rank: int) -> Any:
        try:
            return fd.TcpBackend(
                *(rank, 2, address),
                secret=SECRET,
                timeout=TIMEOUT,
                connect_timeout=0.3,
                job=f"job {rank}",
                listener=listener if rank == 0 else None,
            )
        except fd.RendezvousError:
            return None

    with tap.attached():
        run_ranks([lambda rank=rank: member(rank) for rank in range(2)], [])
    (refused,) = tap.conversations(SECRET)
    return {"a rank that is refused": {"handshake": refused.handshake}}


# A store.


def _record_store() -> Recording:
    tap = SocketTap()
    with tap.attached():
        server = names.store_server("127.0.0.1", 0, secret=SECRET, job="golden job", world_size=2)
        store = names.store_client(server.address, secret=SECRET, job="golden job", rank=1, world_size=2, timeout=5.0)
        store.set("key", b"value")
        store.get("key")
        store.wait(["key"], timeout=2.0)
        store.add("count", -3)
        store.compare_set("key", b"value", b"other")
        store.compare_set("key", b"value", b"never")
        store.delete("key")
        store.delete("key")
        with contextlib.suppress(fd.DistributedTimeoutError):
            store.get("missing", timeout=0.0)
        store.close()
        server.close()
    (conversation,) = tap.conversations(SECRET)

    def in_words(frames: list[tuple[str, bytes]]) -> list[Fields]:
        return [
            {"tag": tag, "payload": payload.replace(server.address.encode(), b"HOST:PORT").hex()}
            for tag, payload in frames
        ]

    return {
        "a store": {
            "handshake": conversation.handshake,
            "requests": in_words(conversation.store_frames(of_client=True)),
            "replies": in_words(conversation.store_frames(of_client=False)[:-1]),  # the last one says how long it took
        }
    }


# A native group.


@contextlib.contextmanager
def _alone_on_this_machine() -> Iterator[None]:
    """Its sockets have names that are the same in each recording."""
    with Path(tempfile.gettempdir(), f"ferrodist-golden-{os.geteuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


_EAGER_KIND, _CALL_CHANNEL = "01", "01"


def _native_frame(frame: Fields) -> Fields:
    if frame["kind"] != _EAGER_KIND or not frame["tag"].endswith(_CALL_CHANNEL):
        return frame
    payload = bytes.fromhex(frame["payload"])
    return {**{name: text for name, text in frame.items() if name != "payload"}, **machine_words(payload)}


def _record_native() -> Recording:
    """What two ranks of a native group tell each other over TCP, and on which sockets they meet."""
    tap = SocketTap()
    listener = socket.create_server(("127.0.0.1", 0))
    address = _address(listener)
    groups: dict[int, Any] = {}

    def member(rank: int) -> Any:
        groups[rank] = fd.NativeBackend(
            *(rank, 2, address), secret=SECRET, timeout=TIMEOUT, listener=listener if rank == 0 else None
        )
        return groups[rank]

    with _alone_on_this_machine(), tap.attached():
        run_ranks(
            [lambda rank=rank: member(rank) for rank in range(2)],
            [
                Step("a collective", lambda group: group.barrier()),
                Step("symmetric memory", lambda group: fd.empty_symmetric([4], group=group)),
            ],
        )
        for rank in range(2):
            groups[rank].close(0.2)
    (conversation,) = tap.conversations(SECRET)
    streams: dict[str, list[Fields]] = {}
    for side, of_client in (("client", True), ("server", False)):
        streams[f"from the {side}"] = list(map(_native_frame, conversation.group_frames(of_client=of_client)))
    own = [name for name in sorted(tap.unix_names) if b"ferrodist" in name]
    streams["sockets of the host"] = [{"name": name.hex()} for name in own]
    for (kind, who), data in sorted(tap.streams.items(), key=str):
        if kind == "unix":
            size = 20 if len(data) % 20 == 0 else len(data)  # the nonce and the rank; or the answers
            parts = [bytes(data[at : at + size]) for at in range(0, len(data), size)]
            streams[f"{who} there"] = [split(part, ("nonce", 16), ("rank", 4)) for part in parts]
    return {"a native group": streams}


# MPI.


def _record_mpi() -> Recording:
    return {
        "frames of MPI groups": {
            kind: [split(data, ("magic", 2), ("kind", 1), ("padding", 5), *((each, 8) for each in _MPI_FIELDS))]
            for kind, data in names.mpi_frames(
                message=0x1112131415161718, group=0x21, tag=0x31, size_bytes=0x41, offset=0x51
            )
        }
    }


_MPI_FIELDS = ("message", "group", "tag", "size", "offset")


def record() -> Recording:
    """All of these."""
    native = _record_native() if fd.is_native_available() else {}
    return {**_record_tcp(), **_record_refusal(), **_record_store(), **native, **_record_mpi()}
