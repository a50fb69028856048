"""torch's DistributedDataParallel on ferrodist: what it trains is what it trains on gloo, bit for bit."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks as default_hooks
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook as power_sgd
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


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


def train(ddp, *, steps=3, make_optimizer=None, arguments=lambda step: (), end=True):
    """A few steps on data that differs between ranks; what the model then holds."""
    parameters = [each for each in ddp.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1) if make_optimizer is None else make_optimizer(parameters)
    torch.manual_seed(10 + dist.get_rank())
    for step in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(4, 6), *arguments(step)).square().mean().backward()
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
    return train(ddp)


def mixed_precision():
    from torch.nn.parallel.distributed import _MixedPrecision

    ddp = DistributedDataParallel(
        nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)),
        mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    )
    return train(ddp)


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
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step

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
    import torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook as post_local_sgd

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


def power(**options):
    state = power_sgd.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5, **options
    )
    return with_hook(lambda ddp: ddp.register_comm_hook(state, power_sgd.powerSGD_hook))


def builtin(kind):
    return with_hook(lambda ddp: ddp._register_builtin_comm_hook(kind))


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
    "join with ZeRO": joined_zero,
    "sparse": sparse,
    "delayed": delayed,
    "mixed precision": mixed_precision,
    "ZeRO": zero,
    "ZeRO, as views": lambda: zero(parameters_as_bucket_view=True),
    "ZeRO's state": zero_state,
    "ZeRO in a hook": overlapped_zero,
    "averaging": averaged,
    "post local": post_local,
    "logging": logged,
    "group of one": lonely_group,
    "chained": chained,
    "allreduce hook": lambda: python_hook(default_hooks.allreduce_hook),
    "half hook": lambda: python_hook(default_hooks.fp16_compress_hook),
    "PowerSGD": power,
    "PowerSGD, warm": lambda: power(use_error_feedback=False, warm_start=False),
    "batched PowerSGD": lambda: with_hook(
        lambda ddp: ddp.register_comm_hook(
            power_sgd.PowerSGDState(None, start_powerSGD_iter=2), power_sgd.batched_powerSGD_hook
        )
    ),
    "builtin": lambda: builtin(dist.BuiltinCommHookType.ALLREDUCE),
    "builtin half": lambda: builtin(dist.BuiltinCommHookType.FP16_COMPRESS),
}
