"""What must not overtake what, in the messages of a link; see [Note: message order] in `framing.py`."""

import pytest
from link_ends import LARGE, Ends, large_value

from ferrodist.collectives.serialization import PackedValue
from ferrodist.errors import ProtocolError
from ferrodist.rpc.messages import REFERENCE_TAG, MessageKind

REFERENCES = PackedValue(["plain", 1], [], [], [], frozenset({REFERENCE_TAG}))


def test_what_waits_is_waited_for_in_turn():
    """A call that was held up, and is large itself, is not overtaken by those that were held up behind it."""
    ends = Ends()
    ends.send(MessageKind.INTERNAL_CALL, 1, LARGE)
    ends.send(MessageKind.INTERNAL_CALL, 2, LARGE)
    ends.send(MessageKind.INTERNAL_CALL, 3)
    ends.send(MessageKind.NOTICE, 4)
    ends.send(MessageKind.CALL, 5)  # waits for nothing
    assert ends.heard.numbers == [5]
    ends.bring()
    assert ends.heard.numbers == [5, 1]
    ends.bring()
    assert ends.heard.numbers == [5, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", [MessageKind.INTERNAL_CALL, MessageKind.NOTICE])
def test_what_comes_while_something_held_up_is_dealt_with(kind):
    """It comes in another thread, and finds nothing on its way any more: it has its turn all the same."""
    ends = Ends()
    ends.send(kind, 1, LARGE)
    ends.send(kind, 2)
    ends.heard.meanwhile[2] = lambda: ends.send(kind, 3)
    ends.bring()
    assert ends.heard.numbers == [1, 2, 3]


def test_notices_wait_for_everything():
    """For large messages of any kind, and for calls that are held up; other messages wait for none of them."""
    ends = Ends()
    ends.send(MessageKind.RESULT, 1, LARGE)
    ends.send(MessageKind.NOTICE, 2)
    ends.send(MessageKind.INTERNAL_CALL, 3)
    ends.send(MessageKind.RESULT, 4)
    ends.send(MessageKind.NOTICE, 5)
    assert ends.heard.numbers == [3, 4]
    ends.bring()
    assert ends.heard.numbers == [3, 4, 1, 2, 5]


@pytest.mark.parametrize("kind", [MessageKind.CALL, MessageKind.RESULT])
def test_references_wait_for_what_makes_their_objects(kind):
    """Small calls and results with references don't overtake large calls of agents; those without do."""
    ends = Ends()
    ends.send(MessageKind.INTERNAL_CALL, 1, LARGE)
    ends.send(kind, 2, REFERENCES)
    ends.send(kind, 3)
    assert ends.heard.numbers == [3]
    ends.bring()
    assert ends.heard.numbers == [3, 1, 2]
    ends.send(MessageKind.CALL, 4, LARGE)
    ends.send(kind, 5, REFERENCES)  # waits for agents' calls only
    assert ends.heard.numbers == [3, 1, 2, 5]


def test_what_is_behind_a_garbled_message():
    """It waits until that has come whole, and no longer."""
    ends = Ends()
    parcel = large_value()
    ends.send(MessageKind.INTERNAL_CALL, 1, PackedValue(["unknown", parcel.spec], parcel.tensors, [False], [False]))
    ends.send(MessageKind.INTERNAL_CALL, 2)
    assert ends.heard.numbers == []
    ends.bring()
    assert ends.heard.numbers == [2]
    assert "'unknown'" in str(ends.heard.undecodable_ones[1])


def test_a_number_that_comes_twice():
    """While its first message is under way: what belongs to which can't be told."""
    ends = Ends()
    ends.send(MessageKind.CALL, 1, LARGE)
    ends.send(MessageKind.RESULT, 1, LARGE)  # numbers are those of one side
    assert ends.there.reason is None
    ends.send(MessageKind.CALL, 1, LARGE)
    assert isinstance(ends.there.reason, ProtocolError)
    assert "the CALL 1 twice" in str(ends.there.reason)


def test_withdrawn_while_tensors_are_on_their_way():
    """They may be torn: whoever serves is told in place of the call, not after it."""
    ends = Ends()
    ends.send(MessageKind.CALL, 1, large_value())
    ends.send(MessageKind.CALL, 2, large_value())
    ends.send(MessageKind.CANCEL, 1, b"")
    assert ends.heard.numbers == []
    ends.bring_all()
    assert ends.heard.cancelled_ones == [1]
    assert ends.heard.numbers == [2]


@pytest.mark.parametrize("kind", [MessageKind.CALL, MessageKind.INTERNAL_CALL])
def test_withdrawn_while_a_letter_is_on_its_way(kind):
    """It is the call's own: the withdrawal comes after it."""
    ends = Ends()
    ends.send(kind, 1, LARGE)
    ends.send(MessageKind.CANCEL, 1, b"")
    ends.bring()
    assert ends.heard.kinds == [kind, MessageKind.CANCEL]


def test_withdrawn_while_it_is_held_up():
    """A small call, behind a large one."""
    ends = Ends()
    ends.send(MessageKind.INTERNAL_CALL, 1, LARGE)
    ends.send(MessageKind.CALL, 2, REFERENCES)
    ends.send(MessageKind.CANCEL, 2, b"")
    ends.bring()
    assert ends.heard.kinds == [MessageKind.INTERNAL_CALL, MessageKind.CALL, MessageKind.CANCEL]


def test_an_interruption_costs_one_message():
    """What its handler raises comes out in the end; what else has come was dealt with."""

    def interrupt():
        raise KeyboardInterrupt

    ends = Ends()
    ends.heard.meanwhile[2] = interrupt
    frames = ends.frames([1, 2, 3])
    with pytest.raises(KeyboardInterrupt):
        ends.there.heard(frames)
    assert frames == []
    assert ends.heard.numbers == [1, 3]
    ends.send(MessageKind.CALL, 4)
    assert ends.heard.numbers == [1, 3, 4]
