"""What a run measures, and in which order: peers are started once for all suites that want them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ferrodist.bench.cases import Case, DataType, Operation
from ferrodist.bench.suites import SUITES, Suite
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.bench.peers import Peer
    from ferrodist.bench.rounds import RoundSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """One suite: every combination of these.

    Args:
        suite: Which.
        operations: Operations.
        ranks: Numbers of ranks.
        dtypes: Types.
        sizes: Bytes, for operations that have a size.
        peers: Who is measured.
    """

    suite: Suite
    operations: Sequence[Operation]
    ranks: Sequence[int]
    dtypes: Sequence[DataType]
    sizes: Sequence[int]
    peers: Sequence[Peer]

    def cases(self, num_ranks: int) -> list[Case]:
        """Its cases on a number of ranks, in order."""
        num_hosts = SUITES[self.suite].num_hosts
        cases = []
        for operation in self.operations:
            if not operation.has_size:
                cases.append(Case(operation=operation, num_ranks=num_ranks, num_hosts=num_hosts))
                continue
            cases += [
                Case(operation=operation, num_ranks=num_ranks, num_hosts=num_hosts, dtype=dtype, size_bytes=size)
                for dtype in self.dtypes
                for size in self.sizes
            ]
        return cases


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run.

    Args:
        chapters: What to measure.
        rounds: How long.
        required: Whose absence ends the run.
    """

    chapters: Sequence[Chapter]
    rounds: RoundSettings
    required: Peer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What is measured with the peers of some number of ranks on some number of hosts.

    Args:
        num_hosts: Hosts.
        num_ranks: Ranks.
        chapters: The suites that have cases there.
    """

    num_hosts: int
    num_ranks: int
    chapters: Sequence[Chapter]

    @property
    def peers(self) -> list[Peer]:
        """Who is started, in the order of the tables."""
        return list(dict.fromkeys(peer for chapter in self.chapters for peer in chapter.peers))

    @property
    def title(self) -> str:
        """Return "2 ranks on 2 hosts", or "2 ranks" on one."""
        return counted(self.num_ranks, "rank") + (f" on {self.num_hosts} hosts" if self.num_hosts > 1 else "")

    def cases(self) -> list[tuple[Chapter, Case]]:
        """Its cases, and whose each is."""
        return [(chapter, case) for chapter in self.chapters for case in chapter.cases(self.num_ranks)]


def stages_of(plan: Plan) -> list[Stage]:
    """The stages of a plan, one host first, and few ranks first."""
    places = sorted({(SUITES[chapter.suite].num_hosts, ranks) for chapter in plan.chapters for ranks in chapter.ranks})
    return [
        Stage(
            num_hosts=num_hosts,
            num_ranks=num_ranks,
            chapters=[
                chapter
                for chapter in plan.chapters
                if num_ranks in chapter.ranks and SUITES[chapter.suite].num_hosts == num_hosts
            ],
        )
        for num_hosts, num_ranks in places
    ]
