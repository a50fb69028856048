"""What is passed to torch's groups: sizes that differ, memory that is shared, tensors of any layout."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from ferrodist.errors import CollectiveMismatchError, GroupAbortedError
from ferrodist.testing import run_ranks
from ferrodist.torch_backend.process_group import FerrodistProcessGroup

SMALL, LARGE = 1, 100_000
"""Factors of sizes: what travels with a call, and what ranks read from each other."""


def run(program, size=2, **kwargs):
    """Run ``program(process_group)`` on each rank."""
    return run_ranks(lambda group: program(FerrodistProcessGroup(group)), size, timeout=60, **kwargs)


def started(options):
    """Options of an asynchronous call."""
    options.asyncOp = True
    return options


BACKENDS = ["simulated", "native-threads"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("factor", [SMALL, LARGE])
@pytest.mark.parametrize("is_async", [False, True])
def test_lists_of_other_sizes(backend, factor, is_async):
    """Raise on all ranks where ranks disagree, before anything is written, and the group goes on."""

    def program(made):
        sizes = [[2, 3], [3, 2]][made.rank()]
        parts = [torch.full((factor * size,), -1.0) for size in sizes]
        own = torch.ones(factor * sizes[made.rank()])
        gathering = AllgatherOptions()
        gathering.asyncOp = is_async
        with pytest.raises(
            CollectiveMismatchError,
            match=rf"sizes of the lists of all_gather: rank 0 has \[{2 * factor}, {3 * factor}\]",
        ):
            made.allgather([parts], [own], gathering).wait()
        folding = dist.ReduceScatterOptions()
        folding.asyncOp = is_async
        with pytest.raises(CollectiveMismatchError, match="sizes of the lists of reduce_scatter"):
            made.reduce_scatter([own], [parts], folding).wait()
        assert all((part == -1).all() for part in parts)
        assert (own == 1).all()
        made.allreduce(own).wait()
        return own[0].item()

    with_equal_inputs = run(program, backend=backend)
    assert with_equal_inputs == [2.0, 2.0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("factor", [SMALL, LARGE])
def test_lists_of_uneven_sizes(backend, factor):
    """Are gathered and folded where ranks agree."""

    def program(made):
        sizes = [factor, 2 * factor, 0]
        outputs = [torch.empty(size) for size in sizes]
        own = torch.full((sizes[made.rank()],), float(made.rank()))
        made.allgather([outputs], [own]).wait()
        inputs = [torch.full((size,), float(place)) for place, size in enumerate(sizes)]
        folded = torch.empty(sizes[made.rank()])
        made.reduce_scatter([folded], [inputs]).wait()
        return [each.unique().tolist() for each in outputs], folded.unique().tolist()

    gathered = [[0.0], [1.0], []]
    assert run(program, 3, backend=backend) == [(gathered, [0.0]), (gathered, [3.0]), (gathered, [])]


@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes_are_not_taken_for_data(backend):
    """A rank whose list is even is told of the others' whatever its elements are; no rank gets numbers of theirs."""

    def program(made):
        sizes = [[3, 3], [2, 4]][made.rank()]
        outputs = [torch.full((size,), -1) for size in sizes]
        with pytest.raises(CollectiveMismatchError, match=r"rank 1 called all_gather's sizes\(\)"):
            made.allgather([outputs], [torch.ones(sizes[made.rank()], dtype=torch.int64)]).wait()
        return torch.cat(outputs).unique().tolist()

    assert run(program, backend=backend) == [[-1], [-1]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("asynchronous", [[], [0], [0, 1]], ids=str)
@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (torch.ones(4), r"rank 0 has 1 sparse dims of \[3\], torch.float32; rank 1 has 1 sparse dims of \[4\]"),
        (torch.ones(3, 3), r"rank 0 has 1 sparse dims of \[3\], torch.float32; rank 1 has 2 sparse dims of \[3, 3\]"),
        (torch.ones(3).double(), r"rank 1 has 1 sparse dims of \[3\], torch.float64"),
    ],
    ids=["shape", "dims", "dtype"],
)
def test_sparse_tensors_that_differ(backend, asynchronous, other, expected):
    """Raise on all ranks, also where only some wait at once, and the group goes on."""

    def program(made):
        options = dist.AllreduceOptions()
        options.asyncOp = made.rank() in asynchronous
        tensor = (other if made.rank() else torch.ones(3)).to_sparse()
        with pytest.raises(CollectiveMismatchError, match=f"sparse tensors of allreduce: .*{expected}"):
            made.allreduce([tensor], options).wait()
        after = torch.ones(1)
        made.allreduce(after).wait()
        return after.item()

    assert run(program, backend=backend) == [2.0, 2.0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("asynchronous", [[], [0, 1]], ids=str)
def test_sparse_among_dense_tensors(backend, asynchronous):
    """Is another call, and both ranks say so."""

    def program(made):
        options = dist.AllreduceOptions()
        options.asyncOp = made.rank() in asynchronous
        tensor = torch.ones(3).to_sparse() if made.rank() else torch.ones(3)
        with pytest.raises(CollectiveMismatchError, match=r"rank 1 called allreduce's sizes\(\)"):
            made.allreduce([tensor], options).wait()

    run(program, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_default_device(backend):
    """Is for what a program makes, not for what calls need on their way."""

    def program(made):
        outputs = [torch.empty(size) for size in (1, 2)]
        tensor, columns = torch.ones(1 + made.rank()), torch.ones(3, 2).t()
        sparse = torch.ones(3).to_sparse()
        with torch.device("meta"):
            made.allgather([outputs], [tensor]).wait()
            made.allreduce(columns).wait()
            made.allreduce(sparse).wait()
            made.barrier().wait()
        return torch.cat(outputs).tolist(), columns.unique().tolist(), sparse.to_dense().tolist()

    assert run(program, backend=backend) == [([1.0] * 3, [2.0], [2.0] * 3)] * 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_that_fails_on_the_way(backend, is_async):
    """Ends the group: its place is not used, and the others would wait for it until their time is over."""

    def program(made):
        options = dist.BroadcastOptions()
        options.asyncOp = is_async
        # More than any machine has, when it is made contiguous.
        tensor = torch.ones(4) if made.rank() else torch.ones(1).expand(1 << 45)
        start = time.monotonic()
        kind, what = (GroupAbortedError, "broadcast failed with RuntimeError") if made.rank() else (RuntimeError, None)
        with pytest.raises(kind, match=what):
            made.broadcast([tensor], options).wait()
        with pytest.raises(GroupAbortedError, match="broadcast failed with RuntimeError"):
            made.allreduce(torch.ones(1)).wait()
        return time.monotonic() - start < 10

    assert run(program, backend=backend) == [True, True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_other_sizes(backend):
    """One rank's rows may be another's several: elements are exchanged; with splits on some ranks only, too."""

    def program(made):
        own = torch.arange(8.0) + 10 * made.rank()
        out = torch.empty(8)
        splits = [4, 4] if made.rank() else []
        made.all_to_all_single(
            out if made.rank() else out.view(4, 2), own if made.rank() else own.view(4, 2), splits, splits
        ).wait()
        return out.tolist()

    assert run(program, backend=backend) == [
        [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0],
        [4.0, 5.0, 6.0, 7.0, 14.0, 15.0, 16.0, 17.0],
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parts", [[[1, 1], [1, 5]], [[2, 2], [2, 2]], [[0, 0], [0, 0]]], ids=str)
@pytest.mark.parametrize("factor", [SMALL, LARGE])
def test_parts_that_are_even_on_some_ranks(backend, parts, factor):
    """What goes from each rank to each: ranks don't know of the others' whether they are all of a size."""

    def program(made):
        rank = made.rank()
        sends = [factor * size for size in parts[rank]]
        receives = [factor * row[rank] for row in parts]
        own = torch.cat([torch.full((size,), 10.0 * rank + to) for to, size in enumerate(sends)])
        out = torch.empty(sum(receives))
        made.all_to_all_single(out, own, receives, sends).wait()
        return [part.unique().tolist() for part in torch.split(out, receives)]

    expected = [[[10.0 * rank + to] if parts[rank][to] else [] for rank in range(2)] for to in range(2)]
    assert run(program, backend=backend) == expected


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("factor", [SMALL, LARGE])
def test_inputs_that_are_outputs(backend, factor):
    """Are read before they are written, wherever they lie in them."""

    def program(made):
        rank = made.rank()
        exchanged = torch.cat([torch.full((factor,), 10.0 * rank + to) for to in range(2)])
        made.all_to_all_single(exchanged, exchanged, [], []).wait()
        gathered = torch.full((2 * factor,), float(rank + 1))
        made.all_gather_single(gathered, gathered[factor * (1 - rank) :][:factor]).wait()
        shifted = torch.full((2 * factor + 1,), float(rank + 1))
        made.all_gather_single(shifted[1:], shifted[:factor]).wait()
        folded = torch.cat([torch.full((factor,), 10.0 * rank + to) for to in range(2)])
        made.reduce_scatter_single(folded[factor * (1 - rank) :][:factor], folded).wait()
        return [
            exchanged[::factor].tolist(),
            gathered[::factor].tolist(),
            shifted[1::factor].tolist(),
            folded[::factor].tolist(),
        ]

    assert run(program, backend=backend) == [
        [[0.0, 10.0], [1.0, 2.0], [1.0, 2.0], [0.0, 10.0]],
        [[1.0, 11.0], [1.0, 2.0], [1.0, 2.0], [12.0, 11.0]],
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_output_in_another_rank_s_part_of_the_input(backend):
    """Others read that while this rank's result is there already."""

    def program(made):
        rank = made.rank()
        for shift in (1, 2, 1, 2):
            whole = torch.cat([torch.full((LARGE,), 10.0 * rank + to) for to in range(3)])
            output = whole[LARGE * ((rank + shift) % 3) :][:LARGE]
            made.reduce_scatter_single(output, whole).wait()
            assert (output == 30.0 + 3 * rank).all()

    run(program, 3, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_s_own_part_may_be_used_in_place(backend):
    """Of the whole that is gathered or folded."""

    def program(made):
        rank = made.rank()
        whole = torch.full((2 * LARGE,), -1.0)
        own = whole[rank * LARGE :][:LARGE].fill_(float(rank + 1))
        made.all_gather_single(whole, own).wait()
        gathered = whole[::LARGE].tolist()
        made.reduce_scatter_single(own, whole).wait()
        return gathered, whole[::LARGE].tolist()

    assert run(program, backend=backend) == [([1.0, 2.0], [2.0, 2.0]), ([1.0, 2.0], [1.0, 4.0])]


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_read_in_their_turn(backend):
    """When what was started before has ended: what that writes is what the next one reads, of any layout."""

    def program(made):
        columns = torch.ones(3, 4).t()
        outputs = [torch.empty(4, 3) for _ in range(2)]
        folded = torch.empty(4, 3)
        joined = torch.empty(8, 3)
        works = []
        for _ in range(20):
            works += [
                made.allreduce([columns], started(dist.AllreduceOptions())),
                made.allgather([outputs], [columns], started(AllgatherOptions())),
                made.reduce_scatter([folded], [[columns, columns]], started(dist.ReduceScatterOptions())),
                made.all_gather_single(joined, columns, started(AllgatherOptions())),
            ]
            expected = 2.0 ** (len(works) // 4)
        for work in works:
            work.wait()
        for each in (columns, *outputs, joined):
            assert (each == expected).all()
        assert (folded == 2 * expected).all()

    run(program, backend=backend)


def test_outputs_whose_elements_share_memory():
    """Are refused, before other ranks are asked for anything."""

    def program(made):
        shared = torch.zeros(1).expand(4)
        for call in (
            lambda: made.allreduce(shared),
            lambda: made.broadcast(shared, 1 - made.rank()),
            lambda: made.all_gather_single(shared, torch.ones(2)),
            lambda: made.allgather([shared, torch.ones(4)], torch.ones(4)),
            lambda: made.recv([shared], 1 - made.rank()),
        ):
            with pytest.raises(ValueError, match="has elements that share memory"):
                call()
        read = torch.ones(1).expand(4)
        out = torch.empty(8)
        made.all_gather_single(out, read).wait()
        assert (out == 1).all()

    run(program)


@pytest.mark.filterwarnings("ignore:.*quantized tensor.*:UserWarning")
def test_quantized_tensors():
    """Are refused where their scale would have to travel, too; the group goes on."""

    def program(made):
        tensors = [torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.quint8) for _ in range(3)]
        for call in (
            lambda: made.allreduce(tensors[0]),
            lambda: made.broadcast(tensors[0].view(2, 2).t(), 0),
            lambda: made.allgather(tensors[1:], tensors[0]),
        ):
            with pytest.raises(TypeError, match="collectives carry"):
                call().wait()
        after = torch.ones(1)
        made.allreduce(after).wait()
        return after.item()

    assert run(program) == [2.0, 2.0]


def test_single_elements_of_any_stride():
    """Are contiguous whatever their stride, also of types that are moved as bytes."""

    def program(made):
        own = torch.zeros(1, 4, dtype=torch.uint16)[:, made.rank()].fill_(made.rank() + 5)
        out = torch.zeros(2, dtype=torch.uint16)
        made.all_gather_single(out, own).wait()
        given = torch.zeros(1, 4, dtype=torch.uint16)[:, 0].fill_(made.rank() + 5)
        made.broadcast(given, 1).wait()
        return out.tolist(), given.tolist()

    assert run(program) == [([5, 6], [6])] * 2


def test_arguments_by_name():
    """As torch's own groups take them."""

    def program(made):
        own = torch.ones(2)
        made.allreduce(tensors=[own], opts=dist.AllreduceOptions()).wait()
        made.broadcast(tensors=own, root=0).wait()
        out = [torch.empty(2), torch.empty(2)]
        made.allgather(output_tensors=[out], input_tensors=[own], timeout=timedelta(seconds=5)).wait()
        with pytest.raises(TypeError, match="allreduce takes tensors: tensors is missing"):
            made.allreduce()
        with pytest.raises(TypeError, match="allreduce takes tensors: tensors is missing"):
            made.allreduce(opts=dist.AllreduceOptions())
        return own.tolist(), out[1].tolist()

    assert run(program) == [([2.0, 2.0], [2.0, 2.0])] * 2


def test_calls_are_counted_alike():
    """Whichever way they go, and however their tensors lie."""

    def program(made):
        own = torch.ones(4, 4)
        for tensor in (own, own if made.rank() else own.t()):
            made.allreduce(tensor).wait()
            made.allreduce([tensor], started(dist.AllreduceOptions())).wait()
        made.barrier().wait()
        return made._get_sequence_number_for_group()

    assert run(program) == [5, 5]
