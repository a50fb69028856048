"""Torch's gloo backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ferrodist.bench.adapters.base import Adapter, Arrays, TorchArrays
from ferrodist.bench.cases import ASYNCHRONOUS, Case, Operation

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.bench.adapters.base import RankInfo


class GlooAdapter(Adapter):
    """A rank of torch.distributed's gloo."""

    def __init__(self, info: RankInfo) -> None:
        torch.set_num_threads(1)
        self.arrays: Arrays = TorchArrays()
        self.rank, self.num_ranks = info.rank, info.num_ranks
        self.versions = {"torch": str(torch.__version__)}
        self.barrier, self.new_group = dist.barrier, dist.new_group
        self.destroy_group = self.destroy_subgroup = dist.destroy_process_group
        self.allreduce = lambda array, group: dist.all_reduce(array, group=group)
        self.wait = lambda work: work.wait()
        self.init_group = lambda init_method: dist.init_process_group(
            "gloo", init_method=init_method, rank=self.rank, world_size=self.num_ranks
        )
        self.init_group(info.init_method)

    def make_call(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        # Torch renamed both in 2.13.
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        calls: dict[Operation, Callable[[], object]] = {
            Operation.ALLREDUCE: lambda: dist.all_reduce(source),
            Operation.REDUCE_SCATTER: lambda: scatter(target, source),
            Operation.ALL_GATHER: lambda: gather(target, source),
            Operation.BROADCAST: lambda: dist.broadcast(source, 0),
            Operation.ALL_TO_ALL: lambda: dist.all_to_all_single(target, source),
            Operation.BARRIER: dist.barrier,
            Operation.SEND_RECV: self.make_exchange(case, dist.send, dist.recv, source, target),
            **dict.fromkeys(ASYNCHRONOUS, lambda: dist.all_reduce(source, async_op=True)),
        }
        return calls[case.operation]
