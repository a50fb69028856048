"""The program of two ranks with a GPU: started by test_nccl_real.py, with the names of its parts."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch

import ferrodist as fd
from ferrodist.collectives.reduce_op import DTYPES, check_reduction, fold

GPU = torch.device("cuda", 0)
OPERATIONS = [*fd.ReduceOp, fd.premultiplied_sum(1 / 3)]


def elements(dtype: torch.dtype, count: int, rank: int) -> torch.Tensor:
    """Small numbers of all kinds, different on each rank."""
    generator = torch.Generator().manual_seed(100 * rank + count)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if dtype.is_complex:
        return torch.complex(
            torch.randn(count, generator=generator, dtype=dtype.to_real()),
            torch.randn(count, generator=generator, dtype=dtype.to_real()),
        )
    if dtype.is_floating_point:
        values = torch.randn(count, generator=generator, dtype=torch.float64)
        if count > 4:
            values[rank] = float("nan")
            values[3] = float("inf") if dtype is not torch.float8_e4m3fn else 1.0
        return values.to(dtype)
    low = 0 if dtype is torch.uint8 else -9
    return torch.randint(low, 120, (count,), generator=generator).to(dtype)


def same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Raise unless the numbers are equal, up to the order of additions."""
    assert actual.is_cuda, what
    actual = actual.cpu()
    if expected.dtype.is_floating_point or expected.dtype.is_complex:
        wide = torch.complex128 if expected.dtype.is_complex else torch.float64
        tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float8_e4m3fn: 0.1, torch.float8_e5m2: 0.2}
        limit = tolerance.get(expected.dtype, 1e-5)
        torch.testing.assert_close(
            actual.to(wide),
            expected.to(wide),
            rtol=limit,
            atol=limit,
            equal_nan=True,
            msg=lambda text: f"{what}: {text}",
        )
    else:
        assert torch.equal(actual, expected), f"{what}: {actual} is not {expected}"


def raised(kind: type[fd.DistributedError], group: fd.Backend, call: object) -> fd.DistributedError:
    """The error of a call, or of the waits after it."""

    def call_and_wait() -> None:
        call()
        group.synchronize(30)
        fd.barrier(group)

    with pytest.raises(kind) as caught:
        call_and_wait()
    return caught.value


def reductions(group: fd.Backend) -> None:
    """Every dtype and reduction, in every collective that reduces."""
    p = group.world_size
    for dtype in DTYPES:
        for op in OPERATIONS:
            try:
                check_reduction(dtype, op)
            except TypeError:
                continue
            for count in (1, 7, 1000):
                inputs = [elements(dtype, count, rank) for rank in range(p)]
                expected = fold(op, inputs, [1 / 3] * p)
                own = inputs[group.rank].to(GPU)
                same(fd.allreduce(own, op), expected, f"allreduce {dtype} {op} {count}")
                same(own, inputs[group.rank], "the input")
                reduced = fd.reduce(own, p - 1, op)
                if group.rank == p - 1:
                    same(reduced, expected, f"reduce {dtype} {op} {count}")
                part = fd.reduce_scatter(own, op)
                sizes = [len(chunk) for chunk in torch.tensor_split(expected, p)]
                start = sum(sizes[: group.rank])
                same(part, expected[start : start + sizes[group.rank]], f"reduce_scatter {dtype} {op} {count}")
    group.synchronize()


def movement(group: fd.Backend) -> None:
    """Collectives that only move data give the right elements in every dtype."""
    p, rank = group.world_size, group.rank
    for dtype in DTYPES:
        for count in (0, 1, 5, 4096):
            inputs = [elements(dtype, count, other).reshape(count, 1) for other in range(p)]
            own = inputs[rank].to(GPU)
            same(fd.broadcast(own.clone(), 1 % p), inputs[1 % p], f"broadcast {dtype}")
            same(fd.all_gather(own), torch.cat(inputs), f"all_gather {dtype}")
            mine = own[: count - rank] if count else own
            ragged = [part[: count - other] if count else part for other, part in enumerate(inputs)]
            same(fd.all_gather_uneven(mine), torch.cat(ragged), f"all_gather_uneven {dtype}")
            gathered = fd.gather(own, 0)
            if rank == 0:
                same(gathered, torch.cat(inputs), f"gather {dtype}")
            whole = torch.cat(inputs)
            scattered = fd.scatter(whole.to(GPU) if rank == 0 else None, 0)
            same(scattered, torch.tensor_split(whole, p)[rank], f"scatter {dtype}")
            exchanged = fd.all_to_all([own + 0 if dtype is not torch.bool and not _is_eight(dtype) else own] * p)
            for other in range(p):
                same(exchanged[other], inputs[other], f"all_to_all {dtype}")
    rows = torch.arange(12.0, device=GPU).reshape(6, 2) + 100 * rank
    if p == 2:
        send, receive = ([1, 5], [1, 2]) if rank == 0 else ([2, 4], [5, 4])
        result = fd.all_to_all_single_uneven(rows[: sum(send)], send, receive)
        assert result.shape == (sum(receive), 2)
    group.synchronize()


def _is_eight(dtype: torch.dtype) -> bool:
    return dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def streams(group: fd.Backend) -> None:
    """Results may be used on the stream at once; asynchronous operations don't wait on the host."""
    p = group.world_size
    heavy = torch.randn(4096, 4096, device=GPU)
    for _ in range(20):
        slow = heavy
        for _ in range(10):
            slow = (slow @ heavy).clamp(-1, 1)
        value = slow.abs().sum() * 0 + group.rank + 1
        total = fd.allreduce(value.reshape(1))
        assert (total * 2).item() == p * (p + 1)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        value = torch.full((1 << 20,), float(group.rank), device=GPU)
        total = fd.allreduce(value)
        assert total.sum().item() == (1 << 20) * p * (p - 1) / 2
    handles = []
    for i in range(50):
        tensor = torch.full((1 << 18,), float(i + group.rank), device=GPU)
        handles.append(fd.async_allreduce(tensor))
        del tensor  # whose memory others must not get before it was read
        torch.full((1 << 18,), -1.0, device=GPU)
    for i, handle in enumerate(handles):
        result = handle.wait()
        assert result[0].item() == result[-1].item() == p * i + p * (p - 1) / 2, i
    assert all(handle.done() for handle in handles)
    pending = fd.async_allreduce(torch.ones(1 << 20, device=GPU))
    assert pending.wait(timeout=30)[5].item() == p
    group.synchronize()


def graphs(group: fd.Backend) -> None:
    """Graphs can be captured while operations are outstanding, and collectives inside the capture are refused."""
    pool = torch.randn(2048, 2048, device=GPU)
    fd.allreduce(pool)
    group.synchronize()
    torch.mm(pool, pool)
    handles = [fd.async_allreduce(torch.ones(1 << 24, device=GPU)) for _ in range(10)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(50):
            result = torch.mm(pool, pool)
        time.sleep(0.1)  # the watch looks meanwhile
    graph.replay()
    torch.testing.assert_close(result, torch.mm(pool, pool))
    for handle in handles:
        handle.wait()
    group.synchronize()
    if group.world_size == 1:
        alone = fd.new_group([0])
        fd.allreduce(torch.ones(1, device=GPU), group=alone)

        def capture() -> None:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.ones(1, device=GPU).add_(1)
                fd.allreduce(pool, group=alone)

        with pytest.raises(fd.UnsupportedOpError, match="CUDA graph"):
            capture()
        torch.cuda.synchronize()


def given_stream(group: fd.Backend) -> None:
    """Work is enqueued on a stream given by the user."""
    (control,) = fd.SimulatedBackend.create_group(1)
    stream = torch.cuda.Stream()
    alone = fd.HybridBackend(control, stream=stream)
    with torch.cuda.stream(stream):
        value = torch.full((1 << 20,), 3.0, device=GPU)
        assert fd.allreduce(value, group=alone).sum().item() == 3 << 20
    assert fd.allreduce(torch.ones(4, device=GPU), group=alone).sum().item() == 4
    alone.synchronize()
    alone.close()
    del group


def messages(group: fd.Backend) -> None:
    """Messages of GPU tensors, with tags in any order."""
    p, rank = group.world_size, group.rank
    if p == 1:
        return
    right, left = (rank + 1) % p, (rank - 1) % p
    for dtype in DTYPES:
        sent = elements(dtype, 33, rank).to(GPU)
        got = fd.sendrecv(sent, right, (33,), left)
        same(got, elements(dtype, 33, left), f"sendrecv {dtype}")
    if rank == 0:
        for tag in (1, 2, 3):
            fd.send(torch.full((1000, tag), float(tag), device=GPU), 1, tag=tag)
        fd.send(torch.ones(3, device=GPU), 1, tag=4)
        fd.send(torch.ones(0, device=GPU), 1, tag=5)
        fd.send(torch.ones(4, 5, device=GPU).t(), 1, tag=6)
    elif rank == 1:
        for tag in (3, 1, 2):
            got = torch.empty(1000, tag, device=GPU)
            assert fd.recv_into(got, 0, tag=tag) == 0
            assert (got == tag).all().item(), tag
        with pytest.raises(fd.SizeMismatchError):
            fd.recv_into(torch.empty(2, device=GPU), 0, tag=4)
        fd.recv_into(torch.empty(0, device=GPU), 0, tag=5)
        got = fd.recv((5, 4), torch.float32, fd.ANY_SOURCE, tag=6, device=GPU)
        assert got.sum().item() == 20
    group.synchronize()


def subgroups(group: fd.Backend) -> None:
    """Sub-groups have communicators of their own."""
    p = group.world_size
    turned = fd.new_group(list(reversed(range(p))))
    gathered = fd.all_gather(torch.tensor([float(group.rank)], device=GPU), group=turned)
    same(gathered, torch.arange(p - 1, -1, -1).float(), "a turned group")
    turned.close()
    alone = fd.new_group([group.rank])
    same(fd.allreduce(torch.ones(3, device=GPU), group=alone), torch.ones(3), "a group of one")
    alone.close()


def mismatch(group: fd.Backend) -> None:
    """Different calls end the group on all ranks."""
    if group.world_size == 1:
        return
    sub = fd.new_group(list(range(group.world_size)))
    fd.allreduce(torch.ones(4, device=GPU), group=sub)
    sub.synchronize()
    began = time.monotonic()
    op = fd.ReduceOp.SUM if group.rank == 0 else fd.ReduceOp.MAX
    error = raised(fd.CollectiveMismatchError, sub, lambda: fd.allreduce(torch.ones(4, device=GPU), op, group=sub))
    print(f"rank {group.rank}: {time.monotonic() - began:.3f} s: {error}")
    sub.close()
    sub = fd.new_group(list(range(group.world_size)))
    fd.allreduce(torch.ones(4, device=GPU), group=sub)
    began = time.monotonic()
    calls = (
        lambda: fd.allreduce(torch.ones(4, device=GPU), group=sub),
        lambda: fd.broadcast(torch.ones(400_000, device=GPU), 1, group=sub),
    )
    error = raised(fd.CollectiveMismatchError, sub, calls[min(group.rank, 1)])
    print(f"rank {group.rank}: {time.monotonic() - began:.3f} s: {error}")
    torch.cuda.synchronize()
    sub.close()


def late(group: fd.Backend) -> None:
    """A rank that does not call is named, and the GPU is free again."""
    if group.world_size == 1:
        return
    sub = fd.new_group(list(range(group.world_size)))
    fd.allreduce(torch.ones(4, device=GPU), group=sub)
    sub.synchronize()
    if group.rank == 0:
        began = time.monotonic()
        ones = torch.ones(4, device=GPU)
        error = raised(fd.DistributedTimeoutError, sub, lambda: fd.allreduce(ones, group=sub, timeout=1.0))
        print(f"rank 0: {time.monotonic() - began:.3f} s: {error}")
        assert error.ranks == tuple(range(1, group.world_size))
        torch.cuda.synchronize()  # the kernel has ended
        print(f"rank 0: GPU free after {time.monotonic() - began:.3f} s")
    fd.barrier()
    with pytest.raises(fd.DistributedTimeoutError):
        fd.allreduce(torch.ones(4, device=GPU), group=sub)
    sub.close()


def killed(group: fd.Backend) -> None:
    """A rank that is killed while a GPU waits for it is reported, and the others continue without it."""
    fd.allreduce(torch.ones(4, device=GPU))
    group.synchronize()
    last = group.world_size - 1
    if group.rank == last:
        group.recv(bytearray(1), 0)
        os.kill(os.getpid(), signal.SIGKILL)
    fd.allreduce(torch.ones(4, device=GPU))
    if group.rank == 0:
        group.send(b"x", last)
    began = time.monotonic()
    error = raised(fd.PeerLostError, group, lambda: None)
    print(f"rank {group.rank}: {time.monotonic() - began:.3f} s: {error}")
    assert error.ranks == (group.world_size - 1,)
    torch.cuda.synchronize()
    print(f"rank {group.rank}: GPU free after {time.monotonic() - began:.3f} s")
    survivors = group.shrink()
    total = fd.allreduce(torch.ones(4, device=GPU), group=survivors)
    assert total.sum().item() == 4 * survivors.world_size
    survivors.synchronize()


def training(group: fd.Backend) -> None:
    """A step of DDP on GPUs equals one process's step with all the data."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(GPU)
    alone = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(GPU)
    alone.load_state_dict(model.state_dict())
    data = torch.randn(8 * group.world_size, 8, device=GPU)
    ddp = fd.DDP(model)
    ddp(data[8 * group.rank : 8 * (group.rank + 1)]).square().mean().backward()
    alone(data).square().mean().backward()
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)
    group.synchronize()


def sharded(group: fd.Backend) -> None:
    """A step of FSDP on GPUs equals one process's step with all the data."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 15), torch.nn.ReLU(), torch.nn.Linear(15, 3)).to(GPU)
    alone = torch.nn.Sequential(torch.nn.Linear(8, 15), torch.nn.ReLU(), torch.nn.Linear(15, 3)).to(GPU)
    alone.load_state_dict(model.state_dict())
    data = torch.randn(8 * group.world_size, 8, device=GPU)
    fsdp = fd.FSDP(model)
    for module, batch in ((fsdp, data[8 * group.rank : 8 * (group.rank + 1)]), (alone, data)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            optimizer.step()
    mine = fsdp.full_state_dict()
    for name, expected in alone.state_dict().items():
        torch.testing.assert_close(mine[name].to(GPU), expected)
    group.synchronize()


def timings(group: fd.Backend) -> None:
    """Print the host's and the GPU's time of allreduces."""
    for count in (1, 1 << 18, 1 << 24):
        tensor = torch.ones(count, device=GPU)
        for _ in range(5):
            fd.allreduce(tensor, out=tensor, op=fd.ReduceOp.MAX)
        fd.allreduce(tensor)
        group.synchronize()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(50):
            fd.allreduce(tensor, out=tensor)
        launched = time.perf_counter() - began
        torch.cuda.synchronize()
        done = time.perf_counter() - began
        if group.rank == 0:
            print(f"allreduce of {4 * count} bytes: host {launched * 2e4:.1f} us, done {done * 2e4:.1f} us")
        group.synchronize()


PARTS = {
    function.__name__: function
    for function in (
        reductions,
        movement,
        streams,
        graphs,
        given_stream,
        messages,
        subgroups,
        mismatch,
        late,
        training,
        sharded,
        timings,
        killed,
    )
}


def main(meeting: str, backend: str, names: list[str]) -> None:
    """Run some parts on this rank."""
    torch.cuda.set_device(GPU)
    group = fd.init_process_group(backend, init_method=meeting, timeout=60)
    for name in names:
        began = time.monotonic()
        PARTS[name](group)
        print(f"rank {group.rank}: {name} passed in {time.monotonic() - began:.2f} s", flush=True)
    if "killed" not in names:
        began = time.monotonic()
        fd.destroy_process_group()
        print(f"closed in {time.monotonic() - began:.2f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
