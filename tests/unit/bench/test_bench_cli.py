"""The command ferrodist bench: its options, and what it does with a run."""

import importlib.util
import io
import json
import subprocess
import sys

import pytest

pytest.importorskip("matplotlib", reason="the extra 'bench' is not installed")
pytest.importorskip("rich", reason="the extra 'bench' is not installed")

from rich.console import Console

from ferrodist.bench import driver
from ferrodist.bench.cases import BACKENDS, DataType, Operation, Peer, Suite, format_ranks, plan_stages
from ferrodist.bench.cli import bench_options
from ferrodist.bench.report import CaseReport, Measurement
from ferrodist.cli.main import build_parser, main
from ferrodist.installation import how_to_install

_ASKED_FOR = {Peer.NATIVE_TCP, Peer.TCP, Peer.OVER_MPI, Peer.OVER_UCC, Peer.OVER_NCCL, Peer.MPI4PY}
"""The peers that are measured only when named."""


def parse(*arguments):
    return bench_options(build_parser().parse_args(["bench", *arguments]))


def filled(report, *, failures=None, peer=Peer.NATIVE):
    report.cases.append(
        CaseReport(
            suite=Suite.COLLECTIVES,
            operation=Operation.ALLREDUCE,
            dtype=DataType.FLOAT32,
            num_ranks=2,
            num_hosts=1,
            size_bytes=8,
            num_elements=2,
            measurements=[Measurement.from_batches(peer, [1e-6], 1, {})],
            failures=failures or {},
        )
    )


def run(monkeypatch, tmp_path, behave):
    """Run the command with ``behave(report)`` in place of the measurements; returns exit code and report."""
    monkeypatch.setattr(driver, "run_suites", lambda options, report, display: behave(report))
    code = main(["bench", "--output", str(tmp_path / "new" / "folder")])
    (path,) = (tmp_path / "new" / "folder").glob("bench-*.json")
    return code, json.loads(path.read_text())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ranks", "1"], "--ranks must be numbers from 2 to 32, such as 2,4, not '1'"),
        (["--ranks", "2,x"], "not 'x'"),
        (["--ranks", "33"], "not '33'"),
        (["--ranks", "2,"], "not ''"),
        (["--suites", "growth", "--hosts", "2,x"], "--hosts must be numbers from 1 to 32, such as 2,4, not 'x'"),
        (["--suites", "growth", "--ranks", "2,4", "--hosts", "2,8"], "--hosts 8 are more than the most ranks, 4"),
        (["--hosts", "2"], "--hosts: only the suite growth has a choice of hosts; add --suites growth"),
        (["--operations", "allreduce,gather"], "--operations: there is no 'gather'; choose from allreduce, reduce_"),
        (["--operations", "send_recv"], "--operations: none of these belongs to collectives"),
        (["--suites", "messages,groups", "--peers", "iperf3"], "--peers: none of these belongs to messages, groups"),
        (["--suites", "all"], "--suites: there is no 'all'; choose from collectives, messages, "),
        (["--quick", "--full"], "not allowed with"),
        (["--dtypes", "float64"], "--dtypes: there is no 'float64'"),
        (["--peers", "nvlink"], "--peers: there is no 'nvlink'"),
        (["--backend", "tcp"], "--backend: invalid choice: 'tcp' (choose from"),
        (["--backend", "mpi", "--peers", "native"], "not allowed with"),
        (["--backend", "ucc", "--suites", "hosts"], "--backend: none of these belongs to hosts"),
        (["--sizes", "8,many"], "--sizes: 'many' is no size"),
        (["--sizes", "8..64G"], "more than the largest"),
        (["--rounds", "0"], "--rounds must be 1 to"),
        (["--seconds", "0"], "--seconds must be more than 0"),
        (["--seconds", "nan"], "--seconds must be more than 0"),
        (["--output", __file__], "is a file; name a folder"),
        (["--rank", "2"], "unrecognized arguments"),
    ],
)
def test_wrong_options_are_refused(arguments, text, capsys):
    """Each gets one line that names the option, and exit code 2, before anything runs."""
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    captured = capsys.readouterr()
    assert (ended.value.code, captured.out) == (2, "")
    assert text in captured.err
    assert captured.err.count("\n") == 1


def test_defaults_and_quick_options():
    """The default is the collectives, with all peers but the slower backends; each option overrides its default."""
    options = parse()
    (suite_plan,) = options.suites
    assert suite_plan.suite is Suite.COLLECTIVES
    assert Operation.SEND_RECV not in suite_plan.operations
    assert set(Peer) - set(suite_plan.peers) == {*_ASKED_FOR, Peer.IPERF3}
    assert (suite_plan.ranks, suite_plan.dtypes) == ((2,), (DataType.FLOAT32,))
    assert (suite_plan.sizes[0], suite_plan.sizes[-1], options.num_rounds) == (8, 1 << 28, 40)
    quick = parse("--quick", "--rounds", "3", "--ranks", "4,2,4", "--peers", "limit,native")
    (suite_plan,) = quick.suites
    assert (suite_plan.sizes, quick.num_rounds, quick.seconds) == ((8, 1 << 14, 1 << 20), 3, 2)
    assert (suite_plan.ranks, suite_plan.peers) == ((4, 2), [Peer.LIMIT, Peer.NATIVE])


def test_each_suite_has_its_own_defaults():
    """Each has its own ranks, sizes and peers; options apply to all, and a suite that they leave empty is not run."""
    full = {suite_plan.suite: suite_plan for suite_plan in parse("--full").suites}
    assert list(full) == [suite for suite in Suite if suite is not Suite.GROWTH]
    assert (full[Suite.COLLECTIVES].ranks, full[Suite.GROUPS].ranks, full[Suite.HOSTS].ranks) == ((2, 4), (2, 8), (2,))
    assert (full[Suite.SUBMIT].sizes, full[Suite.OVERLAP].sizes) == ((8, 1 << 16), (1 << 26,))
    some = parse("--suites", "submit,hosts,groups", "--peers", "iperf3,gloo", "--operations", "submit,allreduce")
    submit, hosts = some.suites
    assert (submit.operations, submit.peers) == ([Operation.SUBMIT], [Peer.GLOO])
    assert (hosts.operations, hosts.peers) == ([Operation.ALLREDUCE], [Peer.IPERF3, Peer.GLOO])


@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_option_adds_the_native_engine_and_requires_the_backend(backend):
    """The backend is measured beside the native engine, in all suites that support it, and is required."""
    options = parse("--backend", backend, "--full")
    assert options.required.backend == backend
    others = {Suite.HOSTS, Suite.GROWTH}
    assert {suite for suite in Suite if suite not in others} == {suite_plan.suite for suite_plan in options.suites}
    wanted = {options.required, Peer.NATIVE, *((Peer.MPI4PY,) if backend == "mpi" else ())}
    assert all(set(suite_plan.peers) == wanted for suite_plan in options.suites)
    assert parse().required is None


def test_a_backend_that_cannot_be_measured_fails_the_command(monkeypatch, tmp_path, capsys):
    """The command fails with one line, before it starts other peers, and writes no report."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert main(["bench", "--backend", "mpi", "--output", str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ferrodist: mpi can't be measured on 2 ranks: there is no mpiexec beside this")
    assert captured.err.count("\n") == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_a_backend_lost_during_the_run_fails_the_command_and_keeps_the_report(monkeypatch, tmp_path, capsys):
    """The report has the earlier cases."""

    def behave(report):
        filled(report)
        raise driver.RequiredPeerError("nccl can't be measured on 4 ranks: too few GPUs")

    code, report = run(monkeypatch, tmp_path, behave)
    assert (code, report["is_complete"], len(report["cases"])) == (1, False, 1)
    assert capsys.readouterr().err == "ferrodist: nccl can't be measured on 4 ranks: too few GPUs\n"


def test_peers_are_started_once_for_all_suites():
    """A stage is a number of ranks on a number of hosts, with the cases of every suite that has some there."""
    stages = plan_stages(parse("--full", "--sizes", "8").suites)
    assert [format_ranks(num_ranks, num_hosts) for num_hosts, num_ranks in stages] == [
        *("2 ranks", "4 ranks", "8 ranks", "2 ranks on 2 hosts")
    ]
    assert [list(dict.fromkeys(plan.suite.value for plan, _ in cases)) for cases in stages.values()] == [
        ["collectives", "messages", "submit", "overlap", "groups"],
        ["collectives"],
        ["groups"],
        ["hosts"],
    ]
    assert {peer for plan, _ in stages[1, 2] for peer in plan.peers} == set(Peer) - {*_ASKED_FOR, Peer.IPERF3}
    assert len(stages[1, 2]) == 6 + 1 + 1 + 1 + 2
    assert all(case.num_hosts == 2 for _, case in stages[2, 2])


def test_growth_has_each_number_of_ranks_on_as_many_hosts():
    """By default up to 32 ranks on up to 8 hosts, each with a rank or more; ``--hosts`` and ``--ranks`` choose."""
    by_default = [(8, ranks) for ranks in (8, 16, 32)]
    stages = plan_stages(parse("--suites", "growth").suites)
    assert [stage for stage in stages if stage[0] in {1, 8}] == [*((1, 2**bits) for bits in range(1, 6)), *by_default]
    stages = plan_stages(parse("--suites", "growth", "--ranks", "2,4", "--hosts", "4,1", "--sizes", "8,1K").suites)
    assert list(stages) == [(1, 2), (1, 4), (4, 4)]
    assert all(len(cases) == 2 * 5 for cases in stages.values())
    assert {case.num_hosts for _, case in stages[4, 4]} == {4}


def test_neither_the_command_nor_its_ranks_load_torch_early():
    """The limit's ranks and the driver work without it."""
    code = "import sys, ferrodist.cli.main, ferrodist.bench.worker; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_extra_is_named_with_its_install_command(monkeypatch, capsys):
    """The error names the packages and the command."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert main(["bench"]) == 1
    assert capsys.readouterr().err == (
        f"ferrodist: bench needs matplotlib, which is not installed here: {how_to_install('bench')}\n"
    )


def test_a_run_leaves_report_and_plot(monkeypatch, tmp_path, capsys):
    """Their paths are printed; the exit code is 0."""
    code, report = run(monkeypatch, tmp_path, filled)
    assert code == 0
    assert report["cases"][0]["measurements"][0]["median"] == 1e-6
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("plot: ")
    assert lines[-2].startswith("report: ")


@pytest.mark.parametrize("change", [{"failures": {Peer.GLOO: "wrong result"}}, {"peer": Peer.GLOO}])
def test_failures_set_the_exit_code(monkeypatch, tmp_path, change):
    """It is 1 after a wrong result of any peer, or when ferrodist was not measured."""
    assert run(monkeypatch, tmp_path, lambda report: filled(report, **change))[0] == 1


def test_an_interrupted_run_writes_its_partial_report(monkeypatch, tmp_path):
    """Ctrl-C writes the report, which says that it is not complete."""

    def behave(report):
        filled(report)
        raise KeyboardInterrupt

    code, report = run(monkeypatch, tmp_path, behave)
    assert (code, report["is_complete"], len(report["cases"])) == (130, False, 1)


def test_printed_lines_stay_and_only_a_terminal_gets_a_bar():
    files = [io.StringIO(), io.StringIO()]
    consoles = [Console(file=files[0]), Console(file=files[1], force_terminal=True, width=90)]
    for console in consoles:
        with driver.RunDisplay(2, console) as display:
            display.begin_case("allreduce of 8 B")
            display.show_done(0.5)
            display.print_lines("a table [not markup]", "  of two lines")
    assert files[0].getvalue() == "a table [not markup]\n  of two lines\n"
    text = files[1].getvalue()
    assert all(part in text for part in ("allreduce of 8 B", "case 1 of 2", "a table [not markup]"))
