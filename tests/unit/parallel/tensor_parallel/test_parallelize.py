"""Modules sharded by plans, and parallel layers, against the same layers in one process."""

import copy
import dataclasses
import warnings
from collections import Counter, defaultdict
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ferrodist as fd
from ferrodist import (
    ColumnParallel,
    ColumnParallelLinear,
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    RowParallel,
    RowParallelLinear,
    SequenceParallel,
    Shard,
    Style,
    VocabularyParallel,
)
from ferrodist.errors import CollectiveMismatchError, RankFailedError, UnsupportedOpError
from ferrodist.tensor.redistribute_plan import RedistributeKind
from ferrodist.testing import run_ranks

COLLECTIVES = {
    RedistributeKind.ALLREDUCE,
    RedistributeKind.ALL_GATHER,
    RedistributeKind.REDUCE_SCATTER,
    RedistributeKind.ALL_TO_ALL,
    RedistributeKind.EXCHANGE,
}


class Network(nn.Module):
    """Two layers to be sharded after one that is not."""

    def __init__(self, width=12, hidden=24):
        super().__init__()
        self.scale = nn.Linear(width, width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.scale(x))))


def seeded(make, seed=0):
    torch.manual_seed(seed)
    return make().double()


def mesh_of(group):
    return DeviceMesh(group, (group.world_size,), ("tp",))


def count_collectives(steps):
    return dict(Counter(step.kind for step in steps if step.kind in COLLECTIVES))


PLANS = {
    "replicated": {"up": ColumnParallel(), "down": RowParallel()},
    "sequence": {
        "scale": SequenceParallel(),
        "up": ColumnParallel(),
        "down": RowParallel(outputs=Shard(1)),
    },
    "overlapped": {
        "scale": SequenceParallel(),
        "up": ColumnParallel(chunks=2),
        "down": RowParallel(outputs=Shard(1)),
    },
    "nothing": {},
    "gathered": {"up": ColumnParallel(outputs=Replicate()), "*own": RowParallel()},
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("plan", PLANS)
def test_module_equals_the_unsharded_one(plan, size):
    """Outputs, and gradients of inputs and parameters; also of sizes that don't divide evenly."""
    model, x = seeded(partial(Network, 12, 20)), torch.randn(2, 8, 12, dtype=torch.float64)
    mine = x.clone().requires_grad_()
    expected = model(mine)
    grad = torch.randn_like(expected)
    expected.backward(grad)

    def program(group):
        sharded = fd.parallelize(copy.deepcopy(model), mesh_of(group), PLANS[plan])
        sharded.zero_grad()
        its = x.clone().requires_grad_()
        got = sharded(its)
        assert type(got) is torch.Tensor
        torch.testing.assert_close(got, expected)
        got.backward(grad)
        torch.testing.assert_close(its.grad, mine.grad)
        for (name, parameter), other in zip(sharded.named_parameters(), model.parameters(), strict=True):
            assert isinstance(parameter, nn.Parameter)
            assert isinstance(parameter, DTensor)
            assert parameter.grad.placements == parameter.placements, name
            torch.testing.assert_close(parameter.grad.full_tensor(), other.grad)

    model_without = copy.deepcopy(model)
    model_without.zero_grad()
    run_ranks(program, size)


def test_placements_of_parameters():
    """A column's weight is sharded by outputs, a row's by inputs; a row's bias and all else is replicated."""

    def program(group):
        model = fd.parallelize(seeded(Network), mesh_of(group), PLANS["replicated"])
        return {name: (tuple(one.to_local().shape), one.placements[0]) for name, one in model.named_parameters()}

    assert run_ranks(program, 2)[1] == {
        "scale.weight": ((12, 12), Replicate()),
        "scale.bias": ((12,), Replicate()),
        "up.weight": ((12, 12), Shard(0)),
        "up.bias": ((12,), Shard(0)),
        "down.weight": ((12, 12), Shard(1)),
        "down.bias": ((12,), Replicate()),
    }


@pytest.mark.parametrize(
    ("plan", "forward", "backward"),
    [
        ("replicated", {RedistributeKind.ALLREDUCE: 1}, {RedistributeKind.ALLREDUCE: 1}),
        # The sequence is gathered at the end, as the output is replicated.
        (
            "sequence",
            {RedistributeKind.ALL_GATHER: 2, RedistributeKind.REDUCE_SCATTER: 1},
            # Gathered are the gradient of what rows give, and that of the input, once for each use; the gradients of
            # the first layer's weight and bias are folded.
            {RedistributeKind.ALL_GATHER: 3, RedistributeKind.REDUCE_SCATTER: 1, RedistributeKind.ALLREDUCE: 2},
        ),
    ],
)
def test_collectives_of_a_network(plan, forward, backward):
    """One allreduce each way; for a sharded sequence an all_gather and a reduce_scatter instead."""

    def program(group):
        model = fd.parallelize(seeded(Network), mesh_of(group), PLANS[plan])
        x = torch.ones(2, 4, 12, dtype=torch.float64, requires_grad=True)
        with fd.record_redistributions() as steps:
            out = model(x)
        there = count_collectives(steps)
        with fd.record_redistributions() as steps:
            out.sum().backward()
        return there, count_collectives(steps)

    assert run_ranks(program, 2) == [(forward, backward)] * 2


def test_training_equals_one_process():
    """Ten steps of AdamW, with gradients clipped by norm."""
    model = seeded(Network)
    batches = [torch.randn(4, 3, 12, dtype=torch.float64) for _ in range(10)]

    def train(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for batch in batches:
            optimizer.zero_grad()
            loss = (model(batch) - batch.flip(0)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def program(group):
        return train(fd.parallelize(copy.deepcopy(model), mesh_of(group), PLANS["replicated"]))

    got = run_ranks(program, 3)
    expected = train(copy.deepcopy(model))
    for losses in got:
        assert losses == pytest.approx(expected, rel=1e-12)
    assert expected[-1] < expected[0]


def test_tied_parameters_stay_tied():
    """A parameter of two modules is one parameter afterwards."""

    def make():
        model = Network(8, 8)
        model.scale.weight = model.up.weight
        return model

    def program(group):
        model = fd.parallelize(seeded(make), mesh_of(group), {"up": ColumnParallel()})
        assert model.scale.weight is model.up.weight
        assert model.scale.weight.placements == (Shard(0),)
        model(torch.ones(1, 2, 8, dtype=torch.float64)).sum().backward()
        with pytest.raises(ValueError, match=r"'up.weight' is also 'scale.weight'"):
            fd.parallelize(seeded(make), mesh_of(group), {"scale": RowParallel(), "up": ColumnParallel()})

    run_ranks(program, 2)


def test_values_are_those_of_rank_0():
    """Models that were initialized differently on each rank are the same afterwards."""

    def program(group):
        torch.manual_seed(0)  # of no consequence: threads share the generator
        model = Network()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(group.rank + 1)
        fd.parallelize(model, mesh_of(group), PLANS["replicated"])
        assert all((parameter.to_local() == 1).all() for parameter in model.parameters())

    run_ranks(program, 2)


@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        (
            {"upp": ColumnParallel()},
            ValueError,
            "the plan's path 'upp' matches no module; some are 'scale', 'up', 'down'",
        ),
        ({"up": ColumnParallel(), "u*": RowParallel()}, ValueError, "module 'up' has two styles, by 'up' and by 'u*'"),
        ({"": ColumnParallel()}, TypeError, "ColumnParallel shards an nn.Linear"),
        ({"up": ColumnParallel}, TypeError, "must be a style, as ColumnParallel()"),
        ([ColumnParallel()], TypeError, 'a plan is "auto" or a mapping'),
        ({3: ColumnParallel()}, TypeError, "the plan's key 3 must be a path of modules"),
        ({None: "colwise"}, TypeError, "the plan's key None must be a path of modules"),
        ({"up": Style(parameters=["weight"])}, TypeError, "module 'up' must have parameters= of placements by name"),
        ({"up": Style(parameters=None)}, TypeError, "module 'up' must have parameters= of placements by name"),
        ({"up": Style(parameters={"wait": Shard(0)})}, ValueError, "module 'up' has no parameter 'wait'"),
        ({"up": Style(parameters={"weight": 0})}, TypeError, "give parameter 'up.weight' a placement, as Shard(0)"),
        ({"up": Style(wanted=3)}, TypeError, "the style of module 'up' must have wanted= of placements"),
        ({"up": Style(outputs=["x"])}, TypeError, "the style of module 'up' must have outputs= of placements"),
    ],
)
def test_invalid_plan_changes_nothing(plan, error, message):
    """Errors come before anything is sent or changed."""
    mesh = mesh_of(fd.SimulatedBackend.create_group(1)[0])
    model = Network()
    with pytest.raises(error) as caught:
        fd.parallelize(model, mesh, plan)
    assert message in str(caught.value)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize(
    ("style", "options"),
    [
        (ColumnParallel, {"parameters": {"weight": Shard(1)}}),
        (RowParallel, {"wanted": Replicate()}),
        (VocabularyParallel, {"wanted": Shard(0)}),
        (SequenceParallel, {"outputs": Replicate()}),
    ],
)
def test_style_refuses_fields_that_it_would_ignore(style, options):
    with pytest.raises(TypeError, match=f"{style.__name__} sets {next(iter(options))} by itself: leave it out"):
        style(**options)


def test_a_mesh_has_one_axis():
    mesh = DeviceMesh(fd.SimulatedBackend.create_group(4)[0], (2, 2), ("dp", "tp"))
    with pytest.raises(ValueError, match=r"over one axis, and this mesh has 'dp', 'tp': pass a slice, as mesh\['tp'\]"):
        fd.parallelize(Network(), mesh, {})
    with pytest.raises(TypeError, match="given as a DeviceMesh"):
        fd.parallelize(Network(), mesh.parent, {})
    with pytest.raises(ValueError, match="over one axis"):
        ColumnParallelLinear(4, 4, mesh=mesh)


def test_module_is_parallelized_once():
    model = Network()
    mesh = mesh_of(fd.SimulatedBackend.create_group(1)[0])
    model(torch.ones(1, 1, 12)).sum().backward()
    with pytest.raises(ValueError, match="has a gradient, which would be lost"):
        fd.parallelize(model, mesh, {})
    model.zero_grad()
    fd.parallelize(model, mesh, {})
    with pytest.raises(ValueError, match="is distributed already"):
        fd.parallelize(model, mesh, {})


def test_layers_return_shards_for_plain_tensors():
    """As Megatron's layers do; initial values are those of the unsharded layers."""
    torch.manual_seed(3)
    up, down = nn.Linear(6, 10), nn.Linear(10, 6)
    x = torch.randn(4, 6)
    expected = down(torch.relu(up(x)))
    grad = torch.randn(4, 6)
    mine = x.clone().requires_grad_()
    down(torch.relu(up(mine))).backward(grad)

    def program(group):
        torch.manual_seed(3)
        layers = ColumnParallelLinear(6, 10, mesh=mesh_of(group)), RowParallelLinear(10, 6, mesh=mesh_of(group))
        hidden = layers[0](x)
        assert hidden.shape == (4, 5)
        assert type(hidden) is torch.Tensor
        its = x.clone().requires_grad_()
        got = layers[1](torch.relu(layers[0](its)))
        torch.testing.assert_close(got, expected)
        got.backward(grad)
        torch.testing.assert_close(its.grad, mine.grad)
        for layer, other in zip(layers, (up, down), strict=True):
            assert torch.equal(layer.weight.detach().full_tensor(), other.weight.detach())
            torch.testing.assert_close(layer.weight.grad.full_tensor(), other.weight.grad)

    run_ranks(program, 2, backend="native")


def test_layers_with_sharded_sequences():
    """Shards of a sequence go in and come out; gathering overlaps the product."""
    up, down = nn.Linear(6, 8), nn.Linear(8, 6)
    x, grad = torch.randn(2, 8, 6), torch.randn(2, 8, 6)
    mine = x.clone().requires_grad_()
    expected = down(torch.relu(up(mine)))
    expected.backward(grad)

    def program(group, chunks):
        mesh, here = mesh_of(group), slice(4 * group.rank, 4 * group.rank + 4)
        layers = (
            ColumnParallelLinear(6, 8, mesh=mesh, sequence_dim=1, chunks=chunks),
            RowParallelLinear(8, 6, mesh=mesh, sequence_dim=1),
        )
        for layer, other in zip(layers, (up, down), strict=True):
            for name in ("weight", "bias"):
                one = getattr(layer, name)
                value = fd.distribute(getattr(other, name).detach(), mesh, one.placements, src=None)
                one.detach().copy_(value)
        its = x[:, here].clone().requires_grad_()
        got = layers[1](torch.relu(layers[0](its)))
        torch.testing.assert_close(got, expected[:, here])
        got.backward(grad[:, here])
        torch.testing.assert_close(its.grad, mine.grad[:, here])
        torch.testing.assert_close(layers[0].weight.grad.full_tensor(), up.weight.grad)
        torch.testing.assert_close(layers[0].bias.grad.full_tensor(), up.bias.grad)
        torch.testing.assert_close(layers[1].bias.grad.full_tensor(), down.bias.grad)

    for chunks in (1, 2, 4, 3):  # three don't divide the shards evenly: then the sequence is gathered first
        run_ranks(program, 2, chunks)


def test_layers_return_dtensors_for_dtensors():
    def program(group):
        mesh = mesh_of(group)
        x = fd.distribute(torch.ones(3, 4), mesh, Replicate(), src=None)
        hidden = ColumnParallelLinear(4, 6, mesh=mesh)(x)
        assert hidden.placements == (Shard(1),)
        assert RowParallelLinear(6, 2, mesh=mesh)(hidden).placements == (Replicate(),)
        assert ColumnParallelLinear(4, 6, mesh=mesh, gather_output=True)(x).placements == (Replicate(),)

    run_ranks(program, 2)


def test_declared_inputs_and_outputs():
    """By position, by name, and for each of several outputs."""

    class Pair(nn.Module):
        def forward(self, a, *, b):
            return a, a.to_local().shape, b

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = Pair()

        def forward(self, x):
            return self.pair(x, b=x)

    def program(group):
        styles = {"pair": Style(wanted=(Shard(0),), outputs=(Shard(1), None, None))}
        model = fd.parallelize(Outer(), mesh_of(group), styles, gathers_outputs=False)
        a, shape, b = model(torch.ones(4, 2))
        assert (a.placements, shape, b.placements) == ((Shard(1),), (2, 2), (Replicate(),))
        styles = {"pair": Style(wanted={"b": Shard(1)})}
        model = fd.parallelize(Outer(), mesh_of(group), styles, gathers_outputs=False)
        a, shape, b = model(torch.ones(4, 2))
        assert (a.placements, shape, b.placements) == ((Replicate(),), (4, 2), (Shard(1),))

    run_ranks(program, 2)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda rank: {"up": ColumnParallel() if rank else RowParallel()}, "rank 1 has the style ColumnParallel"),
        (lambda rank: {"up": ColumnParallel(chunks=1 + rank)}, "chunks=2"),
        (lambda rank: {"up": ColumnParallel()} if rank else {}, "rank 1 has the style ColumnParallel"),
    ],
)
def test_ranks_with_different_plans(plan, message):
    """All of them raise, and nothing is mixed, though all shards have the same sizes."""

    def program(group):
        model = seeded(partial(Network, 12, 12))
        with pytest.raises(CollectiveMismatchError, match=message):
            fd.parallelize(model, mesh_of(group), plan(group.rank))
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        with pytest.raises(CollectiveMismatchError, match="gathers_outputs=False"):
            fd.parallelize(model, mesh_of(group), {}, gathers_outputs=group.rank == 0)
        with pytest.raises(CollectiveMismatchError, match="chunks=2"):
            ColumnParallelLinear(4, 4, mesh=mesh_of(group), chunks=1 + group.rank)
        fd.parallelize(model, mesh_of(group), PLANS["replicated"])

    run_ranks(program, 2)


def test_ranks_with_different_modules():
    def program(group):
        model = nn.Sequential(nn.Linear(4, 4), *[nn.Linear(2, 2)] * group.rank)
        with pytest.raises(CollectiveMismatchError, match=r"rank 1 has parameter '1.weight' of shape \(2, 2\)"):
            fd.parallelize(model, mesh_of(group), {"0": ColumnParallel()})

    run_ranks(program, 2)


def test_an_error_on_one_rank_is_raised_on_all():
    """The rank itself raises its own error."""

    def program(group):
        kind, text = (
            (ValueError, "^the plan's path") if group.rank else (UnsupportedOpError, "of rank 1: the plan's path")
        )
        with pytest.raises(kind, match=text):
            fd.parallelize(Network(), mesh_of(group), {"upp" if group.rank else "up": ColumnParallel()})

    run_ranks(program, 2)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"module": "a model"}, "takes a torch.nn.Module, not str"),
        ({"check": "yes"}, "check must be True or False"),
        ({"fallback": "none"}, 'fallback must be "replicate" or "error"'),
        ({"init": "zeros"}, "init must be a function"),
    ],
)
def test_a_wrong_argument_on_one_rank_is_an_error_on_all(option, message):
    """Else the other ranks would wait for it until their timeout."""

    def program(group):
        options = {"module": Network(), "plan": {"up": ColumnParallel()}, **(option if group.rank else {})}
        kind = (TypeError, ValueError) if group.rank else UnsupportedOpError
        with pytest.raises(kind, match=message):
            fd.parallelize(mesh=mesh_of(group), **options)

    run_ranks(program, 2, timeout=20)


def test_a_plan_that_cannot_be_read_on_one_rank_is_an_error_on_all():
    """Whatever its error: the plan may call the model's code."""

    class Unreadable(dict):
        def items(self):
            raise KeyError("on purpose")

        __iter__ = keys = values = items

        def __len__(self):
            return 1

    def program(group):
        plan = {"up": ColumnParallel()} if group.rank == 0 else Unreadable()
        with pytest.raises(KeyError if group.rank == 1 else UnsupportedOpError, match="on purpose"):
            fd.parallelize(Network(), mesh_of(group), plan)

    run_ranks(program, 2, timeout=20)


@pytest.mark.parametrize("where", ["all ranks", "rank 1"])
def test_an_initialiser_that_raises_leaves_the_model_as_it_was(where):
    """Parameters of modules before are plain and on the meta device again, also if another rank's raised."""

    def program(group):
        with torch.device("meta"):
            model = nn.Sequential(Network(), nn.LayerNorm(12))

        def init(module):
            if isinstance(module, nn.LayerNorm) and (group.rank == 1 or where == "all ranks"):
                raise KeyError("on purpose")
            module.reset_parameters()

        before = list(model.parameters())
        fails = group.rank == 1 or where == "all ranks"
        with pytest.raises(KeyError if fails else RankFailedError, match="on purpose"):
            fd.parallelize(model, mesh_of(group), {"0.up": ColumnParallel()}, init=init)
        assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
        assert not any("forward" in vars(module) for module in model.modules())
        if where == "all ranks":  # the group is still usable
            fd.parallelize(model, mesh_of(group), {"0.up": ColumnParallel()})

    run_ranks(program, 2, timeout=20)


@pytest.mark.parametrize(
    ("make", "style", "kind", "message"),
    [
        (lambda: nn.LazyLinear(4), Style(), ValueError, "parameter 'weight' has no shape yet: call the module once"),
        (lambda: nn.Linear(4, 5), ColumnParallel(blocks=3), ValueError, "5 is not 3 equal blocks"),
        (lambda: nn.LayerNorm(4), Style(parameters={"weight": Shard(1)}), ValueError, "it has no such dim"),
        (lambda: nn.LayerNorm(4), Style(parameters={"weight": Partial()}), ValueError, r"can't be Partial\(\)"),
        (
            lambda: nn.ParameterList([nn.Parameter(torch.empty(4, dtype=torch.float8_e8m0fnu))]),
            Style(),
            TypeError,
            "'0' is torch.float8_e8m0fnu, which no collective carries",
        ),
        (lambda: nn.Embedding(4, 2, sparse=True), VocabularyParallel(), ValueError, "can't shard .* which has sparse"),
        (lambda: nn.Embedding(4, 2, max_norm=1.0), VocabularyParallel(), ValueError, "which has max_norm"),
    ],
)
def test_parameters_that_cannot_be_sharded(make, style, kind, message):
    with pytest.raises(kind, match=message):
        fd.parallelize(make(), mesh_of(fd.SimulatedBackend.create_group(1)[0]), {"": style})


def test_a_buffer_that_is_a_parameter():
    """It is replicated as other buffers are."""
    model = nn.Linear(2, 2)
    model.register_buffer("scale", nn.Parameter(torch.ones(2)))
    fd.parallelize(model, mesh_of(fd.SimulatedBackend.create_group(1)[0]), {})
    assert model.scale.placements == (Replicate(),)


@pytest.mark.parametrize("option", ["gathers_outputs", "check", "init"])
def test_options_of_another_type(option):
    """They are refused, and the module stays as it is."""
    model = nn.Linear(2, 2, device="meta")
    mesh = mesh_of(fd.SimulatedBackend.create_group(1)[0])
    with pytest.raises(TypeError, match=f"{option} must be .*, not int"):
        fd.parallelize(model, mesh, {}, **{option: 3})
    assert type(model.weight) is nn.Parameter
    assert not isinstance(model.weight, DTensor)


@pytest.mark.parametrize("option", ["blocks", "chunks"])
def test_invalid_blocks_and_chunks(option):
    for number in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match=f"takes {option} of at least 1, not {number}"):
            ColumnParallel(**{option: number})


def test_wrapped_modules_are_refused():
    """Wrappers have replaced the parameters, or hooked them: they come last."""

    def program(group):
        mesh = DeviceMesh(group, (2, 1), ("dp", "tp"))
        for wrap in (fd.DDP, fd.FSDP):
            with pytest.raises(ValueError, match="parallelize the module first"):
                fd.parallelize(wrap(nn.Linear(4, 4), mesh["dp"].group), mesh["tp"], {})

    run_ranks(program, 2)


def test_modules_with_several_paths():
    """A plan may name any of a module's paths; shared buffers stay one."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = self.second = nn.Linear(4, 4)
            self.norms = nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm1d(4)])
            self.norms[1].running_mean = self.norms[0].running_mean

    def program(group):
        for plan in (
            {"first": ColumnParallel()},
            {"second": ColumnParallel()},
            {"*t": ColumnParallel(), "second": ColumnParallel()},
        ):
            model = fd.parallelize(Shared(), mesh_of(group), plan)
            assert model.first is model.second
            assert model.first.weight.placements == (Shard(0),)
            assert model.norms[0].running_mean is model.norms[1].running_mean
        with pytest.raises(ValueError, match="'first' has two styles"):
            fd.parallelize(Shared(), mesh_of(group), {"first": ColumnParallel(), "second": RowParallel()})

    run_ranks(program, 2)


def test_lists_of_weights_are_renewed():
    """A module's own list of its parameters has the distributed ones."""

    def program(group):
        model = fd.parallelize(nn.LSTM(4, 4), mesh_of(group), {})
        assert all(isinstance(weight, DTensor) for weight in model._flat_weights)

    run_ranks(program, 2)


class Made(nn.Module):
    """Layers whose values are drawn layer by layer, tied ones and a buffer among them."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.up = nn.Linear(4, 5)
        self.tied = nn.Linear(4, 5)
        self.tied.weight = self.tokens.weight


MADE_PLAN = {"tokens": fd.VocabularyParallel(), "up": ColumnParallel()}


@pytest.mark.parametrize("given", [False, True])
def test_modules_on_the_meta_device(given):
    """Values are those of rank 0's reset_parameters, in the order of the modules, or of ``init``."""

    def init(module):
        for index, tensor in enumerate((*module.parameters(recurse=False), *module.buffers(recurse=False))):
            nn.init.constant_(tensor, index + 2)

    def program(group):
        with torch.device("meta"):
            model = Made()
        torch.manual_seed(5 + group.rank)
        frozen = model.up.bias.requires_grad_(False)
        fd.parallelize(model, mesh_of(group), MADE_PLAN, init=init if given else None)
        assert frozen.is_meta
        assert model.up.weight.to_local().shape == ((3, 4) if group.rank == 0 else (2, 4))
        assert model.tied.weight is model.tokens.weight
        assert not model.up.bias.requires_grad
        torch.manual_seed(5)
        expected = Made()
        if given:
            for one in expected.modules():
                init(one)
            nn.init.constant_(expected.tokens.weight, 2)
        else:
            torch.manual_seed(5)
            for one in (expected.tokens, expected.norm, expected.up):
                one.reset_parameters()
            weight = expected.tokens.weight.detach().clone()
            expected.tied.reset_parameters()
            with torch.no_grad():
                expected.tokens.weight.copy_(weight)
        for name, value in model.state_dict().items():
            assert torch.equal(value.full_tensor(), expected.state_dict()[name]), name

    run_ranks(program, 2, backend="native")


def test_modules_that_cannot_be_initialized():
    """They are refused before anything is changed; ranks agree on what is on the meta device."""

    def program(group):
        model = nn.Sequential(nn.Linear(4, 4), nn.Module())
        model[1].weight = nn.Parameter(torch.empty(3, device="meta"))
        with pytest.raises(UnsupportedOpError, match=r"'1' \(Module\) is on the meta device .* pass init="):
            fd.parallelize(model, mesh_of(group), {})
        assert type(model[0].weight) is nn.Parameter
        model = nn.Linear(4, 4, device="meta" if group.rank else "cpu")
        with pytest.raises(CollectiveMismatchError, match="on the meta device"):
            fd.parallelize(model, mesh_of(group), {})

    run_ranks(program, 2)


def test_frozen_parameters_may_be_trained_later():
    """Their gradients have the parameters' placements all the same."""

    def program(group):
        model = fd.parallelize(seeded(Network).requires_grad_(False), mesh_of(group), PLANS["sequence"])
        x = torch.ones(1, 4, 12, dtype=torch.float64)
        assert not model(x).requires_grad
        for one in (model, copy.deepcopy(model)):
            one.requires_grad_(True)
            one(x).sum().backward()
            for parameter in one.parameters():
                assert parameter.grad.placements == parameter.placements

    run_ranks(program, 2)


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """What a module may take and give."""

    values: torch.Tensor
    name: str | None = None


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Containers(nn.Module):
    """Takes and gives tensors in containers of any kind."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, record, *, table):
        out = self.layer(record.values + table["more"][0])
        pair = Pair(out, out.sum())
        return {"record": Record(out, record.name), "none": None, "table": table, "pair": pair, "max": out.max(1)}


def test_containers():
    """Tensors in dataclasses, unusual dicts, named tuples and lists, as inputs and outputs."""

    model = seeded(Containers)

    def program(group):
        x = torch.arange(8, dtype=torch.float64).view(2, 4)
        table = defaultdict(list, more=[x, "text"])
        expected = model(Record(x, "it"), table=table)
        got = fd.parallelize(copy.deepcopy(model), mesh_of(group), {"layer": ColumnParallel()})(
            Record(x, "it"), table=table
        )
        assert list(got) == list(expected)
        assert (got["record"].name, got["none"]) == ("it", None)
        torch.testing.assert_close(got["record"].values, expected["record"].values)
        assert type(got["table"]) is defaultdict
        assert got["table"]["more"][1] == "text"
        assert torch.equal(got["table"]["more"][0], x)
        assert type(got["pair"]) is Pair
        torch.testing.assert_close(got["pair"].second, expected["pair"].second)
        assert torch.equal(got["max"].indices, expected["max"].indices)
        assert table["more"][0] is x

    run_ranks(program, 2)


def test_caches_are_mutated_in_place():
    """What a module puts into its caller's list or dict is there for the next call."""

    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, cache, seen):
            cache.append(self.layer(x))
            seen["calls"] = len(cache)
            return torch.cat(cache)

    def program(group):
        model = fd.parallelize(Caching(), mesh_of(group), {"layer": ColumnParallel()})
        cache, seen = [], {}
        sizes = [model(torch.ones(1, 4), cache, seen).shape[0] for _ in range(3)]
        assert (sizes, len(cache), seen) == ([1, 2, 3], 3, {"calls": 3})

    run_ranks(program, 2)


def test_outputs_that_are_not_as_declared():
    model = nn.Linear(4, 4)
    mesh = mesh_of(fd.SimulatedBackend.create_group(1)[0])
    fd.parallelize(model, mesh, {"": Style(outputs=(Replicate(), Replicate()))})
    with pytest.raises(ValueError, match=r"declares 2 outputs, .* and the module gave a DTensor"):
        model(torch.ones(1, 4))


def test_autocast():
    """Dtypes are those of the unsharded module, in forward and backward."""
    torch.manual_seed(0)
    model = Network()
    x = torch.randn(2, 3, 12)

    def run(model):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        out.float().square().mean().backward()
        return out

    def program(group):
        got = run(sharded := fd.parallelize(copy.deepcopy(model), mesh_of(group), PLANS["replicated"]))
        assert got.dtype is expected.dtype
        torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)
        for parameter, other in zip(sharded.parameters(), model.parameters(), strict=True):
            assert parameter.grad.dtype is torch.float32
            torch.testing.assert_close(parameter.grad.full_tensor(), other.grad, rtol=0.05, atol=0.05)

    expected = run(model)
    run_ranks(program, 2)


def test_hooks_on_tensors_before_a_parallel_layer():
    """Their gradient is a partial sum; what a hook computes of it is what it computes of the full one."""
    seen = {}

    class Hooked(Network):
        def forward(self, x):
            hidden = self.scale(x)

            def hook(gradient):
                if isinstance(gradient, DTensor):
                    seen["placements"] = gradient.placements
                return gradient.clamp(-0.01, 0.01)

            hidden.register_hook(hook)
            return self.down(torch.tanh(self.up(hidden)))

    model, x = seeded(Hooked), torch.randn(2, 3, 12, dtype=torch.float64)
    expected = copy.deepcopy(model)
    expected(x).sum().backward()

    def program(group):
        sharded = fd.parallelize(copy.deepcopy(model), mesh_of(group), PLANS["replicated"])
        sharded(x).sum().backward()
        assert seen["placements"] == (Partial(),)
        torch.testing.assert_close(sharded.scale.weight.grad.full_tensor(), expected.scale.weight.grad)

    run_ranks(program, 2)


def test_anomalies_are_found():
    """torch's anomaly mode works on distributed modules, and finds a NaN on any rank."""

    def program(group):
        model = fd.parallelize(seeded(Network), mesh_of(group), PLANS["replicated"])
        out = model(torch.ones(1, 1, 12, dtype=torch.float64))
        out.sum().backward()
        with pytest.raises(RuntimeError, match="returned nan values"):
            (model(torch.zeros(1, 1, 12, dtype=torch.float64)) * 0).sqrt().sum().mul(0).backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this is slow, and where forward was
        with torch.autograd.set_detect_anomaly(mode=True, check_nan=True):
            run_ranks(program, 2)


def test_a_module_in_a_plain_one():
    """The module around it stays plain, and gradients flow through."""
    inner = seeded(Network)
    first = nn.Linear(12, 12).double()
    x = torch.randn(2, 3, 12, dtype=torch.float64)
    nn.Sequential(first, inner)(x).square().sum().backward()
    gradient, first.weight.grad = first.weight.grad, None

    def program(group):
        mine = copy.deepcopy(inner)
        mine.zero_grad()
        mine = nn.Sequential(copy.deepcopy(first), fd.parallelize(mine, mesh_of(group), PLANS["replicated"]))
        mine(x).square().sum().backward()
        torch.testing.assert_close(mine[0].weight.grad, gradient)
        torch.testing.assert_close(mine[1].up.weight.grad.full_tensor(), inner.up.weight.grad)

    run_ranks(program, 2)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_modules(use_reentrant):
    """Recomputation in backward, around the module and around a part of it, with sharded layers in it."""

    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Network()

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

    model, x = seeded(Recomputed), torch.randn(2, 4, 12, dtype=torch.float64)
    mine = x.clone().requires_grad_()
    model(mine).square().sum().backward()
    plans = [{f"inner.{name}": style for name, style in PLANS[plan].items()} for plan in ("replicated", "overlapped")]

    def program(group):
        for plan in plans:
            sharded = copy.deepcopy(model)
            sharded.zero_grad()
            sharded = fd.parallelize(sharded, mesh_of(group), plan)
            its = x.clone().requires_grad_()
            out = sharded(its) if use_reentrant else checkpoint(sharded, its, use_reentrant=False)
            out.square().sum().backward()
            torch.testing.assert_close(its.grad, mine.grad)
            for own, other in zip(sharded.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(own.grad.full_tensor(), other.grad)

    run_ranks(program, 2)


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_are_loaded(assign):
    """With DTensors, and with full tensors of an unsharded module, of which rank 0's values are used."""
    model = seeded(Network)

    def program(group):
        mesh = mesh_of(group)
        one, other = (fd.parallelize(copy.deepcopy(model), mesh, PLANS["sequence"]) for _ in range(2))
        x = torch.ones(1, 2, 12, dtype=torch.float64)
        expected = one(x)
        full = {name: value.full_tensor() + group.rank for name, value in one.state_dict().items()}
        for state in (one.state_dict(), full):
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.zero_()
            other.load_state_dict(state, assign=assign)
            for name, value in other.state_dict().items():
                assert torch.equal(value.full_tensor(), model.state_dict()[name])
            assert torch.equal(other(x), expected)
            other.zero_grad()
            other(x).sum().backward()
            assert all(parameter.grad.placements == parameter.placements for parameter in other.parameters())
        assert all(type(value) is torch.Tensor for value in full.values())
        copy.deepcopy(other.up).load_state_dict(nn.Linear(12, 24).double().state_dict())
        with pytest.raises(RuntimeError, match=r"size mismatch for up\.weight"):
            other.load_state_dict(Network(12, 20).state_dict())

    run_ranks(program, 2)


@pytest.mark.parametrize("change", ["missing", "dtype", "distributed"])
def test_states_that_differ_between_ranks(change):
    """A tensor that one rank lacks would be taken from another name's of the same shape; the error names it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def program(group):
        mesh = mesh_of(group)
        sharded = fd.parallelize(copy.deepcopy(model), mesh, {"0": ColumnParallel(), "1": RowParallel()})
        state = model.state_dict()
        whole = fd.distribute(state["1.weight"], mesh, Replicate())
        if group.rank == 1 and change == "missing":
            del state["1.weight"]
        elif group.rank == 1:
            state["1.weight"] = state["1.weight"].double() if change == "dtype" else whole
        with pytest.raises(CollectiveMismatchError, match=r"of '1.weight' rank 0 has torch.float32 .*, rank 1 "):
            sharded.load_state_dict(state, strict=False)

    run_ranks(program, 2, timeout=20)


def test_declared_inputs_however_they_are_passed():
    """Placements by name apply to positional arguments too, and those by position to named ones."""

    class Two(nn.Module):
        def forward(self, a, b):
            return a, b

    class Outer(nn.Module):
        def __init__(self, *names):
            super().__init__()
            self.two, self.names = Two(), names

        def forward(self, x):
            named = dict.fromkeys(self.names, x)
            return self.two(*[x] * (2 - len(named)), **named)

    def program(group):
        for wanted in ({"b": Shard(1)}, (None, Shard(1))):
            for names in ((), ("b",), ("a", "b"), ("b", "a")):
                plan = {"two": Style(wanted=wanted)}
                model = fd.parallelize(Outer(*names), mesh_of(group), plan, gathers_outputs=False)
                a, b = model(torch.ones(2, 2))
                assert (a.placements, b.placements) == ((Replicate(),), (Shard(1),))
        layer = fd.parallelize(nn.Linear(4, 4), mesh_of(group), {"": ColumnParallel(chunks=2)})
        assert torch.equal(layer(input=torch.ones(4, 4)), layer(torch.ones(4, 4)))

    run_ranks(program, 2)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"y": Shard(0)}, "module 'Linear' takes no argument 'y': it takes 'input'"),
        ((Shard(0), None), "places 2 inputs of module 'Linear'"),
    ],
)
def test_inputs_that_a_module_does_not_take(wanted, message):
    with pytest.raises(ValueError, match=message):
        fd.parallelize(nn.Linear(4, 4), mesh_of(fd.SimulatedBackend.create_group(1)[0]), {"": Style(wanted=wanted)})


def test_equal_meshes_with_different_groups():
    """Tensors of both are not mixed, and the error gives advice."""

    def program(group):
        one, other = (fd.distribute(torch.ones(4), mesh_of(group), Shard(0)) for _ in range(2))
        with pytest.raises(ValueError, match="make the mesh once, and use it for both"):
            one + other

    run_ranks(program, 2)
