"""The command ``ferrodist bench``: options, output, exit code. Only the ranks import torch."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ferrodist.bench.cases import (
    BACKENDS,
    MAX_RANKS,
    SUITES,
    BenchOptions,
    DataType,
    Operation,
    Peer,
    Suite,
    plan_stages,
)
from ferrodist.installation import describe_missing
from ferrodist.launch.host_limits import check_rank_count
from ferrodist.launch.terminal import print_warning

if TYPE_CHECKING:
    import argparse
    import enum

    from ferrodist.bench.cases import SuitePlan

    Choice = TypeVar("Choice", bound=enum.Enum)

_REQUIRED = {"matplotlib": "matplotlib", "rich": "rich"}
_FULL = ",".join(suite.value for suite in Suite if suite is not Suite.GROWTH)  # the suites of --full
_MAX_SIZE_BYTES = 1 << 32
_MAX_ROUNDS = 100_000
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``ferrodist bench``."""
    option = parser.add_argument
    option("--suites", metavar="LIST", help=f"of {_values(Suite)} (default collectives)")
    option("--operations", metavar="LIST", help=f"of {_values(Operation)} (default all of a suite)")
    option("--sizes", metavar="LIST", help="bytes, such as 8,64K or 8..256M for powers of two (default: the suite's)")
    ranks_help = "numbers of ranks, such as 2,4 (default 2, for groups 2,8, for growth 2,4,8,16,32); several are also"
    option("--ranks", metavar="LIST", help=f"{ranks_help} plotted over the ranks, beside a model of the time")
    option("--hosts", metavar="LIST", help="of growth: numbers of hosts, emulated on this one (default 1,2,4,8)")
    option("--dtypes", metavar="LIST", default="float32", help=f"of {_values(DataType)} (default %(default)s)")
    peers, left_out = parser.add_mutually_exclusive_group(), "native-tcp, tcp, mpi, ucc, nccl, mpi4py"
    peers.add_argument("--peers", metavar="LIST", help=f"of {_values(Peer)} (default the suite's: all but {left_out})")
    beside = "measure ferrodist over a library of this machine, beside its native engine (and mpi beside mpi4py)"
    peers.add_argument("--backend", choices=BACKENDS, help=f"{beside}; it is a failure if that can't be done")
    option("--rounds", type=int, metavar="N", help="batches of each peer in a case (default 40)")
    option("--seconds", type=float, metavar="S", help="a case ends after this time, and 5 rounds (default 8)")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--quick", action="store_true", help="a look: three sizes, 10 rounds, 2 seconds")
    amount.add_argument("--full", action="store_true", help="all suites but growth, collectives on 2 and 4 ranks")
    output_help = "for report and plot (default %(default)s)"
    option("--output", type=Path, metavar="DIR", default=Path("bench"), help=output_help)


def bench_options(arguments: argparse.Namespace) -> BenchOptions:
    """Turn parsed arguments into options; a ValueError names an option whose value is unknown or out of range."""
    num_rounds, seconds, output = arguments.rounds, arguments.seconds, arguments.output
    num_rounds = (10 if arguments.quick else 40) if num_rounds is None else num_rounds
    seconds = (2.0 if arguments.quick else 8.0) if seconds is None else seconds
    if not 1 <= num_rounds <= _MAX_ROUNDS:
        raise ValueError(f"--rounds must be 1 to {_MAX_ROUNDS}, not {num_rounds}")
    if not 0 < seconds < float("inf"):
        raise ValueError(f"--seconds must be more than 0, not {seconds:g}")
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output: {output} is a file; name a folder")
    required = BACKENDS[arguments.backend][0] if arguments.backend else None
    return BenchOptions(_suite_plans(arguments), num_rounds, seconds, required, output)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Sizes in bytes of a list such as "8,16K,1M"; "8..1K" means the powers of two from 8 to 1024. Sorted, unique."""

    def parse(word: str) -> int:
        found = re.fullmatch(r"(\d{1,12})\s*([kmg]?)(?:i?b)?", word.strip().lower())
        if found is None or int(found[1]) == 0:
            hint = "write bytes, or a number with K, M or G, such as 64K"
            raise ValueError(f"--sizes: {word.strip()!r} is no size; {hint}")
        return int(found[1]) * _UNITS[found[2]]

    sizes: set[int] = set()
    for item in text.split(","):
        first, dots, last = item.partition("..")
        size, end = parse(first), parse(last if dots else first)
        if end < size:
            raise ValueError(f"--sizes: {item.strip()!r} ends before it begins")
        while size <= end:
            sizes.add(size)
            size *= 2
    if max(sizes) > _MAX_SIZE_BYTES:
        raise ValueError(f"--sizes: {max(sizes)} bytes are more than the largest that is measured, 4G")
    return tuple(sorted(sizes))


def run_bench(options: BenchOptions) -> int:
    """Measure, print and write; returns the exit code.

    1 when a peer failed or gave a wrong result in a case, ferrodist could not be measured, or the extra ``bench`` is
    not installed. RequiredPeerError: the backend that was asked for can't be measured. Then, and after Ctrl-C, there is
    a report of the cases that were measured.
    """
    if missing := describe_missing("bench", "bench", _REQUIRED):
        print_warning(missing)
        return 1
    from ferrodist.bench.driver import RunDisplay, run_suites  # noqa: PLC0415 - needs the extra
    from ferrodist.bench.plots import save_growth_plots, save_plot  # noqa: PLC0415 - the same
    from ferrodist.bench.report import Report, summary_lines, write_report  # noqa: PLC0415 - the same

    options.output.mkdir(parents=True, exist_ok=True)
    settings = {"rounds": f"{options.num_rounds}", "seconds for a case": f"{options.seconds:g}"}
    report = Report(settings={**settings, "threads of a rank": "1"})
    try:
        with RunDisplay(sum(map(len, plan_stages(options.suites).values()))) as display:
            run_suites(options, report, display)
    finally:
        if report.cases or report.is_complete:
            path = options.output / f"bench-{report.started[:19].replace(':', '')}.json"
            lines = ["", *summary_lines(report), f"report: {path}"]
            write_report(path, report)
            plots = [path.with_suffix(".png")] if save_plot(path.with_suffix(".png"), report) else []
            lines += [f"plot: {plot}" for plot in [*plots, *save_growth_plots(path, report)]]
            if sys.stdout is not None:
                sys.stdout.write("\n".join(lines) + "\n")
    return 1 if report.failures or not any(case.ours for case in report.cases) else 0


def _suite_plans(arguments: argparse.Namespace) -> list[SuitePlan]:
    """The chosen suites, with their defaults where the options leave something open."""
    suites = _choices("--suites", arguments.suites or (_FULL if arguments.full else "collectives"), Suite)
    operations = _choices("--operations", arguments.operations or _values(Operation), Operation)
    peers = _choices("--peers", arguments.peers, Peer) if arguments.peers else BACKENDS.get(arguments.backend)
    ranks = _parse_ranks(arguments.ranks) if arguments.ranks else None
    hosts = _parse_numbers("--hosts", arguments.hosts, 1) if arguments.hosts else None
    sizes = parse_sizes(arguments.sizes) if arguments.sizes else None
    dtypes = _choices("--dtypes", arguments.dtypes, DataType)
    plans = []
    for default in map(SUITES.__getitem__, suites):
        possible = {*default.peers, *default.optional_peers}
        if not arguments.backend or possible.issuperset(BACKENDS[arguments.backend]):
            plan = replace(
                default,
                operations=[operation for operation in default.operations if operation in operations],
                ranks=ranks or (arguments.full and default.full_ranks) or default.ranks,
                hosts=hosts or default.hosts if default.suite is Suite.GROWTH else default.hosts,
                dtypes=dtypes,
                sizes=sizes or (default.quick_sizes if arguments.quick else default.sizes),
                peers=default.peers if peers is None else [peer for peer in peers if peer in possible],
            )
            plans.append(plan)
    for option, is_left in (
        ("--backend" if arguments.backend else "--peers", any(plan.peers for plan in plans)),
        ("--operations", any(plan.operations for plan in plans)),
    ):
        if not is_left:
            raise ValueError(f"{option}: none of these belongs to {', '.join(suite.value for suite in suites)}")
    if hosts and Suite.GROWTH not in suites:
        raise ValueError("--hosts: only the suite growth has a choice of hosts; add --suites growth")
    if hosts and ranks and max(hosts) > max(ranks):
        raise ValueError(f"--hosts {max(hosts)} are more than the most ranks, {max(ranks)}")
    return [plan for plan in plans if plan.operations and plan.peers]


def _values(kind: type[enum.Enum]) -> str:
    return ",".join(member.value for member in kind)


def _choices(option: str, text: str, kind: type[Choice]) -> tuple[Choice, ...]:
    """The members that a list names, each once."""
    names = [name.strip() for name in text.split(",")]
    known = {member.value: member for member in kind}
    for name in names:
        if name not in known:
            raise ValueError(f"{option}: there is no {name!r}; choose from {', '.join(known)}")
    return tuple(dict.fromkeys(known[name] for name in names))


def _parse_ranks(text: str) -> tuple[int, ...]:
    ranks = _parse_numbers("--ranks", text, 2)
    check_rank_count("--ranks", max(ranks))
    return ranks


def _parse_numbers(option: str, text: str, least: int) -> tuple[int, ...]:
    """Each number of a list once."""
    for word in text.split(","):
        if not word.strip().isdecimal() or not least <= int(word) <= MAX_RANKS:
            raise ValueError(f"{option} must be numbers from {least} to {MAX_RANKS}, such as 2,4, not {word.strip()!r}")
    return tuple(dict.fromkeys(map(int, text.split(","))))
