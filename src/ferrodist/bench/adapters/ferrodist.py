"""Ferrodist through its public functions, with default settings; over NCCL, with tensors on GPUs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

import torch

import ferrodist as fd
from ferrodist.backends.mpi.runtime import library_version
from ferrodist.backends.nccl.communicator import load_nccl
from ferrodist.backends.ucc.bindings import load as load_ucc
from ferrodist.bench.adapters.base import Adapter, Arrays, TorchArrays
from ferrodist.bench.cases import ASYNCHRONOUS, Case, DataType, Operation, Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ferrodist.bench.adapters.base import RankInfo

_SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"


class FerrodistAdapter(Adapter):
    """A rank of a ferrodist group."""

    def __init__(self, info: RankInfo) -> None:
        torch.set_num_threads(1)
        self.arrays: Arrays = TorchArrays()
        if info.peer is Peer.NATIVE_SYMMETRIC:
            self.arrays.empty = lambda count, dtype: fd.empty_symmetric((count,), getattr(torch, dtype.value))
        self.barrier, self.new_group, self.destroy_group = fd.barrier, fd.new_group, fd.destroy_process_group
        self.destroy_subgroup = lambda group: group.close()
        self.allreduce = lambda array, group: fd.allreduce(array, out=array, group=group)
        self.wait = lambda work: work.wait()

        def init_group(init_method: str) -> None:
            assigns_ranks = info.peer is Peer.OVER_MPI
            place: dict[str, Any] = {} if assigns_ranks else {"rank": info.rank, "init_method": init_method}
            fd.init_process_group(info.peer.backend, world_size=info.num_ranks, **place)

        self.init_group = init_group
        self.init_group(info.init_method)
        self.rank, self.num_ranks = fd.default_group().rank, info.num_ranks
        self.versions = {"ferrodist": fd.__version__, "torch": str(torch.__version__)}
        if info.peer is Peer.OVER_MPI:
            self.versions["library"] = library_version()
        elif info.peer is Peer.OVER_UCC:
            self.versions["library"] = str(load_ucc())

    def make_call(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        calls: dict[Operation, Callable[[], object]] = {
            Operation.ALLREDUCE: lambda: fd.allreduce(source, out=target),
            Operation.REDUCE_SCATTER: lambda: fd.reduce_scatter(source, out=target),
            Operation.ALL_GATHER: lambda: fd.all_gather(source, out=target),
            Operation.BROADCAST: lambda: fd.broadcast(source, 0, out=target),
            Operation.ALL_TO_ALL: lambda: fd.all_to_all(source, out=target),
            Operation.BARRIER: fd.barrier,
            Operation.SEND_RECV: self.make_exchange(case, fd.send, fd.recv_into, source, target),
            **dict.fromkeys(ASYNCHRONOUS, lambda: fd.async_allreduce(source, out=target)),
        }
        return calls[case.operation]


class NcclAdapter(FerrodistAdapter):
    """A rank of a group over NCCL, and its GPU."""

    unsupported: ClassVar[Mapping[Operation, str]] = {
        Operation.OVERLAP: "the computation is the host's, and its tensors are on a GPU"
    }

    def __init__(self, info: RankInfo) -> None:
        version = load_nccl().description
        device = _select_gpu(info)
        super().__init__(info)
        self.arrays: Arrays = TorchArrays(device)
        self.versions["library"] = version
        self.allreduce(self.arrays.from_values([1.0], DataType.FLOAT32), None)  # connects the ranks, or fails now
        self.synchronize()

        def wait(work: fd.PendingCollective[torch.Tensor]) -> None:
            work.wait()
            self.synchronize()

        self.wait = wait

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def _select_gpu(info: RankInfo) -> str:
    """Make a GPU the current one: each rank's own, or a shared one where NCCL allows it."""
    num_gpus = torch.cuda.device_count()
    if num_gpus < info.num_ranks and os.environ.get(_SHARING_VARIABLE) != "1":
        raise fd.BackendUnavailable(
            f"{info.num_ranks} ranks need as many GPUs, and torch sees {num_gpus}: NCCL from 2.30 on lets ranks share"
            f" one with {_SHARING_VARIABLE}=1, NCCL_NVLS_ENABLE=0 and NCCL_MAX_CTAS=2"
        )
    device = info.rank % num_gpus
    torch.cuda.set_device(device)
    return f"cuda:{device}"
