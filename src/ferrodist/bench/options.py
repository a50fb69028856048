"""The options of ``ferrodist bench``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ferrodist.bench.cases import MAX_RANKS, DataType, Operation
from ferrodist.bench.peers import BACKENDS, Peer
from ferrodist.bench.plan import Chapter
from ferrodist.bench.quantities import parse_sizes
from ferrodist.bench.suites import SUITES, Suite
from ferrodist.launch.spec import check_rank_count

if TYPE_CHECKING:
    import argparse
    import enum
    from collections.abc import Sequence

if TYPE_CHECKING:
    Choice = TypeVar("Choice", bound=enum.Enum)


_LARGEST = 1 << 32
_MAX_ROUNDS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to measure, or which reports to write docs from.

    Args:
        chapters: The suites.
        required: Who must be measured: the run ends where it can't.
        num_rounds: Batches of each peer in a case.
        seconds: When a case has had enough of them.
        output: The folder that gets report and plot.
        reports: With ``--write-docs``: nothing is measured, and these reports become ``docs``.
        docs: Where the docs go.
    """

    chapters: tuple[Chapter, ...]
    required: Peer | None
    num_rounds: int
    seconds: float
    output: Path
    reports: tuple[Path, ...] | None
    docs: Path


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``ferrodist bench``."""
    option = parser.add_argument
    option("--suites", metavar="LIST", help=f"of {_values(Suite)} (default collectives)")
    option("--operations", metavar="LIST", help=f"of {_values(Operation)} (default all of a suite)")
    option("--sizes", metavar="LIST", help="bytes, such as 8,64K or 8..256M for powers of two (default: the suite's)")
    option("--ranks", metavar="LIST", help="numbers of ranks, such as 2,4 (default 2, and for groups 2,8)")
    option("--dtypes", metavar="LIST", default="float32", help=f"of {_values(DataType)} (default %(default)s)")
    who = parser.add_mutually_exclusive_group()
    who.add_argument(
        "--peers",
        metavar="LIST",
        help=f"of {_values(Peer)} (default the suite's: all but native-tcp, tcp, mpi, ucc, nccl, mpi4py)",
    )
    who.add_argument(
        "--backend",
        choices=BACKENDS,
        help="measure ferrodist over a library of this machine, beside its native engine (and mpi beside mpi4py);"
        " it is a failure if that can't be done",
    )
    option("--rounds", type=int, metavar="N", help="batches of each peer in a case (default 40)")
    option("--seconds", type=float, metavar="S", help="a case ends after this time, and 5 rounds (default 8)")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--quick", action="store_true", help="a look: three sizes, 10 rounds, 2 seconds")
    amount.add_argument("--full", action="store_true", help="all suites, collectives on 2 and 4 ranks")
    option(
        "--output", type=Path, metavar="DIR", default=Path("bench"), help="for report and plot (default %(default)s)"
    )
    option("--write-docs", nargs="*", type=Path, metavar="REPORT", help="measure nothing: make docs from reports")
    option("--docs", type=Path, metavar="PATH", default=Path("docs/performance.md"), help="(default %(default)s)")


def bench_options(arguments: argparse.Namespace) -> BenchOptions:
    """Turn parsed arguments into options.

    Raises:
        ValueError: For values that are unknown or out of range; the message names the option.
    """
    quick = arguments.quick
    options = BenchOptions(
        chapters=_chapters(arguments),
        required=BACKENDS[arguments.backend][0] if arguments.backend else None,
        num_rounds=arguments.rounds if arguments.rounds is not None else 10 if quick else 40,
        seconds=arguments.seconds if arguments.seconds is not None else 2.0 if quick else 8.0,
        output=arguments.output,
        reports=None if arguments.write_docs is None else tuple(arguments.write_docs),
        docs=arguments.docs,
    )
    if not 1 <= options.num_rounds <= _MAX_ROUNDS:
        raise ValueError(f"--rounds must be 1 to {_MAX_ROUNDS}, not {options.num_rounds}")
    if not 0 < options.seconds < float("inf"):
        raise ValueError(f"--seconds must be more than 0, not {options.seconds:g}")
    if options.output.exists() and not options.output.is_dir():
        raise ValueError(f"--output: {options.output} is a file; name a folder")
    for report in options.reports or ():
        if not report.is_file():
            raise ValueError(f"--write-docs: there is no file {report}")
    return options


def _chapters(arguments: argparse.Namespace) -> tuple[Chapter, ...]:
    """The suites that are asked for, each with its own defaults where the options leave some."""
    suites = _choices("--suites", arguments.suites or (_values(Suite) if arguments.full else "collectives"), Suite)
    operations = _choices("--operations", arguments.operations or _values(Operation), Operation)
    peers = _choices("--peers", arguments.peers, Peer) if arguments.peers else BACKENDS.get(arguments.backend)
    ranks = _ranks(arguments.ranks) if arguments.ranks else None
    sizes = _sizes(arguments.sizes) if arguments.sizes else None
    dtypes = _choices("--dtypes", arguments.dtypes, DataType)
    chapters = []
    for suite in suites:
        usual = SUITES[suite]
        possible = {*usual.peers, *usual.optional_peers}
        if arguments.backend and not possible.issuperset(BACKENDS[arguments.backend]):
            continue
        chapters.append(
            Chapter(
                suite=suite,
                operations=[operation for operation in usual.operations if operation in operations],
                ranks=ranks or (usual.full_ranks if arguments.full else usual.ranks),
                dtypes=dtypes,
                sizes=sizes or (usual.quick_sizes if arguments.quick else usual.sizes),
                peers=usual.peers if peers is None else [peer for peer in peers if peer in possible],
            )
        )
    who = "--backend" if arguments.backend else "--peers"
    _check_something_is_left(who, suites, [chapter.peers for chapter in chapters])
    _check_something_is_left("--operations", suites, [chapter.operations for chapter in chapters])
    return tuple(chapter for chapter in chapters if chapter.operations and chapter.peers)


def _check_something_is_left(option: str, suites: Sequence[Suite], chosen: Sequence[Sequence[object]]) -> None:
    if not any(chosen):
        raise ValueError(f"{option}: none of these belongs to {', '.join(suite.value for suite in suites)}")


def _values(kind: type[enum.Enum]) -> str:
    return ",".join(member.value for member in kind)


def _choices(option: str, text: str, kind: type[Choice]) -> tuple[Choice, ...]:
    """The members named in a list, each once."""
    names = [name.strip() for name in text.split(",")]
    known = {member.value: member for member in kind}
    for name in names:
        if name not in known:
            raise ValueError(f"{option}: there is no {name!r}; choose from {', '.join(known)}")
    return tuple(dict.fromkeys(known[name] for name in names))


def _ranks(text: str) -> tuple[int, ...]:
    ranks = []
    for word in text.split(","):
        if not word.strip().isdecimal() or not 2 <= int(word) <= MAX_RANKS:
            raise ValueError(f"--ranks must be numbers from 2 to {MAX_RANKS}, such as 2,4, not {word.strip()!r}")
        check_rank_count("--ranks", int(word))
        ranks.append(int(word))
    return tuple(dict.fromkeys(ranks))


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = parse_sizes(text)
    except ValueError as error:
        raise ValueError(f"--sizes: {error}") from None
    if sizes[-1] > _LARGEST:
        raise ValueError(f"--sizes: {sizes[-1]} bytes are more than the largest that is measured, 4G")
    return sizes
