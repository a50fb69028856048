"""The native engine beyond what the conformance suites say of every backend."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrodist as fd
from ferrodist.backends.native import backend as native_backend
from ferrodist.backends.native import is_native_available
from ferrodist.backends.native.binding import dtype_number, load
from ferrodist.collectives.reduce_op import DTYPES, ReduceOp, fold
from ferrodist.testing import run_ranks
from ferrodist.testing.conformance.collectives.oracle import check_bits, defined_reductions, elements

pytestmark = pytest.mark.skipif(
    not is_native_available(), reason="this installation was built without the native engine"
)

_SMALL_FLOATS = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def _engine_fold(op, inputs, factors, instructions):
    out = torch.empty_like(inputs[0])
    addresses = [tensor.data_ptr() for tensor in inputs]
    number = dtype_number(out)
    if op is ReduceOp.MEAN:
        factors = [float(len(inputs))]
    assert load().fold(out.data_ptr(), addresses, out.numel(), number, op.number, factors, instructions)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_inputs", [1, 2, 3, 5])
def test_kernels_fold_as_the_reference(dtype, num_inputs):
    """Every instruction set of this processor gives the bits of [Note: fold], for every defined reduction."""
    inputs = [elements(dtype, 2055, rank) for rank in range(num_inputs)]
    for instructions in range(load().best_instruction_set() + 1):
        for op in defined_reductions(dtype):
            factors = [0.5 + rank / 3 for rank in range(num_inputs)]
            what = f"{op} with instruction set {instructions}"
            check_bits(_engine_fold(op, inputs, factors, instructions), fold(op, inputs, factors), what, any_nan=True)


@pytest.mark.parametrize("dtype", _SMALL_FLOATS, ids=str)
def test_every_rounding_of_a_small_float(dtype):
    """A sum of any two values of a small float rounds as torch does: all pairs of 8 bits, and 2**22 pairs of 16."""
    if dtype.itemsize == 1:
        codes = torch.arange(256, dtype=torch.uint8)
        a, b = torch.meshgrid(codes, codes, indexing="ij")
        pairs = [part.reshape(-1).contiguous().view(dtype) for part in (a, b)]
    else:
        codes = torch.arange(65536, dtype=torch.int32).to(torch.int16)
        pairs = [
            codes.repeat(64).view(dtype),
            torch.cat([codes.roll(shift * 1025) for shift in range(64)]).view(dtype),
        ]
    for op in (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PRODUCT):
        expected = fold(op, pairs)
        for instructions in range(load().best_instruction_set() + 1):
            result = _engine_fold(op, pairs, [], instructions)
            check_bits(result, expected, f"{op} with instruction set {instructions}", any_nan=True)


_calls = st.tuples(
    st.sampled_from(DTYPES),
    st.integers(0, 8),
    st.sampled_from([0, 1, 2, 3, 13, 26, 27, 104, 105, 1000, 4096, 4097, 16385, 70001, 140001]),
    st.integers(0, 2**16),
)


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 5), st.lists(_calls, min_size=3, max_size=5))
def test_the_same_bits_on_every_backend(world_size, calls):
    """Allreduce and reduce_scatter give the same bits in process, over TCP and in shared memory."""

    def program(group):
        results = []
        for dtype, choice, count, seed in calls:
            ops = defined_reductions(dtype)
            op = ops[choice % len(ops)]
            tensor = elements(dtype, count, group.rank, seed)
            results.append((op, fd.allreduce(tensor, op), fd.reduce_scatter(tensor, op)))
        return results

    torch.set_num_threads(1)
    expected = run_ranks(program, world_size, backend="simulated")
    for backend in ("native-threads", "gloo-threads", "tcp-threads"):
        for rank, results in enumerate(run_ranks(program, world_size, backend=backend)):
            for (op, *actual), (_, *wanted) in zip(results, expected[rank], strict=True):
                for one, other in zip(actual, wanted, strict=True):
                    check_bits(one, other, f"{op} of {one.dtype} on {backend}", any_nan=True)


# Short ways.


def test_the_fast_and_the_slow_path_meet():
    """One rank's call may take the fast path while another's takes the slow one, started ones in between."""

    def program(group):
        odd = group.rank % 2 == 1
        for size in (3, 5000, 300_000):
            base = torch.arange(2.0 * size)
            tensor = base[::2] if odd else base[::2].contiguous()
            expected = base[::2] * 2
            assert torch.equal(fd.allreduce(tensor), expected)
            pending = [fd.async_allreduce(tensor, timeout=30.0 if odd else None) for _ in range(3)]
            assert torch.equal(fd.allreduce(tensor, timeout=30.0 if odd else None), expected)
            assert all(torch.equal(each.wait(), expected) for each in pending)
            assert torch.equal(fd.all_gather(tensor), torch.cat([base[::2]] * 2))

    run_ranks(program, 2, backend="native-threads")


def test_the_fast_path_counts_as_a_write():
    """Autograd refuses a backward through values that an in-place collective has overwritten."""

    def program(group):
        for write in (
            lambda x: fd.allreduce(x, out=x),
            lambda x: fd.broadcast(x, out=x),
            lambda x: fd.async_allreduce(x, out=x).wait(),
        ):
            weight = torch.ones(3, requires_grad=True)
            saved = torch.ones(3)
            loss = (weight * saved).sum()
            write(saved)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    run_ranks(program, 2, backend="native-threads")


def test_calls_that_the_fast_path_does_not_take():
    """Gradients, lazily negated and conjugated tensors, other layouts and wrong arguments take the slow path."""

    def program(group):
        x = torch.ones(2, requires_grad=True)
        fd.allreduce(x).sum().backward()
        assert torch.equal(x.grad, torch.full((2,), 2.0))
        z = torch.tensor([1 + 2j])
        assert torch.equal(fd.allreduce(z.conj()), torch.tensor([2 - 4j]))
        negated = z.conj().imag
        assert negated.is_neg()
        assert torch.equal(fd.allreduce(negated), torch.tensor([-4.0]))
        contiguous = z.repeat(8).conj().imag.as_strided((8,), (1,))
        assert contiguous.is_neg()
        assert contiguous.is_contiguous()
        assert torch.equal(fd.allreduce(contiguous), 2 * contiguous)
        assert torch.equal(fd.async_allreduce(torch.ones(8), out=contiguous).wait(), torch.full((8,), 2.0))
        with torch.inference_mode():
            inferred = torch.ones(2)
            assert torch.equal(fd.allreduce(inferred, out=inferred), torch.full((2,), 2.0))
        with pytest.raises(TypeError):
            fd.allreduce(torch.ones(2), "sum")
        with pytest.raises(TypeError):
            fd.allreduce([1.0])
        for call in (fd.allreduce, fd.broadcast, fd.all_gather, fd.reduce_scatter, fd.async_allreduce):
            with pytest.raises(TypeError, match="not NoneType"):
                call(None, out=torch.ones(2))
        with pytest.raises(ValueError, match="shape"):
            fd.allreduce(torch.ones(2), out=torch.ones(3))
        t = torch.ones(1)
        with pytest.raises(fd.InvalidRankError):
            fd.broadcast(t, 7, out=t)
        with fd.coalesce(), pytest.raises(RuntimeError, match="coalesce"):
            fd.allreduce(torch.ones(1))
        fd.barrier()

    run_ranks(program, 2, backend="native-threads")


def test_started_collectives_keep_their_tensors():
    """The engine never writes into the memory of a dropped handle, or of dropped tensors."""

    def program(group):
        for _ in range(20):
            fd.async_allreduce(torch.ones(200_000))
            gc.collect()
        x = torch.ones(4)
        assert torch.equal(fd.allreduce(x), torch.full((4,), float(group.world_size)))

    run_ranks(program, 3, backend="native-threads")


def test_many_threads_in_many_groups():
    """Several threads of each rank use sub-groups of their own at the same time, and one group together."""

    def program(group):
        groups = [fd.new_group(group=group) for _ in range(4)]
        failures = []

        def use(own):
            try:
                for i in range(30):
                    x = torch.full((1 + 997 * i,), float(i))
                    assert torch.equal(fd.allreduce(x, group=own), x * group.world_size)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=use, args=(own,)) for own in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures

    run_ranks(program, 3, backend="native-threads")


# Symmetric memory.


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_symmetric_tensors_give_the_same(world_size):
    """Every collective on symmetric tensors gives what it gives on ordinary ones, whole, in part and in place."""

    def program(group):
        p, rank = group.world_size, group.rank
        for count in (p * 5, p * 30_000):
            ordinary = elements(torch.float32, count, rank)
            shared = fd.empty_symmetric((count + 64,))[16 : 16 + count]
            shared.copy_(ordinary)
            out = fd.empty_symmetric((count,))
            check_bits(fd.allreduce(shared, out=out), fd.allreduce(ordinary), "allreduce", any_nan=True)
            check_bits(fd.reduce_scatter(shared), fd.reduce_scatter(ordinary), "reduce_scatter", any_nan=True)
            check_bits(fd.all_gather(shared), fd.all_gather(ordinary), "all_gather")
            check_bits(fd.all_to_all(shared), fd.all_to_all(ordinary), "all_to_all")
            sizes = [count // p + (1 if r == 0 else 0) for r in range(p)]
            part = shared[: sizes[rank]]
            check_bits(fd.all_gather_uneven(part), fd.all_gather_uneven(part.clone()), "all_gather_uneven")
            check_bits(fd.gather(shared), fd.gather(ordinary), "gather")
            expected = fd.broadcast(ordinary, p - 1)
            check_bits(fd.broadcast(shared.clone(), p - 1), expected, "broadcast of a copy")
            check_bits(fd.reduce(shared), fd.reduce(ordinary), "reduce", any_nan=True)
            expected = fd.allreduce(ordinary, ReduceOp.MEAN)
            check_bits(fd.allreduce(shared, ReduceOp.MEAN, out=shared), expected, "in place", any_nan=True)
            shared.copy_(ordinary)
            expected = fd.broadcast(ordinary, p - 1)
            check_bits(fd.broadcast(shared, p - 1, out=shared), expected, "broadcast in place")

    run_ranks(program, world_size, backend="native-threads")


def test_some_ranks_with_symmetric_tensors():
    """Ranks that pass symmetric tensors meet ranks that don't, or that pass other parts of them."""

    def program(group):
        count = 50_000
        shared = fd.empty_symmetric((2 * count,))
        for turn in range(9):
            start = count if (turn // 3 + group.rank) % 3 == 0 else 0
            x = shared[start : start + count] if (turn + group.rank) % 3 else torch.empty(count)
            x.fill_(float(group.rank + turn))
            total = float(sum(rank + turn for rank in range(3)))
            assert torch.equal(fd.reduce_scatter(x.clone()), fd.reduce_scatter(x))
            assert float(fd.all_gather(x).sum()) == total * count
            assert torch.equal(fd.allreduce(x, out=x), torch.full((count,), total))

    run_ranks(program, 3, backend="native-threads")


def _num_mappings() -> int:
    return sum("ferrodist-symmetric" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_symmetric_memory_outlives_its_group_and_is_freed():
    """A tensor is good after its group has been closed; when the last one goes, so do memory and descriptors."""
    gc.collect()  # of groups of earlier tests
    before = _num_mappings(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    def program(group):
        tensor = fd.empty_symmetric((1000,), torch.int64)
        tensor.fill_(group.rank)
        part = tensor[10:20]
        del tensor
        return part

    parts = run_ranks(program, 2, backend="native-threads")
    assert [int(part.sum()) for part in parts] == [0, 10]
    assert _num_mappings() == before[0] + 2
    del parts
    gc.collect()
    assert (_num_mappings(), len(os.listdir("/proc/self/fd"))) == before  # noqa: PTH208


def test_symmetric_shapes_are_compared():
    """Ranks that ask for different shapes get an error on all ranks; a wrong argument one at home."""

    def program(group):
        with pytest.raises(ValueError, match=r"shape\[0\] must be at least 0"):
            fd.empty_symmetric((-1,))
        with pytest.raises(TypeError):
            fd.empty_symmetric((1,), torch.uint16)
        assert fd.empty_symmetric((0, 3)).shape == (0, 3)
        assert fd.empty_symmetric(()).shape == ()
        with pytest.raises(fd.CollectiveMismatchError, match="empty_symmetric"):
            fd.empty_symmetric((1 + group.rank,))

    run_ranks(program, 2, backend="native-threads")


def test_symmetric_is_ordinary_elsewhere():
    """Backends without shared memory give ordinary tensors."""
    assert run_ranks(lambda group: fd.empty_symmetric((2, 3), torch.int8).shape, 2) == [(2, 3)] * 2


def test_a_late_rank_learns_of_the_failure_over_the_connections():
    """A collective that has failed elsewhere fails for a rank that comes late, even before a notice reaches it."""
    has_failed = threading.Event()

    def program(group):
        if group.rank == 0:
            group._control._notify_abort = lambda *_: None  # no news by way of rank 0's other connections
            with pytest.raises(fd.DistributedTimeoutError):
                group.barrier(timeout=0.1)
            has_failed.set()
            return
        assert has_failed.wait(30)
        with pytest.raises(fd.GroupAbortedError, match="failed on rank 0") as caught:
            group.barrier()
        assert caught.value.ranks == (0,)
        assert group.failure is not None

    run_ranks(program, 2, backend="gloo-threads")


def _moved(group):
    """What collectives that may read other ranks' memory in place give, in sizes on both sides of the limit."""
    rank, size = group.rank, group.world_size
    outputs = []
    for count in (1000, 8191, 8192, 200_003):
        tensor = elements(torch.float32, count * size, rank).nan_to_num()
        counts = [count + other for other in range(size)]
        send = [count + (rank + other) % size for other in range(size)]
        receive = [count + (other + rank) % size for other in range(size)]
        uneven = elements(torch.int16, sum(send), rank)
        outputs += [
            fd.all_gather_uneven(tensor[: counts[rank]]),
            fd.broadcast(tensor, size - 1),
            fd.scatter(tensor if rank == 1 else None, 1),
            fd.gather(tensor[:count], 0),
            fd.all_to_all(tensor),
            fd.all_to_all_single_uneven(uneven, send, receive),
            fd.reduce_scatter(tensor),
        ]
    return [None if output is None else output.reshape(-1).view(torch.uint8).numpy().tobytes() for output in outputs]


@pytest.mark.parametrize("world_size", [2, 3])
def test_tensors_of_other_processes_are_read_in_place(world_size):
    """Where the system lets ranks read each other's memory, results are the same as elsewhere."""

    def program(group):
        fd.barrier()
        return group.engine("cpu").communicator.can_read_peers, _moved(group)

    results = run_ranks(program, world_size, backend="native")
    if not all(can_read for can_read, _ in results):
        pytest.skip("this system lets no process read another's memory (process_vm_readv)")
    assert [moved for _, moved in results] == run_ranks(_moved, world_size)


@pytest.mark.parametrize(
    "call",
    [
        lambda tensor: fd.barrier(),
        lambda tensor: fd.allreduce(tensor, out=tensor),
        lambda tensor: fd.broadcast(tensor, out=tensor),
        fd.all_gather,
        fd.all_to_all,
        fd.reduce_scatter,
    ],
    ids=["barrier", "allreduce", "broadcast", "all_gather", "all_to_all", "reduce_scatter"],
)
def test_waiting_releases_the_interpreter(call):
    """Small collectives hold it until a wait begins; a rank that is another thread would never come otherwise."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # no thread has to let another run
    try:

        def program(group):
            for _ in range(50):
                call(torch.ones(2))

        run_ranks(program, 2, backend="native-threads", timeout=20.0)
    finally:
        sys.setswitchinterval(interval)


def test_a_rank_that_cant_open_the_engine_tells_the_others_why(monkeypatch):
    """They don't just find that it has left; here its interface's name is wrong."""

    def refuse(name):
        raise ValueError(f"FERRODIST_SOCKET_IFNAME={name!r} is no interface")

    def make(rank):
        try:
            fd.NativeBackend(rank, 2, address, listener=listener if rank == 0 else None, timeout=30.0)
        except Exception as error:
            errors[rank] = error

    real = native_backend.HostTopology
    monkeypatch.setattr(native_backend, "HostTopology", lambda **facts: refuse("ib7") if turn.pop() else real(**facts))
    turn, errors = [False, True], {}
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(type(error).__name__ for error in errors.values()) == ["BackendUnavailable", "ValueError"]
    assert all("'ib7' is no interface" in str(error) for error in errors.values())


@pytest.mark.parametrize("in_subgroup", [False, True])
def test_a_rank_that_closes_a_failed_group_is_not_the_cause(in_subgroup):
    """Also if the thread that found the failure has not told the engine yet: the other rank gets that failure."""

    def program(world):
        group = fd.SubBackend(world, [0, 1]) if in_subgroup else world
        fd.barrier(group=group)
        if group.rank == 1:
            with pytest.raises(fd.PeerLostError) as raised:
                fd.barrier(group=group, timeout=20.0)
            return str(raised.value)
        world._engines.on_failed = lambda *_: None  # that thread does not run
        world._control._say_goodbye = lambda *_: None  # and the other rank hears of this late
        world._control.fail_group(group.group_id, fd.PeerLostError("rank 1 has died", ranks=(1,)))
        group.close()
        return None

    assert run_ranks(program, 2, backend="native", timeout=30.0) == [None, "rank 1 has died"]
