"""Promise 6: a rank that knows the secret and sends what no rank would ends its group, with its number, and no more."""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
import tracemalloc
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

import ferrodist as fd
from ferrodist.backends import mailbox, mailbox_backend
from ferrodist.backends.frame_type import FrameType
from ferrodist.backends.subgroup import SubBackend
from ferrodist.backends.tags import Channel, channel_tag
from ferrodist.backends.tcp import TcpBackend
from ferrodist.backends.tcp.wire import HEADER_SIZE, MAX_MESSAGE, MAX_PAYLOAD, WIRE_VERSION, Frame
from ferrodist.deadline import Deadline
from ferrodist.rendezvous.auth import Hello, connect, greet
from ferrodist.rendezvous.session import TAG_BYTES, Connection
from ferrodist.testing import check_leaks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SECRET = secrets.token_bytes(16)
_HOSTILE = 1
_WORLD_SIZE = 3
_LIMIT_SECONDS = 1.0
_MEMORY_LIMIT = 8 << 20
_LARGE = 300_000  # bytes: a message that is offered, not sent at once

# magic, version, kind, padding, payload length, source, destination, message, group, tag, message size, offset
_HEADER = struct.Struct("<2sBBIIIIQQQQQ")


def _frame(
    kind: int = FrameType.EAGER,
    payload: bytes = b"",
    *,
    magic: bytes = b"fd",
    version: int = WIRE_VERSION,
    padding: int = 0,
    length: int | None = None,
    source: int = _HOSTILE,
    destination: int = 0,
    message: int = 1,
    size: int = 0,
    offset: int = 0,
    group: int = 0,
    tag: int = 5,
) -> list[tuple[bytes, bytes]]:
    """A frame with any header, as this and its payload."""
    declared = len(payload) if length is None else length
    fields = (magic, version, kind, padding, declared, source, destination, message, group, tag, size, offset)
    return [(_HEADER.pack(*fields), payload)]


def _covers(kind: int, length: int, tag: int) -> bool:
    known = FrameType(kind) if kind in set(FrameType) else FrameType.EAGER
    return Frame(kind=known, source=0, destination=1, length=length, tag=tag).is_covered


def _send(sock: Connection, frames: bytes | list[tuple[bytes, bytes]]) -> None:
    """Send frames as a rank that has the keys, or anything else as it is."""
    if isinstance(frames, bytes):
        sock.sendall(frames)
        return
    for header, payload in frames:
        *_, length, _, _, _, _, tag, _, _ = _HEADER.unpack(header)
        covers = _covers(header[3], length, tag)
        seal = sock.session.outgoing.tag(header, payload if covers else b"")
        sock.session.outgoing.advance()
        sock.sendall(header + seal + payload)


_OFFER = _frame(FrameType.OFFER, size=_LARGE)

_BAD_REASONS: dict[str, bytes] = {
    "a type that is none": b"\xc1" * 9,
    "other types": msgspec.msgpack.encode({"name": 1}),
    "a class that is no text": b"\x93\xa3\xff\xff\xff\xa1x\x90",
    "a message that is no text": b"\x93\xa1x\xa3\xff\xff\xff\x90",
    "a huge length": b"\x93\xdb\xff\xff\xff\xff",
    "a huge number of ranks": b"\x93\xa1x\xa1x\xdd\xff\xff\xff\xff",
    "lists in lists": b"\x91" * 100_000,
    "a rank that can't be": msgspec.msgpack.encode(("PeerLostError", "x", (3,))),
    "a huge rank": msgspec.msgpack.encode(("PeerLostError", "x", (2**64 - 1,))),
    "more behind": msgspec.msgpack.encode(("PeerLostError", "x", ())) + b"x",
}

_VIOLATIONS: dict[str, bytes | list[tuple[bytes, bytes]]] = {
    "another magic": _frame(magic=b"GE"),
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: example.org\r\nUser-Agent: a browser\r\nAccept: */*\r\nA: b\r\n\r\n",
    "zeros": bytes(HEADER_SIZE + TAG_BYTES),
    "another version": _frame(version=WIRE_VERSION + 1),
    "padding that is not zero": _frame(padding=1),
    "kind 0": _frame(0),
    "kind 12": _frame(12),
    "kind 255": _frame(255),
    "a spoofed source": _frame(payload=b"x", size=1, source=2),
    "the hub as source": _frame(payload=b"x", size=1, source=0, destination=2),
    "a source outside": _frame(payload=b"x", size=1, source=3),
    "a destination outside": _frame(payload=b"x", size=1, destination=3),
    "the last destination": _frame(payload=b"x", size=1, destination=2**32 - 1),
    "itself as destination": _frame(payload=b"x", size=1, destination=_HOSTILE),
    "READY": _frame(FrameType.READY),
    "DIED": _frame(FrameType.DIED, destination=2),
    "a payload too long": _frame(length=MAX_PAYLOAD + 1, size=MAX_PAYLOAD + 1),
    "the longest payload": _frame(length=2**32 - 1, size=2**32 - 1),
    "an EAGER frame too long": _frame(length=mailbox.EAGER_LIMIT + 1, size=mailbox.EAGER_LIMIT + 1),
    "an EAGER frame of another size": _frame(payload=b"xx", size=3),
    "a message too long": _frame(FrameType.OFFER, size=MAX_MESSAGE + 1),
    "the longest message": _frame(FrameType.OFFER, size=2**64 - 1),
    "an OFFER with payload": _frame(FrameType.OFFER, b"x", size=_LARGE),
    "a GRANT with payload": _frame(FrameType.GRANT, b"x"),
    "a second OFFER": _OFFER + _OFFER,
    "DATA out of order": _OFFER + _frame(FrameType.DATA, b"x" * 10, size=_LARGE, offset=20),
    "DATA of another size": _OFFER + _frame(FrameType.DATA, b"x" * 10, size=_LARGE + 1),
    "DATA past the end": _OFFER + _frame(FrameType.DATA, b"x" * 10, size=_LARGE, offset=_LARGE - 5),
    "DATA with a huge offset": _OFFER + _frame(FrameType.DATA, b"x" * 10, size=_LARGE, offset=2**64 - 5),
    "DATA without bytes": _OFFER + _frame(FrameType.DATA, size=_LARGE),
    "an ABORT without a reason": _frame(FrameType.ABORT),
    "an ABORT with garbage": _frame(FrameType.ABORT, b"\xff" * 100),
    **{f"an ABORT with {name}": _frame(FrameType.ABORT, payload) for name, payload in _BAD_REASONS.items()},
    "half a header and the end": _frame()[0][0][:20],
    "half a payload and the end": _frame(payload=b"xxxx", length=100, size=100),
}


class _Job:
    """Ranks 0 and 2 of a group, and a bare authenticated connection in place of rank 1."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        host, port = listener.getsockname()
        self.groups: dict[int, TcpBackend] = {}

        def join(rank: int) -> None:
            own = {"listener": listener} if rank == 0 else {}
            self.groups[rank] = TcpBackend(rank, _WORLD_SIZE, f"{host}:{port}", secret=_SECRET, timeout=10, **own)

        threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 2)]
        for thread in threads:
            thread.start()
        hello = Hello(purpose="group", job="default", rank=_HOSTILE, world_size=_WORLD_SIZE, group="world")
        self.sock = connect(host, port, secret=_SECRET, hello=hello, deadline=Deadline(10))
        for thread in threads:
            thread.join()
        self.sock.settimeout(5)
        assert self.read_frame().kind is FrameType.READY

    def read_frame(self) -> Frame:
        """The next frame that the hub sends to the hostile rank, without its payload."""
        data = bytearray()
        while len(data) < HEADER_SIZE + TAG_BYTES:
            data += self.sock.recv(HEADER_SIZE + TAG_BYTES - len(data))
        return Frame.unpack(memoryview(data)[:HEADER_SIZE], _WORLD_SIZE)

    def send(self, frames: bytes | list[tuple[bytes, bytes]]) -> None:
        """Say something as the hostile rank."""
        _send(self.sock, frames)

    def close(self) -> None:
        """Close what is there."""
        self.sock.close()
        threads = [threading.Thread(target=group.close, args=(1.0,)) for group in self.groups.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@contextmanager
def _job() -> Iterator[_Job]:
    job = _Job()
    try:
        yield job
    finally:
        job.close()


def _failure_of(group: TcpBackend, call: Callable[[], object]) -> tuple[fd.DistributedError, float]:
    start = time.monotonic()
    with pytest.raises(fd.DistributedError) as caught:
        call()
    return caught.value, time.monotonic() - start


def _error_of_all(*calls: Callable[[], object]) -> fd.DistributedError | None:
    """The first error of calls that are made one after the other, or None when all end well."""
    try:
        for call in calls:
            call()
    except fd.DistributedError as error:
        return error
    return None


@pytest.fixture(scope="module")
def bystanders() -> Iterator[Callable[[], None]]:
    """Another job in this process; calling it makes its ranks meet."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = "{}:{}".format(*listener.getsockname())
    groups: dict[int, TcpBackend] = {}

    def everywhere(work: Callable[[int], object]) -> None:
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def join(rank: int) -> None:
        own = {"listener": listener} if rank == 0 else {}
        groups[rank] = TcpBackend(rank, 2, address, secret=_SECRET, timeout=5, job="another", **own)

    def meet() -> None:
        met: list[int] = []
        everywhere(lambda rank: (groups[rank].barrier(), met.append(rank)))
        assert sorted(met) == [0, 1]

    everywhere(join)
    yield meet
    everywhere(lambda rank: groups[rank].close())


@pytest.mark.parametrize("violation", _VIOLATIONS)
def test_violations_end_the_group(violation: str, bystanders: Callable[[], None]) -> None:
    """Bytes that no rank sends: the others soon get an error that names the rank, and hold no memory for it."""
    with check_leaks(), _job() as job, ExitStack() as stack:
        waiting = bytearray(16)
        pending = job.groups[2].irecv(waiting, _HOSTILE, tag=77)
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        job.send(_VIOLATIONS[violation])
        if "and the end" in violation:
            job.sock.shutdown(socket.SHUT_WR)
        error, took = _failure_of(job.groups[0], lambda: job.groups[0].recv(bytearray(1), 2, tag=78))
        assert error.ranks == (_HOSTILE,), error
        assert isinstance(error, fd.ProtocolError if "and the end" not in violation else fd.PeerLostError), error
        assert took < _LIMIT_SECONDS, error
        assert repr(job.groups[0].failure) == repr(error)
        with pytest.raises(fd.PeerLostError) as caught:
            pending.wait(5)
        assert caught.value.ranks == (_HOSTILE,)
        assert tracemalloc.get_traced_memory()[1] < _MEMORY_LIMIT
        bystanders()


_PASSED_ON: dict[str, bytes] = {
    **{
        f"an ABORT with {name}": _frame(FrameType.ABORT, payload, destination=2)
        for name, payload in _BAD_REASONS.items()
    },
    "an ABORT without a reason": _frame(FrameType.ABORT, destination=2),
    "a second OFFER": _frame(FrameType.OFFER, size=_LARGE, destination=2) * 2,
    "DATA out of order": _frame(FrameType.OFFER, size=_LARGE, destination=2)
    + _frame(FrameType.DATA, b"x" * 10, size=_LARGE, offset=20, destination=2),
    "DATA of another size": _frame(FrameType.OFFER, size=_LARGE, destination=2)
    + _frame(FrameType.DATA, b"x" * 10, size=_LARGE + 1, destination=2),
}


@pytest.mark.parametrize("violation", _PASSED_ON)
def test_violations_that_rank_0_relays_name_their_sender(violation: str) -> None:
    """A violation detected by its receiver is attributed to its sender, by all ranks."""
    with check_leaks(), _job() as job:
        job.send(_PASSED_ON[violation])
        for rank in (2, 0):
            error, took = _failure_of(job.groups[rank], lambda rank=rank: job.groups[rank].recv(bytearray(1), 2 - rank))
            assert isinstance(error, fd.ProtocolError), error
            assert error.ranks == (_HOSTILE,), error
            assert took < _LIMIT_SECONDS, error


def test_huge_offers_cost_nothing() -> None:
    """A message of 2**47 bytes is only announced: only a receive takes memory, and none is posted by mistake."""
    with check_leaks(), _job() as job, ExitStack() as stack:
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        job.send(_frame(FrameType.OFFER, size=2**47, tag=5))
        job.send(_frame(payload=b"x", size=1, tag=6, message=2))
        job.groups[0].recv(bytearray(1), _HOSTILE, tag=6)  # so the offer has come
        with pytest.raises(fd.SizeMismatchError, match=str(2**47)):
            job.groups[0].recv(bytearray(8), _HOSTILE, tag=5)
        assert tracemalloc.get_traced_memory()[1] < _MEMORY_LIMIT
        job.groups[0].send(b"x", 2)
        job.groups[2].recv(bytearray(1), 0)


def test_floods_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that keeps sending unexpected messages ends the group when the limit is reached."""
    monkeypatch.setattr(mailbox, "MAX_UNEXPECTED_BYTES", 1 << 20)
    with check_leaks(), _job() as job:
        with suppress(OSError):  # the hub closes the connection while it is written to
            for number in range(40):
                job.send(_frame(payload=bytes(100_000), size=100_000, message=number, tag=number))
        error, _ = _failure_of(job.groups[0], lambda: job.groups[0].recv(bytearray(1), 2, tag=78))
        assert isinstance(error, fd.GroupAbortedError)
        assert error.ranks == (_HOSTILE,)


def test_the_flooding_rank_is_named_whichever_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that filled the room is named, not the one whose message does not fit any more."""
    monkeypatch.setattr(mailbox, "MAX_UNEXPECTED_BYTES", 1 << 20)
    with check_leaks(), _job() as job:
        for number in range(10):
            job.send(_frame(payload=bytes(100_000), size=100_000, message=number, tag=number))
        job.send(_frame(payload=b"x", size=1, tag=77, message=10))
        job.groups[0].recv(bytearray(1), _HOSTILE, tag=77)
        job.groups[2].send(bytes(100_000), 0)
        error, _ = _failure_of(job.groups[0], lambda: job.groups[0].recv(bytearray(1), 2, tag=78))
        assert isinstance(error, fd.GroupAbortedError)
        assert error.ranks == (_HOSTILE,)


_REASON = msgspec.msgpack.encode(("GroupAbortedError", "why not", ()))


@pytest.mark.parametrize(
    ("kind", "payload"), [(FrameType.LEFT, b""), (FrameType.ABORT, _REASON)], ids=["LEFT", "ABORT"]
)
@pytest.mark.parametrize("destination", [0, 2])
def test_ends_of_unknown_groups_are_bounded(
    kind: FrameType, payload: bytes, destination: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may report the end of groups that another has not made yet, but not of any number of them."""
    monkeypatch.setattr(mailbox_backend, "MAX_AHEAD", 100)
    with check_leaks(), _job() as job:
        notices = [_frame(kind, payload, destination=destination, group=group)[0] for group in range(1, 101)]
        job.send(notices * 2)
        job.send(_frame(payload=b"x", size=1, destination=destination, message=2))
        job.groups[destination].recv(bytearray(1), _HOSTILE, tag=5)
        job.send(_frame(kind, payload, destination=destination, group=101))
        for rank in (0, 2):
            error, _ = _failure_of(job.groups[rank], lambda rank=rank: job.groups[rank].recv(bytearray(1), 2 - rank))
            assert error.ranks == (_HOSTILE,), error
        assert isinstance(job.groups[destination].failure, fd.ProtocolError)


def test_offers_in_a_failed_group_are_not_kept() -> None:
    """Nothing remains of large messages announced in a group that fails, or has failed."""
    with check_leaks(), _job() as job:
        hub = job.groups[0]
        group = SubBackend(hub, [0, _HOSTILE])
        numbers = range(1, 201)
        offers = [_frame(FrameType.OFFER, size=_LARGE, message=number, group=group.group_id)[0] for number in numbers]
        job.send(offers[:100] + _frame(payload=b"x", size=1, message=1000))
        hub.recv(bytearray(1), _HOSTILE, tag=5)
        assert len(hub._incoming) == 100
        group.abort("enough")
        assert not hub._incoming
        job.send(offers[100:] + _frame(payload=b"x", size=1, message=1001))
        hub.recv(bytearray(1), _HOSTILE, tag=5)
        assert not hub._incoming


def test_strangers_have_no_part_in_a_group() -> None:
    """Messages and notices in a group from a rank that is no member change nothing."""
    with check_leaks(), _job() as job:
        hub, other = SubBackend(job.groups[0], [0, 2]), SubBackend(job.groups[2], [0, 2])
        for kind, payload, size in (
            (FrameType.EAGER, b"x", 1),
            (FrameType.ABORT, _REASON, 0),
            (FrameType.LEFT, b"", 0),
        ):
            job.send(_frame(kind, payload, size=size, group=hub.group_id, tag=5))
        job.send(_frame(payload=b"x", size=1, message=2, tag=6))
        job.groups[0].recv(bytearray(1), _HOSTILE, tag=6)
        with pytest.raises(fd.DistributedTimeoutError):
            hub.recv(bytearray(1), fd.ANY_SOURCE, tag=5, timeout=0)
        other.send(b"y", 0, tag=5)
        assert hub.recv(bytearray(1), fd.ANY_SOURCE, tag=5) == 1


def test_data_that_was_not_asked_for_is_refused() -> None:
    """DATA before its GRANT ends the group: the receive that comes later must not return what was never written."""
    with _job() as job:
        with suppress(OSError):  # rank 0 ends the connection at the first of it
            job.send(_OFFER + _frame(FrameType.DATA, b"x" * _LARGE, size=_LARGE))
            job.send(_frame(payload=b"x", size=1, tag=6, message=2))
        buffer = bytearray(b"\xee" * _LARGE)
        error = _error_of_all(
            lambda: job.groups[0].recv(bytearray(1), _HOSTILE, tag=6, timeout=2),
            lambda: job.groups[0].recv(buffer, _HOSTILE, tag=5, timeout=2),
        )
        assert error is not None or buffer == b"x" * _LARGE, "the receive ended well, with bytes that nobody sent"
        assert error is None or error.ranks == (_HOSTILE,), error


def test_grants_of_strangers_start_nothing() -> None:
    """A rank can't grant an offer to another: the message arrives whole, or the group fails."""
    with _job() as job:
        data = bytes(range(250)) * (_LARGE // 250)
        send = job.groups[0].isend(data, 2, tag=3)
        with suppress(OSError):  # rank 0 ends the connection at the first of them
            for number in range(1, 20):
                job.send(_frame(FrameType.GRANT, message=number))
            job.send(_frame(payload=b"x", size=1, tag=6))
        buffer = bytearray(len(data))
        error = _error_of_all(
            lambda: job.groups[0].recv(bytearray(1), _HOSTILE, tag=6, timeout=2),
            lambda: job.groups[2].recv(buffer, 0, tag=3, timeout=2),
            lambda: send.wait(2),
        )
        assert error is not None or buffer == data, "the receive ended well, with bytes that nobody sent"
        assert error is None or error.ranks == (_HOSTILE,), error


@pytest.mark.parametrize(
    "record", [bytes(192), b"\xff" * 192, b"barrier".ljust(188, b"\0") + b"\xff" * 4], ids=["zeros", "ones", "long"]
)
def test_calls_that_no_rank_makes_are_mismatches(record: bytes) -> None:
    """A collective's call that is garbage is a mismatch, reported on all ranks in the same words."""
    with check_leaks(), _job() as job:
        tag = channel_tag(Channel.CALL, 0)
        job.send(_frame(payload=record, size=192, tag=tag))
        errors: dict[int, BaseException] = {}

        def meet(rank: int) -> None:
            with pytest.raises(fd.CollectiveMismatchError) as caught:
                fd.allreduce(torch.ones(3), group=job.groups[rank])
            errors[rank] = caught.value

        threads = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors.keys() == {0, 2}
        assert str(errors[0]) == str(errors[2])
        assert errors[0].ranks == (_HOSTILE,)


@pytest.mark.parametrize("ready", [False, True], ids=["before READY", "after READY"])
@pytest.mark.parametrize("violation", ["another magic", "another version", "kind 255", "the longest payload", "zeros"])
def test_a_hostile_hub_is_named(violation: str, ready: bool) -> None:
    """Frames of rank 0 are checked as well: the rank that receives them fails, and names rank 0."""
    with check_leaks():
        server = socket.create_server(("127.0.0.1", 0))

        def be_hub() -> None:
            sock = Connection.take_over(server.accept()[0])
            greet(sock, secret=_SECRET, admit=lambda hello: None, deadline=Deadline(5))
            if ready:
                _send(sock, _frame(FrameType.READY, source=0, destination=1))
            _send(sock, _VIOLATIONS[violation])
            with suppress(OSError):
                sock.recv(1)
            sock.close()

        hub = threading.Thread(target=be_hub)
        hub.start()
        address = "{}:{}".format(*server.getsockname())
        with pytest.raises(fd.DistributedError) as caught:  # noqa: PT012 - it fails in one of the two
            group = TcpBackend(1, 2, address, secret=_SECRET, timeout=5)
            with ExitStack() as stack:
                stack.callback(group.close, 1)
                group.recv(bytearray(1), 0)
        assert isinstance(caught.value, fd.ProtocolError), caught.value
        assert caught.value.ranks == (0,)
        hub.join()
        server.close()
