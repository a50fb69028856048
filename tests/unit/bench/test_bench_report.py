"""Statistics, ratios, tables and plots of ferrodist bench."""

import importlib.metadata

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the extra 'bench' is not installed")

from report_samples import BARRIER, LOST, OVERLAP, WON, case, growth_report, measured, report

from ferrodist.bench.cases import LIMITS, OURS, Peer
from ferrodist.bench.cli import parse_sizes
from ferrodist.bench.plots import save_growth_plots, save_plot
from ferrodist.bench.report import (
    LOSS_MARK,
    Measurement,
    Report,
    case_lines,
    describe_machine,
    format_bytes,
    format_ratio,
    format_seconds,
    growth_lines,
    read_meminfo,
    summary_lines,
)


def test_a_report_from_a_source_tree(monkeypatch):
    """There is no version to name."""
    monkeypatch.setattr(importlib.metadata, "version", importlib.metadata.distribution)
    monkeypatch.setattr(importlib.metadata.Distribution, "discover", lambda **_: iter(()))
    assert Report(settings={}).ferrodist == "source tree"


@pytest.mark.parametrize("values", [[3.0], [1.0, 2.0], [3.0, 1.0, 2.0], [float(value) for value in range(101)]])
def test_percentiles_are_interpolated_as_in_numpy(values):
    """The order of the values does not matter."""
    made = Measurement.from_batches(Peer.NATIVE, values, 1, {})
    assert [made.p10, made.median, made.p99] == pytest.approx(np.percentile(values, [10, 50, 99]))


def test_ratios_compare_with_ferrodist_and_with_the_limit():
    """A peer's median over ours, and over the limit's; the limit is not a peer, and a tie is not faster."""
    ours, gloo, open_mpi, limit = LOST.measurements
    assert LOST.ours is ours
    assert (LOST.ratio(gloo, OURS), LOST.ratio(ours, OURS)) == (pytest.approx(10), 1)
    assert LOST.ratio(ours, LIMITS) == pytest.approx(2.5)
    assert LOST.faster_peers == [open_mpi]
    assert limit.median < ours.median
    assert case(measured(Peer.NATIVE, 1), measured(Peer.GLOO, 1)).faster_peers == []


def test_there_is_no_ratio_without_a_reference():
    """Without a measurement to compare with there is no ratio; ours is ferrodist's next backend without native."""
    alone = case(measured(Peer.GLOO, 1))
    assert alone.ours is None
    assert alone.ratio(alone.measurements[0], OURS) is None
    assert alone.ratio(alone.measurements[0], LIMITS) is None
    assert alone.faster_peers == []
    tcp = measured(Peer.TCP, 3)
    assert case(measured(Peer.GLOO, 1), tcp).ours is tcp


def test_the_table_marks_faster_peers():
    """Each peer has a line with its figures; one that beats ferrodist is marked, the limit is not."""
    lines = case_lines(LOST)
    assert lines[0] == "allreduce, 2 ranks, float32, 16 KiB"
    assert lines[1].split() == ["median", "p10", "p99", "/ours", "/limit"]
    assert lines[2].split() == ["ferrodist", "5", "us", "4.20", "us", "5.98", "us", "1.00", "2.50"]
    assert [LOSS_MARK in line for line in lines] == [False, False, False, False, True, False]
    assert len({line.index(" us") for line in lines[2:]}) == 1


def test_the_table_says_why_a_figure_is_missing():
    """Unsupported operations and failures have a line with the reason."""
    text = "\n".join(
        case_lines(case(measured(Peer.NATIVE, 1), not_offered={Peer.MPICH: "no"}, failures={Peer.GLOO: "died"}))
    )
    assert "MPICH                 -  no" in text
    assert "gloo                  FAILED: died" in text


def test_the_summary_hides_nothing():
    """It has missing peers, failures, lost cases, and a busy machine."""
    failed = case(measured(Peer.NATIVE, 1), failures={Peer.GLOO: "wrong result: x"})
    lines = summary_lines(report(LOST, WON, BARRIER, failed, load=1.5))
    assert lines == [
        "MPICH was not measured on 2 ranks: no wheel | none",
        "FAILED: allreduce of 16384 bytes (float32) on 2 ranks, gloo: wrong result: x",
        "ferrodist was slower than a peer in 1 of 2 cases:",
        "  allreduce, 2 ranks, float32, 16 KiB: Open MPI 4 us, ferrodist 5 us",
        "The machine was busy when the run began (load 1.5 on 2 processors): these figures say little.",
    ]
    assert summary_lines(report(WON))[-1] == "ferrodist was slower than a peer in 0 of 1 cases."


def test_an_overlap_is_shown_as_a_ratio_with_its_times():
    """The table has the ratio, and the times beside it."""
    lines = case_lines(OVERLAP)
    assert lines[2].split()[:5] == ["ferrodist", "1.50", "1.50", "1.50", "1.00"]
    assert lines[2].endswith("alone 5 ms, computing 4 ms, together 7.50 ms")
    assert lines[3].endswith(f"together 6 ms  {LOSS_MARK}")
    assert "  overlap, 2 ranks, float32, 16 KiB: gloo 1.20, ferrodist 1.50" in summary_lines(report(OVERLAP))


def test_two_hosts_are_named_and_compared_with_the_link(tmp_path):
    """The title says so, and the link's figures are the limit."""
    hosts = case(measured(Peer.NATIVE, 4), measured(Peer.IPERF3, 2), suite="hosts", num_hosts=2)
    assert case_lines(hosts)[0] == "allreduce, 2 ranks on 2 hosts, float32, 16 KiB"
    assert hosts.ratio(hosts.measurements[0], LIMITS) == pytest.approx(2)
    assert case(measured(Peer.NATIVE, 4), measured(Peer.IPERF3, 2)).faster_peers == []
    assert save_plot(tmp_path / "plot.png", report(hosts, WON))


def test_a_report_without_sizes_has_no_plot(tmp_path):
    """Barriers have no size: without other cases no file is written."""
    assert not save_plot(tmp_path / "plot.png", report(BARRIER))
    assert not (tmp_path / "plot.png").exists()


def test_the_model_is_in_the_tables_and_its_excess_in_the_summary():
    """Time that grows over the ranks by a quarter more than the model says is listed; the model has a line a case."""
    made = growth_report()
    first, last = made.cases[0], made.cases[2]
    assert (first.num_ranks, last.num_ranks, last.size_bytes) == (2, 4, 8)
    assert case_lines(first, made.predict(first))[-1].split() == ["model", "of", "ferrodist", "1.02", "us", "0.51"]
    # By hand: of 4 ranks on 2 processors, (4 us + 160 ns of lines and some of bytes) / 2 + 4 turns of 2 us / 2.
    assert made.predict(last) == pytest.approx(6.085e-6, rel=0.001)
    assert growth_lines(made) == [
        "ferrodist's time grew over the ranks by a quarter more than the model says in 2 of 4 cases:",
        "  allreduce, 4 ranks, float32, 8 B: 10.0 times the time of 2 ranks, by the model 5.96",
        "  allreduce, 4 ranks on 2 hosts, float32, 8 B: 10.0 times the time of 2 ranks, by the model 4.40",
    ]
    assert set(growth_lines(made)) <= set(summary_lines(made))


def test_growth_is_drawn_over_ranks_and_over_size(tmp_path):
    """In two pictures, if there are constants and two numbers of ranks; the suite has no others."""
    made = growth_report()
    paths = save_growth_plots(tmp_path / "bench.json", made)
    assert [path.name for path in paths] == ["bench-ranks.png", "bench-bytes.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert not save_plot(tmp_path / "bench.png", made)
    made.cases = [one for one in made.cases if one.num_ranks == 2]
    assert (save_growth_plots(tmp_path / "none", made), growth_lines(made)) == ([], [])
    assert save_growth_plots(tmp_path / "none", report(WON)) == []


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8", (8,)),
        ("1K, 8,1k", (8, 1024)),
        ("2..9", (2, 4, 8)),
        ("1MiB,64KB", (65536, 1 << 20)),
        ("6..24", (6, 12, 24)),
    ],
)
def test_sizes_are_parsed(text, sizes):
    """Lists, units and ranges; sorted, each once."""
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "x", "8,", "0", "-1", "1.5K", "8T", "9..8", "8..", "..8", "9" * 13])
def test_invalid_sizes_are_refused(text):
    """The error says so."""
    with pytest.raises(ValueError, match=r"is no size|ends before"):
        parse_sizes(text)


def test_quantities_have_three_digits():
    """Units change where the digits would run out."""
    assert [format_bytes(size) for size in (8, 1024, 1536, 1 << 20, 3 << 30)] == [
        *("8 B", "1 KiB", "1.50 KiB", "1 MiB", "3 GiB")
    ]
    assert [format_seconds(value) for value in (1.234e-7, 9.9996e-7, 2.34567e-5, 0.25, 2.5)] == [
        *("123 ns", "1.00 us", "23.5 us", "250 ms", "2.50 s")
    ]
    assert [format_ratio(value) for value in (None, 0.00123, 1, 9.996, 99.96, 1234.5)] == [
        *("-", "0.0012", "1.00", "10.0", "100", "1234")
    ]


def test_this_machine_is_described():
    """It has processors and memory, and says when it is busy."""
    here = describe_machine()
    assert here.processor
    assert here.num_processors >= 1
    assert here.memory_bytes > read_meminfo("MemAvailable") > 0
    assert "was busy" in summary_lines(report(load=1.0))[-1]
    assert "was busy" not in summary_lines(report(load=0.5))[-1]
