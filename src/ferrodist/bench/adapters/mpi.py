"""An MPI through mpi4py. This runs in the MPI's own virtual environment, with NumPy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import mpi4py

from ferrodist.bench.adapters.base import Adapter, Arrays, NumpyArrays, UnsupportedError
from ferrodist.bench.cases import ASYNCHRONOUS, REDUCTIONS, Case, DataType, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ferrodist.bench.adapters.base import RankInfo

_THREAD_LEVELS = ("single", "funneled", "serialized", "multiple")


class MpiAdapter(Adapter):
    """A rank of MPI_COMM_WORLD."""

    unsupported: ClassVar[Mapping[Operation, str]] = {
        Operation.INIT: "a process makes MPI's world once, when it starts; new_group is MPI_Comm_dup"
    }

    def __init__(self, info: RankInfo) -> None:
        mpi4py.rc.thread_level = "single" if info.peer.value.endswith("-single") else "multiple"
        from mpi4py import MPI  # noqa: PLC0415 - starts MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD
        self.arrays: Arrays = NumpyArrays()
        self.rank, self.num_ranks = self._world.Get_rank(), self._world.Get_size()
        self.versions = {
            "mpi4py": mpi4py.__version__,
            "library": " ".join(MPI.Get_library_version().strip("\0 \n").splitlines()[0].split(",")[0].split()),
            "thread level": _THREAD_LEVELS[MPI.Query_thread()],
        }
        self.barrier, self.new_group = self._world.Barrier, self._world.Dup
        self.destroy_group = lambda: None  # mpi4py ends MPI when the interpreter ends
        self.destroy_subgroup = lambda group: group.Free()
        self.allreduce = lambda array, group: group.Allreduce(MPI.IN_PLACE, array)
        self.wait = lambda work: work.Wait()
        self._dtypes = {DataType.FLOAT32: MPI.FLOAT, DataType.FLOAT16: getattr(MPI, "FLOAT16_T", MPI.DATATYPE_NULL)}

    def make_call(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        world = self._world
        if case.operation is Operation.BARRIER:
            return self.barrier
        send, receive, in_place = self._buffer(case, source), self._buffer(case, target), self._mpi.IN_PLACE
        # Where ranks have parts, the counts are those of one part, and mpi4py works them out from the arrays.
        send_parts, receive_parts = send[0::2], receive[0::2]
        calls: dict[Operation, Callable[[], object]] = {
            Operation.ALLREDUCE: lambda: world.Allreduce(in_place, receive),
            Operation.BROADCAST: lambda: world.Bcast(send, 0),
            Operation.REDUCE_SCATTER: lambda: world.Reduce_scatter_block(send_parts, receive_parts),
            Operation.ALL_GATHER: lambda: world.Allgather(send_parts, receive_parts),
            Operation.ALL_TO_ALL: lambda: world.Alltoall(send_parts, receive_parts),
            Operation.SEND_RECV: self.make_exchange(case, world.Send, world.Recv, send, receive),
            **dict.fromkeys(ASYNCHRONOUS, lambda: world.Iallreduce(in_place, receive)),
        }
        return calls[case.operation]

    def _buffer(self, case: Case, array: Any) -> tuple[Any, ...]:
        """An array with its count and datatype, so that mpi4py need not find them at each call."""
        datatype = self._dtypes.get(case.dtype, self._mpi.DATATYPE_NULL)
        if datatype == self._mpi.DATATYPE_NULL:
            if case.operation in REDUCTIONS:
                raise UnsupportedError(f"this MPI adds no {case.dtype.value}")
            datatype = self._mpi.UINT16_T
        return array, len(array), datatype
