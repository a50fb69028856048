"""Torch's gloo backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ferrodist.bench.adapters.base import Adapter
from ferrodist.bench.arrays import Arrays, TorchArrays
from ferrodist.bench.cases import Case, Operation

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.bench.adapters.base import Place


class GlooAdapter(Adapter):
    """A rank of torch.distributed's gloo; see `Adapter`."""

    def __init__(self, place: Place) -> None:
        torch.set_num_threads(1)
        self.arrays: Arrays = TorchArrays()
        self.rank, self.num_ranks = place.rank, place.num_ranks
        self.join(place.init_method)
        self.versions = {"torch": str(torch.__version__)}

    def make_call(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        """See `Adapter.make_call`."""
        if case.operation is Operation.SEND_RECV:
            return self._make_exchange(case, source, target)
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
        }
        return calls[case.operation]

    def make_start(self, case: Case, source: Any, target: Any) -> Callable[[], Any]:
        """See `Adapter.make_start`."""
        assert case.operation.is_allreduce
        assert source is target
        return lambda: dist.all_reduce(source, async_op=True)

    def wait(self, started: dist.Work) -> None:
        """See `Adapter.wait`."""
        started.wait()

    def barrier(self) -> None:
        """See `Adapter.barrier`."""
        dist.barrier()

    def join(self, init_method: str) -> None:
        """See `Adapter.join`."""
        dist.init_process_group("gloo", init_method=init_method, rank=self.rank, world_size=self.num_ranks)

    def leave(self) -> None:
        """See `Adapter.leave`."""
        dist.destroy_process_group()

    def new_group(self) -> Any:
        """See `Adapter.new_group`."""
        return dist.new_group()

    def add_up(self, array: Any, group: Any) -> None:
        """See `Adapter.add_up`."""
        dist.all_reduce(array, group=group)

    def end_group(self, group: Any) -> None:
        """See `Adapter.end_group`."""
        dist.destroy_process_group(group)

    def close(self) -> None:
        """See `Adapter.close`."""
        self.leave()

    def _make_exchange(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        partner = case.partner_of(self.rank)
        if partner is None:
            return lambda: None

        def there_and_back() -> None:
            dist.send(source, partner)
            dist.recv(target, partner)

        def back() -> None:
            dist.recv(target, partner)
            dist.send(source, partner)

        return there_and_back if self.rank == 0 else back
