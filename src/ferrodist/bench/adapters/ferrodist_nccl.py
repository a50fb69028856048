"""Ferrodist over NCCL: tensors on GPUs, through its public functions."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

import torch

import ferrodist as fd
from ferrodist.backends.nccl.communicator import load_nccl
from ferrodist.bench.adapters.ferrodist_group import FerrodistAdapter
from ferrodist.bench.arrays import Arrays, TorchArrays
from ferrodist.bench.cases import DataType, Operation
from ferrodist.bench.peers import Peer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ferrodist.bench.adapters.base import Place

_SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"


class NcclAdapter(FerrodistAdapter):
    """A rank of a group over NCCL, and its GPU; see `Adapter`."""

    not_offered: ClassVar[Mapping[Operation, str]] = {
        Operation.OVERLAP: "the computation is the host's, and its tensors are on a GPU",
    }

    def __init__(self, place: Place) -> None:
        version = load_nccl().description
        device = _take_gpu(place)
        super().__init__(Peer.OVER_NCCL, place)
        self.arrays: Arrays = TorchArrays(device)
        self.versions["library"] = version
        self.add_up(self.arrays.of([1.0], DataType.FLOAT32), None)  # connects the ranks: what can't be is known now
        self.finish()

    def wait(self, started: fd.PendingCollective[torch.Tensor]) -> None:
        """See `Adapter.wait`."""
        started.wait()
        self.finish()

    def finish(self) -> None:
        """See `Adapter.finish`."""
        torch.cuda.synchronize()


def _take_gpu(place: Place) -> str:
    """Make a GPU this process's: each rank has its own, or they share as NCCL lets them.

    Raises:
        BackendUnavailable: There are too few.
    """
    num_gpus = torch.cuda.device_count()
    if num_gpus < place.num_ranks and os.environ.get(_SHARING_VARIABLE) != "1":
        raise fd.BackendUnavailable(
            f"{place.num_ranks} ranks need as many GPUs, and torch sees {num_gpus}: NCCL from 2.30 on lets ranks share"
            f" one with {_SHARING_VARIABLE}=1, NCCL_NVLS_ENABLE=0 and NCCL_MAX_CTAS=2"
        )
    device = place.rank % num_gpus
    torch.cuda.set_device(device)
    return f"cuda:{device}"
