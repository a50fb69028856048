"""allreduce of sparse tensors, such as gradients of embeddings."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

import torch

from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.backends.cuda_streams import record_use_on_streams
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.errors import UnsupportedOpError
from ferrodist.torch_backend.collectives import ArgumentComparison, CheckedCall
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
    own = tensor.data.coalesce()
    indices, values = own.indices().t().contiguous(), own.values().contiguous()
    found: list[torch.Tensor] = []
    described = f"{own.sparse_dim()} sparse dims of {list(own.shape)}, {own.dtype}"
    comparison = ArgumentComparison(group, "allreduce", "sparse tensors", described, count=indices.shape[0])

    @contextlib.contextmanager
    def like_tensor() -> Iterator[None]:
        # Calls run in inference mode, and the tensor may be used outside of it.
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            yield

    def gather(rows: torch.Tensor, engine: CollectiveEngine, timeout: float, sequence: int) -> None:
        counts = [count * row_size(rows) for count in comparison.counts]
        with like_tensor():
            out = rows.new_empty(sum(comparison.counts), *rows.shape[1:])
        step = CollectiveOp(
            kind=CollectiveKind.ALL_GATHER,
            source=rows.view(-1),
            out=out.view(-1),
            counts=counts,
            dim=0,
            timeout=timeout,
        )
        engine.run(step, sequence)
        found.append(out)

    def gather_values(engine: CollectiveEngine, timeout: float, sequence: int) -> None:
        gather(values, engine, timeout, sequence)
        with like_tensor():
            add_up()

    def add_up() -> None:
        total: torch.Tensor | None = None
        for positions, elements in zip(*(torch.split(rows, comparison.counts) for rows in found), strict=True):
            each = torch.sparse_coo_tensor(positions.t(), elements, tensor.shape, check_invariants=False)
            total = (each if total is None else total + each).coalesce()
        assert total is not None
        tensor.copy_(total)

    def record_use() -> None:  # the tensor's parts were made in another stream
        for part in parts_of_sparse(tensor):
            record_use_on_streams(part)

    call = CollectiveOp(kind=CollectiveKind.ALLREDUCE, source=tensor, timeout=0)
    steps = [
        CheckedCall(op=call, results=[tensor], run=run, finish=record_use)
        for run in (partial(gather, indices), gather_values)
    ]
    return [comparison.call, *(comparison.guard(step) for step in steps)]
