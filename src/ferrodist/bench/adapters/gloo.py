"""Torch's gloo backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ferrodist.bench.arrays import Arrays, TorchArrays
from ferrodist.bench.cases import Case, Collective

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.bench.adapters.base import Place

__all__ = ["GlooAdapter"]


class GlooAdapter:
    """A rank of torch.distributed's gloo; see `Adapter`."""

    copies = False

    def __init__(self, place: Place) -> None:
        torch.set_num_threads(1)
        self.arrays: Arrays = TorchArrays()
        self.rank, self.num_ranks = place.rank, place.num_ranks
        dist.init_process_group(
            "gloo", init_method=f"file://{place.folder / 'meeting'}", rank=place.rank, world_size=place.num_ranks
        )
        self.versions = {"torch": str(torch.__version__)}

    def make_call(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        """See `Adapter.make_call`."""
        if case.collective is Collective.ALLREDUCE:
            return lambda: dist.all_reduce(source)
        if case.collective is Collective.REDUCE_SCATTER:
            # Torch renamed both in 2.13.
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            return lambda: scatter(target, source)
        if case.collective is Collective.ALL_GATHER:
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return lambda: gather(target, source)
        if case.collective is Collective.BROADCAST:
            return lambda: dist.broadcast(source, 0)
        if case.collective is Collective.ALL_TO_ALL:
            return lambda: dist.all_to_all_single(target, source)
        return dist.barrier

    def barrier(self) -> None:
        """See `Adapter.barrier`."""
        dist.barrier()

    def close(self) -> None:
        """See `Adapter.close`."""
        dist.destroy_process_group()
