"""The order in which a connection's messages are handled; see [Note: message order] in `receive_queue.py`."""

import pytest
from peer_pair import LARGE, PeerPair, large_value

from ferrodist.collectives.serialization import PackedValue
from ferrodist.errors import ProtocolError
from ferrodist.rpc.messages import REFERENCE_TAG, MessageKind

REFERENCES = PackedValue(["plain", 1], [], [], [], frozenset({REFERENCE_TAG}))


def test_waiting_messages_stay_in_order():
    """A large call that waits is not overtaken by those behind it."""
    pair = PeerPair()
    pair.send(MessageKind.INTERNAL_CALL, 1, LARGE)
    pair.send(MessageKind.INTERNAL_CALL, 2, LARGE)
    pair.send(MessageKind.INTERNAL_CALL, 3)
    pair.send(MessageKind.NOTICE, 4)
    pair.send(MessageKind.CALL, 5)  # waits for nothing
    assert pair.received.numbers == [5]
    pair.deliver()
    assert pair.received.numbers == [5, 1]
    pair.deliver()
    assert pair.received.numbers == [5, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", [MessageKind.INTERNAL_CALL, MessageKind.NOTICE])
def test_messages_received_while_a_waiting_one_is_handled(kind):
    """They stay in order, though nothing is under way any more."""
    pair = PeerPair()
    pair.send(kind, 1, LARGE)
    pair.send(kind, 2)
    pair.received.meanwhile[2] = lambda: pair.send(kind, 3)
    pair.deliver()
    assert pair.received.numbers == [1, 2, 3]


def test_notices_wait_for_everything():
    """For large messages of any kind, and for calls that wait; other messages wait for none of them."""
    pair = PeerPair()
    pair.send(MessageKind.RESULT, 1, LARGE)
    pair.send(MessageKind.NOTICE, 2)
    pair.send(MessageKind.INTERNAL_CALL, 3)
    pair.send(MessageKind.RESULT, 4)
    pair.send(MessageKind.NOTICE, 5)
    assert pair.received.numbers == [3, 4]
    pair.deliver()
    assert pair.received.numbers == [3, 4, 1, 2, 5]


@pytest.mark.parametrize("kind", [MessageKind.CALL, MessageKind.RESULT])
def test_references_wait_for_internal_calls(kind):
    """Small calls and results with references don't overtake large internal calls; those without do."""
    pair = PeerPair()
    pair.send(MessageKind.INTERNAL_CALL, 1, LARGE)
    pair.send(kind, 2, REFERENCES)
    pair.send(kind, 3)
    assert pair.received.numbers == [3]
    pair.deliver()
    assert pair.received.numbers == [3, 1, 2]
    pair.send(MessageKind.CALL, 4, LARGE)
    pair.send(kind, 5, REFERENCES)  # waits for agents' calls only
    assert pair.received.numbers == [3, 1, 2, 5]


def test_messages_behind_an_undecodable_one():
    """They wait until it was received, and no longer."""
    pair = PeerPair()
    parcel = large_value()
    pair.send(MessageKind.INTERNAL_CALL, 1, PackedValue(["unknown", parcel.spec], parcel.tensors, [False], [False]))
    pair.send(MessageKind.INTERNAL_CALL, 2)
    assert pair.received.numbers == []
    pair.deliver()
    assert pair.received.numbers == [2]
    assert "'unknown'" in str(pair.received.undecodable_ones[1])


def test_duplicate_numbers():
    """While the first message is under way, payloads of the two can't be told apart: the connection ends."""
    pair = PeerPair()
    pair.send(MessageKind.CALL, 1, LARGE)
    pair.send(MessageKind.RESULT, 1, LARGE)  # numbers are those of one side
    assert pair.there.reason is None
    pair.send(MessageKind.CALL, 1, LARGE)
    assert isinstance(pair.there.reason, ProtocolError)
    assert "the CALL 1 twice" in str(pair.there.reason)


def test_cancelled_while_tensors_are_under_way():
    """The tensors may be torn: the handler is called for a cancelled message in place of the call."""
    pair = PeerPair()
    pair.send(MessageKind.CALL, 1, large_value())
    pair.send(MessageKind.CALL, 2, large_value())
    pair.send(MessageKind.CANCEL, 1, b"")
    assert pair.received.numbers == []
    pair.deliver_all()
    assert pair.received.cancelled_ones == [1]
    assert pair.received.numbers == [2]


@pytest.mark.parametrize("kind", [MessageKind.CALL, MessageKind.INTERNAL_CALL])
def test_cancelled_while_content_is_under_way(kind):
    """The content is the call's own: the cancellation follows the call."""
    pair = PeerPair()
    pair.send(kind, 1, LARGE)
    pair.send(MessageKind.CANCEL, 1, b"")
    pair.deliver()
    assert pair.received.kinds == [kind, MessageKind.CANCEL]


def test_cancelled_while_it_waits():
    """A small call behind a large one: the cancellation follows it."""
    pair = PeerPair()
    pair.send(MessageKind.INTERNAL_CALL, 1, LARGE)
    pair.send(MessageKind.CALL, 2, REFERENCES)
    pair.send(MessageKind.CANCEL, 2, b"")
    pair.deliver()
    assert pair.received.kinds == [MessageKind.INTERNAL_CALL, MessageKind.CALL, MessageKind.CANCEL]


def test_an_interruption_costs_one_message():
    """The handler's exception is raised in the end; the other messages are handled."""

    def interrupt():
        raise KeyboardInterrupt

    pair = PeerPair()
    pair.received.meanwhile[2] = interrupt
    frames = pair.frames([1, 2, 3])
    with pytest.raises(KeyboardInterrupt):
        pair.there.received(frames)
    assert frames == []
    assert pair.received.numbers == [1, 3]
    pair.send(MessageKind.CALL, 4)
    assert pair.received.numbers == [1, 3, 4]
