"""Tensors from rank to rank by the short way and by the long one, which meet in all combinations."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

import ferrodist as fd
from ferrodist.backends.mailbox import EAGER_LIMIT
from ferrodist.backends.native import is_native_available
from ferrodist.backends.native.binding import _DTYPES, compiled
from ferrodist.backends.tags import Channel, channel_tag
from ferrodist.collectives.reduce_op import DTYPES
from ferrodist.collectives.tensor_protocol import TensorHeader, unclaimed_tensors
from ferrodist.testing import run_ranks

pytestmark = pytest.mark.skipif(
    not is_native_available(), reason="this installation was built without the native engine"
)

_LARGE = EAGER_LIMIT // 4 + 1000  # elements that are sent once they are asked for
_WAYS = list(itertools.product(("short", "long"), repeat=2))


class _State(threading.local):
    """What this rank's calls of the short way must do."""

    must_end = False


_state = _State()


class _Watched:
    """The compiled module, whose point-to-point calls may have to end there."""

    def __getattr__(self, name):
        function = getattr(compiled, name)

        def call(*arguments):
            result = function(*arguments)
            has_ended = result is not None and not hasattr(result, "interruption")
            assert has_ended or not _state.must_end, f"{name} has left a call to the long way"
            return result

        return call


@pytest.fixture(autouse=True)
def _watched(monkeypatch):
    monkeypatch.setattr("ferrodist.collectives.p2p.compiled", _Watched())


@contextmanager
def _way(group, way):
    """Have this rank go one way only: a short one that can't be gone to its end is an error."""
    path = group.fast_path
    assert path.p2p is not None
    if way == "long":
        group.fast_path = path._replace(p2p=None)
    _state.must_end = way == "short"
    try:
        yield
    finally:
        group.fast_path = path
        _state.must_end = False


def _tensors():
    yield torch.tensor(2.5)
    yield torch.empty(0)
    yield torch.empty(0, 3, dtype=torch.int16)
    yield torch.arange(5)
    yield torch.arange(24, dtype=torch.float64).view(2, 3, 4)
    yield torch.zeros((1,) * 12, dtype=torch.bool)
    yield torch.arange(6000.0).bfloat16()
    yield torch.arange(float(_LARGE)).view(-1, 2)
    for dtype in (torch.float16, torch.int8, torch.uint8, torch.int32):
        yield torch.ones(3, dtype=dtype)


def test_header_dtype_indices_match_the_engine():
    """A header names the dtype by the same index on the fast and the general path."""
    assert DTYPES == _DTYPES


@pytest.mark.parametrize(("sends", "receives"), _WAYS)
@pytest.mark.parametrize("backend", ["native-threads", "native"])
def test_fast_and_general_paths_interoperate(backend, sends, receives):
    """A tensor of any shape sent on one path is received on the other, from a rank and from any."""

    def program(group):
        with _way(group, sends if group.rank == 0 else receives):
            for tensor in _tensors():
                if group.rank == 0:
                    for _ in range(5):
                        fd.send(tensor, 1, tag=2**56 - 1)
                    continue
                into = torch.full_like(tensor, 1)
                assert fd.recv_into(into, 0, tag=2**56 - 1) == 0
                assert torch.equal(into, tensor)
                into = torch.full_like(tensor, 1)
                assert fd.recv_into(into, fd.ANY_SOURCE, tag=2**56 - 1, timeout=30) == 0
                assert torch.equal(into, tensor)
                for shape, dtype in (
                    (None, None),
                    (tensor.shape, tensor.dtype),
                    (list(tensor.shape), None),
                ):
                    found, source = fd.recv(shape, dtype, fd.ANY_SOURCE, tag=2**56 - 1, return_source=True)
                    assert (found.dtype, source) == (tensor.dtype, 0)
                    assert torch.equal(found, tensor)
        fd.barrier()

    run_ranks(program, 2, backend=backend, timeout=60)


@pytest.mark.parametrize(("first", "second"), _WAYS)
def test_sendrecv_rings_on_mixed_paths(first, second):
    """A ring of sendrecv completes whichever paths its ranks take, and small tensors take the fast one."""

    def program(group):
        right, left = (group.rank + 1) % 3, (group.rank - 1) % 3
        with _way(group, first if group.rank else second):
            for i in range(20):
                mine = torch.full((4,), group.rank + 10.0 * i)
                theirs, source = fd.sendrecv(mine, right, (4,), left, tag=i, return_source=(True, 1)[i % 2])
                assert source == left
                assert torch.equal(theirs, torch.full((4,), left + 10.0 * i))
            assert fd.sendrecv(torch.ones(2), right, None, fd.ANY_SOURCE).tolist() == [1.0, 1.0]
        large = torch.full((_LARGE,), float(group.rank))
        assert torch.equal(fd.sendrecv(large, right, None, left), torch.full((_LARGE,), float(left)))

    run_ranks(program, 3, backend="native-threads", timeout=60)


@pytest.mark.parametrize("way", ["short", "long"])
def test_tensors_that_are_not_plain_take_the_general_path(way):
    """Non-contiguous tensors, those that need a gradient and those with lazy bits arrive with their values."""

    def program(group):
        whole = torch.arange(12.0).view(3, 4)
        odd = [whole.t(), whole[:, 1], whole.clone().requires_grad_(), torch.nn.Parameter(whole)]
        odd += [
            torch.empty(3, 0, 2),
            whole.expand(2, 3, 4),
            torch.tensor([1 + 2j]).conj(),
            torch.tensor([1 + 2j]).conj().imag,
            torch.arange(6.0).to(torch.complex64).mul(1j).conj().imag.as_strided((6,), (1,)),
        ]
        for tag, tensor in enumerate(odd):
            if group.rank == 0:
                fd.send(tensor, 1, tag=tag)
                fd.send(tensor, 1, tag=tag)
                continue
            with _way(group, way if tensor.numel() and not tensor.is_complex() else "long"):
                into = torch.empty(tensor.shape, dtype=tensor.dtype)
                fd.recv_into(into, 0, tag=tag)
            assert torch.equal(into, tensor)
            into = torch.empty(tensor.shape[::-1], dtype=tensor.dtype).permute(*reversed(range(tensor.dim())))
            fd.recv_into(into, 0, tag=tag)
            assert torch.equal(into, tensor)
        fd.barrier()

    run_ranks(program, 2, backend="native-threads", timeout=60)


def test_receiving_bumps_the_version():
    """A tensor saved for backward and received into since makes that backward raise."""

    def program(group):
        if group.rank == 0:
            fd.send(torch.ones(3), 1)
            return
        saved = torch.zeros(3)
        product = (torch.ones(3, requires_grad=True) * saved).sum()
        with _way(group, "short"):
            fd.recv_into(saved, 0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()

    run_ranks(program, 2, backend="native-threads", timeout=60)


@pytest.mark.parametrize("sends", ["short", "long"])
@pytest.mark.parametrize("count", [6, _LARGE])
def test_mismatches_raise_and_the_group_goes_on(sends, count):
    """A receive of another shape or dtype raises as on the general path; then the next message arrives."""

    def program(group):
        if group.rank == 0:
            with _way(group, sends):
                for _ in range(4):
                    fd.send(torch.arange(float(count)), 1)
                fd.send(torch.ones(2), 1)
                fd.send(torch.ones(3), 1)
            fd.barrier()
            return
        wrong = (
            lambda: fd.recv((4,), torch.float32, 0),
            lambda: fd.recv(None, torch.bfloat16, 0),
            lambda: fd.recv_into(torch.empty(count, dtype=torch.int32), 0),
            lambda: fd.sendrecv(torch.ones(2), 0, (1,), 0),
        )
        for call in wrong:
            with pytest.raises(
                fd.SizeMismatchError, match=rf"sent a torch.float32 tensor of shape \({count},\)"
            ) as caught:
                call()
            assert caught.value.ranks == (0,)
        with _way(group, "short"):
            assert fd.recv((2,), None, 0).tolist() == [1.0] * 2
            assert fd.recv(None, torch.float32, 0).tolist() == [1.0] * 3
        fd.barrier()

    run_ranks(program, 2, backend="native-threads", timeout=60)


def test_wrong_arguments_raise_before_anything_is_sent():
    """Arguments that the general path refuses are refused on the fast path; waiting messages stay."""

    def program(group):
        if group.rank == 0:
            fd.send(torch.ones(2), 1)
            fd.barrier()
            return
        fd.barrier()
        ok = torch.ones(2)
        for error, call in (
            (ValueError, lambda: fd.send(ok, 0, tag=2**56)),
            (ValueError, lambda: fd.send(ok, 0, timeout=-1.0)),
            (ValueError, lambda: fd.send(torch.ones((1,) * 13), 0)),
            (fd.SelfSendError, lambda: fd.send(ok, 1)),
            (fd.InvalidRankError, lambda: fd.send(ok, -1)),
            (fd.InvalidRankError, lambda: fd.recv_into(ok, True)),
            (TypeError, lambda: fd.recv_into([1.0, 2.0], 0)),
            (TypeError, lambda: fd.recv((2.0,), None, 0)),
            (ValueError, lambda: fd.recv((-2,), None, 0)),
            (TypeError, lambda: fd.recv(None, torch.uint16, 0)),
            (ValueError, lambda: fd.recv(None, None, 0, tag=True)),
            (TypeError, lambda: fd.sendrecv(ok, 0, (2.0,), 0)),
            (fd.InvalidRankError, lambda: fd.sendrecv(ok, 0, None, 7)),
        ):
            with pytest.raises(error):
                call()
        assert fd.recv(None, None, 0).tolist() == [1.0, 1.0]

    run_ranks(program, 2, backend="native-threads", timeout=60)


def test_timeouts_are_not_counted_twice():
    """A call that starts on the fast path times out once, after its time; a retry gets the message."""

    def program(group):
        if group.rank == 1:
            into = torch.zeros(_LARGE)
            calls = (
                (lambda: fd.recv_into(into, 0, timeout=0.4), (0,), "recv_into from rank 0"),
                (lambda: fd.recv(None, None, 0, timeout=0.4), (0,), "recv from rank 0"),
                (lambda: fd.recv(None, None, fd.ANY_SOURCE, timeout=0.4), (0,), "recv from any rank"),
                (lambda: fd.send(into, 0, tag=1, timeout=0.4), (0,), "send to rank 0"),
                (lambda: fd.sendrecv(torch.ones(1), 0, None, 0, tag=2, timeout=0.4), (0,), "sendrecv with rank 0"),
            )
            for call, ranks, what in calls:
                started = time.monotonic()
                with pytest.raises(fd.DistributedTimeoutError, match=rf"{what}.*: not done after 0\.[4-7]") as caught:
                    call()
                assert caught.value.ranks in (ranks, ())
                assert 0.4 <= time.monotonic() - started < 0.4 + 0.75 * 0.4 + 0.5
            assert not into.any()
            fd.barrier()
            fd.recv_into(into, 0)
            assert into.all()
            fd.send(into * 2, 0, tag=1)
        else:
            fd.barrier()
            fd.send(torch.ones(_LARGE), 1)
            with _way(group, "short"):
                assert fd.recv((1,), None, 1, tag=2).tolist() == [1.0]
            assert (fd.recv(None, None, 1, tag=1, timeout=20) == 2).all()  # not what was given up before
        fd.barrier()

    run_ranks(program, 2, backend="native-threads", timeout=60)


@pytest.mark.parametrize("way", ["short", "long"])
def test_unclaimed_tensors_go_to_the_next_receive(way):
    """A receive whose payload is late leaves the header to the next receive, on either path."""
    number = 10_000

    def program(group):
        if group.rank == 0:
            head = TensorHeader(number, torch.float32, (3,)).pack()
            group.send(head, 1, tag=channel_tag(Channel.TENSOR, 5))
            fd.barrier()
            group.send(torch.ones(3).numpy().tobytes(), 1, tag=channel_tag(Channel.TENSOR_PAYLOAD, number))
            fd.send(torch.zeros(3), 1, tag=5)
        else:
            into = torch.zeros(3)
            with pytest.raises(fd.DistributedTimeoutError):
                fd.recv_into(into, 0, tag=5, timeout=0.05)
            assert unclaimed_tensors(group).may_contain(5)
            assert not unclaimed_tensors(group).may_contain(6)
            fd.barrier()
            if way == "short":
                assert fd.recv_into(into, 0, tag=5) == 0
            else:
                fd.batch([fd.Recv(into, 0, tag=5)])
            assert into.all()
            assert not unclaimed_tensors(group).may_contain(5)
            with _way(group, "short"):
                fd.recv_into(into, 0, tag=5)
            assert not into.any()

    run_ranks(program, 2, backend="native-threads", timeout=60)


def test_threads_share_a_group():
    """Each of many threads receives the tensors of its tag in order, on either path."""
    num_threads, rounds = 6, 40

    def program(group):
        peer = 1 - group.rank

        def converse(tag):
            for i in range(rounds):
                count = (1, 0, 3000, EAGER_LIMIT // 4 + 1)[(i + tag) % 4]
                mine = torch.full((count,), i + 1000.0 * group.rank)
                if (i + tag) % 3:
                    theirs = fd.sendrecv(mine, peer, None, peer, tag=tag, group=group)
                else:
                    theirs = torch.empty(count)
                    fd.batch([fd.Send(mine, peer, tag), fd.Recv(theirs, peer, tag)], group=group)
                assert torch.equal(theirs, torch.full((count,), i + 1000.0 * peer))

        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(converse, range(num_threads)))
        group.barrier()

    run_ranks(program, 2, backend="native", timeout=80)


@pytest.mark.parametrize(("sends", "receives"), _WAYS)
def test_subgroups_have_a_fast_path(sends, receives):
    """Ranks are those of the sub-group, whose messages don't mix with the group's."""

    def program(group):
        if group.rank == 1:
            fd.barrier()
            return
        sub = fd.new_group([2, 0])
        inner = fd.new_group([1, 0], group=sub)
        for here in (sub, inner, sub):
            with _way(here, sends if here.rank == 0 else receives):
                if here.rank == 0:
                    for value in range(4):
                        fd.send(torch.full((3,), float(value)), 1, group=here)
                    fd.send(torch.ones(_LARGE), 1, group=here)
                    continue
                into = torch.empty(3)
                for value in range(4):
                    assert fd.recv_into(into, fd.ANY_SOURCE if value % 2 else 0, group=here) == 0
                    assert into.tolist() == [float(value)] * 3
                assert fd.recv(None, None, 0, group=here).all()
        if group.rank == 0:
            fd.send(torch.tensor(1), 2)
            fd.send(torch.tensor(2), 0, group=sub)
        else:
            assert fd.recv(None, None, 1, group=sub) == 2
            assert fd.recv(None, None, 0) == 1
        fd.barrier()

    run_ranks(program, 3, backend="native-threads", timeout=60)


@pytest.mark.parametrize("end", ["leave", "abort", "close here"])
def test_the_end_of_a_subgroup_ends_its_waits(end):
    """Waits on the fast path in a sub-group that ends raise, and so do later calls; the group goes on."""

    def program(group):
        sub = fd.new_group([1, 0])
        fd.barrier(group=sub)
        ended = fd.GroupAbortedError if end == "abort" else fd.PeerLostError
        if group.rank == 0:
            if end == "close here":
                threading.Timer(0.2, sub.close).start()
                ended = fd.GroupClosedError
            for call in (
                lambda: fd.recv(None, None, 0, group=sub, timeout=30),
                lambda: fd.recv_into(torch.ones(2), fd.ANY_SOURCE, group=sub, timeout=30),
                lambda: fd.send(torch.ones(_LARGE), 0, group=sub, timeout=30),
                lambda: fd.send(torch.ones(1), 0, group=sub, timeout=30),
            ):
                started = time.monotonic()
                with pytest.raises(ended):
                    call()
                assert time.monotonic() - started < 10
        elif end != "close here":
            threading.Event().wait(0.2)
            sub.close() if end == "leave" else sub.abort("no more")
        fd.barrier()
        fd.sendrecv(torch.ones(2), 1 - group.rank, None, 1 - group.rank)

    run_ranks(program, 2, backend="native-threads", timeout=60)


def test_a_rank_that_left_a_subgroup_before_it_was_made_here():
    """A rank that makes a sub-group does not wait for one that has left it already."""
    left = threading.Event()

    def program(group):
        if group.rank == 1:
            fd.new_group([0, 1]).close()
            group.send(b"x", 0)
            left.set()
        else:
            assert left.wait(20)
            group.recv(bytearray(1), 1)
            sub = fd.new_group([0, 1])
            with pytest.raises(fd.PeerLostError):
                fd.recv(None, None, 1, group=sub, timeout=20)
        fd.barrier()

    run_ranks(program, 2, backend="native-threads", timeout=60)


def test_a_leaving_rank_ends_waits_for_it():
    """Messages that a rank sent before it closed the group arrive; then receives raise."""

    def program(group):
        if group.rank == 1:
            fd.send(torch.ones(3), 0)
            group.close(timeout=0.5)
            return
        assert fd.recv(None, None, 1).all()
        for source in (1, fd.ANY_SOURCE):
            with pytest.raises(fd.PeerLostError, match="left"):
                fd.recv(None, None, source, timeout=20)
        with pytest.raises(fd.PeerLostError, match="left"):
            fd.send(torch.ones(1), 1)

    run_ranks(program, 2, backend="native-threads", timeout=60)


def test_sends_beyond_the_ring_capacity():
    """Sends far ahead of the receiver are neither lost nor reordered."""
    num_tensors = 3000

    def program(group):
        for i in range(num_tensors):
            if group.rank == 0:
                fd.send(torch.full((500,), float(i)), 1)
            else:
                assert fd.recv((500,), torch.float32, 0)[0] == i
        fd.barrier()

    run_ranks(program, 2, backend="native", timeout=60)


def _filled(value, count=3):
    return torch.full((count,), float(value))


@pytest.mark.parametrize(("first", "second"), _WAYS)
def test_batches_on_mixed_paths(first, second):
    """Sends and receives of all sizes at once, from all to all; those with one peer and tag stay in order."""
    counts = (3, 0, 2000, 9000, _LARGE, 1)

    def program(group):
        others = [rank for rank in range(3) if rank != group.rank]
        with _way(group, first if group.rank else second):
            for _ in range(3):
                into = {peer: [_filled(-1, count) for count in counts] for peer in others}
                operations = [fd.Recv(each, peer, 7) for peer in others for each in into[peer]]
                operations += [fd.Send(_filled(group.rank + i, n), p, 7) for i, n in enumerate(counts) for p in others]
                peers = [peer for peer in others for _ in counts] + [peer for _ in counts for peer in others]
                assert fd.batch(tuple(operations), timeout=30) == peers
                for peer in others:
                    for i, found in enumerate(into[peer]):
                        assert torch.equal(found, _filled(peer + i, counts[i]))
            right, left = (group.rank + 1) % 3, (group.rank - 1) % 3
            into = _filled(0)
            assert fd.batch([fd.Send(_filled(group.rank), right), fd.Recv(into, fd.ANY_SOURCE)]) == [right, left]
            assert torch.equal(into, _filled(left))

    run_ranks(program, 3, backend="native-threads", timeout=60)


@pytest.mark.parametrize("count", [3, _LARGE])
@pytest.mark.parametrize("way", ["short", "long"])
def test_a_batch_with_a_wrong_tensor_cancels_the_rest(way, count):
    """The error is that of the general path; other receives and sends are cancelled, and the group goes on."""

    def program(group):
        if group.rank == 0:
            fd.send(_filled(1, count), 1)
            fd.barrier()
            with pytest.raises(fd.DistributedTimeoutError):
                fd.recv_into(_filled(0, _LARGE), 1, tag=2, timeout=0.1)
            fd.send(_filled(2), 1, tag=1)
            return
        kept = group.fast_path
        group.fast_path = kept if way == "short" else kept._replace(p2p=None)
        found = _filled(0)
        with pytest.raises(fd.SizeMismatchError, match=rf"shape \({count},\)") as caught:
            fd.batch([fd.Recv(torch.zeros(count + 1), 0), fd.Recv(found, 0, 1), fd.Send(_filled(1, _LARGE), 0, 2)])
        assert caught.value.ranks == (0,)
        group.fast_path = kept
        fd.barrier()
        with _way(group, "short"):
            fd.recv_into(found, 0, tag=1)
        assert torch.equal(found, _filled(2))

    run_ranks(program, 2, backend="native-threads", timeout=20)


def test_a_batch_goes_on_from_where_the_fast_path_has_left_it(monkeypatch):
    """What is done before a warning is due is not done again; the general path finishes the rest, in order."""
    monkeypatch.setattr("ferrodist.deadline.LONG_WAIT_SECONDS", 0.1)

    def program(group):
        if group.rank == 0:
            fd.send(_filled(1), 1)
            fd.send(_filled(2, 5), 1, tag=1)
            time.sleep(0.4)
            fd.send(_filled(3), 1)
            fd.send(_filled(4, _LARGE), 1)
            assert torch.equal(fd.recv(None, None, 1), _filled(5))
            assert torch.equal(fd.recv(None, None, 1), _filled(6, _LARGE))
            return
        into = [_filled(0), _filled(0), _filled(0, _LARGE), _filled(0, 5)]
        operations = [fd.Recv(into[0], 0), fd.Recv(into[1], fd.ANY_SOURCE), fd.Recv(into[2], 0), fd.Recv(into[3], 0, 1)]
        operations += [fd.Send(_filled(5), 0), fd.Send(_filled(6, _LARGE), 0)]
        assert fd.batch(operations, timeout=30) == [0] * 6
        assert [each[-1].item() for each in into] == [1, 3, 4, 2]

    run_ranks(program, 2, backend="native-threads", timeout=60)


@pytest.mark.parametrize("way", ["short", "long"])
def test_a_batch_that_is_late_or_left(way):
    """A batch names whom it waits for when its time is up, and raises soon when that rank leaves."""
    told = threading.Event()

    def program(group):
        if group.rank == 1:
            fd.barrier()
            assert torch.equal(
                fd.recv(None, None, 0, tag=3), _filled(1)
            )  # the small send was not cancelled: it had gone
            assert torch.equal(fd.recv(None, None, 0, tag=4), _filled(2))
            group.close()
            told.set()
            return
        path = group.fast_path
        group.fast_path = path if way == "short" else path._replace(p2p=None)

        def operations():
            return [fd.Send(_filled(1), 1, 3), fd.Recv(_filled(0), 1), fd.Send(_filled(3, _LARGE), 1, 4)]

        began = time.monotonic()
        with pytest.raises(fd.DistributedTimeoutError, match=r"send to rank 1, recv from rank 1, .*0\.\d+ s of 0.2 s"):
            fd.batch(operations(), timeout=0.2)
        assert 0.2 <= time.monotonic() - began < 5
        fd.send(_filled(2), 1, tag=4)
        fd.barrier()
        began = time.monotonic()
        with pytest.raises(fd.PeerLostError) as caught:
            fd.batch(operations(), timeout=60)
        assert caught.value.ranks == (1,)
        assert time.monotonic() - began < 10
        assert told.wait(20)

    run_ranks(program, 2, backend="native-threads", timeout=60)


class _TermError(Exception):
    """What a handler of a signal raises."""


@pytest.mark.parametrize("form", ["batch", "sendrecv", "send", "recv"])
def test_an_interrupted_call_leaves_nothing_half_done(form):
    """A signal handler's exception leaves the call; what it had not sent is withdrawn, what had come is kept."""

    def program(group):
        if group.rank == 0:
            fd.barrier()
            large = _filled(1, _LARGE)
            calls = {
                "batch": lambda: fd.batch([fd.Recv(_filled(0), 1), fd.Send(large, 1), fd.Recv(_filled(0), 1)]),
                "sendrecv": lambda: fd.sendrecv(large, 1, None, 1, tag=2),
                "send": lambda: fd.send(large, 1),
                "recv": lambda: fd.recv(None, None, 1, tag=2),
            }

            def leave(_number, _frame):
                raise _TermError

            signal.signal(signal.SIGALRM, leave)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(_TermError):
                calls[form]()
            fd.send(_filled(2), 1, tag=2 if form == "sendrecv" else 0)
            fd.barrier()
            if form != "batch":
                assert torch.equal(fd.recv(None, None, 1), _filled(3))
            return
        fd.send(_filled(3), 0)
        fd.barrier()
        fd.barrier()
        assert torch.equal(fd.recv(None, None, 0, tag=2 if form == "sendrecv" else 0, timeout=20), _filled(2))

    run_ranks(program, 2, backend="native", timeout=20)
