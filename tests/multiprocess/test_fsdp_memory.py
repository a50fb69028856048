"""What a rank of an FSDP holds in memory."""

import gc

import pytest
import torch

from ferrodist import FSDP
from ferrodist.testing import run_ranks

WIDTH, NUM_LAYERS = 128, 6


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


def program(group):
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    before = held_bytes()
    fsdp = FSDP(model, group, wrap=torch.nn.Linear)
    optimizer = torch.optim.Adam(fsdp.parameters(), foreach=False)
    peaks = []
    for unit in fsdp._units[1:]:
        unit.module.register_forward_pre_hook(lambda *_: peaks.append(held_bytes() - before))
    for _ in range(3):
        peaks.clear()
        optimizer.zero_grad()
        output = fsdp(torch.ones(1, WIDTH))
        output.sum().backward()
        optimizer.step()
    del output
    return held_bytes() - before, max(peaks)


@pytest.mark.parametrize("world_size", [2, 4])
def test_memory_of_a_rank(world_size):
    """Between steps and in forward: parameters, gradients and Adam's state divided by the ranks, and two units."""
    layer = (WIDTH * WIDTH + WIDTH) * 4
    model = NUM_LAYERS * layer
    for steady, forward in run_ranks(program, world_size, backend="native"):
        assert steady <= 1.05 * (4 * model / world_size + 2 * layer)
        # In forward there are no gradients, but two units and the rows that gradients will be averaged in.
        assert forward <= 1.05 * (3 * model / world_size + 3 * layer)
