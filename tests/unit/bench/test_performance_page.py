"""The page docs/performance.md, made from reports."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the extra 'bench' is not installed")

from performance_page import METHOD, main, read_report, render_page, write_page
from report_samples import BARRIER, LOST, OVERLAP, WON, case, measured, report

from ferrodist.bench.cases import Peer
from ferrodist.bench.report import write_report

PAGE = Path(__file__).parents[3] / "docs" / "performance.md"


def test_the_page(tmp_path):
    """It has the method, the machine, a table for each collective, losses in bold, and a plot beside it."""
    write_page(tmp_path / "performance.md", [report(LOST, WON, BARRIER)])
    text = (tmp_path / "performance.md").read_text(encoding="utf-8")
    assert text.startswith(METHOD)
    assert "## Measured on 2026-01-02\n\nProcessor X, 2 processors (L3 32768K), 8 GiB of\n" in text
    assert "| 16 KiB | 5 us [4.20 us, 5.98 us] (2.50) | 50 us (10.0) | **4 us (0.80)** | 2 us |" in text
    assert "| 8 B | 4 us [4 us, 4 us] | 8 us (2.00) | - | - |" in text
    assert "#### barrier, 2 ranks\n\n| size | ferrodist [p10, p99] |\n|---|---|\n| - | 1 us [1 us, 1 us] |" in text
    assert "| MPICH | 2 ranks | no wheel / none | not measured |" in text
    assert "- ferrodist was slower than a peer in 1 of 2 cases:\n  - allreduce" in text
    assert "](performance-1.png)" in text
    assert (tmp_path / "performance-1.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_is_read_back(tmp_path):
    """JSON holds all of it; another file is refused with its name."""
    path = tmp_path / "report.json"
    write_report(path, report(LOST, BARRIER))
    assert read_report(path) == report(LOST, BARRIER)
    path.write_text('{"cases": 1}')
    with pytest.raises(ValueError, match=r"report\.json is no report"):
        read_report(path)
    other = report()
    other.format = 99
    write_report(path, other)
    with pytest.raises(ValueError, match="format 99"):
        read_report(path)


def test_the_page_has_a_section_for_each_suite():
    """In the suites' order, with why a peer has no figure."""
    made = case(
        measured(Peer.NATIVE, 9),
        operation="new_group",
        suite="groups",
        size_bytes=0,
        not_offered={Peer.MPICH: "no groups"},
    )
    text = render_page([report(made, OVERLAP, WON)], [None])
    headings = [line for line in text.splitlines() if line.startswith(("### ", "#### "))]
    assert headings == [
        *("### Collectives", "#### allreduce, 2 ranks, float32"),
        *("### An asynchronous allreduce beside a computation", "#### overlap, 2 ranks, float32"),
        *("### Making groups", "#### new_group, 2 ranks"),
        "### Where ferrodist is slower, and what is missing",
    ]
    assert "\n- MPICH: no groups.\n" in text
    assert "| 1.50 [1.50, 1.50]; alone 5 ms, computing 4 ms, together 7.50 ms | **1.20 (0.80); alone 5 ms" in text


def test_the_page_in_docs_is_as_it_would_be_written():
    """docs/performance.md begins with the method; measurements follow."""
    if not PAGE.exists():
        pytest.skip("the documents are not here: this is an installed ferrodist")
    text = PAGE.read_text(encoding="utf-8")
    assert text.startswith(METHOD)
    assert text == render_page([], []) or "## Measured on 2" in text


def test_the_command_writes_a_page_of_several_reports_or_none(tmp_path):
    """A file that is not a report is an error."""
    path, page = tmp_path / "report.json", tmp_path / "page.md"
    write_report(path, report(WON))
    main(["--docs", str(page), str(path), str(path)])
    assert page.read_text().count("## Measured on 2") == 2
    main(["--docs", str(page)])
    assert page.read_text() == METHOD
    path.write_text("{}")
    with pytest.raises(SystemExit, match="is no report"):
        main(["--docs", str(page), str(path)])
