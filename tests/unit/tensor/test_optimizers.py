"""Optimizers on distributed parameters, and in-place writes."""

import pytest
import torch
from operator_checks import NUM_RANKS, assert_same, make, spread

from ferrodist import DeviceMesh, Partial, Replicate, Shard
from ferrodist.errors import UnsupportedOpError
from ferrodist.testing import run_ranks

SHAPES = [(4, 6), (5,), (3, 2), ()]
"""The shapes of parameters: even ones, uneven ones, one of fewer rows than ranks, a scalar."""

PLACEMENTS = {
    (2,): [
        [[Shard(0)], [Shard(0)], [Shard(0)], [Replicate()]],
        [[Shard(1)], [Replicate()], [Shard(1)], [Replicate()]],
    ],
    (2, 2): [
        [[Shard(0), Shard(0)], [Replicate(), Shard(0)], [Shard(0), Shard(0)], [Replicate(), Replicate()]],
        [[Replicate(), Shard(1)], [Shard(0), Shard(0)], [Shard(1), Shard(0)], [Replicate(), Replicate()]],
    ],
}

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD, momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "SGD, nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.01}),
    "Adam, amsgrad": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1}),
    "RMSprop, all": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.9, "centered": True, "weight_decay": 0.01}),
}
VARIANTS = [
    (name, variant)
    for name in OPTIMIZERS
    for variant in ({"foreach": False}, {"foreach": True}, {"fused": True})
    if "fused" not in variant or not name.startswith("RMSprop")
]


def values(number, seed=0):
    """A gradient for a parameter."""
    return make(*(SHAPES[number] or (1,)), seed=seed).view(SHAPES[number])


def train(kind, options, parameters, gradients_of):
    """Do three steps."""
    optimizer = kind(parameters, **options)
    for step in range(3):
        for number, parameter in enumerate(parameters):
            parameter.grad = gradients_of(step, number)
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return parameters


@pytest.mark.parametrize(("name", "variant"), VARIANTS, ids=str)
def test_optimizer_steps_equal_plain_steps(name, variant):
    """For gradients with the parameters' placements, with others, and partial ones."""
    kind, options = OPTIMIZERS[name]
    options = {**options, **variant}
    full = [values(number) for number in range(len(SHAPES))]
    plain = [torch.nn.Parameter(one.clone()) for one in full]
    expected = train(kind, options, plain, lambda step, number: values(number, seed=1 + step))

    def check(group, shape, placements, gradients):
        mesh = DeviceMesh(group, shape)
        parameters = [torch.nn.Parameter(spread(*of)) for of in zip(full, [mesh] * 4, placements, strict=True)]

        def gradient(step, number):
            where = placements[number] if gradients is None else [gradients] * len(shape)
            return spread(values(number, seed=1 + step), mesh, where)

        got = train(kind, options, parameters, gradient)
        # Parts of sums are rounded; and what is computed in lanes may differ from what is left over, in the last bit.
        tolerance = {"rtol": 1e-9, "atol": 1e-9} if gradients == Partial() else {"rtol": 1e-14, "atol": 1e-15}
        if name.startswith("SGD") and gradients is None and "fused" not in variant:
            tolerance = {"rtol": 0, "atol": 0}
        for number, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_same(one, other, f"parameter {number}", **tolerance)
            assert one.placements == tuple(placements[number])
            assert_same(one.grad, torch.zeros_like(other), "gradient")

    for shape, choices in PLACEMENTS.items():
        gradients = [None, Partial(), Replicate()] if shape == (2,) else [None]
        for placements in choices:
            for where in gradients:
                if where is not None and "fused" in variant and "momentum" in options:
                    # The optimizer makes buffers with the gradients' placements, which differ from the parameters'.
                    continue
                run_ranks(check, NUM_RANKS[shape], shape, placements, where)


@pytest.mark.parametrize("is_infinite", [False, True])
def test_gradient_scaling(is_infinite):
    """GradScaler unscales shards, and an infinity in the shard of one rank skips the step on all, along all axes."""
    parameter, gradient = make(4, 6, dtype=torch.float32), make(4, 6, dtype=torch.float32, seed=1)

    def check(group, shape, placements):
        mesh = DeviceMesh(group, shape)
        parameters = [torch.nn.Parameter(spread(parameter, mesh, where)) for where in placements]
        optimizer, scaler = torch.optim.SGD(parameters, lr=1.0), torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        for one, where in zip(parameters, placements, strict=True):
            one.grad = spread(gradient * 4, mesh, where)
        if is_infinite and group.rank == 1:
            parameters[0].grad.to_local()[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (2.0 if is_infinite else 4.0)
        for one in parameters:
            assert_same(one, parameter if is_infinite else parameter - gradient, "parameter")

    run_ranks(check, 2, (2,), [[Shard(0)], [Replicate()]])
    run_ranks(check, 4, (2, 2), [[Shard(0), Shard(1)], [Shard(1), Replicate()]])


def test_in_place_writes_keep_placements():
    """Other inputs are redistributed to the written tensor's placements."""
    functions = [
        lambda x, y: x.copy_(y),
        lambda x, y: x.add_(y, alpha=2),
        lambda x, y: x.mul_(y),
        lambda x, y: x.addcmul_(y, y),
        lambda x, y: x.lerp_(y, 0.25),
        lambda x, y: x.copy_(y[:1]),
        lambda x, y: x.fill_(3).sub_(y[0]),
        lambda x, y: x.zero_(),
        lambda x, y: x.__setitem__((slice(None), 1), y[:, 0]),
    ]

    def check(group):
        mesh = DeviceMesh(group, (2,))
        for function in functions:
            for one in (Shard(0), Shard(1), Replicate()):
                for other in (Shard(0), Shard(1), Replicate(), Partial()):
                    if function is functions[-1] and one == Shard(1):
                        continue
                    x, y = spread(make(5, 3), mesh, [one]), spread(make(5, 3, seed=1), mesh, [other])
                    expected = make(5, 3)
                    function(x, y)
                    function(expected, make(5, 3, seed=1))
                    assert_same(x, expected, f"{one}, {other}")
                    assert x.placements == (one,)

    run_ranks(check, 2)


def test_writes_keep_placements_under_which_they_cannot_be_computed():
    """A partial sum, or a dim that the operator needs whole: the tensor is written, and lies as before."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        for function in (lambda x: x.exp_(), lambda x: x.clamp_(0, 1), lambda x: x.fill_(1)):
            x = spread(make(5, 3), mesh, [Partial()])
            function(x)
            assert x.placements == (Partial(),)
            assert_same(x, function(make(5, 3)), "a partial sum that was written")
        x, y = spread(make(5, 3), mesh, [Shard(1)]), spread(make(5, 3, seed=1), mesh, [Shard(0)])
        with pytest.raises(UnsupportedOpError, match="would write to a view whose shards had to be redistributed"):
            x[:, 1] = y[:, 1]
        assert_same(x, make(5, 3), "what could not be written")
        x.tril_()
        assert x.placements == (Shard(1),)
        assert_same(x, make(5, 3).tril_(), "a triangle")

    run_ranks(check, 2)


def test_fused_steps_refuse_buffers_with_other_placements():
    """torch makes momentum buffers like the gradients, and the fused step writes both."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        parameter = torch.nn.Parameter(spread(make(4, 6), mesh, [Shard(0)]))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=True)
        parameter.grad = spread(make(4, 6), mesh, [Partial()])
        with pytest.raises(UnsupportedOpError, match="_fused_sgd_"):
            optimizer.step()
        assert_same(parameter, make(4, 6), "what could not be written")

    run_ranks(check, 2)


def test_out_arguments():
    """``out=`` of operators with a rule; a tensor of another shape is refused."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        x, y = spread(make(4, 6), mesh, [Shard(0)]), spread(make(4, 6, seed=1), mesh, [Shard(1)])
        out = spread(make(4, 6, seed=2), mesh, [Shard(1)])
        assert torch.add(x, y, alpha=2, out=out) is out
        assert_same(out, make(4, 6) + 2 * make(4, 6, seed=1), "a sum")
        with pytest.raises(UnsupportedOpError, match="keeps its shape"):
            torch.maximum(x[0], y[0], out=out)

    run_ranks(check, 2)
