"""The page docs/growth.md, made from a report and the figures of a large group."""

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the extra 'bench' is not installed")

from growth_page import METHOD, STEPS, main
from report_samples import WON, growth_report, report

from ferrodist.bench.report import write_report

PAGE = Path(__file__).parents[3] / "docs" / "growth.md"


def test_the_page_has_times_work_and_a_large_group(tmp_path):
    """With the model's constants, tables by hosts, plots beside it, and what grew faster."""
    made = growth_report()
    made.left_out = ["left out, 8 hosts: no root"]
    write_report(tmp_path / "bench.json", made)
    values = {name: 0.25 if index < 5 else 3.0 * (1 << 20) for index, name in enumerate(STEPS)}
    many = {
        "started": "2026-01-03T00:00:00",
        "load": 0.5,
        "ranks": 64,
        "figures": {"ferrodist": values, "gloo": values},
    }
    (tmp_path / "many.json").write_text(json.dumps(many))
    main([str(tmp_path / "bench.json"), str(tmp_path / "many.json"), "--docs", str(tmp_path / "growth.md")])
    text = (tmp_path / "growth.md").read_text()
    assert text.startswith(METHOD)
    assert "| a byte copied, while all processors copy | 100 ps |\n" in text
    assert "\n\n- left out, 8 hosts: no root\n\n| constant |" in text
    assert "### One host\n\nTime, and" in text
    assert "### 2 hosts\n\nTime, and" in text
    assert "| | 2 ranks | 4 ranks |\n|---|---|---|\n| allreduce, 8 B | 2 us (200) | 20 us (40.0) |\n" in text
    assert "| allreduce, 8 B | 2 us (1.96) | 20 us (3.29) |\n" in text
    assert "- allreduce, 4 ranks, float32, 8 B: 10.0 times that of 2 ranks, by the model 5.96\n" in text
    assert "| | ferrodist | gloo |\n|---|---|---|\n| all ranks at Python's first line | 250 ms | 250 ms |" in text
    assert "| PSS of all ranks | 3 MiB | 3 MiB |" in text
    for name in ("growth-ranks.png", "growth-bytes.png"):
        assert f"]({name})" in text
        assert (tmp_path / name).exists()


def test_a_report_without_growth_is_refused(tmp_path):
    """One number of ranks has no growth."""
    write_report(tmp_path / "bench.json", report(WON))
    (tmp_path / "many.json").write_text("{}")
    with pytest.raises(SystemExit, match="no several numbers of ranks"):
        main([str(tmp_path / "bench.json"), str(tmp_path / "many.json"), "--docs", str(tmp_path / "growth.md")])
    assert not (tmp_path / "growth.md").exists()


def test_the_page_in_docs_begins_with_the_method():
    if not PAGE.exists():
        pytest.skip("the documents are not here: this is an installed ferrodist")
    text = PAGE.read_text(encoding="utf-8")
    assert text.startswith(METHOD)
    assert "## Measured on 2" in text
