"""FSDP's state dicts: full ones are those of one process, sharded ones load again, and wrong ones change nothing."""

import copy
import io

import pytest
import torch
from torch.nn import functional

from ferrodist import FSDP, ShardingStrategy
from ferrodist.testing import run_ranks

STRATEGIES = {
    "full": ShardingStrategy.FULL_SHARD,
    "none": ShardingStrategy.NO_SHARD,
    "hybrid": ShardingStrategy.hybrid(2),
}


class Tied(torch.nn.Module):
    """Tied weights, batch norm buffers, a scalar and a parameter without elements."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 5)
        self.norm = torch.nn.BatchNorm1d(5)
        self.second = torch.nn.Linear(5, 6, bias=False)
        self.last = torch.nn.Linear(5, 6)
        self.last.weight = self.second.weight
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.nothing = torch.nn.Parameter(torch.empty(0, 3))

    def forward(self, inputs):
        hidden = self.norm(self.first(inputs))
        return self.last(hidden) * self.scale + self.second(hidden) + self.nothing.sum()


def seeded():
    torch.manual_seed(1)
    return Tied()


def step(model, optimizer):
    inputs = torch.rand(8, 6, generator=torch.Generator().manual_seed(3))
    optimizer.zero_grad()
    functional.mse_loss(model(inputs), inputs).backward()
    optimizer.step()


def through_file(state):
    """The state as it comes back from a file, without unpickling."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_full_state_is_that_of_one_process(run, strategy):
    """Names, shapes and values of the module's own state dict, tied names too."""
    model = seeded()
    expected = {name: value.clone() for name, value in model.state_dict().items()}

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group, strategy=STRATEGIES[strategy], wrap=torch.nn.Linear)
        return fsdp.full_state_dict(), fsdp.full_state_dict(rank0_only=True)

    for rank, (state, only_first) in enumerate(run(program, 4)):
        assert same(state, expected)
        assert same(only_first, expected if rank == 0 else {})


@pytest.mark.parametrize("has_all", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_full_state_comes_back(run, strategy, has_all):
    """Loaded on all ranks, whether all of them have it or only rank 0; a state that lacks a name changes nothing."""
    model, other = seeded(), seeded()
    with torch.no_grad():
        for value in other.state_dict().values():
            value.add_(1)
    expected = other.state_dict()

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group, strategy=STRATEGIES[strategy], wrap=torch.nn.Linear)
        before = fsdp.full_state_dict()
        for wrong, message in [
            ({name: value for name, value in expected.items() if name != "scale"}, "lacks 'scale'"),
            ({**expected, "more": torch.ones(1)}, "has 'more'"),
            ({**expected, "scale": torch.ones(3)}, "'scale' has shape"),
        ]:
            with pytest.raises(ValueError, match=f"rank 0.*{message}.*Nothing was loaded"):
                fsdp.load_full_state_dict(wrong if group.rank == 0 else expected)
        assert same(fsdp.full_state_dict(), before)
        fsdp.load_full_state_dict(expected if has_all or group.rank == 0 else None)
        return fsdp.full_state_dict()

    for state in run(program, 4):
        assert same(state, expected)


def test_sharded_states_come_back(run):
    """Model and optimizer continue exactly, from this rank's shard alone."""
    model = seeded()

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group, wrap=torch.nn.Linear)
        optimizer = adam(fsdp)
        step(fsdp, optimizer)
        states = through_file([fsdp.sharded_state_dict(), fsdp.sharded_optimizer_state_dict(optimizer)])
        step(fsdp, optimizer)
        expected = fsdp.full_state_dict()
        fsdp = FSDP(copy.deepcopy(model), group, wrap=torch.nn.Linear)
        optimizer = adam(fsdp)
        fsdp.load_sharded_state_dict(states[0])
        fsdp.load_sharded_optimizer_state_dict(optimizer, states[1])
        step(fsdp, optimizer)
        assert same(fsdp.full_state_dict(), expected)

    run(program, 3)


def test_sharded_states_of_others_are_refused():
    """States of another rank, and of a model with other units."""
    model = seeded()

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group, wrap=torch.nn.Linear)
        optimizer = adam(fsdp)
        step(fsdp, optimizer)
        states = fsdp.sharded_state_dict(), fsdp.sharded_optimizer_state_dict(optimizer)
        for wrong in ({**states[0], "rank": 7}, {**states[0], "world_size": 7}, {}):
            with pytest.raises(ValueError, match=r"of rank 7|of 7|not a sharded"):
                fsdp.load_sharded_state_dict(wrong)
        with pytest.raises(ValueError, match="of rank 7"):
            fsdp.load_sharded_optimizer_state_dict(optimizer, {**states[1], "rank": 7})
        with pytest.raises(ValueError, match="not of this FSDP"):
            fsdp.sharded_optimizer_state_dict(adam(torch.nn.Linear(1, 1)))
        whole = FSDP(copy.deepcopy(model), group)
        with pytest.raises(ValueError, match="sharded in another way"):
            whole.load_sharded_state_dict(states[0])
        with pytest.raises(ValueError, match="sharded in another way"):
            whole.load_sharded_optimizer_state_dict(adam(whole), states[1])

    run_ranks(program, 3)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_full_optimizer_state_fits_any_number_of_ranks(strategy):
    """Saved by four ranks, it continues on one, and back on three."""
    model = seeded()

    def save(group):
        fsdp = FSDP(copy.deepcopy(model), group, strategy=STRATEGIES[strategy], wrap=torch.nn.Linear)
        optimizer = adam(fsdp)
        step(fsdp, optimizer)
        states = fsdp.full_state_dict(), fsdp.full_optimizer_state_dict(optimizer)
        step(fsdp, optimizer)
        return states, fsdp.full_state_dict()

    def load(group, states):
        fsdp = FSDP(copy.deepcopy(model), group, wrap=torch.nn.Linear)
        optimizer = adam(fsdp)
        fsdp.load_full_state_dict(states[0])
        fsdp.load_full_optimizer_state_dict(optimizer, states[1])
        step(fsdp, optimizer)
        return fsdp.full_state_dict()

    states, expected = run_ranks(save, 4)[0]
    states = through_file(states)
    assert states[1]["state"]["first.weight"]["exp_avg"].shape == (5, 6)
    for world_size in (1, 3):
        for state in run_ranks(load, world_size, states):
            for name in expected:
                assert torch.allclose(state[name], expected[name], atol=1e-6)


def change_and_fail(fsdp):
    with fsdp.summon_full_params():
        fsdp.module.first.weight.add_(1)
        raise KeyError


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_summoned_parameters(run, strategy):
    """Full inside the block; changes stay, except on request or if the block raises."""
    model = seeded()

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group, strategy=STRATEGIES[strategy], wrap=torch.nn.Linear)
        before = fsdp.full_state_dict()
        with torch.no_grad():
            with fsdp.summon_full_params(writeback=False):
                assert fsdp.module.first.weight.shape == (5, 6)
                fsdp.module.first.weight.add_(1)
            assert same(fsdp.full_state_dict(), before)
            with pytest.raises(KeyError):
                change_and_fail(fsdp)
            assert same(fsdp.full_state_dict(), before)
            with fsdp.summon_full_params():
                fsdp.module.first.weight.add_(1)
                fsdp.eval()
                fsdp(torch.ones(2, 6))
        after = fsdp.full_state_dict()
        assert torch.equal(after["first.weight"], before["first.weight"] + 1)
        assert torch.equal(after["second.weight"], before["second.weight"])

    run(program, 4)


def test_shards_are_updated_together_or_not_at_all(run):
    """update_shards takes one shard for each parameter; a wrong one changes none."""

    model = seeded()

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group, wrap=torch.nn.Linear)
        before = [shard.detach().clone() for shard in fsdp.parameters()]
        with pytest.raises(ValueError, match="elements"):
            fsdp.update_shards([*(shard + 1 for shard in before[:-1]), torch.ones(99)])
        with pytest.raises(ValueError, match="got 1 shard"):
            fsdp.update_shards(before[:1])
        with pytest.raises(TypeError, match=r"tensor of torch\.float32"):
            fsdp.update_shards([shard.double() for shard in before])
        assert all(torch.equal(shard, old) for shard, old in zip(fsdp.parameters(), before, strict=True))
        for wrong in (torch.ones(3), torch.ones(1, sum(shard.numel() for shard in before))):
            with pytest.raises(ValueError, match="elements in all"):
                fsdp.update_shards(wrong)
        fsdp.update_shards(torch.cat([shard.reshape(-1) + 0.5 for shard in before]))
        assert all(torch.equal(now, old + 0.5) for now, old in zip(fsdp.parameters(), before, strict=True))
        fsdp.update_shards([shard + 1 for shard in before])
        return fsdp.full_state_dict()["first.weight"]

    expected = run_ranks(lambda group: FSDP(copy.deepcopy(model), group).full_state_dict(), 1)[0]["first.weight"] + 1
    for value in run(program, 2):
        assert torch.equal(value, expected)


def test_replicas_take_the_values_of_the_first(run):
    """broadcast_updated_params makes replicas equal whose optimizers diverged."""

    model = seeded()

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group, strategy=ShardingStrategy.NO_SHARD)
        with torch.no_grad():
            for shard in fsdp.parameters():
                shard.add_(group.rank)
        fsdp.broadcast_updated_params()
        return fsdp.full_state_dict()

    first, second = run(program, 2)
    assert same(first, second)


def test_plain_state_dicts_are_refused():
    """A shard of the model is not silently saved as the model."""

    model = seeded()

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group)
        with pytest.raises(TypeError, match="full_state_dict"):
            fsdp.state_dict()
        with pytest.raises(TypeError, match="load_full_state_dict"):
            fsdp.load_state_dict({})
        with pytest.raises(TypeError, match="copied or pickled"):
            copy.deepcopy(fsdp)

    run_ranks(program, 1)


class Scaled(torch.nn.Module):
    """A layer and a parameter without dims, which may be all that is trained."""

    def __init__(self, *, freezes=False):
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.layer.requires_grad_(not freezes)

    def forward(self, inputs):
        return self.layer(inputs) * self.scale


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("kind", ["NAdam", "ASGD", "Adam", "Rprop", "Adagrad", "Adamax", "RAdam"])
def test_optimizer_state_of_parameters_without_dims(kind, freezes):
    """Momenta are sharded and step counts are not, between any numbers of ranks, though both may have no dims."""
    model = Scaled(freezes=freezes)

    def make(module):
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return getattr(torch.optim, kind)(trained)

    def save(group):
        fsdp = FSDP(copy.deepcopy(model), group)
        optimizer = make(fsdp)
        step(fsdp, optimizer)
        step(fsdp, optimizer)
        return fsdp.full_state_dict(), fsdp.full_optimizer_state_dict(optimizer)

    def load(group, states):
        fsdp = FSDP(copy.deepcopy(model), group)
        optimizer = make(fsdp)
        fsdp.load_full_state_dict(states[0])
        fsdp.load_full_optimizer_state_dict(optimizer, states[1])
        step(fsdp, optimizer)
        return fsdp.full_state_dict()

    own = copy.deepcopy(model)
    optimizer = make(own)
    for _ in range(3):
        step(own, optimizer)
    for before, after in [(1, 2), (2, 1), (3, 2)]:
        states = run_ranks(save, before)[0]
        for state in run_ranks(load, after, states):
            for name, value in own.state_dict().items():
                assert torch.allclose(state[name], value, atol=1e-5), (name, before, after)


def test_full_optimizer_states_that_do_not_fit_are_refused():
    """On every rank, even if one alone has it, and nothing is loaded."""

    def program(group):
        fsdp = FSDP(torch.nn.Linear(6, 6), group)
        optimizer = adam(fsdp)
        step(fsdp, optimizer)
        state = fsdp.full_optimizer_state_dict(optimizer)
        large = {
            name: {key: torch.ones(8, 8) if key == "exp_avg" else value for key, value in entries.items()}
            for name, entries in state["state"].items()
        }
        none = {name: {**entries, "exp_avg": None} for name, entries in state["state"].items()}
        for wrong, message in [
            ({**state, "state": large}, r"'exp_avg' of 'weight' has shape \(8, 8\) where the parameter has \(6, 6\)"),
            ({**state, "state": none}, "'exp_avg' of 'weight' is not a tensor"),
            ({**state, "state": {**state["state"], "other": {}}}, "state of 'other'"),
            ({**state, "state": {"weight": 3}}, "'weight' is not a dict"),
            ({**state, "divided": {}}, "sharded entries of 'weight'"),
            ({**state, "param_groups": []}, "0 groups"),
            ({"state": {}, "param_groups": state["param_groups"]}, "lacks 'divided'"),
            ({}, "lacks state"),
            ([], "lacks state"),
        ]:
            with pytest.raises(ValueError, match=f"rank 1.*{message}.*Nothing was loaded"):
                fsdp.load_full_optimizer_state_dict(optimizer, wrong if group.rank == 1 else state)
        after = fsdp.full_optimizer_state_dict(optimizer)
        assert all(same(after["state"][name], state["state"][name]) for name in state["state"])

    run_ranks(program, 2)


def test_broken_sharded_states_are_refused():
    """With the reason; nothing is loaded."""

    def program(group):
        fsdp = FSDP(seeded(), group)
        optimizer = adam(fsdp)
        step(fsdp, optimizer)
        model, state = fsdp.sharded_state_dict(), fsdp.sharded_optimizer_state_dict(optimizer)
        owner = {"rank": group.rank, "world_size": 2}
        without = {name: {**entry, "piece": None} for name, entry in model["parameters"].items()}
        for wrong, message in [
            (owner, "lacks parameters"),
            ([], "not a sharded model state"),
            ({**model, "buffers": 3}, "lacks buffers"),
            ({**model, "parameters": dict.fromkeys(model["parameters"])}, "lacks piece, start or shape"),
            ({**model, "parameters": without}, "has a piece in the state that is not a tensor"),
            ({**model, "buffers": dict.fromkeys(model["buffers"])}, "not a tensor of its shape"),
        ]:
            with pytest.raises(ValueError, match=message):
                fsdp.load_sharded_state_dict(wrong)
        for wrong, message in [(owner, "lacks state"), ({**state, "param_groups": None}, "lacks param_groups")]:
            with pytest.raises(ValueError, match=message):
                fsdp.load_sharded_optimizer_state_dict(optimizer, wrong)

    run_ranks(program, 2)


class Counting(torch.nn.Linear):
    """State of another kind than parameters and buffers."""

    def __init__(self, count):
        super().__init__(6, 6)
        self.count = count

    def get_extra_state(self):
        return self.count

    def set_extra_state(self, state):
        self.count = state


@pytest.mark.parametrize("has_all", [True, False])
@pytest.mark.parametrize("count", [7, torch.tensor(7)], ids=["number", "tensor"])
def test_extra_state_comes_back(run, count, has_all):
    """On all ranks, whether all have the state or rank 0 alone; from sharded states too."""

    def program(group):
        saved = FSDP(torch.nn.Sequential(Counting(count)), group)
        fsdp = FSDP(torch.nn.Sequential(Counting(0)), group)
        state = saved.full_state_dict()
        with pytest.raises(ValueError, match=r"lacks '0\._extra_state'"):
            fsdp.load_full_state_dict({name: value for name, value in state.items() if "extra" not in name})
        fsdp.load_full_state_dict(state if has_all or group.rank == 0 else None)
        other = FSDP(torch.nn.Sequential(Counting(0)), group)
        other.load_sharded_state_dict(saved.sharded_state_dict())
        return fsdp.module[0].count, other.module[0].count

    assert run(program, 2) == [(7, 7)] * 2


class Opaque(Counting):
    """State that is read by running code."""

    def get_extra_state(self):
        return Scaled()


def test_extra_state_that_cannot_be_sent_is_refused():
    """On all ranks, before anything is loaded; where all have the state it is loaded."""

    def program(group):
        fsdp = FSDP(Opaque(0), group)
        state = {name: value if "extra" in name else value + 1 for name, value in fsdp.full_state_dict().items()}
        with pytest.raises(ValueError, match="pass the state on all ranks"):
            fsdp.load_full_state_dict(state if group.rank == 0 else None)
        assert not torch.equal(fsdp.full_state_dict()["weight"], state["weight"])
        fsdp.load_full_state_dict(state)
        assert torch.equal(fsdp.full_state_dict()["weight"], state["weight"])
        assert fsdp.module.count is state["_extra_state"]

    run_ranks(program, 2)


def test_names_of_shards_are_those_of_the_states():
    """named_parameters and named_buffers have the names of full and sharded states, also inside other modules."""

    def names(group):
        fsdp = FSDP(seeded(), group, wrap=torch.nn.Linear)
        tensors = {*dict(fsdp.named_parameters(remove_duplicate=False)), *dict(fsdp.named_buffers())}
        inside = dict(torch.nn.ModuleDict({"model": fsdp}).named_parameters())
        assert set(inside) == {f"model.{name}" for name, _ in fsdp.named_parameters()}
        assert set(fsdp.sharded_state_dict()["parameters"]) == set(dict(fsdp.named_parameters()))
        assert all(fsdp.get_parameter(name) is shard for name, shard in fsdp.named_parameters())
        return tensors, set(fsdp.full_state_dict())

    for named, saved in run_ranks(names, 2):
        assert named == saved


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_repeated_prefetch_and_averaging_change_nothing(strategy):
    """Prefetching twice, and averaging gradients that were averaged or don't exist, change nothing."""

    def program(group):
        fsdp = FSDP(seeded(), group, strategy=STRATEGIES[strategy], wrap=torch.nn.Linear)
        fsdp.sync_gradients()
        fsdp.prefetch_forward_params()
        fsdp.prefetch_forward_params()
        fsdp(torch.ones(4, 6)).sum().backward()
        before = [shard.grad.clone() for shard in fsdp.parameters()]
        fsdp.sync_gradients()
        assert all(torch.equal(shard.grad, old) for shard, old in zip(fsdp.parameters(), before, strict=True))

    run_ranks(program, 2)


def test_a_small_parameter_may_be_on_one_rank():
    """Shards are cut at multiples of 16 elements."""

    def program(group):
        return [shard.numel() for shard in FSDP(torch.nn.Linear(4, 4), group).parameters()]

    assert run_ranks(program, 2) == [[16, 0], [0, 4]]
