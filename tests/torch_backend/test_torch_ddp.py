"""torch's DistributedDataParallel on ferrodist: what it trains is what it trains on gloo, bit for bit."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local_sgd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch_world import run_world, same


class Branches(nn.Module):
    """Of which a step uses one, unless told otherwise."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.branches = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, inputs, which):
        return self.branches[which](torch.relu(self.first(inputs)))


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def train(ddp, *, steps=3, make_optimizer=None, arguments=lambda step: (), between=lambda: None):
    """A few steps on data that differs between ranks; what the model then holds."""
    parameters = [each for each in ddp.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1) if make_optimizer is None else make_optimizer(parameters)
    torch.manual_seed(10 + dist.get_rank())
    for step in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(4, 6), *arguments(step)).square().mean().backward()
        between()
        optimizer.step()
    return [each.detach().clone() for each in ddp.state_dict().values()]


def with_hook(register):
    ddp = DistributedDataParallel(plain(), bucket_cap_mb=1e-4)
    register(ddp)
    return train(ddp, steps=5)


def unused():
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True, bucket_cap_mb=1e-4)
    return train(ddp, arguments=lambda step: ((step + dist.get_rank()) % 2,))


def static_graph():
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Branches(), static_graph=True, bucket_cap_mb=1e-4)
    return train(ddp, arguments=lambda step: (0,), steps=4)


def no_sync():
    ddp = DistributedDataParallel(plain())
    torch.manual_seed(dist.get_rank())
    for step in range(4):
        with ddp.no_sync() if step % 2 == 0 else nullcontext():
            ddp(torch.randn(4, 6)).square().mean().backward()
    return [each.grad for each in ddp.parameters()]


def joined():
    ddp = DistributedDataParallel(plain(), bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    with ddp.join():
        for _ in range(2 + 3 * dist.get_rank()):
            optimizer.zero_grad()
            ddp(torch.randn(4, 6)).sum().backward()
            optimizer.step()
    return [each.detach() for each in ddp.state_dict().values()]


def joined_dividing():
    ddp = DistributedDataParallel(plain(), bucket_cap_mb=1e-4)
    torch.manual_seed(dist.get_rank())
    with ddp.join(divide_by_initial_world_size=False):
        for step in range(2 + 3 * dist.get_rank()):
            loss = ddp(torch.randn(4, 6)).sum()
            if step < 2:  # the reducer waits for a work that was given away before all these
                for work in [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(200)]:
                    work.wait()
            loss.backward()
    return [each.grad for each in ddp.parameters()]


def joined_zero():
    ddp = DistributedDataParallel(plain(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    torch.manual_seed(dist.get_rank())
    with Join([ddp, optimizer]):
        for _ in range(1 + 2 * dist.get_rank()):
            ddp(torch.randn(4, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [each.detach() for each in ddp.state_dict().values()]


def sparse():
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(20, 5, sparse=True, mode="sum"), nn.Linear(5, 2))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.randint(0, 20, (4 + dist.get_rank(), 3))).square().mean().backward()
        optimizer.step()
    return [each.detach() for each in ddp.parameters()] + [model[0].weight.grad.to_dense()]


def delayed():
    model = plain()
    ddp = DistributedDataParallel(
        model, delay_all_reduce_named_params=[("3.weight", model[3].weight)], param_to_hook_all_reduce=model[0].weight
    )
    return train(ddp, between=dist.barrier)  # torch itself does not wait for it


def zero(**options):
    ddp = DistributedDataParallel(plain())

    def make(parameters):
        return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.1, **options)

    return train(ddp, make_optimizer=make)


def zero_state():
    ddp = DistributedDataParallel(plain())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.1)
    ddp(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict() if dist.get_rank() == 0 else None


def overlapped_zero():
    ddp = DistributedDataParallel(plain(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    ddp.register_comm_hook(None, hook_with_zero_step(default_hooks.allreduce_hook, ddp, optimizer))
    return train(ddp, make_optimizer=lambda _: optimizer, steps=5)


def averaged():
    model = plain()
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    return train(model, make_optimizer=lambda _: optimizer, steps=4)


def post_local():
    group, _ = dist.new_subgroups(dist.get_world_size())
    state = post_local_sgd.PostLocalSGDState(process_group=None, subgroup=group, start_localSGD_iter=2)
    return with_hook(lambda ddp: ddp.register_comm_hook(state, post_local_sgd.post_localSGD_hook))


def logged():
    ddp = DistributedDataParallel(plain())
    ddp._set_ddp_runtime_logging_sample_rate(1)
    train(ddp)
    data = ddp._get_ddp_logging_data()
    assert data["world_size"] == dist.get_world_size()
    return [data.get("has_error", 0), data["total_parameter_size_bytes"]]


def lonely_group():
    group, _ = dist.new_subgroups(1)
    return train(DistributedDataParallel(plain(), process_group=group))


def chained():
    """A hook whose future awaits a second collective of its own."""

    def hook(state, bucket):
        first = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

        def again(future):
            total = future.value()[0]
            dist.all_reduce(total)
            return total / 4

        return first.then(again)

    return with_hook(lambda ddp: ddp.register_comm_hook(None, hook))


def power(hook=power_sgd.powerSGD_hook):
    state = power_sgd.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    return with_hook(lambda ddp: ddp.register_comm_hook(state, hook))


def waiting_power():
    """One bucket after the other."""

    def hook(state, bucket):
        future = power_sgd.powerSGD_hook(state, bucket)
        future.wait()
        return future

    return power(hook)


def callbacks():
    """Of which some wait for collectives of their own, when the thread that added them is in others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    futures, totals = [], []
    for number in range(6):
        future = dist.all_reduce(torch.full((2,), float(rank + number)), async_op=True).get_future()
        if (rank + number) % 2:
            future.wait()  # here it is completed when the callback is added

        def again(done, number=number):
            total = done.value()[0] * 10
            if (rank + number) % 3 == 0:
                time.sleep(0.01)
            dist.all_reduce(total)
            deeper = dist.all_reduce(total + number, async_op=True).get_future()
            return deeper.then(lambda ended: ended.value()[0] + 1).wait()

        futures.append(future.then(again))
        totals.append(torch.full((2,), float(rank)))
        dist.all_reduce(totals[-1])
    for number, (future, total) in enumerate(zip(futures, totals, strict=True)):
        whole = sum(range(size))
        first = (whole + size * number) * 10
        assert total.tolist() == [whole] * 2
        assert future.wait().tolist() == [(first * size + number) * size + 1] * 2
    failed = futures[0].then(lambda _: 1 // 0).then(lambda done: done.value())
    with pytest.raises(ZeroDivisionError):
        failed.wait()
    with pytest.raises(ZeroDivisionError):
        torch.futures.wait_all([failed])[0][0]


def builtin():
    return with_hook(lambda ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE))


def python_hook(hook):
    return with_hook(lambda ddp: ddp.register_comm_hook(None, hook))


CHECKS = {
    "plain": lambda: train(DistributedDataParallel(plain())),
    "small buckets": lambda: train(DistributedDataParallel(plain(), bucket_cap_mb=1e-4)),
    "views": lambda: train(DistributedDataParallel(plain(), gradient_as_bucket_view=True)),
    "no buffers": lambda: train(DistributedDataParallel(plain(), broadcast_buffers=False)),
    "unused": unused,
    "static graph": static_graph,
    "no sync": no_sync,
    "join": joined,
    "join, dividing by who is left": joined_dividing,
    "join with ZeRO": joined_zero,
    "sparse": sparse,
    "ZeRO": zero,
    "ZeRO, as views": lambda: zero(parameters_as_bucket_view=True),
    "ZeRO's state": zero_state,
    "averaging": averaged,
    "post local": post_local,
    "logging": logged,
    "group of one": lonely_group,
    "allreduce hook": lambda: python_hook(default_hooks.allreduce_hook),
    "half hook": lambda: python_hook(default_hooks.fp16_compress_hook),
    "builtin hook": builtin,
}

# Of what gloo does not run, hangs in, or does in any order.
ALIKE = {
    "chained": (chained, lambda: train(DistributedDataParallel(plain(), bucket_cap_mb=1e-4), steps=5)),
    "PowerSGD": (power, waiting_power),
    "delayed": (delayed, lambda: train(DistributedDataParallel(plain()))),
}

# torch warns of its own deprecations, gloo as ferrodist.
pytestmark = pytest.mark.filterwarnings("ignore")


def program():
    found = {}
    for name, check in CHECKS.items():
        try:
            found[name] = check()
        except Exception as error:
            raise AssertionError(f"{name} on {dist.get_backend()}") from error
    return found


def test_two_ranks_train_what_they_train_on_gloo():
    """Bit for bit: a sum of two has one order."""
    for found in run_world(program):
        assert [name for name in CHECKS if not same(found["ferrodist"][name], found["gloo"][name])] == []


def own_program():
    callbacks()
    return {name: [check() for check in pair] for name, pair in ALIKE.items()} | {"ZeRO": overlapped_zero()}


def test_hooks_whose_callbacks_wait():
    """They have their collectives in one order on all ranks, and so the results of one bucket after the other."""
    ranks = [found["ferrodist"] for found in run_world(own_program, 3, backends=("ferrodist",))]
    for found in ranks:
        assert same(*found["PowerSGD"])
        weights = [each for each in found["ZeRO"] if each.shape != (8,)]  # buffers are a rank's own
        assert same(weights, [each for each in ranks[0]["ZeRO"] if each.shape != (8,)])
    pair = run_world(own_program, backends=("ferrodist",))[0]["ferrodist"]
    assert same(*pair["chained"])  # with two ranks, for their means are halves of sums in any order
    assert same(*pair["delayed"])
