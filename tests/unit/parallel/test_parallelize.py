"""Modules divided by plans, and layers that are made divided, against the same layers in one process."""

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

import ferrodist as fd
from ferrodist import (
    ColumnParallel,
    ColumnParallelLinear,
    DeviceMesh,
    DTensor,
    Replicate,
    RowParallel,
    RowParallelLinear,
    SequenceParallel,
    Shard,
    Style,
    VocabularyParallel,
)
from ferrodist.tensor.plan import Move
from ferrodist.testing import run_ranks

COLLECTIVES = {Move.ALLREDUCE, Move.ALL_GATHER, Move.REDUCE_SCATTER, Move.ALL_TO_ALL, Move.EXCHANGE}


class Network(nn.Module):
    """Two layers to be divided behind one that is not."""

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
    return dict(Counter(step.move for step in steps if step.move in COLLECTIVES))


PLANS = {
    "whole": {"up": ColumnParallel(), "down": RowParallel()},
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
def test_a_module_computes_what_it_did(plan, size):
    """Outputs, and gradients of inputs and parameters; also of sizes that ranks can't divide evenly."""
    model, x = seeded(partial(Network, 12, 20)), torch.randn(2, 8, 12, dtype=torch.float64)
    mine = x.clone().requires_grad_()
    expected = model(mine)
    grad = torch.randn_like(expected)
    expected.backward(grad)

    def program(group):
        divided = fd.parallelize(copy.deepcopy(model), mesh_of(group), PLANS[plan])
        divided.zero_grad()
        its = x.clone().requires_grad_()
        got = divided(its)
        assert type(got) is torch.Tensor
        torch.testing.assert_close(got, expected)
        got.backward(grad)
        torch.testing.assert_close(its.grad, mine.grad)
        for (name, parameter), other in zip(divided.named_parameters(), model.parameters(), strict=True):
            assert isinstance(parameter, nn.Parameter)
            assert isinstance(parameter, DTensor)
            assert parameter.grad.placements == parameter.placements, name
            torch.testing.assert_close(parameter.grad.full_tensor(), other.grad)

    model_without = copy.deepcopy(model)
    model_without.zero_grad()
    run_ranks(program, size)


def test_parts_are_what_the_plan_says():
    """A column's weight by outputs, a row's by inputs, a row's bias and all else whole."""

    def program(group):
        model = fd.parallelize(seeded(Network), mesh_of(group), PLANS["whole"])
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
        ("whole", {Move.ALLREDUCE: 1}, {Move.ALLREDUCE: 1}),
        # The sequence is gathered at the end, for what comes out is whole.
        (
            "sequence",
            {Move.ALL_GATHER: 2, Move.REDUCE_SCATTER: 1},
            # Gathered are the gradient of what rows give, and that of the input, once for each use; the gradients of
            # the first layer's weight and bias are folded.
            {Move.ALL_GATHER: 3, Move.REDUCE_SCATTER: 1, Move.ALLREDUCE: 2},
        ),
    ],
)
def test_collectives_of_a_network(plan, forward, backward):
    """One allreduce each way; with a divided sequence one all_gather and one reduce_scatter in its place."""

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
    """Ten steps of AdamW, plain gradients clipped by norm."""
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
        return train(fd.parallelize(copy.deepcopy(model), mesh_of(group), PLANS["whole"]))

    got = run_ranks(program, 3)
    expected = train(copy.deepcopy(model))
    for losses in got:
        assert losses == pytest.approx(expected, rel=1e-12)
    assert expected[-1] < expected[0]


def test_tied_parameters_stay_tied():
    """One parameter in two modules is one afterwards."""

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


def test_values_are_those_of_the_first_rank():
    """Models that were made otherwise on each rank are one model afterwards."""

    def program(group):
        torch.manual_seed(0)  # of no consequence: threads share the generator
        model = Network()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(group.rank + 1)
        fd.parallelize(model, mesh_of(group), PLANS["whole"])
        assert all((parameter.to_local() == 1).all() for parameter in model.parameters())

    run_ranks(program, 2)


@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        (
            {"upp": ColumnParallel()},
            ValueError,
            "the plan's path 'upp' is of no module; some are 'scale', 'up', 'down'",
        ),
        ({"up": ColumnParallel(), "u*": RowParallel()}, ValueError, "module 'up' has two styles, by 'up' and by 'u*'"),
        ({"": ColumnParallel()}, TypeError, "ColumnParallel divides an nn.Linear"),
        ({"up": ColumnParallel}, TypeError, "must be a style, as ColumnParallel()"),
        ([ColumnParallel()], TypeError, "a plan is a mapping"),
        ({"up": Style(parameters={"wait": Shard(0)})}, ValueError, "module 'up' has no parameter 'wait'"),
    ],
)
def test_a_wrong_plan_changes_nothing(plan, error, message):
    """Errors come before anything is sent or changed."""
    mesh = mesh_of(fd.SimulatedBackend.create_group(2)[0])
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
def test_a_style_takes_nothing_that_it_would_ignore(style, options):
    with pytest.raises(TypeError, match=f"{style.__name__} decides by itself what {next(iter(options))} are"):
        style(**options)


def test_a_mesh_has_one_axis():
    mesh = DeviceMesh(fd.SimulatedBackend.create_group(4)[0], (2, 2), ("dp", "tp"))
    with pytest.raises(ValueError, match=r"over one axis, and this mesh has 'dp', 'tp': pass a slice, as mesh\['tp'\]"):
        fd.parallelize(Network(), mesh, {})
    with pytest.raises(TypeError, match="given as a DeviceMesh"):
        fd.parallelize(Network(), mesh.parent, {})
    with pytest.raises(ValueError, match="over one axis"):
        ColumnParallelLinear(4, 4, mesh=mesh)


def test_a_module_is_divided_once():
    model = Network()
    mesh = mesh_of(fd.SimulatedBackend.create_group(1)[0])
    model(torch.ones(1, 1, 12)).sum().backward()
    with pytest.raises(ValueError, match="has a gradient, which would be lost"):
        fd.parallelize(model, mesh, {})
    model.zero_grad()
    fd.parallelize(model, mesh, {})
    with pytest.raises(ValueError, match="is distributed already"):
        fd.parallelize(model, mesh, {})


def test_layers_give_parts_for_plain_tensors():
    """What Megatron's layers do: of plain tensors this rank's parts, and the initialisation of the undivided layers."""
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


def test_layers_with_divided_sequences():
    """Parts of a sequence come in and go out; gathering overlaps the product."""
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

    for chunks in (1, 2, 4, 3):  # three don't divide the parts: then the sequence is gathered first
        run_ranks(program, 2, chunks)


def test_layers_give_dtensors_for_dtensors():
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
