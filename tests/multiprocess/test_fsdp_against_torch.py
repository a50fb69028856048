"""FSDP and torch's own compute the same from the same batches."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from ferrodist import FSDP
from ferrodist.testing import run_ranks


class Tied(torch.nn.Module):
    """Units of several shapes, and embeddings that are used twice."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3))
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).flatten(0, 1).clone()  # torch's warns of views


def train(model, group, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for tokens in steps:
        own = tokens.chunk(group.world_size)[group.rank]
        optimizer.zero_grad()
        functional.cross_entropy(model(own), own.flatten().roll(1)).backward()
        optimizer.step()


def with_torch(model, group, store, steps):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=group.rank, world_size=group.world_size)
    try:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        train(model, group, steps)
        return {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3])
def test_training_equals_torch_fsdp2(world_size, tmp_path):
    """The same model on gloo with torch's fully_shard ends with the same weights, to rounding."""
    torch.manual_seed(1)
    model = Tied()
    steps = [torch.randint(11, (6, 5)) for _ in range(20)]

    def program(group):
        expected = with_torch(copy.deepcopy(model), group, tmp_path / "store", steps)
        fsdp = FSDP(copy.deepcopy(model), group, wrap=torch.nn.Sequential)
        train(fsdp, group, steps)
        state = fsdp.full_state_dict()
        assert state.keys() == expected.keys()
        return max(float((state[name] - expected[name]).norm() / expected[name].norm()) for name in expected)

    for difference in run_ranks(program, world_size, backend="native"):
        assert difference < 1e-6
