"""LocalSGD and DiLoCo: ranks that agree every few steps."""

import contextlib
import copy

import pytest
import torch
from ddp_ranks import assert_same_bits, caught, mlp, seeded

from ferrodist import DDP, CollectiveMismatchError, DiLoCo, LocalSGD, SimulatedBackend
from ferrodist.testing import run_ranks


def local_step(model, optimizer, rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    optimizer.zero_grad()
    model(torch.randn(4, 6, generator=generator).double()).square().sum().backward()
    optimizer.step()


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def simulate(start, num_steps, period, agree):
    """The same in one process: a model for each of 2 ranks, and ``agree(models)`` every ``period`` steps."""
    models = [copy.deepcopy(start) for _ in range(2)]
    optimizers = [make_optimizer(model) for model in models]
    for step in range(num_steps):
        for rank in range(2):
            local_step(models[rank], optimizers[rank], rank, step)
        if (step + 1) % period == 0:
            agree([list(model.parameters()) for model in models])
    return [model.state_dict() for model in models]


def test_local_sgd_averages_every_few_steps():
    """Ranks train by themselves between averages, which are the means of their parameters."""
    start = seeded(mlp)

    def agree(sets):
        with torch.no_grad():
            for parameters in zip(*sets, strict=True):
                mean = (parameters[0] + parameters[1]) / 2
                for parameter in parameters:
                    parameter.copy_(mean)

    expected = simulate(start, 8, 3, agree)

    def train(group):
        model = copy.deepcopy(start)
        averaging, optimizer = LocalSGD(model, group, period=3), make_optimizer(model)
        averaged = []
        for step in range(8):
            local_step(model, optimizer, group.rank, step)
            averaged.append(averaging.step())
        return model.state_dict(), averaged

    results = run_ranks(train, 2)
    for rank, (state, averaged) in enumerate(results):
        assert averaged == [False, False, True, False, False, True, False, False]
        assert_same_bits([expected[rank], state])


def test_diloco_takes_outer_steps():
    """Every few steps the outer optimizer follows the mean of what the ranks changed, with Nesterov momentum."""
    start = seeded(mlp)
    outer = [parameter.detach().clone() for parameter in start.parameters()]
    velocity = [None] * len(outer)

    def agree(sets):
        with torch.no_grad():
            for place, parameters in enumerate(zip(*sets, strict=True)):
                gradient = outer[place] - (parameters[0] + parameters[1]) / 2
                velocity[place] = gradient.clone() if velocity[place] is None else 0.9 * velocity[place] + gradient
                outer[place] -= 0.7 * (gradient + 0.9 * velocity[place])
                for parameter in parameters:
                    parameter.copy_(outer[place])

    expected = simulate(start, 6, 2, agree)

    def train(group):
        model = copy.deepcopy(start)
        averaging, optimizer = DiLoCo(model, group, period=2), make_optimizer(model)
        for step in range(6):
            local_step(model, optimizer, group.rank, step)
            averaging.step()
        return model.state_dict()

    states = run_ranks(train, 2)
    assert_same_bits(states)
    for name, tensor in expected[0].items():
        torch.testing.assert_close(states[0][name], tensor, rtol=0, atol=1e-12)


def test_post_local_sgd_with_ddp():
    """Before start_step DDP averages gradients in every step; after it ranks differ until a period is over."""
    start = seeded(mlp)

    def train(group):
        ddp = DDP(copy.deepcopy(start), group)
        averaging = LocalSGD(ddp.module, group, period=2, start_step=2)
        optimizer = make_optimizer(ddp)
        weights = []
        for step in range(4):
            with ddp.no_sync() if averaging.is_local else contextlib.nullcontext():
                local_step(ddp, optimizer, group.rank, step)
            averaging.step()
            weights.append(ddp.module[0].weight.detach().clone())
        return weights

    first, second = run_ranks(train, 2)
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True, True, False, True]


def test_ranks_start_from_rank_0():
    """Making it gives all ranks rank 0's values, and names a module of another form."""

    def make(group):
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.weight, group.rank)
        LocalSGD(model, group, period=1)
        return model.weight.sum().item(), caught(lambda: DiLoCo(torch.nn.Linear(2, 2 + group.rank), group))

    for total, error in run_ranks(make, 2):
        assert total == 0.0
        assert type(error) is CollectiveMismatchError


@pytest.mark.parametrize(
    ("kind", "options", "error", "text"),
    [
        (LocalSGD, {"period": 0}, ValueError, "period must be at least 1, not 0"),
        (LocalSGD, {"period": 2, "start_step": -1}, ValueError, "start_step must be at least 0"),
        (DiLoCo, {"period": 2.5}, TypeError, "period must be an integer, not float"),
    ],
)
def test_wrong_arguments(kind, options, error, text):
    """Each is refused by name."""
    with pytest.raises(error, match=text):
        kind(torch.nn.Linear(1, 1), SimulatedBackend.create_group(1)[0], **options)
