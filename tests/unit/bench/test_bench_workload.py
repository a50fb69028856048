"""The inputs of ferrodist bench, and that a wrong result is found: all ranks in one process, NumPy as the oracle."""

import math

import numpy as np
import pytest
import torch

from ferrodist.bench.adapters.base import NotOfferedError, Place
from ferrodist.bench.adapters.memory_copy import MemoryCopyAdapter
from ferrodist.bench.arrays import NumpyArrays, TorchArrays
from ferrodist.bench.cases import Case, Collective, DataType
from ferrodist.bench.workload import Workload, max_calls_in_place, num_buffers

MOVING = [Collective.REDUCE_SCATTER, Collective.ALL_GATHER, Collective.BROADCAST, Collective.ALL_TO_ALL]


class Recorder:
    """An adapter that keeps the arrays it is given; the test moves what is in them."""

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
        if case.collective is Collective.BROADCAST:
            target[:] = sources[0]
        elif case.collective is Collective.REDUCE_SCATTER:
            target[:] = sum(one[own] for one in sources[1:]) + sources[0][own]
        else:
            for other, one in enumerate(sources):
                piece = one if case.collective is Collective.ALL_GATHER else one[own]
                target[other * part : (other + 1) * part] = piece


@pytest.mark.parametrize("arrays", [NumpyArrays(), TorchArrays()], ids=["numpy", "torch"])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("collective", MOVING)
@pytest.mark.parametrize("size_bytes", [8, 150_000])
def test_right_results_pass_and_wrong_ones_do_not(arrays, num_ranks, collective, size_bytes):
    """A result that is right passes; one element changed, a piece moved by one, or the last batch's is found."""
    case = Case(collective=collective, num_ranks=num_ranks, size_bytes=size_bytes)
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
        assert f"{collective.value}, rank {num_ranks - 1}, array 0: wrong between" in workloads[-1].check(5)
    last[-1] = 0
    assert "wrong" in workloads[-1].check(5)


@pytest.mark.parametrize("dtype", list(DataType))
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6, 32])
def test_sums_in_place_stay_exact(dtype, num_ranks):
    """As many allreduces as a batch may have, on one array: equal to the last bit, and none more would be allowed."""
    case = Case(collective=Collective.ALLREDUCE, num_ranks=num_ranks, dtype=dtype, size_bytes=1 << 18)
    arrays = TorchArrays()
    adapters, workloads = collect(case, arrays)
    num_calls = max_calls_in_place(dtype, num_ranks)
    assert workloads[0].max_calls == num_calls * num_buffers(case.size_bytes) >= 1
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
    assert (num_buffers(0), num_buffers(8), num_buffers(64 * 1024), num_buffers(1 << 30)) == (16, 16, 4, 1)
    case = Case(collective=Collective.ALL_GATHER, num_ranks=2, size_bytes=8)
    adapters, workloads = collect(case, NumpyArrays())
    assert list(workloads[0].begin_batch(18, 1)) == [*range(16), 0, 1]
    assert {source.ctypes.data % 64 for source, _ in adapters[0].pairs} == {0}


def test_sizes_are_of_the_larger_tensor():
    """And rounded up to equal parts where ranks have some."""
    counts = {
        collective: (case.num_elements, case.input_elements, case.output_elements)
        for collective in Collective
        for case in [Case(collective=collective, num_ranks=3, size_bytes=16)]
    }
    assert counts == {
        Collective.ALLREDUCE: (4, 4, 4),
        Collective.BROADCAST: (4, 4, 4),
        Collective.REDUCE_SCATTER: (6, 6, 2),
        Collective.ALL_GATHER: (6, 2, 6),
        Collective.ALL_TO_ALL: (6, 6, 6),
        Collective.BARRIER: (0, 0, 0),
    }


def test_numpy_has_no_bfloat16_but_its_bits():
    """They are torch's."""
    values = [1.0, 2.5, -3.0, 2.0**-60]
    bits = TorchArrays().of(values, DataType.BFLOAT16).view(dtype=torch.uint16).numpy()
    assert np.array_equal(NumpyArrays().of(values, DataType.BFLOAT16), bits)


def test_the_limit_copies(tmp_path):
    """Alone: its barrier lets it pass, every collective is a copy of the whole tensor, and a barrier is not offered."""
    adapter = MemoryCopyAdapter(Place(rank=0, num_ranks=1, folder=tmp_path))
    workload = Workload(adapter, Case(collective=Collective.REDUCE_SCATTER, num_ranks=1, size_bytes=5000))
    adapter.barrier()
    for call in workload.begin_batch(3, 1):
        call()
    assert workload.check(3) is None
    with pytest.raises(NotOfferedError, match="moves no bytes"):
        Workload(adapter, Case(collective=Collective.BARRIER, num_ranks=1))
    adapter.close()
