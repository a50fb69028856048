"""Softmax of distributed tensors, and the bytes that it sends."""

import pytest
import torch
from byte_counter import ByteCounter
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_checks import NUM_RANKS, check_operator, make, spread

from ferrodist import DeviceMesh, Partial, Replicate, Shard
from ferrodist.testing import run_ranks

FUNCTIONS = {
    "softmax": lambda x: x.softmax(1),
    "softmax of the last dim": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(1),
    "log_softmax of the first dim": lambda x: x.log_softmax(0),
    "softmin": lambda x: torch.nn.functional.softmin(x, dim=2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=15, deadline=None)
@given(
    shape=st.tuples(*[st.integers(1, 5)] * 3),
    mesh_shape=st.sampled_from([(2,), (3,), (2, 2)]),
    data=st.data(),
)
def test_softmax_equals_plain_softmax(name, shape, mesh_shape, data):
    placement = st.sampled_from([Shard(0), Shard(1), Shard(2), Replicate(), Partial()])
    placements = data.draw(st.tuples(*[placement] * len(mesh_shape)))

    def check(group):
        check_operator(DeviceMesh(group, mesh_shape), FUNCTIONS[name], [make(*shape)], [placements])

    run_ranks(check, NUM_RANKS[mesh_shape])


def test_extreme_elements_as_in_torch():
    inf = float("inf")
    tensor = torch.tensor([[-inf] * 5, [1.0, inf, 2.0, 0, 0], [1e4, -1e4, 1e4, 0, 3], [float("nan"), 0, 0, 0, 0]])

    def check(group):
        mesh = DeviceMesh(group, (3,))
        for function in (
            lambda x: x.softmax(1),
            lambda x: x.log_softmax(1),
            lambda x: torch.ops.aten._safe_softmax(x, 1),
        ):
            check_operator(mesh, function, [tensor], [[Shard(1)]], backward=False)

    run_ranks(check, 3)


def test_small_floats_are_computed_wide_and_rounded_once():
    tensor = make(3, 64, dtype=torch.bfloat16, low=-8, high=8)

    def check(group):
        mesh = DeviceMesh(group, (2,))
        for function in (lambda x: x.softmax(1), lambda x: x.log_softmax(1)):
            # Terms of a gradient cancel.
            check_operator(mesh, function, [tensor], [[Shard(1)]], rtol=0.02, atol=0.02)
            with torch.inference_mode():
                check_operator(mesh, function, [tensor], [[Shard(1)]], backward=False)

    run_ranks(check, 2)


def test_equal_blocks_and_dims_sharded_twice():
    def check(group):
        mesh = DeviceMesh(group, (2, 2))
        for placements in ([Shard(1, blocks=2), Shard(1)], [Shard(1), Shard(1)], [Shard(0), Shard(1, blocks=4)]):
            check_operator(mesh, lambda x: x.softmax(1), [make(4, 8)], [placements])

    run_ranks(check, 4)


def test_along_a_sharded_dim_only_rows_are_sent():
    """Each row of 3000 elements sends a maximum, a sum, and another sum for the gradient."""

    def compute(group):
        mesh = DeviceMesh(group, (2,))
        logits = spread(make(4, 3000), mesh, [Shard(1)]).requires_grad_()
        found = logits.softmax(1)
        found.backward(found.detach())
        assert found.placements == logits.grad.placements == (Shard(1),)
        return group.num_bytes

    for num_bytes in run_ranks(compute, 2, backend=ByteCounter.create_group):
        assert 0 < num_bytes < 4000
