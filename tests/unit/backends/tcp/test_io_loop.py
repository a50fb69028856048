"""The thread that moves frames, alone: links that are blocked, that end, and platforms without epoll."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from ferrodist.backends.frame_type import FrameType
from ferrodist.backends.tcp.connection import FramedConnection
from ferrodist.backends.tcp.io_loop import IoLoop
from ferrodist.backends.tcp.wire import Frame
from ferrodist.rendezvous.session import Session
from ferrodist.testing import check_leaks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LIMIT = 20.0
_KEY = bytes(32)
_FRAME = Frame(kind=FrameType.PING, source=1, destination=0)


def _sealed(session: Session, frame: Frame = _FRAME, payload: bytes = b"") -> bytes:
    tag = session.outgoing.tag(frame.pack(), payload)
    session.outgoing.advance()
    return frame.pack() + tag + payload


class _Recorder:
    """A handler that keeps what it is told."""

    def __init__(self) -> None:
        self.num_frames = 0
        self.ended: list[int] = []
        self.violations = 0
        self.broke: Exception | None = None
        self.blocks: dict[
            FramedConnection, FramedConnection
        ] = {}  # by the link whose next frame waits in front of the other
        self._changed = threading.Condition()

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: condition() or self.broke is not None, _LIMIT) and self.broke is None

    def frame_begins(self, link: FramedConnection, frame: Frame) -> Callable[..., int]:
        del link, frame
        return lambda fill, start, stop: fill(memoryview(bytearray(stop - start)))

    def frame_ends(self, link: FramedConnection, frame: Frame, sink: object) -> None:
        del frame, sink
        link.blocked_by = self.blocks.pop(link, None)
        self._tell(num_frames=self.num_frames + 1)

    def link_blocked(self, link: FramedConnection) -> None:
        pass

    def link_ended(self, link: FramedConnection, reason: str, *, by_violation: bool) -> None:
        del reason
        self.violations += by_violation
        self._tell(ended=[*self.ended, link.peer])

    def loop_broke(self, error: Exception) -> None:
        self._tell(broke=error)

    def _tell(self, **changes: object) -> None:
        with self._changed:
            for name, value in changes.items():
                setattr(self, name, value)
            self._changed.notify_all()


@contextlib.contextmanager
def _connected(*peers: int) -> Iterator[tuple[dict[int, FramedConnection], dict[int, socket.socket]]]:
    """A link to each peer, and the peers' sockets."""
    links, far = {}, {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        for peer in peers:
            far[peer] = socket.create_connection(server.getsockname())
            links[peer] = FramedConnection(server.accept()[0], peer, Session(_KEY, is_server=True))
    try:
        yield links, far
    finally:
        for sock in far.values():
            sock.close()


@pytest.mark.skipif(not hasattr(select, "epoll"), reason="only with epoll is a link ever blocked")
def test_blocked_links_that_end_together() -> None:
    """The end of a link that blocks another reads that one too, and its end comes in the same moment."""
    handler = _Recorder()
    with check_leaks(), _connected(1, 2, 3) as (links, far):
        loop = IoLoop(handler, 4, "loop")
        links[2].blocked_by = links[3]
        links[1].blocked_by = links[2]
        for link in links.values():
            loop.wake_for(link)
        loop._watch_touched()  # before the ends: both are found by one look
        for peer in (2, 1):
            far[peer].close()
        loop.start()
        assert handler.wait_for(lambda: sorted(handler.ended) == [1, 2]), handler.broke
        loop.stop()


def test_without_epoll_links_are_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a blocked link's end can't be watched none is: neither what was read ahead nor a later frame stays."""
    monkeypatch.delattr(select, "epoll", raising=False)
    handler = _Recorder()
    with check_leaks(), _connected(1, 2) as (links, far):
        loop = IoLoop(handler, 3, "loop")
        handler.blocks = {links[1]: links[2]}
        for link in links.values():
            loop.wake_for(link)
        loop.start()
        session = Session(_KEY, is_server=False)
        far[1].sendall(b"".join(_sealed(session) for _ in range(3)))
        assert handler.wait_for(lambda: handler.num_frames == 3)
        far[1].sendall(_sealed(session))
        assert handler.wait_for(lambda: handler.num_frames == 4)
        loop.stop()


@pytest.mark.parametrize("is_started", [False, True])
def test_a_link_of_a_loop_that_is_stopped_at_once(is_started: bool) -> None:
    """It is closed, whether or not the thread has come to watch it."""
    with check_leaks():
        for _ in range(20):
            loop = IoLoop(_Recorder(), 2, "ferrodist-test")
            ours, theirs = socket.socketpair()
            link = FramedConnection(ours, 1, Session(_KEY, is_server=True))
            if is_started:
                loop.start()
            loop.wake_for(link)
            loop.stop()
            assert ours.fileno() == -1
            theirs.close()


@pytest.mark.parametrize("change", ["header", "payload", "tag", "repeated", "left out"])
def test_a_frame_that_is_not_the_peers_next(change: str) -> None:
    """The link ends as one whose peer broke the protocol, and nobody hears of the frame."""
    handler = _Recorder()
    with check_leaks(), _connected(1) as (links, far):
        session = Session(_KEY, is_server=False)
        frame = Frame(kind=FrameType.EAGER, source=1, destination=0, length=3, size_bytes=3)
        data = bytearray(_sealed(session, frame, b"abc"))
        place = {"header": 20, "payload": -1, "tag": 60}.get(change)
        if place is not None:
            data[place] ^= 1
        elif change == "repeated":
            data *= 2
        else:
            data = bytearray(_sealed(session, frame, b"abc"))
        loop = IoLoop(handler, 2, "loop")
        loop.wake_for(links[1])
        loop.start()
        far[1].sendall(data)
        assert handler.wait_for(lambda: bool(handler.ended))
        loop.stop()
    assert handler.num_frames == (change == "repeated")
    assert handler.violations == 1
