"""Experts that compute all tokens, as those of Llama 4, and experts that can't be sharded whole."""

import copy

import pytest
import torch
from torch import nn

import ferrodist as fd
from ferrodist import ExpertParallel, Replicate, Shard
from ferrodist.testing import run_ranks

WIDTH, INNER = 6, 5


class AllExperts(nn.Module):
    """Stacked experts that are called with the tokens for each of them, one after the other."""

    def __init__(self, num_experts):
        super().__init__()
        self.num_experts = num_experts
        self.up_proj = nn.Parameter(torch.randn(num_experts, WIDTH, INNER))
        self.down_proj = nn.Parameter(torch.randn(num_experts, INNER, WIDTH))

    def forward(self, hidden_states):
        tokens = hidden_states.view(self.up_proj.shape[0], -1, WIDTH)
        return torch.bmm(torch.bmm(tokens, self.up_proj).tanh(), self.down_proj).view(-1, WIDTH)


class Block(nn.Module):
    """A router, whose scores weight all tokens for each expert."""

    def __init__(self, num_experts=3):
        super().__init__()
        self.router = nn.Linear(WIDTH, num_experts)
        self.experts = AllExperts(num_experts)

    def forward(self, x):
        weights = self.router(x).sigmoid().t()
        tokens = x.repeat(len(weights), 1) * weights.reshape(-1, 1)
        return x + self.experts(tokens).view(len(weights), *x.shape).sum(0)


def mesh_of(group):
    return fd.DeviceMesh(group, (group.world_size,), ("expert",))


@pytest.mark.parametrize("size", [2, 3])
def test_experts_that_compute_all_tokens(size):
    """Each rank computes its experts: the results and gradients of one process, bit for bit or nearly so."""
    torch.manual_seed(0)
    model, x = Block().double(), torch.randn(4, WIDTH, dtype=torch.float64)
    alone = copy.deepcopy(model)
    expected = alone(x)
    expected.square().sum().backward()

    def program(group):
        sharded = fd.parallelize(copy.deepcopy(model), mesh_of(group), {"experts": ExpertParallel()})
        assert sharded.experts.up_proj.placements == (Shard(0),)
        assert sharded.router.weight.placements == (Replicate(),)
        result = sharded(x)
        torch.testing.assert_close(result, expected)
        result.square().sum().backward()
        for one, other in zip(sharded.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)

    run_ranks(program, size)


class Wrapped(nn.Module):
    """Experts whose parameters are those of a module inside."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 4 * INNER)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise NotImplementedError


class WithIdentities(Wrapped):
    """Experts of which the last ones have no parameters."""

    def __init__(self):
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(5, WIDTH, INNER))
        self.down_proj = nn.Parameter(torch.randn(4, INNER, WIDTH))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Wrapped, r"no parameters of its own .* but in its modules, as 'inner.weight': leave it out of the plan"),
        (WithIdentities, r"different sizes of dim 0, .* if the last experts have no parameters, use Tensor"),
        (lambda: nn.Linear(WIDTH, 4), r"whose forward takes hidden_states, top_k_index, top_k_weights, and '0'"),
    ],
)
def test_what_is_refused_says_what_to_do(kind, text):
    def program(group):
        with pytest.raises((TypeError, ValueError), match=text):
            fd.parallelize(nn.Sequential(kind()), mesh_of(group), {"0": ExpertParallel()})

    run_ranks(program, 1)


def test_own_tokens_need_a_routing():
    def program(group):
        with pytest.raises(TypeError, match=r"'experts' .* computes all experts for all tokens, .* use parallelize"):
            fd.parallelize_experts(Block(), mesh_of(group), {"experts": ExpertParallel()})
        with pytest.raises(TypeError, match="takes hidden_states, top_k_index"):
            fd.parallelize(Block(), mesh_of(group), {"experts": ExpertParallel(capacity_factor=1.0)})
        with pytest.raises(ValueError, match="has no parameter 'typo'"):
            fd.parallelize(Block(), mesh_of(group), {"experts": ExpertParallel(parameters={"typo": fd.Replicate()})})

    run_ranks(program, 1)
