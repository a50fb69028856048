"""allreduce of sparse tensors, as gradients of embeddings are."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from ferrodist.backends.cuda import record_use_on_streams
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.errors import UnsupportedOpError
from ferrodist.torch_backend.collectives import CheckedCall, SplitSizeCheck
from ferrodist.torch_backend.layouts import row_size
from ferrodist.torch_private.tensors import parts_of_sparse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ferrodist.backends.base import Backend
    from ferrodist.collectives.engines.base import CollectiveEngine
    from ferrodist.collectives.reduce_op import Op


def sparse_allreduce(group: Backend, tensor: torch.Tensor, op: Op) -> list[CheckedCall]:
    """Sum the ranks' sparse tensors in rank order, in place: one collective after the other.

    Raises:
        UnsupportedOpError: It is of another layout than COO, or ``op`` is no sum.
    """
    if tensor.layout is not torch.sparse_coo or op is not ReduceOp.SUM:
        raise UnsupportedOpError(
            f"of sparse tensors there are sums, in layout sparse_coo, not {op} of {tensor.layout}: pass a dense tensor"
        )
    own = tensor.data.coalesce()
    indices, values = own.indices().t().contiguous(), own.values().contiguous()
    found: list[torch.Tensor] = []
    said = f"{own.sparse_dim()} sparse dims of {list(own.shape)}, {own.dtype}"
    comparison = SplitSizeCheck(group, "allreduce", "sparse tensors", said, count=indices.shape[0])

    @contextlib.contextmanager
    def like_tensor() -> Iterator[None]:
        # Operations run in inference mode; what gets into the tensor is used outside of it, if the tensor is.
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            yield

    def gather(rows: torch.Tensor, engine: CollectiveEngine, timeout: float, place: int) -> None:
        counts = [count * row_size(rows) for count in comparison.counts]
        with like_tensor():
            out = rows.new_empty(sum(comparison.counts), *rows.shape[1:])
        engine.all_gather(out.view(-1), rows.view(-1), counts, dim=0, timeout=timeout, sequence=place)
        found.append(out)

    def gather_indices(engine: CollectiveEngine, timeout: float, place: int) -> None:
        gather(indices, engine, timeout, place)

    def gather_values(engine: CollectiveEngine, timeout: float, place: int) -> None:
        gather(values, engine, timeout, place)
        with like_tensor():
            add_up()

    def add_up() -> None:
        total: torch.Tensor | None = None
        for places, elements in zip(*(torch.split(rows, comparison.counts) for rows in found), strict=True):
            each = torch.sparse_coo_tensor(places.t(), elements, tensor.shape, check_invariants=False)
            total = (each if total is None else total + each).coalesce()
        assert total is not None
        tensor.copy_(total)

    def keep() -> None:  # what was made in another stream than the one that uses it
        for part in parts_of_sparse(tensor):
            record_use_on_streams(part)

    steps = [CheckedCall("allreduce", tensor.device, [tensor], step, keep) for step in (gather_indices, gather_values)]
    return [comparison.call, *(comparison.guard(step) for step in steps)]
