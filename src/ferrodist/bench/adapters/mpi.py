"""An MPI through mpi4py. This runs in the MPI's own virtual environment, with NumPy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import mpi4py

from ferrodist.bench.adapters.base import Adapter, NotOfferedError
from ferrodist.bench.arrays import NumpyArrays
from ferrodist.bench.cases import Case, DataType, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ferrodist.bench.arrays import Arrays
    from ferrodist.bench.peers import Peer


class MpiAdapter(Adapter):
    """A rank of MPI_COMM_WORLD; see `Adapter`."""

    not_offered: ClassVar[Mapping[Operation, str]] = {
        Operation.INIT: "a process makes MPI's world once, when it starts; new_group is MPI_Comm_dup",
    }

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
        if case.operation is Operation.BARRIER:
            barrier: Callable[[], object] = world.Barrier
            return barrier
        send, receive = self._spec(case, source), self._spec(case, target)
        if case.operation is Operation.SEND_RECV:
            return self._make_exchange(case, send, receive)
        in_place = self._mpi.IN_PLACE
        # Where ranks have parts, the counts are those of one part, and mpi4py works them out from the arrays.
        from_, to = send[0::2], receive[0::2]
        calls: dict[Operation, Callable[[], object]] = {
            Operation.ALLREDUCE: lambda: world.Allreduce(in_place, receive),
            Operation.BROADCAST: lambda: world.Bcast(send, 0),
            Operation.REDUCE_SCATTER: lambda: world.Reduce_scatter_block(from_, to),
            Operation.ALL_GATHER: lambda: world.Allgather(from_, to),
            Operation.ALL_TO_ALL: lambda: world.Alltoall(from_, to),
        }
        return calls[case.operation]

    def make_start(self, case: Case, source: Any, target: Any) -> Callable[[], Any]:
        """See `Adapter.make_start`."""
        assert source is target
        world, in_place, receive = self._world, self._mpi.IN_PLACE, self._spec(case, target)
        return lambda: world.Iallreduce(in_place, receive)

    def wait(self, started: Any) -> None:
        """See `Adapter.wait`."""
        started.Wait()

    def barrier(self) -> None:
        """See `Adapter.barrier`."""
        self._world.Barrier()

    def new_group(self) -> Any:
        """See `Adapter.new_group`."""
        return self._world.Dup()

    def add_up(self, array: Any, group: Any) -> None:
        """See `Adapter.add_up`."""
        group.Allreduce(self._mpi.IN_PLACE, array)

    def end_group(self, group: Any) -> None:
        """See `Adapter.end_group`."""
        group.Free()

    def close(self) -> None:
        """See `Adapter.close`; mpi4py ends MPI when the interpreter ends."""

    def _make_exchange(self, case: Case, send: Any, receive: Any) -> Callable[[], object]:
        world, partner = self._world, case.partner_of(self.rank)
        if partner is None:
            return lambda: None

        def there_and_back() -> None:
            world.Send(send, partner)
            world.Recv(receive, partner)

        def back() -> None:
            world.Recv(receive, partner)
            world.Send(send, partner)

        return there_and_back if self.rank == 0 else back

    def _spec(self, case: Case, array: Any) -> tuple[Any, ...]:
        datatype = self._dtypes.get(case.dtype, self._mpi.DATATYPE_NULL)
        if datatype == self._mpi.DATATYPE_NULL:
            if case.operation.reduces:
                raise NotOfferedError(f"this MPI adds no {case.dtype.value}")
            datatype = self._mpi.UINT16_T
        return array, len(array), datatype
