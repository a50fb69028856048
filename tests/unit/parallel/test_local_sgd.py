"""LocalSGD and DiLoCo: ranks that average parameters every few steps."""

import contextlib
import copy
import pickle

import pytest
import torch
from ddp_ranks import assert_same_bits, caught, mlp, seeded

from ferrodist import DDP, CollectiveMismatchError, DiLoCo, LocalSGD, SimulatedBackend, UnsupportedOpError
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
    """Ranks train on their own between averages, which are the means of their parameters."""
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
            for index, parameters in enumerate(zip(*sets, strict=True)):
                gradient = outer[index] - (parameters[0] + parameters[1]) / 2
                velocity[index] = gradient.clone() if velocity[index] is None else 0.9 * velocity[index] + gradient
                outer[index] -= 0.7 * (gradient + 0.9 * velocity[index])
                for parameter in parameters:
                    parameter.copy_(outer[index])

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
    """Construction broadcasts rank 0's values, and names a different module."""

    def make(group):
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.weight, group.rank)
        LocalSGD(model, group, period=1)
        return model.weight.sum().item(), caught(lambda: DiLoCo(torch.nn.Linear(2, 2 + group.rank), group))

    for total, error in run_ranks(make, 2):
        assert total == 0.0
        assert type(error) is CollectiveMismatchError
        assert "gave DiLoCo different modules" in str(error)
        assert "DDP" not in str(error)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda model, rank: LocalSGD(model, period=2 + 2 * rank), "LocalSGD(period=4, start_step=0) in step 0"),
        (lambda model, rank: LocalSGD(model, period=2, start_step=rank), "LocalSGD(period=2, start_step=1)"),
        (lambda model, rank: (DiLoCo if rank else LocalSGD)(model, period=2), "DiLoCo(period=2, start_step=0)"),
    ],
)
def test_settings_are_compared(make, text):
    """Ranks that would average at different steps get an error at construction."""
    errors = run_ranks(lambda group: caught(lambda: make(torch.nn.Linear(1, 1), group.rank)), 2)
    for error in errors:
        assert type(error) is CollectiveMismatchError
        assert f"rank 1 has {text}" in str(error)
        assert error.ranks == (1,)


def two_weights(first=0.0, second=0.0):
    model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
    fill(model, first, second)
    return model


def fill(model, *values):
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.fill_(value)


def values_of(model):
    return [parameter.item() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_replaced_parameters_are_refused(kind):
    """Parameters that were replaced, or changed their dtype, would not be averaged."""

    def attempt(group):
        model = torch.nn.Linear(2, 1)
        averaging = kind(model, group, period=1)
        averaging.step()
        model.double()
        changed = caught(averaging.step)
        model.float().load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        return changed, caught(averaging.step), caught(averaging.reset)

    for changed, *replaced in run_ranks(attempt, 2):
        assert type(changed) is UnsupportedOpError
        assert "parameter 'weight' is torch.float64" in str(changed)
        for error in replaced:
            assert type(error) is UnsupportedOpError
            assert "parameter 'weight' of Linear was replaced by another" in str(error)
            assert f"make a new {kind.__name__}" in str(error)


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_unfrozen_parameters_are_averaged(kind):
    """A parameter that is unfrozen takes the mean at first, and then takes part like the others."""

    def train(group):
        model = two_weights()
        model[0].requires_grad_(False)
        averaging = kind(model, group, period=1)
        fill(model, 0.0, 0.0)
        averaging.step()
        model[0].requires_grad_(True)
        fill(model, 1.0 + group.rank, 0.0)
        averaging.step()
        first = values_of(model)
        fill(model, 2.0 + group.rank, 0.0)
        averaging.step()
        return first, values_of(model)

    # DiLoCo's first outer step is 0.7 * 1.9 of the change, which is 1.
    then = 2.5 if kind is LocalSGD else 1.5 + 0.7 * 1.9
    for first, second in run_ranks(train, 2):
        assert first == [1.5, 0.0]
        assert second == pytest.approx([then, 0.0])


def test_frozen_parameters_stop_moving():
    """A parameter that is frozen after ranks trained it is averaged once; outer momentum does not move it."""

    def train(group):
        model = two_weights()
        averaging = DiLoCo(model, group, period=1)
        fill(model, 1.0, 1.0)
        averaging.step()
        moved = values_of(model)
        fill(model, group.rank, moved[1])
        model[0].requires_grad_(False)
        found = []
        for _ in range(3):
            averaging.step()
            found.append(model[0].weight.item())
        outer = averaging.outer_optimizer.param_groups[0]["params"]
        return moved, found, [parameter.grad for parameter in outer]

    for moved, found, gradients in run_ranks(train, 2):
        assert moved[0] > 1.0
        assert found == [0.5] * 3
        assert gradients == [None, None]


def test_ranks_that_freeze_differently_are_named():
    """Equal shapes don't hide that ranks average different parameters."""

    def attempt(group):
        model = two_weights()
        averaging = LocalSGD(model, group, period=1)
        model[group.rank].requires_grad_(False)
        return caught(averaging.step)

    for error in run_ranks(attempt, 2):
        assert type(error) is CollectiveMismatchError
        assert "rank 1 has parameter '0.weight'" in str(error)


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_models_do_not_mix(kind):
    """Ranks that step two models in another order raise, and keep their own parameters."""

    def attempt(group):
        models = [two_weights(), two_weights()]
        both = [kind(model, group, period=1) for model in models]
        fill(models[0], 1.0, 1.0)
        error = caught(both[group.rank].step)
        return error, values_of(models[0])

    for error, values in run_ranks(attempt, 2):
        assert type(error) is CollectiveMismatchError
        assert f"averaged bucket 0 of {kind.__name__} model 0 (Sequential)" in str(error)
        assert "backward passes of the ranks" not in str(error)
        assert f"averaged bucket 0 of {kind.__name__} model 1 (Sequential)" in str(error)
        assert values == [1.0, 1.0]


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_reset_takes_new_values(kind):
    """After reset the ranks continue from rank 0's loaded values."""

    def train(group):
        model = two_weights()
        averaging = kind(model, group, period=1)
        fill(model, 100.0 + group.rank, 5.0)
        averaging.reset()
        start = values_of(model)
        averaging.step()
        return start, values_of(model)

    assert run_ranks(train, 2) == [([100.0, 5.0], [100.0, 5.0])] * 2


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_training_resumes_from_a_state(kind):
    """Training continues exactly, also in the middle of a period."""
    start = seeded(mlp)

    def train(group, stop):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        averaging = kind(model, group, period=3)
        for step in range(9):
            if step == stop:
                own, state = copy.deepcopy((model.state_dict(), averaging.state_dict()))
                model = mlp().double()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
                averaging = kind(model, group, period=3)
                model.load_state_dict(own)
                averaging.load_state_dict(state)
            local_step(model, optimizer, group.rank, step)
            averaging.step()
        return model.state_dict()

    whole = run_ranks(train, 2, None)
    assert_same_bits([*whole, *run_ranks(train, 2, 5), *run_ranks(train, 2, 6)])


def test_a_state_of_fewer_parameters_loads():
    """A parameter that was frozen when the state was saved takes the mean at first."""

    def train(group):
        model = two_weights()
        model[0].requires_grad_(False)
        state = DiLoCo(model, group, period=1).state_dict()
        model[0].requires_grad_(True)
        averaging = DiLoCo(model, group, period=1)
        averaging.load_state_dict(state)
        fill(model, 1.0 + group.rank, 0.0)
        averaging.step()
        return values_of(model)

    assert run_ranks(train, 2) == [[1.5, 0.0]] * 2


def test_wrong_states_are_refused():
    """A state of another module, or of other steps on one rank, is named."""

    def attempt(group):
        averaging = DiLoCo(torch.nn.Linear(2, 2), group, period=2)
        other = DiLoCo(torch.nn.Linear(2, 3), group, period=2).state_dict()
        own = {**averaging.state_dict(), "num_steps": group.rank}
        return caught(lambda: averaging.load_state_dict(other)), caught(lambda: averaging.load_state_dict(own))

    for foreign, uneven in run_ranks(attempt, 2):
        assert type(foreign) is ValueError
        assert "parameter 'weight' of shape (3, 2), which Linear does not have" in str(foreign)
        assert type(uneven) is CollectiveMismatchError
        assert "in step 1 where rank 0 has DiLoCo(period=2, start_step=0) in step 0" in str(uneven)


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(act):
    """A copy would average another module, or one module twice."""
    averaging = LocalSGD(torch.nn.Linear(1, 1), SimulatedBackend.create_group(1)[0], period=1)
    with pytest.raises(TypeError, match=r"LocalSGD can't be copied or pickled.*state_dict\(\)"):
        act(averaging)


@pytest.mark.parametrize(
    ("kind", "options", "error", "text"),
    [
        (LocalSGD, {"period": 0}, ValueError, "period must be at least 1, not 0"),
        (LocalSGD, {"period": 2, "start_step": -1}, ValueError, "start_step must be at least 0"),
        (DiLoCo, {"period": 2.5}, TypeError, "period must be an integer, not 2.5"),
        (DiLoCo, {"outer_optimizer": lambda _: None}, TypeError, "returns a torch.optim.Optimizer, not NoneType"),
        (
            DiLoCo,
            {"outer_optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])},
            TypeError,
            "must be a function that makes an optimizer .* not SGD",
        ),
    ],
)
def test_wrong_arguments(kind, options, error, text):
    """Each is refused by name."""
    with pytest.raises(error, match=text):
        kind(torch.nn.Linear(1, 1), SimulatedBackend.create_group(1)[0], **options)


def test_a_state_that_is_refused_changes_nothing():
    """Number of steps and momenta stay when the ranks load different states, or the outer optimizer refuses one."""

    def load(group):
        averaging = DiLoCo(seeded(mlp), group, period=3)
        state = averaging.state_dict()
        other_step = caught(lambda: averaging.load_state_dict({**state, "num_steps": 5 + group.rank}))
        empty = {**state["outer_optimizer"], "param_groups": []}
        other_groups = caught(lambda: averaging.load_state_dict({**state, "num_steps": 5, "outer_optimizer": empty}))
        return type(other_step), type(other_groups), averaging.num_steps

    assert run_ranks(load, 2) == [(CollectiveMismatchError, ValueError, 0)] * 2


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_averages_in_inference_mode(kind):
    """What an average, a reset or a loaded state makes there serves later averages outside."""

    def program(group):
        averaging = kind(seeded(mlp), group, period=1)
        for act in (averaging.step, averaging.reset, lambda: averaging.load_state_dict(averaging.state_dict())):
            with torch.inference_mode():
                act()
            averaging.step()
        return averaging.num_steps

    assert run_ranks(program, 2) == [4, 4]


def test_ranks_that_froze_different_parameters_may_agree_again():
    """The step raises on all ranks, and the next one averages when all have frozen the same."""

    def program(group):
        model = seeded(mlp)
        averaging = LocalSGD(model, group, period=1)
        both = [next(model.parameters()), list(model.parameters())[-1]]
        both[group.rank].requires_grad_(False)
        error = caught(averaging.step)
        for parameter, is_trained in zip(both, (True, False), strict=True):
            parameter.requires_grad_(is_trained)
        return type(error), averaging.step()

    assert run_ranks(program, 2) == [(CollectiveMismatchError, True)] * 2
