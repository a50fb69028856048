"""The questions a run can answer, each with the operations, ranks, sizes and peers that it is asked with."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ferrodist.bench.cases import Operation
from ferrodist.bench.peers import Peer

_OVER_OTHERS = (Peer.OVER_MPI, Peer.MPI4PY, Peer.OVER_UCC, Peer.OVER_NCCL)


class Suite(enum.Enum):
    """A question; the value is its name on the command line."""

    COLLECTIVES = "collectives"
    MESSAGES = "messages"
    SUBMIT = "submit"
    OVERLAP = "overlap"
    GROUPS = "groups"
    HOSTS = "hosts"


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteDefaults:
    """How a suite is run where the command line does not say.

    Args:
        title: What it is called.
        operations: All that it can measure.
        ranks: Numbers of ranks.
        full_ranks: The same with ``--full``.
        sizes: Bytes.
        quick_sizes: The same with ``--quick``.
        peers: Who is measured.
        optional_peers: Who is measured if asked for.
        num_hosts: Hosts that the ranks are spread over.
    """

    title: str
    operations: tuple[Operation, ...]
    ranks: tuple[int, ...] = (2,)
    full_ranks: tuple[int, ...] = (2,)
    sizes: tuple[int, ...] = ()
    quick_sizes: tuple[int, ...] = ()
    peers: tuple[Peer, ...]
    optional_peers: tuple[Peer, ...] = (Peer.NATIVE_TCP, Peer.TCP, *_OVER_OTHERS)
    num_hosts: int = 1


_KIB, _MIB = 1 << 10, 1 << 20
_SIZES = (8, 128, *(n * _KIB for n in (1, 4, 16, 64, 256)), *(n * _MIB for n in (1, 8, 64)))
_QUICK_SIZES = (8, 16 * _KIB, _MIB)
_MPIS = (Peer.MPICH, Peer.OPENMPI)
_ALL_MPIS = (Peer.MPICH, Peer.MPICH_SINGLE, Peer.OPENMPI, Peer.OPENMPI_SINGLE)

SUITES = {
    Suite.COLLECTIVES: SuiteDefaults(
        title="Collectives",
        operations=(
            Operation.ALLREDUCE,
            Operation.REDUCE_SCATTER,
            Operation.ALL_GATHER,
            Operation.BROADCAST,
            Operation.ALL_TO_ALL,
            Operation.BARRIER,
        ),
        full_ranks=(2, 4),
        sizes=(*_SIZES, 256 * _MIB),
        quick_sizes=_QUICK_SIZES,
        peers=(Peer.NATIVE, Peer.NATIVE_SYMMETRIC, Peer.GLOO, *_ALL_MPIS, Peer.LIMIT),
    ),
    Suite.MESSAGES: SuiteDefaults(
        title="Messages from rank to rank",
        operations=(Operation.SEND_RECV,),
        sizes=_SIZES,
        quick_sizes=_QUICK_SIZES,
        peers=(Peer.NATIVE, Peer.GLOO, *_ALL_MPIS, Peer.LIMIT),
    ),
    Suite.SUBMIT: SuiteDefaults(
        title="Starting an asynchronous allreduce",
        operations=(Operation.SUBMIT,),
        sizes=(8, 64 * _KIB),
        quick_sizes=(8,),
        peers=(Peer.NATIVE, Peer.NATIVE_SYMMETRIC, Peer.GLOO, *_MPIS),
        optional_peers=(Peer.NATIVE_TCP, Peer.TCP, *_OVER_OTHERS, Peer.MPICH_SINGLE, Peer.OPENMPI_SINGLE),
    ),
    Suite.OVERLAP: SuiteDefaults(
        title="An asynchronous allreduce beside a computation",
        operations=(Operation.OVERLAP,),
        sizes=(64 * _MIB,),
        quick_sizes=(_MIB,),
        peers=(Peer.NATIVE, Peer.NATIVE_SYMMETRIC, Peer.GLOO, *_MPIS),
        optional_peers=(Peer.NATIVE_TCP, Peer.TCP, *_OVER_OTHERS, Peer.MPICH_SINGLE, Peer.OPENMPI_SINGLE),
    ),
    Suite.GROUPS: SuiteDefaults(
        title="Making groups",
        operations=(Operation.INIT, Operation.NEW_GROUP),
        ranks=(2, 8),
        full_ranks=(2, 8),
        peers=(Peer.NATIVE, Peer.GLOO, *_MPIS),
        optional_peers=(Peer.NATIVE_TCP, Peer.TCP, *_OVER_OTHERS, Peer.MPICH_SINGLE, Peer.OPENMPI_SINGLE),
    ),
    Suite.HOSTS: SuiteDefaults(
        title="Two hosts",
        operations=(Operation.ALLREDUCE, Operation.SEND_RECV),
        sizes=_SIZES,
        quick_sizes=_QUICK_SIZES,
        peers=(Peer.NATIVE, Peer.GLOO, Peer.OPENMPI, Peer.IPERF3),
        optional_peers=(Peer.TCP, Peer.OPENMPI_SINGLE),
        num_hosts=2,
    ),
}
