"""Which engine carries a tensor, and how operations run on engines that put them on a stream.

There is no GPU here: engines for GPUs are recorded fakes.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_streams import SCHEDULES, FakeStreams

import ferrodist as fd
from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.collectives import all_gather, work
from ferrodist.collectives.arguments import check_out, prepare_late_out, prepare_out
from ferrodist.collectives.coalescing import coalesce
from ferrodist.collectives.engines.host import host_engine_of
from ferrodist.collectives.engines.select import device_p2p_of, engine_of
from ferrodist.collectives.work import CollectiveCall, execute, submit
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend

_CUDA = torch.device("cuda", 0)


class FakeWork:
    """A recorded fake of what an engine has put on a stream: the test says when it is done."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.is_done = False
        self.error: fd.DistributedError | None = None

    def done(self) -> bool:
        return self.is_done

    def wait_on_stream(self) -> None:
        self.log.append("wait on stream")


class FakeEngine:
    """A recorded fake of an engine that enqueues; its collectives double what they are given, in a group of one."""

    enqueue = True

    def __init__(self) -> None:
        self.log: list[str] = []
        self.works: list[FakeWork] = []
        self.sequence = 0

    def reserve(self) -> int:
        self.sequence += 1
        return self.sequence

    def run(self, op: CollectiveOp, sequence: int) -> None:
        self.log.append(f"{op.kind} {sequence} in {threading.current_thread().name}")
        torch.mul(op.source, 2, out=op.out)

    def begin_async(self) -> None:
        self.log.append("begin")

    def end_async(self) -> FakeWork:
        self.log.append("end")
        self.works.append(FakeWork(self.log))
        return self.works[-1]


def _call(group: Backend, engine: Any, tensor: torch.Tensor, *, fails: bool = False) -> CollectiveCall[torch.Tensor]:
    def fail(sequence: int) -> None:
        raise ZeroDivisionError

    op = CollectiveOp(kind=CollectiveKind.ALLREDUCE, source=tensor, out=tensor, timeout=1.0)
    return CollectiveCall(op=op, group=group, engine=engine, run=fail if fails else None, finish=lambda: tensor)


@pytest.fixture
def group() -> Backend:
    """A group of one."""
    (only,) = fd.SimulatedBackend.create_group(1)
    yield only
    only.close()


def test_cpu_tensors_use_the_host_engine(group: Backend) -> None:
    """The engine of a tensor on the CPU is the group's host engine."""
    assert engine_of(group, torch.device("cpu")) is host_engine_of(group)
    assert device_p2p_of(group, torch.device("cpu")) is None


def test_groups_without_a_gpu_engine_refuse_gpu_tensors(group: Backend) -> None:
    """The error names the backends with an engine, and the environment variable."""
    for find in (engine_of, device_p2p_of):
        with pytest.raises(fd.UnsupportedOpError, match=r"cuda:0.*'hybrid' or 'nccl'.*tensor.cpu\(\)"):
            find(group, _CUDA)


def test_gpu_tensors_go_by_the_backends_own(group: Backend) -> None:
    """A backend's engine and messages for tensors on GPUs are used for these alone."""
    group.use_engine("cuda", FakeEngine(), object())
    assert engine_of(group, _CUDA) is group.engine("cuda")
    assert device_p2p_of(group, _CUDA) is group.p2p("cuda")
    assert engine_of(group, torch.device("cpu")) is host_engine_of(group)


def test_subgroups_ask_the_outermost_group() -> None:
    """A sub-group has what the group that it was made from gives it."""

    class Owner(fd.SimulatedBackend):
        def equip_subgroup(self, subgroup: Backend) -> None:
            subgroup.use_engine("cuda", f"engine of {subgroup.name}", f"p2p of {subgroup.name}")

    (only,) = Owner.create_group(1)
    sub = fd.SubBackend(only, [0], name="sub")
    assert (sub.engine("cuda"), sub.p2p("cuda")) == ("engine of sub", "p2p of sub")
    only.close()


def test_other_devices_are_refused(group: Backend) -> None:
    """Tensors on the meta device are refused with what to do."""
    with pytest.raises(fd.UnsupportedOpError, match=r"on meta: .*pass tensor.cpu\(\)"):
        fd.allreduce(torch.ones(2, device="meta"), group=group)


def test_tensors_of_a_call_are_on_one_device() -> None:
    """An out on another device than the input is refused; results are made where the input is."""
    elsewhere = SimpleNamespace(device=_CUDA, requires_grad=False)
    with pytest.raises(ValueError, match=r"out is on cpu, the tensor on cuda:0: pass tensors of one device"):
        check_out(torch.ones(2), elsewhere)  # type: ignore[arg-type]
    assert prepare_out(None, (2,), torch.float32, device=torch.device("meta")).flat.device.type == "meta"
    late = prepare_late_out(torch.ones(3), (2,), torch.float32, device=torch.device("meta"))
    assert isinstance(late.refusal, ValueError)
    assert late.flat.device.type == "meta"


def test_enqueued_calls_run_in_the_calling_thread(group: Backend) -> None:
    """At once, between begin and end; each wait orders the stream, and does not wait for the device."""
    engine, tensor = FakeEngine(), torch.ones(2)
    pending = submit(_call(group, engine, tensor))
    assert engine.log == ["begin", f"allreduce 1 in {threading.current_thread().name}", "end"]
    assert not pending.done()
    assert pending.wait() is tensor
    assert pending.wait() is tensor
    assert engine.log[3:] == ["wait on stream"] * 2
    assert not pending.done()
    engine.works[0].is_done = True
    assert pending.done()


def test_enqueued_calls_with_a_timeout(group: Backend) -> None:
    """With a timeout the host waits for the device, and may wait again."""
    engine, tensor = FakeEngine(), torch.ones(2)
    pending = submit(_call(group, engine, tensor))
    with pytest.raises(fd.DistributedTimeoutError, match="still under way"):
        pending.wait(0.01)
    assert "wait on stream" not in engine.log
    engine.works[0].is_done = True
    assert pending.wait(10.0) is tensor


def test_enqueued_calls_that_fail(group: Backend) -> None:
    """Errors before and after the work is on a stream are raised in wait."""
    engine = FakeEngine()
    pending = submit(_call(group, engine, torch.ones(2), fails=True))
    assert engine.log == ["begin", "end"]
    assert pending.done()
    with pytest.raises(ZeroDivisionError):
        pending.wait()
    pending = submit(_call(group, engine, torch.ones(2)))
    engine.works[-1].error = fd.PeerLostError("gone", ranks=(1,))
    assert pending.done()
    with pytest.raises(fd.PeerLostError) as caught:
        pending.wait()
    assert caught.value is not engine.works[-1].error


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_submitted_calls_of_a_blocking_engine(group: Backend, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run in the queue's thread on a stream of its own, after the starter's and before each waiter's."""
    streams = FakeStreams(schedule)
    monkeypatch.setattr(work, "streams_of", lambda _: streams)
    tensor = torch.ones(2)
    streams.put(streams.current(), lambda: tensor.mul_(3), "fill")

    def run(_: int) -> None:
        assert streams.current() is not starting
        streams.put(streams.current(), lambda: tensor.add_(1), "work")

    starting = streams.current()
    pending = submit(
        CollectiveCall(
            op=CollectiveOp(kind=CollectiveKind.ALLREDUCE, source=SimpleNamespace(device=_CUDA), timeout=1.0),
            group=group,
            engine=host_engine_of(group),
            run=run,
            finish=lambda: tensor,
        )
    )
    for waiting in (starting, streams.make(), streams.make()):
        seen = torch.zeros(2)
        with streams.using(waiting):
            found = pending.wait()
            streams.put(waiting, lambda seen=seen: seen.copy_(tensor), "read")
            streams.run_until(streams.record(waiting))
        assert found is tensor
        assert seen.tolist() == [4, 4]


def test_blocking_calls_of_a_stream_engine(group: Backend) -> None:
    """A blocking call is not between begin and end: its engine orders the caller's stream."""
    engine, tensor = FakeEngine(), torch.ones(2)
    assert execute(_call(group, engine, tensor)).tolist() == [2, 2]
    assert engine.log == [f"allreduce 1 in {threading.current_thread().name}"]


def test_fused_results_are_copied_in_stream_order(group: Backend) -> None:
    """Fused results are copied to their tensors after the stream was ordered, at the first wait."""
    engine, one, two = FakeEngine(), torch.ones(2), torch.ones(3)
    with coalesce(group):
        first, second = (submit(_call(group, engine, tensor)) for tensor in (one, two))
    assert sum("allreduce" in line for line in engine.log) == 1
    assert (one.tolist(), two.tolist()) == ([1, 1], [1, 1, 1])
    assert not second.done()
    assert second.wait().tolist() == [2, 2, 2]
    assert engine.log[-1] == "wait on stream"
    assert first.wait().tolist() == [2, 2]


def test_synchronize(group: Backend) -> None:
    """Synchronize calls who has work on GPUs, with the time that is left, and raises the group's failure."""
    waited: list[float] = []
    group.on_synchronize(waited.append)
    group.synchronize(5.0)
    assert 0 < waited[0] <= 5.0
    group.abort("enough")
    with pytest.raises(fd.GroupAbortedError, match="enough"):
        group.synchronize()


def test_ranks_with_tensors_on_different_kinds_of_devices_raise() -> None:
    """Where sizes are shared first, a rank with a tensor on a GPU and one on the CPU raise the same error."""

    class OnGpu(torch.Tensor):
        is_cuda = True

    def on_rank(group: Backend) -> None:
        tensor = torch.ones(2).as_subclass(OnGpu) if group.rank else torch.ones(2)
        with pytest.raises(fd.CollectiveMismatchError, match=r"rank 0 .*on the CPU; rank 1 .*on a GPU"):
            all_gather.share_parts("all_gather_uneven", tensor, 0, group, 10.0)

    run_ranks(on_rank, 2)
