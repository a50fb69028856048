"""allreduce of sparse tensors, such as gradients of embeddings."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.backends.cuda_streams import record_use_on_streams
from ferrodist.collectives.reduce_op import ReduceOp, check_reduction
from ferrodist.errors import UnsupportedOpError
from ferrodist.torch_backend.general_calls import ArgumentComparison, CheckedCall
from ferrodist.torch_backend.layouts import row_size
from ferrodist.torch_private.tensors import parts_of_sparse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ferrodist.backends.base import Backend
    from ferrodist.backends.interfaces import CollectiveEngine
    from ferrodist.collectives.reduce_op import Op


def sparse_allreduce(group: Backend, tensor: torch.Tensor, op: Op) -> list[CheckedCall]:
    """Sum the ranks' COO tensors in rank order, in place; returns the calls, to run one after the other."""
    if tensor.layout is not torch.sparse_coo or op is not ReduceOp.SUM:
        raise UnsupportedOpError(
            f"sparse tensors can only be summed, in layout sparse_coo, not {op} of {tensor.layout}: pass a dense tensor"
        )
    check_reduction(tensor.dtype, op)
    return _SparseSum(group, tensor).calls()


class _SparseSum:
    """The sum of one COO tensor: all ranks' indices are gathered, then their values, and each rank adds them up."""

    def __init__(self, group: Backend, tensor: torch.Tensor) -> None:
        own = tensor.data.coalesce()
        self._tensor = tensor
        self._indices = own.indices().t().contiguous()
        self._values = own.values().contiguous()
        self._gathered_indices: torch.Tensor
        described = f"{own.sparse_dim()} sparse dims of {list(own.shape)}, {own.dtype}"
        count = self._indices.shape[0]
        self._comparison = ArgumentComparison(group, "allreduce", "sparse tensors", described, count=count)

    def calls(self) -> list[CheckedCall]:
        """The calls, to run one after the other."""
        op = CollectiveOp(kind=CollectiveKind.ALLREDUCE, source=self._tensor, timeout=0)
        steps = [
            CheckedCall(op=op, results=[self._tensor], run=run, finish=self._record_use)
            for run in (self._gather_indices, self._gather_values)
        ]
        return [self._comparison.call, *(self._comparison.guard(step) for step in steps)]

    def _gather_indices(self, engine: CollectiveEngine, timeout: float, sequence: int) -> None:
        self._gathered_indices = self._gather(self._indices, engine, timeout, sequence)

    def _gather_values(self, engine: CollectiveEngine, timeout: float, sequence: int) -> None:
        values = self._gather(self._values, engine, timeout, sequence)
        with self._like_tensor():
            self._add_up(self._gathered_indices, values)

    def _gather(self, rows: torch.Tensor, engine: CollectiveEngine, timeout: float, sequence: int) -> torch.Tensor:
        counts = [count * row_size(rows) for count in self._comparison.counts]
        with self._like_tensor():
            out = rows.new_empty(sum(self._comparison.counts), *rows.shape[1:])
        step = CollectiveOp(
            kind=CollectiveKind.ALL_GATHER,
            source=rows.view(-1),
            out=out.view(-1),
            counts=counts,
            dim=0,
            timeout=timeout,
        )
        engine.run(step, sequence)
        return out

    def _add_up(self, indices: torch.Tensor, values: torch.Tensor) -> None:
        tensor, counts = self._tensor, self._comparison.counts
        total: torch.Tensor | None = None
        for positions, elements in zip(torch.split(indices, counts), torch.split(values, counts), strict=True):
            each = torch.sparse_coo_tensor(positions.t(), elements, tensor.shape, check_invariants=False)
            total = (each if total is None else total + each).coalesce()
        assert total is not None
        tensor.copy_(total)

    @contextlib.contextmanager
    def _like_tensor(self) -> Iterator[None]:
        # Calls run in inference mode, and the tensor may be used outside of it.
        with torch.inference_mode(self._tensor.is_inference()), torch.no_grad():
            yield

    def _record_use(self) -> None:
        for part in parts_of_sparse(self._tensor):  # made in another stream
            record_use_on_streams(part)
