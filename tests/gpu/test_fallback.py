"""Tensors on a GPU through host memory: every collective has the bits that it has on the CPU.

The ranks are processes that share the one GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import ferrodist as fd
from ferrodist.collectives.reduce_op import DTYPES, ReduceOp, check_reduction, premultiplied_sum
from ferrodist.testing import run_ranks
from ferrodist.testing.conformance.collectives.oracle import check_bits, elements

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend


@pytest.fixture(autouse=True)
def _fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FERRODIST_ENABLE_GPU_FALLBACK", "1")


def _many(dtype: torch.dtype, count: int, rank: int) -> torch.Tensor:
    """Elements of a rank: all kinds, repeated up to ``count``."""
    few = elements(dtype, min(count, 3001), rank)
    return few.repeat(count // max(1, few.numel()) + 1)[:count] if count else few


def _compare(what: str, call: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> None:
    expected = call(tensor)
    found = call(tensor.cuda())
    assert found.is_cuda, what
    check_bits(found.cpu(), expected, what, any_nan=True)


def _every_collective(group: Backend, dtype: torch.dtype, count: int) -> None:
    mine, size, what = _many(dtype, count, group.rank), group.world_size, f"{count} {dtype}"
    root = count % size
    _compare(f"broadcast {what}", lambda x: fd.broadcast(x, root), mine)
    _compare(f"all_gather {what}", fd.all_gather, mine)
    _compare(f"all_gather_uneven {what}", lambda x: fd.all_gather_uneven(x[group.rank :]), mine)
    _compare(f"gather {what}", lambda x: fd.gather(x, root), mine)
    _compare(f"all_to_all {what}", lambda x: fd.all_to_all(x[: count // size * size]), mine)
    other = 1 - group.rank
    _compare(f"sendrecv {what}", lambda x: fd.sendrecv(x, other, x.shape, other), mine)
    part = fd.scatter(mine if group.rank == root else None, root)
    place = torch.device("cuda", torch.cuda.current_device())
    found = fd.scatter(mine.cuda() if group.rank == root else None, root)
    assert found.device == place
    check_bits(found.cpu(), part, f"scatter {what}")
    for op in (*ReduceOp, premultiplied_sum((group.rank + 1) / 3)):
        try:
            check_reduction(dtype, op)
        except TypeError:
            continue
        _compare(f"allreduce {op} {what}", lambda x, op=op: fd.allreduce(x, op), mine)
        _compare(f"reduce {op} {what}", lambda x, op=op: fd.reduce(x, root, op), mine)
        _compare(f"reduce_scatter {op} {what}", lambda x, op=op: fd.reduce_scatter(x, op), mine)
        _compare(f"async {op} {what}", lambda x, op=op: fd.async_allreduce(x, op).wait(), mine)


def test_every_collective_dtype_and_reduction() -> None:
    """All dtypes, with zero, one, some and many elements."""

    def on_rank(group: Backend) -> None:
        for dtype in DTYPES:
            for count in (0, 1, 1001, 3_000_000 // dtype.itemsize):
                _every_collective(group, dtype, count)
        group.synchronize()

    run_ranks(on_rank, 2, backend="native", timeout=110.0)


def test_large_tensors() -> None:
    """Many segments, of sizes that are not multiples of a segment, also with three ranks and over TCP."""

    def on_rank(group: Backend) -> None:
        for dtype, count in ((torch.float32, 5_000_011), (torch.bfloat16, 12_000_017), (torch.uint8, 9_000_001)):
            tensor = (torch.arange(count) % 101 + group.rank).to(dtype)
            _compare("allreduce", fd.allreduce, tensor)
            _compare("reduce_scatter", fd.reduce_scatter, tensor)
            _compare("all_gather", fd.all_gather, tensor)
            _compare("broadcast", lambda x: fd.broadcast(x, group.world_size - 1), tensor)
            _compare("all_to_all", lambda x: fd.all_to_all(x[: len(x) // 6 * 6]), tensor)

    run_ranks(on_rank, 3, backend="native", timeout=80.0)
    run_ranks(on_rank, 2, backend="tcp", timeout=80.0)


def test_order_of_streams() -> None:
    """Calls are ordered between the earlier and the later work of the caller's stream, on any stream."""

    def on_rank(group: Backend) -> None:
        size = 2_000_000
        side = torch.cuda.Stream()
        weights = torch.eye(1500, device="cuda")
        for turn in range(8):
            with torch.cuda.stream(side if turn % 2 else torch.cuda.default_stream()):
                tensor = torch.zeros(size, device="cuda")
                for _ in range(20):  # keep the device busy, so that what is not ordered comes too early
                    weights = weights @ weights
                tensor += weights[0, 0] * (group.rank + turn)
                pending = fd.async_allreduce(tensor, out=tensor) if turn > 3 else None
                if pending is None:
                    fd.allreduce(tensor, out=tensor)
                else:
                    pending.wait()
                total = tensor.double().sum()
                del tensor
                torch.full((size,), -1.0, device="cuda")  # takes the memory, if that is free too early
                assert total.item() == size * (1 + 2 * turn)

    run_ranks(on_rank, 2, backend="native")


def test_started_operations_and_coalescing() -> None:
    """Several asynchronous operations, coalesced or not, beside ones on the CPU."""

    def on_rank(group: Backend) -> None:
        tensors = [torch.full((300_000 * (i + 1),), float(i + group.rank), device="cuda") for i in range(5)]
        started = [fd.async_allreduce(tensor) for tensor in tensors]
        here = fd.async_allreduce(torch.ones(10))
        assert [handle.wait()[-1].item() for handle in started] == [2.0 * i + 1 for i in range(5)]
        assert here.wait()[0].item() == 2
        with fd.coalesce():
            joined = [fd.async_allreduce(tensor, out=tensor) for tensor in tensors]
            other = fd.async_broadcast(torch.full((3,), float(group.rank)), 1)
        assert [handle.wait()[0].item() for handle in joined] == [2.0 * i + 1 for i in range(5)]
        assert other.wait().tolist() == [1, 1, 1]
        group.synchronize()

    run_ranks(on_rank, 2, backend="native")


def test_gradients() -> None:
    """Gradients of collectives on a GPU equal those on the CPU."""

    def on_rank(group: Backend) -> None:
        for call in (fd.allreduce, fd.all_gather, fd.reduce_scatter, fd.all_to_all, fd.broadcast, fd.gather):
            found = []
            for device in ("cpu", "cuda"):
                tensor = (torch.arange(8.0) + group.rank).to(device).requires_grad_()
                call(tensor).square().sum().backward()
                found.append(tensor.grad.cpu())
            check_bits(found[1], found[0], str(call))

    run_ranks(on_rank, 2, backend="native")


def test_messages() -> None:
    """Tensors with any strides, in batches; a batch that mixes devices is refused."""

    def on_rank(group: Backend) -> None:
        other = 1 - group.rank
        source = torch.arange(12.0, device="cuda").view(3, 4).t() + group.rank
        out = torch.zeros(3, 4, device="cuda").t()
        assert fd.batch([fd.Send(source, other), fd.Recv(out, other)]) == [other, other]
        assert out.tolist() == (torch.arange(12.0).view(3, 4).t() + other).tolist()
        if group.rank:
            fd.send(source, 0, tag=3)
        else:
            found, peer = fd.recv((4, 3), torch.float32, fd.ANY_SOURCE, tag=3, device="cuda", return_source=True)
            assert (found.device.type, peer) == ("cuda", 1)
            assert found[0, 0].item() == 1
            with pytest.raises(ValueError, match="known shape and dtype"):
                fd.recv(None, None, 1, device="cuda")
        with pytest.raises(ValueError, match="one device"):
            fd.batch([fd.Send(source, other), fd.Recv(torch.zeros(4, 3), other)])
        with pytest.raises(ValueError, match="out is on cpu"):
            fd.allreduce(source, out=torch.zeros(4, 3))

    run_ranks(on_rank, 2, backend="native")


def test_objects() -> None:
    """GPU tensors inside objects are refused, or pickled and restored on the GPU."""

    def on_rank(group: Backend) -> None:
        value = {"tensor": torch.full((3,), float(group.rank), device="cuda")}
        with pytest.raises(TypeError, match="msgpack can't carry"):
            fd.all_gather_object(value)
        found = fd.all_gather_object(value, allow_pickle=True)
        assert [each["tensor"].tolist() for each in found] == [[0.0] * 3, [1.0] * 3]
        assert all(each["tensor"].is_cuda for each in found)

    run_ranks(on_rank, 2, backend="native")


def test_remote_calls_refuse_tensors_on_a_gpu() -> None:
    """Remote calls refuse GPU tensors, with the reason."""

    def on_rank(group: Backend) -> None:
        with fd.rpc.RpcContext(group, {"double": _double}) as agent:
            with pytest.raises(fd.UnsupportedOpError, match=r"pass tensor.cpu\(\)"):
                agent.rpc_sync(1 - group.rank, "double", torch.ones(2, device="cuda"))
            assert agent.rpc_sync(1 - group.rank, "double", torch.ones(2)).tolist() == [2, 2]

    run_ranks(on_rank, 2, backend="native")


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return 2 * tensor


def test_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with GPU tensors raise, with advice, before anything is sent."""
    monkeypatch.delenv("FERRODIST_ENABLE_GPU_FALLBACK")

    def on_rank(group: Backend) -> None:
        tensor, other = torch.ones(4, device="cuda"), 1 - group.rank
        module = torch.nn.Linear(2, 2, device="cuda")
        calls = [
            *(partial_call(call, tensor) for call in (fd.allreduce, fd.reduce, fd.broadcast, fd.all_gather, fd.gather)),
            *(partial_call(call, tensor) for call in (fd.reduce_scatter, fd.all_to_all, fd.all_gather_uneven)),
            *(partial_call(call, tensor) for call in (fd.gpu_allreduce, fd.gpu_broadcast, fd.async_allreduce)),
            lambda: fd.send(tensor, other),
            lambda: fd.recv_into(tensor, other),
            lambda: fd.DDP(module),
            lambda: fd.FSDP(module),
        ]
        for call in calls:
            with pytest.raises(fd.UnsupportedOpError, match="FERRODIST_ENABLE_GPU_FALLBACK=1"):
                call()
        assert fd.allreduce(torch.ones(1)).item() == 2

    def partial_call(call: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> Callable[[], object]:
        return lambda: call(tensor)

    run_ranks(on_rank, 2, backend="native")


def test_graphs() -> None:
    """Collectives inside the capture of a CUDA graph are refused; the group stays usable."""

    def on_rank(group: Backend) -> None:
        tensor = torch.ones(3, device="cuda")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            tensor.add_(0)
            with pytest.raises(fd.UnsupportedOpError, match="graph"):
                fd.allreduce(tensor)
        assert fd.allreduce(tensor).tolist() == [2, 2, 2]

    run_ranks(on_rank, 2, backend="native")


def test_mismatches() -> None:
    """Ranks with different counts, or different types of devices, raise the same error."""

    def on_rank(group: Backend) -> None:
        for number, (here, there) in enumerate([(3_000_000, 3_000_001), (10, 3_000_000), (10, 11)]):
            sub = fd.SubBackend(group, [0, 1], label=str(number))
            with pytest.raises(fd.CollectiveMismatchError):
                fd.allreduce(torch.ones(there if group.rank else here, device="cuda"), group=sub)
        sub = fd.SubBackend(group, [0, 1], label="kinds")
        with pytest.raises(fd.CollectiveMismatchError, match="on a GPU"):
            fd.gather(torch.ones(3, device="cuda" if group.rank else "cpu"), group=sub)

    run_ranks(on_rank, 2, backend="native")
