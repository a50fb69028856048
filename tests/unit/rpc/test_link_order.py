"""What must not overtake what, in the messages of a link; see [Note: frames] in `link.py`."""

import pytest

from ferrodist.rpc.link import FRAME_BYTES, Link
from ferrodist.rpc.messages import MessageKind

LARGE = b"x" * FRAME_BYTES


class Transfer:
    """A request that ends when it is told to."""

    def __init__(self):
        self.is_done = False
        self.then = []

    def done(self):
        return self.is_done

    def wait(self, timeout):
        assert self.is_done

    def add_done_callback(self, callback):
        self.then.append(callback)

    def end(self):
        self.is_done = True
        for callback in self.then:
            callback()


class Way:
    """A pair's end: frames go to who listens at once, the rest when it is let go."""

    def __init__(self, rank):
        self.rank = rank
        self.other = None
        self.sent = {}  # bodies, by their tags
        self.asked = {}  # by tags: where one of them goes, and its request

    def listen(self, src, size, heard, ended, *, tag):
        self.heard = heard

    def try_send(self, frame, dst, *, tag):
        self.other.heard([bytes(frame)])
        return True

    def isend(self, memory, dst, *, tag):
        self.sent[tag] = bytes(memory)
        request = Transfer()
        request.is_done = True
        return request

    def irecv(self, memory, src, *, tag):
        assert tag not in self.asked
        self.asked[tag] = memory, Transfer()
        return self.asked[tag][1]

    def bring(self, tag):
        """A body comes."""
        memory, request = self.asked.pop(tag)
        memory[:] = self.other.sent[tag]
        request.end()


class Heard:
    """A receiver: numbers of messages, in the order in which they have been dealt with."""

    buffers = None
    marks = ()

    def __init__(self):
        self.numbers = []
        self.meanwhile = {}  # by numbers: what happens while a message is dealt with

    def attend(self, change):
        pass

    def received(self, peer, kind, number, content):
        self.meanwhile.pop(number, lambda: None)()
        self.numbers.append(number)


class Ends:
    """A link that sends, and one that receives."""

    def __init__(self):
        ways = Way(0), Way(1)
        ways[0].other, ways[1].other = ways[1], ways[0]
        self.heard = Heard()
        self.there = ways[1]
        self.sender = Link(ways[0], 1, Heard(), 1 << 20)
        receiver = Link(ways[1], 0, self.heard, 1 << 20)
        receiver.start()

    def send(self, kind, number, content=b"small"):
        self.sender.send(kind, number, content)

    def bring(self):
        """The only body that is asked for comes."""
        (tag,) = self.there.asked
        self.there.bring(tag)


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
