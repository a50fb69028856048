"""The page of measurements, made from reports of ``ferrodist bench``: ``docs/performance.md``.

::

    python tools/docs/performance_page.py REPORT.json ...     # into docs/performance.md, with the plots beside it

Needs the extra ``bench``. The page is the method, and each report's machine, tables and losses.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from pages import wrap

from ferrodist.bench.cases import LIMITS, OURS, Peer, Suite, format_ranks
from ferrodist.bench.plots import save_plot
from ferrodist.bench.report import FORMAT, Report, format_bytes, format_ratio, summary_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.bench.report import CaseReport, PeerReport

METHOD = Path(__file__).with_name("performance_method.md").read_text(encoding="utf-8")
"""The first part of the page: how the figures are measured."""

TITLES = {
    Suite.COLLECTIVES: "Collectives",
    Suite.MESSAGES: "Messages from rank to rank",
    Suite.SUBMIT: "Starting an asynchronous allreduce",
    Suite.OVERLAP: "An asynchronous allreduce beside a computation",
    Suite.GROUPS: "Making groups",
    Suite.HOSTS: "Two hosts",
    Suite.GROWTH: "More ranks and hosts",
}


def read_report(path: Path) -> Report:
    """Read a report; ValueError if the file holds something else."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no report of ferrodist bench: {error}") from None
    if report.format != FORMAT:
        raise ValueError(f"{path} has format {report.format}, and this version reads {FORMAT}")
    return report


def write_page(path: Path, reports: Sequence[Report]) -> None:
    """Write the page, and each report's plot beside it."""
    pictures = []
    for index, report in enumerate(reports, 1):
        picture = path.with_name(f"{path.stem}-{index}.png")
        pictures.append(picture.name if save_plot(picture, report) else None)
    path.write_text(render_page(reports, pictures), encoding="utf-8")


def render_page(reports: Sequence[Report], pictures: Sequence[str | None]) -> str:
    """Render the page.

    Args:
        reports: The reports; without any, the page holds the method.
        pictures: For each report the file name of its plot, if it has one.
    """
    parts = [METHOD]
    for report, picture in zip(reports, pictures, strict=True):
        parts.append("\n".join(_section(report, picture)) + "\n")
    return "\n".join(parts)


def _section(report: Report, picture: str | None) -> list[str]:
    lines = [
        f"## Measured on {report.started[:10]}",
        "",
        *_facts(report),
        "",
        *_peer_table(report),
        "",
    ]
    if picture is not None:
        lines += [f"![Time over size, for each operation]({picture})", ""]
    for suite in Suite:
        cases = [case for case in report.cases if case.suite is suite]
        if cases:
            lines += [f"### {TITLES[suite]}", "", *_suite_tables(cases)]
    return [*lines, "### Where ferrodist is slower, and what is missing", "", *_summary(report)]


def _suite_tables(cases: Sequence[CaseReport]) -> list[str]:
    groups: dict[str, list[CaseReport]] = {}
    for case in cases:
        title = ", ".join(
            filter(None, (case.operation.value, _where(case), case.dtype.value if case.size_bytes else ""))
        )
        groups.setdefault(title, []).append(case)
    lines = []
    for title, chosen in groups.items():
        lines += [f"#### {title}", "", *_case_table(chosen), *_reasons(chosen), ""]
    return lines


def _reasons(cases: Sequence[CaseReport]) -> list[str]:
    """The reasons of peers without a figure."""
    found = {(peer, reason): None for case in cases for peer, reason in case.not_offered.items()}
    return ["", *(f"- {peer.title}: {reason}." for peer, reason in found)] if found else []


def _facts(report: Report) -> list[str]:
    machine = report.machine
    caches = ", ".join(f"{name} {size}" for name, size in machine.caches.items())
    settings = ", ".join(f"{name}: {value}" for name, value in report.settings.items())
    ending = "" if report.is_complete else " and was interrupted"
    return [
        f"{machine.processor}, {machine.num_processors} processors ({caches}), {format_bytes(machine.memory_bytes)} of",
        f"memory; {machine.system}, huge pages: {machine.huge_pages or 'unknown'}; Python {machine.python};",
        f"load before: {machine.load:.2f}. ferrodist {report.ferrodist}. {settings}.",
        f"The run took {report.seconds:.0f} s{ending}.",
    ]


def _peer_table(report: Report) -> list[str]:
    lines = ["| peer | where | versions | started by |", "|---|---|---|---|"]
    for peer in report.peers:
        what = peer.reason or ", ".join(f"{name} {version}" for name, version in peer.versions.items())
        command = f"`{peer.command}`" if peer.command else "not measured"
        lines.append(f"| {peer.peer.title} | {_where(peer)} | {_cell(what)} | {command} |")
    return lines


def _case_table(cases: Sequence[CaseReport]) -> list[str]:
    """A row a size: our median, its percentiles and ratio to the limit; the others' medians and ratios to ours."""
    peers = [peer for peer in Peer if any(case.measurement(peer) for case in cases)]
    has_limit = any(case.measurement(peer) for case in cases for peer in LIMITS)
    headings = ["size", *(f"{peer.title}{_explanation(peer, has_limit=has_limit)}" for peer in peers)]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for case in cases:
        cells = [format_bytes(case.size_bytes) if case.size_bytes else "-", *(_figures(case, peer) for peer in peers)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _explanation(peer: Peer, *, has_limit: bool) -> str:
    """The heading of the figures beside a peer's median."""
    if peer in OURS:
        return " [p10, p99] (/limit)" if has_limit else " [p10, p99]"
    return "" if peer in LIMITS else " (/ferrodist)"


def _figures(case: CaseReport, peer: Peer) -> str:
    measured = case.measurement(peer)
    if measured is None:
        return "failed" if peer in case.failures else "-"
    median = case.format_value(measured.median)
    if peer in LIMITS:
        return median
    parts = f"; {measured.format_parts()}" if measured.parts else ""
    if peer in OURS:
        to_limit = case.ratio(measured, LIMITS)
        spread = f"{median} [{case.format_value(measured.p10)}, {case.format_value(measured.p99)}]"
        return (spread if to_limit is None else f"{spread} ({format_ratio(to_limit)})") + parts
    text = f"{median} ({format_ratio(case.ratio(measured, OURS))}){parts}"
    return f"**{text}**" if measured in case.faster_peers else text


def _summary(report: Report) -> list[str]:
    return [
        wrap(f"  - {line.strip()}", indent="    ") if line.startswith("  ") else wrap(f"- {line}", indent="  ")
        for line in summary_lines(report)
    ]


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")


def _where(of: CaseReport | PeerReport) -> str:
    return format_ranks(of.num_ranks, of.num_hosts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page, or exit with an error."""
    parser = argparse.ArgumentParser(prog="python tools/docs/performance_page.py", description="Write the page.")
    parser.add_argument("reports", nargs="*", type=Path, metavar="REPORT", help="JSON of ferrodist bench")
    parser.add_argument("--docs", type=Path, metavar="PATH", default=Path("docs/performance.md"), help="(%(default)s)")
    options = parser.parse_args(arguments)
    try:
        write_page(options.docs, [read_report(path) for path in options.reports])
    except (ValueError, OSError) as error:
        sys.exit(f"performance_page.py: {error}")


if __name__ == "__main__":
    main()
