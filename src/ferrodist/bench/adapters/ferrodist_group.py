"""Ferrodist, through its public functions, with default settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import ferrodist as fd
from ferrodist.bench.arrays import Arrays, TorchArrays
from ferrodist.bench.cases import Case, Collective
from ferrodist.bench.peers import OURS

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.bench.adapters.base import Place
    from ferrodist.bench.peers import Peer

__all__ = ["FerrodistAdapter"]


class FerrodistAdapter:
    """A rank of a ferrodist group; see `Adapter`."""

    copies = False

    def __init__(self, peer: Peer, place: Place) -> None:
        torch.set_num_threads(1)
        self.arrays: Arrays = TorchArrays()
        self.rank, self.num_ranks = place.rank, place.num_ranks
        fd.init_process_group(
            OURS[peer],
            rank=place.rank,
            world_size=place.num_ranks,
            init_method=f"file://{place.folder / 'meeting'}",
        )
        self.versions = {"ferrodist": fd.__version__, "torch": str(torch.__version__)}

    def make_call(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        """See `Adapter.make_call`."""
        if case.collective is Collective.ALLREDUCE:
            return lambda: fd.allreduce(source, out=target)
        if case.collective is Collective.REDUCE_SCATTER:
            return lambda: fd.reduce_scatter(source, out=target)
        if case.collective is Collective.ALL_GATHER:
            return lambda: fd.all_gather(source, out=target)
        if case.collective is Collective.BROADCAST:
            return lambda: fd.broadcast(source, 0, out=target)
        if case.collective is Collective.ALL_TO_ALL:
            return lambda: fd.all_to_all(source, out=target)
        return fd.barrier

    def barrier(self) -> None:
        """See `Adapter.barrier`."""
        fd.barrier()

    def close(self) -> None:
        """See `Adapter.close`."""
        fd.destroy_process_group()
