"""What one rank does on an emulated host."""

import ctypes
import hashlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ferrodist as fd
from ferrodist.backends.mailbox import EAGER_LIMIT
from ferrodist.backends.request import wait_all
from ferrodist.collectives.arguments import bytes_of
from ferrodist.deadline import Deadline
from ferrodist.testing.conformance.collectives.oracle import defined_reductions, elements
from ferrodist.torch_backend import group_of

TASKS = {}


def task(function):
    TASKS[function.__name__] = function
    return function


def _bits(tensor):
    """A tensor's bytes; every NaN as every other."""
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return bytes_of((torch.nan_to_num(parts) if parts.is_floating_point() else parts).contiguous())


def results_of(group):
    """What collectives of many kinds and sizes give on this rank, as a digest that other backends must match."""
    digest = hashlib.blake2b()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for count in (1, 26, 5000, 300_001):
            tensor = elements(dtype, count, group.rank)
            op = defined_reductions(dtype)[0]
            outputs = [
                fd.allreduce(tensor, op),
                fd.reduce_scatter(tensor, op),
                fd.all_gather(tensor),
                fd.all_gather_uneven(tensor[: count - group.rank % 2]),
                fd.broadcast(tensor, group.world_size - 1),
                fd.reduce(tensor, 1, op),
                fd.scatter(tensor if group.rank == 0 else None),
                fd.all_to_all_single_uneven(tensor[: group.world_size], [1] * group.world_size, [1] * group.world_size)
                if count >= group.world_size
                else tensor,
            ]
            for output in outputs:
                digest.update(_bits(output))
    for dtype in (torch.float32, torch.complex128, torch.bool):  # large enough to go from host to host in a chain
        for op in defined_reductions(dtype, 0.3 + group.rank):
            output = fd.allreduce(elements(dtype, 150_001, group.rank), op)
            digest.update(_bits(output))
    return digest.hexdigest()


@task
def compare(group, _):
    """The digest, of the whole group and of a sub-group that spans hosts."""
    pair = fd.new_group([0, group.world_size - 1])
    total = float(fd.allreduce(torch.ones(70_000), group=pair)[-1]) if pair else 0.0
    return {"digest": results_of(group), "hosts": len(set(group._topology.hosts)), "pair": total}


@task
def exchange(group, _):
    """Messages of all ranks to all, of the group and of a sub-group, small and large, by all ways at once."""
    num_received = 0
    for here in (group, fd.SubBackend(group, list(reversed(range(group.world_size))))):
        others = [rank for rank in range(here.world_size) if rank != here.rank]
        for size in (0, 1, 5000, 70_000, EAGER_LIMIT, 3 * EAGER_LIMIT + 5):
            into = {rank: bytearray(size) for rank in others}
            requests = [here.irecv(into[rank], rank, tag=size) for rank in others]
            requests += [here.isend(bytes([here.rank]) * size, rank, tag=size) for rank in others]
            wait_all(requests, Deadline(30))
            num_received += sum(into[rank] == bytes([rank]) * size for rank in others)
        for rank in others:
            here.send(bytes([here.rank]), rank, tag=3)
        one = bytearray(1)
        sources = []
        for _ in others:
            sources.append(here.recv(one, fd.ANY_SOURCE, tag=3))
            num_received += one[0] == sources[-1]
        num_received += sorted(sources) == others
    return {"received": num_received}


@task
def receive_until_cut(group, say):
    """Receives from a rank of the other host, which comes to nothing once the cable is cut."""
    peer = group.rank ^ 1
    group.barrier()
    say("running")
    started = time.monotonic()
    try:
        while True:
            started = time.monotonic()
            receiving = group.irecv(bytearray(1 << 20), peer)
            group.send(bytes(1 << 20), peer, timeout=2.0)
            receiving.wait(2.0)
    except fd.DistributedError as error:
        return {"error": type(error).__name__, "ranks": error.ranks, "seconds": time.monotonic() - started}


@task
def until_cut(group, say):
    """Collectives until the cable is cut."""
    say("running")
    started = time.monotonic()
    try:
        while True:
            started = time.monotonic()
            fd.allreduce(torch.ones(200_000), timeout=2.0)
    except fd.DistributedError as error:
        return {"error": type(error).__name__, "ranks": error.ranks, "seconds": time.monotonic() - started}


@task
def torch_backend(group, _):
    """Training with torch's own DDP and FSDP2, in a world that torch brings together; whether it is right."""
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    rank, size = group.rank, group.world_size
    dist.init_process_group("ferrodist")
    spread = {
        "ddp": DistributedDataParallel(_model()),
        "fsdp": fully_shard(_model(), mesh=init_device_mesh("cpu", (size,))),
    }
    alone = _model()
    inputs = [torch.randn(8, 6, generator=torch.Generator().manual_seed(each)) for each in range(size)]
    for module, own in [(each, inputs[rank]) for each in spread.values()] + [(alone, torch.cat(inputs))]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(own).square().mean().backward()
            optimizer.step()
    trained = {
        "ddp": list(spread["ddp"].parameters()),
        "fsdp": [each.full_tensor() for each in spread["fsdp"].parameters()],
    }
    answer = {
        name: all(torch.allclose(*pair, atol=1e-6) for pair in zip(found, alone.parameters(), strict=True))
        for name, found in trained.items()
    }
    received = torch.zeros(70_000)
    works = [dist.isend(torch.full((70_000,), float(rank)), (rank + 1) % size), dist.irecv(received, (rank - 1) % size)]
    for each in works:
        each.wait()
    answer["message"] = bool((received == (rank - 1) % size).all())
    answer["hosts"] = len(set(group_of()._topology.hosts))
    dist.destroy_process_group()
    return answer


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 3))


def work(namespace, name, rank, world_size, address, say):
    """Do a task in a network namespace; what ``say`` is called with last is the answer."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), f"this process can't enter the network namespace {namespace}")
    os.close(descriptor)
    group = fd.init_process_group(
        "native", rank=rank, world_size=world_size, init_method=f"tcp://{address}", timeout=30.0, secret="of this test"
    )
    where, port = address.rsplit(":", 1)
    os.environ |= {"MASTER_ADDR": where.strip("[]"), "MASTER_PORT": str(int(port) + 1)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "FERRODIST_SECRET": "of this test"}
    answer = TASKS[name](group, say)
    say(answer)
    if "error" not in answer:
        fd.barrier()
        fd.destroy_process_group()
