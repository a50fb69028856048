"""What may come on a link that no agent would send, or that can't be taken: it ends the link at most."""

import struct
import threading

import msgspec
import pytest
import torch
from link_ends import LARGE, LIMIT, Ends, large_value
from torch._subclasses.fake_tensor import FakeTensorMode

from ferrodist.collectives.serialization import PackedValue
from ferrodist.errors import ProtocolError
from ferrodist.rpc.framing import FRAME_BYTES
from ferrodist.rpc.messages import MessageKind

HEAD = struct.Struct("<BBHIQ")


def letter_of(*pieces, plan=("tuple", [])):
    """A frame with a letter that says so of its tensors."""
    head = msgspec.msgpack.encode([plan, pieces])
    text = struct.pack("<Q", len(head)) + head
    return (HEAD.pack(MessageKind.CALL, 1, 0, len(text), 7) + text).ljust(FRAME_BYTES, b"\0")


@pytest.mark.parametrize(
    ("head", "text"),
    [
        ((6, 0, 0, 0, 1), "no message of an agent"),
        ((0, 2, 0, 0, 1), "no message of an agent"),
        ((0, 0, 2, 0, 1), "no message of an agent"),
        ((0, 0, 0, LIMIT + 1, 1), f"message_limit is {LIMIT:,}: make all agents with the same"),
    ],
)
def test_frames_that_are_none(head, text):
    """The link ends, and what comes after it is not looked at."""
    ends = Ends()
    ends.there.heard([HEAD.pack(*head).ljust(FRAME_BYTES, b"\0"), *ends.frames([2])])
    assert isinstance(ends.there.reason, ProtocolError)
    assert ends.there.reason.ranks == (0,)
    assert text in str(ends.there.reason)
    ends.send(MessageKind.CALL, 3)
    assert ends.heard.numbers == []


@pytest.mark.parametrize(
    "shape", [(1 << 62, 4, 0), (1 << 63, 0), (0, 1 << 62, 1 << 62), (-1,), (-4, -4), (LIMIT,), (1 << 62, 1 << 62)]
)
def test_tensors_that_there_cant_be(shape):
    """Their sizes are looked at before there is memory for them."""
    ends = Ends()
    ends.there.heard([letter_of([0, shape, False, False, -1])])
    assert isinstance(ends.there.reason, ProtocolError)
    assert not ends.there.asked


def test_tensors_that_are_too_much_together():
    """Each has room, and both have not."""
    ends = Ends()
    ends.there.heard([letter_of(*[[0, (LIMIT // 6,), False, False, -1]] * 2)])
    assert "message_limit" in str(ends.there.reason)


@pytest.mark.parametrize(
    "pieces", [[[99, (1,), False, False, -1]], [["x", (1,), False, False, -1]], [[0, "x", False, False, -1]]]
)
def test_letters_that_dont_say_what_follows(pieces):
    """Nothing could be read after them."""
    ends = Ends()
    ends.there.heard([letter_of(*pieces)])
    assert "sent what is no value" in str(ends.there.reason)


@pytest.mark.parametrize("shape", [(1 << 62, 4, 0), (1 << 40,), (-1,)])
def test_small_tensors_that_there_cant_be(shape):
    """Nothing follows them: the call is told, and the next one is good."""
    ends = Ends()
    ends.there.heard([letter_of([0, shape, False, False, 0])])
    assert list(ends.heard.undecodable_ones) == [7]
    ends.send(MessageKind.CALL, 8)
    assert ends.heard.numbers == [8]
    assert ends.there.reason is None


def test_what_follows_a_garbled_letter_is_dropped():
    """All of it is received, so that its sender keeps nothing; nobody waits for it then."""
    ends = Ends()
    parcel = large_value(3)
    ends.send(MessageKind.CALL, 1, PackedValue(["unknown", parcel.spec], parcel.tensors, [False] * 3, [False] * 3))
    assert ends.heard.num_transfers == 1
    ends.bring_all()
    assert not any(ends.here.sent.values())
    assert list(ends.heard.undecodable_ones) == [1]
    assert ends.heard.num_transfers == 0


def test_no_memory_for_a_tensor(monkeypatch):
    """The call is told, what else belongs to it is dropped, and the next one is good."""
    ends = Ends()

    def refuse(shape, dtype):
        monkeypatch.undo()
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(ends.pool, "make", refuse)
    ends.send(MessageKind.CALL, 1, large_value(2))
    ends.bring_all()
    assert "there is no memory for 400,000 bytes" in str(ends.heard.undecodable_ones[1])
    assert not any(ends.here.sent.values())
    ends.send(MessageKind.CALL, 2, large_value())
    ends.bring_all()
    assert ends.heard.numbers == [2]


def test_no_memory_at_all(monkeypatch):
    """Not even for what is to be dropped: the link ends, and says why."""
    ends = Ends()

    def refuse(*shape, **options):
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(torch, "empty", refuse)
    ends.send(MessageKind.CALL, 1, LARGE)
    assert "there is no memory for 512 bytes that rank 0 sent" in str(ends.there.reason)


@pytest.mark.parametrize("size", [1, FRAME_BYTES])
def test_whatever_is_raised_ends_the_link(size):
    """In a thread of the backend's it would end more than that."""

    def fail():
        raise RuntimeError("a bug")

    def hear():
        ends.send(MessageKind.CALL, 1, b"x" * size)
        ends.bring_all()

    ends = Ends()
    ends.heard.meanwhile[1] = fail
    thread = threading.Thread(target=hear)
    thread.start()
    thread.join()
    assert "a message of rank 0 can't be taken: RuntimeError: a bug" in str(ends.there.reason)


def test_any_number_of_tensors():
    """However they end: none of them takes more stack than another one."""
    ends = Ends()
    ends.there.is_quick = True
    frames, hear = ends.collect()
    ends.send(
        MessageKind.CALL, 1, PackedValue.of([torch.zeros(70_000 if not number else 2) for number in range(6000)], "it")
    )
    hear(frames)
    assert ends.heard.numbers == [1]


@pytest.mark.parametrize("mode", [torch.inference_mode, FakeTensorMode, lambda: torch.device("meta")])
def test_modes_of_who_moves_messages(mode):
    """They are the thread's own: what comes is for others."""
    ends = Ends()
    ends.send(MessageKind.CALL, 1, large_value())
    small = PackedValue.of([torch.ones(3)], "it")
    with mode():
        ends.bring_all()
    frames, hear = ends.collect()
    ends.send(MessageKind.CALL, 2, small)
    with mode():
        hear(frames)
    for number in (1, 2):
        (tensor,) = ends.heard.contents[number].tensors
        assert type(tensor) is torch.Tensor
        assert tensor.device.type == "cpu"
        assert not tensor.is_inference()
