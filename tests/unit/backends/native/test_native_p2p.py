"""Messages of the engine, beyond what the conformance suite says of every backend: in shared memory and connections."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import ferrodist as fd
from ferrodist.backends import mailbox
from ferrodist.backends.mailbox import EAGER_LIMIT
from ferrodist.backends.native import is_native_available, p2p
from ferrodist.backends.request import wait_all
from ferrodist.backends.tcp import TcpBackend
from ferrodist.deadline import Deadline
from ferrodist.errors import GroupAbortedError, GroupClosedError, PeerLostError, SizeMismatchError
from ferrodist.testing import check_leaks, run_ranks

pytestmark = pytest.mark.skipif(
    not is_native_available(), reason="this installation was built without the native engine"
)

_LARGE = 3 * EAGER_LIMIT + 5

_either_way = pytest.mark.parametrize("backend", ["native-threads", "gloo-threads"])


def _pattern(size, seed=0):
    return bytes((i * 7 + seed) % 251 for i in range(size % 1000)) + bytes([seed % 256]) * (size - size % 1000)


@_either_way
def test_no_message_goes_over_the_star(backend, monkeypatch):
    """Messages of the group and of its sub-groups, small and large, leave the connections to rank 0 alone."""

    def program(group):
        group.barrier()
        if group.rank == 0:
            monkeypatch.setattr(TcpBackend, "_start_send", lambda *_: 1 / 0)
        group.barrier()
        peer = 1 - group.rank
        for here in (group, fd.SubBackend(group, [1, 0])):
            to = peer if here is group else 1 - here.rank
            for size in (0, 1, 5000, EAGER_LIMIT, _LARGE):
                into = bytearray(size)
                receiving = here.irecv(into, to, tag=3)
                here.send(_pattern(size, here.rank), to, tag=3)
                receiving.wait(20)
                assert into == _pattern(size, to)
        fd.barrier(group=group)

    run_ranks(program, 2, backend=backend, timeout=60)


@_either_way
def test_a_rank_that_computes_takes_messages(backend):
    """Small messages to a rank that is in no call of the group are sent, however many, and received in their order."""
    num_messages = 400
    sent = threading.Event()

    def program(group):
        if group.rank == 0:
            for i in range(num_messages):
                group.send(_pattern(20_000, i), 1, timeout=20)
            sent.set()
            group.barrier()
        else:
            assert sent.wait(50), "the sender waits for a rank that computes"
            for i in range(num_messages):
                into = bytearray(20_000)
                group.recv(into, 0)
                assert into == _pattern(20_000, i)
            group.barrier()

    run_ranks(program, 2, backend=backend, timeout=60)


@_either_way
def test_large_transfers_go_on_while_both_ranks_compute(backend):
    """A large send and its receive, both started, end without a call of either rank; both callbacks run."""

    def program(group):
        ended = threading.Event()
        into = bytearray(_LARGE)
        peer = 1 - group.rank
        requests = [group.irecv(into, peer), group.isend(_pattern(_LARGE, group.rank), peer)]
        left = threading.Semaphore(0)
        for request in requests:
            request.add_done_callback(left.release)
        for _ in requests:
            assert left.acquire(timeout=30), "a transfer does not go on"
        assert into == _pattern(_LARGE, peer)
        ended.set()
        group.barrier()

    run_ranks(program, 2, backend=backend, timeout=60)


@_either_way
def test_threads_of_a_rank_wait_at_the_same_time(backend):
    """Each of many threads gets the message of its tag, whichever of them moves it."""
    num_threads, rounds = 6, 30

    def program(group):
        peer = 1 - group.rank

        def converse(tag):
            for i in range(rounds):
                size = (0, 8, 3000, EAGER_LIMIT + 1)[(i + tag) % 4]
                into = bytearray(size)
                sending = group.isend(_pattern(size, tag), peer, tag=tag)
                group.recv(into, peer, tag=tag, timeout=30)
                assert into == _pattern(size, tag)
                sending.wait(30)

        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(converse, range(num_threads)))
        group.barrier()

    run_ranks(program, 2, backend="native", timeout=80)


@pytest.mark.parametrize("backend", ["native", "gloo"])
def test_more_ranks_than_processors(backend):
    """All ranks send to all, small and large, with one more rank than there are processors."""
    world_size = min(len(os.sched_getaffinity(0)) + 1, 9)

    def program(group):
        others = [rank for rank in range(world_size) if rank != group.rank]
        for size in (8, 4000, _LARGE):
            into = {rank: bytearray(size) for rank in others}
            requests = [group.irecv(into[rank], rank) for rank in others]
            requests += [group.isend(_pattern(size, group.rank), rank) for rank in others]
            wait_all(requests, Deadline(50))
            assert all(into[rank] == _pattern(size, rank) for rank in others)
        group.barrier()

    run_ranks(program, world_size, backend=backend, timeout=80)


@_either_way
def test_too_many_unexpected_messages_end_the_group(backend, monkeypatch):
    """A rank that sends more unexpected messages than there is room for ends the group and is named."""
    monkeypatch.setattr(mailbox, "MAX_UNEXPECTED_BYTES", 1 << 20)

    def program(group):
        def flood():
            for _ in range(1000 * group.rank):
                group.send(bytes(10_000), 0, timeout=20)
            group.recv(bytearray(1), 1 - group.rank, tag=9, timeout=20)

        with pytest.raises(GroupAbortedError, match="ran out of room: rank 1") as caught:
            flood()
        assert caught.value.ranks == (1,)

    run_ranks(program, 2, backend=backend, timeout=60)


@_either_way
def test_small_and_wrong_receives_on_the_fast_path(backend):
    """A receive of another size names the sender and leaves the message; arguments that are no tags or ranks raise."""

    def program(group):
        if group.rank == 0:
            group.send(b"12345", 1, tag=2)
        else:
            with pytest.raises(SizeMismatchError, match=r"rank 0 of group 'world' sent 5 bytes, .* has 4") as caught:
                group.recv(bytearray(4), 0, tag=2)
            assert caught.value.ranks == (0,)
            into = bytearray(5)
            assert group.recv(into, fd.ANY_SOURCE, tag=2, timeout=10) == 0
            assert into == b"12345"
            for wrong in (-1, True, 2.0, 1 << 128):
                with pytest.raises(ValueError, match="tag"):
                    group.recv(into, 0, tag=wrong)
            with pytest.raises(ValueError, match="read-only"):
                group.recv(b"12345", 0)
            with pytest.raises((TypeError, ValueError), match="timeout"):
                group.recv(into, 0, timeout=-1)
        group.barrier()

    run_ranks(program, 2, backend=backend, timeout=60)


@_either_way
def test_tags_of_65_bits_and_more_keep_apart(backend):
    """The upper half of a tag counts, whichever path a message takes."""

    def program(group):
        if group.rank == 0:
            group.send(b"high", 1, tag=5 | 1 << 64)
            group.send(b"low!", 1, tag=5)
        else:
            for tag, expected in ((5, b"low!"), (5 | 1 << 64, b"high")):
                into = bytearray(4)
                group.recv(into, 0, tag=tag, timeout=10)
                assert into == expected
        group.barrier()

    run_ranks(program, 2, backend=backend, timeout=60)


@_either_way
def test_a_message_outlives_its_sender(backend):
    """Messages that a rank sent before it closed the group are received, on all paths; then its leaving is seen."""
    closed = threading.Event()

    def program(group):
        if group.rank == 1:
            for i in range(20):
                group.send(_pattern(9000, i), 0)
            group.close(timeout=0.5)
            closed.set()
            return
        assert closed.wait(20)
        for i in range(20):
            into = bytearray(9000)
            if i % 2:
                group.irecv(into, 1).wait(10)
            else:
                group.recv(into, 1, timeout=10)
            assert into == _pattern(9000, i)
        for call in (lambda: group.recv(bytearray(1), 1), lambda: group.send(b"x", 1), lambda: group.isend(b"x", 1)):
            with pytest.raises(PeerLostError, match="left"):
                call()

    run_ranks(program, 2, backend=backend, timeout=60)


@pytest.mark.parametrize("backend", ["native", "gloo"])
def test_a_forked_child_has_no_messages(backend):
    """In a forked child every call raises that the group is the parent's, and so does an older request."""

    def program(group):
        peer = 1 - group.rank
        into = bytearray(2)
        request = group.irecv(into, peer, tag=1)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for call in (
                    lambda: group.send(b"x", peer, timeout=5),
                    lambda: group.recv(bytearray(1), peer, timeout=5),
                    lambda: group.isend(b"x", peer),
                    lambda: request.wait(5),
                ):
                    with pytest.raises(GroupClosedError, match="forked"):
                        call()
                request.cancel()
                group.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        group.send(b"go", peer, tag=1)
        request.wait(20)
        assert into == b"go"
        group.barrier()

    run_ranks(program, 2, backend=backend, timeout=60)


@_either_way
def test_closing_leaves_nothing_behind(backend):
    """Transfers under way when a group is closed end, and neither thread nor memory stays."""

    def program(group):
        peer = 1 - group.rank
        started = [group.irecv(bytearray(5), peer, tag=1), group.isend(bytes(_LARGE), peer, tag=2)]
        group.send(b"never received", peer, tag=3)
        group.barrier()
        group.close()
        for request in started:
            with pytest.raises((GroupClosedError, PeerLostError)):
                request.wait(10)

    with check_leaks():
        run_ranks(program, 2, backend=backend, timeout=60)


@_either_way
def test_messages_of_a_subgroup_come_before_the_notice_of_its_end(backend):
    """However many are on their way when a rank leaves a sub-group, they are received; then its leaving is seen."""
    num_messages = 40

    def program(group):
        pair = fd.SubBackend(group, [0, 1])
        if group.rank == 0:
            for i in range(num_messages):
                pair.send(_pattern(EAGER_LIMIT, i), 1, timeout=30)
            pair.close()
        else:
            for i in range(num_messages):
                into = bytearray(EAGER_LIMIT)
                pair.recv(into, 0, timeout=30)
                assert into == _pattern(EAGER_LIMIT, i)
            with pytest.raises(PeerLostError, match="left"):
                pair.recv(bytearray(1), 0, timeout=30)
        group.barrier()

    run_ranks(program, 2, backend=backend, timeout=80)


@_either_way
def test_transfers_that_have_ended_keep_few_errors(backend, monkeypatch):
    """Repeated attempts after the end take no memory, and each transfer raises the reason."""
    monkeypatch.setattr(p2p, "_MAX_REASONS", 20)

    def program(group):
        pair = fd.SubBackend(group, [0, 1])
        if group.rank == 1:
            group.barrier()
            pair.close()
            return
        first = pair.irecv(bytearray(1), 1)
        group.barrier()
        with pytest.raises(PeerLostError) as known:
            first.wait(20)
        receives = [first, *(pair.irecv(bytearray(1), 1) for _ in range(100))]
        gc.collect()
        assert sum(type(one) is PeerLostError for one in gc.get_objects()) < 100
        for receive in receives:
            with pytest.raises(PeerLostError, match=re.escape(str(known.value))):
                receive.wait(20)

    run_ranks(program, 2, backend=backend, timeout=60)


@_either_way
def test_the_engine_forgets_a_group(backend):
    """Messages for a group that has ended are dropped; the engine keeps nothing of a group that it has to forget."""

    def program(group):
        engine = group._p2p_engine
        if group.rank == 1:
            engine.end_group(5)
        group.barrier()
        if group.rank == 0:
            for data in (b"a", b"b"):
                deadline = Deadline(20.0)
                while not engine.try_send(data, 1, 5, 0):  # fails while another thread holds the lock
                    assert not deadline.expired, "no room for a message"
                    time.sleep(0)
                group.send(b"next", 1, timeout=20)
                group.recv(bytearray(4), 1, timeout=20)
            return
        group.recv(bytearray(4), 0, timeout=20)  # behind the first message
        engine.forget_group(5)
        group.send(b"next", 0, timeout=20)
        into = bytearray(1)
        assert engine.start_recv(into, 0, 5, 0).wait(20)
        assert into == b"b"
        group.recv(bytearray(4), 0, timeout=20)
        group.send(b"next", 0, timeout=20)

    run_ranks(program, 2, backend=backend, timeout=60)
