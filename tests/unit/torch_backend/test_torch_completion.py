"""Futures and the threads that complete them: by themselves, and with collectives in callbacks."""

from __future__ import annotations

import copy
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist

from ferrodist.backends.subgroup import SubBackend
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, GroupAbortedError, GroupClosedError
from ferrodist.testing import run_ranks
from ferrodist.torch_backend import futures
from ferrodist.torch_backend.futures import ResultFuture, SerialQueue, ThreadPool
from ferrodist.torch_backend.process_group import FerrodistProcessGroup

NAME = "ferrodist-test"
BACKENDS = ["simulated", "native-threads"]


@pytest.fixture
def threads():
    """Closed afterwards."""
    made = ThreadPool(NAME)
    yield made
    made.close()
    made.join(Deadline(10.0))


@pytest.fixture
def without_rest(monkeypatch):
    """Threads that have nothing to do stay for longer than a test takes."""
    monkeypatch.setattr(futures, "_IDLE_SECONDS", 60.0)


def start_allreduce(made, tensor):
    """The future of an asynchronous one."""
    options = dist.AllreduceOptions()
    options.asyncOp = True
    return made.allreduce([tensor], options).get_future()


@pytest.mark.usefixtures("without_rest")
def test_as_many_threads_as_are_blocked(threads):
    """None waits for another's end, whether threads are new or have rested."""
    for number in range(1, 7):
        meeting = threading.Barrier(number + 1)
        for _ in range(number):
            threads.run(meeting.wait)
        meeting.wait(10.0)


def test_no_job_is_lost_when_threads_end(threads, monkeypatch):
    """One that was given to a thread which has just had nothing to do for too long."""
    monkeypatch.setattr(futures, "_IDLE_SECONDS", 1e-6)
    done = threading.Semaphore(0)
    for _ in range(3000):
        threads.run(done.release)
        assert done.acquire(timeout=10.0)


@pytest.mark.usefixtures("without_rest")
def test_threads_end_with_their_jobs():
    """When they are to, whether they have something to do or not, and are waited for that long."""
    threads = ThreadPool(NAME)
    begun, ended = threading.Event(), []

    def job():
        begun.set()
        time.sleep(0.2)
        ended.append(True)

    meeting = threading.Barrier(2)
    threads.run(meeting.wait)
    meeting.wait(10.0)
    threads.run(job)
    threads.run(job)
    assert begun.wait(10.0)
    threads.close()
    threads.join(Deadline(10.0))
    assert ended == [True, True]
    assert NAME not in [each.name for each in threading.enumerate()]


@pytest.mark.usefixtures("without_rest")
def test_what_is_done_is_let_go(threads):
    """Also while its thread waits for more."""

    class Result:
        """Of which one can see the end."""

    result, gone = Result(), threading.Event()
    weakref.finalize(result, gone.set)
    threads.run(lambda result=result: str(result))
    del result
    assert gone.wait(10.0)


def test_a_line_goes_on_after_what_raises(threads):
    """Whatever that is; the next future's callbacks run."""
    line, ran = SerialQueue(1), threading.Event()

    def fail():
        raise SystemExit

    line.run(fail, threads)
    line.run(ran.set, threads)
    assert ran.wait(10.0)


def test_a_callback_that_raises_is_logged(threads, caplog):
    """Where nobody has a future of what it comes to."""
    future = ResultFuture(threads, [])
    future.add_done_callback(lambda _: 1 // 0)
    future.settle(lambda: None)
    future.then(lambda _: None).wait()
    assert [(record.getMessage(), record.exc_info[0]) for record in caplog.records] == [
        ("a callback of a future failed", ZeroDivisionError)
    ]


def test_a_future_with_devices_keeps_the_class_of_an_error(threads):
    """torch looks into results whose tensors are on a device at once, and only keeps an error's text."""
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


@pytest.mark.parametrize(
    "look", [iter, len, bool, copy.copy, lambda result: result[0], lambda result: result.__class__]
)
def test_the_result_of_what_has_failed_raises(look, threads):
    """Wherever somebody looks into it who has got it past the future, as torch's C++ does."""

    def fail():
        raise GroupAbortedError("gone")

    future = ResultFuture(threads, [])
    future.settle(fail)
    (done,) = torch.futures.wait_all([future])
    with pytest.raises(GroupAbortedError, match="gone"):
        look(done)


def crossing(made, then=lambda: None):
    """Collectives of a callback and of the thread that has added it, in another order on each rank."""
    own, beside = torch.ones(2), torch.ones(3)
    first, second = threading.Event(), threading.Event()

    def callback(done):
        done.wait()
        if made.rank():
            assert second.wait(20.0)
        future = start_allreduce(made, beside)
        first.set()
        future.wait()
        then()

    future = start_allreduce(made, torch.ones(1)).then(callback)
    if made.rank() == 0:
        assert first.wait(20.0)
    made.allreduce(own).wait()
    second.set()
    future.wait()
    assert (own == 2).all()
    assert (beside == 2).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_callbacks_cross_the_program(backend):
    """Their collectives have an order of their own; those of callbacks in callbacks another one."""

    def program(group):
        made = FerrodistProcessGroup(group)
        crossing(made, lambda: crossing(made))
        made.shutdown()

    run_ranks(program, 2, backend=backend, timeout=60)


def test_a_callback_in_one_without_collectives():
    """Has the order of its depth, though there has been none before it."""

    def program(group):
        made = FerrodistProcessGroup(group)

        def deep(_):
            total = torch.ones(1)
            made.allreduce(total).wait()
            return total.item()

        def shallow(done):
            return done.then(deep).wait()

        return start_allreduce(made, torch.ones(1)).then(shallow).wait()

    assert run_ranks(program, 2, timeout=60) == [2.0, 2.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_callbacks_fail_with_the_group(backend):
    """Also those in a collective that no other rank has called; after the group has ended they can't begin one."""

    def program(group):
        made = FerrodistProcessGroup(SubBackend(group, range(2), name="part", label="part"))
        if group.rank:
            start_allreduce(made, torch.ones(1)).wait()
            group.barrier()
            return
        began, beside = threading.Event(), []

        def callback(_):
            future = start_allreduce(made, torch.ones(1))
            beside.append(made._levels.current().group)
            began.set()
            future.wait()

        future = start_allreduce(made, torch.ones(1)).then(callback)
        assert began.wait(20.0)
        made.abort()
        with pytest.raises(DistributedError):
            future.wait()
        made.shutdown()
        with pytest.raises(GroupClosedError):
            beside[0].barrier()
        group.barrier()

    run_ranks(program, 2, backend=backend, timeout=60)


@pytest.mark.usefixtures("without_rest")
def test_a_group_s_threads_end_with_it():
    """And not when they have rested."""

    def program(group):
        made = FerrodistProcessGroup(SubBackend(group, range(2), name="ending"))
        assert start_allreduce(made, torch.ones(1)).then(lambda done: done.value()[0].item()).wait() == 2.0
        made.shutdown()

    run_ranks(program, 2, timeout=60)
    for each in threading.enumerate():
        if each.name == "ferrodist-futures-ending":
            each.join(10.0)
            assert not each.is_alive()


def test_a_future_is_asked_for_again_when_there_was_no_thread(monkeypatch):
    """The limit of threads is named, and later futures, and those of the same work, complete."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    def program(group):
        made = FerrodistProcessGroup(group)
        received = torch.zeros(1)
        receive, others = made.recv([received], 1 - group.rank), SerialQueue(1)
        group.barrier()
        if group.rank == 0:
            with monkeypatch.context() as patched:
                patched.setattr(threading.Thread, "start", refuse)
                for fail in (receive.get_future, lambda: others.run(print, made._threads)):
                    with pytest.raises(DistributedError, match="no more threads"):
                        fail()
        group.barrier()
        made.send([torch.ones(1)], 1 - group.rank).wait()
        assert receive.get_future().wait() == [1.0]
        ran = threading.Event()
        others.run(ran.set, made._threads)
        assert ran.wait(10.0)
        made.shutdown()

    run_ranks(program, 2)
