"""Signal handlers that raise in the middle of a write: at each place where Python may run one, one after the other."""

from __future__ import annotations

import itertools
import socket
import sys
from typing import TYPE_CHECKING, Any

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
_PIECE = 40  # bytes that the socket takes at a time


class _Interruption(BaseException):
    pass


class _SlowSocket:
    """A socket that takes few bytes at a time, and now and then none."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._num_calls = 0

    def sendmsg(self, views: list[memoryview]) -> int:
        self._num_calls += 1
        if self._num_calls % 5 == 0:
            raise BlockingIOError
        return self._sock.send(b"".join(views)[:_PIECE])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def _interrupt(call: Callable[[], object], place: int) -> bool:
    """Raise at one of the places of a call where Python may run a signal handler; False if it has fewer.

    Those are the beginnings of functions, and the ends of calls of functions in C.
    """
    num_places = 0

    def reach(frame: PythonFrame, event: str, _arg: object) -> None:
        nonlocal num_places
        if frame.f_code.co_filename == connection.__file__ and event in {"call", "c_return"}:
            num_places += 1
            if num_places == place + 1:
                raise _Interruption

    before = sys.getprofile()
    sys.setprofile(reach)
    try:
        call()
    except _Interruption:
        return True
    finally:
        sys.setprofile(before)
    return False


def _frames(data: bytes) -> list[bytes]:
    """The payloads of the frames in what a connection has written, whose tags and order are checked."""
    session = Session(_KEY, is_server=False)
    payloads = []
    while data:
        frame = Frame.unpack(data[:HEADER_SIZE], 2)
        end = HEADER_SIZE + TAG_BYTES + frame.length
        payload = data[HEADER_SIZE + TAG_BYTES : end]
        assert len(payload) == frame.length, "the rest of a frame is missing"
        session.incoming.check(data[HEADER_SIZE : HEADER_SIZE + TAG_BYTES], data[:HEADER_SIZE], payload)
        payloads.append(payload)
        data = data[end:]
    return payloads


@pytest.mark.parametrize("num_waiting", [0, 2])
def test_an_interrupted_write_goes_on(num_waiting):
    """No byte is lost or comes twice, and no callback is called twice, wherever a write is interrupted."""
    for place in itertools.count():
        near, far = socket.socketpair()
        link = FramedConnection(near, 1, Session(_KEY, is_server=True))
        link.sock = _SlowSocket(near)
        written: list[bytes] = []

        def frame(payload: bytes, written: list[bytes] = written) -> QueuedFrame:
            head = Frame(kind=FrameType.EAGER, source=0, destination=1, length=len(payload), size_bytes=len(payload))
            return QueuedFrame(head, payload, on_written=lambda: written.append(payload))

        first = [bytes([i]) * 30 for i in range(num_waiting)]
        for payload in first:
            link.push(frame(payload))

        def write(link: FramedConnection = link, frame: Callable[[bytes], QueuedFrame] = frame) -> None:
            link.push(frame(b"interrupted" * 9))
            while link.waiting:
                link.flush()

        was_interrupted = _interrupt(write, place)
        link.push(frame(b"last"))
        while link.waiting:
            link.flush()
        link.flush()
        near.close()
        received = _frames(b"".join(iter(lambda far=far: far.recv(1 << 16), b"")))
        far.close()
        assert received in ([*first, b"interrupted" * 9, b"last"], [*first, b"last"])
        assert len(set(written)) == len(written)
        # One can be interrupted itself.
        assert set(written) <= set(received)
        assert len(written) >= len(received) - 1
        if not was_interrupted:
            break
    assert place > 50, "the places were not found"
