"""allreduce of sparse tensors, as gradients of embeddings are."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.errors import UnsupportedOpError
from ferrodist.interop.layouts import row_size
from ferrodist.interop.operations import Collective

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ferrodist.backends.base import Backend
    from ferrodist.collectives.engine import TensorCollectives
    from ferrodist.collectives.reduce_op import Op

__all__ = ["sparse_allreduce"]


def sparse_allreduce(group: Backend, tensor: torch.Tensor, op: Op) -> list[Collective]:
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
    num_found = torch.zeros(group.world_size, dtype=torch.int64)
    found: list[torch.Tensor] = []

    def count(engine: TensorCollectives, timeout: float, place: int) -> None:
        mine = torch.tensor([indices.shape[0]])
        engine.all_gather(num_found, mine, [1] * group.world_size, dim=0, timeout=timeout, sequence=place)

    @contextlib.contextmanager
    def like_tensor() -> Iterator[None]:
        # Operations run in inference mode; what gets into the tensor is used outside of it, if the tensor is.
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            yield

    def gather(rows: torch.Tensor, engine: TensorCollectives, timeout: float, place: int) -> None:
        counts = [number * row_size(rows) for number in num_found.tolist()]
        with like_tensor():
            out = rows.new_empty(int(num_found.sum()), *rows.shape[1:])
        engine.all_gather(out.view(-1), rows.view(-1), counts, dim=0, timeout=timeout, sequence=place)
        found.append(out)

    def gather_indices(engine: TensorCollectives, timeout: float, place: int) -> None:
        gather(indices, engine, timeout, place)

    def gather_values(engine: TensorCollectives, timeout: float, place: int) -> None:
        gather(values, engine, timeout, place)
        with like_tensor():
            add_up()

    def add_up() -> None:
        total: torch.Tensor | None = None
        for places, elements in zip(*(torch.split(rows, num_found.tolist()) for rows in found), strict=True):
            each = torch.sparse_coo_tensor(places.t(), elements, tensor.shape, check_invariants=False)
            total = (each if total is None else total + each).coalesce()
        assert total is not None
        tensor.copy_(total)

    steps = (count, gather_indices, gather_values)
    return [Collective("allreduce", tensor.device, [tensor], step) for step in steps]
