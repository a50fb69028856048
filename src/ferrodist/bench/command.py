"""The command ``ferrodist bench``. What needs the extra is imported when it runs; torch is for the ranks."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

from ferrodist.bench.plan import Plan, stages_of
from ferrodist.installation import how_to_install
from ferrodist.launch.output import print_warning

if TYPE_CHECKING:
    from pathlib import Path

    from ferrodist.bench.options import BenchOptions
    from ferrodist.bench.report import Report

_REQUIRED = {"matplotlib": "matplotlib", "rich": "rich"}
_MIN_ROUNDS = 5


def run_bench(options: BenchOptions) -> int:
    """Measure, show and write; or write docs from what was measured.

    Returns:
        0; 1 when a peer failed or gave a wrong result in a case, ferrodist or the backend that was asked for could not
        be measured, or the extra ``bench`` is not installed; 130 for Ctrl-C, after writing what there is.
    """
    missing = [package for module, package in _REQUIRED.items() if importlib.util.find_spec(module) is None]
    if missing:
        print_warning(
            f"ferrodist: bench needs {', '.join(missing)}, which is not installed here: {how_to_install('bench')}\n"
        )
        return 1
    if options.reports is not None:
        return _write_docs(options.docs, options.reports)
    from ferrodist.bench.comparison import (  # noqa: PLC0415 - needs msgspec
        RequiredPeerError,
        begin_report,
        run_comparison,
    )
    from ferrodist.bench.display import make_display  # noqa: PLC0415 - needs the extra
    from ferrodist.bench.rounds import RoundSettings  # noqa: PLC0415 - needs msgspec

    plan = Plan(
        chapters=options.chapters,
        rounds=RoundSettings(num_rounds=options.num_rounds, min_rounds=_MIN_ROUNDS, seconds=options.seconds),
        required=options.required,
    )
    options.output.mkdir(parents=True, exist_ok=True)
    report = begin_report(plan)
    interrupted, missing_peer = False, ""
    with make_display(sum(len(stage.cases()) for stage in stages_of(plan))) as display:
        try:
            run_comparison(plan, report, display)
        except KeyboardInterrupt:
            interrupted = True
        except RequiredPeerError as error:
            missing_peer = str(error)
    if report.cases or not missing_peer:
        _conclude(options.output, report)
    if missing_peer:
        print_warning(f"ferrodist: {missing_peer}\n")
        return 1
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
        print_warning(f"ferrodist: {error}\n")
        return 1
    return 0
