"""allreduce of sparse tensors, as gradients of embeddings are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.errors import UnsupportedOpError
from ferrodist.interop.operations import Collective

if TYPE_CHECKING:
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
    indices, values = own.indices().contiguous(), own.values().contiguous()
    width = values.numel() // max(1, values.shape[0]) if values.dim() > 1 else 1
    num_found = torch.zeros(group.world_size, dtype=torch.int64)
    found: list[torch.Tensor] = []

    def count(engine: TensorCollectives, timeout: float, place: int) -> None:
        mine = torch.tensor([indices.shape[1]])
        engine.all_gather(num_found, mine, [1] * group.world_size, dim=0, timeout=timeout, sequence=place)

    def gather(engine: TensorCollectives, timeout: float, place: int, flat: torch.Tensor, size: int) -> None:
        counts = [number * size for number in num_found.tolist()]
        out = flat.new_empty(sum(counts))
        engine.all_gather(out, flat, counts, dim=0, timeout=timeout, sequence=place)
        found.append(out)

    def gather_indices(engine: TensorCollectives, timeout: float, place: int) -> None:
        gather(engine, timeout, place, indices.t().contiguous().view(-1), indices.shape[0])

    def gather_values(engine: TensorCollectives, timeout: float, place: int) -> None:
        gather(engine, timeout, place, values.view(-1), width)
        add_up()

    def add_up() -> None:
        places = torch.split(found[0].view(-1, indices.shape[0]), num_found.tolist())
        elements = torch.split(found[1].view(-1, *values.shape[1:]), num_found.tolist())
        total = torch.sparse_coo_tensor(places[0].t(), elements[0], tensor.shape).coalesce()
        for each, weights in zip(places[1:], elements[1:], strict=True):
            total = (total + torch.sparse_coo_tensor(each.t(), weights, tensor.shape)).coalesce()
        tensor.data.copy_(total)

    steps = (count, gather_indices, gather_values)
    return [Collective("allreduce", tensor.device, [tensor], step) for step in steps]
