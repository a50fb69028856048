"""What torch waits for: works, their futures, callbacks, and how groups and programs end with them."""

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

from ferrodist.backends.sub import SubBackend
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedTimeoutError, GroupAbortedError, GroupClosedError, PeerLostError
from ferrodist.interop.completion import Line, ResultFuture, Threads
from ferrodist.interop.ending import Sends
from ferrodist.interop.process_group import FerrodistProcessGroup
from ferrodist.testing import run_ranks

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


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_message_that_nobody_has_waited_for_is_delivered(backend):
    """Its sender leaves the group at once, the receiver asks for it later."""

    def program(made):
        if made.rank() == 0:
            made.send([torch.full((500_000,), 3.0)], 1)
            made.shutdown()
            return 3.0
        time.sleep(0.2)
        received = torch.zeros(500_000)
        made.recv([received], 0).wait()
        return float(received[-1])

    assert run(program, backend=backend) == [3.0, 3.0]


def test_an_exception_leaves_a_group_at_once():
    """What was started may never end then: its rank has not come so far on the others."""

    def fail(made):
        try:
            raise KeyError
        finally:
            made.shutdown()

    def program(made):
        if made.rank() == 1:
            time.sleep(1.0)
            return
        work = start_allreduce(made, torch.ones(1))
        begin = time.monotonic()
        with pytest.raises(KeyError):
            fail(made)
        assert time.monotonic() - begin < 0.9
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

        def has_ended(self):
            return self.ends

        def wait_for(self, seconds):
            assert 0 < seconds <= 10
            self.was_awaited = True
            raise PeerLostError("it is gone")

    sends = Sends()
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
    sends.finish()
    assert all(each.was_awaited for own in started for each in own)
    kept = Sends()
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


def test_the_future_of_what_never_comes_fails():
    """When the group's time has passed, and callbacks that were added after it run."""

    def program(made):
        if made.rank() == 1:
            made.barrier().wait()
            return
        future = made.recv([torch.zeros(1)], 1).get_future()
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


def test_a_line_goes_on_after_what_raises():
    """Whatever that is; the next future's callbacks run."""
    threads, line, ran = Threads("test"), Line(1), threading.Event()

    def fail():
        raise SystemExit

    line.run(fail, threads)
    line.run(ran.set, threads)
    assert ran.wait(10.0)
    threads.close()


def test_a_future_with_devices_keeps_the_class_of_an_error():
    """torch looks into results whose tensors are on a device at once, and only keeps an error's text."""
    threads = Threads("test")
    future = ResultFuture(threads, [torch.device("meta", 0)])

    def fail():
        raise GroupAbortedError("gone")

    future.settle(fail)
    for look in (future.wait, future.value):
        with pytest.raises(GroupAbortedError, match="gone"):
            look()
    seen = threading.Event()

    def callback(done):
        with pytest.raises(GroupAbortedError):
            done.value()
        seen.set()

    future.then(callback)
    assert seen.wait(10.0)
    threads.close()


def test_threads_end_with_their_jobs():
    """When they are to, and are waited for that long."""
    threads = Threads("test")
    begun, ended = threading.Event(), []

    def job():
        begun.set()
        time.sleep(0.3)
        ended.append(True)

    threads.run(job)
    begun.wait(10.0)
    threads.close()
    threads.join(Deadline(10.0))
    assert ended == [True]


def test_what_torch_s_profiler_sees():
    """A call by its name."""

    def program(made):
        tensor = torch.ones(4)
        if made.rank():
            made.allreduce(tensor).wait()
            made.recv([tensor], 0).wait()
            made.allreduce([tensor], dist.AllreduceOptions()).wait()
            return set()
        with torch.profiler.profile() as profile:
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
    end = time.monotonic() + 1.0
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
