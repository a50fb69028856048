"""Messages that are invalid, or can't be received: they end the connection at most."""

import struct
import threading

import msgspec
import pytest
import torch
from peer_pair import LARGE, LIMIT, PeerPair, large_value
from torch._subclasses.fake_tensor import FakeTensorMode

from ferrodist.collectives.serialization import PackedValue
from ferrodist.errors import ProtocolError
from ferrodist.rpc.messages import FRAME_BYTES, MessageKind

HEAD = struct.Struct("<BBHIQ")


def encoded_frame(*pieces, plan=("tuple", [])):
    """A frame with an encoded value whose header describes these tensors."""
    head = msgspec.msgpack.encode([plan, pieces])
    text = struct.pack("<Q", len(head)) + head
    return (HEAD.pack(MessageKind.CALL, 1, 0, len(text), 7) + text).ljust(FRAME_BYTES, b"\0")


@pytest.mark.parametrize(
    ("head", "text"),
    [
        ((6, 0, 0, 0, 1), "not a message of an agent"),
        ((0, 2, 0, 0, 1), "not a message of an agent"),
        ((0, 0, 2, 0, 1), "not a message of an agent"),
        ((0, 0, 0, LIMIT + 1, 1), f"message_limit is {LIMIT:,}: make all agents with the same"),
    ],
)
def test_invalid_frames(head, text):
    """The connection ends, and later frames are not read."""
    pair = PeerPair()
    pair.there.received([HEAD.pack(*head).ljust(FRAME_BYTES, b"\0"), *pair.frames([2])])
    assert isinstance(pair.there.reason, ProtocolError)
    assert pair.there.reason.ranks == (0,)
    assert text in str(pair.there.reason)
    pair.send(MessageKind.CALL, 3)
    assert pair.received.numbers == []


@pytest.mark.parametrize(
    "shape", [(1 << 62, 4, 0), (1 << 63, 0), (0, 1 << 62, 1 << 62), (-1,), (-4, -4), (LIMIT,), (1 << 62, 1 << 62)]
)
def test_impossible_tensors(shape):
    """Their sizes are checked before memory is allocated."""
    pair = PeerPair()
    pair.there.received([encoded_frame([0, shape, False, False, -1])])
    assert isinstance(pair.there.reason, ProtocolError)
    assert not pair.there.posted


def test_tensors_together_exceed_the_limit():
    """Each fits into the limit, but not both."""
    pair = PeerPair()
    pair.there.received([encoded_frame(*[[0, (LIMIT // 6,), False, False, -1]] * 2)])
    assert "message_limit" in str(pair.there.reason)


@pytest.mark.parametrize(
    "pieces", [[[99, (1,), False, False, -1]], [["x", (1,), False, False, -1]], [[0, "x", False, False, -1]]]
)
def test_headers_that_describe_no_tensors(pieces):
    """Nothing that follows could be read: the connection ends."""
    pair = PeerPair()
    pair.there.received([encoded_frame(*pieces)])
    assert "sent something that is not a value" in str(pair.there.reason)


@pytest.mark.parametrize("shape", [(1 << 62, 4, 0), (1 << 40,), (-1,)])
def test_impossible_in_band_tensors(shape):
    """Nothing follows them: the call fails, and the next one succeeds."""
    pair = PeerPair()
    pair.there.received([encoded_frame([0, shape, False, False, 0])])
    assert list(pair.received.undecodable_ones) == [7]
    pair.send(MessageKind.CALL, 8)
    assert pair.received.numbers == [8]
    assert pair.there.reason is None


def test_payloads_of_undecodable_messages_are_dropped():
    """They are received, so that the sender's transfers end."""
    pair = PeerPair()
    parcel = large_value(3)
    pair.send(MessageKind.CALL, 1, PackedValue(["unknown", parcel.spec], parcel.tensors, [False] * 3, [False] * 3))
    assert pair.received.num_transfers == 1
    pair.deliver_all()
    assert not any(pair.here.sent.values())
    assert list(pair.received.undecodable_ones) == [1]
    assert pair.received.num_transfers == 0


def test_no_memory_for_a_tensor(monkeypatch):
    """The call fails, the rest of the message is dropped, and the next call succeeds."""
    pair = PeerPair()

    def refuse(shape, dtype):
        monkeypatch.undo()
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(pair.pool, "make", refuse)
    pair.send(MessageKind.CALL, 1, large_value(2))
    pair.deliver_all()
    assert "there is no memory for 400,000 bytes" in str(pair.received.undecodable_ones[1])
    assert not any(pair.here.sent.values())
    pair.send(MessageKind.CALL, 2, large_value())
    pair.deliver_all()
    assert pair.received.numbers == [2]


def test_no_memory_to_drop_a_payload(monkeypatch):
    """The connection ends with an error that says why."""
    pair = PeerPair()

    def refuse(*shape, **options):
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(torch, "empty", refuse)
    pair.send(MessageKind.CALL, 1, LARGE)
    assert "there is no memory for 512 bytes that rank 0 sent" in str(pair.there.reason)


@pytest.mark.parametrize("size", [1, FRAME_BYTES])
def test_exceptions_end_the_connection(size):
    """In a thread of the backend's they would end more than that."""

    def fail():
        raise RuntimeError("a bug")

    def hear():
        pair.send(MessageKind.CALL, 1, b"x" * size)
        pair.deliver_all()

    pair = PeerPair()
    pair.received.meanwhile[1] = fail
    thread = threading.Thread(target=hear)
    thread.start()
    thread.join()
    assert "a message of rank 0 can't be taken: RuntimeError: a bug" in str(pair.there.reason)


def test_many_tensors_do_not_recurse():
    """Transfers that are done at once take no stack."""
    pair = PeerPair()
    pair.there.is_immediate = True
    frames, hear = pair.collect()
    pair.send(
        MessageKind.CALL, 1, PackedValue.of([torch.zeros(70_000 if not number else 2) for number in range(6000)], "it")
    )
    hear(frames)
    assert pair.received.numbers == [1]


@pytest.mark.parametrize("mode", [torch.inference_mode, FakeTensorMode, lambda: torch.device("meta")])
def test_modes_of_the_receiving_thread(mode):
    """A mode of the thread that receives does not apply to what others get."""
    pair = PeerPair()
    pair.send(MessageKind.CALL, 1, large_value())
    small = PackedValue.of([torch.ones(3)], "it")
    with mode():
        pair.deliver_all()
    frames, hear = pair.collect()
    pair.send(MessageKind.CALL, 2, small)
    with mode():
        hear(frames)
    for number in (1, 2):
        (tensor,) = pair.received.contents[number].tensors
        assert type(tensor) is torch.Tensor
        assert tensor.device.type == "cpu"
        assert not tensor.is_inference()
