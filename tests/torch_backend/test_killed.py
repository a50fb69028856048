"""A killed rank, wherever in torch's wrappers the others are: each raises, soon, and says who is gone."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch_world import world

from ferrodist.errors import RankFailedError
from ferrodist.testing import run_ranks

SIZE, VICTIM = 3, 1
LIMIT = 10.0  # seconds; about 0.1 on a machine with nothing else to do

pytestmark = pytest.mark.filterwarnings("ignore")


class Strike(torch.autograd.Function):
    """Kills the process in backward."""

    @staticmethod
    def forward(context, tensor):
        return tensor.clone()

    @staticmethod
    def backward(context, grad):
        strike()
        return grad


def strike():
    """Kill this process if it is the one to be killed, and leave behind when."""
    if dist.get_rank() == VICTIM:
        Path("struck").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)


def collective():
    strike()
    dist.all_reduce(torch.ones(4))


def started():
    works = [dist.all_reduce(torch.ones(1 << 16), async_op=True) for _ in range(3)]
    strike()
    works += [dist.all_gather([torch.ones(2) for _ in range(SIZE)], torch.ones(2), async_op=True)]
    for work in works:
        work.wait()


def future():
    strike()
    dist.all_reduce(torch.ones(4), async_op=True).get_future().then(lambda done: done.value()).wait()


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])


def backward(model, dies_in_forward=False):
    inputs = torch.ones(2, 4)
    model(inputs).sum().backward()
    half = Strike.apply(inputs.requires_grad_())
    if dies_in_forward:
        strike()
    loss = model(half)
    if dist.get_rank() == VICTIM:
        loss.register_hook(lambda grad: strike())
    loss.sum().backward()


def ddp(**options):
    backward(DistributedDataParallel(layers(), bucket_cap_mb=1e-5, **options))


def ddp_with_hook():
    model = DistributedDataParallel(layers(), bucket_cap_mb=1e-5)
    model.register_comm_hook(None, allreduce_hook)
    backward(model)


def sharded(**options):
    model = layers()
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (SIZE,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (SIZE,)))
    backward(model, **options)


def old_sharded():
    backward(FullyShardedDataParallel(layers(), device_id=torch.device("cpu")))


def redistribution():
    line = init_device_mesh("cpu", (SIZE,))
    tensor = distribute_tensor(torch.ones(6, 6), line, [Shard(0)])
    strike()
    tensor.redistribute(line, [Replicate()]).to_local() + 1


def functional_collective():
    strike()
    functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD) + 1


def pipeline():
    rank = dist.get_rank()
    stage = PipelineStage(nn.Linear(4, 4), rank, SIZE, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=lambda out, target: (out - target).square().sum())
    for _ in range(3):
        schedule.step(
            *([torch.ones(8, 4)] if rank == 0 else []), **({"target": torch.ones(8, 4)} if rank == SIZE - 1 else {})
        )
        strike()


def receiving():
    strike()
    dist.recv(torch.ones(2), VICTIM)


def receiving_from_any():
    strike()
    dist.recv(torch.ones(2))


def subgroup():
    group = dist.new_group([0, 1, 2])
    strike()
    dist.barrier(group)


PLACES = {
    "collective": collective,
    "started": started,
    "future": future,
    "DDP": ddp,
    "DDP, finding unused": lambda: ddp(find_unused_parameters=True),
    "DDP, hook": ddp_with_hook,
    "FSDP2, forward": lambda: sharded(dies_in_forward=True),
    "FSDP2": sharded,
    "FSDP1": old_sharded,
    "DTensor": redistribution,
    "functional": functional_collective,
    "pipeline": pipeline,
    "recv": receiving,
    "recv any": receiving_from_any,
    "subgroup": subgroup,
}


@pytest.mark.parametrize("place", PLACES)
def test_the_others_raise_soon(place, tmp_path, monkeypatch):
    """Survivors of a SIGKILL end with an error that names the rank, in seconds; none of them crashes."""
    monkeypatch.chdir(tmp_path)

    def body(group):
        torch.set_num_threads(1)
        report = {}
        try:
            with world("ferrodist", tmp_path, group.rank, SIZE):
                dist.barrier()
                PLACES[place]()
        except Exception as error:
            report = {"at": time.monotonic(), "what": f"{type(error).__name__}: {error}"}
        (tmp_path / f"rank {group.rank}").write_text(json.dumps(report))

    with pytest.raises(RankFailedError, match="SIGKILL") as failure:
        run_ranks(body, SIZE, backend="tcp")
    assert failure.value.ranks == (VICTIM,), failure.value
    struck = float((tmp_path / "struck").read_text())
    for rank in {*range(SIZE)} - {VICTIM}:
        report = json.loads((tmp_path / f"rank {rank}").read_text())
        assert report, f"rank {rank} raised nothing"
        print(place, rank, f"{report['at'] - struck:.3f}", report["what"][:150])
        assert "PeerLostError" in report["what"] or f"rank {VICTIM}" in report["what"], report
        assert report["at"] - struck < LIMIT
