"""What torch's groups refuse, on the rank that asks for it and before the others are asked for anything."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.distributed as dist

import ferrodist as fd
from ferrodist.errors import UnsupportedOpError
from ferrodist.testing import run_ranks
from ferrodist.torch_backend.process_group import FerrodistProcessGroup

two, three, four = torch.zeros(2), torch.zeros(3), torch.zeros(4)
doubles = torch.zeros(4, dtype=torch.float64)
sparse = torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # these are a prototype
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.strided)
rows = torch.ones(2, 2)

SIZES = {
    "alltoall, no tensors": (
        lambda made: made.alltoall([], []),
        "inputs must be one tensor for each of 2 ranks, not 0",
    ),
    "allgather, own output": (
        lambda made: made.allgather([[three, three]], [two]),
        "this rank's output has 3 elements, its input 2",
    ),
    "allgather, number": (
        lambda made: made.allgather([[two, two, two]], [two]),
        "outputs must be one tensor for each of 2 ranks, not 3",
    ),
    "allgather, dtype": (
        lambda made: made.allgather([[doubles, doubles]], [four]),
        "input and output must be of one dtype",
    ),
    "all_gather_single": (
        lambda made: made.all_gather_single(three, two),
        "the output must have the input's 2 elements for each of 2 ranks, not 3",
    ),
    "all_gather_single, dtype": (lambda made: made.all_gather_single(doubles, two), "must be of one dtype"),
    "gather": (
        lambda made: made.gather([[two, three]], [two], made.rank()),
        "must have 2 elements each, as this rank's other one, not [2, 3]",
    ),
    "gather_single": (lambda made: made.gather_single(three, two, made.rank()), "for each of 2 ranks, not 3"),
    "scatter": (
        lambda made: made.scatter([two], [[two, three]], made.rank()),
        "must have 2 elements each, as this rank's other one, not [2, 3]",
    ),
    "reduce_scatter": (
        lambda made: made.reduce_scatter([two], [[three, three]]),
        "this rank's input has 3 elements, its output 2",
    ),
    "reduce_scatter_single": (
        lambda made: made.reduce_scatter_single(two, three),
        "the input must have the output's 2 elements for each of 2 ranks, not 3",
    ),
    "reduce_scatter_single, dtype": (lambda made: made.reduce_scatter_single(two, doubles), "must be of one dtype"),
    "all_to_all_single, input": (
        lambda made: made.all_to_all_single(four, three, [], []),
        "the input has 3 rows, which 2 ranks can't share evenly: pass input_split_sizes",
    ),
    "all_to_all_single, output": (lambda made: made.all_to_all_single(three, four, [], []), "the output has 3 rows"),
    "all_to_all_single, number of splits": (
        lambda made: made.all_to_all_single(four, three, [], [1, 1, 1]),
        "input_split_sizes [1, 1, 1] must be one for each of 2 ranks",
    ),
    "all_to_all_single, sum of splits": (
        lambda made: made.all_to_all_single(four, three, [], [1, 1]),
        "input_split_sizes [1, 1] must be one for each of 2 ranks, and together the 3 rows",
    ),
    "all_to_all_single, split": (
        lambda made: made.all_to_all_single(four, three, [4, 0], [-1, 4]),
        "input_split_sizes [-1, 4] must be",
    ),
    "alltoall": (lambda made: made.alltoall([two, two], [two]), "inputs must be one tensor for each of 2 ranks, not 1"),
    "recv": (lambda made: made.recv([two, two], 1 - made.rank()), "recv takes one tensor a rank, not 2"),
    "allreduce": (lambda made: made.allreduce([two, two]), "allreduce takes one tensor a rank, not 2"),
}

KINDS = {
    "broadcast, nested": (lambda made: made.broadcast([nested], 0), "tensor is a nested tensor"),
    "allgather, nested": (lambda made: made.allgather([[nested, nested]], [nested]), "tensor is a nested tensor"),
    "send, nested": (lambda made: made.send([nested], 1 - made.rank()), "tensor is a nested tensor"),
    "send, sparse": (lambda made: made.send([sparse], 1 - made.rank()), "tensor has layout torch.sparse_coo"),
    "recv, sparse": (lambda made: made.recv([sparse], 1 - made.rank()), "tensor has layout torch.sparse_coo"),
    "broadcast": (lambda made: made.broadcast(sparse, 0), "has layout torch.sparse_coo"),
    "allgather": (lambda made: made.allgather([[sparse, two]], [two]), "has layout torch.sparse_coo"),
    "allreduce, layout": (
        lambda made: made.allreduce(rows.to_sparse_csr()),
        "in layout sparse_coo, not sum of torch.sparse_csr",
    ),
    "allreduce, device": (lambda made: made.allreduce(torch.empty(2, device="meta")), "is on meta"),
    "send, device": (
        lambda made: made.send([torch.empty(2, device="meta")], 1 - made.rank()),
        "has no engine for tensors on meta",
    ),
    "recv, device": (
        lambda made: made.recv([torch.empty(2, device="meta")], 1 - made.rank()),
        "has no engine for tensors on meta",
    ),
}


def refuse(call, error, message):
    """Both ranks are refused it; what they then do together has the right result."""

    def program(group):
        made = FerrodistProcessGroup(group)
        with pytest.raises(error, match=re.escape(message)):
            call(made)
        total = torch.ones(1)
        made.allreduce(total).wait()
        return total.item()

    assert run_ranks(program, 2, timeout=60) == [2.0, 2.0]


@pytest.mark.parametrize("what", SIZES)
def test_sizes(what):
    """Of tensors, lists and splits."""
    call, message = SIZES[what]
    refuse(call, ValueError, message)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("what", KINDS)
def test_kinds_of_tensors(what):
    """Which nothing can move, or not fold so."""
    call, message = KINDS[what]
    refuse(call, UnsupportedOpError, message)


def test_reductions_of_other_types():
    """At once, also where the call does not wait."""
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = dist.ReduceOp.BAND, True
    refuse(lambda made: made.allreduce([two], options), TypeError, "band of torch.float32 is not defined")


def test_numbers_of_rows_that_are_no_integers():
    """Which of them is said, and nothing is sent."""
    splits = ([2.0, 2.0], [2, 2])
    refuse(
        lambda made: made.all_to_all_single(torch.zeros(4), four, *splits),
        TypeError,
        "output_split_sizes[0] must be an integer, not 2.0",
    )


def test_sparse_tensors_of_dtypes_without_a_sum():
    indices, values = [[0]], torch.ones(1, dtype=torch.uint16)
    tensor = torch.sparse_coo_tensor(indices, values, (2,), check_invariants=True)
    refuse(lambda made: made.allreduce([tensor]), TypeError, "not torch.uint16")


@pytest.mark.parametrize(
    "call",
    [
        lambda made, tensor: made.broadcast([tensor], 0),
        lambda made, tensor: made.all_gather_single(torch.zeros(8), tensor),
        lambda made, tensor: made.all_to_all_single(torch.zeros(4), tensor, [], []),
        lambda made, tensor: made.send([tensor], 1 - made.rank()),
        lambda made, tensor: made.recv([tensor], 1 - made.rank()),
    ],
)
def test_tensors_without_memory(call):
    """A distributed tensor of ferrodist's is refused where its address, which is 0, would be read."""

    def call_with_wrapper(made):
        mesh = fd.DeviceMesh(made.group, (2,))
        call(made, fd.distribute(torch.zeros(4), mesh, fd.Shard(0), src=None))

    refuse(call_with_wrapper, NotImplementedError, "tensor has no memory to send")
