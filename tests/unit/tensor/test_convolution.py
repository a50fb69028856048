"""Convolutions of distributed tensors."""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_checks import NUM_RANKS, check_operator, make

from ferrodist import DeviceMesh, Partial, Replicate, Shard
from ferrodist.testing import run_ranks

WAYS = st.sampled_from([Shard(0), Shard(1), Replicate(), Partial()])


@settings(max_examples=50, deadline=None)
@given(
    batch=st.integers(1, 3),
    channels=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    kind=st.sampled_from(["plain", "groups", "transposed", "one dim"]),
    with_bias=st.booleans(),
    mesh_shape=st.sampled_from([(2,), (3,), (2, 2)]),
    data=st.data(),
)
def test_convolution_equals_plain_convolution(batch, channels, kind, with_bias, mesh_shape, data):
    inner, outer = channels
    kernel = (3,) if kind == "one dim" else (3, 2)
    groups = 2 if kind == "groups" else 1
    of_weight = (inner, outer) if kind == "transposed" else (outer * groups, inner)
    inputs = [make(batch, inner * groups, *[5] * len(kernel)), make(*of_weight, *kernel, seed=1)]
    inputs += [make(outer * groups, seed=2)] if with_bias else []
    placements = [data.draw(st.tuples(*[WAYS] * len(mesh_shape))) for _ in range(2)]
    placements += [data.draw(st.tuples(*[st.sampled_from([Shard(0), Replicate(), Partial()])] * len(mesh_shape)))]

    def convolve(*tensors):
        if kind == "transposed":
            return F.conv_transpose2d(*tensors, stride=2)
        if kind == "one dim":
            return F.conv1d(*tensors, padding=1)
        return F.conv2d(*tensors, stride=2, padding=1, groups=groups)

    def check(group):
        mesh = DeviceMesh(group, mesh_shape)
        check_operator(mesh, convolve, inputs, placements[: len(inputs)])
        with torch.inference_mode():
            check_operator(mesh, convolve, inputs, placements[: len(inputs)], backward=False)

    run_ranks(check, NUM_RANKS[mesh_shape])
