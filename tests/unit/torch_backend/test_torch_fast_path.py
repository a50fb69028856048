"""Every call of torch's by the fast path and by the general one, which meet in all combinations."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from ferrodist.backends.native import is_native_available
from ferrodist.backends.subgroup import SubBackend
from ferrodist.errors import CollectiveMismatchError, SizeMismatchError
from ferrodist.testing import run_ranks
from ferrodist.torch_backend import callback_levels, messages
from ferrodist.torch_backend.process_group import FerrodistProcessGroup

pytestmark = pytest.mark.skipif(
    not is_native_available(), reason="this installation was built without the native engine"
)

_COUNTS = (1, 3, 50, 7000)  # elements of a part: inline, in slots, in segments


@pytest.fixture
def fast_path_only(monkeypatch):
    """Make the general path an error."""

    def refuse(_call):
        raise AssertionError("a plain call has taken the general path")

    monkeypatch.setattr(callback_levels, "execute", refuse)
    monkeypatch.setattr(callback_levels, "submit", refuse)


_mode = {"asyncOp": False}


@pytest.fixture(params=[False, True], ids=["blocking", "started"])
def mode(request, monkeypatch):
    """Calls that block, and calls that are started; of all ranks, which are threads."""
    monkeypatch.setitem(_mode, "asyncOp", request.param)


def _plain(tensor):
    return tensor


def _strided(tensor):
    """The same elements in memory that is not contiguous."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def _parameter(tensor):
    """The same elements in a tensor that needs gradients, which torch's functions ignore."""
    return torch.nn.Parameter(tensor.clone())


def _part(source, to, count):
    return torch.arange(count, dtype=torch.float32) + 1000 * source + 10_000 * to


def _empty(given, count):
    return given(torch.full((count,), -1.0))


def _options(kind, **fields):
    """Options of a call in the test's mode."""
    made = kind()
    made.asyncOp = _mode["asyncOp"]
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def _check_calls(made, given, count):
    """Make each call with tensors that ``given`` makes; compare with what torch computes."""
    rank, size = made.rank(), made.size()
    everyone = range(size)
    mine = given(_part(rank, 0, count))
    own = [_part(source, 0, count) for source in everyone]
    total = torch.stack(own).sum(0)

    def parts(of=count):
        return [_empty(given, of) for _ in everyone]

    tensor = given(own[rank].clone())
    made.allreduce([tensor], _options(dist.AllreduceOptions)).wait()
    assert torch.equal(tensor, total)
    for root in everyone:
        tensor = given(own[rank].clone())
        made.reduce([tensor], _options(dist.ReduceOptions, rootRank=root)).wait()
        assert torch.equal(tensor, total if rank == root else own[rank])
        tensor = given(own[rank].clone())
        made.broadcast([tensor], _options(dist.BroadcastOptions, rootRank=root)).wait()
        assert torch.equal(tensor, own[root])
        outputs, whole = parts(), _empty(given, size * count)
        options = _options(dist.GatherOptions, rootRank=root)
        made.gather([outputs] if rank == root else [], [mine], options).wait()
        made.gather_single(whole, mine, options).wait()
        if rank == root:
            assert torch.equal(torch.cat(outputs), torch.cat(own))
            assert torch.equal(whole, torch.cat(own))
        inputs = [given(_part(root, to, count)) for to in everyone]
        options = _options(dist.ScatterOptions, rootRank=root)
        for single in (False, True):
            tensor = _empty(given, count)
            if single:
                made.scatter_single(tensor, given(torch.cat(inputs).detach()), options).wait()
            else:
                made.scatter([tensor], [inputs] if rank == root else [], options).wait()
            assert torch.equal(tensor, _part(root, rank, count))
    outputs, whole = parts(), _empty(given, size * count)
    made.allgather([outputs], [mine], _options(AllgatherOptions)).wait()
    made.all_gather_single(whole, mine, _options(AllgatherOptions)).wait()
    assert torch.equal(torch.cat(outputs), torch.cat(own))
    assert torch.equal(whole, torch.cat(own))

    inputs = [given(_part(rank, to, count)) for to in everyone]
    folded = torch.stack([_part(source, rank, count) for source in everyone]).sum(0)
    for whole in (None, given(torch.cat(inputs).detach())):
        tensor = _empty(given, count)
        if whole is None:
            made.reduce_scatter([tensor], [inputs], _options(dist.ReduceScatterOptions)).wait()
        else:
            made.reduce_scatter_single(tensor, whole, _options(dist.ReduceScatterOptions)).wait()
        assert torch.equal(tensor, folded)

    arrived = [_part(source, rank, count) for source in everyone]
    outputs, whole = parts(), _empty(given, size * count)
    made.alltoall(outputs, inputs, _options(dist.AllToAllOptions)).wait()
    assert torch.equal(torch.cat(outputs), torch.cat(arrived))
    made.all_to_all_single(whole, given(torch.cat(inputs).detach()), [], [], _options(dist.AllToAllOptions)).wait()
    assert torch.equal(whole, torch.cat(arrived))
    _check_uneven_exchanges(made, given, count)


def _check_uneven_exchanges(made, given, count):
    rank, everyone = made.rank(), range(made.size())
    rows = [[count * ((source + to) % 2) + to for to in everyone] for source in everyone]
    sent = [_part(rank, to, 2 * rows[rank][to]) for to in everyone]
    arrived = [_part(source, rank, 2 * rows[source][rank]) for source in everyone]
    outputs = [_empty(given, part.numel()) for part in arrived]
    made.alltoall(outputs, [given(part) for part in sent], _options(dist.AllToAllOptions)).wait()
    for found, expected in zip(outputs, arrived, strict=True):
        assert torch.equal(found, expected)
    whole = given(torch.full((sum(rows[source][rank] for source in everyone), 2), -1.0))
    received = [rows[source][rank] for source in everyone]
    # Rank 0 has rows of one element: ranks compare elements.
    if rank == 0:
        whole = given(torch.full((2 * sum(received),), -1.0))
        received = [2 * each for each in received]
    source = given(torch.cat(sent).view(-1, 2))
    made.all_to_all_single(whole, source, received, rows[rank], _options(dist.AllToAllOptions)).wait()
    assert torch.equal(whole.flatten(), torch.cat(arrived))


def _run(program, size=2, backend="native-threads"):
    return run_ranks(lambda group: program(FerrodistProcessGroup(group)), size, backend=backend, timeout=60)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.usefixtures("fast_path_only", "mode")
def test_plain_calls_take_the_fast_path(size):
    """Also with tensors that need gradients."""

    def program(made):
        made.group.barrier()  # opens the engine
        for count in _COUNTS:
            for given in (_plain, _parameter):
                _check_calls(made, given, count)

    _run(program, size)


@pytest.mark.parametrize("backend", ["native-threads", "gloo-threads", "native"])
@pytest.mark.usefixtures("mode")
def test_both_paths_meet(backend):
    """Ranks whose tensors are strided take the general path, and meet those that take the fast one."""

    def program(made):
        for odd in (0, 1):
            given = _strided if made.rank() % 2 == odd else _plain
            for count in _COUNTS:
                _check_calls(made, given, count)

    _run(program, 2, backend)


@pytest.mark.usefixtures("mode")
def test_tensors_that_overlap():
    """The input is read before an output in the same memory is written; lists are written in their order."""

    def program(made):
        rank = made.rank()
        memory = torch.arange(6.0) + 100 * rank
        made.all_gather_single(memory[:4], memory[1:3], _options(AllgatherOptions)).wait()
        assert memory[:4].tolist() == [1, 2, 101, 102]
        memory = torch.arange(6.0) + 100 * rank
        made.all_gather_single(memory[:4], memory[2 * rank : 2 * rank + 2], _options(AllgatherOptions)).wait()
        assert memory[:4].tolist() == [0, 1, 102, 103]
        memory = torch.arange(6.0) + 100 * rank
        made.allgather([[memory[:2], memory[2:4]]], [memory[1:3]], _options(AllgatherOptions)).wait()
        assert memory[:4].tolist() == [1, 2, 101, 102]
        memory = torch.arange(6.0) + 100 * rank
        made.all_to_all_single(memory[:4], memory[2:], [], [], _options(dist.AllToAllOptions)).wait()
        assert memory[:4].tolist() == [[2, 3, 102, 103], [4, 5, 104, 105]][rank]
        memory = torch.arange(4.0) + 100 * rank
        made.alltoall([memory[:2], memory[2:]], [memory[2:], memory[:2]], _options(dist.AllToAllOptions)).wait()
        assert memory.tolist() == [[2, 3, 102, 103], [0, 1, 100, 101]][rank]
        result = torch.full((2,), -1.0)
        made.allgather([[result, result]], [torch.ones(2) * rank], _options(AllgatherOptions)).wait()
        assert result.tolist() == [1, 1]

    _run(program)


@pytest.mark.usefixtures("mode")
def test_mismatches_name_the_whole_call():
    """A rank that makes another call is told of it, and of the number of elements of the whole call."""

    def program(made):
        mine = torch.ones(3 + made.rank())
        outputs = [torch.empty_like(mine) for _ in range(2)]
        with pytest.raises(CollectiveMismatchError, match=r"0 called all_gather\(float32\[6\], dim=0\)"):
            made.allgather([outputs], [mine], _options(AllgatherOptions)).wait()

    _run(program)


@pytest.mark.parametrize(
    "call",
    [
        lambda made, tensor: made.gather([[tensor]], [tensor], _options(dist.GatherOptions)),
        lambda made, tensor: made.allgather([[tensor, tensor.double()]], [tensor], _options(AllgatherOptions)),
        lambda made, tensor: made.alltoall([tensor], [tensor], _options(dist.AllToAllOptions)),
        lambda made, tensor: made.all_to_all_single(tensor, tensor, [1, 3], [], _options(dist.AllToAllOptions)),
        lambda made, tensor: made.all_to_all_single(tensor, tensor, [1], [], _options(dist.AllToAllOptions)),
        lambda made, tensor: made.all_to_all_single(tensor.sum(), tensor, [], [], _options(dist.AllToAllOptions)),
        lambda made, tensor: made.reduce_scatter_single(tensor, tensor, _options(dist.ReduceScatterOptions)),
        lambda made, tensor: made.all_gather_single(tensor, tensor, _options(AllgatherOptions)),
        lambda made, tensor: made.scatter([tensor], [[tensor, tensor[:1]]], _options(dist.ScatterOptions)),
    ],
)
def test_wrong_arguments_are_refused_before_data_moves(call):
    """On the rank that has them, and the group goes on."""

    def program(made):
        if made.rank() == 0:
            with pytest.raises(ValueError, match=r"must|together|divides"):
                call(made, torch.ones(2))
        tensor = torch.ones(2)
        made.allreduce([tensor], _options(dist.AllreduceOptions)).wait()
        assert tensor.tolist() == [2, 2]

    _run(program)


def test_a_timeout_takes_the_general_path():
    """With the same result."""

    def program(made):
        tensor = torch.ones(2)
        made.reduce([tensor], _options(dist.ReduceOptions, timeout=timedelta(seconds=30))).wait()
        assert tensor.tolist() == ([2, 2] if made.rank() == 0 else [1, 1])

    _run(program)


def test_a_started_call_keeps_its_tensors():
    """Tensors and lists may go, and change, before the call has ended."""

    def program(made):
        options = _options(dist.AllToAllOptions, asyncOp=True)
        works, kept = [], []
        for step in range(20):
            inputs = [torch.full((50_000,), float(step + made.rank())) for _ in range(2)]
            outputs = [torch.empty(50_000) for _ in range(2)]
            works.append(made.alltoall(outputs, inputs, options))
            kept.append(list(outputs) if step % 2 else None)
            inputs.clear()
            outputs.clear()
            del inputs, outputs
        for step, (work_of_step, outputs) in enumerate(zip(works, kept, strict=True)):
            work_of_step.wait()
            if outputs:
                assert [each.unique().item() for each in outputs] == [step, step + 1]

    _run(program)


def test_works_that_nobody_waits_for():
    """Their calls end all the same, in the order of all ranks."""

    def program(made):
        tensor = torch.ones(1000)
        for _ in range(10):
            made.reduce([tensor.clone()], _options(dist.ReduceOptions, asyncOp=True))
        made.allreduce([tensor], _options(dist.AllreduceOptions)).wait()
        assert tensor.unique().item() == 2

    _run(program)


@pytest.mark.parametrize("given", [_plain, _strided, _parameter])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.complex64, torch.uint16])
def test_messages(given, dtype):
    """Tensors of any layout and type, in both orders of send and receive; an empty one; works that are done."""

    def program(made):
        rank, other = made.rank(), 1 - made.rank()
        for count in (0, 1, 3, 100_000):
            for early in (0, 1):
                mine = torch.full((count,), 1 + rank).to(dtype)
                out = torch.zeros(count).to(dtype)
                is_given = dtype is torch.float32 or given is not _parameter
                mine, out = (given(mine), given(out)) if is_given else (mine, out)
                if rank == early:
                    made.send([mine], other, 7).wait()
                    received = made.recv([out], other, 7)
                else:
                    received = made.recv([out], other, 7)
                    made.send([mine], other, 7).wait()
                received.wait()
                assert received.is_completed()
                assert received.is_success()
                assert out.to(torch.complex64).eq(1 + other).all()
        tensor = torch.zeros(1)
        sent = made.send([torch.full((1,), float(rank))], other, 8)
        received = made.recv_anysource([tensor], 8)
        received.wait()
        sent.wait()
        assert received._source_rank() == other
        assert tensor.item() == other

    _run(program)


def test_small_messages_make_no_request(monkeypatch):
    """A small message that can be sent, or has come, is moved by the call itself; order, sizes and errors are kept.

    A call makes a request when another thread moves messages just then, so a few of them do.
    """
    num_rounds = 10
    state, starts = threading.local(), messages.start_receive

    def start_receive(*arguments):
        state.num_requests = getattr(state, "num_requests", 0) + 1
        return starts(*arguments)

    monkeypatch.setattr(messages, "start_receive", start_receive)

    def exchange(here, peer, rank, count):
        """Send three messages each way, and receive them when they have come."""
        sent = [here.send([torch.full((count,), float(10 * rank + i))], peer, 7) for i in range(3)]
        here.barrier(_options(dist.BarrierOptions)).wait()
        outs = [_parameter(torch.zeros(count)), torch.zeros(count), torch.zeros(count)]
        received = [here.recv([outs[0]], peer, 7), here.recv_anysource([outs[1]], 7)]
        received.append(here.recv([outs[2]], peer, 7))
        assert [work._source_rank() for work in received] == [peer] * 3
        assert [work.result()[0] is out for work, out in zip(received, outs, strict=True)] == [True] * 3
        assert all(work.wait(timedelta(seconds=10)) and work.is_success() for work in (*sent, *received))
        return [out[-1].item() for out in outs]

    def program(made):
        rank, other, group = made.rank(), 1 - made.rank(), made.group
        sub = FerrodistProcessGroup(SubBackend(group, [1, 0], name="sub", label="sub"))
        for here, peer in ((made, other), (sub, 1 - sub.rank())):
            for count in (1, 3, 4096):
                state.num_requests = 0
                for _ in range(num_rounds):
                    assert exchange(here, peer, rank, count) == [10.0 * other + i for i in range(3)]
                assert state.num_requests < num_rounds, "small messages that had come were received by requests"
        early = [torch.zeros(1), torch.zeros(1)]
        works = [made.recv([early[0]], other, 3), made.recv([early[1]], other, 3)]  # nothing has come
        made.barrier(_options(dist.BarrierOptions)).wait()
        for value in (1.0, 2.0):
            made.send([torch.tensor([value])], other, 3)
        for each in works:
            each.wait()
        assert [tensor.item() for tensor in early] == [1.0, 2.0]
        made.send([torch.ones(2)], other, 4)
        made.barrier(_options(dist.BarrierOptions)).wait()
        with pytest.raises(SizeMismatchError):
            made.recv([torch.ones(3)], other, 4).wait()
        out = torch.zeros(2)
        made.recv([out], other, 4).wait()  # it stays
        assert out.tolist() == [1.0, 1.0]

    _run(program)


def test_a_message_keeps_its_tensor():
    """A send that has not been received holds the memory that it is to send."""

    def program(made):
        tensors = [torch.full((300_000,), float(step)) for step in range(4)]
        if made.rank() == 0:
            works = [made.send([tensor], 1, 0) for tensor in tensors]
            tensors.clear()
            made.barrier(_options(dist.BarrierOptions)).wait()
            for sent in works:
                sent.wait()
        else:
            made.barrier(_options(dist.BarrierOptions)).wait()
            for step in range(4):
                out = torch.empty(300_000)
                made.recv([out], 0, 0).wait()
                assert out.unique().item() == step

    _run(program)


@pytest.mark.parametrize("backend", ["native-threads", "native"])
@pytest.mark.parametrize("count", [3, 5000, 40_000, 400_000])
def test_lists_meet_single_tensors(backend, count):
    """One rank exchanges lists, another rows of one tensor: small parts, and parts in slots or read in place."""

    def program(made):
        rank, everyone = made.rank(), range(made.size())
        options = _options(dist.AllToAllOptions)
        for turn in range(6):
            rows = [[count + source + 2 * to for to in everyone] for source in everyone]
            sent = [_part(rank + turn, to, rows[rank][to]) for to in everyone]
            arrived = [_part(source + turn, rank, rows[source][rank]) for source in everyone]
            if (rank + turn) % 3 == 0:
                whole = torch.empty(sum(len(each) for each in arrived))
                received = [len(each) for each in arrived]
                made.all_to_all_single(whole, torch.cat(sent), received, rows[rank], options).wait()
                outputs = whole.split(received)
            else:
                outputs = [torch.empty_like(each) for each in arrived]
                made.alltoall(outputs, sent, options).wait()
            for found, expected in zip(outputs, arrived, strict=True):
                assert torch.equal(found, expected)

    _run(program, 3, backend)


_CHANGES = {
    "data": lambda tensor: setattr(tensor, "data", torch.full_like(tensor, 9)),
    "set_": lambda tensor: tensor.set_(),
    "half": lambda tensor: setattr(tensor, "data", tensor.data.half()),
}


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
def test_tensors_that_get_other_memory(change):
    """A started call or message goes on with the memory that its tensors had when it was started."""

    def program(made):
        rank, other = made.rank(), 1 - made.rank()
        options = _options(dist.AllreduceOptions, asyncOp=True)
        count = 2_000_000
        tensor = torch.full((count,), 1.0 + rank)
        kept = tensor.data
        if rank == 1:
            time.sleep(0.05)  # so that rank 0's changes come first
        work_of_call = made.allreduce([tensor], options)
        change(tensor)
        torch.full((count,), 5.0)  # in memory that was freed
        work_of_call.wait()
        assert kept.unique().item() == 3

        mine, parts = torch.full((count,), float(rank)), [torch.empty(count) for _ in range(2)]
        views = [each.data for each in parts]
        work_of_call = made.allgather([parts], [mine], _options(AllgatherOptions, asyncOp=True))
        change(parts[1])
        change(mine)
        torch.full((count,), 5.0)
        work_of_call.wait()
        assert [view.unique().item() for view in views] == [0, 1]

        sent, got = torch.full((count,), float(rank)), torch.empty(count)
        view = got.data
        works = [made.send([sent], other, 0), made.recv([got], other, 0)]
        change(sent)
        change(got)
        torch.full((count,), 5.0)
        for each in works:
            each.wait()
        assert view.unique().item() == other

    _run(program)


def test_messages_that_are_under_way_hold_their_storage():
    """Its size can't be changed, which would free what the engine reads and writes."""

    def program(made):
        rank, other = made.rank(), 1 - made.rank()
        if rank == 0:
            sent = torch.ones(2_000_000)
            sending = made.send([sent], other, 0)
            with pytest.raises(RuntimeError, match="not resizable"):
                sent.untyped_storage().resize_(0)
            made.group.barrier()
            sending.wait()
        else:
            made.group.barrier()
            made.recv([torch.empty(2_000_000)], other, 0).wait()

    _run(program)


def test_works_of_messages_are_their_own():
    """Whether a message had come when it was asked for or not: results, source, an object for each."""

    def program(made):
        rank, other = made.rank(), 1 - made.rank()
        for comes_first in (False, True):
            tensors = [torch.zeros(1), torch.zeros(1)]
            sends = []
            if rank == 0 and comes_first:
                sends = [made.send([torch.ones(1)], 1, 5) for _ in range(2)]
            made.group.barrier()
            if rank == 1:
                works = {made.recv([tensor], other, 5): tensor for tensor in tensors}
                made.group.barrier()
            else:
                made.group.barrier()
                if not comes_first:
                    sends = [made.send([torch.ones(1)], 1, 5) for _ in range(2)]
                works = dict.fromkeys(sends)
            assert len(works) == 2
            for each, tensor in works.items():
                each.wait()
                if rank == 1:
                    assert each.source_rank() == 0
                    assert each.result()[0] is tensor
                    assert each.get_future().value()[0] is tensor
                    assert tensor.item() == 1

    _run(program)


@pytest.mark.parametrize("size", [2, 3, 30])
@pytest.mark.usefixtures("fast_path_only", "mode")
def test_large_lists_are_not_copied(size):
    """Their tensors are written and read where they are; with 30 ranks a record has no room for the addresses."""

    def program(made):
        made.group.barrier()
        count, rank = (200_000 if size < 30 else 12_000), made.rank()
        outputs = [torch.empty(count) for _ in range(size)]
        made.allgather([outputs], [torch.full((count,), float(rank))], _options(AllgatherOptions)).wait()
        assert [each.unique().item() for each in outputs] == list(range(size))
        inputs = [torch.full((count,), 10.0 + each) for each in range(size)] if rank == 1 else []
        part = torch.empty(count)
        made.scatter([part], [inputs] if rank == 1 else [], _options(dist.ScatterOptions, rootRank=1)).wait()
        assert part.unique().item() == 10 + rank
        for each in outputs:
            each.fill_(-1)
        made.gather([outputs] if rank == 1 else [], [part], _options(dist.GatherOptions, rootRank=1)).wait()
        expected = [10.0 + each for each in range(size)] if rank == 1 else [-1] * size
        assert [each.unique().item() for each in outputs] == expected

    _run(program, size)


@pytest.mark.parametrize("count", [2, 100_000])
@pytest.mark.usefixtures("mode")
def test_outputs_that_overlap_are_written_in_order(count):
    """Of one tensor twice the last rank's elements stay."""

    def program(made):
        result = torch.full((count,), -1.0)
        made.allgather([[result, result]], [torch.ones(count) * made.rank()], _options(AllgatherOptions)).wait()
        assert result.unique().item() == 1

    _run(program)
