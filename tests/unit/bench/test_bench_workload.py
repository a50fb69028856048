"""The inputs of ferrodist bench, and that a wrong result is found: all ranks in one process, NumPy as the oracle."""

import math
import threading
import time

import numpy as np
import pytest
import torch
from nccl_fakes import FakeNccl, fake_groups, send_cpu_tensors_to_nccl

import ferrodist
from ferrodist.bench.adapters import ferrodist as ferrodist_adapter
from ferrodist.bench.adapters.base import (
    FileBarrier,
    MemoryCopyAdapter,
    NumpyArrays,
    RankInfo,
    TorchArrays,
    UnsupportedError,
)
from ferrodist.bench.cases import Case, DataType, Operation, Peer
from ferrodist.bench.worker import Workload, max_calls_in_place, open_timer
from ferrodist.testing import run_ranks

MOVING = [
    *(Operation.REDUCE_SCATTER, Operation.ALL_GATHER, Operation.BROADCAST, Operation.ALL_TO_ALL),
    Operation.SEND_RECV,
]


class Recorder:
    """An adapter that records its arrays; the test moves their contents."""

    copies = False

    def __init__(self, rank, num_ranks, arrays):
        self.rank, self.num_ranks, self.arrays = rank, num_ranks, arrays
        self.pairs = []

    def make_call(self, case, source, target):
        self.pairs.append((source, target))
        return len(self.pairs) - 1


def collect(case, arrays):
    adapters = [Recorder(rank, case.num_ranks, arrays) for rank in range(case.num_ranks)]
    return adapters, [Workload(adapter, case) for adapter in adapters]


def perform(case, pairs):
    """The collective on the ranks' (source, target) pairs, in the order of ranks."""
    sources = [source for source, _ in pairs]
    part = case.num_elements // case.num_ranks
    for rank, (_, target) in enumerate(pairs):
        own = slice(rank * part, (rank + 1) * part)
        if case.operation is Operation.BROADCAST:
            target[:] = sources[0]
        elif case.operation is Operation.SEND_RECV:
            if case.partner(rank) is not None:
                target[:] = sources[case.partner(rank)]
        elif case.operation is Operation.REDUCE_SCATTER:
            target[:] = sum(one[own] for one in sources[1:]) + sources[0][own]
        else:
            for other, one in enumerate(sources):
                piece = one if case.operation is Operation.ALL_GATHER else one[own]
                target[other * part : (other + 1) * part] = piece


@pytest.mark.parametrize("arrays", [NumpyArrays(), TorchArrays()], ids=["numpy", "torch"])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("operation", MOVING)
@pytest.mark.parametrize("size_bytes", [8, 150_000])
def test_right_results_pass_and_wrong_ones_do_not(arrays, num_ranks, operation, size_bytes):
    """A result that is right passes; one element changed, a piece moved by one, or the last batch's is found."""
    case = Case(operation=operation, num_ranks=num_ranks, size_bytes=size_bytes)
    adapters, workloads = collect(case, arrays)
    for batch in (1, 2):
        calls = [workload.begin_batch(5, batch) for workload in workloads]
        assert all(len(call) == 5 for call in calls)
        late = any(workload.check(5) for workload in workloads)
        assert late, "nothing has been done yet"
        for pairs in zip(*(adapter.pairs for adapter in adapters), strict=True):
            perform(case, pairs)
        assert [workload.check(5) for workload in workloads] == [None] * num_ranks
    last = adapters[-1].pairs[0][1]
    if len(last) > 2:
        last[1:] = last[:-1] + 0
        assert f"{operation.value}, rank {num_ranks - 1}, array 0: wrong between" in workloads[-1].check(5)
    last[-1] = 0
    assert "wrong" in workloads[-1].check(5)


@pytest.mark.parametrize("dtype", list(DataType))
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6, 32])
def test_sums_in_place_stay_exact(dtype, num_ranks):
    """As many allreduces as a batch may have, on one array: equal to the last bit, and none more would be allowed."""
    case = Case(operation=Operation.ALLREDUCE, num_ranks=num_ranks, dtype=dtype, size_bytes=1 << 18)
    arrays = TorchArrays()
    adapters, workloads = collect(case, arrays)
    num_calls = max_calls_in_place(dtype, num_ranks)
    assert workloads[0].max_calls == num_calls
    for workload in workloads:
        workload.begin_batch(num_calls, 1)
    tensors = [adapter.pairs[0][0] for adapter in adapters]
    for _ in range(num_calls):
        total = sum(tensor.double() for tensor in tensors)
        assert math.isfinite(total.max()), "too large even for the sum"
        for tensor in tensors:
            tensor[:] = total
        assert (tensors[0].double() == total).all(), "the type can't hold the sum"
    assert [workload.check(num_calls) for workload in workloads] == [None] * num_ranks
    tensors[0][7] *= 2
    assert "allreduce, rank 0" in workloads[0].check(num_calls)


def test_small_arrays_take_turns():
    """Calls go round the arrays, each of which lies on cache lines of its own; large tensors have one."""
    for size_bytes, num_arrays in ((64 * 1024, 4), (1 << 20, 1)):
        (adapter, _), _ = collect(
            Case(operation=Operation.ALLREDUCE, num_ranks=2, size_bytes=size_bytes), NumpyArrays()
        )
        assert len(adapter.pairs) == num_arrays
    case = Case(operation=Operation.ALL_GATHER, num_ranks=2, size_bytes=8)
    adapters, workloads = collect(case, NumpyArrays())
    assert list(workloads[0].begin_batch(18, 1)) == [*range(16), 0, 1]
    assert {source.ctypes.data % 64 for source, _ in adapters[0].pairs} == {0}


def test_the_size_is_that_of_the_larger_tensor():
    """It is rounded up to equal parts where ranks have parts."""
    counts = {
        operation: (case.num_elements, case.input_elements, case.output_elements)
        for operation in Operation
        for case in [Case(operation=operation, num_ranks=3, size_bytes=16)]
    }
    assert counts == {
        **dict.fromkeys([Operation.SUBMIT, Operation.OVERLAP, Operation.SEND_RECV], (4, 4, 4)),
        **dict.fromkeys([Operation.INIT, Operation.NEW_GROUP], (0, 0, 0)),
        Operation.ALLREDUCE: (4, 4, 4),
        Operation.BROADCAST: (4, 4, 4),
        Operation.REDUCE_SCATTER: (6, 6, 2),
        Operation.ALL_GATHER: (6, 2, 6),
        Operation.ALL_TO_ALL: (6, 6, 6),
        Operation.BARRIER: (0, 0, 0),
    }


def test_numpy_holds_bfloat16_as_its_bits():
    """The bits are torch's."""
    values = [1.0, 2.5, -3.0, 2.0**-60]
    bits = TorchArrays().from_values(values, DataType.BFLOAT16).view(dtype=torch.uint16).numpy()
    assert np.array_equal(NumpyArrays().from_values(values, DataType.BFLOAT16), bits)


def test_symmetric_arrays_are_in_shared_memory(monkeypatch, tmp_path):
    """They are ordinary tensors, of the type and length that is asked for, which their slices share."""
    (group,) = ferrodist.SimulatedBackend.create_group(1)
    monkeypatch.setattr(ferrodist, "init_process_group", lambda *_, **__: None)
    with ferrodist.use_group(group):
        info = RankInfo(peer=Peer.NATIVE_SYMMETRIC, rank=0, num_ranks=1, folder=tmp_path)
        made = ferrodist_adapter.FerrodistAdapter(info).arrays.empty(6, DataType.BFLOAT16)
    group.close()
    assert (made.shape, made.dtype) == ((6,), torch.bfloat16)
    made[2:4] = 1
    assert made[2] == 1


def test_the_limit_copies(tmp_path):
    """Alone: its barrier lets it pass, every collective is a copy of the whole tensor, and a barrier is not offered."""
    adapter = MemoryCopyAdapter(RankInfo(peer=Peer.LIMIT, rank=0, num_ranks=1, folder=tmp_path))
    workload = Workload(adapter, Case(operation=Operation.REDUCE_SCATTER, num_ranks=1, size_bytes=5000))
    adapter.barrier()
    for call in workload.begin_batch(3, 1):
        call()
    assert workload.check(3) is None
    with pytest.raises(UnsupportedError, match="moves no bytes"):
        open_timer(adapter, Case(operation=Operation.BARRIER, num_ranks=1), FileBarrier(tmp_path / "groups", 0, 1))
    adapter.destroy_group()


class Alone:
    """The first of two ranks, which knows what the other one has; it can be told to be wrong."""

    copies, unsupported, rank, num_ranks = False, {}, 0, 2

    def __init__(self, error=0):
        self.arrays, self.error, self.log = NumpyArrays(), error, []

    def make_call(self, case, source, target):
        def start():
            self.log.append("start")
            source[:] = 2 * source + 2.0**DataType.FLOAT32.start_exponent
            source[-1] += self.error
            return source

        return start

    def wait(self, work):
        self.log.append("wait")

    def synchronize(self):
        self.log.append("finish")

    def barrier(self):
        self.log.append("barrier")

    def destroy_group(self):
        self.log.append("leave")

    def init_group(self, init_method):
        self.log.append(init_method)

    def new_group(self):
        return "group"

    def allreduce(self, array, group):
        array += 2 + self.error
        self.log.append(group)

    def destroy_subgroup(self, group):
        self.log.append("end")


def run_alone(tmp_path, operation, num_calls, *, error=0):
    adapter, barrier = Alone(error), FileBarrier(tmp_path / f"{operation.value}{error}", 0, 1)
    timer = open_timer(adapter, Case(operation=operation, num_ranks=2, size_bytes=8), barrier)
    adapter.log.clear()
    answer = timer.run({"num_calls": num_calls, "batch": 1, "init_method": "tcp://host:1"})
    barrier.close()
    return adapter.log, answer


def test_each_start_is_timed_alone(tmp_path):
    """It ends before the next one starts; a wrong result is found."""
    log, answer = run_alone(tmp_path, Operation.SUBMIT, 3)
    assert log == ["finish", *["barrier"] * 2, *["start", "wait"] * 3, "barrier"]
    assert (answer["begin"], answer["wrong"]) == (0, None)
    assert answer["end"] > 0
    assert "submit, rank 0" in run_alone(tmp_path, Operation.SUBMIT, 3, error=1)[1]["wrong"]


def test_an_overlap_has_three_times(tmp_path):
    """The allreduce alone, the products alone, and both; the ranks meet before each."""
    log, answer = run_alone(tmp_path, Operation.OVERLAP, 2)
    met = ["finish", "barrier", "barrier"]
    assert log == [*met, "start", "wait", *met, *met, "start", "wait", "barrier"]
    assert answer["wrong"] is None
    assert min(answer[name] for name in ("alone", "computing", "together")) > 0
    assert "overlap" in run_alone(tmp_path, Operation.OVERLAP, 2, error=1)[1]["wrong"]


@pytest.mark.parametrize("arrays", [NumpyArrays, TorchArrays])
@pytest.mark.parametrize("wrong", [lambda left, right, out: None, lambda left, right, out: out.__setitem__((3, 4), 9)])
def test_wrong_matrix_products_are_found(monkeypatch, tmp_path, arrays, wrong):
    """A missing or a wrong product fails the check."""

    class Wrong(arrays):
        def __init__(self):
            super().__init__()
            self.multiply = wrong

    monkeypatch.setitem(globals(), "NumpyArrays", arrays)
    assert run_alone(tmp_path, Operation.OVERLAP, 2)[1]["wrong"] is None
    monkeypatch.setitem(globals(), "NumpyArrays", Wrong)
    assert run_alone(tmp_path, Operation.OVERLAP, 2)[1]["wrong"] == "the product of matrices is wrong"


def test_an_overlap_that_cannot_be_checked_is_not_measured(tmp_path):
    """A second sum in place would not be exact."""
    case = Case(operation=Operation.OVERLAP, num_ranks=7, dtype=DataType.BFLOAT16, size_bytes=1 << 18)
    adapter = Alone()
    adapter.num_ranks = 7
    with pytest.raises(UnsupportedError, match="two sums in place of 7 ranks are not exact in bfloat16"):
        open_timer(adapter, case, FileBarrier(tmp_path / "meeting", 0, 1))


def test_group_creation_is_timed_with_its_first_allreduce(tmp_path):
    """The default group is left before, another one ended after; a sum that is wrong is found."""
    log, answer = run_alone(tmp_path, Operation.INIT, 1)
    assert log == ["leave", "tcp://host:1", None, "finish"]
    assert answer["end"] > answer["begin"]
    assert answer["wrong"] is None
    assert run_alone(tmp_path, Operation.NEW_GROUP, 1)[0] == ["group", "finish", "barrier", "end"]
    assert "adds up to" in run_alone(tmp_path, Operation.NEW_GROUP, 1, error=1)[1]["wrong"]


def test_nccl_is_measured_to_the_end_of_its_work(monkeypatch, tmp_path):
    """Results are right, on a fake of NCCL; the clock stops when the GPU is done, not when calls have returned."""
    send_cpu_tensors_to_nccl(monkeypatch)
    waits, clock = [], time.perf_counter_ns
    monkeypatch.setattr(time, "perf_counter_ns", lambda: note("clock") or clock())
    monkeypatch.setattr(ferrodist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(ferrodist_adapter, "load_nccl", FakeNccl)
    monkeypatch.setattr(ferrodist_adapter, "_select_gpu", lambda info: "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: note("wait"))

    def note(what):
        waits.append((threading.current_thread(), what))

    def own_notes():
        return [what for thread, what in list(waits) if thread is threading.current_thread()]

    def on_rank(group):
        adapter = ferrodist_adapter.NcclAdapter(
            RankInfo(peer=Peer.OVER_NCCL, rank=group.rank, num_ranks=2, folder=tmp_path)
        )
        assert adapter.versions["library"] == "a fake of NCCL"
        barrier = FileBarrier(tmp_path / "groups", group.rank, 2)
        for operation in Operation:
            case = Case(operation=operation, num_ranks=2, size_bytes=12)
            if operation is Operation.OVERLAP:
                with pytest.raises(UnsupportedError, match="on a GPU"):
                    open_timer(adapter, case, barrier)
            elif operation is not Operation.INIT:
                timer = open_timer(adapter, case, barrier)
                before = len(own_notes())
                for batch in (1, 2):
                    answer = timer.run({"num_calls": 1, "batch": batch})
                    assert answer["wrong"] is None, operation
                expected = {
                    Operation.SUBMIT: ["wait", "clock", "clock", "wait"],  # the call is timed, and not what it starts
                    Operation.NEW_GROUP: ["clock", "wait", "clock"],
                }
                assert own_notes()[before:] == 2 * expected.get(operation, ["wait", "clock", "wait", "clock"]), (
                    operation
                )
        barrier.close()

    run_ranks(on_rank, 2, backend=fake_groups)


def test_nccl_ranks_need_a_gpu_each_unless_sharing_is_enabled(monkeypatch, tmp_path):
    """Fewer GPUs than ranks are an error that says how ranks share one; where they may, they take turns."""
    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    places = [RankInfo(peer=Peer.OVER_NCCL, rank=rank, num_ranks=3, folder=tmp_path) for rank in range(3)]
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    with pytest.raises(ferrodist.BackendUnavailable, match=r"3 ranks need as many GPUs, and torch sees 2: .*ENABLE=1"):
        ferrodist_adapter._select_gpu(places[0])
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert [ferrodist_adapter._select_gpu(place) for place in places] == ["cuda:0", "cuda:1", "cuda:0"]
    assert taken == [0, 1, 0]
