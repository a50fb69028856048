"""The TCP star: how its ranks meet, what relaying costs nobody, and how it ends."""

import itertools
import os
import signal
import socket
import threading
import time

import pytest
import torch

import ferrodist as fd
from ferrodist.backends.frame_type import FrameType
from ferrodist.backends.subgroup import SubBackend
from ferrodist.backends.tcp.bootstrap import gather_links
from ferrodist.backends.tcp.connection import FramedConnection, QueuedFrame
from ferrodist.backends.tcp.io_loop import BLOCK_BYTES
from ferrodist.backends.tcp.wire import HEADER_SIZE, MAX_PAYLOAD, Frame
from ferrodist.deadline import Deadline
from ferrodist.errors import ProtocolError
from ferrodist.rendezvous import auth
from ferrodist.rendezvous.listener import Listener
from ferrodist.rendezvous.session import Session
from ferrodist.testing import check_leaks, run_ranks


def meet(*ranks, **options):
    """Make the ranks (rank, world_size, options) at once; returns what each got, an error or a closed group."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    results = [None] * len(ranks)

    def make(i, rank, world_size, own):
        mine = {"secret": "s", "timeout": 1.0, **options, **own}
        if rank == 0:
            mine["listener"] = listener
        try:
            group = fd.TcpBackend(rank, world_size, address, **mine)
        except Exception as error:
            results[i] = error
        else:
            results[i] = group

    threads = [threading.Thread(target=make, args=(i, *rank)) for i, rank in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    listener.close()
    closers = [threading.Thread(target=group.close) for group in results if isinstance(group, fd.Backend)]
    for thread in closers:
        thread.start()
    for thread in closers:
        thread.join()
    return results


def test_ranks_meet_and_leak_nothing():
    """Making and closing a group leaves no thread, socket or descriptor behind."""
    meet((0, 2, {}), (1, 2, {}))
    with check_leaks():
        assert all(isinstance(group, fd.TcpBackend) for group in meet((0, 3, {}), (1, 3, {}), (2, 3, {})))


def test_missing_rank_is_named_on_every_rank():
    """When a rank doesn't come, the others raise the same error, which names it, soon after the deadline."""
    start = time.monotonic()
    with check_leaks():
        hub, other = meet((0, 3, {}), (2, 3, {}))
    assert time.monotonic() - start < 10
    for error in (hub, other):
        assert isinstance(error, fd.RendezvousError)
        assert error.ranks == (1,)
        assert "rank 1" in str(error)
    assert str(hub) == str(other)


def test_a_rank_0_that_goes_silent_costs_no_more_than_the_deadline():
    """Rank 0 accepts the connection and then sends nothing: the others raise soon after their deadline."""
    taken = []
    server = Listener("127.0.0.1", 0, secret=b"s")
    server.serve(lambda hello: None, lambda sock, hello: taken.append(sock))
    start = time.monotonic()
    with pytest.raises(fd.RendezvousError, match=r"did not say within 0\.5 s"):
        fd.TcpBackend(1, 2, server.address, secret="s", timeout=60, connect_timeout=0.5)
    assert time.monotonic() - start < 4
    for sock in taken:
        sock.close()
    server.close()


def test_wrong_secret_is_reported_at_once_on_all_ranks():
    """The rank with the wrong secret raises immediately; the ranks it fails to join learn that one was turned away."""
    with check_leaks():
        hub, wrong = meet((0, 2, {}), (1, 2, {"secret": "not it"}))
    assert isinstance(wrong, fd.AuthenticationError)
    assert isinstance(hub, fd.RendezvousError)
    assert "secret" in str(hub)


@pytest.mark.parametrize(
    ("rank", "world_size", "options", "kind", "word"),
    [
        (1, 3, {}, fd.InvalidWorldSizeError, "world size of 3"),
        (1, 2, {"job": "another"}, fd.RendezvousError, "another"),
        (1, 2, {"name": "another"}, fd.RendezvousError, "another"),
    ],
)
def test_wrong_facts_are_reported_to_the_rank_that_has_them(rank, world_size, options, kind, word):
    """Another world size, job or group is refused with the two values that differ; rank 0 names the refused rank."""
    hub, wrong = meet((0, 2, {}), (rank, world_size, options))
    assert isinstance(wrong, kind)
    assert word in str(wrong)
    assert isinstance(hub, fd.RendezvousError)
    assert "Turned away" in str(hub)


def test_duplicate_rank_does_not_disturb_the_group():
    """Of two processes with one rank number the second is refused; the group goes on without noticing."""
    results = meet((0, 3, {}), (1, 3, {}), (1, 3, {}), (2, 3, {}), timeout=3.0)
    errors = [result for result in results if isinstance(result, Exception)]
    assert len(errors) == 1
    assert isinstance(errors[0], fd.DistributedError)
    assert sum(isinstance(result, fd.TcpBackend) for result in results) == 3


def test_duplicate_ranks_at_the_same_instant(monkeypatch):
    """Of two processes with one rank that come at the same time one is refused, the other is let in."""
    both_judged = threading.Barrier(2)
    send_sealed = auth._send_sealed

    def send_when_both_are_judged(sock, key, label, message, deadline):
        if label == b"verdict":
            both_judged.wait(10)
        send_sealed(sock, key, label, message, deadline)

    monkeypatch.setattr(auth, "_send_sealed", send_when_both_are_judged)
    results = meet((0, 3, {}), (1, 3, {}), (1, 3, {}))
    assert all(isinstance(result, fd.RendezvousError) for result in results), results
    assert sorted(result.ranks for result in results) == [(1,), (2,), (2,)]  # rank 2 did not come at all
    assert any(str(result).startswith("rank 1 is here already: two processes") for result in results[1:])


def test_rank_that_vanishes_before_it_is_let_in_may_come_again(monkeypatch):
    """A rank is free again if its process went away before it knew that it was let in."""
    send_sealed = auth._send_sealed
    failures = iter([True])

    def fail_once(sock, key, label, message, deadline):
        if label == b"verdict" and next(failures, False):
            raise ConnectionResetError("the client is gone")
        send_sealed(sock, key, label, message, deadline)

    monkeypatch.setattr(auth, "_send_sealed", fail_once)
    results = meet((0, 2, {}), (1, 2, {}), timeout=10.0)
    assert all(isinstance(result, fd.TcpBackend) for result in results), results


@pytest.mark.parametrize("rank", [-1, 2, True, "1"])
def test_impossible_rank_is_refused_without_a_connection(rank):
    """A rank outside of the group is wrong before anything is dialled."""
    with check_leaks(), pytest.raises(fd.InvalidRankError):
        fd.TcpBackend(rank, 2, "127.0.0.1:1", secret="s")


@pytest.mark.parametrize("size", [0, -3, 1.5])
def test_impossible_world_size_is_refused(size):
    """A world needs a whole, positive number of ranks."""
    with pytest.raises(fd.InvalidWorldSizeError):
        fd.TcpBackend(0, size, "127.0.0.1:1")


def test_an_interrupted_rank_0_lets_go_of_those_that_have_come():
    """They learn that it is gone, and don't wait for their deadline."""
    has_come = threading.Event()

    class Interrupted(Deadline):
        @property
        def expired(self):
            if has_come.wait(0.01):
                raise KeyboardInterrupt
            return False

    def join():
        start = time.monotonic()
        with pytest.raises(fd.DistributedError):
            fd.TcpBackend(1, 3, address, secret="s", timeout=60.0)
        took.append(time.monotonic() - start)

    took = []
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=join)
    hello = auth.Hello(purpose="group", job="default", rank=0, world_size=3, group="world")
    take = Listener.serve

    def serve(self, admit, take_one, dismiss):
        take(self, admit, lambda *arguments: (take_one(*arguments), has_come.set()), dismiss)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Listener, "serve", serve)
        thread.start()
        with pytest.raises(KeyboardInterrupt) as caught:
            gather_links(hello, address, b"s", listener, Interrupted(60.0))
        thread.join(30.0)
    assert caught  # and its frames with the connections are still referenced, as at a prompt
    assert took
    assert took[0] < 30


def test_a_rank_0_that_cant_set_up_its_connections_closes_them():
    """The other ranks learn at once that it is gone."""
    with pytest.raises(TypeError, match="socket_buffer_bytes must be an integer"):
        fd.TcpBackend(0, 2, "127.0.0.1:0", socket_buffer_bytes="64k")
    start = time.monotonic()
    refused, lost = meet((0, 2, {"socket_buffer_bytes": 1 << 40}), (1, 2, {}), timeout=60.0)
    assert isinstance(refused, (OverflowError, TypeError))  # of setsockopt
    assert isinstance(lost, fd.DistributedError)
    assert time.monotonic() - start < 30


def test_bad_address_is_refused_and_leaks_nothing():
    """An address without a port is a ValueError, on either side."""
    with check_leaks():
        for rank in (0, 1):
            with pytest.raises(ValueError, match="host:port"):
                fd.TcpBackend(rank, 2, "localhost", secret="s", timeout=1)


def test_a_connection_that_has_just_ended_has_no_address():
    """Who asks for it meets the reason in the next call, and no error of the socket's."""

    def program(group):
        link = group._links[1 - group.rank]
        assert group.local_host() == link.sock.getsockname()[0]
        group.barrier()  # the other rank's close ends the connection here too
        group.close()
        group._links[link.peer] = link
        assert group.local_host() == "127.0.0.1"

    run_ranks(program, 2, backend="tcp-threads")


def test_world_of_one_needs_no_network():
    """A single rank connects to nothing, whatever the address."""
    with check_leaks():
        group = fd.TcpBackend(0, 1, "nowhere.invalid:1")
        group.barrier()
        group.close()


def test_refuses_to_listen_without_a_secret(monkeypatch):
    """Without a secret rank 0 binds loopback only, and the error says how to set one."""
    monkeypatch.delenv("FERRODIST_SECRET", raising=False)
    with check_leaks(), pytest.raises(fd.AuthenticationError, match="FERRODIST_SECRET"):
        fd.TcpBackend(0, 2, "0.0.0.0:0", timeout=1)


@pytest.mark.parametrize("buffer_bytes", [16384, None])
def test_collectives_pass_through_small_buffers(buffer_bytes):
    """Rings and crossing messages far larger than the socket buffers, most of them relayed, don't block each other."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"

    def program(outer):
        mine = {"listener": listener} if outer.rank == 0 else {}
        group = fd.TcpBackend(outer.rank, 4, address, secret="s", timeout=30, socket_buffer_bytes=buffer_bytes, **mine)
        data = torch.full((200_000,), float(group.rank))
        right, left = (group.rank + 1) % 4, (group.rank - 1) % 4
        got = fd.sendrecv(data, right, None, left, group=group)
        assert torch.equal(got, torch.full_like(data, float(left)))
        assert torch.equal(fd.allreduce(data, group=group), torch.full_like(data, 6.0))
        parts = fd.all_to_all(data, group=group)
        assert parts[::50_000].tolist() == [0.0, 1.0, 2.0, 3.0]
        group.close()
        return True

    assert run_ranks(program, 4, timeout=60) == [True] * 4


def test_paused_receiver_does_not_hold_up_others():
    """While a large message to one rank waits for it, small ones between the others go through at once."""

    def program(group):
        if group.rank == 1:
            sending = group.isend(bytes(50_000_000), 2, tag=1)
            for i in range(50):
                group.send(bytes([i]), 3, tag=2)
            group.barrier()
            sending.wait(20)
        elif group.rank == 3:
            byte = bytearray(1)
            for i in range(50):
                group.recv(byte, 1, tag=2, timeout=5)
                assert byte[0] == i
            group.barrier()
        else:
            group.barrier()
            if group.rank == 2:
                buffer = bytearray(50_000_000)
                group.recv(buffer, 1, tag=1)

    run_ranks(program, 4, backend="tcp-threads")


def test_last_words_are_received_after_the_sender_has_closed():
    """A rank that sends and closes at once loses nothing, relayed or not."""

    def program(group):
        data = bytes(200_000)
        if group.rank == 2:
            for peer in (0, 1):
                for _ in range(20):
                    group.send(data, peer)
        else:
            buffer = bytearray(200_000)
            for _ in range(20):
                group.recv(buffer, 2)

    for _ in range(5):
        run_ranks(program, 3, backend="tcp-threads")


def test_forked_child_has_no_part_in_the_group():
    """A child that a rank forks can neither use the group nor keep it alive, and closing it there harms nobody."""

    def program(group):
        group.barrier()
        pid = os.fork()
        if pid == 0:
            try:
                group.send(b"x", 1 - group.rank)
            except fd.GroupClosedError:
                group.close()
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        group.barrier()

    run_ranks(program, 2, backend="tcp")


def test_a_send_given_up_is_received_once_or_not_at_all():
    """Whatever moment a send is cancelled at, the receiver gets just the messages whose sends were not."""

    def program(group):
        size = 200_000
        if group.rank == 0:
            requests = [group.isend(bytes([i]) * size, 1, tag=1) for i in range(100)]
            kept = [i for i, request in reversed(list(enumerate(requests))) if not request.cancel()][::-1]
            for i in kept:
                assert requests[i].wait(20) == 1
            group.send(bytes([len(kept)]), 1, tag=2)
            return kept
        count, got = bytearray(1), []
        group.recv(count, 0, tag=2)
        buffer = bytearray(size)
        for _ in range(count[0]):
            group.recv(buffer, 0, tag=1)
            got.append(buffer[0])
        with pytest.raises(fd.DistributedTimeoutError):
            group.recv(buffer, 0, tag=1, timeout=0.1)
        return got

    for _ in range(10):
        sent, received = run_ranks(program, 2, backend="tcp-threads")
        assert sent == received


def test_a_send_given_up_while_it_is_granted_breaks_nothing():
    """A large message that is taken back while its pieces are being queued is withdrawn whole; the ranks go on."""
    size = 8 * MAX_PAYLOAD

    def program(group):
        if group.rank == 0:
            receiving = group.irecv(bytearray(size), 1, tag=1)
            group.recv(bytearray(1), 1)
            receiving.cancel()
        else:
            link, push, num_pieces = group._links[0], group._push, itertools.count(1)
            drop, dropped, went_on = link.drop, threading.Event(), threading.Event()

            def drop_and_tell(*args):
                try:
                    return drop(*args)
                finally:
                    dropped.set()

            def push_and_cancel(outgoing, *args):
                number = next(num_pieces) if outgoing.frame.kind is FrameType.DATA else 0
                if number == 1:
                    link._write = list  # the socket takes nothing
                if outgoing.frame.kind is FrameType.WITHDRAW:
                    assert went_on.wait(10)
                push(outgoing, *args)
                if number == 4:
                    cancelling.start()
                    dropped.wait(0.3)  # before the fifth piece, if it is not made to wait
                elif number == 5:
                    went_on.set()

            link.drop = drop_and_tell
            group._push = push_and_cancel
            cancelling = threading.Thread(target=lambda: request.cancel())  # noqa: PLW0108 - it is not made yet
            request = group.isend(bytes(size), 0, tag=1)
            with pytest.raises(fd.DistributedTimeoutError, match="cancelled"):
                request.wait(20)
            cancelling.join()
            del link._write
            group.send(b"x", 0)
        group.barrier()

    run_ranks(program, 2, backend="tcp-threads", timeout=20)


def test_receive_from_anyone_ends_when_everyone_has_left():
    """Waiting for any source is not waiting for nobody: with the last peer gone it raises, and so do later ones."""

    def program(group):
        if group.rank == 0:
            with pytest.raises((fd.PeerLostError, fd.NoConnectionError)):
                group.recv(bytearray(1), fd.ANY_SOURCE, timeout=30)
            with pytest.raises((fd.PeerLostError, fd.NoConnectionError)):
                group.recv(bytearray(1), fd.ANY_SOURCE, timeout=30)
        else:
            group.close()

    for backend in ("simulated", "tcp-threads"):
        run_ranks(program, 3, backend=backend, timeout=20)


def test_killed_rank_is_seen_behind_a_full_relay():
    """A rank that is killed while rank 0 holds back what it sent is still reported within a second."""

    def program(group):
        pids = fd.all_gather_object(os.getpid())
        if group.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif group.rank == 1:
            for _ in range(200):  # more than sockets and rank 0 take for a rank that is stopped
                group.isend(bytes(250_000), 2)
            signal.pause()
        else:
            patience = time.monotonic() + 20
            while group._links[1].blocked_by is None:
                assert time.monotonic() < patience, "rank 0 never held rank 1 back"
                threading.Event().wait(0.01)
            os.kill(pids[1], signal.SIGKILL)
            start = time.monotonic()
            with pytest.raises(fd.PeerLostError) as caught:
                group.barrier(timeout=20)
            elapsed = time.monotonic() - start
            os.kill(pids[2], signal.SIGKILL)
            assert caught.value.ranks == (1,)
            assert elapsed < 1.0

    with pytest.raises(fd.RankFailedError, match="SIGKILL") as caught:
        run_ranks(program, 3, backend="tcp", timeout=40)
    assert 0 not in caught.value.ranks


def test_killed_rank_is_named_in_its_subgroups():
    """Each group of a killed rank fails with its own number and name of it; the world's are told beside them."""

    def program(world):
        early = SubBackend(world, [2, 1, 0], name="early")
        world.barrier()
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(fd.PeerLostError) as caught:
            early.barrier(timeout=10)
        assert caught.value.ranks == early.failure.ranks == (0,)
        assert caught.value.message.startswith("rank 0 of group 'early' (rank 2 of group 'world') died: ")
        if world.rank == 1:
            assert SubBackend(early, [1, 0], name="late").failure.ranks == (1,)
        assert world.failure.ranks == (2,)
        assert world.failure.message.startswith("rank 2 of group 'world' died: ")

    with pytest.raises(fd.RankFailedError, match="SIGKILL") as caught:
        run_ranks(program, 3, backend="tcp", timeout=20)
    assert caught.value.ranks == (2,), caught.value


def test_subgroups_own_timeout_is_not_renumbered():
    """A failure of a sub-group that is a timeout keeps its ranks, also when they look like the outermost group's."""

    def program(world):
        group = SubBackend(world, [0, 2, 1])
        request = group.irecv(bytearray(1), (group.rank + 1) % 3)
        group.barrier()
        if group.rank == 0:
            group.abort(fd.DistributedTimeoutError("rank 2 was late", ranks=(2,)))
        with pytest.raises(fd.DistributedTimeoutError, match="rank 2 was late") as caught:
            request.wait(10)
        assert caught.value.ranks == (2,)

    for backend in ("simulated", "tcp-threads"):
        run_ranks(program, 3, backend=backend, timeout=20)


@pytest.mark.parametrize("size", [0, 1000])
def test_relay_is_blocked_by_what_waits_in_it(size):
    """Frames that wait for a rank which takes none count, empty ones too, until they are gone."""
    near, far = socket.socketpair()
    link = FramedConnection(near, 1, Session(bytes(32), is_server=True))
    frame = Frame(kind=FrameType.EAGER, source=2, destination=1, length=size, size_bytes=size)
    count = 0
    while link.relayed_bytes <= BLOCK_BYTES:
        link.push(QueuedFrame(frame, bytes(size), relayed=True))
        count += 1
        assert count < 100_000, "the queue grows and nobody counts"
    far.setblocking(False)
    while link.waiting:
        far.recv(1 << 20)
        link.flush()
    assert link.relayed_bytes == 0
    link.close()
    far.close()


def test_new_subgroup_in_a_forked_child_is_refused():
    """A child can't make a sub-group of its parent's group either: it raises, it does not wait for a lock."""

    def program(group):
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                try:
                    fd.SubBackend(group, [0, 1]).barrier(timeout=5)
                except fd.GroupClosedError:
                    os._exit(0)
                os._exit(1)
            group.barrier()
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    run_ranks(program, 2, backend="tcp")


def test_sends_racing_an_abort_all_end():
    """Sends that start in the very moment a group is aborted raise its error, and never wait for their deadline."""

    def send_on(group):
        for i in itertools.count():
            group.send(bytes(300_000), 3 - group.rank, tag=i, timeout=20)

    def program(group):
        if group.rank == 0:
            group.abort("now")
            return
        with pytest.raises(fd.GroupAbortedError):
            send_on(group)

    for backend in ("simulated", "tcp-threads"):
        for _ in range(30):
            run_ranks(program, 3, backend=backend, timeout=15)


def header(**changes):
    """The bytes of a valid header, with some fields changed after packing was checked."""
    fields = {
        "kind": FrameType.EAGER,
        "source": 1,
        "destination": 0,
        "length": 4,
        "size_bytes": 4,
        "message": 7,
        **changes,
    }
    return memoryview(Frame(**fields).pack())


def test_frames_survive_packing():
    """Every field of a header comes back."""
    frame = Frame(
        kind=FrameType.DATA,
        source=2,
        destination=1,
        length=100,
        message=2**63,
        group=2**64 - 1,
        tag=2**64 - 2,
        size_bytes=2**40,
        offset=2**39,
    )
    assert len(frame.pack()) == HEADER_SIZE
    assert Frame.unpack(memoryview(frame.pack()), 3) == frame


@pytest.mark.parametrize(
    "changes",
    [
        {"source": 5},
        {"destination": 3},
        {"destination": 1},
        {"kind": 99},
        {"kind": 0},
        {"length": MAX_PAYLOAD + 1},
        {"length": 5},
        {"size_bytes": 2**50, "kind": FrameType.OFFER, "length": 0},
        {"kind": FrameType.DATA, "offset": 1},
        {"kind": FrameType.DATA, "length": 0},
        {"kind": FrameType.GRANT, "length": 1},
        {"length": 300_000, "size_bytes": 300_000},
    ],
    ids=str,
)
def test_malformed_headers_are_refused(changes):
    """A header that no rank of this group and version writes is refused."""
    with pytest.raises(ProtocolError):
        Frame.unpack(header(**changes), 3)


@pytest.mark.parametrize(("place", "value"), [(0, 0), (1, 0), (2, 9), (2, 0)])
def test_wrong_magic_and_version_are_refused(place, value):
    """Other bytes at the front are no frame, and another version says which."""
    data = bytearray(header())
    data[place] = value
    with pytest.raises(ProtocolError, match="version" if place == 2 else "not a frame"):
        Frame.unpack(memoryview(data), 3)
