"""Operators that name the same elements otherwise, on distributed tensors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_checks import assert_same, check_everywhere, check_operator, make, placements_of, spread

import ferrodist as fd
from ferrodist import DeviceMesh, Partial, ReduceOp, Replicate, Shard
from ferrodist.testing import run_ranks


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.t(),
        lambda x: x.transpose(0, -1),
        lambda x: x.permute(1, 0),
        lambda x: x.unsqueeze(-2),
        lambda x: x[:, :1].expand(4, 7),
        lambda x: x.expand(2, -1, -1),
        lambda x: x.mT,
        lambda x: x.flatten(),
        lambda x: x.unflatten(1, (2, -1)),
        lambda x: x.view(2, 2, 6),
        lambda x: x.reshape(3, 8),
        lambda x: x.t().reshape(-1),
        lambda x: x.view_as(torch.empty(8, 3)),
    ],
    ids=str,
)
def test_views_of_two_dims(function):
    """Of every placement, forward and backward."""
    check_everywhere(function, [make(4, 6)])


@pytest.mark.parametrize(
    "function",
    [
        torch.squeeze,
        lambda x: x.squeeze(0),
        lambda x: x.squeeze(1),
        lambda x: x.squeeze((0, 1)),
        lambda x: x.squeeze(2),
    ],
    ids=str,
)
def test_squeeze(function):
    """Only dims that have one element in the whole tensor go, whatever a part has."""
    check_everywhere(function, [make(3, 1, 2)])


# A group of dims of a view: some dims that become some others, of as many elements.
FACTORS = st.lists(st.integers(1, 4), min_size=0, max_size=4)


@st.composite
def reshapes(draw):
    """A shape, and another of as many elements, that joins and cuts dims."""
    before, after = [], []
    for _ in range(draw(st.integers(1, 2))):
        factors = draw(FACTORS)
        for shape in (before, after):
            cuts = sorted(draw(st.lists(st.integers(0, len(factors)), max_size=2)))
            ends = zip([0, *cuts], [*cuts, len(factors)], strict=True)
            shape += [math.prod(factors[start:end]) for start, end in ends]
    return tuple(before[:4]), tuple(after[:4])


@settings(max_examples=40, deadline=None)
@given(reshapes(), st.sampled_from([(2,), (3,), (2, 2)]), st.data())
def test_any_reshape(shapes, mesh_shape, data):
    """Blocks come and go as dims are joined and cut; and what went one way comes back."""
    before, after = shapes
    if math.prod(before) != math.prod(after):
        after = (math.prod(before),)
    placements = data.draw(st.lists(st.sampled_from(placements_of(len(before), len(mesh_shape))), max_size=4))

    def check(group):
        mesh = DeviceMesh(group, mesh_shape)
        for where in placements:
            check_operator(mesh, lambda x: x.reshape(after), [make(*before)], [where])
            check_operator(mesh, lambda x: (x.reshape(after) * 2).reshape(before), [make(*before)], [where])

    run_ranks(check, math.prod(mesh_shape))


@settings(max_examples=15, deadline=None)
@given(st.permutations(range(3)), st.tuples(*[st.integers(0, 4)] * 3), st.data())
def test_any_order_of_dims(order, shape, data):
    """Followed by a reshape of what then lies in another order."""
    placements = data.draw(st.lists(st.sampled_from(placements_of(3, 2)), min_size=1, max_size=4))

    def check(group):
        mesh = DeviceMesh(group, (2, 2))
        for where in placements:
            check_operator(mesh, lambda x: x.permute(order).reshape(-1), [make(*shape)], [where])
            check_operator(mesh, lambda x: x.permute(order).flatten(1).unsqueeze(0), [make(*shape)], [where])

    run_ranks(check, 4)


def test_where_views_stay_divided():
    """Nothing is moved where the view's parts are views of the parts."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        for shape, placement, view, then in (
            ((4, 6), Shard(0), (24,), Shard(0)),
            ((4, 6), Shard(1), (24,), Shard(0, blocks=4)),
            ((24,), Shard(0, blocks=4), (4, 6), Shard(1)),
            ((4, 6), Shard(1), (2, 2, 6), Shard(2)),
            ((4, 6), Shard(1), (4, 2, 3), Shard(1)),
            ((5, 6), Shard(0), (5, 2, 3), Shard(0)),
            ((3, 5), Shard(1), (3, 1, 5), Shard(2)),
            ((2, 3, 8), Shard(2), (6, 4, 2), Shard(1)),
            ((4, 6), Partial(ReduceOp.MAX), (24,), Partial(ReduceOp.MAX)),
        ):
            x = fd.distribute(make(*shape), mesh, placement)
            assert x.view(view).placements == (then,)
            assert x.view(view).to_local().data_ptr() == x.to_local().data_ptr()
            assert_same(x.view(view), make(*shape).view(view), f"{shape} as {view}")

    run_ranks(check, 2)


def test_views_of_empty_tensors_and_numbers():
    """Without elements, or without dims."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        for placement in (Replicate(), Shard(0), Shard(1)):
            assert_same(spread(make(0, 3), mesh, [placement]).view(3, 0), make(3, 0), "empty")
            assert_same(spread(make(1, 1), mesh, [placement]).view(()), make(1, 1).view(()), "a number")
            assert_same(spread(make(1, 1), mesh, [placement]).squeeze().t(), make(1, 1).squeeze(), "a number")
        for placement in (Replicate(), Partial()):
            number = spread(make(1).view(()), mesh, [placement])
            assert_same(number.view(1, 1), make(1).view(1, 1), "of a number")
            assert_same(number.expand(3), make(1).expand(3), "of a number")

    run_ranks(check, 2)


def test_what_no_view_can_be_is_an_error_as_of_torch():
    """By the whole tensor's shape and strides, on every rank."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        x = spread(make(4, 6), mesh, [Shard(0)])
        with pytest.raises(RuntimeError, match="shape"):
            x.view(5, 5)
        with pytest.raises(RuntimeError, match="size and stride"):
            x.t().view(24)
        with pytest.raises(IndexError):
            x.transpose(0, 2)

    run_ranks(check, 2)
