"""An MPI through mpi4py. This runs in the MPI's own virtual environment, with NumPy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mpi4py

from ferrodist.bench.adapters.base import NotOfferedError
from ferrodist.bench.arrays import NumpyArrays
from ferrodist.bench.cases import Case, Collective, DataType

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.bench.arrays import Arrays
    from ferrodist.bench.peers import Peer

__all__ = ["MpiAdapter"]


class MpiAdapter:
    """A rank of MPI_COMM_WORLD; see `Adapter`."""

    copies = False

    def __init__(self, peer: Peer) -> None:
        mpi4py.rc.thread_level = peer.thread_level
        from mpi4py import MPI  # noqa: PLC0415 - starts MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD
        self.arrays: Arrays = NumpyArrays()
        self.rank, self.num_ranks = self._world.Get_rank(), self._world.Get_size()
        levels = ("single", "funneled", "serialized", "multiple")
        self.versions = {
            "mpi4py": mpi4py.__version__,
            "library": " ".join(MPI.Get_library_version().strip("\0 \n").splitlines()[0].split(",")[0].split()),
            "thread level": levels[MPI.Query_thread()],
        }
        self._dtypes = {DataType.FLOAT32: MPI.FLOAT, DataType.FLOAT16: getattr(MPI, "FLOAT16_T", MPI.DATATYPE_NULL)}

    def make_call(self, case: Case, source: Any, target: Any) -> Callable[[], object]:
        """See `Adapter.make_call`. Count and type are told, which spares mpi4py from finding them at each call."""
        world = self._world
        if case.collective is Collective.BARRIER:
            barrier: Callable[[], object] = world.Barrier
            return barrier
        send, receive = self._spec(case, source), self._spec(case, target)
        if case.collective is Collective.ALLREDUCE:
            in_place = self._mpi.IN_PLACE
            return lambda: world.Allreduce(in_place, receive)
        if case.collective is Collective.BROADCAST:
            return lambda: world.Bcast(send, 0)
        # In the others the counts are those of one rank's part, and mpi4py works them out from the arrays.
        send, receive = send[0::2], receive[0::2]
        if case.collective is Collective.REDUCE_SCATTER:
            return lambda: world.Reduce_scatter_block(send, receive)
        if case.collective is Collective.ALL_GATHER:
            return lambda: world.Allgather(send, receive)
        return lambda: world.Alltoall(send, receive)

    def barrier(self) -> None:
        """See `Adapter.barrier`."""
        self._world.Barrier()

    def close(self) -> None:
        """See `Adapter.close`; mpi4py ends MPI when the interpreter ends."""

    def _spec(self, case: Case, array: Any) -> tuple[Any, ...]:
        datatype = self._dtypes.get(case.dtype, self._mpi.DATATYPE_NULL)
        if datatype == self._mpi.DATATYPE_NULL:
            if case.collective.reduces:
                raise NotOfferedError(f"this MPI adds no {case.dtype.value}")
            datatype = self._mpi.UINT16_T
        return array, len(array), datatype
