"""The mailbox: how messages meet receives, whatever comes first and whatever is given up."""

import random
import threading
import time

import pytest

from ferrodist.backends.mailbox import MAX_UNEXPECTED_BYTES, Mailbox, Message, Receive, copy_bytes
from ferrodist.backends.tags import ANY_SOURCE
from ferrodist.errors import PeerLostError, SizeMismatchError


def open_gate():
    """A refusal that never refuses."""
    return


def post(box, size, source=1, tag=5, refusal=open_gate):
    """Ask for a message of ``size`` bytes."""
    receive = Receive(box, memoryview(bytearray(size)), source, tag)
    box.post(receive, refusal)
    return receive


def fill_from(data):
    """A ``fill`` that copies ``data``."""

    def fill(target):
        copy_bytes(target, memoryview(data))
        return len(data)

    return fill


def deliver(box, data, source=1, tag=5):
    """A whole eager message."""
    message = Message(source, tag, len(data))
    box.arrive(message)
    if data:
        box.write(message, fill_from(data), 0, len(data))
    return message


def test_receive_before_message():
    """A posted receive gets the message that comes later."""
    box = Mailbox()
    receive = post(box, 3)
    assert not receive.done()
    deliver(box, b"abc")
    assert receive.wait(0) == 1
    assert bytes(receive.buffer) == b"abc"


def test_message_before_receive():
    """A message that came first waits, with its bytes."""
    box = Mailbox()
    deliver(box, b"abc")
    receive = post(box, 3)
    assert receive.wait(0) == 1
    assert bytes(receive.buffer) == b"abc"


def test_empty_messages_match_too():
    """A message of no bytes completes its receive without a write."""
    box = Mailbox()
    receive = post(box, 0)
    deliver(box, b"")
    assert receive.wait(0) == 1
    deliver(box, b"")
    assert post(box, 0).wait(0) == 1


def test_order_is_kept_within_a_tag_and_source():
    """The first message goes to the first receive, and tags and sources don't mix."""
    box = Mailbox()
    for data in (b"1", b"2", b"3"):
        deliver(box, data)
    deliver(box, b"x", source=2)
    deliver(box, b"y", tag=6)
    assert [bytes(post(box, 1).buffer) for _ in range(3)] == [b"1", b"2", b"3"]
    assert bytes(post(box, 1, source=2).buffer) == b"x"
    assert bytes(post(box, 1, tag=6).buffer) == b"y"


def test_any_source_takes_the_first_to_come():
    """A receive from any rank gets messages in order of arrival, and the rank of their sender."""
    box = Mailbox()
    deliver(box, b"b", source=2)
    deliver(box, b"a", source=1)
    assert [post(box, 1, source=ANY_SOURCE).wait(0) for _ in range(2)] == [2, 1]


def test_offered_message_is_granted_once_a_receive_is_there():
    """The sender of a large message gets exactly one grant, and its bytes go straight to the buffer."""
    box = Mailbox()
    grants = []
    message = Message(1, 5, 4, grant=lambda: grants.append(1))
    box.arrive(message)
    assert grants == []
    receive = post(box, 4)
    assert grants == [1]
    box.write(message, fill_from(b"ab"), 0, 2)
    assert not receive.done()
    box.write(message, fill_from(b"cd"), 2, 4)
    assert receive.wait(0) == 1
    assert bytes(receive.buffer) == b"abcd"
    assert message.buffered is None


def test_wrong_size_fails_the_receive_and_keeps_the_message():
    """A buffer of another size gets an error that names both, whichever came first, and nothing is lost."""
    box = Mailbox()
    deliver(box, b"abc")
    with pytest.raises(SizeMismatchError, match=r"3 bytes.*has 2"):
        post(box, 2).wait(0)
    early = post(box, 9, tag=7)
    deliver(box, b"xyz", tag=7)
    with pytest.raises(SizeMismatchError, match=r"3 bytes.*has 9"):
        early.wait(0)
    assert bytes(post(box, 3).buffer) == b"abc"
    assert bytes(post(box, 3, tag=7).buffer) == b"xyz"


def test_cancel_in_the_middle_keeps_what_came():
    """A receive cancelled half-way leaves its buffer alone; the next one gets the whole message, in order."""
    box = Mailbox()
    first = post(box, 4)
    message = Message(1, 5, 4)
    box.arrive(message)
    box.write(message, fill_from(b"ab"), 0, 2)
    deliver(box, b"next")
    assert first.cancel()
    assert not first.cancel()
    box.write(message, fill_from(b"cd"), 2, 4)
    assert bytes(first.buffer) == b"ab\0\0"
    assert bytes(post(box, 4).buffer) == b"abcd"
    assert bytes(post(box, 4).buffer) == b"next"


def test_withdrawn_message_gives_its_receive_back():
    """When the sender takes a message back, the receive waits for the next one, before receives posted after it."""
    box = Mailbox()
    message = Message(1, 5, 4, grant=lambda: None)
    first = post(box, 4)
    second = post(box, 4)
    box.arrive(message)
    box.write(message, fill_from(b"ab"), 0, 2)
    box.withdraw(message)
    box.write(message, fill_from(b"zz"), 2, 4)  # what was on its way goes nowhere
    deliver(box, b"good")
    deliver(box, b"more")
    assert (bytes(first.buffer), bytes(second.buffer)) == (b"good", b"more")


def test_messages_come_before_a_refusal():
    """Messages that came before a peer left can still be received; after them the reason is raised."""
    box = Mailbox()
    deliver(box, b"abc")
    gone = PeerLostError("rank 1 has left", ranks=(1,))
    assert post(box, 3, refusal=lambda: gone).wait(0) == 1
    with pytest.raises(PeerLostError, match="left"):
        post(box, 3, refusal=lambda: gone).wait(0)


def test_fail_ends_waiting_and_matched_receives():
    """Failing reaches receives with and without a message under way, and only those it applies to."""
    box = Mailbox()
    waiting, spared = post(box, 1), post(box, 1, source=2)
    matched = post(box, 4, tag=8)
    message = Message(1, 8, 4)
    box.arrive(message)
    box.write(message, fill_from(b"ab"), 0, 2)
    box.fail(lambda receive: PeerLostError("gone") if receive.source == 1 else None)
    for receive in (waiting, matched):
        with pytest.raises(PeerLostError):
            receive.wait(0)
    assert not spared.done()
    box.write(message, fill_from(b"cd"), 2, 4)
    assert bytes(matched.buffer) == b"ab\0\0"


def test_a_flood_of_unexpected_messages_is_refused():
    """Messages without receives are refused before memory runs out, empty ones and offers too; draining makes room."""
    box = Mailbox()
    deliver(box, b"ab")
    box._unexpected_bytes = MAX_UNEXPECTED_BYTES
    for message in (Message(1, 5, 1), Message(1, 5, 0), Message(1, 5, 10**9, grant=lambda: None)):
        assert not box.arrive(message)
    assert bytes(post(box, 2).buffer) == b"ab"
    assert box.arrive(Message(1, 5, 0))


def test_a_full_mailbox_takes_expected_messages():
    """The message of a posted receive needs no room; one that fits no receive does."""
    box = Mailbox()
    box._unexpected_bytes = MAX_UNEXPECTED_BYTES
    receive = post(box, 3)
    deliver(box, b"abc")
    assert bytes(receive.buffer) == b"abc"
    wrong = post(box, 2)
    assert not box.arrive(Message(1, 5, 3))
    with pytest.raises(SizeMismatchError):
        wrong.wait(0)
    assert box._unexpected_bytes == MAX_UNEXPECTED_BYTES


def test_a_cancelled_large_receive_takes_no_room():
    """Its message was expected, so that it never counts as unexpected, neither before it is complete nor after."""
    box = Mailbox()
    message = Message(1, 5, 4, grant=lambda: None)
    box.arrive(message)
    before = box._unexpected_bytes
    for part in (b"ab", b"cd"):
        post(box, 4).cancel()
        assert box._unexpected_bytes == before
        box.write(message, fill_from(part), message.num_received, message.num_received + 2)
    assert bytes(post(box, 4).buffer) == b"abcd"
    assert box._unexpected_bytes == 0


def test_unmatched_receives_keep_their_order():
    """Two receives whose messages are both taken back get the next messages in the order in which they were posted."""
    box = Mailbox()
    receives = [post(box, 4) for _ in range(3)]
    messages = [Message(1, 5, 4, grant=lambda: None) for _ in range(2)]
    for message in messages:
        box.arrive(message)
    for message in messages:
        box.withdraw(message)
    for data in (b"one1", b"two2", b"thr3"):
        deliver(box, data)
    assert [bytes(receive.buffer) for receive in receives] == [b"one1", b"two2", b"thr3"]


def test_many_waiting_messages_and_receives_stay_cheap():
    """Thousands of waiting messages, or receives, cost the same each as a few: no operation walks the whole queue."""

    def cost(count):
        box = Mailbox()
        start = time.thread_time()
        for _ in range(count):
            deliver(box, b"x")
        for _ in range(count):
            post(box, 1)
        for _ in range(count):
            post(box, 1)
        for _ in range(count):
            deliver(box, b"x")
        return (time.thread_time() - start) / count

    cost(100)
    assert cost(20_000) < 8 * min(cost(500) for _ in range(3))


def test_callbacks_run_once_from_whichever_side_is_last():
    """A callback added before, during or after the end of a request runs exactly once."""
    for _ in range(300):
        box = Mailbox()
        receive = post(box, 1)
        calls = []
        start = threading.Barrier(2)

        def add(receive=receive, calls=calls, start=start):
            start.wait()
            receive.add_done_callback(lambda: calls.append(1))

        thread = threading.Thread(target=add)
        thread.start()
        start.wait()
        deliver(box, b"x")
        thread.join()
        assert calls == [1]


def test_random_interleavings_lose_nothing():
    """Deliveries, receives and cancellations at random, from several threads: each message arrives once, in order."""
    rng = random.Random(7)
    for _ in range(30):
        box = Mailbox()
        count = 60
        got = []

        def send(box=box, count=count):
            for i in range(count):
                data = bytes([i, i, i])
                message = Message(1, 5, 3)
                box.arrive(message)
                for k in range(3):
                    box.write(message, fill_from(data[k : k + 1]), k, k + 1)

        thread = threading.Thread(target=send)
        thread.start()
        while len(got) < count:
            receive = post(box, 3)
            if rng.random() < 0.3 and receive.cancel():
                continue
            receive.wait(10)
            got.append(bytes(receive.buffer))
        thread.join()
        assert got == [bytes([i, i, i]) for i in range(count)]
