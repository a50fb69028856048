"""The suites, each with its default operations, ranks, sizes and peers; and the plan of a run."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from ferrodist.bench.cases import UNSIZED, Case, DataType, Operation, Peer

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
_ALL_MPIS = (Peer.MPICH, Peer.MPICH_SINGLE, Peer.OPENMPI, Peer.OPENMPI_SINGLE)
_OPTIONAL = (Peer.NATIVE_TCP, Peer.TCP, Peer.OVER_MPI, Peer.MPI4PY, Peer.OVER_UCC, Peer.OVER_NCCL, *_ALL_MPIS)
_KIB, _MIB = 1 << 10, 1 << 20
_SIZES = (8, 128, *(n * _KIB for n in (1, 4, 16, 64, 256)), *(n * _MIB for n in (1, 8, 64)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteDefaults:
    """A suite's operations, and its defaults; ``full_ranks`` are for ``--full``, ``quick_sizes`` for ``--quick``.

    ``optional_peers`` are measured if they are named.
    """

    operations: tuple[Operation, ...]
    peers: tuple[Peer, ...]
    optional_peers: tuple[Peer, ...] = _OPTIONAL
    sizes: tuple[int, ...] = _SIZES
    quick_sizes: tuple[int, ...] = (8, 16 * _KIB, _MIB)
    ranks: tuple[int, ...] = (2,)
    full_ranks: tuple[int, ...] = (2,)
    num_hosts: int = 1


SUITES = {
    Suite.COLLECTIVES: SuiteDefaults(
        operations=tuple(Operation)[: list(Operation).index(Operation.BARRIER) + 1],
        peers=(Peer.NATIVE, Peer.NATIVE_SYMMETRIC, Peer.GLOO, *_ALL_MPIS, Peer.LIMIT),
        sizes=(*_SIZES, 256 * _MIB),
        full_ranks=(2, 4),
    ),
    Suite.MESSAGES: SuiteDefaults(
        operations=(Operation.SEND_RECV,), peers=(Peer.NATIVE, Peer.GLOO, *_ALL_MPIS, Peer.LIMIT)
    ),
    Suite.SUBMIT: SuiteDefaults(
        operations=(Operation.SUBMIT,),
        peers=(Peer.NATIVE, Peer.NATIVE_SYMMETRIC, Peer.GLOO, *_MPIS),
        sizes=(8, 64 * _KIB),
        quick_sizes=(8,),
    ),
    Suite.OVERLAP: SuiteDefaults(
        operations=(Operation.OVERLAP,),
        peers=(Peer.NATIVE, Peer.NATIVE_SYMMETRIC, Peer.GLOO, *_MPIS),
        sizes=(64 * _MIB,),
        quick_sizes=(_MIB,),
    ),
    Suite.GROUPS: SuiteDefaults(
        operations=(Operation.INIT, Operation.NEW_GROUP),
        peers=(Peer.NATIVE, Peer.GLOO, *_MPIS),
        ranks=(2, 8),
        full_ranks=(2, 8),
    ),
    Suite.HOSTS: SuiteDefaults(
        operations=(Operation.ALLREDUCE, Operation.SEND_RECV),
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


@dataclass(frozen=True, slots=True)
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
        """The cases in order, each with its suite."""
        found = []
        for plan in self.suites:
            for operation in plan.operations:
                for dtype, size in (
                    [(DataType.FLOAT32, 0)] if operation in UNSIZED else product(plan.dtypes, plan.sizes)
                ):
                    found.append((plan, Case(operation, self.num_ranks, self.num_hosts, dtype, size)))
        return found


def plan_stages(suites: Sequence[SuitePlan]) -> list[Stage]:
    """Group suites into stages: one host first, and few ranks first."""
    stages: dict[tuple[int, int], list[SuitePlan]] = {}
    for plan in suites:
        for num_ranks in plan.ranks:
            stages.setdefault((SUITES[plan.suite].num_hosts, num_ranks), []).append(plan)
    return [Stage(*key, stages[key]) for key in sorted(stages)]
