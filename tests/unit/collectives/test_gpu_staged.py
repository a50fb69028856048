"""Tensors on GPUs over the engine on the host, with a recorded fake of the GPU: see `fake_streams.py`."""

from __future__ import annotations

import contextlib
import gc
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_streams import SCHEDULES, FakeStreams

import ferrodist as fd
from ferrodist.backends import cuda_streams
from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.backends.cuda_streams import CudaStreams
from ferrodist.backends.sequencer import Sequencer
from ferrodist.collectives.arguments import OutputBuffer, compute_shard_sizes
from ferrodist.collectives.engines import gpu_staged, select
from ferrodist.collectives.engines.gpu_staged import HostStagedEngine, HostStagedP2P
from ferrodist.collectives.engines.host import host_engine_of
from ferrodist.collectives.host_p2p import Recv, Send
from ferrodist.collectives.host_staging import CopyPipeline, NotReachedError, Segment, StreamHandoff
from ferrodist.collectives.reduce_op import DTYPES, ReduceOp, check_reduction, premultiplied_sum
from ferrodist.collectives.work import CollectiveCall, submit
from ferrodist.deadline import Deadline
from ferrodist.testing import run_ranks
from ferrodist.testing.conformance.collectives import call_forms, data_movement, reductions
from ferrodist.testing.conformance.collectives.oracle import check_bits, elements
from ferrodist.testing.conformance.harness import public_functions

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend

_SEGMENT = 64  # bytes


class Gpu:
    """A rank's staged collectives and the fake of its GPU: tensors that are filled and read in the caller's stream."""

    def __init__(self, group: Backend, schedule: str = "late", segment_bytes: int = _SEGMENT) -> None:
        self.group = group
        self.streams = FakeStreams(schedule, seed=group.rank)
        self.staged = HostStagedEngine(group, lambda _: self.streams, segment_bytes)

    def put(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor that has these values when the caller's stream has come to this point."""
        tensor = torch.full_like(values, 1)
        self.streams.put(self.streams.current(), lambda: tensor.copy_(values), "fill")
        return tensor

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor has at this point of the caller's stream."""
        seen = torch.empty_like(tensor)
        stream = self.streams.current()
        self.streams.put(stream, lambda: seen.copy_(tensor), "read")
        self.streams.run_until(self.streams.record(stream))
        return seen

    def call(
        self,
        kind: str,
        out: torch.Tensor | None,
        source: torch.Tensor | None = None,
        reduction: Any = None,
        *,
        timeout: float = 30.0,
        **fields: Any,
    ) -> None:
        """Call a collective."""
        call = CollectiveOp(
            kind=CollectiveKind(kind), out=out, source=source, reduction=reduction, timeout=timeout, **fields
        )
        self.staged.run(call, self.staged.reserve())


def _sum_in_place(tensor: torch.Tensor) -> CollectiveOp:
    return CollectiveOp(kind=CollectiveKind.ALLREDUCE, source=tensor, out=tensor, reduction=ReduceOp.SUM, timeout=30.0)


def _every_collective(group: Backend, gpu: Gpu, dtype: torch.dtype, count: int, op: Any) -> None:
    """Compare each collective of some elements with the host's engine's."""
    size, rank, root = group.world_size, group.rank, (count + 1) % group.world_size
    host = host_engine_of(group)
    counts = [count + 3 * other for other in range(size)]
    own = elements(dtype, counts[rank], rank)
    every = elements(dtype, sum(counts), rank, seed=1)
    sent = [count + other + 2 * rank for other in range(size)]
    received = [count + rank + 2 * other for other in range(size)]
    letters = elements(dtype, sum(sent), rank, seed=2)

    def check(name: str, source: torch.Tensor | None, out: int | None, **fields: Any) -> None:
        expected = None if out is None else torch.zeros(out, dtype=dtype)
        input_there = None if source is None else source.clone()
        call = CollectiveOp(kind=CollectiveKind(name), out=expected, source=input_there, timeout=30.0, **fields)
        host.run(call, host.reserve())
        found = None if out is None else gpu.put(torch.zeros(out, dtype=dtype))
        input_here = None if source is None else gpu.put(source)
        gpu.call(name, found, input_here, **fields)
        if expected is not None:
            check_bits(gpu.get(found), expected, f"{name} of {count} {dtype} on rank {rank}", any_nan=True)

    check("all_gather", own, sum(counts), counts=counts, dim=0)
    check("gather", own, sum(counts) if rank == root else None, counts=counts, root=root)
    check("scatter", every if rank == root else None, counts[rank], counts=counts, root=root)
    check("all_to_all", letters, sum(received), counts=sent, recv_counts=received, unit=1)
    whole = elements(dtype, count, rank, seed=3)
    expected = whole.clone()
    host.run(CollectiveOp(kind=CollectiveKind.BROADCAST, out=expected, root=root, timeout=30.0), host.reserve())
    found = gpu.put(whole)
    gpu.call("broadcast", found, root=root)
    check_bits(gpu.get(found), expected, f"broadcast of {count} {dtype}")
    if op is not None:
        check("allreduce", whole, count, reduction=op)
        check("reduce", whole, count if rank == root else None, reduction=op, root=root)
        parts = compute_shard_sizes(count, size)
        check("reduce_scatter", whole, parts[rank], counts=parts, reduction=op, dim=0)


@pytest.mark.parametrize("backend", ["simulated", "native-threads"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_collective_matches_the_host_engine(schedule: str, size: int, backend: str) -> None:
    """Bit for bit, in one segment and in many, for any schedule of the device's copies."""

    def on_rank(group: Backend) -> None:
        gpu = Gpu(group, schedule)
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for count in (0, 1, 17, 70):
                _every_collective(group, gpu, dtype, count, ReduceOp.SUM)
        assert len(gpu.streams.pinned_bytes) <= 6 + 3 * (group.engine("cpu") is not None)
        gpu.group.synchronize()

    run_ranks(on_rank, size, backend=backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_reduction(dtype: torch.dtype) -> None:
    """Every dtype travels, and every reduction that is defined for it folds to the host's bits."""

    def on_rank(group: Backend) -> None:
        gpu = Gpu(group, "random")
        for op in (*ReduceOp, premultiplied_sum((group.rank + 1) / 3)):
            try:
                check_reduction(dtype, op)
            except TypeError:
                continue
            _every_collective(group, gpu, dtype, 20, op)
        _every_collective(group, gpu, dtype, 20, None)

    run_ranks(on_rank, 3)


@pytest.mark.parametrize(
    "check",
    [check for module in (reductions, data_movement, call_forms) for check in public_functions(module)],
    ids=lambda check: check.__name__,
)
def test_conformance(check: Callable[[Backend], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of collectives pass through the staged ones, in segments that cut everything to pieces."""
    made: dict[int, HostStagedEngine] = {}
    making = threading.Lock()

    def staged_of(group: Backend) -> HostStagedEngine:
        with making:
            if id(group) not in made:
                streams = FakeStreams("early")
                made[id(group)] = HostStagedEngine(group, lambda _: streams, 1 << 16)
            return made[id(group)]

    monkeypatch.setattr(select, "host_engine_of", staged_of)
    run_ranks(check, 3, timeout=100.0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_in_place(schedule: str) -> None:
    """An allreduce, reduce and broadcast may write where they read."""

    def on_rank(group: Backend) -> None:
        gpu = Gpu(group, schedule)
        tensor = gpu.put(torch.arange(100.0) + group.rank)
        gpu.call("allreduce", tensor, tensor, ReduceOp.SUM)
        gpu.call("allreduce", tensor, tensor, ReduceOp.SUM)
        assert gpu.get(tensor).tolist() == [4 * i + 2.0 for i in range(100)]
        gpu.call("reduce", tensor if group.rank == 1 else None, tensor, ReduceOp.MAX, root=1)
        assert gpu.get(tensor).tolist() == [4 * i + 2.0 for i in range(100)]

    run_ranks(on_rank, 2, backend="native-threads")


def test_copies_and_work_overlap() -> None:
    """While the host works on a segment the next one is copied, and not the one after that."""
    streams = FakeStreams("late")
    lane = CopyPipeline(streams, 8)
    source, out = torch.arange(6.0), torch.zeros(6)
    seen: list[tuple[int, int]] = []

    def work(near: torch.Tensor, far: torch.Tensor) -> None:
        torch.add(near, 1, out=far)
        copies = [line for line in streams.log if "copy" in line]
        seen.append((sum("stream 1" in line for line in copies), sum("stream 2" in line for line in copies)))

    segments = [
        Segment(
            inputs=[source[i : i + 1]], in_count=1, out_count=1, work=work, outputs=[out[i : i + 1]], in_place=False
        )
        for i in range(6)
    ]
    lane.run(segments, torch.float32, Deadline(10.0))
    assert seen == [(2, 0), (3, 1), (4, 2), (5, 3), (6, 4), (6, 5)]  # started down, and up
    assert streams.log[-3:-1] == ["default: order"] * 2 or streams.log[-2:] == ["default: order"] * 2
    assert len(streams.pinned_bytes) == 6


@pytest.mark.parametrize("pinning", [(True, True), (False, False), (False, True)], ids=["all", "none", "one"])
def test_slots_in_symmetric_memory(pinning: tuple[bool, bool]) -> None:
    """Where ranks share memory, large operations go through it, if the device takes it; it is given back at the end."""
    every: list[FakeStreams] = []

    def on_rank(group: Backend) -> None:
        gpu = Gpu(group, "random")
        every.append(gpu.streams)
        gpu.streams.can_pin = can_pin = pinning[group.rank]
        for _ in range(3):
            tensor = gpu.put(torch.arange(100.0) + group.rank)
            gpu.call("allreduce", tensor, tensor, ReduceOp.SUM)
            assert gpu.get(tensor).tolist() == [2 * i + 1.0 for i in range(100)]
        assert len(gpu.streams.pins) == 1
        assert len(gpu.streams.pinned_bytes) == (0 if can_pin else 3)

    run_ranks(on_rank, 2, backend="native-threads")
    gc.collect()
    assert all((streams.pins == []) == streams.can_pin for streams in every)


def test_memory_is_not_reused_before_copies_end() -> None:
    """Memory is not reused before its copies are done, though nobody waits for the collective."""

    def on_rank(group: Backend) -> None:
        gpu = Gpu(group)
        source, out = gpu.put(torch.ones(40)), gpu.put(torch.zeros(40))
        gpu.call("allreduce", out, source, ReduceOp.SUM)
        assert (source.data_ptr(), "stream 1") in gpu.streams.kept
        assert (out.data_ptr(), "stream 2") in gpu.streams.kept

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("counts", [(40, 41), (1, 40)], ids=["large", "large and small"])
@pytest.mark.parametrize("backend", ["simulated", "native-threads"])
def test_mismatched_counts(backend: str, counts: tuple[int, int]) -> None:
    """The error of ranks with different counts names the collective, not a segment."""

    def on_rank(group: Backend) -> str:
        gpu = Gpu(group)
        tensor = gpu.put(torch.ones(counts[group.rank]))
        with pytest.raises(fd.CollectiveMismatchError) as caught:
            gpu.call("allreduce", tensor, tensor, ReduceOp.SUM)
        assert group.failure is not None
        return str(caught.value)

    first, second = run_ranks(on_rank, 2, backend=backend)
    assert first == second
    assert "allreduce(sum, float32[41])" in first or "allreduce on GPUs" in first


_CALLS: dict[str, Callable[[Gpu, torch.Tensor], None]] = {
    "dtype": lambda gpu, tensor: gpu.call("allreduce", tensor.double(), tensor.double(), ReduceOp.SUM),
    "op": lambda gpu, tensor: gpu.call("allreduce", tensor, tensor, ReduceOp.MAX),
    "operation": lambda gpu, tensor: gpu.call("broadcast", tensor, root=0),
    "host": lambda gpu, tensor: fd.allreduce(tensor, group=gpu.group),
}


@pytest.mark.parametrize("what", _CALLS)
@pytest.mark.parametrize("backend", ["simulated", "native-threads"])
def test_mismatched_calls(backend: str, what: str) -> None:
    """Ranks that call different things raise a mismatch, also where one calls with a tensor on the host."""

    def on_rank(group: Backend) -> str:
        gpu = Gpu(group)
        tensor = gpu.put(torch.ones(100))
        with pytest.raises(fd.CollectiveMismatchError) as caught:
            (_CALLS[what] if group.rank else _plain)(gpu, tensor)
        return str(caught.value)

    first, second = run_ranks(on_rank, 2, backend=backend)
    assert first == second


def _plain(gpu: Gpu, tensor: torch.Tensor) -> None:
    gpu.call("allreduce", tensor, tensor, ReduceOp.SUM)


def test_uneven_exchanges_that_do_not_fit() -> None:
    """An all_to_all whose counts differ between two ranks raises on both, however many segments there are."""

    def on_rank(group: Backend) -> None:
        gpu = Gpu(group)
        sent, received = [30, 30 + group.rank], [30 + (group.rank and 9), 30 + group.rank]
        source, out = gpu.put(torch.ones(sum(sent))), gpu.put(torch.zeros(sum(received)))
        with pytest.raises(fd.DistributedError):
            gpu.call("all_to_all", out, source, counts=sent, recv_counts=received, unit=1, timeout=10.0)

    run_ranks(on_rank, 2)


def test_a_straggler_is_named() -> None:
    """The error names a rank that does not call."""

    def on_rank(group: Backend) -> None:
        if group.rank == 0:
            gpu = Gpu(group)
            tensor = gpu.put(torch.ones(100))
            with pytest.raises(fd.DistributedTimeoutError) as caught:
                gpu.call("allreduce", tensor, tensor, ReduceOp.SUM, timeout=0.2)
            assert caught.value.ranks == (1,)
            assert group.failure is not None

    run_ranks(on_rank, 2)


def test_a_busy_device_is_an_error() -> None:
    """A device that does not come to the input within the timeout ends the call, and the group on all ranks."""

    def on_rank(group: Backend) -> None:
        gpu = Gpu(group)
        tensor = gpu.put(torch.ones(3))
        gpu.streams.is_stuck = group.rank == 1
        with pytest.raises(fd.DistributedTimeoutError) as caught:
            gpu.call("allreduce", tensor, tensor, ReduceOp.SUM, timeout=0.3 if group.rank else 30.0)
        assert caught.value.ranks == (1,)
        assert "the GPU is still busy" in str(caught.value)

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("backend", ["simulated", "native-threads", "tcp-threads"])
def test_an_abort_ends_a_wait_in_a_segment(backend: str) -> None:
    """A wait in the middle of a large collective ends with the group, also in a sub-group."""

    def on_rank(world: Backend) -> None:
        for group in (fd.SubBackend(world, [1, 0]), world):
            gpu = Gpu(group)
            tensor = gpu.put(torch.ones(100))
            gpu.call("allreduce", tensor, tensor, ReduceOp.SUM)
            if group.rank:
                gpu.streams.put(gpu.streams.current(), lambda group=group: group.abort("enough"), "abort")
            with pytest.raises(fd.GroupAbortedError, match="enough"):
                gpu.call("allreduce", tensor, tensor, ReduceOp.SUM, timeout=3600.0)

    run_ranks(on_rank, 2, backend=backend)


@pytest.mark.parametrize("count", [3, 100], ids=["one segment", "many"])
def test_an_abort_ends_a_wait_for_the_device(count: int) -> None:
    """A wait for a busy device ends with the group, however long its timeout."""

    def on_rank(group: Backend) -> None:
        gpu = Gpu(group)
        tensor = gpu.put(torch.ones(count))
        if group.rank == 0:
            group.barrier()
            group.abort("enough")
            return
        gpu.streams.is_stuck = True
        messages = HostStagedP2P(group, lambda _: gpu.streams)
        group.barrier()
        for call in (
            lambda: gpu.call("broadcast", tensor, root=1, timeout=3600.0),
            lambda: messages.exchange([Send(tensor, 0)], timeout=3600.0),
        ):
            with pytest.raises(fd.GroupAbortedError, match="enough"):
                call()

    run_ranks(on_rank, 2)


def test_a_device_that_fails_ends_the_group() -> None:
    """What the device raises on one rank is raised there, and ends the group on the others."""

    def on_rank(group: Backend) -> None:
        gpu = Gpu(group)
        tensor = gpu.put(torch.ones(100))
        if group.rank == 1:
            gpu.streams.put(gpu.streams.current(), lambda: 1 // 0, "fault")
        with pytest.raises(fd.GroupAbortedError if group.rank == 0 else ZeroDivisionError):
            gpu.call("allreduce", tensor, tensor, ReduceOp.SUM, timeout=3600.0)

    run_ranks(on_rank, 2)


def test_synchronize_waits_for_the_device() -> None:
    """Synchronize returns when the last copies are done, and says so when they are not in time."""

    def on_rank(group: Backend) -> None:
        gpu = Gpu(group)
        tensor = gpu.put(torch.ones(3))
        gpu.call("allreduce", tensor, tensor, ReduceOp.SUM)
        gpu.streams.is_stuck = True
        with pytest.raises(fd.DistributedTimeoutError, match=r"call synchronize\(\) again"):
            group.synchronize(0.01)
        gpu.streams.is_stuck = False
        group.synchronize()
        assert tensor.tolist() == [2, 2, 2]
        place = gpu.staged.reserve()  # of an operation that has not begun
        with pytest.raises(fd.DistributedTimeoutError):
            group.synchronize(0.01)
        gpu.staged.run(_sum_in_place(tensor), place)
        group.synchronize()
        assert tensor.tolist() == [4, 4, 4]

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("is_stuck", [False, True])
def test_closing_keeps_memory_in_use(is_stuck: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that is closed waits for the copies; those of a device that does not come to them keep their memory."""
    monkeypatch.setattr(gpu_staged, "_CLOSE_SECONDS", 0.01 if is_stuck else 30.0)
    (group,) = fd.SimulatedBackend.create_group(1)
    gpu = Gpu(group)
    tensor = gpu.put(torch.ones(100))
    gpu.call("allreduce", tensor, tensor, ReduceOp.SUM)
    (lane,) = gpu.staged._pipelines.values()
    gpu.streams.is_stuck = is_stuck
    group.close()
    assert bool(gpu.staged._pipelines) == is_stuck
    assert all(stream.num_done == len(stream.work) for stream in (lane._to_host, lane._to_device)) != is_stuck


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stream_handoff(schedule: str) -> None:
    """Work of another thread is ordered after the thread that starts it, and before threads that wait for it."""
    streams = FakeStreams(schedule)
    tensor, seen = torch.zeros(3), torch.zeros(3)
    streams.put(streams.current(), lambda: tensor.fill_(2), "fill")
    handoff = StreamHandoff(streams)

    def work() -> None:
        with handoff.running():
            streams.put(streams.current(), lambda: tensor.mul_(5), "work")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    handoff.wait_on_stream()
    streams.put(streams.current(), lambda: seen.copy_(tensor), "read")
    streams.run_until(streams.record(streams.current()))
    assert seen.tolist() == [10, 10, 10]


@pytest.mark.parametrize("backend", ["simulated", "native-threads"])
def test_submitted_collectives_run_in_order(backend: str) -> None:
    """Collectives that were submitted, and one called after them, run in one order on all ranks."""

    def on_rank(group: Backend) -> None:
        gpu = Gpu(group, "random")
        tensors = [gpu.put(torch.full((50,), 10.0 * i + group.rank)) for i in range(6)]

        def prepare(tensor: torch.Tensor) -> CollectiveCall[torch.Tensor]:
            def run(sequence: int) -> None:
                with handoff.running():
                    gpu.staged.run(_sum_in_place(tensor), sequence)

            def finish() -> torch.Tensor:
                handoff.wait_on_stream()
                return tensor

            handoff = StreamHandoff(gpu.streams)
            op = CollectiveOp(kind=CollectiveKind.BARRIER, timeout=30.0)  # without tensors, for which run stands in
            return CollectiveCall(op=op, group=group, engine=gpu.staged, run=run, finish=finish)

        pending = [submit(prepare(tensor)) for tensor in tensors[:5]]
        gpu.call("allreduce", tensors[5], tensors[5], ReduceOp.SUM)
        for i, tensor in enumerate([*(one.wait() for one in pending), tensors[5]]):
            assert gpu.get(tensor).tolist() == [20.0 * i + 1] * 50
        group.synchronize()

    run_ranks(on_rank, 2, backend=backend)


def test_timeouts_count_from_the_turn() -> None:
    """An operation that was started waits for those before it, before its time begins; and not when the group fails."""
    both_have_looked = threading.Barrier(2)

    def on_rank(group: Backend) -> None:
        gpu = Gpu(group)
        first, second, third = (gpu.staged.reserve() for _ in range(3))
        waiting = [threading.Thread(target=gpu.staged.await_turn, args=(place,)) for place in (second, third)]
        for thread in waiting:
            thread.start()
            thread.join(0.05)
        assert all(thread.is_alive() for thread in waiting)
        tensor = gpu.put(torch.ones(2))
        gpu.staged.run(_sum_in_place(tensor), first)
        waiting[0].join()
        assert waiting[1].is_alive()
        both_have_looked.wait(30.0)
        group.abort("enough")
        waiting[1].join()

    run_ranks(on_rank, 2)


def test_point_to_point() -> None:
    """Tensors of any strides are sent in the order of the callers' streams."""

    def on_rank(group: Backend) -> None:
        gpu = Gpu(group)
        messages = HostStagedP2P(group, lambda _: gpu.streams)
        other = 1 - group.rank
        source = gpu.put(torch.arange(6.0).view(2, 3) + group.rank)
        out, nothing = gpu.put(torch.zeros(3, 2)).t(), torch.empty(0)
        peers = messages.exchange(
            [Send(source, other), Recv(out, other), Send(nothing, other, 1), Recv(nothing, fd.ANY_SOURCE, 1)],
            timeout=30.0,
        )
        assert peers == [other] * 4
        assert gpu.get(out).tolist() == (torch.arange(6.0).view(2, 3) + other).tolist()

    run_ranks(on_rank, 2)


def test_sends_from_a_busy_device() -> None:
    """A device that does not reach the tensor in time is an error of this rank alone."""

    def on_rank(group: Backend) -> None:
        gpu = Gpu(group)
        gpu.streams.is_stuck = True
        tensor = gpu.put(torch.ones(2))
        with pytest.raises(fd.DistributedTimeoutError, match="The group is still good"):
            HostStagedP2P(group, lambda _: gpu.streams).exchange([Send(tensor, 1 - group.rank)], timeout=0.01)
        assert fd.allreduce(torch.ones(1)).item() == 2

    run_ranks(on_rank, 2)


def test_receives_on_a_busy_device() -> None:
    """A receive does not wait for the device, and is ordered in its stream."""

    def on_rank(group: Backend) -> None:
        gpu = Gpu(group)
        tensor = gpu.put(torch.zeros(2))
        if group.rank == 0:
            fd.send(torch.full((2,), 7.0), 1)
            return
        gpu.streams.is_stuck = True
        HostStagedP2P(group, lambda _: gpu.streams).exchange([Recv(tensor, 0)], timeout=30.0)
        gpu.streams.is_stuck = False
        assert gpu.get(tensor).tolist() == [7, 7]

    run_ranks(on_rank, 2)


def test_receives_into_inference_tensors() -> None:
    """Inference tensors can be received into, where torch itself would refuse a write."""

    def on_rank(group: Backend) -> None:
        gpu = Gpu(group)
        with torch.inference_mode():
            tensor = torch.zeros(2)
        if group.rank == 0:
            fd.send(torch.full((2,), 7.0), 1)
            return
        HostStagedP2P(group, lambda _: gpu.streams).exchange([Recv(tensor, 0)], timeout=30.0)
        assert gpu.get(tensor).tolist() == [7, 7]

    run_ranks(on_rank, 2)


def test_pipelines_fail_in_order() -> None:
    """When the work of a segment fails, earlier copies are still ordered before the caller's stream."""
    streams = FakeStreams("late")
    lane = CopyPipeline(streams, 8)

    def work(near: torch.Tensor, far: torch.Tensor) -> None:
        raise KeyError

    segment = Segment(
        inputs=[torch.ones(1)], in_count=1, out_count=0, work=work, outputs=[torch.ones(1)], in_place=True
    )
    with pytest.raises(KeyError):
        lane.run([segment] * 3, torch.float32, Deadline(1.0))
    lane.synchronize(Deadline(10.0))  # after it nothing touches the memory any more
    assert all(stream.num_done == len(stream.work) for stream in (lane._to_host, lane._to_device))
    streams.run_until(streams.record(streams.current()))
    assert all(stream.num_done == len(stream.work) for stream in streams.streams)
    streams.is_stuck = True
    lane.run([], torch.float32, Deadline(1.0))
    with pytest.raises(NotReachedError):
        lane.synchronize(Deadline(0.0))


@pytest.mark.parametrize("call", [fd.allreduce, fd.send], ids=["collective", "message"])
def test_the_variable_allows_the_fallback(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the error names it; only 1 turns it on; it is read at each call."""
    (group,) = fd.SimulatedBackend.create_group(1)
    find = select.engine_of if call is fd.allreduce else select.device_p2p_of
    cuda = torch.device("cuda", 0)
    for value in (None, "0", "true"):
        if value is None:
            monkeypatch.delenv(select.FALLBACK_VARIABLE, raising=False)
        else:
            monkeypatch.setenv(select.FALLBACK_VARIABLE, value)
        with pytest.raises(fd.UnsupportedOpError, match=r"FERRODIST_ENABLE_GPU_FALLBACK=1.*tensor.cpu\(\)"):
            find(group, cuda)
    monkeypatch.setenv(select.FALLBACK_VARIABLE, "1")
    found = find(group, cuda)
    assert isinstance(found, HostStagedEngine if call is fd.allreduce else HostStagedP2P)
    if call is fd.allreduce:
        assert find(group, cuda) is found
    monkeypatch.setattr(select, "is_capturing", lambda: True)
    with pytest.raises(fd.UnsupportedOpError, match="CUDA graph"):
        find(group, cuda)
    group.close()


def test_memory_that_the_driver_refuses_to_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where registering fails, the error that it leaves in the driver is not the next launch's."""
    answers, dropped = [1, 0], []
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: answers.pop(0))
    monkeypatch.setattr(cuda_streams, "_runtime", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(CudaStreams, "_drop_error", lambda self: dropped.append(id(self)))
    streams = CudaStreams(torch.device("cuda", 0))
    assert not streams.pin(torch.empty(8, dtype=torch.uint8))
    assert dropped == [id(streams)]
    assert streams.pin(torch.empty(8, dtype=torch.uint8))
    assert dropped == [id(streams)]


class _OnGpu(torch.Tensor):
    is_cuda = True


def test_memory_of_a_result_that_is_copied_on_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made in the stream of who started the operation, and is read in that of who waits."""
    streams = FakeStreams()
    monkeypatch.setattr(cuda_streams, "streams_of", lambda _: streams)
    flat = torch.arange(6.0).as_subclass(_OnGpu)
    out = torch.zeros(3, 2).t()
    with streams.using(streams.make("waiting")):
        OutputBuffer(flat=flat, result=out, parts=(out,)).finish()
    assert out.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert streams.kept == [(flat.data_ptr(), "waiting")]


def test_a_sequence_number_released_early() -> None:
    """Releasing a later sequence number does not disturb earlier ones."""
    sequencer, numbers = Sequencer(lambda: False), iter((1, 3))
    first, second = (sequencer.reserve(lambda: next(numbers)) for _ in range(2))
    assert not sequencer.wait(second, 0.0)
    with sequencer.releasing(second):
        pass
    assert sequencer.wait(first, 0.0)
    assert not sequencer.wait_until_idle(0.0)
    with sequencer.releasing(first):
        pass
    assert sequencer.wait_until_idle(0.0)


def test_positions_are_reserved_atomically() -> None:
    """Nothing comes between reserving a position and its sequence number."""
    sequencer = Sequencer(lambda: False)
    other = threading.Thread(target=sequencer.reserve, args=(lambda: 2,))

    def reserve() -> int:
        other.start()
        other.join(0.05)
        return 1

    sequencer.reserve(reserve)
    other.join()
    assert sequencer.wait(1, 0.0)
