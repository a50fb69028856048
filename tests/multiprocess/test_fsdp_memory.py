"""What a rank of an FSDP holds in memory."""

import ctypes
import gc
from pathlib import Path

import pytest
import torch

from ferrodist import FSDP
from ferrodist.testing import run_ranks


@pytest.fixture(autouse=True, scope="module")
def _loaded_optimizer():
    """What torch loads with the first step of an optimizer is there before ranks are forked, and no part of theirs."""
    layer = torch.nn.Linear(1, 1)
    layer(torch.ones(1, 1)).sum().backward()
    torch.optim.Adam(layer.parameters()).step()


def meta_model(width, num_layers):
    with torch.device("meta"):
        return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(num_layers)))


def held_bytes():
    """Bytes of all tensors that Python code of this process can reach, each memory once."""
    storages = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor) and found.device.type == "cpu" and found.layout is torch.strided:
            storage = found.untyped_storage()
            if storage.nbytes():
                storages[storage.data_ptr()] = storage.nbytes()
            if isinstance(found, torch.nn.Parameter) and found.grad is not None:
                storages[found.grad.untyped_storage().data_ptr()] = found.grad.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("world_size", [2, 4])
def test_memory_of_a_rank(world_size):
    """Between steps and in forward: parameters, gradients and Adam's state divided by the ranks, and two units.

    While it is made: its shards, and one layer of the model, twice.
    """
    width, num_layers = 128, 6
    layer = (width * width + width) * 4
    whole = num_layers * layer

    def program(group):
        before = held_bytes()
        building = []

        def init(module):
            building.append(held_bytes() - before)
            module.reset_parameters()

        fsdp = FSDP(meta_model(width, num_layers), group, wrap=torch.nn.Linear, init=init)
        optimizer = torch.optim.Adam(fsdp.parameters(), foreach=False)
        peaks = []
        for unit in fsdp._units[1:]:
            unit.module.register_forward_pre_hook(lambda *_: peaks.append(held_bytes() - before))
        for _ in range(3):
            peaks.clear()
            optimizer.zero_grad()
            output = fsdp(torch.ones(1, width))
            output.sum().backward()
            optimizer.step()
        del output
        return max(building), held_bytes() - before, max(peaks)

    for building, steady, forward in run_ranks(program, world_size, backend="native"):
        assert building <= 1.05 * (whole / world_size + 2 * layer)
        assert steady <= 1.05 * (4 * whole / world_size + 2 * layer)
        # In forward there are no gradients, but two units and the rows that gradients will be averaged in.
        assert forward <= 1.05 * (3 * whole / world_size + 3 * layer)


def resident_bytes():
    """What the kernel counts for this process: its own pages, and its part of those that several processes have."""
    gc.collect()  # it writes to all objects, which makes them this process's own after a fork
    ctypes.CDLL(None).malloc_trim(0)  # what the heap keeps free is nobody's
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


def test_memory_that_the_kernel_counts():
    """Where ranks use each other's shards as they lie no rank has a unit whole, and the limit is the same."""
    width, num_layers, world_size = 1536, 8, 2
    layer = (width * width + width) * 4

    def program(group):
        torch.set_num_threads(1)
        torch.nn.Linear(9, 9)(torch.ones(1, 9)).sum().backward()
        group.barrier()
        before = resident_bytes()
        fsdp = FSDP(meta_model(width, num_layers), group, wrap=torch.nn.Linear)
        assert all(flat.uses_shared_view for unit in fsdp._units for flat in unit.flats)
        optimizer = torch.optim.Adam(fsdp.parameters(), foreach=False)
        for _ in range(3):
            optimizer.zero_grad()
            fsdp(torch.ones(1, width)).sum().backward()
            optimizer.step()
        group.barrier()
        held = resident_bytes() - before
        group.barrier()
        return held

    limit = 1.05 * (4 * num_layers * layer / world_size + 2 * layer)
    for held in run_ranks(program, world_size, backend="native"):
        assert held <= limit
