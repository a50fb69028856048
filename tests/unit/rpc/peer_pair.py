"""Two peers, and a group of theirs whose messages a test lets through."""

from collections import deque

import torch

from ferrodist.collectives.serialization import PackedValue
from ferrodist.rpc.large_messages import TensorPool
from ferrodist.rpc.messages import FRAME_BYTES, Form, MessageKind, pack_frame
from ferrodist.rpc.peer import PeerOptions, RemotePeer

LARGE = b"x" * FRAME_BYTES
LIMIT = 1 << 22


def large_value(num_tensors=1):
    """A value with out-of-band tensors."""
    return PackedValue.of([torch.full((100_000,), float(number)) for number in range(num_tensors)], "it")


class FakeRequest:
    """A request that a test ends."""

    def __init__(self):
        self.is_done = False
        self.then = []
        self.before = None

    def done(self):
        return self.is_done

    def wait(self, timeout):
        assert self.is_done

    def add_done_callback(self, callback):
        self.then.append(callback)
        if self.before is not None:
            self.before()

    def end(self):
        self.is_done = True
        for callback in self.then:
            callback()


class FakeGroup:
    """One side of a group of two: frames arrive at once, payloads when a test delivers them."""

    def __init__(self, rank):
        self.rank = rank
        self.other = None
        self.sent = {}  # payloads by tag, in their order
        self.is_immediate = False  # payloads arrive while their receives are posted
        self.posted = {}  # by tag: the buffer of a receive, and its request
        self.reason = None  # why it was aborted

    def post_persistent_recv(self, src, size, heard, ended, *, tag):
        self.received = heard

    def try_send(self, frame, dst, *, tag):
        self.other.received([bytes(frame)])
        return True

    def isend(self, memory, dst, *, tag):
        self.sent.setdefault(tag, deque()).append(bytes(memory))
        request = FakeRequest()
        request.is_done = True
        return request

    def irecv(self, memory, src, *, tag):
        assert tag not in self.posted
        request = FakeRequest()
        self.posted[tag] = memory, request
        if self.is_immediate:
            request.before = lambda: self.deliver(tag)
        return request

    def abort(self, reason):
        self.reason = reason

    def deliver(self, tag):
        """Deliver a payload."""
        memory, request = self.posted.pop(tag)
        memory[:] = self.other.sent[tag].popleft()
        request.end()


class Recorder:
    """A message handler: numbers of messages, in the order in which they have been handled. It is the executor, too."""

    wait_events = None

    def __init__(self):
        self.numbers = []
        self.kinds = []
        self.contents = {}
        self.cancelled_ones = []
        self.undecodable_ones = {}
        self.num_transfers = 0
        self.meanwhile = {}  # by number: what happens while a message is handled

    def add_transfers(self, change):
        self.num_transfers += change

    def on_message(self, peer, kind, number, content):
        self.meanwhile.pop(number, lambda: None)()
        self.numbers.append(number)
        self.kinds.append(kind)
        self.contents[number] = content

    def on_cancelled_message(self, peer, number, content):
        self.cancelled_ones.append(number)

    def on_undecodable(self, peer, kind, number, error):
        self.undecodable_ones[number] = error


class PeerPair:
    """A peer that messages are sent to, and one that receives them."""

    def __init__(self):
        groups = FakeGroup(0), FakeGroup(1)
        groups[0].other, groups[1].other = groups[1], groups[0]
        self.received = Recorder()
        self.here, self.there = groups
        self.pool = TensorPool()
        self.sender = self.make_peer(1, Recorder(), groups[0], 8 * LIMIT)
        self.make_peer(0, self.received, groups[1], LIMIT).start()

    def make_peer(self, rank, recorder, group, limit):
        options = PeerOptions(executor=recorder, tensor_pool=self.pool, tags=(), max_outstanding=1, message_limit=limit)
        return RemotePeer(rank, options, recorder, group, lambda peer, error: None)

    def send(self, kind, number, content=b"small"):
        self.sender.send(kind, number, content)

    def frames(self, numbers):
        """Frames of small calls."""
        return [
            pack_frame(MessageKind.CALL, Form.PLAIN, each, memoryview(b"x"), has_references=False) for each in numbers
        ]

    def collect(self):
        """Collect frames from now on: returns their list, and the function that receives them."""
        frames, hear = [], self.there.received
        self.there.received = frames.extend
        return frames, hear

    def deliver(self):
        """Deliver the only payload that a receive is posted for."""
        (tag,) = self.there.posted
        self.there.deliver(tag)

    def deliver_all(self):
        """Deliver all payloads that receives are posted for."""
        while self.there.posted:
            self.there.deliver(next(iter(self.there.posted)))
