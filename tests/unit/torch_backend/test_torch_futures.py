"""What torch waits for: works and their futures, and how groups and programs end with them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ferrodist.backends import lifecycle
from ferrodist.backends.lifecycle import ExitStage
from ferrodist.backends.subgroup import SubBackend
from ferrodist.deadline import Deadline
from ferrodist.errors import (
    DistributedError,
    DistributedTimeoutError,
    GroupClosedError,
    PeerLostError,
)
from ferrodist.testing import run_ranks
from ferrodist.torch_backend.futures import ThreadPool
from ferrodist.torch_backend.messages import PendingSends
from ferrodist.torch_backend.process_group import FerrodistProcessGroup
from ferrodist.torch_backend.work import DoneWork, JoinedWork

BACKENDS = ["simulated", "native-threads"]


def run(program, size=2, **kwargs):
    """Run ``program(process_group)`` on each rank."""
    return run_ranks(lambda group: program(FerrodistProcessGroup(group)), size, timeout=60, **kwargs)


def start_allreduce(made, tensor, *, is_async=True):
    """An asynchronous one, or one that waits."""
    options = dist.AllreduceOptions()
    options.asyncOp = is_async
    return made.allreduce([tensor], options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_group_that_is_left_finishes_what_was_started(backend):
    """Collectives and messages that nobody has waited for, as other backends of torch do."""

    def program(made):
        peer = 1 - made.rank()
        tensors = [torch.ones(200_000) for _ in range(20)]
        works = [start_allreduce(made, tensor) for tensor in tensors[1:]]
        start_allreduce(made, tensors[0])
        received = torch.zeros(200_000)
        receive = made.recv([received], peer)
        made.send([torch.full((200_000,), 3.0)], peer)
        receive.wait()
        made.shutdown()
        assert all(work.is_success() for work in works)
        return [float(each[-1]) for each in (*tensors, received)]

    assert run(program, backend=backend) == [[2.0] * 20 + [3.0]] * 2


LEAVES = {
    "shutdown": FerrodistProcessGroup.shutdown,
    "exit": lambda made: lifecycle._run_at_exit(ExitStage.TORCH_GROUPS, made._leave_at_exit),  # as atexit calls it
}


@pytest.mark.parametrize("leave", LEAVES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_message_that_nobody_has_waited_for_is_delivered(backend, leave):
    """Its sender leaves the group at once, or exits, and the receiver asks for it later."""

    def program(made):
        if made.rank() == 0:
            made.send([torch.full((500_000,), 3.0)], 1)
            LEAVES[leave](made)
            return 3.0
        time.sleep(0.2)
        received = torch.zeros(500_000)
        made.recv([received], 0).wait()
        made.shutdown()  # rank 0 waits for that
        return float(received[-1])

    assert run(program, backend=backend) == [3.0, 3.0]


def test_an_exception_leaves_a_group_at_once():
    """What was started may never end then: its rank has not come so far on the others."""

    def fail(made):
        try:
            raise KeyError
        finally:
            made.shutdown()

    has_left = threading.Event()

    def program(made):
        if made.rank() == 1:
            assert has_left.wait(20.0)
            return
        work = start_allreduce(made, torch.ones(1))
        with pytest.raises(KeyError):
            fail(made)
        has_left.set()
        with pytest.raises(GroupClosedError):
            work.wait()

    run(program)


class Interruption(BaseException):
    """Raised by the handler of a signal."""


@contextlib.contextmanager
def interrupted_by(action):
    """Inside of this, a signal comes soon, whose handler does something and raises `Interruption`."""

    def handle(*_):
        action()
        raise Interruption

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


WAITS = {
    "a call": lambda made: start_allreduce(made, torch.ones(4), is_async=False),
    "a call the long way": lambda made: start_allreduce(made, torch.ones(4, 4).t(), is_async=False),
    "a wait": lambda made: start_allreduce(made, torch.ones(4)).wait(),
    "a call behind others": lambda made: [
        start_allreduce(made, torch.ones(4, 4).t(), is_async=each) for each in (True, False)
    ],
}


@pytest.mark.parametrize("backend", ["tcp", "native"])
@pytest.mark.parametrize("waits", WAITS)
def test_a_handler_of_a_signal_leaves_a_group_at_once(waits, backend):
    """In the middle of a call, which can't end while its thread is in the handler."""

    def program(made):
        made.barrier().wait()
        start = time.monotonic()
        if made.rank() == 0:
            with interrupted_by(made.shutdown), pytest.raises(Interruption):
                WAITS[waits](made)
        else:
            with pytest.raises(PeerLostError):
                made.recv([torch.ones(1)], 0).wait()
        made.shutdown()
        return time.monotonic() - start < 20

    assert run(program, backend=backend) == [True, True]


@pytest.mark.parametrize("backend", ["tcp", "native"])
@pytest.mark.parametrize("shape", [(4,), (4, 4)], ids=["short way", "long way"])
def test_a_group_is_left_when_its_end_is_interrupted(shape, backend):
    """The others learn of it, and not only when the program ends."""

    def program(made):
        made.barrier().wait()
        if made.rank() == 0:
            start_allreduce(made, torch.ones(shape).t())
            with interrupted_by(lambda: None), pytest.raises(Interruption):
                made.shutdown()
            with pytest.raises(GroupClosedError):
                made.barrier().wait()
        else:
            with pytest.raises(PeerLostError):
                made.recv([torch.ones(1)], 0).wait()
        made.shutdown()

    run(program, backend=backend)


def test_sends_of_several_threads_are_all_waited_for():
    """And those that have ended are not kept, whatever those before them do."""

    class Send:
        def __init__(self, ends):
            self.ends = ends
            self.was_awaited = False

        def is_completed(self):
            return self.ends

        def wait_for(self, seconds):
            assert 0 < seconds <= 10
            self.was_awaited = True
            raise PeerLostError("it is gone")

    sends = PendingSends()
    started = [[Send(ends=False) for _ in range(200)] for _ in range(8)]
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda own=own: [sends.add(each) for each in own]) for own in started]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switching)
    sends.drain()
    assert all(each.was_awaited for own in started for each in own)
    kept = PendingSends()
    kept.add(started[0][0])
    over = [Send(ends=False) for _ in range(100)]
    references = [weakref.ref(each) for each in over]
    for each in over:
        kept.add(each)
        each.ends = True
    over.clear()
    del each
    assert sum(reference() is not None for reference in references) < 20


def test_a_wait_for_several_has_one_limit():
    """And not one for each."""

    def program(made):
        if made.rank() == 1:
            made.barrier().wait()
            return
        works = [made.recv([torch.zeros(1)], 1, tag) for tag in range(20)]
        begin = time.monotonic()
        with pytest.raises(DistributedTimeoutError):
            made._join(works).wait(timedelta(milliseconds=200))
        assert time.monotonic() - begin < 2.0
        made.barrier().wait()

    run(program)


def test_a_message_that_has_come_is_in_its_tensor():
    """As soon as its work says that it is completed, whatever the tensor's layout."""

    def program(made):
        if made.rank() == 0:
            made.send([torch.arange(6.0).view(2, 3)], 1).wait()
            return
        received = torch.zeros(3, 2).t()
        work = made.recv([received], 0)
        deadline = Deadline(20.0)
        while not work.is_completed():
            assert not deadline.expired
        assert received.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        assert work.is_success()

    run(program)


def test_a_message_is_brought_to_its_tensor_once():
    """What the program then writes there stays, however often it waits."""

    def program(made):
        if made.rank() == 0:
            made.send([torch.ones(2, 2)], 1).wait()
            return
        received = torch.zeros(2, 2).t()
        work = made.recv([received], 0)
        work.wait()
        assert (received == 1).all()
        received.fill_(7.0)
        work.wait()
        assert (received == 7).all()

    run(program)


def test_messages_from_any_rank():
    """They say whose they are."""

    def program(made):
        if made.rank():
            made.send([torch.tensor([float(made.rank())])], 0, 5).wait()
            return None
        found = []
        for _ in range(2):
            received = torch.zeros(1)
            work = made.recv_anysource([received], 5)
            work.wait()
            found.append((work._source_rank(), received.item()))
        return sorted(found)

    assert run(program, 3)[0] == [(1, 1.0), (2, 2.0)]


def test_several_that_have_not_all_ended():
    """Are under way until the last one has; then they are all right, or what the first to fail of them is."""

    def program(made):
        if made.rank() == 0:
            work = made._join([start_allreduce(made, torch.ones(1)), made.recv([torch.zeros(1)], 1)])
            made.barrier().wait()
            assert not work.is_completed()
            assert not work.is_success()
            assert work.exception() is None
            made.send([torch.zeros(1)], 1).wait()
            assert work.wait()
            assert work.is_success()
            assert len(work.result()) == 2
            failing = made._join([made.recv([torch.zeros(1)], 1, tag) for tag in (1, 2)])
            made.abort()
            with pytest.raises(DistributedError, match="aborted"):
                failing.wait()
            assert failing.is_completed()
            assert not failing.is_success()
            assert isinstance(failing.exception(), DistributedError)
            return
        start_allreduce(made, torch.ones(1)).wait()
        made.barrier().wait()
        made.recv([torch.zeros(1)], 0).wait()
        made.send([torch.zeros(1)], 0).wait()

    run(program)


def test_what_several_fail_with():
    """Is what the first of them does, when all have ended; a limit that passes while one goes on ends the wait."""

    class Ended(DoneWork):
        def wait_for(self, seconds):
            raise self.results[0]

    class Late(DoneWork):
        def is_completed(self):
            return False

        def wait_for(self, seconds):
            raise DistributedTimeoutError("not yet")

    threads = ThreadPool("test")
    ended = [Ended([error], threads) for error in (DistributedTimeoutError("first"), GroupClosedError("second"))]
    for works, message in ((ended, "first"), (ended[::-1], "second"), ([*ended, Late([], threads)], "not yet")):
        with pytest.raises(DistributedError, match=message):
            JoinedWork(works, threads).wait()


def test_futures_of_collectives_share_a_thread():
    """They end in the order in which they were started, so one waits for all."""

    def program(made):
        if made.rank() == 0:
            works = [start_allreduce(made, torch.ones(1)) for _ in range(20)]
            futures = [work.get_future() for work in works]
            name = f"ferrodist-futures-{made.group.name}"
            assert [each.name for each in threading.enumerate()].count(name) == 1
            made.send([torch.ones(1)], 1).wait()
            assert all(future.wait()[0].item() == 2 for future in futures)
            return
        made.recv([torch.ones(1)], 0).wait()
        for _ in range(20):
            start_allreduce(made, torch.ones(1)).wait()

    run(program)


def test_a_work_has_one_future():
    """Whoever asks for it, and when."""

    def program(made):
        work = start_allreduce(made, torch.ones(1))
        assert work.get_future() is work.get_future()
        work.wait()

    run(program)


def test_the_future_of_what_never_comes_fails():
    """When the group's time has passed, and callbacks that were added after it run."""

    def program(made):
        if made.rank() == 1:
            made.barrier().wait()
            return
        future = made.recv([torch.zeros(1)], 1).get_future()
        assert not future.done()
        errors = []

        def look(done):
            with pytest.raises(DistributedTimeoutError, match="nothing came from rank 1 within 1 s"):
                done.wait()
            errors.append("late")

        future.add_done_callback(look)
        ran = threading.Event()
        made.barrier().get_future().add_done_callback(lambda _: ran.set())
        assert ran.wait(10.0)
        assert errors == ["late"]

    def body(group):
        program(FerrodistProcessGroup(SubBackend(group, range(2), timeout=1.0, name="short", label="short")))

    run_ranks(body, 2)


def test_what_torch_s_profiler_sees():
    """A call by its name."""

    def program(made):
        tensor = torch.ones(4)
        if made.rank():
            made.allreduce(tensor).wait()
            made.recv([tensor], 0).wait()
            made.allreduce([tensor], dist.AllreduceOptions()).wait()
            return set()
        with torch.profiler.profile(acc_events=True) as profile:
            made.allreduce(tensor).wait()
            made.send([tensor], 1).wait()
            made.allreduce([tensor], dist.AllreduceOptions()).wait()
        return {(event.key, event.count) for event in profile.key_averages() if event.key.startswith("ferrodist")}

    assert run(program)[0] == {("ferrodist:allreduce", 2), ("ferrodist:send", 1)}


ENDING = """
import sys, threading, time
import torch, torch.distributed as dist

dist.init_process_group("ferrodist", store=dist.HashStore(), rank=0, world_size=1)
begun = threading.Event()

def compute(future):
    tensor = torch.ones(512, 512)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        begun.set()
        tensor = (tensor @ tensor).clamp(max=1.0)
    print("computed", flush=True)

work = dist.all_reduce(torch.ones(4), async_op=True)
work.get_future().add_done_callback(compute)
begun.wait()
DESTROY
"""


@pytest.mark.parametrize("destroy", ["dist.destroy_process_group()", ""])
def test_a_program_may_end_while_callbacks_run(destroy):
    """They end first; ended in the middle of torch's code they would abort the process."""
    done = subprocess.run(
        [sys.executable, "-c", ENDING.replace("DESTROY", destroy)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "computed\n", "")
