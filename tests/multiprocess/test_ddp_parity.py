"""DDP beside torch's own, in processes."""

import copy

import pytest
import torch
import torch.distributed

from ferrodist import DDP
from ferrodist.testing import run_ranks

NUM_STEPS = 20


def train(model, parameters, rank):
    optimizer, losses = torch.optim.SGD(parameters, lr=0.05, momentum=0.9), []
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        loss = model(torch.randn(4, 6, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("backend", ["tcp", "native"])
def test_training_is_that_of_torch(tmp_path, backend):
    """Twenty steps end with the weights and losses of torch's DistributedDataParallel over gloo, to rounding."""
    torch.manual_seed(1)
    start = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 4))

    def compare(group):
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/meet", rank=group.rank, world_size=group.world_size
        )
        try:
            theirs = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(start))
            expected = train(theirs, list(theirs.parameters()), group.rank)
        finally:
            torch.distributed.destroy_process_group()
        ours = DDP(copy.deepcopy(start), group)
        return expected, train(ours, list(ours.parameters()), group.rank)

    for (losses, weights), (own_losses, own_weights) in run_ranks(compare, 2, backend=backend):
        torch.testing.assert_close(own_losses, losses, rtol=1e-5, atol=1e-6)
        for weight, own in zip(weights, own_weights, strict=True):
            torch.testing.assert_close(own, weight, rtol=1e-5, atol=1e-6)
