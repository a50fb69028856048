"""Messages that keep coming, and waits that other threads end."""

import threading
import time

import pytest

from ferrodist.backends.persistent_recv import LockWaitEvent, PostedPersistentRecv
from ferrodist.backends.simulated import SimulatedBackend
from ferrodist.backends.subgroup import SubBackend
from ferrodist.errors import DistributedError, GroupAbortedError, GroupClosedError, PeerLostError
from ferrodist.testing import run_ranks

BACKENDS = ["simulated", "tcp-threads", "native-threads", "native"]
SIZE = 64
PATIENCE = 30


class Heard:
    """What a listener has told."""

    def __init__(self):
        self.changed = threading.Condition()
        self.messages, self.errors = [], []
        self.num_inside = 0

    def hear(self, messages):
        """Take messages, in one thread at a time."""
        self.num_inside += 1
        assert self.num_inside == 1
        with self.changed:
            self.messages += messages
            self.changed.notify_all()
        self.num_inside -= 1

    def end(self, error):
        """Take the end."""
        with self.changed:
            self.errors.append(error)
            self.changed.notify_all()

    def wait(self, condition):
        """Return when it holds."""
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE), (len(self.messages), self.errors)


def message(number):
    """One of the size."""
    return number.to_bytes(8, "little").ljust(SIZE, b"\1")


def send(group, number, dst, tag=0):
    """By either way."""
    if number % 2 or not group.try_send(message(number), dst, tag=tag):
        group.isend(message(number), dst, tag=tag)


def within(world, kind, program):
    """Run with the group itself, or a sub-group of all but rank 0, whose ranks have other numbers."""
    if kind == "world":
        return program(world)
    if world.rank == 0:
        return None
    group = SubBackend(world, [2, 1])
    try:
        return program(group)
    finally:
        group.close()


@pytest.mark.parametrize("kind", ["world", "sub"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_messages_come_in_their_order(backend, kind):
    """Messages that were sent before the receive, while nobody waits, and with other messages between them."""

    def program(group):
        count, heard, others = 3000, [Heard() for _ in range(group.world_size)], []
        for peer in range(group.world_size):
            if peer != group.rank:
                others.append(peer)
                for number in range(10):
                    send(group, number, peer)
        listeners = [group.post_persistent_recv(peer, SIZE, heard[peer].hear, heard[peer].end) for peer in others]
        for number in range(10, count):
            for peer in others:
                send(group, number, peer)
                if number % 500 == 0:
                    group.send(b"other", peer, tag=3)
        for peer in others:
            for _ in range(5):
                group.recv(bytearray(5), peer, tag=3)
            heard[peer].wait(lambda peer=peer: len(heard[peer].messages) == count)
            assert heard[peer].messages == [message(number) for number in range(count)]
            assert not heard[peer].errors
        group.barrier()
        for listener in listeners:
            listener.close()

    run_ranks(lambda world: within(world, kind, program), 3, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_end_is_reported_once(backend):
    """After all earlier messages, an abort or a rank's leaving is reported; a closed receive gets nothing."""

    def on_rank(world):
        pair = SubBackend(world, [0, 1], label="one")
        other = SubBackend(world, [0, 1], label="other")
        world.barrier()
        if world.rank == 1:
            for number in range(20):
                send(pair, number, 0)
                send(other, number, 0, tag=7)
            world.recv(bytearray(1), 0)
            pair.abort("enough")
            other.close()
            world.barrier()
            return
        first, second, closed = Heard(), Heard(), Heard()
        pair.post_persistent_recv(1, SIZE, first.hear, first.end)
        other.post_persistent_recv(1, SIZE, second.hear, second.end, tag=7)
        other.post_persistent_recv(1, SIZE, closed.hear, closed.end, tag=8).close()
        for heard in (first, second):
            heard.wait(lambda heard=heard: len(heard.messages) == 20)
        world.send(b"x", 1)
        first.wait(lambda: first.errors)
        second.wait(lambda: second.errors)
        world.barrier()
        assert [type(error) for error in first.errors] == [GroupAbortedError]
        assert [type(error) for error in second.errors] == [PeerLostError]
        assert not closed.errors
        assert not closed.messages
        late = Heard()
        try:
            pair.post_persistent_recv(1, SIZE, late.hear, late.end)
        except DistributedError as error:
            late.end(error)
        late.wait(lambda: late.errors)
        assert isinstance(late.errors[0], GroupAbortedError)

    run_ranks(on_rank, 2, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS[:3])
def test_a_message_of_another_size_is_an_end(backend):
    """Messages before it are delivered, none after it."""

    def on_rank(world):
        if world.rank == 1:
            send(world, 0, 0)
            world.isend(b"short", 0)
            send(world, 1, 0)
            world.recv(bytearray(1), 0)
            return
        heard = Heard()
        world.post_persistent_recv(1, SIZE, heard.hear, heard.end)
        heard.wait(lambda: heard.errors)
        assert heard.messages == [message(0)]
        assert "5 bytes" in str(heard.errors[0])
        world.send(b"x", 1)

    run_ranks(on_rank, 2, backend=backend)


def test_a_group_that_was_closed():
    """A closed group refuses a persistent receive."""

    def on_rank(world):
        pair = SubBackend(world, [0, 1])
        pair.close()
        assert not pair.try_send(message(0), 1 - world.rank)
        with pytest.raises(GroupClosedError):
            pair.post_persistent_recv(1 - world.rank, SIZE, print, print)

    run_ranks(on_rank, 2, backend="native-threads")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wait_event_ends_one_wait(backend):
    """An event may be set before the wait or during it; setting it twice before a wait counts once."""

    def on_rank(world):
        signal = world.make_wait_event()
        assert not signal.wait(0.0)
        signal.set()
        signal.set()
        assert signal.wait(PATIENCE)
        start = time.monotonic()
        assert not signal.wait(0.05)
        assert time.monotonic() - start >= 0.04
        turn, rounds = threading.Semaphore(0), 300

        def give():
            for _ in range(rounds):
                signal.set()
                assert turn.acquire(timeout=PATIENCE)

        giver = threading.Thread(target=give)
        giver.start()
        for _ in range(rounds):
            assert signal.wait(PATIENCE)
            turn.release()
        giver.join(PATIENCE)
        world.barrier()

    run_ranks(on_rank, 2, backend=backend)


def test_many_threads_set_a_wait_event():
    """Many threads set it at once, again and again: none raises, and the wait ends."""
    signal, done = LockWaitEvent(), threading.Event()

    def give():
        while not done.is_set():
            signal.set()

    givers = [threading.Thread(target=give) for _ in range(2)]
    for giver in givers:
        giver.start()
    for _ in range(60):
        assert signal.wait(PATIENCE)
    done.set()
    for giver in givers:
        giver.join(PATIENCE)
        assert not giver.is_alive()


@pytest.mark.parametrize("backend", ["native-threads", "native"])
def test_messages_are_delivered_in_a_waiting_thread(backend):
    """Ping-pong, many times: the answer is sent in the thread that waits, or in another one."""

    def on_rank(world):
        peer, signal, got, rounds = 1 - world.rank, world.make_wait_event(), [], 1000

        def hear(messages):
            got.extend(messages)
            signal.set()

        listener = world.post_persistent_recv(peer, SIZE, hear, print)
        world.barrier()
        for number in range(rounds):
            if world.rank == 0:
                send(world, number, peer)
            while not got:
                assert signal.wait(PATIENCE)
            assert got.pop() == message(number)
            if world.rank == 1:
                send(world, number, peer)
        world.barrier()
        listener.close()

    run_ranks(on_rank, 2, backend=backend)


@pytest.mark.parametrize("when", ["before it is taken", "after it was taken"])
def test_an_interrupted_delivery_is_repeated(when):
    """Messages that were not taken are delivered again, then later ones; the interruption is raised all the same."""
    one, other = SimulatedBackend.create_group(2)
    heard, are_left = [], 1

    def hear(messages):
        nonlocal are_left
        is_first, are_left = are_left, 0
        if is_first and when == "before it is taken":
            raise KeyboardInterrupt
        heard.extend(messages)
        messages.clear()
        if is_first:
            raise KeyboardInterrupt

    other.post_persistent_recv(0, SIZE, hear, print)
    with pytest.raises(KeyboardInterrupt):
        send(one, 0, 1)
    send(one, 1, 1)
    assert heard == [message(0), message(1)]
    for group in (one, other):
        group.close()


def test_a_listener_closed_while_it_posts_takes_no_more():
    """The receive that it was about to post does not take the next listener's message."""
    one, other = SimulatedBackend.create_group(2)
    posted = []

    def post(buffer):
        if posted:
            listener.close()  # as by another thread
        posted.append(other.irecv(buffer, 0))
        return posted[-1]

    listener = PostedPersistentRecv(post, SIZE, print, print)
    send(one, 0, 1)
    assert [request.done() for request in posted] == [True, True]
    send(one, 1, 1)
    received = bytearray(SIZE)
    other.recv(received, 0, timeout=PATIENCE)
    assert received == message(1)
    for group in (one, other):
        group.close()
