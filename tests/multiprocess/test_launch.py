"""The launcher, as a process with real ranks. The ranks are small scripts that never import torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

import ferrodist.launch
from ferrodist.deadline import Deadline
from ferrodist.launch import LaunchSpec, ProgramKind, _rank_entry, launch, worker_group
from ferrodist.launch import launcher as run_module
from ferrodist.launch.cpu_binding import BindPolicy, bind_ranks, describe_binding
from ferrodist.launch.signals import STOP_SIGNALS
from ferrodist.launch.spec import MpiLauncher
from ferrodist.launch.worker_group import RankProcess, Sinks, WorkerGroup

SOURCE = Path(ferrodist.launch.__file__).parents[2]
LIMIT = 30  # seconds after which something that should have happened counts as never happening

needs_pidfd = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no pidfd_open")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG and /proc are Linux's")

# Signals are blocked before "ready" is printed and waited for after, so none can come too early.
WAITING_RANK = """
    import os, signal, sys
    watched = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    print("ready", os.getpid(), flush=True)
"""


@pytest.fixture(autouse=True)
def _default_signals():
    """A shell may start the tests with SIGINT ignored, which launchers would inherit and respect."""
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    for number, handler in previous.items():
        if handler is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.fixture
def script(tmp_path):
    """Write a script for the ranks; returns its path."""

    def write(text: str, name: str = "rank_script.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def environment(**values: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FERRODIST_")}
    return {**kept, "PYTHONPATH": str(SOURCE), **values}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ferrodist", "run", *arguments]


def run_to_end(*arguments: str, **options) -> subprocess.CompletedProcess:
    options = {"env": environment(), "capture_output": True, "stdin": subprocess.DEVNULL, **options}
    return subprocess.run(command(*arguments), timeout=LIMIT, check=False, **options)


@contextlib.contextmanager
def started(*arguments: str, **options):
    """A running launcher; whatever the test leaves of it is killed, and its ranks with it."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment(), **options}
    with subprocess.Popen(command(*arguments), stdin=subprocess.DEVNULL, **options) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def read_pids(launcher: subprocess.Popen, count: int) -> dict[int, int]:
    """Wait for one ``ready PID`` line from each rank; returns pid by rank."""
    pids = {}
    while len(pids) < count:
        match = re.fullmatch(rb"\[rank (\d+)\] ready (\d+)\n", launcher.stdout.readline())
        assert match, "a rank ended before it was ready"
        pids[int(match[1])] = int(match[2])
    return pids


def wait_for_end(*pidfds: int) -> None:
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], LIMIT)[0], "the process did not end"


def lines_of(data: bytes, rank: int) -> list[bytes]:
    prefix = b"[rank %d] " % rank
    return [line[len(prefix) :] for line in data.splitlines() if line.startswith(prefix)]


def test_ranks_get_their_variables_and_arguments(script):
    """Each rank finds its numbers, one common meeting point and secret, and its arguments verbatim."""
    path = script("""
        import os, sys
        names = "RANK LOCAL_RANK WORLD_SIZE TORCHELASTIC_RESTART_COUNT PYTHONUNBUFFERED MASTER_ADDR".split()
        print(*[os.environ[name] for name in names], sys.argv[1:])
        print("port and secret", os.environ["MASTER_PORT"], os.environ["FERRODIST_SECRET"])
    """)
    arguments = ["--nproc-per-node", "4", "--", "-m", "", "a b", "\udcff"]
    done = run_to_end("--standalone", "--nproc_per_node", "3", path, *arguments)
    assert (done.returncode, done.stderr) == (0, b"")
    for rank in range(3):
        first, second = lines_of(done.stdout, rank)
        assert first == f"{rank} {rank} 3 0 1 127.0.0.1 {arguments!r}".encode()
        assert second == lines_of(done.stdout, 0)[1]


def test_a_given_secret_is_kept(script):
    """FERRODIST_SECRET of the launcher's environment reaches the ranks."""
    path = script("import os; print(os.environ['FERRODIST_SECRET'])")
    done = run_to_end(path, env=environment(FERRODIST_SECRET="given"))
    assert done.stdout == b"[rank 0] given\n"


def test_modules_run_as_with_python_m(script, tmp_path):
    """-m finds the module from the current folder and gives it its arguments."""
    script("import sys; print(__name__, sys.argv[1:])", name="some_module.py")
    done = run_to_end("--nproc-per-node=2", "-m", "some_module", "-m", "x", cwd=tmp_path)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [
        b"[rank 0] __main__ ['-m', 'x']",
        b"[rank 1] __main__ ['-m', 'x']",
    ]


@linux_only
def test_executables_start_with_default_signals():
    """--no-python runs any program, without the signals that Python ignores being ignored in it."""
    done = run_to_end("--no-python", "grep", "SigIgn", "/proc/self/status")
    assert done.returncode == 0
    ignored = int(done.stdout.split()[-1], 16)
    assert not ignored & (1 << (signal.SIGPIPE - 1))
    assert not ignored & (1 << (signal.SIGINT - 1))


def test_a_program_that_cannot_be_executed_is_named(tmp_path):
    """An executable that the system refuses fails with a shell's exit code and a reason."""
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF of no machine")
    program.chmod(0o755)
    done = run_to_end("--no-python", str(program))
    assert done.returncode == 126
    assert b"cannot start" in done.stderr


def test_the_first_failure_is_reported(script):
    """An exit code ends the job: report on the rank that failed, its last words, and who was stopped."""
    path = script(
        WAITING_RANK
        + """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
    if os.environ["RANK"] == "1":
        for number in range(30):
            sys.stderr.write(f"error line {number}\\n")
        sys.exit(7)
    signal.pause()
    """
    )
    done = run_to_end("--nproc-per-node", "3", path)
    assert done.returncode == 7
    report = done.stderr[done.stderr.index(b"ferrodist: ") :].decode()
    host = re.escape(socket.gethostname())
    assert re.match(rf"ferrodist: rank 1 failed first: exit code 7, \d+\.\d+ s after start, on host {host}", report)
    assert re.findall(r"\| error line (\d+)", report) == [str(number) for number in range(10, 30)]
    assert report.endswith("  stopped because of it: ranks 0, 2\n")
    assert len(lines_of(done.stderr, 1)) == 30


def test_a_rank_ended_by_a_signal_is_reported_by_name(script):
    """A crash gives the signal's name, and 128 + its number as the exit code."""
    path = script("import os, signal; os.kill(os.getpid(), signal.SIGABRT)")
    done = run_to_end("--nproc-per-node", "1", path)
    assert done.returncode == 128 + signal.SIGABRT
    assert b"rank 0 failed first: SIGABRT, " in done.stderr
    assert b"stopped because" not in done.stderr


@needs_pidfd
@pytest.mark.parametrize("order", [(2, 0, 1), (1, 2, 0)])
def test_the_first_of_several_failures_is_the_one_blamed(script, order):
    """Ranks that die while the launcher is not even running are told apart by the order of their ends."""
    path = script(WAITING_RANK + '    sys.exit(10 + int(os.environ["RANK"]) * bool(signal.sigwait(watched)))')
    with started("--nproc-per-node", "3", path) as launcher, contextlib.ExitStack() as stack:
        pids = read_pids(launcher, 3)
        launcher.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, launcher.pid, os.WSTOPPED)
        for rank in order:
            pidfd = os.pidfd_open(pids[rank])
            stack.callback(os.close, pidfd)
            os.kill(pids[rank], signal.SIGUSR1)
            wait_for_end(pidfd)
        launcher.send_signal(signal.SIGCONT)
        _, errors = launcher.communicate(timeout=LIMIT)
    first, *rest = order
    assert launcher.returncode == 10 + first
    assert f"rank {first} failed first: exit code {10 + first}, ".encode() in errors
    followers = re.search(rb"failed after it: (.*)\n", errors)[1].decode()
    assert [int(rank) for rank in re.findall(r"rank (\d)", followers)] == rest


SECONDARY_FAILURE = """
    def fail_because_of_another():
        sys.stderr.write("ferrodist.errors.PeerLostError: rank 1 of group 'world' has left\\n")
        sys.exit(1)
"""


@needs_pidfd
def test_a_secondary_failure_is_not_blamed_though_it_exits_first(script):
    """A rank that failed because of another stops nobody yet: the other is waited for, and blamed."""
    path = script(
        WAITING_RANK
        + SECONDARY_FAILURE
        + """
    number = signal.sigwait(watched)
    if os.environ["RANK"] == "1":
        sys.exit(4 if number == signal.SIGUSR1 else 99)
    if number == signal.SIGUSR1:
        fail_because_of_another()
    """
    )
    with started("--nproc-per-node", "3", path) as launcher, contextlib.ExitStack() as stack:
        pids = read_pids(launcher, 3)
        for rank in (2, 1):
            pidfd = os.pidfd_open(pids[rank])
            stack.callback(os.close, pidfd)
            os.kill(pids[rank], signal.SIGUSR1)
            wait_for_end(pidfd)
            # The launcher has seen this end too before the next one comes.
            assert rank == 1 or launcher.stderr.readline() == (
                b"[rank 2] ferrodist.errors.PeerLostError: rank 1 of group 'world' has left\n"
            )
        _, errors = launcher.communicate(timeout=LIMIT)
    assert launcher.returncode == 4
    assert errors.startswith(b"ferrodist: rank 1 failed first: exit code 4, ")
    assert re.search(rb"  failed because of it: rank 2 \(exit code 1, \S+ s earlier\)\n", errors)
    assert errors.endswith(b"  stopped because of it: rank 0\n")


def test_the_wait_for_a_cause_is_bounded(script, capfd, monkeypatch):
    """If the rank to blame continues, the secondary failure is reported as one, and the job ends."""
    monkeypatch.setattr(worker_group, "ROOT_CAUSE_TIMEOUT", 0.2)
    path = script(
        WAITING_RANK
        + SECONDARY_FAILURE
        + """
    if os.environ["RANK"] == "0":
        fail_because_of_another()
    signal.sigwait(watched)
    """
    )
    assert launch(LaunchSpec(program=path, nproc_per_node=2)) == 1
    errors = capfd.readouterr().err
    assert "ferrodist: rank 0 failed first: exit code 1, " in errors
    assert "\n  it failed because of a rank that did not fail here, or had not ended\n" in errors
    assert errors.endswith("  stopped because of it: rank 1\n")


def test_secondary_failures_alone_are_reported_when_all_have_ended(script):
    """A rank that exits successfully while others need it has not failed: the report names it and the first failure."""
    path = script(
        "    import os, sys\n"
        + SECONDARY_FAILURE
        + """
    if os.environ["RANK"] == "0":
        fail_because_of_another()
    """
    )
    done = run_to_end("--nproc-per-node", "2", path)
    assert done.returncode == 1
    assert b"ferrodist: rank 0 failed first: exit code 1, " in done.stderr
    assert b"it failed because of a rank that did not fail here" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_stop_signals_reach_every_rank_once(script, number):
    """Ranks get the signal that the launcher got, may end well, and then the launcher does too."""
    path = script(
        WAITING_RANK
        + """
    print("got", signal.Signals(signal.sigwait(watched)).name, flush=True)
    print("pending", len(signal.sigpending()), flush=True)
    """
    )
    with started("--nproc-per-node", "2", path) as launcher:
        read_pids(launcher, 2)
        launcher.send_signal(number)
        shown, errors = launcher.communicate(timeout=LIMIT)
    assert (launcher.returncode, errors) == (0, b"")
    for rank in range(2):
        assert lines_of(shown, rank) == [f"got {number.name}".encode(), b"pending 0"]


def test_user_signals_are_passed_on_and_stop_nothing(script):
    """SIGUSR1 and SIGUSR2 reach the ranks, every time, and the job goes on."""
    path = script(WAITING_RANK + "    for _ in range(3): print('got', int(signal.sigwait(watched)), flush=True)")
    with started("--nproc-per-node", "2", path, "--") as launcher:
        read_pids(launcher, 2)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1):
            launcher.send_signal(number)
            got = sorted(launcher.stdout.readline() for _ in range(2))
            assert got == [b"[rank %d] got %d\n" % (rank, number) for rank in range(2)]
        assert launcher.wait(LIMIT) == 0


STUCK_RANK = """
    import os, signal, sys, time

    def stuck_here():
        print("ready", os.getpid(), flush=True)
        while True: time.sleep(60)

    signal.signal(signal.SIGUSR2, lambda *_: sys.exit(0))
    stuck_here()
"""


@linux_only
def test_sigusr1_shows_where_every_rank_is(script):
    """A job that seems to hang says where: each rank's stack, of programs that import nothing of ours, and goes on."""
    path = script(STUCK_RANK)
    with started("--nproc-per-node", "2", path) as launcher:
        pids = read_pids(launcher, 2)
        shown = {rank: [] for rank in pids}
        for _ in range(2):  # not only the first time
            launcher.send_signal(signal.SIGUSR1)
            while not all(any(b"in <module>" in line for line in lines) for lines in shown.values()):
                line = launcher.stderr.readline()
                shown[int(re.match(rb"\[rank (\d)", line)[1])].append(line)
            for lines in shown.values():
                assert any(re.search(rb"File .*rank_script.py., line [56] in stuck_here", line) for line in lines)
                lines.clear()
        launcher.send_signal(signal.SIGUSR2)
        assert launcher.wait(LIMIT) == 0


@linux_only
@pytest.mark.parametrize("in_a_shell", [False, True])
def test_sigusr1_kills_nobody(script, in_a_shell):
    """A program's own handler stays, and what has none goes on: a rank's child, and a shell that it runs in."""
    path = script("""
        import os, signal, subprocess, sys, threading
        came = threading.Event()
        child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        signal.signal(signal.SIGUSR1, lambda *_: came.set())
        print("ready", os.getpid(), flush=True)
        while not came.wait(0.1): pass
        print("ended", child.poll(), flush=True)
    """)
    wrapper = ["--no-python", "sh", "-c", f"{sys.executable} {path}; echo went on"]
    with started(*(wrapper if in_a_shell else [path])) as launcher:
        read_pids(launcher, 1)
        launcher.send_signal(signal.SIGUSR1)
        shown, errors = launcher.communicate(timeout=LIMIT)
    assert (launcher.returncode, errors) == (0, b"")
    assert lines_of(shown, 0) == [b"ended None", b"went on"][: 1 + in_a_shell]


def test_a_crash_leaves_a_stack(script):
    """A segmentation fault says which line of the program it was in."""
    path = script("""
        import os, signal

        def crash():
            os.kill(os.getpid(), signal.SIGSEGV)

        if os.environ["RANK"] == "1":
            crash()
        signal.pause()
    """)
    done = run_to_end("--nproc-per-node", "2", path)
    assert done.returncode == 128 + signal.SIGSEGV
    assert b"[rank 1] Fatal Python error: Segmentation fault" in done.stderr
    assert re.search(rb"\[rank 1\]   File .*rank_script.py., line 5 in crash", done.stderr)


def test_the_programs_environment_is_its_own(script, tmp_path):
    """The hook that prints stacks is hidden from the program, and the user's ``sitecustomize`` has run."""
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['CUSTOMIZED'] = 'yes'\n")
    path = script("""
        import os, sys, sitecustomize
        print(os.environ["PYTHONPATH"], os.environ["CUSTOMIZED"], sitecustomize.__file__)
        print([each for each in sys.path if "rank_site" in each])
    """)
    given = f"{tmp_path}{os.pathsep}{SOURCE}"
    done = run_to_end(path, env=environment(PYTHONPATH=given))
    assert (done.returncode, done.stderr) == (0, b"")
    assert lines_of(done.stdout, 0) == [f"{given} yes {tmp_path / 'sitecustomize.py'}".encode(), b"[]"]


def test_rank_0_reads_standard_input(script):
    """The first rank has the launcher's standard input, the others none."""
    path = script("import os, sys; print(os.environ['RANK'], repr(sys.stdin.read()))")
    done = run_to_end("--nproc-per-node", "2", path, stdin=None, input=b"typed")
    assert sorted(done.stdout.splitlines()) == [b"[rank 0] 0 'typed'", b"[rank 1] 1 ''"]


def test_a_breakpoint_in_rank_0(script):
    """With several ranks at a terminal, rank 0's debugger shows its prompt, takes commands, and the job goes on."""
    path = script("""
        import os
        value = 41
        if os.environ["RANK"] == "0": breakpoint()
        print("went on with", value)
    """)
    ours, theirs = os.openpty()
    shown = b""

    def read_until(text):
        nonlocal shown
        while text not in shown:
            assert select.select([ours], [], [], LIMIT)[0], shown
            shown += os.read(ours, 4096)

    env = environment(NO_COLOR="1")
    arguments = command("--nproc-per-node", "2", path)
    with subprocess.Popen(arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as launcher:
        try:
            read_until(b"[rank 1] went on with 41")
            for line in (b"value += 1", b"p value * 2"):
                read_until(b"[rank 0] (Pdb) ")
                shown = b""
                os.write(ours, line + b"\n")
            read_until(b"84\r\n")
            read_until(b"[rank 0] (Pdb) ")
            os.write(ours, b"c\n")
            read_until(b"went on with 42")
            assert launcher.wait(LIMIT) == 0
        finally:
            launcher.kill()
            os.close(ours)
            os.close(theirs)


def test_ranks_that_die_of_the_signal_give_its_exit_code(script):
    """A default SIGTERM ends the ranks; one line says so, and nobody is blamed or restarted."""
    path = script(WAITING_RANK + "    signal.pthread_sigmask(signal.SIG_UNBLOCK, watched); signal.pause()")
    with started("--nproc-per-node", "2", "--max-restarts", "3", path) as launcher:
        read_pids(launcher, 2)
        launcher.send_signal(signal.SIGTERM)
        _, errors = launcher.communicate(timeout=LIMIT)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert re.fullmatch(rb"ferrodist: stopped by SIGTERM after \S+ s: ranks 0-1 ended\n", errors)


DEAF_RANK = WAITING_RANK + "    while True: print('got', int(signal.sigwait(watched)), flush=True)"


def test_a_second_interrupt_kills(script):
    """Ranks that ignore SIGINT are killed by the second one, long before the grace period ends."""
    path = script(DEAF_RANK)
    with started("--nproc-per-node", "2", "--timeout-before-kill", "1000", path) as launcher:
        read_pids(launcher, 2)
        launcher.send_signal(signal.SIGINT)
        assert sorted(launcher.stdout.readline() for _ in range(2)) == [
            b"[rank 0] got 2\n",
            b"[rank 1] got 2\n",
        ]
        launcher.send_signal(signal.SIGTERM)
        _, errors = launcher.communicate(timeout=LIMIT)
    assert launcher.returncode == 128 + signal.SIGINT
    assert b"stopped by SIGINT" in errors
    assert b"ranks 0-1 did not end in time and had to be killed" in errors


class ScriptedInbox:
    """Delivers given signals when something is written to a named pipe."""

    def __init__(self, path: Path, *signals: signal.Signals) -> None:
        os.mkfifo(path)
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._signals = list(signals)
        self.stop_signals = STOP_SIGNALS

    def fileno(self) -> int:
        return self._descriptor

    def take(self) -> list[signal.Signals]:
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptor, 1)
            return self._signals
        return []

    def close(self) -> None:
        os.close(self._descriptor)


def test_the_same_signal_twice_at_once_counts_once(script, tmp_path, capfd):
    """GNU timeout signals its child twice in a row; that is no second request."""
    path = script("""
        import pathlib, signal, sys
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        pathlib.Path(sys.argv[1]).write_bytes(b"x")
        signal.sigwait([signal.SIGTERM])
    """)
    pipe = tmp_path / "inbox"
    inbox = ScriptedInbox(pipe, signal.SIGTERM, signal.SIGTERM)
    rank = RankProcess(rank=0, command=(sys.executable, path, str(pipe)), environment=environment())
    sinks = Sinks(stdout=1, stderr=2)
    with (
        contextlib.closing(inbox),
        WorkerGroup([rank], timeout_before_kill=LIMIT, inbox=inbox, sinks=sinks) as group,
    ):
        outcome = group.run()
    assert (outcome.stopped_by, outcome.exit_code, outcome.killed) == (signal.SIGTERM, 0, frozenset())


def test_an_interrupt_after_a_failure_prevents_the_restart(script):
    """An interrupt while the launcher stops a failed attempt prevents another one."""
    path = script(
        WAITING_RANK
        + """
    signal.sigwait(watched)
    if os.environ["RANK"] == "0":
        sys.exit(3)
    print("stopping", flush=True)
    signal.sigwait(watched)
    """
    )
    arguments = ["--nproc-per-node", "2", "--max-restarts", "3", "--timeout-before-kill", "1000"]
    with started(*arguments, path) as launcher:
        os.kill(read_pids(launcher, 2)[0], signal.SIGUSR1)
        assert launcher.stdout.readline() == b"[rank 1] stopping\n"
        launcher.send_signal(signal.SIGINT)
        _, errors = launcher.communicate(timeout=LIMIT)
    assert launcher.returncode == 3
    assert b"rank 0 failed first" in errors
    assert b"again" not in errors


@pytest.mark.parametrize("seconds", ["0", "0.05"])
def test_the_grace_period_ends_with_a_kill(script, seconds):
    """A rank that does not react to SIGTERM after another's failure is killed, and named."""
    path = script(
        WAITING_RANK
        + """
    while True:
        signal.sigwait(watched)
        if os.environ["RANK"] == "1":
            sys.exit(3)
    """
    )
    with started("--nproc-per-node", "2", "--timeout-before-kill", seconds, path) as launcher:
        os.kill(read_pids(launcher, 2)[1], signal.SIGUSR1)
        _, errors = launcher.communicate(timeout=LIMIT)
    assert launcher.returncode == 3
    assert b"stopped because of it: rank 0 (rank 0 did not end in time and had to be killed)" in errors


@linux_only
@needs_pidfd
def test_no_rank_outlives_a_killed_launcher(script):
    """SIGKILL to the launcher, which it cannot handle, takes the ranks along."""
    path = script(DEAF_RANK)
    with started("--nproc-per-node", "3", path) as launcher, contextlib.ExitStack() as stack:
        pidfds = [os.pidfd_open(pid) for pid in read_pids(launcher, 3).values()]
        for pidfd in pidfds:
            stack.callback(os.close, pidfd)
        launcher.kill()
        wait_for_end(*pidfds)


@linux_only
def test_a_rank_whose_launcher_is_gone_already_does_not_start():
    """A launcher that died before the rank asked to die with it is noticed all the same."""
    entry = [sys.executable, "-I", "-S", _rank_entry.__file__, "0", "", "echo", "started"]
    done = subprocess.run(entry, capture_output=True, check=False, timeout=LIMIT)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


@needs_pidfd
@pytest.mark.parametrize("code", [0, 5])
def test_a_ranks_children_end_with_the_job(script, code):
    """A process left behind in a rank's group is ended, whether the rank succeeded or failed."""
    path = script(f"""
        import subprocess, sys
        quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        left = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], **quiet)
        print("ready", left.pid, flush=True)
        sys.stdin.read()
        sys.exit({code})
    """)
    # A rank that is alone reads the launcher's standard input; it waits there until we hold the pidfd.
    with subprocess.Popen(
        command(path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as launcher:
        pidfd = os.pidfd_open(read_pids(launcher, 1)[0])
        try:
            launcher.communicate(timeout=LIMIT)
            wait_for_end(pidfd)
        finally:
            os.close(pidfd)
    assert launcher.returncode == code


def test_output_of_a_process_that_outlives_its_rank_is_kept(script):
    """A helper that still writes when its rank has ended gets to finish."""
    path = script("""
        import os, subprocess, sys
        code = "import sys; sys.stdin.read(); print('x' * 200_000); print('helper done')"
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        os._exit(0)
    """)
    done = run_to_end(path)
    assert done.returncode == 0
    assert lines_of(done.stdout, 0)[-1] == b"helper done"


@linux_only
def test_nohup_is_respected(script):
    """A launcher started with SIGHUP ignored keeps ignoring it, and so do its ranks."""
    path = script("import signal; print(signal.getsignal(signal.SIGHUP).name)")
    shell = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *command(path)]
    done = subprocess.run(shell, capture_output=True, env=environment(), check=True, timeout=LIMIT)
    assert done.stdout == b"[rank 0] SIG_IGN\n"


def test_restarts_start_all_ranks_again(script):
    """After a failure everything starts anew with the next restart count, and success then is success."""
    path = script("""
        import os, signal, sys
        print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] != "2":
            if os.environ["RANK"] == "1": sys.exit(4)
            signal.pause()
    """)
    done = run_to_end("--nproc-per-node", "2", "--max-restarts", "5", path)
    assert done.returncode == 0
    assert lines_of(done.stdout, 1) == [b"attempt 0", b"attempt 1", b"attempt 2"]
    assert done.stderr.count(b"rank 1 failed first") == 2
    assert b"attempt 2 of 6)\nferrodist: starting all ranks again (attempt 3 of 6)" in re.sub(
        rb"\n  .*", b"", done.stderr
    )


def test_restarts_end_and_use_a_new_port_each(script, monkeypatch, capfd):
    """When the restarts are used up the failure stands; every attempt had a port of its own."""
    ports = iter([1001, 1002, 1003])
    monkeypatch.setattr(run_module, "reserved_port", lambda: contextlib.nullcontext(next(ports)))
    path = script("import os, sys; print(os.environ['MASTER_PORT']); sys.exit(9)")
    assert launch(LaunchSpec(program=path, max_restarts=2)) == 9
    shown = capfd.readouterr()
    assert lines_of(shown.out.encode(), 0) == [b"1001", b"1002", b"1003"]
    assert shown.err.count("failed first") == 3
    assert shown.err.count("starting all ranks again") == 2


def test_bytes_that_are_not_utf8_survive(script):
    """Every byte value but the line ends comes through as it was written, on both streams."""
    path = script("""
        import os
        data = bytes(byte for byte in range(256) if byte not in b"\\r\\n")
        for descriptor in (1, 2):
            os.write(descriptor, data + b"\\n" + data)
    """)
    done = run_to_end("--nproc-per-node", "2", path)
    data = bytes(byte for byte in range(256) if byte not in b"\r\n")
    assert done.returncode == 0
    for stream in (done.stdout, done.stderr):
        expected = [b"[rank %d] %s" % (rank, data) for rank in range(2) for _ in range(2)]
        assert sorted(stream.split(b"\n")) == [b"", *expected]


def test_huge_output_arrives_complete_and_in_order(script):
    """All ranks write a lot to both streams at once: no line is lost, torn or out of order in its stream."""
    path = script("""
        import os, sys
        pad = "x" * (20 + 40 * int(os.environ["RANK"]))
        for start in range(0, 20_000, 500):
            text = "".join(f"{number} {pad}\\n" for number in range(start, start + 500))
            sys.stdout.write(text)
            sys.stderr.write(text)
    """)
    done = run_to_end("--nproc-per-node", "4", path)
    assert done.returncode == 0
    for stream in (done.stdout, done.stderr):
        seen = Counter()
        for line in stream.splitlines():
            match = re.fullmatch(rb"\[rank (\d)\] (\d+) (x+)", line)
            assert match, line
            rank = int(match[1])
            assert int(match[2]) == seen[rank]
            assert len(match[3]) == 20 + 40 * rank
            seen[rank] += 1
        assert seen == dict.fromkeys(range(4), 20_000)


def _wait_until_blocked(launcher: subprocess.Popen, pid: int) -> None:
    """Wait until neither the launcher nor its rank, which only writes, can write any more."""
    deadline = Deadline(LIMIT)
    while not deadline.expired:
        held = int.from_bytes(fcntl.ioctl(launcher.stdout, termios.FIONREAD, bytes(4)), sys.byteorder)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if held and state == "S":
            return
        time.sleep(0.01)
    raise AssertionError("the rank could always write")


@linux_only
@needs_pidfd
def test_a_paused_reader_does_not_make_the_launcher_deaf(script):
    """While nobody reads its output, the launcher handles signals, and a second one gives the output up."""
    path = script("""
        import os
        print("ready", os.getpid(), flush=True)
        while True: os.write(1, b"x" * 1000 + b"\\n")
    """)
    with started(path) as launcher:
        fcntl.fcntl(launcher.stdout.fileno(), fcntl.F_SETPIPE_SZ, 4096)
        pid = read_pids(launcher, 1)[0]
        pidfd = os.pidfd_open(pid)
        try:
            _wait_until_blocked(launcher, pid)
            launcher.send_signal(signal.SIGTERM)
            wait_for_end(pidfd)
            launcher.send_signal(signal.SIGINT)
            assert launcher.wait(LIMIT) == 128 + signal.SIGTERM
        finally:
            os.close(pidfd)


def test_a_reader_that_leaves_does_not_end_the_job(script):
    """Like `| head`: output that nobody wants any more is dropped, and the ranks run to their end."""
    path = script("""
        import sys
        for _ in range(100): sys.stdout.write("x" * 10_000 + "\\n")
        sys.stderr.write("finished\\n")
    """)
    with started("--nproc-per-node", "2", path) as launcher:
        launcher.stdout.close()
        assert sorted(launcher.stderr.readlines()) == [b"[rank 0] finished\n", b"[rank 1] finished\n"]
        assert launcher.wait(LIMIT) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("stream", ["stdout", "stderr", "both"])
@pytest.mark.parametrize("code", [0, 7])
def test_output_on_a_full_device(script, code, stream):
    """Ranks run to their end; output that is lost is told and turns success into 1, but hides no failure."""
    path = script(f"""
        import sys
        print("out", flush=True)
        sys.stderr.write("err\\n")
        sys.exit({code})
    """)
    with Path("/dev/full").open("wb") as full:
        names = ("stdout", "stderr") if stream == "both" else (stream,)
        others = {name: subprocess.PIPE for name in ("stdout", "stderr") if name not in names}
        done = run_to_end(path, capture_output=False, **dict.fromkeys(names, full), **others)
    assert done.returncode == (code or 1)
    if stream == "stdout":
        assert done.stderr.startswith(b"[rank 0] err\n")
        assert b"Traceback" not in done.stderr
        assert b"the output of the ranks is not whole: [Errno 28] No space left on device\n" in done.stderr
    elif stream == "stderr":
        assert done.stdout == b"[rank 0] out\n"


@pytest.mark.parametrize("descriptor", [0, 1, 2])
def test_a_launcher_whose_stream_is_closed(script, descriptor):
    """Output for the closed stream is dropped, and the other streams are complete."""
    path = script("import sys; print('out', flush=True); sys.stderr.write('err\\n'); sys.exit(7)")
    done = run_to_end(path, preexec_fn=lambda: os.close(descriptor))
    assert done.returncode == 7
    assert (b"[rank 0] out\n" in done.stdout + done.stderr) is (descriptor != 1)
    assert (b" failed first: exit code 7" in done.stderr) is (descriptor != 2)


@pytest.mark.parametrize(
    ("ranks", "variables", "expected"),
    [
        ("1", {}, rb"ready True"),
        ("2", {"NO_COLOR": "1"}, rb"\[rank \d\] ready False"),
        ("2", {"NO_COLOR": ""}, rb"\x1b\[\d+m\[rank \d\]\x1b\[0m ready False"),
    ],
)
def test_on_a_terminal(script, ranks, variables, expected):
    """One rank alone has the terminal to itself; several are prefixed, in colour unless NO_COLOR is set."""
    path = script("import os; print('ready', os.isatty(1))")
    ours, theirs = os.openpty()
    try:
        done = run_to_end(
            "--nproc-per-node",
            ranks,
            path,
            env=environment(**variables),
            capture_output=False,
            stdout=theirs,
            stderr=subprocess.PIPE,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        shown = os.read(ours, 4096)
    finally:
        os.close(ours)
        os.close(theirs)
    lines = shown.replace(b"\r\n", b"\n").splitlines()
    assert len(lines) == int(ranks)
    assert all(re.fullmatch(expected, line) for line in lines)


def open_descriptors() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


@linux_only
def test_nothing_is_left_behind(script, capfd):
    """After success and after failure: no child, no thread, no descriptor, and the old signal handlers."""
    path = script("import os, sys; print('text'); sys.exit(int(sys.argv[1]) * (os.environ['RANK'] == '0'))")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    threads, descriptors = threading.active_count(), open_descriptors()
    for code in (0, 3):
        spec = LaunchSpec(program=path, arguments=(str(code),), nproc_per_node=3, max_restarts=1)
        assert launch(spec) == code
    assert open_descriptors() == descriptors
    assert threading.active_count() == threads
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == handlers


@linux_only
def test_a_failed_start_leaves_nothing(capfd, monkeypatch):
    """When the third process cannot be started, the first two are ended and the error names the rank."""
    real, calls = subprocess.Popen, []

    def popen(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 3:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return real(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    descriptors = open_descriptors()
    spec = LaunchSpec(program="sleep", arguments=("1000",), kind=ProgramKind.EXECUTABLE, nproc_per_node=4)
    with pytest.raises(ferrodist.errors.RankFailedError, match="rank 2 could not be started") as caught:
        launch(spec)
    assert caught.value.rank == 2
    assert open_descriptors() == descriptors
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@linux_only
@pytest.mark.parametrize("mpi", [None, MpiLauncher.PMI])
def test_a_start_without_descriptors_names_the_limit(mpi, capfd, monkeypatch):
    """Of a rank's process, or of the sockets of PMI."""

    def refuse(*_arguments, **_options):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(*((subprocess, "Popen") if mpi is None else (socket, "socketpair")), refuse)
    spec = LaunchSpec(program="sleep", kind=ProgramKind.EXECUTABLE, mpi=mpi)
    with pytest.raises(ferrodist.errors.RankFailedError, match=r"not be started: .* raise that limit .ulimit -n"):
        launch(spec)


def test_launch_works_outside_the_main_thread(script, capfd):
    """A program may launch from a thread of its own; it then keeps its signals to itself."""
    path = script("print('text')")
    codes = []
    thread = threading.Thread(target=lambda: codes.append(launch(LaunchSpec(program=path, nproc_per_node=2))))
    thread.start()
    thread.join(LIMIT)
    assert codes == [0]
    assert sorted(capfd.readouterr().out.splitlines()) == ["[rank 0] text", "[rank 1] text"]


def test_hosts_count_on_from_each_other(script):
    """Two launchers, as on two hosts, together give every rank of the job once, and one meeting point."""
    path = script("import os; print(*map(os.environ.get, ['RANK', 'WORLD_SIZE', 'GROUP_RANK', 'MASTER_PORT']))")
    shown = b""
    for node in ("0", "1"):
        done = run_to_end(
            *(
                "--nnodes=2",
                "--nproc-per-node=2",
                "--node-rank",
                node,
                "--rdzv-endpoint=localhost:29500",
                path,
            ),
            env=environment(FERRODIST_SECRET="shared"),
        )
        assert done.returncode == 0
        shown += done.stdout
    assert sorted(line.split(b"] ")[1] for line in shown.splitlines()) == [
        b"0 4 0 29500",
        b"1 4 0 29500",
        b"2 4 1 29500",
        b"3 4 1 29500",
    ]


@linux_only
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU")
@pytest.mark.parametrize("policy", ["core", "numa"])
def test_ranks_are_bound_before_their_program_starts(script, policy):
    """The CPUs of each rank, which the launcher tells once, are those of all its threads, and of its children."""
    path = script("""
        import os, subprocess, sys, threading
        own = os.sched_getaffinity(0)
        thread = threading.Thread(target=lambda: print(os.sched_getaffinity(0) == own))
        thread.start()
        thread.join()
        child = [sys.executable, "-S", "-c", "import os; print(os.sched_getaffinity(0))"]
        print(subprocess.run(child, capture_output=True, text=True).stdout.strip() == str(own))
        print(*sorted(own))
    """)
    expected = bind_ranks(BindPolicy(policy), 2)
    done = run_to_end("--nproc-per-node", "2", "--bind", policy, path)
    assert done.returncode == 0, done.stderr
    for rank, cpus in enumerate(expected):
        assert lines_of(done.stdout, rank) == [b"True", b"True", " ".join(map(str, sorted(cpus))).encode()]
    assert done.stderr.decode() == f"ferrodist: --bind {policy}: {describe_binding(expected, 0)}\n"
    assert policy != "core" or not expected[0] & expected[1]


@linux_only
def test_a_rank_that_cannot_be_bound_says_so():
    """CPUs that are gone are an error of the rank, before its program starts."""
    entry = [sys.executable, "-I", "-S", _rank_entry.__file__, str(os.getpid()), "100000", "echo", "started"]
    done = subprocess.run(entry, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("ferrodist: cannot bind the rank to CPUs 100000: Invalid argument")
    assert not done.stdout
