"""The suites, each with its default operations, ranks, sizes and peers; and the plan of a run."""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ferrodist.bench.cases import Case, DataType, Operation, Peer

if TYPE_CHECKING:
    from collections.abc import Sequence


class Suite(enum.Enum):
    """A question that a run answers; the value is its name on the command line."""

    COLLECTIVES = "collectives"
    MESSAGES = "messages"
    SUBMIT = "submit"
    OVERLAP = "overlap"
    GROUPS = "groups"
    HOSTS = "hosts"


_MPIS = (Peer.MPICH, Peer.OPENMPI)
_SINGLE_MPIS = (Peer.MPICH_SINGLE, Peer.OPENMPI_SINGLE)
_ALL_MPIS = (Peer.MPICH, Peer.MPICH_SINGLE, Peer.OPENMPI, Peer.OPENMPI_SINGLE)
_OPTIONAL = (Peer.NATIVE_TCP, Peer.TCP, Peer.OVER_MPI, Peer.MPI4PY, Peer.OVER_UCC, Peer.OVER_NCCL)
_KIB, _MIB = 1 << 10, 1 << 20
_SIZES = (8, 128, *(n * _KIB for n in (1, 4, 16, 64, 256)), *(n * _MIB for n in (1, 8, 64)))
_QUICK_SIZES = (8, 16 * _KIB, _MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteDefaults:
    """A suite's operations, and its defaults; ``full_ranks`` are for ``--full``, ``quick_sizes`` for ``--quick``.

    ``optional_peers`` are measured if they are named.
    """

    title: str
    operations: tuple[Operation, ...]
    ranks: tuple[int, ...] = (2,)
    full_ranks: tuple[int, ...] = (2,)
    sizes: tuple[int, ...] = ()
    quick_sizes: tuple[int, ...] = ()
    peers: tuple[Peer, ...]
    optional_peers: tuple[Peer, ...] = _OPTIONAL
    num_hosts: int = 1


SUITES = {
    Suite.COLLECTIVES: SuiteDefaults(
        title="Collectives",
        operations=(
            *(Operation.ALLREDUCE, Operation.REDUCE_SCATTER, Operation.ALL_GATHER),
            *(Operation.BROADCAST, Operation.ALL_TO_ALL, Operation.BARRIER),
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
        optional_peers=(*_OPTIONAL, *_SINGLE_MPIS),
    ),
    Suite.OVERLAP: SuiteDefaults(
        title="An asynchronous allreduce beside a computation",
        operations=(Operation.OVERLAP,),
        sizes=(64 * _MIB,),
        quick_sizes=(_MIB,),
        peers=(Peer.NATIVE, Peer.NATIVE_SYMMETRIC, Peer.GLOO, *_MPIS),
        optional_peers=(*_OPTIONAL, *_SINGLE_MPIS),
    ),
    Suite.GROUPS: SuiteDefaults(
        title="Making groups",
        operations=(Operation.INIT, Operation.NEW_GROUP),
        ranks=(2, 8),
        full_ranks=(2, 8),
        peers=(Peer.NATIVE, Peer.GLOO, *_MPIS),
        optional_peers=(*_OPTIONAL, *_SINGLE_MPIS),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SuitePlan:
    """One suite of a run: every combination of these, where an operation has a size."""

    suite: Suite
    operations: Sequence[Operation]
    ranks: Sequence[int]
    dtypes: Sequence[DataType]
    sizes: Sequence[int]
    peers: Sequence[Peer]

    def cases(self, num_ranks: int) -> list[Case]:
        """The cases on a number of ranks, in order."""
        num_hosts, sizes = SUITES[self.suite].num_hosts, list(itertools.product(self.dtypes, self.sizes))
        return [
            Case(operation=operation, num_ranks=num_ranks, num_hosts=num_hosts, dtype=dtype, size_bytes=size)
            for operation in self.operations
            for dtype, size in (sizes if operation.has_size else [(DataType.FLOAT32, 0)])
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options of a run.

    Each peer has ``num_rounds`` batches in a case, which ends after ``seconds`` and at least `driver.MIN_ROUNDS`
    rounds. The run fails without the ``required`` peer.
    """

    suites: Sequence[SuitePlan]
    num_rounds: int
    seconds: float
    required: Peer | None = None
    output: Path = Path("bench")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The suites that share running peers: those of one number of ranks on one number of hosts."""

    num_hosts: int
    num_ranks: int
    suites: Sequence[SuitePlan]

    @property
    def peers(self) -> list[Peer]:
        """The peers to start, in the order of the tables."""
        return list(dict.fromkeys(peer for plan in self.suites for peer in plan.peers))

    def cases(self) -> list[tuple[SuitePlan, Case]]:
        """The cases, each with its suite."""
        return [(plan, case) for plan in self.suites for case in plan.cases(self.num_ranks)]


def plan_stages(suites: Sequence[SuitePlan]) -> list[Stage]:
    """Group suites into stages: one host first, and few ranks first."""
    keys = sorted({(SUITES[plan.suite].num_hosts, num_ranks) for plan in suites for num_ranks in plan.ranks})
    return [
        Stage(
            num_hosts=num_hosts,
            num_ranks=num_ranks,
            suites=[plan for plan in suites if num_ranks in plan.ranks and SUITES[plan.suite].num_hosts == num_hosts],
        )
        for num_hosts, num_ranks in keys
    ]


def format_ranks(num_ranks: int, num_hosts: int) -> str:
    """Return "2 ranks", or "2 ranks on 2 hosts"."""
    return f"{num_ranks} ranks" + (f" on {num_hosts} hosts" if num_hosts > 1 else "")
