"""Ferrodist, through its public functions, with default settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import ferrodist as fd
from ferrodist.backends.mpi.runtime import library_version
from ferrodist.backends.ucc.bindings import load as load_ucc
from ferrodist.bench.adapters.base import Adapter
from ferrodist.bench.arrays import Arrays, TorchArrays
from ferrodist.bench.cases import Case, Operation
from ferrodist.bench.peers import OURS, Peer

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.bench.adapters.base import Place
    from ferrodist.bench.cases import DataType


class SymmetricArrays(TorchArrays):
    """Torch tensors in memory that all ranks of the default group share; all ranks make the same, in the same order."""

    def empty(self, num_elements: int, dtype: DataType) -> Any:
        """See `Arrays.empty`; the memory begins at a page."""
        return fd.empty_symmetric((num_elements,), self._dtypes[dtype])


class FerrodistAdapter(Adapter):
    """A rank of a ferrodist group; see `Adapter`."""

    def __init__(self, peer: Peer, place: Place) -> None:
        torch.set_num_threads(1)
        self.arrays: Arrays = SymmetricArrays() if peer is Peer.NATIVE_SYMMETRIC else TorchArrays()
        self.rank, self.num_ranks = place.rank, place.num_ranks
        self._backend = OURS[peer]
        self.join(place.init_method)
        self.rank = fd.default_group().rank  # an MPI tells its ranks itself
        self.versions = {"ferrodist": fd.__version__, "torch": str(torch.__version__)}
        if peer is Peer.OVER_MPI:
            self.versions["library"] = library_version()
        elif peer is Peer.OVER_UCC:
            self.versions["library"] = str(load_ucc())

    def make_call(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        """See `Adapter.make_call`."""
        if case.operation is Operation.SEND_RECV:
            return self._make_exchange(case, source, target)
        calls: dict[Operation, Callable[[], object]] = {
            Operation.ALLREDUCE: lambda: fd.allreduce(source, out=target),
            Operation.REDUCE_SCATTER: lambda: fd.reduce_scatter(source, out=target),
            Operation.ALL_GATHER: lambda: fd.all_gather(source, out=target),
            Operation.BROADCAST: lambda: fd.broadcast(source, 0, out=target),
            Operation.ALL_TO_ALL: lambda: fd.all_to_all(source, out=target),
            Operation.BARRIER: fd.barrier,
        }
        return calls[case.operation]

    def make_start(self, case: Case, source: Any, target: Any) -> Callable[[], Any]:
        """See `Adapter.make_start`."""
        assert case.operation.is_allreduce
        return lambda: fd.async_allreduce(source, out=target)

    def wait(self, started: fd.PendingCollective[torch.Tensor]) -> None:
        """See `Adapter.wait`."""
        started.wait()

    def barrier(self) -> None:
        """See `Adapter.barrier`."""
        fd.barrier()

    def join(self, init_method: str) -> None:
        """See `Adapter.join`."""
        if self._backend == "mpi":
            fd.init_process_group("mpi", world_size=self.num_ranks)
            return
        fd.init_process_group(self._backend, rank=self.rank, world_size=self.num_ranks, init_method=init_method)

    def leave(self) -> None:
        """See `Adapter.leave`."""
        fd.destroy_process_group()

    def new_group(self) -> fd.SubBackend:
        """See `Adapter.new_group`."""
        return fd.new_group()

    def add_up(self, array: Any, group: fd.Backend | None) -> None:
        """See `Adapter.add_up`."""
        fd.allreduce(array, out=array, group=group)

    def end_group(self, group: fd.Backend) -> None:
        """See `Adapter.end_group`."""
        group.close()

    def close(self) -> None:
        """See `Adapter.close`."""
        self.leave()

    def _make_exchange(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        partner = case.partner_of(self.rank)
        if partner is None:
            return lambda: None

        def there_and_back() -> None:
            fd.send(source, partner)
            fd.recv_into(target, partner)

        def back() -> None:
            fd.recv_into(target, partner)
            fd.send(source, partner)

        return there_and_back if self.rank == 0 else back
