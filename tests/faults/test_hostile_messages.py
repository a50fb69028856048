"""Whatever another host writes to a connection for messages is refused or taken for a message, and harms nothing."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

import pytest

import ferrodist as fd
from ferrodist.backends.native import bootstrap, is_native_available
from ferrodist.backends.native.binding import load
from ferrodist.backends.native.p2p import _PeerEvent
from ferrodist.errors import PeerLostError, ProtocolError
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(
    not is_native_available(), reason="this installation was built without the native engine"
)

_EAGER_BYTES = 16 * 1024
_MAX_UNEXPECTED_BYTES = 1 << 20
_FRAME = struct.Struct("<IIQQQQQ")  # kind, length, message, group, tag, size, offset: `Frame` of transport/channel.h
_EAGER, _OFFER, _GRANT, _DATA, _WITHDRAW = range(1, 6)


def _frame(kind, data=b"", *, message=1, group=0, tag=0, size=None, offset=0, length=None):
    return (
        _FRAME.pack(
            kind,
            len(data) if length is None else length,
            message,
            group,
            tag,
            len(data) if size is None else size,
            offset,
        )
        + data
    )


@contextlib.contextmanager
def _engine() -> Iterator[tuple[object, socket.socket, list[tuple[int, ...]]]]:
    """The engine of rank 0 of two hosts, the other end of its connection to rank 1, and the events that it reports."""
    events: list[tuple[int, ...]] = []
    own, peer = socket.socketpair()
    memory = load().create_rings(1)
    engine = load().P2PEngine(
        rank=0,
        eager_bytes=_EAGER_BYTES,
        max_unexpected_bytes=_MAX_UNEXPECTED_BYTES,
        is_oversubscribed=True,
        spin_micros=50,
        memory=memory,
        num_local=1,
        local_indexes=[0, -1],
        sockets=[-1, own.detach()],
        on_event=lambda *event: events.append(event),
    )
    os.close(memory)
    with peer:
        try:
            yield engine, peer, events
        finally:
            engine.close()


def _await(events, seconds=20.0):
    end = time.monotonic() + seconds
    while not events:
        assert time.monotonic() < end, "nothing was reported"
        time.sleep(0.001)
    return events[0][:2]


@pytest.mark.parametrize(
    "sent",
    [
        _frame(0),
        _frame(99),
        bytes(range(48)),
        b"GET / HTTP/1.1\r\nHost: a\r\nUser-Agent: what-scans-ports\r\n\r\n",
        _frame(_EAGER, bytes(8), size=_EAGER_BYTES + 1),
        _frame(_EAGER, size=100),
        _frame(_EAGER, bytes(100), size=50),
        _frame(_EAGER, bytes(8), offset=1),
        _frame(_EAGER, size=1 << 31, length=(1 << 32) - 1),
        _frame(_OFFER, bytes(8)),
        _frame(_OFFER, size=1 << 60),
        _frame(_OFFER, size=1 << 20) * 2,
        _frame(_DATA, size=100),
        _frame(_DATA, bytes(8), size=1 << 20, offset=(1 << 64) - 4),
        _frame(_OFFER, size=1 << 20) + _frame(_DATA, bytes(8), size=1 << 20),
        _frame(_GRANT, bytes(8)),
        _frame(_WITHDRAW, bytes(8)),
    ],
    ids=lambda sent: sent[:16].hex(),
)
def test_a_frame_that_none_sends_is_refused(sent):
    """A wrong type, size, offset or order is reported once, with the rank, and no byte after it is taken."""
    with _engine() as (engine, peer, events):
        peer.sendall(sent + _frame(_EAGER, b"after", message=9, tag=7))
        assert _await(events) == (_PeerEvent.BROKEN, 1)
        request = engine.start_recv(bytearray(5), 1, 0, 7)
        assert not request.wait(0.02)
        assert [kind for kind, *_ in events].count(_PeerEvent.BROKEN) == 1


def test_half_a_message_is_none():
    """A connection that ends in a frame leaves its receive waiting, until the reason of the rank's end is known."""
    with _engine() as (engine, peer, events):
        request = engine.start_recv(bytearray(1000), 1, 0, 0)
        peer.sendall(_frame(_EAGER, bytes(1000))[:500])
        peer.close()
        assert not request.wait(0.05)
        assert _await(events) == (_PeerEvent.GONE, 1)
        assert engine.end_unmatched(request, 0)


@pytest.mark.parametrize("seed", range(20))
def test_random_frames(seed):
    """Frames with plausible and random fields, and receives for some of them, end in a refusal or in messages."""
    draw = random.Random(seed)
    with _engine() as (engine, peer, events):
        requests = [engine.start_recv(bytearray(size), 1, 0, tag) for size in (0, 1, 5000) for tag in (0, 1)]

        def talk():
            with contextlib.suppress(OSError):
                for _ in range(300):
                    data = draw.randbytes(draw.choice([0, 1, 16, 5000, _EAGER_BYTES]))
                    size = draw.choice([len(data), len(data), len(data), 0, 5000, 1 << 20, 1 << 62])
                    kind = draw.choice([_EAGER, _EAGER, _OFFER, _GRANT, _DATA, _WITHDRAW])
                    offset = draw.choice([0, 0, 0, 1, 5000, (1 << 64) - 1])
                    peer.sendall(
                        _frame(kind, data, message=draw.randrange(4), tag=draw.randrange(2), size=size, offset=offset)
                    )

        thread = threading.Thread(target=talk)
        thread.start()
        for request in requests:
            request.wait(0.02)
            request.cancel()
        peer.shutdown(socket.SHUT_WR)
        assert _await(events)[1] == 1
        peer.close()
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture
def descriptors(monkeypatch):
    """Rank 1's connections for messages, by rank, once the group is open."""
    found: list[int] = []
    connect = bootstrap.connect_hosts

    def connect_and_note(group, place, purpose, deadline):
        links = connect(group, place, purpose, deadline)
        if purpose == "messages" and group.rank == 1:
            found[:] = links
        return links

    monkeypatch.setattr(bootstrap, "connect_hosts", connect_and_note)
    return found


def test_the_group_ends_with_a_protocol_error(descriptors):
    """On all ranks, and it names the rank that broke the protocol."""
    has_left = threading.Event()  # rank 0 has, the barrier, which the end of the group would break

    def program(group):
        group.barrier()
        if group.rank == 0:
            has_left.set()
        else:
            assert has_left.wait(20)
            with socket.socket(fileno=os.dup(descriptors[0])) as sock:
                sock.sendall(b"what is no frame, but as long as one of them at the least")
        with pytest.raises(ProtocolError, match="rank 1 of group 'world' broke the protocol") as caught:
            group.recv(bytearray(1), 1 - group.rank, timeout=20)
        assert caught.value.ranks == (1,)

    run_ranks(program, 2, backend="gloo-threads", timeout=60)


def test_a_connection_that_breaks_ends_what_needs_it(descriptors):
    """Transfers of the two ranks end, though no notice of a death comes; the group and its other ranks go on."""

    def program(group):
        group.barrier()
        if group.rank == 1:
            with socket.socket(fileno=os.dup(descriptors[0])) as sock:
                sock.shutdown(socket.SHUT_RDWR)
        if group.rank < 2:
            peer = 1 - group.rank
            for call in (
                lambda: group.recv(bytearray(1), peer, timeout=20),
                lambda: group.send(b"x", peer, timeout=20),
            ):
                with pytest.raises(PeerLostError, match=f"rank {peer} .* can't be reached: its connection") as caught:
                    call()
                assert caught.value.ranks == (peer,)
            group.send(b"x", 2)
        else:
            one = bytearray(1)
            assert {group.recv(one, fd.ANY_SOURCE, timeout=20) for _ in range(2)} == {0, 1}

    run_ranks(program, 3, backend="gloo-threads", timeout=60)
