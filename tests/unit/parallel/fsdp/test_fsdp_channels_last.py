"""Channels-last weights keep their memory format under FSDP, in training and in states."""

import copy

import pytest
import torch

from ferrodist import FSDP, CollectiveMismatchError, ShardingStrategy
from ferrodist.checkpoint import OptimizerState, load_distributed, save_distributed
from ferrodist.testing import run_ranks

FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}
CONVOLUTIONS = {2: torch.nn.Conv2d, 3: torch.nn.Conv3d}
STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD, ShardingStrategy.hybrid(2)]


class Net(torch.nn.Module):
    """Convolutions, of which one has kernels of one element, and a linear layer."""

    def __init__(self, num_dims=2):
        super().__init__()
        convolution = CONVOLUTIONS[num_dims]
        self.first, self.second = convolution(4, 6, 3), convolution(6, 5, 1)
        self.last = torch.nn.Linear(5, 3)

    def forward(self, inputs):
        return self.last(self.second(self.first(inputs).tanh()).flatten(2).mean(2))


def made(num_dims=2, *, is_last=True):
    torch.manual_seed(1)
    model = Net(num_dims)
    return model.to(memory_format=FORMATS[num_dims]) if is_last else model


def batch(num_dims=2):
    generator = torch.Generator().manual_seed(2)
    return torch.rand(4, 4, *[5] * num_dims, generator=generator)


def trained(model, inputs, optimizer=None, num_steps=2):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return optimizer


def check_equal(state, expected):
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)
        assert state[name].stride() == value.stride()


@pytest.mark.parametrize("num_dims", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_training_is_that_of_one_process(run, strategy, num_dims):
    """In forward weights keep their strides, and full states have the values and strides of one process."""
    model, inputs = made(num_dims), batch(num_dims)

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group, strategy=strategy, wrap=CONVOLUTIONS[num_dims])
        fsdp.module.first.register_forward_pre_hook(lambda layer, _: strides.append(layer.weight.stride()))
        strides = []
        optimizer = trained(fsdp, inputs)
        with fsdp.summon_full_params():
            summoned = fsdp.module.first.weight.stride()
        return fsdp.full_state_dict(), {*strides, summoned}, fsdp.full_optimizer_state_dict(optimizer)["state"]

    own = copy.deepcopy(model)
    optimizer = trained(own, inputs)
    expected = {name: optimizer.state[each]["exp_avg"] for name, each in own.named_parameters()}
    for state, strides, moments in run(program, 4):
        assert strides == {model.first.weight.stride()}
        check_equal(state, own.state_dict())
        check_equal({name: each["exp_avg"] for name, each in moments.items()}, expected)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_states_load_into_the_other_memory_format(tmp_path, strategy):
    """Full states and checkpoints load into models with the other memory format, sharded or not."""
    inputs = batch()
    own = made()
    trained(own, inputs, trained(own, inputs))
    models = {is_last: made(is_last=is_last) for is_last in (True, False)}

    def divided(group, *, is_last):
        fsdp = FSDP(copy.deepcopy(models[is_last]), group, strategy=strategy, wrap=torch.nn.Conv2d)
        return fsdp, torch.optim.AdamW(fsdp.parameters(), lr=0.1)

    def program(group):
        fsdp, optimizer = divided(group, is_last=True)
        trained(fsdp, inputs, optimizer)
        saved = {"model": fsdp, "optimizer": OptimizerState(fsdp, optimizer)}
        save_distributed(saved, tmp_path / "step", group=group)
        states = []
        for is_last in (True, False):
            for is_file in (True, False):
                other, its_optimizer = divided(group, is_last=is_last)
                if is_file:
                    into = {"model": other, "optimizer": OptimizerState(other, its_optimizer)}
                    load_distributed(tmp_path / "step", into, group=group)
                else:
                    other.load_full_state_dict(fsdp.full_state_dict())
                    whole = fsdp.full_optimizer_state_dict(optimizer)
                    other.load_full_optimizer_state_dict(its_optimizer, whole)
                trained(other, inputs, its_optimizer)
                states.append(other.full_state_dict())
        return states

    for states in run_ranks(program, 4):
        for state in states:
            for name, value in own.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def test_sharded_states_of_another_memory_format_are_refused():
    """A shard's elements have an order, and another model would mix them up."""

    def program(group):
        last, first = (FSDP(made(is_last=is_last), group) for is_last in (True, False))
        optimizers = [torch.optim.AdamW(each.parameters()) for each in (last, first)]
        last.load_sharded_state_dict(last.sharded_state_dict())
        with pytest.raises(ValueError, match=r"'first.weight'.*in another order than this model"):
            first.load_sharded_state_dict(last.sharded_state_dict())
        with pytest.raises(ValueError, match="in another order than this model"):
            last.load_sharded_optimizer_state_dict(optimizers[0], first.sharded_optimizer_state_dict(optimizers[1]))
        whole = [FSDP(made(is_last=is_last), group, strategy=ShardingStrategy.NO_SHARD) for is_last in (True, False)]
        whole[1].load_sharded_state_dict(whole[0].sharded_state_dict())
        assert torch.equal(whole[1].module.first.weight, whole[0].module.first.weight)

    run_ranks(program, 2)


def test_ranks_with_different_memory_formats():
    """They get an error that names the weight."""

    def program(group):
        with pytest.raises(CollectiveMismatchError, match=r"'first.weight'.*channels last"):
            FSDP(made(is_last=group.rank == 0), group)

    run_ranks(program, 2)


def test_models_on_the_meta_device():
    """Weights are allocated in their memory format."""

    def program(group):
        with torch.device("meta"):
            model = Net().to(memory_format=torch.channels_last)
        fsdp = FSDP(model, group, wrap=torch.nn.Conv2d)
        fsdp(batch())
        return fsdp.full_state_dict()["first.weight"].stride()

    assert run_ranks(program, 2) == [made().first.weight.stride()] * 2
