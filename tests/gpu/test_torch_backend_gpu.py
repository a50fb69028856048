"""torch.distributed on ferrodist with GPU tensors, through host memory: results equal those on the CPU.

The ranks are processes that share the one GPU.
"""

from __future__ import annotations

from copy import deepcopy
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel

from ferrodist.errors import CollectiveMismatchError, UnsupportedOpError
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ferrodist.backends.base import Backend

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch warns of on a GPU is no error of ours

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
COUNTS = (6, 3_000_000)
"""Counts of elements that fit in one segment, and that take several."""

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
OPERATIONS = (dist.ReduceOp.SUM, dist.ReduceOp.MAX)


@pytest.fixture(autouse=True)
def _fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FERRODIST_ENABLE_GPU_FALLBACK", "1")


def run(program: Callable[[], Any], folder: Path) -> list[Any]:
    """Run ``program()`` on two ranks in a default group of torch.distributed."""

    def body(group: Backend) -> Any:
        torch.set_num_threads(1)  # a pool of threads does not survive a fork
        store = dist.FileStore(f"{folder}/store", 2)
        dist.init_process_group("ferrodist", store=store, rank=group.rank, world_size=2, timeout=timedelta(seconds=60))
        try:
            return program()
        finally:
            dist.destroy_process_group()

    return run_ranks(body, 2, backend="native", timeout=100.0)


def filled(count: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> torch.Tensor:
    """A tensor with this rank's elements."""
    numbers = (torch.arange(count) + 3 * dist.get_rank()) % 11
    return (numbers > 4 if dtype is torch.bool else numbers.to(dtype) / 4 if dtype.is_floating_point else numbers).to(
        device, dtype
    )


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """A non-contiguous tensor with the same elements."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def both_layouts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor, and a non-contiguous one with the same elements."""
    return [tensor.clone(), spread(tensor)]


def reduced(device: torch.device, count: int) -> list[torch.Tensor]:
    """The results of all reductions."""
    found = []
    for dtype in DTYPES:
        mine = filled(count, dtype, device)
        for op in OPERATIONS:
            for tensor in both_layouts(mine):
                dist.all_reduce(tensor, op)
                found.append(tensor)
                dist.reduce(tensor, 1, op)
                found += [tensor] if dist.get_rank() == 1 else []
            for source, part in zip(both_layouts(mine), both_layouts(mine[: count // 2]), strict=True):
                dist.reduce_scatter_tensor(part, source, op)
                found.append(part.clone())
                first, second = source[: count // 3], source[count // 3 :]
                uneven = torch.zeros_like(second if dist.get_rank() else first)
                dist.reduce_scatter(uneven, [first, second], op)
                found.append(uneven)
    return found


def moved(device: torch.device, count: int) -> list[torch.Tensor]:
    """The results of collectives that only move data."""
    rank, found = dist.get_rank(), []
    for dtype in (*DTYPES, torch.uint16):  # of which the engines know the last as bytes
        mine = filled(count, dtype, device)
        for tensor in both_layouts(mine):
            whole = tensor.new_zeros(2 * count)
            dist.all_gather_into_tensor(whole, tensor)
            outputs = [spread(tensor.new_zeros(count)) for _ in range(2)]
            dist.all_gather(outputs, tensor)
            uneven = [tensor.new_zeros(count - other) for other in range(2)]
            dist.all_gather(uneven, tensor[rank:])
            gathered = [tensor.new_zeros(count) for _ in range(2)] if rank == 0 else None
            dist.gather(tensor, gathered, 0)
            part = spread(tensor.new_zeros(count // 2))
            dist.scatter(part, list(tensor.chunk(2)) if rank == 1 else None, 1)
            exchanged = tensor.new_zeros(count)
            dist.all_to_all_single(exchanged, tensor)
            # Rank 0 keeps one element and sends the rest; rank 1 sends two.
            shares = [[1, count - 1], [2, count - 2]]
            rows = tensor.new_zeros(shares[0][rank] + shares[1][rank])
            dist.all_to_all_single(rows, tensor, [shares[0][rank], shares[1][rank]], shares[rank])
            swapped = [torch.zeros_like(each) for each in tensor.chunk(2)]
            dist.all_to_all(swapped, list(tensor.chunk(2)))
            dist.broadcast(tensor, 1)
            found += [whole, *outputs, *uneven, *(gathered or ()), part, exchanged, rows, *swapped, tensor]
    return found


def sent(device: torch.device, count: int) -> list[torch.Tensor]:
    """The tensors received in messages."""
    rank, found = dist.get_rank(), []
    other = 1 - rank
    for dtype in DTYPES:
        mine = filled(count, dtype, device)
        for source, target in zip(both_layouts(mine), both_layouts(torch.zeros_like(mine)), strict=True):
            if rank:
                dist.send(source, other)
                assert dist.recv(target) == other
            else:
                dist.recv(target, other)
                dist.send(source, other)
            found.append(target.clone())
            target.zero_()
            works = [dist.isend(source, other, tag=5), dist.irecv(target, other, tag=5)]
            for work in reversed(works):
                work.wait()
            found.append(target.clone())
            target.zero_()
            calls = [dist.P2POp(dist.isend, source, other), dist.P2POp(dist.irecv, target, other)]
            for work in dist.batch_isend_irecv(calls):
                work.wait()
            found.append(target)
    return found


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("part", [reduced, moved, sent], ids=lambda part: part.__name__)
def test_results_equal_those_on_the_cpu(
    part: Callable[[torch.device, int], list[torch.Tensor]], count: int, tmp_path: Path
) -> None:
    """Bits are equal, for tensors with any strides."""

    def program() -> None:
        expected, found = part(CPU, count), part(GPU, count)
        assert len(found) == len(expected) > 0
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert one.device == GPU, number
            assert torch.equal(one.cpu(), other), number

    run(program, tmp_path)


def test_sparse_sums(tmp_path: Path) -> None:
    """Sparse tensors are summed, synchronously or asynchronously."""

    def program() -> None:
        rank = dist.get_rank()
        for is_async in (False, True):
            places = torch.tensor([[rank, 2, 2]], device=GPU)
            values = torch.full((3, 4), rank + 1.0, device=GPU)
            tensor = torch.sparse_coo_tensor(places, values, (4, 4), check_invariants=False)
            work = dist.all_reduce(tensor, async_op=is_async)
            if is_async:
                work.wait()
            assert tensor.device == GPU
            assert tensor.to_dense()[:, 0].tolist() == [1, 2, 6, 0]

    run(program, tmp_path)


def test_started_operations_and_their_futures(tmp_path: Path) -> None:
    """Futures of several operations hold GPU tensors; callbacks compute with them and call collectives."""

    def program() -> None:
        rank = dist.get_rank()
        tensors = [torch.full((300_000 * (i + 1),), float(i + rank), device=GPU) for i in range(5)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for i in reversed(range(5)):
            works[i].wait()
            assert works[i].is_completed()
            assert works[i].is_success()
            assert tensors[i][-1].item() == 2 * i + 1

        def added(future: torch.futures.Future[Any]) -> torch.Tensor:
            (value,) = future.value()
            assert value.device == GPU
            total = value + 1
            dist.all_reduce(total)
            return total

        for count in COUNTS:
            futures = [
                dist.all_reduce(torch.full((count,), i + rank + 0.0, device=GPU), async_op=True).get_future()
                for i in range(4)
            ]
            following = [future.then(added).then(lambda future: 2 * future.wait()) for future in futures]
            # Both ranks have (2 i + 1) + 1, which they add, and double.
            assert [future.wait()[-1].item() for future in following] == [8.0 * i + 8 for i in range(4)]

        outputs = [torch.zeros(7, device=GPU) for _ in range(2)]
        future = dist.all_gather(outputs, torch.full((7,), float(rank), device=GPU), async_op=True).get_future()
        assert future.then(lambda done: done.value()[0][1].sum()).wait().item() == 7
        received = torch.zeros(5, device=GPU)
        receive = dist.irecv(received, 1 - rank).get_future()
        dist.send(torch.full((5,), rank + 1.0, device=GPU), 1 - rank)
        assert receive.wait()[0].tolist() == [2.0 - rank] * 5

    run(program, tmp_path)


def test_order_of_streams(tmp_path: Path) -> None:
    """Calls are ordered between the earlier and the later work of the caller's stream, on any stream."""

    def program() -> None:
        size, rank = 2_000_000, dist.get_rank()
        side = torch.cuda.Stream()
        weights = torch.eye(1500, device=GPU)
        for turn in range(12):
            with torch.cuda.stream(side if turn % 2 else torch.cuda.default_stream()):
                tensor = torch.zeros(size, 2, device=GPU)[:, 0] if turn % 3 else torch.zeros(size, device=GPU)
                for _ in range(20):  # keep the device busy, so that what is not ordered comes too early
                    weights = weights @ weights
                tensor += weights[0, 0] * (rank + turn)
                work = dist.all_reduce(tensor, async_op=turn > 3)
                if work is not None and turn > 7:
                    work.get_future().wait()
                elif work is not None:
                    work.wait()
                total = tensor.double().sum()
                del tensor, work
                torch.full((size, 2), -1.0, device=GPU)  # takes the memory, if that is free too early
                assert total.item() == size * (1 + 2 * turn)

    run(program, tmp_path)


def test_errors_keep_their_class(tmp_path: Path) -> None:
    """Mismatches raise from the call, the wait and the future; other groups stay usable."""

    def program() -> None:
        calls: list[Callable[..., object]] = [
            lambda tensor, group: dist.all_reduce(tensor, group=group),
            lambda tensor, group: dist.all_reduce(tensor, group=group, async_op=True).wait(),
            lambda tensor, group: dist.all_reduce(tensor, group=group, async_op=True).get_future().wait(),
        ]
        for call in calls:
            group = dist.new_group([0, 1])
            with pytest.raises(CollectiveMismatchError):
                call(torch.ones(4 + dist.get_rank(), device=GPU), group)
        tensor = torch.ones(4, device=GPU)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2] * 4

    run(program, tmp_path)


class Branches(nn.Module):
    """An embedding of which a step uses some rows, and two layers of which it uses one."""

    def __init__(self, *, is_sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(20, 8, sparse=is_sparse, mode="sum")
        self.branches = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])

    def forward(self, words: torch.Tensor, which: int) -> torch.Tensor:
        """Look the words up, and use a layer."""
        result: torch.Tensor = self.branches[which](torch.tanh(self.words(words)))
        return result


def with_hook(hook: Callable[..., Any]) -> Callable[[nn.Module], DistributedDataParallel]:
    """A wrapper by DDP with small buckets and a communication hook."""

    def wrap(module: nn.Module) -> DistributedDataParallel:
        ddp = DistributedDataParallel(module, bucket_cap_mb=1e-4, find_unused_parameters=True)
        ddp.register_comm_hook(None, hook)
        return ddp

    return wrap


WRAPS: dict[str, Callable[[nn.Module], DistributedDataParallel]] = {
    "plain": lambda module: DistributedDataParallel(module, find_unused_parameters=True),
    "device_ids": lambda module: DistributedDataParallel(module, device_ids=[0], find_unused_parameters=True),
    "views of buckets": lambda module: DistributedDataParallel(
        module, gradient_as_bucket_view=True, bucket_cap_mb=1e-4, find_unused_parameters=True
    ),
    "hook": with_hook(default_hooks.allreduce_hook),
    "hook in halves": with_hook(default_hooks.fp16_compress_hook),
}


@pytest.mark.parametrize("name", [*WRAPS, "sparse"])
def test_ddp_trains_like_one_process(name: str, tmp_path: Path) -> None:
    """Parameters after some steps equal those of one process with both ranks' data."""

    def program() -> None:
        torch.manual_seed(0)
        alone = Branches(is_sparse=name == "sparse").to(GPU)
        ddp = WRAPS.get(name, WRAPS["plain"])(deepcopy(alone))
        assert {parameter.device for parameter in ddp.parameters()} == {GPU}
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (alone, ddp)]
        for step in range(4):
            words = torch.randint(0, 20, (8, 3), generator=torch.Generator().manual_seed(step)).to(GPU)
            half = words[4 * dist.get_rank() :][:4]
            for module, batch, optimizer in zip((alone, ddp), (words, half), optimizers, strict=True):
                optimizer.zero_grad()
                module(batch, step % 2).square().mean().backward()
                optimizer.step()
        limit = 2e-2 if name == "hook in halves" else 1e-5
        for mine, expected in zip(ddp.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, expected, rtol=limit, atol=limit)
            others = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(others, mine.detach())
            assert torch.equal(*others), "the ranks have different parameters"

    run(program, tmp_path)


def test_hooks_whose_callbacks_call_collectives(tmp_path: Path) -> None:
    """PowerSGD trains: its callbacks start collectives of GPU tensors, and wait for them."""

    def program() -> None:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Linear(64, 64).to(GPU))
        state = power_sgd.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, power_sgd.powerSGD_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
        torch.manual_seed(1 + dist.get_rank())
        data = torch.randn(16, 64, device=GPU)
        losses = []
        for _ in range(8):
            optimizer.zero_grad()
            loss = ddp(data).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        for parameter in ddp.parameters():
            others = [torch.empty_like(parameter) for _ in range(2)]
            dist.all_gather(others, parameter.detach())
            assert torch.equal(*others)

    run(program, tmp_path)


def test_objects_and_barriers_stay_on_the_host(tmp_path: Path) -> None:
    """They need neither GPU memory nor the environment variable."""

    def program() -> None:
        dist.barrier()
        found: list[Any] = [None, None]
        dist.all_gather_object(found, {"rank": dist.get_rank()})
        assert found == [{"rank": 0}, {"rank": 1}]

    run(program, tmp_path)


def test_without_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with GPU tensors raise, with advice, before anything is sent; the group stays usable."""
    monkeypatch.delenv("FERRODIST_ENABLE_GPU_FALLBACK")

    def program() -> None:
        tensor, other = torch.ones(4, device=GPU), 1 - dist.get_rank()
        halves, whole = list(tensor.chunk(2)), torch.zeros(8, device=GPU)
        calls: list[Callable[[], object]] = [
            lambda: dist.all_reduce(tensor),
            lambda: dist.all_reduce(tensor, async_op=True),
            lambda: dist.all_reduce(tensor.to_sparse()),
            lambda: dist.broadcast(tensor, 0),
            lambda: dist.reduce(tensor, 0),
            lambda: dist.all_gather([tensor, tensor.clone()], tensor),
            lambda: dist.all_gather([tensor, tensor[1:].clone()], tensor[dist.get_rank() :]),
            lambda: dist.all_gather_into_tensor(whole, tensor),
            lambda: dist.reduce_scatter_tensor(tensor, whole),
            lambda: dist.reduce_scatter(halves[0], halves),
            lambda: dist.all_to_all_single(torch.zeros_like(tensor), tensor),
            lambda: dist.send(tensor, other),
            lambda: dist.irecv(tensor, other),
            lambda: DistributedDataParallel(nn.Linear(2, 2).to(GPU)),
        ]
        for call in calls:
            with pytest.raises(UnsupportedOpError, match="FERRODIST_ENABLE_GPU_FALLBACK=1"):
                call()
        on_host = torch.ones(1)
        dist.all_reduce(on_host)
        assert on_host.item() == 2

    run(program, tmp_path)


def test_graphs(tmp_path: Path) -> None:
    """Collectives inside the capture of a CUDA graph are refused; the group stays usable."""

    def program() -> None:
        tensor = torch.ones(3, device=GPU)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            tensor.add_(0)
            with pytest.raises(UnsupportedOpError, match="graph"):
                dist.all_reduce(tensor)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2, 2, 2]

    run(program, tmp_path)
