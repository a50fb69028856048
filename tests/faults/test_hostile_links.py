"""Whatever another host sends over a connection of the native engine ends in an error and harms nothing."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
from typing import TYPE_CHECKING

import pytest
import torch

from ferrodist.backends.native import is_native_available
from ferrodist.backends.native.binding import dtype_number, load
from ferrodist.backends.native.errors import FailureKind

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(
    not is_native_available(), reason="this installation was built without the native engine"
)

_SLOT_BYTES = 64 * 1024
_HEADER = struct.Struct("<IIQQQ")  # magic, kind, number, offset, size: `Header` of native/transport/tcp/links.h
_MAGIC = 0x54446646
_ARRIVAL, _COUNTS, _STAGED, _FOLDED, _DONE, _FAILED = range(1, 7)
_CALL_BYTES = 248  # with its payload
_CALL = struct.pack("<BBBbiQ", 1, 1, 0, -1, -1, 30_000).ljust(_CALL_BYTES, b"\0")  # allreduce(sum, float32[30000])


@contextlib.contextmanager
def _engine() -> Iterator[tuple[object, socket.socket]]:
    """Rank 0 of two hosts, and what it takes for its connection to rank 1."""
    own, peer = socket.socketpair()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # less than a tensor
    segment = load().create_segment(1, 2, _SLOT_BYTES, False, 50)
    engine = load().Communicator(segment, 0, [0, 1], [-1, own.detach()], 1, 2, _SLOT_BYTES, False, 50)
    os.close(segment)
    with peer:
        yield engine, peer


def _outcome(engine, timeout=0.5, tensor=None):
    """How an allreduce of rank 0 ends."""
    tensor = torch.ones(30_000) if tensor is None else tensor
    try:
        address = tensor.data_ptr()
        engine.allreduce(
            address, address, 30_000, dtype_number(tensor), 0, 1.0, timeout=timeout, ticket=engine.reserve()
        )
    except load().Failure as failure:
        kind, ranks, record, _, _ = failure.args
        return FailureKind(kind), ranks, record.decode(errors="replace")
    return None, (), ""


def _read_all(peer):
    """What comes over a connection until it ends."""
    received = b""
    while part := peer.recv(1 << 16):
        received += part
    return received


def _frame(kind, number=1, offset=0, data=b"", size=None, magic=_MAGIC):
    return _HEADER.pack(magic, kind, number, offset, len(data) if size is None else size) + data


@pytest.mark.parametrize(
    "sent",
    [
        _frame(_ARRIVAL, data=_CALL, magic=7),
        _frame(0),
        _frame(99),
        _frame(_ARRIVAL, size=1 << 62),
        _frame(_ARRIVAL, data=_CALL[:-1]),
        _frame(_COUNTS, data=bytes(8)),
        _frame(_STAGED, number=0, offset=_SLOT_BYTES, data=b"x"),
        _frame(_STAGED, number=0, offset=(1 << 64) - 1, size=2),
        _frame(_FOLDED, number=1 << 63, size=_SLOT_BYTES + 1),
        _frame(_DONE, size=1),
        _frame(_FAILED, size=8),
    ],
    ids=lambda sent: sent[:32].hex(),
)
def test_a_frame_that_none_sends_is_refused(sent):
    """A wrong magic, kind, size or offset ends the collective, names the rank, and writes nowhere."""
    with _engine() as (engine, peer):
        peer.sendall(sent)
        kind, ranks, record = _outcome(engine, timeout=30.0)
        assert (kind, ranks) == (FailureKind.PROTOCOL, (1,))
        assert record.startswith("a frame")


def test_a_connection_that_ends_within_a_frame():
    """Half a frame and then nothing is a lost rank, not a wait for the rest."""
    with _engine() as (engine, peer):
        peer.sendall(_frame(_ARRIVAL, data=_CALL)[:50])
        peer.close()
        assert _outcome(engine, timeout=30.0)[:2] == (FailureKind.LOST, (1,))


def test_a_rank_that_reports_a_failure():
    """A rank that reports that a collective has failed there ends it here, though it had called it."""
    with _engine() as (engine, peer):
        peer.sendall(_frame(_ARRIVAL, data=_CALL) + _frame(_FAILED))
        assert _outcome(engine, timeout=30.0)[:2] == (FailureKind.FAILED, (1,))


@pytest.mark.parametrize("seed", range(20))
def test_random_frames(seed):
    """Frames with plausible and random fields end in an error, or in the deadline where they keep to the rules."""
    draw = random.Random(seed)
    with _engine() as (engine, peer):

        def talk():
            with contextlib.suppress(OSError):
                peer.sendall(_frame(_ARRIVAL, data=_CALL))
                for _ in range(200):
                    size = draw.choice([0, 1, 16, _CALL_BYTES, 4096, _SLOT_BYTES, _SLOT_BYTES + 1])
                    number = draw.choice([0, 1, 2, 3, 1 << 40, (1 << 64) - 1])
                    offset = draw.choice([0, 1, _SLOT_BYTES - 1, _SLOT_BYTES, 1 << 63])
                    kind = draw.choice([_ARRIVAL, _COUNTS, _STAGED, _STAGED, _FOLDED, _DONE, draw.randrange(12)])
                    peer.sendall(_frame(kind, number, offset, draw.randbytes(size)))

        peer.settimeout(5.0)
        speaker = threading.Thread(target=talk)
        speaker.start()
        kind, ranks, _ = _outcome(engine)
        peer.shutdown(socket.SHUT_RDWR)
        speaker.join()
        assert kind in (None, FailureKind.PROTOCOL, FailureKind.STALLED, FailureKind.MISMATCH, FailureKind.LATE)
        assert kind is not FailureKind.PROTOCOL or ranks == (1,)


@pytest.mark.parametrize("size", [1_009, 33, 31])
def test_frames_that_come_in_pieces(size):
    """However the connection cuts the frames, their bytes get to their places."""
    theirs = torch.arange(30_000, dtype=torch.float32)
    data = theirs.numpy().tobytes()
    sent = _frame(_STAGED, 0, data=data[:_SLOT_BYTES]) + _frame(_ARRIVAL, data=_CALL)
    sent += _frame(_STAGED, 1, data=data[_SLOT_BYTES:])
    with _engine() as (engine, peer):

        def talk():
            for start in range(0, len(sent), size):
                peer.sendall(sent[start : start + size])

        speaker = threading.Thread(target=talk)
        listener = threading.Thread(target=lambda: _read_all(peer))
        speaker.start()
        listener.start()
        tensor = torch.ones(30_000)
        address = tensor.data_ptr()
        engine.allreduce(address, address, 30_000, dtype_number(tensor), 0, 1.0, timeout=30.0, ticket=engine.reserve())
        speaker.join()
        engine.leave()
        listener.join()
        assert torch.equal(tensor, theirs + 1)


def test_unsent_bytes_of_a_failed_collective_are_never_sent():
    """A tensor is the caller's again when its collective has failed: its content is not sent from then on."""
    with _engine() as (engine, peer):
        tensor = torch.ones(30_000)
        assert _outcome(engine, tensor=tensor)[0] is FailureKind.LATE
        peer.recv(1 << 16)  # there is room again
        tensor.fill_(2.0)
        assert _outcome(engine, tensor=tensor)[0] is FailureKind.BROKEN
        engine.leave()
        assert struct.pack("<2f", 2.0, 2.0) not in _read_all(peer)
