"""Calls as other ranks see them: nothing of one is lost on the way, and its text says what was called."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch

import ferrodist as fd
from ferrodist.backends.signature import MAX_PAYLOAD, RECORD_BYTES, CollectiveSignature
from ferrodist.collectives.reduce_op import DTYPES, PremultipliedSum, ReduceOp
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend

_CALLS: dict[str, tuple[int, Callable[[Backend, torch.Tensor], object]]] = {
    "allreduce": (1, lambda group, x: fd.allreduce(x)),
    "all_gather": (1, lambda group, x: fd.all_gather(x)),
    "all_gather_uneven": (1, lambda group, x: fd.all_gather_uneven(x)),
    "all_gather_uneven of many": (2, lambda group, x: fd.all_gather_uneven(x.repeat(100))),
    "gather": (1, lambda group, x: fd.gather(x)),
    "gather of many": (2, lambda group, x: fd.gather(x.repeat(100))),
    "scatter": (1, lambda group, x: fd.scatter(x if group.rank == 0 else None)),
    "scatter of many": (2, lambda group, x: fd.scatter(x.repeat(100) if group.rank == 0 else None)),
    "reduce_scatter": (1, lambda group, x: fd.reduce_scatter(x)),
    "all_to_all_single_uneven": (1, lambda group, x: fd.all_to_all_single_uneven(x, [1, 2], [1 + group.rank] * 2)),
    "all_gather_object": (2, lambda group, x: fd.all_gather_object("x" * 1000 * group.rank)),
    "broadcast_object": (2, lambda group, x: fd.broadcast_object("x" * 1000)),
    "gather_object": (2, lambda group, x: fd.gather_object("x" * 1000 * group.rank)),
    "scatter_object": (2, lambda group, x: fd.scatter_object(["x", "x" * 1000] if group.rank == 0 else None)),
}


@pytest.mark.parametrize("name", _CALLS)
def test_number_of_agreements(name: str) -> None:
    """Ranks agree once, and once more where they learn sizes of many elements; backward knows them, and agrees once."""
    expected, call = _CALLS[name]

    def on_rank(group: Backend) -> list[int]:
        places = [group.verifier.reserve()]
        result = call(group, torch.ones(3, requires_grad=True))
        places.append(group.verifier.reserve())
        if isinstance(result, torch.Tensor):
            result.sum().backward()
            places.append(group.verifier.reserve())
        return [after - before - 1 for before, after in itertools.pairwise(places)]

    for taken in run_ranks(on_rank, 2):
        assert taken == [expected, 1][: len(taken)]


@pytest.mark.parametrize("op", [*ReduceOp, PremultipliedSum(2.0)], ids=str)
def test_signatures_round_trip(op: ReduceOp | PremultipliedSum) -> None:
    """Every operation, dtype, root and dim, the longest names and the largest payload survive encoding."""
    for dtype in DTYPES:
        call = CollectiveSignature(
            operation="all_to_all_single_uneven",
            dtype=str(dtype).removeprefix("torch."),
            reduce_op=str(op),
            root=2**31 - 1,
            dim=63,
            count=2**62,
            sequence=2**63,
            payload=bytes(range(MAX_PAYLOAD)),
        )
        assert len(call.encode()) == RECORD_BYTES
        assert CollectiveSignature.decode(call.encode()) == call
    assert CollectiveSignature.decode(CollectiveSignature(operation="barrier").encode()) == CollectiveSignature(
        operation="barrier"
    )


@pytest.mark.parametrize("field", ["operation", "dtype", "reduce_op"])
def test_names_that_are_too_long_fail(field: str) -> None:
    """A name that does not fit fails an assertion, and is not truncated."""
    with pytest.raises(AssertionError, match="would be cut"):
        CollectiveSignature(**{"operation": "allreduce", field: "x" * 25}).encode()


def test_text_of_a_signature() -> None:
    """Root and dim are shown where a call has one."""
    assert str(CollectiveSignature(operation="barrier")) == "barrier()"
    assert (
        str(CollectiveSignature(operation="all_gather", dtype="int8", count=6, dim=0)) == "all_gather(int8[6], dim=0)"
    )
    call = CollectiveSignature(operation="reduce", dtype="float32", count=4, reduce_op="premultiplied_sum", root=1)
    assert str(call) == "reduce(premultiplied_sum, float32[4], root=1)"
