"""DDP: messages and allocations of a step in steady state."""

import copy
from pathlib import Path

import pytest
import torch
from ddp_ranks import CountingBackend, TiedGpt, mlp, seeded
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ferrodist import DDP
from ferrodist.testing import run_ranks


class Allocations(TorchDispatchMode):
    """Counts operations that return memory that is not their arguments'."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        def memory(tree):
            return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}

        before = memory((args, kwargs))
        result = func(*args, **(kwargs or {}))
        if memory(result) - before - {0}:
            self.made.append(str(func))
        return result


def operations_of_step(model, optimizer, inputs):
    with Allocations() as allocations:
        optimizer.zero_grad()
        loss = model(inputs).float().square().mean()
        loss.backward()
        optimizer.step()
    return allocations.made


@pytest.mark.parametrize("backend", ["simulated", "native-threads"])
@pytest.mark.parametrize("make", [mlp, TiedGpt])
def test_steps_allocate_nothing_for_communication(make, backend):
    """After the third step a step allocates the same tensors as without DDP."""
    start = seeded(make, torch.float32)
    inputs = torch.ones(2, 6) if make is mlp else torch.ones(2, 6, dtype=torch.int64)

    def compare(group):
        found = []
        for model in (copy.deepcopy(start), DDP(copy.deepcopy(start), group, bucket_size_mb=1e-3)):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            found.append([operations_of_step(model, optimizer, inputs) for _ in range(6)][3:])
        return found

    for alone, ddp in run_ranks(compare, 2, backend=backend):
        assert ddp == alone
        assert len(alone[0]) > 5  # the counter counts


@pytest.mark.parametrize("overlap_comm", [True, False])
def test_a_step_takes_a_collective_for_each_bucket(overlap_comm):
    """From the second step on: as many collectives as buckets, and none of another kind."""
    start = seeded(mlp)

    def count(group):
        ddp = DDP(copy.deepcopy(start), group, bucket_size_mb=1e-4, overlap_comm=overlap_comm)
        found = []
        for _ in range(4):
            before = group.engine("cpu").reserve()
            ddp.zero_grad()
            ddp(torch.ones(2, 6).double()).sum().backward()
            if not overlap_comm:
                ddp.sync_gradients()
            found.append(group.engine("cpu").reserve() - before - 1 - len(ddp._reducer.buckets))
        return found[1:], len(ddp._reducer.buckets)

    for extra, num_buckets in run_ranks(count, 2, backend=CountingBackend.create_group):
        assert extra == [0, 0, 0]
        assert num_buckets > 2


def test_buckets_are_in_symmetric_memory():
    """After the first step the engine finds the buckets in symmetric memory, and stages nothing."""

    def addresses(group):
        ddp = DDP(torch.nn.Linear(4, 4), group)
        ddp(torch.ones(1, 4)).sum().backward()
        (bucket,) = ddp._reducer.buckets
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        spans = [[int(part, 16) for part in line[0].split("-")] + line[1:2] for line in lines]
        return [kind for start, end, kind in spans if start <= bucket.tensor.data_ptr() < end]

    for kinds in run_ranks(addresses, 2, backend="native-threads"):
        assert [kind[-1] for kind in kinds] == ["s"]  # a shared mapping
