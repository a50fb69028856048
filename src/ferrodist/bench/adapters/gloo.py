"""Torch's gloo backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ferrodist.bench.adapters.arrays import Arrays, TorchArrays
from ferrodist.bench.adapters.base import Adapter
from ferrodist.bench.cases import Case, Operation

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.bench.adapters.base import RankInfo


class GlooAdapter(Adapter):
    """A rank of torch.distributed's gloo."""

    def __init__(self, info: RankInfo) -> None:
        torch.set_num_threads(1)
        self.arrays: Arrays = TorchArrays()
        self.rank, self.num_ranks = info.rank, info.num_ranks
        self.init_group(info.init_method)
        self.versions = {"torch": str(torch.__version__)}

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
        }
        return calls[case.operation]

    def make_start(self, case: Case, source: Any, target: Any) -> Callable[[], Any]:
        assert case.operation.is_allreduce
        assert source is target
        return lambda: dist.all_reduce(source, async_op=True)

    def wait(self, work: dist.Work) -> None:
        work.wait()

    def barrier(self) -> None:
        dist.barrier()

    def init_group(self, init_method: str) -> None:
        dist.init_process_group("gloo", init_method=init_method, rank=self.rank, world_size=self.num_ranks)

    def destroy_group(self) -> None:
        dist.destroy_process_group()

    def new_group(self) -> Any:
        return dist.new_group()

    def allreduce(self, array: Any, group: Any) -> None:
        dist.all_reduce(array, group=group)

    def destroy_subgroup(self, group: Any) -> None:
        dist.destroy_process_group(group)
