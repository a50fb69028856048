"""`run_ranks`: results, failures, stuck ranks, dead processes, and nothing left behind."""

import ctypes
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from toy_backend import ToyBackend

from ferrodist.backends.process_group import default_group
from ferrodist.backends.subgroup import SubBackend
from ferrodist.errors import GroupAbortedError, InvalidWorldSizeError, PeerLostError, RankFailedError
from ferrodist.testing import RANKS_BACKENDS, check_leaks, process_ranks, run_ranks

KINDS = ["simulated", "tcp-threads", "native"]
"""Ranks as threads of one group, as threads with a group each, and as processes."""

every_kind = pytest.mark.parametrize("backend", KINDS)
every_backend = pytest.mark.parametrize("backend", [*KINDS, ToyBackend.create_group])


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Every test of this file leaves nothing behind, whatever fails in it."""
    with check_leaks():
        yield


class OddError(Exception):
    """An error that pickles and does not unpickle."""

    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


@pytest.mark.parametrize("backend", [*RANKS_BACKENDS, ToyBackend.create_group])
def test_results_come_in_rank_order(backend):
    """The result of rank i is number i of the list, whichever ends first."""

    def program(group, factor, *, plus):
        group.barrier()
        return group.rank * factor + plus

    assert run_ranks(program, 4, 10, plus=1, backend=backend) == [1, 11, 21, 31]


@every_backend
def test_one_rank_is_enough(backend):
    """A world of one rank runs."""
    assert run_ranks(lambda group: group.world_size, 1, backend=backend) == [1]


@every_kind
def test_ranks_exchange_messages(backend):
    """The group that a rank gets is connected with the others'."""

    def program(group):
        if group.rank == 0:
            group.send(b"hello", 1)
            return None
        buffer = bytearray(5)
        group.recv(buffer, 0)
        return bytes(buffer)

    assert run_ranks(program, 2, backend=backend) == [None, b"hello"]


@every_kind
def test_group_is_the_default_group(backend):
    """Inside the function the default group is the rank's own."""
    assert run_ranks(lambda group: default_group() is group, 3, backend=backend) == [True] * 3


@every_kind
def test_nested_closures_run(backend):
    """A function that closes over functions that close over objects which do not pickle runs as a rank."""
    lock = threading.Lock()

    def outer(factor):
        def inner(group):
            with lock:
                return group.rank * factor

        return inner

    assert run_ranks(outer(3), 3, backend=backend) == [0, 3, 6]


def test_tensors_come_back_from_processes():
    """A tensor is a result like any other."""
    results = run_ranks(lambda group: torch.full((3,), group.rank), 2, backend="tcp")
    assert [result.tolist() for result in results] == [[0, 0, 0], [1, 1, 1]]


def test_processes_use_one_thread_of_torch():
    """A pool of threads does not survive a fork, so that torch must not use one in the ranks."""
    assert run_ranks(lambda group: torch.get_num_threads(), 2, backend="tcp") == [1, 1]


@every_kind
def test_large_results_come_back(backend):
    """A result may be larger than any pipe."""
    results = run_ranks(lambda group: bytes([group.rank]) * (4 << 20), 2, backend=backend)
    assert [len(result) for result in results] == [4 << 20] * 2


@every_backend
def test_failure_is_shown_whole(backend):
    """The error has the rank, its traceback down to the line, and the exception as its cause."""

    def program(group):
        if group.rank == 1:
            raise ValueError("what went\nwrong")
        group.barrier()

    with pytest.raises(RankFailedError, match="rank 1 of 3 failed: ValueError: what went") as caught:
        run_ranks(program, 3, backend=backend)
    message = str(caught.value)
    assert caught.value.ranks == (1,)
    assert 'raise ValueError("what went\\nwrong")' in message
    assert "ValueError: what went\nwrong" in message
    assert isinstance(caught.value.__cause__, ValueError)


@every_backend
def test_secondary_failures_take_a_line_each(backend):
    """Ranks that are woken by the abort are listed after the failure, without a traceback."""

    def program(group):
        if group.rank == 2:
            raise KeyError("the cause")
        group.recv(bytearray(1), 2)

    with pytest.raises(RankFailedError) as caught:
        run_ranks(program, 3, backend=backend)
    consequences = str(caught.value).partition("as a consequence:\n")[2].splitlines()
    assert [line.split(":")[0].strip() for line in sorted(consequences)] == ["rank 0", "rank 1"]
    assert all("Error: " in line for line in consequences)
    assert str(caught.value).count("Traceback") == 1


@every_backend
def test_a_rank_that_waits_in_a_subgroup_is_stopped_too(backend):
    """A failure also ends ranks that wait for the one that failed in a sub-group, without waiting for a timeout."""

    def program(group):
        if group.rank == 2:
            raise KeyError("the cause")
        if group.rank == 0:
            SubBackend(group, [0, 2]).recv(bytearray(1), 1)
        return "done"

    start = time.monotonic()
    with pytest.raises(RankFailedError, match="as a consequence:\n  rank 0: ") as caught:
        run_ranks(program, 3, backend=backend)
    assert caught.value.ranks == (2,)
    assert time.monotonic() - start < 2.5


@every_backend
def test_several_failures_are_all_shown(backend):
    """Ranks that fail for reasons of their own are all in the error, the first one first."""

    def program(group):
        if group.rank == 2:
            raise KeyError("first")
        if group.rank == 0:
            try:
                group.recv(bytearray(1), 2)
            except (GroupAbortedError, PeerLostError):
                raise ValueError("second") from None
        return group.rank

    with pytest.raises(RankFailedError, match="ranks 2, 0 of 3 failed: KeyError: 'first'") as caught:
        run_ranks(program, 3, backend=backend)
    assert caught.value.ranks == (2, 0)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "ValueError: second" in str(caught.value)


@every_kind
def test_the_same_failure_is_shown_once(backend):
    """A failure that all ranks report alike has one traceback."""

    def program(group):
        raise ValueError("everywhere")

    with pytest.raises(RankFailedError) as caught:
        run_ranks(program, 3, backend=backend)
    assert sorted(caught.value.ranks) == [0, 1, 2]
    assert str(caught.value).count("Traceback") == 1
    assert str(caught.value).count(": the same as rank") == 2


@every_kind
def test_exits_are_failures(backend):
    """`sys.exit` in a rank fails the run; it does not end the process that runs the test."""
    with pytest.raises(RankFailedError, match="rank 0 of 2 failed: SystemExit: 3"):
        run_ranks(lambda group: sys.exit(3) if group.rank == 0 else None, 2, backend=backend)


def wait_for(event, group):
    if group.rank == 1:
        event.wait()  # stuck here


@pytest.mark.parametrize("backend", ["simulated", "tcp"])
def test_a_stuck_rank_is_shown_with_its_stack(backend):
    """At the deadline the error says where the rank is that is not done, and that the others are."""
    event = threading.Event()
    try:
        with pytest.raises(RankFailedError, match=r"rank 1 of 3 failed: not done after 0\.5 s") as caught:
            run_ranks(lambda group: wait_for(event, group), 3, timeout=0.5, backend=backend)
    finally:
        event.set()  # a thread can't be stopped from outside
    assert caught.value.ranks == (1,)
    assert "in wait_for\n    event.wait()  # stuck here" in str(caught.value)
    assert "rank_program.py" not in str(caught.value)


@every_backend
def test_a_rank_that_waits_in_the_group_is_not_left_behind(backend):
    """A rank that is stuck in a receive is woken when the time is up; its thread or process ends."""
    with pytest.raises(RankFailedError, match="in recv") as caught:
        run_ranks(lambda group: group.rank or group.recv(bytearray(1), 1, timeout=60), 2, timeout=0.5, backend=backend)
    assert caught.value.ranks == (0,)


@every_kind
def test_a_straggler_is_named_by_the_groups_error(backend):
    """The group's own deadline comes before the run's, so a rank that does not come to a barrier is named."""
    with pytest.raises(RankFailedError, match=r"DistributedTimeoutError: barrier\(\).*rank 1 has not called it"):
        run_ranks(lambda group: group.rank == 1 or group.barrier(), 3, timeout=1.0, backend=backend)


def test_a_killed_process_is_named_by_its_signal():
    """A process that dies of SIGKILL is the failure; its survivors' errors are consequences."""

    def program(group):
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        group.barrier()

    start = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1 of 3 failed: the process was killed by SIGKILL") as caught:
        run_ranks(program, 3, backend="tcp")
    assert caught.value.ranks == (1,)
    assert "  rank 0: PeerLostError" in str(caught.value)
    assert time.monotonic() - start < 2.5


def test_a_process_that_exits_is_a_failure():
    """A process that ends without a result is reported with its status."""
    with pytest.raises(RankFailedError, match="rank 0 of 2 failed: the process exited with status 7"):
        run_ranks(lambda group: os._exit(7) if group.rank == 0 else None, 2, backend="tcp")


def test_a_stopped_process_is_killed():
    """A process that can't even show its stack is ended all the same, and the error says why there is none."""
    with pytest.raises(RankFailedError, match="it is stopped by a signal"):
        run_ranks(lambda group: group.rank or os.kill(os.getpid(), signal.SIGSTOP), 2, timeout=1.0, backend="tcp")


def test_a_busy_process_is_killed_after_a_failure():
    """A rank that computes and never looks at its group is ended soon after another has failed."""

    def program(group):
        if group.rank == 0:
            raise ValueError("the failure")
        while True:
            pass

    start = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1: was still running") as caught:
        run_ranks(program, 2, backend="tcp")
    assert caught.value.ranks == (0,)
    assert time.monotonic() - start < 10


def test_results_that_do_not_pickle_are_explained():
    """A process rank that returns what can't be pickled fails with the reason, and does not hang."""
    with pytest.raises(RankFailedError, match="rank 1 of 2 failed: it returned a lock that cannot be pickled"):
        run_ranks(lambda group: threading.Lock() if group.rank else None, 2, backend="tcp")


def test_errors_that_do_not_pickle_are_shown():
    """An error that does not survive pickle has its traceback in the message and a stand-in as the cause."""

    def program(group):
        if group.rank == 0:
            raise OddError(1, 2)

    with pytest.raises(RankFailedError, match="rank 0 of 2 failed: OddError: 1 2") as caught:
        run_ranks(program, 2, backend="tcp")
    assert "raise OddError(1, 2)" in str(caught.value)
    assert "a stand-in" in str(caught.value.__cause__)


def test_results_that_do_not_unpickle_are_explained():
    """A result that pickles and fails to unpickle is a failure of its rank."""
    with pytest.raises(RankFailedError, match="rank 0 of 2 failed: what it returned or raised cannot be unpickled"):
        run_ranks(lambda group: OddError(1, 2) if group.rank == 0 else None, 2, backend="tcp")


def test_other_threads_are_mentioned_when_a_process_is_stuck():
    """A lock that another thread held at the fork is a likely reason for a stuck rank, so the error speaks of it."""
    lock, held, done = threading.Lock(), threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait()

    holder = threading.Thread(target=hold, name="lock holder")
    holder.start()
    try:
        held.wait()
        with pytest.raises(RankFailedError, match=r"note: this process had other threads .*\(lock holder\)"):
            run_ranks(lambda group: lock.acquire(), 1, timeout=0.5, backend="tcp")
    finally:
        done.set()
        holder.join()


@pytest.mark.skipif(sys.platform != "linux", reason="the system's threads are counted on Linux only")
def test_threads_that_are_about_to_end_are_waited_for(monkeypatch):
    """No process is forked beside one, for C libraries clean up behind a thread under locks; one that lasts is not."""

    def threads():
        return list(Path("/proc/self/task").iterdir())

    def begin_thread(seconds):
        thread = ctypes.c_ulong()
        libc = ctypes.CDLL(None)
        assert libc.pthread_create(ctypes.byref(thread), None, libc.usleep, ctypes.c_void_p(int(1e6 * seconds))) == 0
        assert libc.pthread_detach(thread) == 0

    alone = len(threads())
    begin_thread(0.2)
    assert len(threads()) == alone + 1
    assert run_ranks(lambda group: group.rank, 2, backend="tcp") == [0, 1]
    assert len(threads()) == alone
    begin_thread(60)
    assert run_ranks(lambda group: group.rank, 2, backend="tcp") == [0, 1]
    monkeypatch.setattr(process_ranks, "_THREAD_EXIT_TIMEOUT_SECONDS", 60)  # which the second time is not waited for
    assert run_ranks(lambda group: group.rank, 2, backend="tcp") == [0, 1]
    assert len(threads()) == alone + 1


def test_prints_of_processes_are_captured(capfd):
    """What ranks print goes where this process's output goes, also from a rank that fails."""

    def program(group):
        print("printed by", group.rank)
        print("warned by", group.rank, file=sys.stderr)
        assert group.rank == 0

    with pytest.raises(RankFailedError):
        run_ranks(program, 2, backend="tcp")
    out, err = capfd.readouterr()
    assert sorted(out.split("\n")) == ["", "printed by 0", "printed by 1"]
    assert "warned by 1\n" in err


def test_exit_handlers_of_the_parent_do_not_run_in_ranks(tmp_path):
    """What this process has to do at its end is done once."""
    script = tmp_path / "exits.py"
    script.write_text(
        "import atexit, sys\n"
        "from ferrodist.testing import run_ranks\n"
        "atexit.register(print, 'the end')\n"
        "sys.stdout.write('unflushed ')\n"
        "run_ranks(lambda group: None, 3, backend='tcp')\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "unflushed the end\n"


def test_ranks_do_not_outlive_their_parent(tmp_path):
    """When the process that runs the ranks is killed, the ranks go as well."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, threading\n"
        "from ferrodist.testing import run_ranks\n"
        "def program(group):\n"
        "    group.barrier()\n"
        "    os.write(1, b'%d\\n' % os.getpid())\n"
        "    threading.Event().wait()\n"
        "run_ranks(program, 2, backend='tcp')\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE) as parent:
        assert all(parent.stdout.readline().strip().isdigit() for _ in range(2))
        parent.kill()
        # The pipe ends when nobody can write to it any more: neither the parent nor a rank.
        assert parent.stdout.read() == b""


def test_groups_are_closed_together():
    """A rank that is done early stays for the others: its group is closed when the last one is done."""
    closed = []

    class Recorder(ToyBackend):
        def close(self, timeout=None):
            closed.append(self.rank)
            super().close(timeout)

    def program(group):
        if group.rank == 0:
            return closed.copy()
        group.barrier(timeout=0.3)  # rank 0 does not come
        return None

    def patient(group):
        if group.rank == 0:
            group.recv(bytearray(1), 1)
            return list(closed)
        if group.rank == 1:
            group.send(b"x", 0)
        return None

    assert run_ranks(patient, 3, backend=Recorder.create_group)[0] == []
    assert sorted(closed) == [0, 1, 2]
    closed.clear()
    with pytest.raises(RankFailedError, match="has not called it"):
        run_ranks(program, 3, backend=Recorder.create_group)
    assert sorted(closed) == [0, 1, 2]


def test_a_failing_close_is_a_failure():
    """An error in `close` of a group that was good fails its rank."""

    class Unclosable(ToyBackend):
        def close(self, timeout=None):
            super().close(timeout)
            if self.rank == 1:
                raise OSError("the door is stuck")

    with pytest.raises(RankFailedError, match="rank 1 of 2 failed: OSError: the door is stuck"):
        run_ranks(lambda group: None, 2, backend=Unclosable.create_group)


def test_wrong_arguments_are_refused():
    """World sizes, backends and timeouts that make no sense raise before anything is started."""
    with pytest.raises(InvalidWorldSizeError):
        run_ranks(lambda group: None, 0)
    with pytest.raises(ValueError, match="backend must be"):
        run_ranks(lambda group: None, 1, backend="carrier pigeon")
    with pytest.raises(ValueError, match="timeout must be"):
        run_ranks(lambda group: None, 1, timeout=-1)
    for made in (ToyBackend.create_group(3), None, [1, 2], iter(())):
        with pytest.raises(ValueError, match="must return a list of the groups of ranks 0 to 1 in order"):
            run_ranks(lambda group: None, 2, backend=lambda world_size, made=made: made)


@pytest.mark.parametrize("backend", ["simulated", "tcp"])
def test_a_run_may_take_for_ever(backend):
    """An infinite timeout is none."""
    assert run_ranks(lambda group: group.rank, 2, backend=backend, timeout=math.inf) == [0, 1]


def test_the_error_pickles():
    """A `RankFailedError` goes through pickle with its ranks, as other errors do."""
    with pytest.raises(RankFailedError) as caught:
        run_ranks(lambda group: 1 / 0, 1)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.ranks) == (str(caught.value), (0,))


def test_an_async_program_is_refused():
    """Its ranks would return coroutines, which nobody runs."""

    async def program(group):
        raise AssertionError

    with pytest.raises(TypeError, match=r"run_ranks takes a plain function.*asyncio\.run"):
        run_ranks(program, 2)
