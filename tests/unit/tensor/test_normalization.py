"""Normalisation of distributed tensors."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_checks import NUM_RANKS, check_operator, make, spread

from ferrodist import DeviceMesh, Partial, Replicate, Shard
from ferrodist.testing import run_ranks

FUNCTIONS = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, x.shape[2:], w, b), 2),
    "layer_norm of dims": (lambda x, w, b: F.layer_norm(x, x.shape[1:], w, b), 1),
    "layer_norm without bias": (lambda x, w, b: F.layer_norm(x, x.shape[2:], w) + b.sum(), 2),
    "layer_norm without weights": (lambda x, w, b: F.layer_norm(x, x.shape[2:]) * w + b, 2),
    "rms_norm": (lambda x, w, b: F.rms_norm(x, x.shape[2:], w) + b.sum(), 2),
    "rms_norm without weights": (lambda x, w, b: F.rms_norm(x, x.shape[1:]) * w + b, 1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=12, deadline=None)
@given(
    shape=st.tuples(*[st.integers(1, 5)] * 3),
    mesh_shape=st.sampled_from([(2,), (3,), (2, 2)]),
    data=st.data(),
)
def test_normalisation_equals_plain_normalisation(name, shape, mesh_shape, data):
    function, first = FUNCTIONS[name]
    placement = st.sampled_from([Shard(0), Shard(1), Shard(2), Replicate(), Partial()])
    placements = data.draw(st.tuples(*[placement] * len(mesh_shape)))
    of_weights = data.draw(st.sampled_from([Shard(0), Replicate()]))
    # The elements of a row differ, or its deviation is 0, and quotients by it are mostly rounding errors.
    inputs = [make(*shape), make(*shape[first:], seed=1), make(*shape[first:], seed=2)]

    def check(group):
        full = (of_weights,) * len(mesh_shape)
        mesh = DeviceMesh(group, mesh_shape)
        check_operator(mesh, function, inputs, [placements, full, full], rtol=1e-6, atol=1e-6)

    run_ranks(check, NUM_RANKS[mesh_shape])


def test_group_norm_equals_plain_group_norm():
    def check(group):
        mesh = DeviceMesh(group, (3,))
        for placement in (Shard(0), Shard(1), Replicate(), Partial()):
            for batch in (2, 4):
                inputs = [make(batch, 4, 3), make(4, seed=1), make(4, seed=2)]
                places = [[placement], [Replicate()], [Replicate()]]
                check_operator(mesh, lambda x, w, b: F.group_norm(x, 2, w, b), inputs, places)
                check_operator(mesh, lambda x: F.group_norm(x, 2), inputs[:1], places[:1])

    run_ranks(check, 3)


def test_sharded_batch_gives_partial_weight_gradients():
    """Partial gradients of weights are reduced once, where they are used."""

    def compute(group):
        mesh = DeviceMesh(group, (2,))
        x = spread(make(4, 6), mesh, [Shard(0)]).requires_grad_()
        weight = spread(make(6), mesh, [Replicate()]).requires_grad_()
        result = F.layer_norm(x, (6,), weight)
        found = torch.autograd.grad(result.sum(), [x, weight])
        return result.placements, [grad.placements for grad in found]

    assert run_ranks(compute, 2) == [((Shard(0),), [(Shard(0),), (Partial(),)])] * 2


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, None])
def test_small_floats_are_normalised(weights):
    inputs = [make(5, 16, dtype=torch.bfloat16)]
    inputs += [] if weights is None else [make(16, dtype=weights, seed=1), make(16, dtype=weights, seed=2)]

    def check(group):
        mesh = DeviceMesh(group, (2,))
        places = [[Shard(0)], *[[Replicate()] for _ in inputs[1:]]]
        check_operator(mesh, lambda x, *rest: F.layer_norm(x, (16,), *rest), inputs, places, rtol=0.03, atol=0.03)

    run_ranks(check, 2)


def test_normalisation_without_gradients():
    def check(group):
        mesh = DeviceMesh(group, (2,))
        inputs = [make(3, 4, 5), make(5, seed=1), make(5, seed=2)]
        places = [[Shard(0)], [Replicate()], [Replicate()]]
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                for function, first in FUNCTIONS.values():
                    if first == 2:
                        check_operator(mesh, function, inputs, places, backward=False)
                channels = [inputs[0], *[make(4, seed=1)] * 2]
                check_operator(mesh, lambda x, w, b: F.group_norm(x, 2, w, b), channels, places, backward=False)

    run_ranks(check, 2)


@pytest.mark.parametrize("dim", [0, 1])
def test_weight_norm(dim):
    """The weight, and the gradients of its direction and magnitude."""
    magnitude = make(*((4, 1) if dim == 0 else (1, 3)), seed=1)
    places = [[one] for one in (Shard(0), Shard(1), Replicate(), Partial())]

    def check(group):
        for direction in places:
            for of_magnitude in ([Shard(dim)], [Replicate()]):
                check_operator(
                    DeviceMesh(group, (2,)),
                    lambda v, g: torch._weight_norm(v, g, dim),
                    [make(4, 3), magnitude],
                    [direction, of_magnitude],
                )

    run_ranks(check, 2)
