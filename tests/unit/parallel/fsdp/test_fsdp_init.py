"""Construction of an FSDP, and the modules that it refuses."""

import copy
import gc
import warnings
import weakref

import pytest
import torch

from ferrodist import (
    DDP,
    FSDP,
    CollectiveMismatchError,
    DiLoCo,
    LocalSGD,
    ShardingStrategy,
    SimulatedBackend,
    UnsupportedOpError,
    by_size,
)
from ferrodist.testing import run_ranks
from ferrodist.torch_private.autograd import has_accumulate_hooks


def test_buffers_on_meta_of_modules_without_parameters(run):
    """Batch norm without weights has its buffers' values like any other module."""

    def program(group):
        with torch.device("meta"):
            module = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6, affine=False))
        fsdp = FSDP(module, group, wrap=torch.nn.Linear)
        fsdp(torch.rand(4, 6)).sum().backward()
        return fsdp.full_state_dict()

    for state in run(program, 2):
        assert all(value.device.type == "cpu" and value.isfinite().all() for value in state.values())


class Masked(torch.nn.Linear):
    """A buffer whose elements are one."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("mask", torch.ones(1).expand(4))


def wait_until_gone(reference):
    """Collect until it is; while one thread collects, another's request is ignored."""
    while reference() is not None:
        gc.collect()


def is_untouched(module, shapes):
    return [tuple(parameter.shape) for parameter in module.parameters()] == shapes


@pytest.mark.filterwarnings("ignore:.*nested tensor.*")
def test_buffers_that_cannot_be_written_are_refused():
    """By name, on every rank, while the module stays unchanged."""

    def program(group):
        module = Masked()
        with pytest.raises(UnsupportedOpError, match=r"buffer 'mask' has elements that share memory.*clone"):
            FSDP(module, group)
        assert is_untouched(module, [(6, 6), (6,)])
        module.mask = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        with pytest.raises(UnsupportedOpError, match=r"buffer 'mask'.*is a nested tensor"):
            FSDP(module, group)
        assert is_untouched(module, [(6, 6), (6,)])

    run_ranks(program, 2)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused(register):
    """They would never be called; without them the module is accepted."""

    def program(group):
        module = torch.nn.Linear(6, 6)
        handle = getattr(module.bias, register)(lambda _: None)
        with pytest.raises(UnsupportedOpError, match="'bias' has hooks"):
            FSDP(module, group)
        assert is_untouched(module, [(6, 6), (6,)])
        handle.remove()
        FSDP(module, group)

    run_ranks(program, 2)


@pytest.mark.parametrize(
    "wrap",
    [DDP, lambda module, group: LocalSGD(module, group, period=2), DiLoCo],
    ids=["DDP", "LocalSGD", "DiLoCo"],
)
def test_data_parallel_wrappers_refuse_an_fsdp(wrap, run):
    """Also its module, with its shards and with full parameters; the shards stay."""

    def program(group):
        fsdp = FSDP(torch.nn.Linear(16, 16), group, reshard_after_forward=False)
        before = fsdp.full_state_dict()
        for _ in range(2):
            for module in (fsdp, fsdp.module):
                with pytest.raises(UnsupportedOpError, match=r"weight' belongs to an FSDP"):
                    wrap(module, group)
            fsdp(torch.rand(2, 16))
        after = fsdp.full_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)

    run(program, 2)


def test_fsdp_refuses_a_ddp_until_it_is_gone():
    """Its hooks are on the parameters, and go when it is collected."""

    def program(group):
        module = torch.nn.Linear(6, 6)
        ddp = DDP(module, group)
        for wrapped in (ddp, module):
            with pytest.raises(UnsupportedOpError, match=r"weight' has hooks.*DDP"):
                FSDP(wrapped, group)
        assert is_untouched(module, [(6, 6), (6,)])
        del ddp, wrapped
        while any(map(has_accumulate_hooks, module.parameters())):  # a finalizer removes them, maybe in another thread
            gc.collect()
        FSDP(module, group)

    run_ranks(program, 2)


def test_parameters_of_another_fsdp_are_refused():
    """By name; also after the FSDP is collected, since they are still shards."""

    def program(group):
        one, other = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        other.weight = one.weight
        fsdp = FSDP(one, group)
        with pytest.raises(UnsupportedOpError, match=r"'weight' belongs to an FSDP.*anew"):
            FSDP(other, group)
        gone = weakref.ref(fsdp)
        del fsdp
        wait_until_gone(gone)
        with pytest.raises(UnsupportedOpError, match=r"'weight' belongs to an FSDP.*anew"):
            FSDP(other, group)

    run_ranks(program, 2)


class Experts(torch.nn.Module):
    """Layers of one size, of which each call uses one."""

    def __init__(self, number):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6, bias=False) for _ in range(number))

    def forward(self, inputs, which):
        return self.layers[which](inputs)


@pytest.mark.parametrize("others", [31, 32, 38, 39])
@pytest.mark.parametrize("one", [0, 30, 35])
def test_many_units_of_one_size_are_told_apart(run, one, others):
    """Ranks that evaluate different ones raise, however many there are."""

    def program(group):
        model = FSDP(Experts(40), group, wrap=torch.nn.Linear, forward_prefetch=0)
        with torch.no_grad():
            for which in (0, 31, 39):
                model(torch.rand(2, 6), which)
            with pytest.raises(CollectiveMismatchError, match="same order"):
                model(torch.rand(2, 6), (one, others)[group.rank])

    run(program, 2)


def sizes(group):
    """What a model's rows and tokens take, after many models that are gone."""
    found = []
    for _ in range(5):
        model = FSDP(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)), group, wrap=torch.nn.Linear)
        layouts = [flat.layout for unit in model._units for flat in unit.flats]
        found.append([(layout.row_size, layout.index, layout.dim) for layout in layouts])
        gone = weakref.ref(layouts[0])
        del model, layouts
        wait_until_gone(gone)
    return found


def test_ids_of_collected_models_are_released():
    """So the rows of the last of many models are as small as those of the first."""
    for found in run_ranks(sizes, 2):
        assert all(each == found[0] for each in found)


def test_ids_stay_while_a_rank_has_the_model():
    """Ranks release the ids that all have released, so that they agree."""

    def program(group):
        made = []
        for _ in range(3):
            model = FSDP(torch.nn.Linear(6, 6), group)
            if group.rank == 0:
                made.append(model)
            (flat,) = model._units[0].flats
            number, gone = flat.layout.index, weakref.ref(flat.layout)
            del model, flat
            if group.rank:
                wait_until_gone(gone)
        return number

    assert run_ranks(program, 2) == [2, 2]


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD], ids=["full", "none"])
@pytest.mark.parametrize("wrap", [torch.nn.Linear, by_size(20)], ids=["class", "size"])
def test_the_last_layer_of_attention_is_not_a_unit(run, wrap, strategy):
    """Attention uses its weight without calling it; its gradients are averaged like others."""
    model = torch.nn.MultiheadAttention(6, 2)
    batches = torch.rand(2, 3, 4, 6)

    def gradients(module, each):
        module(each, each, each)[0].pow(2).mean().backward()

    own = copy.deepcopy(model)
    for each in batches:
        gradients(own, each)
    step = torch.optim.SGD(own.parameters(), lr=0.5)
    step.step()

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group, wrap=wrap, strategy=strategy)
        gradients(fsdp, batches[group.rank])
        torch.optim.SGD(fsdp.parameters(), lr=1.0).step()
        return fsdp.full_state_dict()

    for state in run(program, 2):
        for name, value in own.state_dict().items():
            assert torch.allclose(state[name], value, atol=1e-6), name


def test_many_units_of_one_size_train(run):
    """As in one process, with prefetched units."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(6, 6) for _ in range(36)])
    inputs = torch.rand(4, 6)

    def train(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            module(inputs).pow(2).mean().backward()
            optimizer.step()
        return module

    expected = train(copy.deepcopy(model)).state_dict()

    def program(group):
        fsdp = FSDP(copy.deepcopy(model), group, wrap=torch.nn.Linear, forward_prefetch=3, backward_prefetch=3)
        return train(fsdp).full_state_dict()

    for state in run(program, 2):
        assert all(torch.allclose(state[name], expected[name], atol=1e-6) for name in expected)


@pytest.mark.parametrize(
    "wrap", [torch.nn.Conv2d, (torch.nn.Conv2d, torch.nn.LSTM), lambda *_: False, torch.nn.ModuleList]
)
def test_a_policy_that_chooses_nothing_warns(wrap):
    """A misspelt class would leave the model unsharded in forward."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ModuleList([torch.nn.Linear(2, 2)]))
    group = SimulatedBackend.create_group(1)[0]
    with pytest.warns(UserWarning, match=r"wrap= chose no module of Sequential") as caught:
        FSDP(model, group, wrap=wrap)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("wrap", [None, torch.nn.Sequential, by_size(10**6), (torch.nn.Conv2d, torch.nn.Linear)])
def test_a_policy_that_chooses_something_does_not_warn(wrap):
    """A policy that chooses the model itself, some modules, or is for larger models is right."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FSDP(torch.nn.Sequential(torch.nn.Linear(2, 2)), SimulatedBackend.create_group(1)[0], wrap=wrap)
