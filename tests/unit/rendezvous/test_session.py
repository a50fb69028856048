"""Frames after the handshake: each side receives the other's frames as they were sent, or an error."""

from __future__ import annotations

import socket

import pytest

from ferrodist.deadline import Deadline
from ferrodist.errors import AuthenticationError, ProtocolError
from ferrodist.rendezvous.session import Connection, FrameAuthenticator, Session


@pytest.fixture
def ends():
    """Both ends of a connection with one key."""
    near, far = (Connection.take_over(sock) for sock in socket.socketpair())
    near.session, far.session = Session(b"k" * 32, is_server=False), Session(b"k" * 32, is_server=True)
    with near, far:
        yield near, far


def receive(end):
    return end.receive_frame(1000, Deadline(10))


def bytes_of_frames(sender, *payloads):
    """The bytes of frames as they would go over the network."""
    ours, theirs = socket.socketpair()
    with theirs, Connection.take_over(ours) as wire:
        wire.session = sender.session
        for payload in payloads:
            wire.send_frame(payload, None)
        return [theirs.recv(20 + len(payload), socket.MSG_WAITALL) for payload in payloads]


def test_frames_go_both_ways(ends):
    """Both directions carry frames of any size, in order, without disturbing each other."""
    near, far = ends
    for size in (0, 1, 900):
        near.send_frame(bytes(size), None)
        far.send_frame(b"x" * size, None)
        assert receive(far) == bytes(size)
        assert receive(near) == b"x" * size


@pytest.mark.parametrize("place", [4, 12, 20, 25])
def test_a_bit_that_was_changed(ends, place):
    """A tag or payload that differs by one bit is refused."""
    near, far = ends
    (data,) = bytes_of_frames(near, b"a payload")
    near.sendall(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    with pytest.raises(AuthenticationError, match="altered"):
        receive(far)


@pytest.mark.parametrize("order", [(0, 0), (1,), (1, 0), (0, 2)], ids=["repeated", "dropped", "swapped", "left out"])
def test_a_reordered_frame(ends, order):
    """Frames that are repeated, dropped or reordered are refused."""
    near, far = ends
    frames = bytes_of_frames(near, b"first", b"second", b"third")
    near.sendall(b"".join(frames[index] for index in order))
    with pytest.raises(AuthenticationError):
        list(map(receive, [far] * len(order)))


def test_a_reflected_frame(ends):
    """A reflected frame is refused, though both sides have the same key."""
    near, _ = ends
    (data,) = bytes_of_frames(near, b"said by the client")
    _, far = ends
    far.sendall(data)
    with pytest.raises(AuthenticationError):
        receive(near)


def test_a_frame_of_another_connection(ends):
    """Frames of a connection of the same ranks with another key are refused."""
    near, far = ends
    near.session = Session(b"j" * 32, is_server=False)
    near.send_frame(b"x", None)
    with pytest.raises(AuthenticationError):
        receive(far)


def test_the_length_is_bounded_before_memory_is_taken(ends):
    """A header that announces too much is refused from its four bytes."""
    near, far = ends
    near.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(ProtocolError, match="limit is 1000"):
        receive(far)


def test_a_tag_stays_until_its_frame_is_begun():
    """A frame that is taken back before a byte of it was sent leaves its number to the next one."""
    ours, theirs = FrameAuthenticator(b"k"), FrameAuthenticator(b"k")
    assert ours.tag(b"taken back") == ours.tag(b"taken ", b"back")
    theirs.check(ours.tag(b"sent"), b"sent")
    ours.advance()
    theirs.check(ours.tag(b"next"), b"next")
