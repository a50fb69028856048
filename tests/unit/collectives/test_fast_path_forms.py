"""Every form of a blocking collective by the short way and by the long one, which meet in all combinations."""

from __future__ import annotations

import contextlib
import importlib
import struct
import threading
import time

import pytest
import torch
from torch.utils import _python_dispatch

import ferrodist as fd
from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.backends.native import is_native_available
from ferrodist.collectives.arguments import compute_shard_sizes
from ferrodist.collectives.engines.host import host_engine_of, share_bytes
from ferrodist.testing import run_ranks

pytestmark = pytest.mark.skipif(
    not is_native_available(), reason="this installation was built without the native engine"
)

_MODULES = ("reduce", "all_gather", "gather", "all_to_all")
_ROWS = (1, 3, 40, 5000)  # inline, in slots, in segments
_LARGE = 300_000


@pytest.fixture
def short_way_only(monkeypatch):
    """Make the general path an error for calls of the public functions."""

    def refuse(_call):
        raise AssertionError("a plain call has taken the general path")

    for name in _MODULES:
        monkeypatch.setattr(importlib.import_module(f"ferrodist.collectives.{name}"), "execute", refuse)


def _strided(tensor):
    """The same elements in memory that is not contiguous, so that calls take the general path."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def _plain(tensor):
    return tensor


def _mine(rank, num_rows, columns=2, dtype=torch.float32):
    return (torch.arange(num_rows * columns) + 100 * rank).to(dtype).view(num_rows, columns)


def _check_forms(group, given, *, num_rows, **options):
    """Call each form with tensors that `given` makes, with and without ``out=``; compare with what torch computes."""
    rank, size = group.rank, group.world_size
    everyone = range(size)
    same = [_mine(each, num_rows) for each in everyone]
    total = torch.stack(same).sum(0)
    uneven = [_mine(each, num_rows + each) for each in everyone]

    def outs(like, *, is_given=True):
        return (None, torch.full_like(like, -1) if is_given else None)

    for root in everyone:
        for out in outs(total, is_given=rank == root):
            found = fd.reduce(given(same[rank]), root, out=out, group=group, **options)
            assert torch.equal(found, total if rank == root else torch.empty(0))
            assert out is None or found is out
            found = fd.gather(
                given(uneven[rank]), root, group=group, out=None if out is None else torch.cat(uneven), **options
            )
            assert torch.equal(found, torch.cat(uneven) if rank == root else torch.empty(0))
        for out in outs(total):
            mine = given(same[rank])
            found = fd.broadcast(mine, root, out=out, group=group, **options)
            assert torch.equal(found, same[root])
            assert torch.equal(mine, same[rank])
        whole = _mine(root, num_rows + size - 1)
        part = whole.split(compute_shard_sizes(whole.shape[0], size))[rank]
        for out in outs(part):
            found = fd.scatter(given(whole) if rank == root else None, root, out=out, group=group, **options)
            assert torch.equal(found, part)
    for out in outs(torch.cat(uneven)):
        assert torch.equal(
            fd.all_gather_uneven(given(uneven[rank]), out=out, group=group, **options), torch.cat(uneven)
        )
    counts = [[num_rows * ((source + to) % 2) + to for to in everyone] for source in everyone]
    sent = [_mine(source, sum(counts[source])) for source in everyone]
    received = torch.cat([sent[source].split(counts[source])[rank] for source in everyone])
    for out in outs(received):
        found = fd.all_to_all_single_uneven(
            given(sent[rank]),
            counts[rank],
            tuple(counts[source][rank] for source in everyone),
            out=out,
            group=group,
            **options,
        )
        assert torch.equal(found, received)
    for result in (None, [torch.full_like(same[rank], -1) for _ in everyone]):
        parts = [_mine(rank + to, num_rows) for to in everyone]
        found = fd.all_to_all([given(part) for part in parts], out=result, group=group, **options)
        assert isinstance(found, list)
        for source in everyone:
            assert torch.equal(found[source], _mine(source + rank, num_rows))
            assert result is None or found[source] is result[source]
    assert torch.equal(fd.allreduce(given(same[rank]), group=group, **options), total)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.usefixtures("short_way_only")
def test_plain_forms_take_the_short_way(num_ranks):
    """No form of a plain call reaches the general path: with ``out=``, a timeout or a sub-group either."""

    def program(group):
        part = fd.new_group(list(range(num_ranks)))
        for each in (group, part):
            each.barrier()  # opens the engine
            for num_rows in _ROWS:
                _check_forms(each, _plain, num_rows=num_rows)
                _check_forms(each, _plain, num_rows=num_rows, timeout=30)
                _check_forms(each, _plain, num_rows=num_rows, timeout=29.5)

    run_ranks(program, num_ranks, backend="native-threads")


@pytest.mark.parametrize("backend", ["native-threads", "gloo-threads", "native"])
def test_forms_meet_on_both_ways(backend):
    """Ranks whose tensors are strided take the general path, and meet those that take the short one."""

    def program(group):
        for odd in (0, 1):
            given = _strided if group.rank % 2 == odd else _plain
            for num_rows in _ROWS:
                _check_forms(group, given, num_rows=num_rows)

    run_ranks(program, 2, backend=backend)


def test_uneven_parts_of_no_rows():
    """Parts without rows, on one rank or on all, in rows of no elements too."""

    def program(group):
        rank = group.rank
        for columns in (0, 3):
            for num_rows in (0, 2):
                mine = torch.ones(num_rows * rank, columns)
                assert fd.all_gather_uneven(mine).shape == (num_rows, columns)
                assert fd.gather(mine).shape == ((num_rows, columns) if rank == 0 else (0,))
                sent, received = ([0, num_rows], [0, 0]) if rank == 0 else ([0, 0], [num_rows, 0])
                rows = torch.ones(sum(sent), columns)
                assert fd.all_to_all_single_uneven(rows, sent, received).shape == (sum(received), columns)
            assert fd.scatter(torch.ones(1, columns) if rank == 0 else None).shape == (1 - rank, columns)

    run_ranks(program, 2, backend="native-threads")


def test_results_that_do_not_fit():
    """A rank whose ``out`` has the wrong shape takes part, raises, and the group goes on."""

    def program(group):
        rank = group.rank
        calls = (
            lambda out: fd.all_gather_uneven(torch.ones(rank + 1), out=out),
            lambda out: fd.scatter(torch.ones(3) if rank == 0 else None, out=out),
            lambda out: fd.gather(torch.ones(rank + 1), 1, out=out),
        )
        for call in calls:
            if rank == 1:
                with pytest.raises(ValueError, match=r"out has shape \(9,\)"):
                    call(torch.empty(9))
            else:
                call(None)
            fd.barrier()

    run_ranks(program, 2, backend="native-threads")


def test_out_of_a_scatter_that_overlaps():
    """The root's own part of its input may be its output; other overlaps give the right result, too."""

    def program(group):
        rank = group.rank
        whole = torch.arange(8.0)
        assert fd.scatter(whole if rank == 0 else None, out=whole[:4] if rank == 0 else None)[0] == 4.0 * rank
        shifted = torch.arange(8.0)
        found = fd.scatter(shifted if rank == 0 else None, out=shifted[2:6] if rank == 0 else None)
        assert torch.equal(found, torch.arange(4.0) + 4 * rank)

    run_ranks(program, 2, backend="native-threads")


def test_wrong_arguments():
    """Arguments that the short way does not take are refused by the general one, before anything is sent."""

    def program(group):
        rank = group.rank
        x = torch.ones(2)
        refused = (
            (TypeError, lambda: fd.allreduce(x, timeout="1")),
            (ValueError, lambda: fd.allreduce(x, timeout=-1)),
            (ValueError, lambda: fd.allreduce(x, timeout=float("nan"))),
            (TypeError, lambda: fd.reduce(x, timeout=True)),
            (fd.InvalidRankError, lambda: fd.reduce(x, 2)),
            (fd.InvalidRankError, lambda: fd.gather(x, -1)),
            (fd.InvalidRankError, lambda: fd.scatter(x, 5)),
            (TypeError, lambda: fd.reduce(x, 0, "sum")),
            (ValueError, lambda: fd.reduce(x, 1 - rank, out=x)),
            (ValueError, lambda: fd.gather(x, 1 - rank, out=x)),
            (TypeError, lambda: fd.gather(x, rank, out=torch.empty(4, dtype=torch.int32))),
            (TypeError, lambda: fd.all_gather_uneven(x, out=torch.empty(4, dtype=torch.int32))),
            (ValueError, lambda: fd.broadcast(x, out=torch.empty(3))),
            (TypeError, lambda: fd.broadcast(x, out=torch.empty(2, dtype=torch.int32))),
            (ValueError, lambda: fd.all_to_all_single_uneven(x, [1, 2], [1, 1])),
            (ValueError, lambda: fd.all_to_all_single_uneven(x, [1, 1], [1, 1, 0])),
            (ValueError, lambda: fd.all_to_all_single_uneven(x, [3, -1], [1, 1])),
            (ValueError, lambda: fd.all_to_all_single_uneven(x, [1, 1], [2**31 - 1, 2**31 - 1])),
            (TypeError, lambda: fd.all_to_all_single_uneven(x, [1.0, 1.0], [1, 1])),
            (ValueError, lambda: fd.all_to_all_single_uneven(x, [1, 1], [1, 1], out=torch.empty(3))),
            (ValueError, lambda: fd.scatter(torch.ones(2), 1 - rank)),
            (IndexError, lambda: fd.gather(x, dim=1)),
        )
        for error, call in refused:
            with pytest.raises(error):
                call()
        fd.barrier()

    run_ranks(program, 2, backend="native-threads")


def test_overlapping_outs():
    """An output that overlaps the input takes the general path, and has the right elements."""

    def program(group):
        rank = group.rank
        memory = torch.arange(4.0) + 10 * rank
        assert fd.reduce(memory[:3], out=memory[1:] if rank == 0 else None)[:3].tolist() == (
            [10, 12, 14] if rank == 0 else []
        )
        memory = torch.arange(4.0) + 10 * rank
        assert fd.broadcast(memory[:3], 1, out=memory[1:]).tolist() == [10, 11, 12]
        memory = torch.arange(3.0) + 10 * rank
        sent = [1, 2] if rank == 0 else [2, 1]
        assert fd.all_to_all_single_uneven(memory, sent, sent, out=memory).tolist() == (
            [0, 10, 11] if rank == 0 else [1, 2, 12]
        )

    run_ranks(program, 2, backend="native-threads")


def test_lists_of_tensors_that_share_memory():
    """Inputs may be one tensor; outputs that overlap inputs are right, and outputs that overlap are refused."""

    def program(group):
        rank = group.rank
        one = torch.full((3,), float(rank))
        assert torch.equal(torch.stack(fd.all_to_all((one, one))), torch.tensor([[0.0] * 3, [1.0] * 3]))
        parts = [torch.full((3,), 2.0 * rank + to) for to in range(2)]
        fd.all_to_all(parts, out=parts)
        assert [part[0].item() for part in parts] == [rank, 2.0 + rank]
        parts = [torch.full((3,), 2.0 * rank + to) for to in range(2)]
        fd.all_to_all(parts, out=parts[::-1])
        assert [part[0].item() for part in parts] == [2.0 + rank, rank]
        memory = torch.zeros(4)
        with pytest.raises(ValueError, match="share memory"):
            fd.all_to_all([one, one], out=[memory[:3], memory[1:]])
        for wrong in ([one], [one, torch.ones(2)], [one, one.int()]):
            with pytest.raises((ValueError, TypeError)):
                fd.all_to_all(wrong)
        fd.barrier()

    run_ranks(program, 2, backend="native-threads")


def test_ranks_that_disagree():
    """Different dims, roots and numbers of rows are errors on all ranks, as on the general path."""

    def wrong_dims(group):
        fd.all_gather_uneven(torch.ones((2,) * (group.rank + 1)))

    def wrong_roots(group):
        fd.scatter(torch.ones(4), group.rank)

    def wrong_destination(group):
        fd.gather(torch.ones(4), group.rank)

    def wrong_rows(group):
        fd.gather(torch.ones(2, 3 + group.rank))

    for call, words in (
        (wrong_dims, "disagree about all_gather_uneven: rank 0 joins along dim 0 of 1"),
        (wrong_roots, "disagree about a scatter: rank 0 called scatter(src=0, dim=0)"),
        (wrong_destination, "rank 0 called gather(float32[8], root=0); rank 1 called gather(float32[8], root=1)"),
        (wrong_rows, "rank 0 called gather(float32[12], root=0); rank 1 called gather(float32[16], root=0)"),
    ):

        def program(group, call=call, words=words):
            fd.barrier()
            with pytest.raises(fd.CollectiveMismatchError) as caught:
                call(group)
            assert words in str(caught.value)

        run_ranks(program, 2, backend="native-threads")


@pytest.mark.parametrize(
    "call",
    [
        lambda x: fd.allreduce(x, timeout=0.3),
        lambda x: fd.reduce(x, timeout=0.3),
        lambda x: fd.gather(x, timeout=0.3),
        lambda x: fd.all_gather_uneven(x, timeout=0.3),
        lambda x: fd.all_to_all_single_uneven(x, [2, 1], [2, 2], timeout=0.3),
        lambda x: fd.all_to_all([x, x], timeout=0.3),
    ],
)
def test_a_calls_own_timeout(call):
    """A call that is late by its own timeout says so, with that timeout and the rank."""

    def program(group):
        fd.barrier()
        if group.rank == 0:
            began = time.monotonic()
            with pytest.raises(
                fd.DistributedTimeoutError, match=r"rank 1 has not called it, after 0\.[3-9]\d* s of 0.3 s"
            ):
                call(torch.ones(3))
            return time.monotonic() - began
        time.sleep(1)
        with pytest.raises(fd.DistributedError):
            fd.barrier()
        return None

    assert run_ranks(program, 2, backend="native-threads")[0] >= 0.3


def test_wrong_counts_name_both_ranks():
    """Counts that do not match are an error that names both, with rows of several elements too."""

    def program(group):
        fd.barrier()
        other = [1, 2] if group.rank == 0 else [2, 1]
        wrong = [1, 1] if group.rank == 0 else [2, 1]
        with (
            pytest.raises(fd.SizeMismatchError, match=r"expects 1 row from rank 1 .* which sends it 2")
            if group.rank == 0
            else pytest.raises(fd.DistributedError)
        ):
            fd.all_to_all_single_uneven(torch.ones(3, 3), other, wrong)
            fd.barrier()

    run_ranks(program, 2, backend="native-threads")


def test_large_sendrecv_takes_the_short_way(monkeypatch):
    """Large tensors are exchanged without the general path, and right: to the same rank, and in a ring."""

    def refuse(*_arguments):
        raise AssertionError("a plain sendrecv has taken the general path")

    monkeypatch.setattr("ferrodist.collectives.p2p.TensorReceive", refuse)

    def program(group):
        right, left = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
        for count in (1000, 5000, 20_000, _LARGE):
            for shape in (None, (count,)):
                found, source = fd.sendrecv(
                    torch.full((count,), float(group.rank)), right, shape, left, return_source=True
                )
                assert source == left
                assert torch.equal(found, torch.full((count,), float(left)))

    for backend in ("native-threads", "native"):
        run_ranks(program, 3, backend=backend)


def test_a_sendrecv_that_has_received_goes_on_sending(monkeypatch):
    """What was received before a warning is due is kept while the general path goes on with the rest of the send."""
    monkeypatch.setattr("ferrodist.deadline.LONG_WAIT_SECONDS", 0.2)

    def program(group):
        if group.rank == 0:
            found = fd.sendrecv(torch.arange(float(_LARGE)), 1, None, 2, timeout=30)
            assert torch.equal(found, torch.ones(20_000))
        elif group.rank == 1:
            time.sleep(0.6)
            assert torch.equal(fd.recv(None, None, 0), torch.arange(float(_LARGE)))
        else:
            fd.send(torch.ones(20_000), 0)
        fd.barrier()

    run_ranks(program, 3, backend="native-threads")


def test_a_sendrecv_that_has_sent_goes_on_receiving(monkeypatch):
    """The same the other way round, and with neither done."""
    monkeypatch.setattr("ferrodist.deadline.LONG_WAIT_SECONDS", 0.2)

    def program(group):
        if group.rank == 0:
            found = fd.sendrecv(torch.arange(float(_LARGE)), 1, None, 2, timeout=30)
            assert torch.equal(found, torch.ones(20_000))
            found = fd.sendrecv(torch.arange(float(_LARGE)), 1, None, 2, timeout=30)
            assert torch.equal(found, torch.ones(_LARGE))
        elif group.rank == 1:
            assert torch.equal(fd.recv(None, None, 0), torch.arange(float(_LARGE)))
            time.sleep(0.6)
            assert torch.equal(fd.recv(None, None, 0), torch.arange(float(_LARGE)))
        else:
            time.sleep(0.6)
            fd.send(torch.ones(20_000), 0)
            time.sleep(0.6)
            fd.send(torch.ones(_LARGE), 0)
        fd.barrier()

    run_ranks(program, 3, backend="native-threads")


@pytest.mark.parametrize("count", [4, 20_000, _LARGE])
def test_sendrecv_into_a_tensor(count, monkeypatch):
    """The plain way writes into ``out``, which autograd sees; other layouts take the general path."""

    def program(group):
        right, left = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
        mine = torch.full((count,), float(group.rank))
        strided = torch.zeros(count, 2)
        assert fd.sendrecv(mine, right, None, left, out=strided[:, 1]).data_ptr() == strided[:, 1].data_ptr()
        assert torch.equal(strided, torch.tensor([0.0, left]).expand(count, 2))
        with monkeypatch.context() as patch:
            fd.barrier()
            patch.setattr("ferrodist.collectives.p2p.receive_into", None)
            target = torch.zeros(count)
            for shape in (None, (count,)):
                version = target._version
                assert fd.sendrecv(mine, right, shape, left, out=target.zero_()) is target
                assert torch.equal(target, torch.full((count,), float(left)))
                assert target._version > version + 1
            fd.barrier()

    run_ranks(program, 3, backend="native")


def test_wrong_outs_of_sendrecv_are_refused_before_anything_is_sent():
    def program(group):
        peer, mine = 1 - group.rank, torch.ones(4)
        for error, text, shape, out in (
            (TypeError, "out is torch.int64", None, torch.ones(4, dtype=torch.int64)),
            (TypeError, "out must be a torch.Tensor", None, [1.0]),
            (ValueError, r"out has shape \(4,\), and shape is \(3,\)", (3,), torch.ones(4)),
            (ValueError, "out shares memory with the tensor that is sent", None, mine),
            (ValueError, "out shares memory with the tensor that is sent", None, mine[1:]),
            (ValueError, "out has elements that share memory", None, torch.ones(1).expand(4)),
            (ValueError, "out is on meta", None, torch.ones(4, device="meta")),
            (ValueError, "at most 12 dims", None, torch.ones([1] * 12 + [4])),
        ):
            with pytest.raises((error, fd.UnsupportedOpError), match=text):
                fd.sendrecv(mine, peer, shape, peer, out=out)
        target = torch.ones(4)
        assert fd.sendrecv(torch.zeros(4), peer, None, peer, out=target).tolist() == [0.0] * 4
        with pytest.raises(fd.SizeMismatchError) if group.rank == 0 else contextlib.nullcontext():
            fd.sendrecv(torch.ones(3 + group.rank), peer, None, peer, out=torch.ones(3))
        fd.barrier()

    for backend in ("native-threads", "simulated"):
        run_ranks(program, 2, backend=backend)


def test_a_sendrecv_into_a_tensor_goes_on_on_the_general_path(monkeypatch):
    """It goes on after a warning, whichever half was done."""
    monkeypatch.setattr("ferrodist.deadline.LONG_WAIT_SECONDS", 0.2)

    def program(group):
        mine, target = torch.full((_LARGE,), float(group.rank)), torch.empty(_LARGE)
        if group.rank == 0:
            assert fd.sendrecv(mine, 1, None, 2, out=target, timeout=30) is target
            assert torch.equal(target, torch.full((_LARGE,), 2.0))
        elif group.rank == 1:
            time.sleep(0.6)
            assert fd.recv_into(target, 0) == 0
        else:
            fd.send(mine, 0)
        fd.barrier()
        if group.rank == 0:
            assert fd.sendrecv(mine, 1, None, 2, out=target.zero_(), timeout=30) is target
            assert torch.equal(target, torch.full((_LARGE,), 2.0))
        elif group.rank == 1:
            fd.recv_into(target, 0)
        else:
            time.sleep(0.6)
            fd.send(mine, 0)

    run_ranks(program, 3, backend="native-threads")


def test_a_large_sendrecv_with_a_wrong_shape():
    """A tensor of another shape is an error as in the general path; what was sent arrives."""

    def program(group):
        other = 1 - group.rank
        mine = torch.full((20_000 + group.rank,), float(group.rank))
        shape = (20_001,) if group.rank == 0 else (7,)
        if group.rank == 0:
            assert torch.equal(fd.sendrecv(mine, other, shape, other), torch.ones(20_001))
        else:
            with pytest.raises(fd.SizeMismatchError, match="20000"):
                fd.sendrecv(mine, other, shape, other)
        fd.barrier()

    run_ranks(program, 2, backend="native-threads")


def test_a_large_sendrecv_to_a_rank_that_leaves():
    """The wait for the other tensor ends soon when the receiver of this rank's tensor has left."""
    told = threading.Event()

    def program(group):
        fd.barrier()
        if group.rank == 0:
            began = time.monotonic()
            with pytest.raises(fd.PeerLostError) as caught:
                fd.sendrecv(torch.ones(_LARGE), 1, None, 2, timeout=60)
            told.set()
            assert caught.value.ranks == (1,)
            assert time.monotonic() - began < 10
        elif group.rank == 1:
            time.sleep(0.3)
            group.close()
        else:
            assert told.wait(60)

    run_ranks(program, 3, backend="native-threads")


def test_parameters_take_part_once():
    """A frozen parameter, whose results are plain tensors, is no reason to run a collective twice."""

    def program(group):
        fd.barrier()
        for value in (1.0, 10.0, 100.0):
            mine = torch.nn.Parameter(torch.full((2,), value), requires_grad=False)
            for root in (0, 1):
                found = fd.reduce(mine, root)
                assert found.tolist() == ([2 * value] * 2 if group.rank == root else [])
            assert fd.gather(mine, 1).tolist() == ([value] * 4 if group.rank == 1 else [])
            assert fd.all_gather_uneven(mine).tolist() == [value] * 4
            assert fd.scatter(mine if group.rank == 0 else None).tolist() == [value]
            assert fd.all_to_all([mine, mine])[0].tolist() == [value] * 2
            assert fd.all_to_all_single_uneven(mine, [1, 1], [1, 1]).tolist() == [value] * 2
            assert fd.broadcast(mine).tolist() == [value] * 2

    run_ranks(program, 2, backend="native-threads")


@pytest.mark.parametrize("form", ["gather", "all_gather_uneven", "scatter"])
def test_a_timeout_counts_both_meetings(form):
    """The time for which ranks wait to share their sizes counts, and the error is about the whole tensor."""
    calls = {
        "gather": lambda rank: fd.gather(torch.ones(3), timeout=1.0),
        "all_gather_uneven": lambda rank: fd.all_gather_uneven(torch.ones(3), timeout=1.0),
        "scatter": lambda rank: fd.scatter(torch.ones(5000) if rank == 0 else None, timeout=1.0),
    }

    def program(group):
        fd.barrier()
        if group.rank == 1:
            time.sleep(0.7)
            if form == "scatter":
                share_bytes(group, "scatter", struct.pack("<ii", 0, 0), 10.0)
            else:
                share_bytes(group, form, struct.pack("<qqhhiBB", 3, 1, 0, 1, 0 if form == "gather" else -1, 1, 0), 10.0)
            time.sleep(1)
            with pytest.raises(fd.DistributedError):
                fd.barrier()
            return 0.0
        began = time.monotonic()
        with pytest.raises(fd.DistributedTimeoutError, match=r"float32\[(6|5000)\]") as caught:
            calls[form](group.rank)
        assert "rank 1 has not called it" in str(caught.value)
        return time.monotonic() - began

    assert 0.9 < run_ranks(program, 2, backend="native-threads")[0] < 1.5


@pytest.mark.parametrize("count", [3, 5000])
@pytest.mark.parametrize("form", ["gather", "all_gather_uneven", "scatter"])
def test_an_exception_while_a_result_is_made(form, count, monkeypatch):
    """What a signal handler raises after the first meeting is raised; before a second one it ends the group."""

    class Interrupted(Exception):
        """As a signal handler's."""

    calls = {
        "gather": lambda x, rank: fd.gather(x),
        "all_gather_uneven": lambda x, rank: fd.all_gather_uneven(x),
        "scatter": lambda x, rank: fd.scatter(x if rank == 0 else None),
    }
    new_empty = torch.Tensor.new_empty

    def program(group):
        fd.barrier()
        x = torch.ones(count)
        if group.rank == 0:
            with pytest.raises(Interrupted):
                calls[form](x, 0)
        else:
            with contextlib.suppress(fd.DistributedError):  # it may have what it needs
                calls[form](x, 1)
        with contextlib.nullcontext() if count == 3 else pytest.raises(fd.DistributedError):
            fd.barrier()

    def interrupted(tensor, *args, **kwargs):
        if fd.default_group().rank == 0:
            raise Interrupted
        return new_empty(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "new_empty", interrupted)
    run_ranks(program, 2, backend="native-threads")


def _sized_calls(rank, given, num_bytes):
    """Calls whose ranks share sizes, of so many bytes on each rank; `given` makes their tensors."""
    tensor = given(torch.ones(num_bytes, dtype=torch.uint8))
    numbers = given(torch.ones(num_bytes // 4))
    value = "x" * (num_bytes - 2)
    return {
        "gather": lambda: fd.gather(tensor, 1),
        "all_gather_uneven": lambda: fd.all_gather_uneven(tensor),
        "gather along dim 1": lambda: fd.gather(tensor[None], dim=1),
        "gather with a gradient": lambda: fd.gather(numbers.detach().requires_grad_()),
        "scatter": lambda: fd.scatter(tensor if rank == 1 else None, 1),
        "scatter along dim 1": lambda: fd.scatter(tensor[None] if rank == 0 else None, dim=1),
        "scatter with a gradient": lambda: fd.scatter(numbers.detach().requires_grad_() if rank == 0 else None),
        "all_gather_object": lambda: fd.all_gather_object(value),
        "gather_object": lambda: fd.gather_object(value),
        "broadcast_object": lambda: fd.broadcast_object(value, 1),
        "scatter_object": lambda: fd.scatter_object([value[1:], value[: len(value) // 2]] if rank == 0 else None),
    }


def _sequence(group):
    """The number of the group's next collective, which is one, too."""
    engine = host_engine_of(group)
    sequence = engine.reserve()
    engine.run(CollectiveOp(kind=CollectiveKind.BARRIER, timeout=20.0), sequence)
    return sequence


@pytest.mark.parametrize("given", [_plain, _strided])
@pytest.mark.parametrize("backend", ["simulated", "native-threads"])
def test_few_elements_come_with_their_sizes(backend, given):
    """A gather, a scatter or objects of few bytes are one collective on any path and backend, and of many bytes two."""

    def program(group):
        room = host_engine_of(group).share_room
        found = {}
        for num_bytes in (40, 2 * room):
            for form, call in _sized_calls(group.rank, given, num_bytes).items():
                before = _sequence(group)
                call()
                found[form, num_bytes > room] = _sequence(group) - before - 1
        return found

    expected = {(form, is_large): 1 + is_large for form in _sized_calls(0, _plain, 8) for is_large in (False, True)}
    assert run_ranks(program, 2, backend=backend) == [expected, expected]


@pytest.mark.parametrize("backend", ["simulated", "native-threads"])
def test_few_and_many_elements_meet(backend):
    """Ranks with few elements and with many take the second meeting alike, and so do ranks that will not fit."""

    def program(group):
        rank = group.rank
        room = host_engine_of(group).share_room
        for given in (_plain, _strided):
            parts = [torch.arange(3), torch.arange(room)]
            assert torch.equal(fd.all_gather_uneven(given(parts[rank])), torch.cat(parts))
            assert fd.gather(given(parts[rank]), 1).numel() == (room + 3 if rank else 0)
        values = ["few", "many" * room]
        assert fd.all_gather_object(values[rank]) == values
        assert fd.gather_object(values[rank], 1) == (values if rank else None)
        with pytest.raises(fd.CollectiveMismatchError, match=r"float32\[2\], dim=0.*int32\[2\], dim=0"):
            fd.all_gather_uneven(torch.ones(1, dtype=torch.int32 if rank else torch.float32))

    run_ranks(program, 2, backend=backend)


@pytest.mark.usefixtures("short_way_only")
def test_a_mode_that_another_thread_had_does_not_close_the_fast_path(monkeypatch):
    """torch's flag for modes stays True where those of several threads have overlapped."""
    monkeypatch.setattr(_python_dispatch, "_is_in_torch_dispatch_mode", True)

    def program(group):
        group.barrier()  # opens the engine
        assert torch.equal(fd.allreduce(torch.ones(3)), torch.full((3,), 2.0))

    run_ranks(program, 2, backend="native-threads")


def test_calls_in_a_mode_take_the_general_path():
    """Of this thread: the mode sees the operators by which it prepares the tensors."""

    class Watching(_python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            seen.append(str(function))
            return function(*arguments, **keywords or {})

    seen = []

    def program(group):
        group.barrier()
        with Watching() if group.rank == 0 else contextlib.nullcontext():
            assert torch.equal(fd.allreduce(torch.ones(3)), torch.full((3,), 2.0))

    run_ranks(program, 2, backend="native-threads")
    assert "aten.view.default" in seen, seen
