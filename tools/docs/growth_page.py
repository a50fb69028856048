"""The page of growth over ranks and hosts, made from reports: ``docs/growth.md``, with its plots.

::

    python tools/docs/growth_page.py BENCH.json MANY_RANKS.json     # of `ferrodist bench` and benchmarks/many_ranks.py

Needs the extra ``bench``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pages import wrap
from performance_page import read_report

from ferrodist.bench.cases import LIMITS, OURS, Peer
from ferrodist.bench.model import RING_SIZES
from ferrodist.bench.plots import save_growth_plots
from ferrodist.bench.report import format_bytes, format_ratio, format_seconds, growth_groups, growth_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.bench.report import CaseReport, Report

METHOD = Path(__file__).with_name("growth_method.md").read_text(encoding="utf-8")
"""The first part of the page."""

CONSTANTS = {
    "call": "a call, in a group of one rank",
    "copied_byte": "a byte copied, while all processors copy",
    "folded_byte": "a byte of an input added, while all add",
    "line": "a cache line that another processor wrote",
    "handovers": f"a processor, from a process to the next of {', '.join(map(str, RING_SIZES))} that share it",
    "message": "a message between hosts, sent and received",
    "sent_byte": "a byte of a large one",
}
STEPS = {
    "first line": "all ranks at Python's first line",
    "imports": "torch imported",
    "group made": "group made",
    "first allreduce": "the first allreduce",
    "allreduce": "an allreduce after that",
    "median rss": "RSS of a rank",
    "median pss": "PSS of a rank",
    "all pss": "PSS of all ranks",
    "all shared pss": "of that shared memory",
    "segments": "shared segments, as mapped",
}


def render_page(report: Report, many: dict[str, Any], plots: Sequence[str]) -> str:
    """Render the page; ``plots`` are the names of the pictures beside it. ValueError: the report has no growth."""
    groups = growth_groups(report)
    if report.constants is None or not groups:
        raise ValueError("the report has no several numbers of ranks beside the model")
    machine = report.machine
    about = (
        f"{machine.processor}, {machine.num_processors} processors, {format_bytes(machine.memory_bytes)} of memory;"
        f" {machine.system}; load before: {machine.load:.1f} for the collectives, {many['load']:.1f} for the"
        f" {many['ranks']} ranks. More than 1 means that others were working on the machine."
    )
    lines = [f"## Measured on {report.started[:10]}", "", wrap(about), ""]
    missing = [*report.left_out, *([] if report.is_complete else ["the run was interrupted"])]
    lines += [*(wrap(f"- {reason}", indent="  ") for reason in missing), *([""] if missing else [])]
    lines += ["| constant | |", "|---|---|"]
    for name, title in CONSTANTS.items():
        values = getattr(report.constants, name)
        text = ", ".join(map(_constant, values if isinstance(values, tuple) else [values]))
        lines.append(f"| {title} | {text} |")
    lines += ["", *(f"![Time of a call, with its processor time and the model]({plot})\n" for plot in plots)]
    for num_hosts in sorted({hosts for _, hosts, _, _ in groups}):
        lines += _host_tables(report, [cases for key, cases in groups.items() if key[1] == num_hosts], num_hosts)
    lines += ["### Faster than the model", ""]
    lines += [wrap(f"- {line.strip()}", indent="  ") for line in growth_lines(report)]
    return METHOD + "\n".join([*lines, "", *_many_ranks(many)]) + "\n"


def _constant(seconds: float) -> str:
    return format_seconds(seconds) if seconds >= 1e-9 else f"{seconds * 1e12:.0f} ps"


def _host_tables(report: Report, groups: Sequence[Sequence[CaseReport]], num_hosts: int) -> list[str]:
    counts = sorted({case.num_ranks for cases in groups for case in cases})
    heading = ["| |" + "".join(f" {count} ranks |" for count in counts), "|---" * (len(counts) + 1) + "|"]
    times, works = [], []
    for cases in groups:
        of_count = {case.num_ranks: case for case in cases}
        title = f"| {cases[0].operation.value}, {format_bytes(cases[0].size_bytes)} |"
        times.append(title + "".join(f" {_time(of_count.get(count))} |" for count in counts))
        works.append(title + "".join(f" {_work(report, of_count.get(count))} |" for count in counts))
    where = "One host" if num_hosts == 1 else f"{num_hosts} hosts"
    return [
        *(f"### {where}", "", "Time, and that of the fastest other library over it (below 1 it is faster):", ""),
        *(*heading, *times, "", "Processor time, and over the model's time:", "", *heading, *works, ""),
    ]


def _time(case: CaseReport | None) -> str:
    native = case.measurement(Peer.NATIVE) if case else None
    if case is None or native is None:
        return "-"
    others = [one.median for one in case.measurements if one.peer not in {*OURS, *LIMITS}]
    return format_seconds(native.median) + (f" ({format_ratio(min(others) / native.median)})" if others else "")


def _work(report: Report, case: CaseReport | None) -> str:
    native = case.measurement(Peer.NATIVE) if case else None
    predicted = report.predict(case) if case else None
    if native is None or predicted is None:
        return "-"
    return f"{format_seconds(native.work_seconds)} ({format_ratio(native.work_seconds / predicted)})"


def _many_ranks(many: dict[str, Any]) -> list[str]:
    """The table of a large group."""
    figures: dict[str, dict[str, float]] = many["figures"]
    times = list(STEPS)[:5]
    lines = [f"## {many['ranks']} ranks on this machine", ""]
    text = (
        f"`python benchmarks/many_ranks.py`, {many['started'][:10]}: `ferrodist run` starts the ranks; the first three"
        " times are the last rank's, since the start of the launcher. ferrodist loads most of its modules when a group"
        " is made, torch.distributed when torch is imported. PSS counts a page that ranks share by each one's part."
    )
    lines += [wrap(text), "", f"| | {' | '.join(figures)} |", "|---" * (len(figures) + 1) + "|"]
    for name, title in STEPS.items():
        cells = [
            format_seconds(values[name]) if name in times else format_bytes(round(values[name]))
            for values in figures.values()
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page and its plots, or exit with an error."""
    parser = argparse.ArgumentParser(prog="python tools/docs/growth_page.py", description="Write the page.")
    parser.add_argument("report", type=Path, help="JSON of ferrodist bench --suites growth")
    parser.add_argument("many", type=Path, help="JSON of benchmarks/many_ranks.py")
    parser.add_argument("--docs", type=Path, metavar="PATH", default=Path("docs/growth.md"), help="(%(default)s)")
    options = parser.parse_args(arguments)
    try:
        report, many = read_report(options.report), json.loads(options.many.read_bytes())
        plots = save_growth_plots(options.docs, report)
        options.docs.write_text(render_page(report, many, [plot.name for plot in plots]), encoding="utf-8")
    except (ValueError, KeyError, OSError) as error:
        sys.exit(f"growth_page.py: {error!r}")


if __name__ == "__main__":
    main()
