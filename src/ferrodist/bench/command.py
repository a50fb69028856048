"""The command ``ferrodist bench``. What needs the extra is imported when it runs; torch is for the ranks."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ferrodist.bench.cases import MAX_RANKS, Collective, DataType
from ferrodist.bench.peers import Peer
from ferrodist.bench.quantities import parse_sizes
from ferrodist.launch.console import complain
from ferrodist.launch.limits import check_rank_count

if TYPE_CHECKING:
    import argparse
    import enum

    from ferrodist.bench.report import Report

    Choice = TypeVar("Choice", bound=enum.Enum)

__all__ = ["BenchOptions", "add_bench_arguments", "bench_options", "run_bench"]

_REQUIRED = {"matplotlib": "matplotlib", "rich": "rich"}
_SIZES = "8,128,1K,4K,16K,64K,256K,1M,8M,64M,256M"
_QUICK_SIZES = "8,16K,1M"
_LARGEST = 1 << 32
_MAX_ROUNDS = 100_000
_MIN_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to measure, or which reports to write docs from.

    Args:
        collectives: Operations.
        ranks: Numbers of ranks.
        dtypes: Types.
        sizes: Bytes of a rank's larger tensor.
        peers: Who is measured.
        num_rounds: Batches of each peer in a case.
        seconds: When a case has had enough of them.
        output: The folder that gets report and plot.
        reports: With ``--write-docs``: nothing is measured, and these reports become ``docs``.
        docs: Where the docs go.
    """

    collectives: tuple[Collective, ...]
    ranks: tuple[int, ...]
    dtypes: tuple[DataType, ...]
    sizes: tuple[int, ...]
    peers: tuple[Peer, ...]
    num_rounds: int
    seconds: float
    output: Path
    reports: tuple[Path, ...] | None
    docs: Path


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``ferrodist bench``."""
    option = parser.add_argument
    option("--collectives", metavar="LIST", help=f"of {_values(Collective)} (default all)")
    option("--sizes", metavar="LIST", help=f"bytes, such as 8,64K or 8..256M for powers of two (default {_SIZES})")
    option("--ranks", metavar="LIST", default="2", help="numbers of ranks, such as 2,4 (default %(default)s)")
    option("--dtypes", metavar="LIST", default="float32", help=f"of {_values(DataType)} (default %(default)s)")
    option("--peers", metavar="LIST", help=f"of {_values(Peer)} (default all but native-tcp and tcp)")
    option("--rounds", type=int, metavar="N", help="batches of each peer in a case (default 40)")
    option("--seconds", type=float, metavar="S", help="a case ends after this time, and 5 rounds (default 8)")
    option("--quick", action="store_true", help=f"a look: sizes {_QUICK_SIZES}, 10 rounds, 2 seconds")
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
    sizes = arguments.sizes or (_QUICK_SIZES if quick else _SIZES)
    usual_peers = ",".join(peer.value for peer in Peer if peer not in {Peer.NATIVE_TCP, Peer.TCP})
    options = BenchOptions(
        collectives=_choices("--collectives", arguments.collectives or _values(Collective), Collective),
        ranks=_ranks(arguments.ranks),
        dtypes=_choices("--dtypes", arguments.dtypes, DataType),
        sizes=_sizes(sizes),
        peers=_choices("--peers", arguments.peers or usual_peers, Peer),
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


def run_bench(options: BenchOptions) -> int:
    """Measure, show and write; or write docs from what was measured.

    Returns:
        0; 1 when a peer failed or gave a wrong result in a case, ferrodist could not be measured at all, or the extra
        ``bench`` is not installed; 130 for Ctrl-C, after writing what there is.
    """
    missing = [package for module, package in _REQUIRED.items() if importlib.util.find_spec(module) is None]
    if missing:
        complain(
            f"ferrodist: bench needs {', '.join(missing)}, which is not installed here:"
            " pip install 'ferrodist[bench]'\n"
        )
        return 1
    if options.reports is not None:
        return _write_docs(options.docs, options.reports)
    from ferrodist.bench.comparison import Plan, begin_report, cases_of, run_comparison  # noqa: PLC0415 - needs msgspec
    from ferrodist.bench.display import make_display  # noqa: PLC0415 - needs the extra
    from ferrodist.bench.rounds import RoundSettings  # noqa: PLC0415 - needs msgspec

    plan = Plan(
        collectives=options.collectives,
        ranks=options.ranks,
        dtypes=options.dtypes,
        sizes=options.sizes,
        peers=options.peers,
        rounds=RoundSettings(num_rounds=options.num_rounds, min_rounds=_MIN_ROUNDS, seconds=options.seconds),
    )
    options.output.mkdir(parents=True, exist_ok=True)
    report = begin_report(plan)
    interrupted = False
    with make_display(sum(len(cases_of(plan, num_ranks)) for num_ranks in plan.ranks)) as display:
        try:
            run_comparison(plan, report, display)
        except KeyboardInterrupt:
            interrupted = True
    _conclude(options.output, report)
    return 130 if interrupted else _exit_code(report)


def _conclude(folder: Path, report: Report) -> None:
    """Write a report and its plot, and say what came out."""
    from ferrodist.bench.plot import save_plot  # noqa: PLC0415 - needs the extra
    from ferrodist.bench.report import write_report  # noqa: PLC0415 - needs msgspec
    from ferrodist.bench.table import summary_lines  # noqa: PLC0415 - needs msgspec

    name = f"bench-{report.started[:19].replace(':', '')}"
    lines = ["", *summary_lines(report), f"report: {folder / name}.json"]
    write_report(folder / f"{name}.json", report)
    if save_plot(folder / f"{name}.png", report):
        lines.append(f"plot: {folder / name}.png")
    if sys.stdout is not None:
        sys.stdout.write("\n".join(lines) + "\n")


def _exit_code(report: Report) -> int:
    return 1 if report.failures or not any(case.ours for case in report.cases) else 0


def _write_docs(path: Path, reports: tuple[Path, ...]) -> int:
    from ferrodist.bench.document import write_document  # noqa: PLC0415 - needs the extra
    from ferrodist.bench.report import read_report  # noqa: PLC0415 - needs msgspec

    try:
        write_document(path, [read_report(report) for report in reports])
    except ValueError as error:
        complain(f"ferrodist: {error}\n")
        return 1
    return 0


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
