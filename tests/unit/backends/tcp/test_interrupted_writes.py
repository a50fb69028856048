"""Signal handlers that raise in the middle of a write: at each place where Python may run one, one after the other."""

from __future__ import annotations

import contextlib
import itertools
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest

from ferrodist.backends.frame_type import FrameType
from ferrodist.backends.tcp import connection
from ferrodist.backends.tcp.connection import FramedConnection, QueuedFrame
from ferrodist.backends.tcp.wire import HEADER_SIZE, Frame
from ferrodist.rendezvous.session import TAG_BYTES, Session

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType as PythonFrame

_KEY = bytes(32)
_INTERRUPTED, _SIZE = b"interrupted", 30_000  # more than the socket takes at once


class _Interruption(BaseException):
    pass


def _interrupt(call: Callable[[], object], place: int) -> str | None:
    """Raise at one of the places of a call where Python may run a signal handler, and return the name of the function.

    None if there are fewer places.
    Those are the beginnings of functions, and the ends of calls of functions in C.
    """
    num_places = 0
    function = None

    def reach(frame: PythonFrame, event: str, _arg: object) -> None:
        nonlocal num_places, function
        if frame.f_code.co_filename == connection.__file__ and event in {"call", "c_return"}:
            num_places += 1
            if num_places == place + 1:
                function = frame.f_code.co_name
                raise _Interruption

    before = sys.getprofile()
    sys.setprofile(reach)
    try:
        call()
    except _Interruption:
        return function
    finally:
        sys.setprofile(before)
    return None


def _frames(data: bytes) -> list[bytes]:
    """The payloads of the frames in what a connection has written, whose tags and order are checked."""
    session = Session(_KEY, is_server=False)
    payloads = []
    while data:
        frame = Frame.unpack(data[:HEADER_SIZE], 2)
        end = HEADER_SIZE + TAG_BYTES + frame.length
        payload = data[HEADER_SIZE + TAG_BYTES : end]
        assert len(payload) == frame.length, "the rest of a frame is missing"
        covered = payload if frame.is_covered else b""
        session.incoming.check(data[HEADER_SIZE : HEADER_SIZE + TAG_BYTES], data[:HEADER_SIZE], covered)
        payloads.append(payload)
        data = data[end:]
    return payloads


def _drain(far: socket.socket, received: bytearray) -> None:
    with contextlib.suppress(BlockingIOError):
        while data := far.recv(1 << 16):
            received += data


@pytest.mark.parametrize("num_waiting", [0, 2])
def test_an_interrupted_write_goes_on(num_waiting):
    """No byte is lost or comes twice, and each callback is called once, wherever a write is interrupted."""
    for place in itertools.count():
        near, far = socket.socketpair()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        far.setblocking(False)
        link = FramedConnection(near, 1, Session(_KEY, is_server=True))
        received, written = bytearray(), []

        def frame(payload: bytes, *, relayed: bool = False, written: list[bytes] = written) -> QueuedFrame:
            head = Frame(kind=FrameType.EAGER, source=0, destination=1, length=len(payload), size_bytes=len(payload))
            return QueuedFrame(head, payload, relayed=relayed, on_written=lambda: written.append(payload))

        first = [bytes([i]) * _SIZE for i in range(num_waiting)]
        for payload in first:
            link.push(frame(payload, relayed=True))

        def write(link: FramedConnection, middle: QueuedFrame, far: socket.socket, received: bytearray) -> None:
            link.push(middle)
            while link.waiting:
                _drain(far, received)
                link.flush()

        middle = frame(_INTERRUPTED * (_SIZE // len(_INTERRUPTED)))
        function = _interrupt(partial(write, link, middle, far, received), place)
        link.push(frame(b"last"))
        while link.waiting:
            _drain(far, received)
            link.flush()
        link.flush()
        near.close()
        _drain(far, received)
        far.close()
        payloads = _frames(bytes(received))
        assert payloads in ([*first, middle.payload, b"last"], [*first, b"last"]), f"in {function}"
        num_lost = 1 if function == "_call_due" else 0  # one that was about to be called
        assert len(set(written)) == len(written) >= len(payloads) - num_lost
        assert set(written) <= set(payloads)
        assert link.relayed_bytes == 0
        if function is None:
            break
    assert place > 50, "the places were not found"
