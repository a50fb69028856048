"""The load of experts, and the bias that balances it."""

import pytest
import torch

import ferrodist as fd


def test_the_bias_moves_against_the_load():
    """Experts with more than the average load get less of a bias, others more (Wang et al., 2024, algorithm 1)."""
    bias = torch.zeros(4)
    fd.update_expert_bias(bias, torch.tensor([5, 1, 3, 3]), rate=0.5)
    assert bias.tolist() == [-0.5, 0.5, 0.0, 0.0]
    with pytest.raises(ValueError, match="one number for each expert"):
        fd.update_expert_bias(bias, torch.ones(3))
    with pytest.raises(TypeError, match="bias must be float32 or float64"):
        fd.update_expert_bias(torch.zeros(4, dtype=torch.bfloat16), torch.ones(4))
    with pytest.raises(TypeError, match="counts must be real numbers"):
        fd.update_expert_bias(bias, torch.ones(4, dtype=torch.complex64))
    with pytest.raises(ValueError, match="rate"):
        fd.update_expert_bias(bias, torch.ones(4), rate=-1)


def test_a_bias_balances_a_router():
    """A router that prefers some experts spreads its tokens evenly after some updates of the bias."""
    torch.manual_seed(0)
    scores = torch.rand(512, 8) * torch.linspace(0.5, 1, 8)
    bias = torch.zeros(8)
    load = fd.ExpertLoad(8)
    imbalances = []
    for _ in range(200):
        load.reset()
        counts = torch.bincount(torch.topk(scores + bias, 2).indices.flatten(), minlength=8)
        load.record(counts, counts)
        imbalances.append(load.imbalance)
        fd.update_expert_bias(bias, load.counts, rate=0.01)
    assert imbalances[0] > 1.5
    assert imbalances[-1] < 1.15
