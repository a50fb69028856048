"""Enqueuing on streams: order, lifetimes of tensors, ends of communicators, the watchdog; over recorded fakes."""

from __future__ import annotations

import gc
import os
import threading
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
import torch
from nccl_fakes import FakeEvent, FakeNccl, FakeStream, FakeStreams, FakeWork, fake_groups, send_cpu_tensors_to_nccl

import ferrodist as fd
from ferrodist.backends.nccl import communicator as communicator_module
from ferrodist.backends.nccl.in_flight import InFlightOp, OpInfo
from ferrodist.backends.nccl.watchdog import Watchdog
from ferrodist.backends.signature import CollectiveSignature
from ferrodist.collectives.engines import select
from ferrodist.deadline import Deadline
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _cpu_tensors_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    send_cpu_tensors_to_nccl(monkeypatch)


@pytest.fixture(autouse=True)
def no_watch_left() -> Iterator[None]:
    """A test leaves no watchdog thread."""
    yield
    gc.collect()
    left = [thread for thread in threading.enumerate() if thread.name.startswith("ferrodist-nccl")]
    for thread in left:
        thread.join(10)
    assert not any(thread.is_alive() for thread in left), left


def alone(**named: object) -> fd.HybridBackend:
    """A group of one rank."""
    return fake_groups(1, **named)[0]


def streams_of(group: fd.HybridBackend) -> FakeStreams:
    """The fake streams that a group was made with."""
    return group.fake_streams


def test_a_call_is_ordered_between_what_comes_before_and_after_it() -> None:
    """The group's stream waits for the caller's, then the caller's for the group's."""
    group = alone()
    fd.allreduce(torch.ones(3), group=group)
    streams = streams_of(group)
    (own,) = streams.made
    caller = streams.current()
    assert streams.log == ["record the caller's", "own 0 waits", "record own 0", "record own 0", "the caller's waits"]
    assert len(own.waited_for) == 1
    assert len(caller.waited_for) == 1
    assert [work.kind for work in own.works] == ["all_reduce"]
    assert caller.waited_for[0].works == own.works, "the caller does not wait for the work"
    assert own.waited_for[0].works == []
    group.close()


def test_an_asynchronous_call_is_waited_for_by_wait() -> None:
    """The caller's stream does not wait before wait(), and each wait() orders its thread's stream."""
    group = alone(nccl=FakeNccl(is_lazy=True))
    pending = fd.async_allreduce(torch.ones(3), group=group)
    streams = streams_of(group)
    caller = streams.current()
    assert caller.waited_for == []
    assert pending.wait().tolist() == [1, 1, 1]
    assert len(caller.waited_for) == 1
    pending.wait()
    assert len(caller.waited_for) == 2
    assert pending.done()
    group.close()


def test_asynchronous_calls_keep_their_tensors_until_they_are_done() -> None:
    """Memory that the GPU still reads is not reused, even when the handle is dropped."""

    def program(group: fd.Backend) -> None:
        fd.allreduce(torch.ones(1))
        group.synchronize()
        if group.rank == 0:
            tensor = torch.ones(3)
            address = tensor.data_ptr()
            fd.async_allreduce(tensor)
            del tensor
            gc.collect()
            (launched,) = group._executor._outstanding
            assert [kept.data_ptr() for kept in launched.kept].count(address) == 1
            group.barrier()
        else:
            group.barrier()  # only now does it launch
            fd.async_allreduce(torch.ones(3))
        group.synchronize()
        assert not group._executor.needs_polling

    run_ranks(program, 2, backend=partial(fake_groups, nccl=FakeNccl(is_lazy=True)))


def test_synchronous_calls_keep_nothing() -> None:
    """A synchronous call's memory is free when the caller frees it: the caller's stream is behind the work."""

    def program(group: fd.Backend) -> None:
        fd.allreduce(torch.ones(1))
        group.synchronize()
        if group.rank == 0:
            fd.broadcast(torch.ones(3), 0)
            (launched,) = group._executor._outstanding
            assert launched.kept == ()
            group.barrier()
        else:
            group.barrier()
            fd.broadcast(torch.ones(3), 0)

    run_ranks(program, 2, backend=partial(fake_groups, nccl=FakeNccl(is_lazy=True)))


def test_results_used_on_another_stream_are_kept_for_it() -> None:
    """The allocator learns of a stream that uses an asynchronous result allocated on another."""
    group = alone(nccl=FakeNccl(is_lazy=True))
    streams = streams_of(group)
    tensor = torch.ones(3)
    pending = fd.async_allreduce(tensor, group=group)
    pending.wait()
    assert streams.kept == []
    other = FakeStream("other")
    with streams.using(other):
        result = pending.wait()
    assert streams.kept == [(tensor.data_ptr(), other), (result.data_ptr(), other)]
    group.close()


def test_tensors_of_failed_operations_are_kept_for_the_groups_stream() -> None:
    """Memory that the group's stream may still use after a failed launch or group is not reused before."""

    def program(group: fd.Backend) -> None:
        streams = streams_of(group)
        begun, broken = torch.ones(2), torch.ones(3)
        fd.allreduce(torch.ones(1))
        group.synchronize()
        group.barrier()
        if group.rank:
            with pytest.raises(fd.GroupAbortedError, match="left allreduce"):
                group.recv(bytearray(1), 0)
            return
        fd.async_allreduce(begun)
        (own,) = [one for one in group.shared.opened if one.rank == 0]

        def refuse(*_: object, **__: object) -> None:
            raise RuntimeError("no memory")

        own.all_reduce = refuse
        with pytest.raises(RuntimeError, match="no memory"):
            fd.allreduce(broken)
        assert own.is_aborted
        kept = {address for address, stream in streams.kept if stream is streams.made[0]}
        assert {begun.data_ptr(), broken.data_ptr()} <= kept

    run_ranks(program, 2, backend=partial(fake_groups, nccl=FakeNccl(is_lazy=True)))


def test_a_single_rank_keeps_no_split_sizes() -> None:
    """Without other ranks to compare with, no counts are kept."""
    group = alone()
    assert fd.all_to_all_single_uneven(torch.ones(2), [2], [2], group=group).tolist() == [1, 1]
    group.synchronize()
    assert group.engine("cuda")._split_sizes._own == {}
    group.close()


def test_a_given_stream_is_used_and_does_not_wait_for_itself() -> None:
    """With stream= the group's work is enqueued there, and calls on that stream itself don't wait."""
    mine = FakeStream("mine")
    (control,) = fd.SimulatedBackend.create_group(1)
    streams = FakeStreams()
    group = fd.HybridBackend(control, stream=mine, library=FakeNccl, streams=lambda _: streams)
    fd.allreduce(torch.ones(3), group=group)
    assert len(mine.works) == 1
    with streams.using(mine):
        before = len(mine.waited_for)
        fd.allreduce(torch.ones(3), group=group)
        assert len(mine.waited_for) == before
    assert streams.made == []
    group.close()


def test_a_captured_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """During the capture of a CUDA graph calls raise, and the group stays usable."""
    group = alone()
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(select, "is_capturing", lambda: True)
    for find in (select.engine_of, select.device_p2p_of):
        with pytest.raises(fd.UnsupportedOpError, match="graph"):
            find(group, cuda)
    monkeypatch.setattr(select, "is_capturing", lambda: False)
    assert select.engine_of(group, cuda) is group.engine("cuda")
    assert select.device_p2p_of(group, cuda) is group.p2p("cuda")
    group.close()


def test_a_rank_has_one_gpu_in_a_group() -> None:
    """A tensor on another GPU than the first is refused, with advice."""
    group = alone()
    fd.allreduce(torch.ones(1), group=group)
    other = SimpleNamespace(device=torch.device("cuda", 1))
    call = CollectiveSignature(operation="allreduce", sequence=group._executor.sequencer.reserve())
    with pytest.raises(fd.UnsupportedOpError, match=r"uses cpu .* a tensor on cuda:1.*set_device"):
        group._executor.launch(call, [other], lambda context: None, timeout=1.0)
    group.close()


def test_a_given_stream_on_another_gpu_is_refused() -> None:
    """A stream= on another GPU than the tensor is refused, before a communicator is made."""
    mine = FakeStream("mine")
    mine.device = torch.device("cuda", 1)
    (control,) = fd.SimulatedBackend.create_group(1)
    nccl = FakeNccl()
    group = fd.HybridBackend(control, stream=mine, library=lambda: nccl, streams=lambda _: FakeStreams())
    with pytest.raises(fd.UnsupportedOpError, match=r"stream= on cuda:1 .* a tensor on cpu"):
        fd.allreduce(torch.ones(1), group=group)
    assert nccl.opened == []
    group.close()


def test_closing_completes_sends() -> None:
    """Closing a group finalizes its communicator, then destroys it; once."""
    group = alone()
    fd.allreduce(torch.ones(1), group=group)
    (communicator,) = group.shared.opened
    group.close()
    group.close()
    assert communicator.log == ["all_reduce", "finalize", "destroy"]


def test_closing_aborts_sends_that_are_never_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator that can't be finalized in time is aborted."""
    monkeypatch.setattr(communicator_module, "_FINALIZE_SECONDS", 0.05)
    group = alone()
    fd.allreduce(torch.ones(1), group=group)
    (communicator,) = group.shared.opened
    communicator.refuses_to_finalize = True
    group.close()
    assert communicator.is_aborted
    with pytest.raises(fd.GroupClosedError):
        fd.allreduce(torch.ones(1), group=group)


def test_sub_groups_end_with_their_communicators() -> None:
    """A sub-group's communicator ends when it is closed or dropped, or its group is closed."""

    def program(group: fd.Backend) -> None:
        closed, dropped, left = (fd.new_group([1, 0]) for _ in range(3))
        for sub in (closed, dropped, left):
            assert fd.all_gather(torch.tensor([group.rank]), group=sub).tolist() == [1, 0]
            sub.synchronize()
        group.barrier()
        own = [one for one in group.shared.opened if one.rank == 1 - group.rank]
        closed.close()
        assert own[0].is_destroyed
        del dropped, sub
        while not own[1].is_aborted:  # when the watch, which may be looking at it, has let go too
            gc.collect()
        assert not own[2].is_aborted
        assert not own[2].is_destroyed
        group.close()
        assert own[2].is_destroyed or own[2].is_aborted

    run_ranks(program, 2, backend=fake_groups)


def test_a_forked_child_leaves_nccl_alone() -> None:
    """In a child process a call raises, and closing does not call NCCL."""
    group = alone()
    fd.allreduce(torch.ones(1), group=group)
    (communicator,) = group.shared.opened
    group._executor._handle._process = os.getpid() + 1  # as a child sees it
    with pytest.raises(fd.GroupClosedError, match="forked"):
        fd.allreduce(torch.ones(1), group=group)
    assert group.failure is None, "the parent's group has ended"
    group.close()
    assert communicator.log == ["all_reduce"]
    group._watchdog.close()  # the parent's


def test_a_child_that_closes_a_failed_group_does_not_call_cuda() -> None:
    """The parent's outstanding tensors are not kept for its stream in a child process, where CUDA does not work."""
    group = alone(nccl=FakeNccl(is_lazy=True))
    group._watchdog.watch = lambda executor: None  # it is the parent's
    fd.async_allreduce(torch.ones(1), group=group)
    group._executor._handle._process = os.getpid() + 1  # as a child sees it
    group.abort("the parent's group has failed")
    group.close()
    (communicator,) = group.shared.opened
    assert communicator.log == ["all_reduce"]
    assert streams_of(group).kept == []
    assert not group._executor.needs_polling


def test_a_communicator_dropped_by_a_child_is_left_alone() -> None:
    """Garbage collection aborts a communicator in its own process, and does not call NCCL in a child."""
    for process, is_aborted in ((os.getpid() + 1, False), (os.getpid(), True)):
        (control,) = fd.SimulatedBackend.create_group(1)
        nccl = FakeNccl()
        made = communicator_module.GroupCommunicator(control, lambda nccl=nccl: nccl)
        made._process = process
        made.begin(torch.device("cpu"), CollectiveSignature(operation="x"), Deadline(5.0))
        del made
        gc.collect()
        assert nccl.opened[0].is_aborted is is_aborted
        control.close()


def test_an_aborted_communicator_is_never_ready() -> None:
    """A thread that still waits for it does not call NCCL."""
    (control,) = fd.SimulatedBackend.create_group(1)
    made = communicator_module.GroupCommunicator(control, FakeNccl)
    made.begin(torch.device("cpu"), CollectiveSignature(operation="x"), Deadline(5.0))
    assert made.is_ready()
    made.abort()
    assert not made.is_ready()
    assert made.find_error() is None
    control.close()


def test_a_timeout_counts_from_when_the_gpu_reaches_the_operation() -> None:
    """Time in the stream's queue does not count."""
    before, work = FakeWork("x", (), (), 1.0), FakeWork("x", (), (), 1.0)
    info = OpInfo(what="x", timeout=2.0)
    launched = InFlightOp(info, FakeStreams(), start=FakeEvent([before]), end=FakeEvent([work]), kept=(), caller=0)
    assert not launched.is_overdue(0.0)
    assert not launched.is_overdue(100.0)
    before.is_done = True
    assert not launched.is_overdue(200.0)
    assert not launched.is_overdue(201.9)
    assert launched.is_overdue(202.1)


def test_a_lost_gpu_ends_the_group() -> None:
    """An exception of CUDA does not end the watchdog: the group fails, with the reason."""
    group = alone(nccl=FakeNccl(is_lazy=True))

    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    tensor = torch.ones(1)
    fd.allreduce(tensor, group=group)
    (communicator,) = group.shared.opened
    streams_of(group).has_passed = streams_of(group).keep = communicator.abort = refuse
    fd.async_allreduce(tensor, group=group)

    def go_on() -> None:
        while True:
            fd.barrier(group)

    with pytest.raises((fd.DistributedError, RuntimeError), match="device-side assert"):
        go_on()
    group.close()
    assert not group._executor.needs_polling


def test_the_watchdog_thread_starts_with_work_and_ends() -> None:
    """A watchdog starts its thread with the first operation, calls ``prepare`` in it, and ends it when closed."""
    watchdog = Watchdog("watchdog of a test", lambda: prepared.append(threading.current_thread()))
    prepared: list[threading.Thread] = []
    assert watchdog._thread is None
    watchdog.watch(Mock(poll=lambda _: False, needs_polling=False))
    thread = watchdog._thread
    watchdog.close()
    assert prepared == [thread]
    assert not thread.is_alive()
    group = alone()
    assert group._watchdog._thread is None
    fd.allreduce(torch.ones(1), group=group)
    thread = group._watchdog._thread
    assert thread.is_alive()
    group.close()
    assert not thread.is_alive()


def test_a_watchdog_without_a_thread_starts_it_with_the_next_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may refuse a thread once; deadlines of later operations are watched all the same."""
    watchdog = Watchdog("watchdog of a test")
    polled = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="can't start"):
            watchdog.watch(Mock(poll=lambda _: False, needs_polling=False))
    watchdog.watch(Mock(poll=lambda _: polled.set(), needs_polling=False))
    assert polled.wait(20)
    watchdog.close()


def test_the_watchdog_polls_operations_launched_during_a_poll() -> None:
    """An operation launched after a poll found none, and before the watchdog sleeps, is polled."""
    seen = threading.Event()

    class Busy:
        needs_polling = True
        num_polls = 0

        def poll(self, now: float) -> bool:
            self.num_polls += 1
            if self.num_polls > 1:
                self.needs_polling = False
                seen.set()
            return False

    watch = Watchdog("watch of a test")
    watch.watch(Busy())
    assert seen.wait(20)
    watch.close()


@pytest.mark.parametrize("kind", [fd.HybridBackend, fd.NcclBackend])
def test_both_kinds_of_groups_carry_gpu_tensors(kind: type[fd.Backend]) -> None:
    """Collectives, messages and sub-groups of GPU tensors work in both."""

    def program(group: fd.Backend) -> None:
        assert fd.allreduce(torch.ones(2)).tolist() == [2, 2]
        assert fd.sendrecv(torch.full((1,), group.rank), 1 - group.rank, (1,), 1 - group.rank).item() == 1 - group.rank
        sub = fd.new_group([1, 0])
        assert fd.all_gather(torch.tensor([group.rank]), group=sub).tolist() == [1, 0]
        group.synchronize()
        group.barrier()

    run_ranks(program, 2, backend=partial(fake_groups, kind=kind))
