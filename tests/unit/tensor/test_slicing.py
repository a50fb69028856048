"""Operators that slice, split and join dims, on distributed tensors."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_checks import assert_same, check_everywhere, check_operator, make, placements_of

import ferrodist as fd
from ferrodist import DeviceMesh, DTensor, Partial, ReduceOp, Replicate, Shard
from ferrodist.errors import UnsupportedOpError
from ferrodist.testing import run_ranks


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[1:3],
        lambda x: x[:, ::2],
        lambda x: x[0:4, -2:],
        lambda x: x.narrow(1, 2, 3),
        lambda x: x[2],
        lambda x: x[..., -1],
        lambda x: x[1:1],
        lambda x: x[None, 1:, None, 3],
        torch.diagonal,
        lambda x: torch.diagonal(x, 1, 1, 0),
        lambda x: x.unfold(1, 3, 2),
        lambda x: torch.flip(x, (0,)),
        lambda x: torch.roll(x, 2, 1),
        lambda x: torch.roll(x, 5),
        lambda x: x.repeat(1, 2),
        lambda x: x.repeat(2, 1, 1),
        lambda x: x.repeat_interleave(2, dim=0),
        torch.tril,
        lambda x: torch.triu(x, 1),
        lambda x: torch.movedim(x, 0, 1),
        lambda x: x.swapaxes(0, 1),
        lambda x: x.flatten(),
    ],
    ids=str,
)
def test_operators_with_one_input_and_output(function):
    """With every placement, forward and backward."""
    check_everywhere(function, [make(4, 5)])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.split(2, dim=1),
        lambda x: x.split(3, dim=-1),
        lambda x: x.split([1, 0, 5], dim=1),
        lambda x: x.chunk(3, dim=-1),
        lambda x: x.chunk(9, dim=0),
        lambda x: x.unbind(1),
        lambda x: x.tensor_split(4, dim=1),
        lambda x: torch.hsplit(x, 2),
        lambda x: x.chunk(3, dim=-1)[1],
        lambda x: x.unbind(0)[2],
    ],
    ids=str,
)
def test_operators_with_several_outputs(function):
    """All outputs have the same placements; gradients are right if only some outputs are used."""
    check_everywhere(function, [make(4, 6)])


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.cat([x, y, x], dim=-1),
        lambda x, y: torch.stack([x, y], dim=1),
        lambda x, y: torch.hstack([x, y]),
        lambda x, y: torch.vstack([x, y]),
        lambda x, y: torch.cat([x[:, 1:], y], dim=1),
        lambda x, y: torch.slice_scatter(x, y[1:3], 0, 1, 3),
        lambda x, y: torch.slice_scatter(x, y, 0),
        lambda x, y: torch.select_scatter(x, y[:, 0], 1, 2),
        lambda x, y: torch.diagonal_scatter(x, torch.diagonal(y)),
    ],
    ids=str,
)
def test_operators_with_two_inputs(function):
    """With every pair of placements."""
    check_everywhere(function, [make(4, 6), make(4, 6, seed=1)], meshes=[(2,)])


def test_cat_of_empty_tensors_and_mixed_dtypes():
    """Empty tensors of one dim are left out; partial tensors are reduced before a cast."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        for one in (Shard(0), Shard(1), Replicate(), Partial()):
            for other in (Shard(0), Replicate()):
                empty = make(0).bfloat16()
                check_operator(
                    mesh, lambda x, y: torch.cat([y, x]), [make(4, 6), empty], [[one], [other]], backward=False
                )
            check_operator(mesh, lambda x, y: torch.cat([x, y], 1), [make(4, 0), make(4, 3)], [[one], [one]])
            floats, halves = make(4, 2), make(4, 3, dtype=torch.float32)
            check_operator(
                mesh, lambda x, y: torch.cat([x, y], 1), [floats, halves], [[one], [one]], rtol=1e-5, atol=1e-6
            )

    run_ranks(check, 2)


def test_uncut_dims_stay_sharded():
    """Nothing is sent if another dim is sharded, or if all of the sharded dim is taken."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        x = fd.distribute(make(5, 6), mesh, Shard(0))
        for view in (x[:, 1:3], x[:5], x[0:9, 2], *x.chunk(3, dim=1), *x.split(7), x.unfold(1, 2, 2), x.flip(1)):
            assert view.placements[0].dim == 0
        assert torch.cat([x, x], dim=1).placements == (Shard(0),)
        assert torch.stack([x, x]).placements == (Shard(1),)
        assert x[1:].placements == (Shard(1),)
        assert fd.distribute(make(5, 1), mesh, Shard(0))[1:].placements == (Replicate(),)

    run_ranks(check, 2)


def test_splits_of_a_fused_linear_layer():
    """Queries, keys and values of one column-parallel layer are right, whatever has to be sent."""

    def check(group, shape, placements):
        mesh = DeviceMesh(group, shape)

        def attend(x, weight):
            first, second, third = torch.nn.functional.linear(x, weight).chunk(3, dim=-1)
            a, b, c = torch.nn.functional.linear(x, weight).split(4, dim=-1)
            return first * second + third * a - b * c

        check_operator(mesh, attend, [make(2, 3, 4), make(12, 4)], placements)

    run_ranks(check, 2, (2,), [[Replicate()], [Shard(0)]])
    run_ranks(check, 4, (2, 2), [[Shard(0), Replicate()], [Replicate(), Shard(0)]])
    run_ranks(check, 4, (2, 2), [[Replicate(), Replicate()], [Shard(0), Shard(0)]])


def test_blocks_are_split_and_joined_without_communication():
    """Equal sharded tensors are joined as blocks, and blocks are split, with nothing sent."""

    def check(group, shape, before, after):
        mesh = DeviceMesh(group, shape)
        q, k, v = (fd.distribute(make(2, 8, seed=seed), mesh, before) for seed in range(3))
        joined = torch.cat([q, k, v], dim=1)
        assert joined.placements == after
        assert_same(joined, torch.cat([make(2, 8, seed=seed) for seed in range(3)], dim=1), "joined")
        for chunk, full in zip(joined.chunk(3, dim=1), (q, k, v), strict=True):
            assert chunk.placements == tuple(before)
            assert_same(chunk, full.full_tensor(), "chunk")
        assert_same(joined.split([6, 18], dim=1)[1], joined.full_tensor()[:, 6:], "uneven splits")

    run_ranks(check, 2, (2,), [Shard(1)], (Shard(1, blocks=3),))
    run_ranks(check, 4, (2, 2), [Shard(1), Shard(1)], (Shard(1, blocks=3), Shard(1, blocks=3)))
    run_ranks(check, 4, (2, 2), [Replicate(), Shard(1)], (Replicate(), Shard(1, blocks=3)))


def test_partial_maxima_are_sliced_before_they_are_reduced():
    """A maximum commutes with a slice."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        local = make(4, 6, seed=group.rank)
        x = DTensor.from_local(local, mesh, Partial(ReduceOp.MAX))
        full = torch.maximum(make(4, 6), make(4, 6, seed=1))
        for function in (lambda x: x[1:, 2], lambda x: torch.cat([x, x]), lambda x: x.view(3, 8), lambda x: x.tril()):
            result = function(x)
            assert result.placements == (Partial(ReduceOp.MAX),)
            assert_same(result, function(full), "of a maximum")

    run_ranks(check, 2)


OPERATIONS = {
    "slice": lambda x: x[1:, ..., :-1],
    "select": lambda x: x.select(1, -1),
    "chunk": lambda x: x.chunk(3, dim=1),
    "cat": lambda x: torch.cat([x, x.flip(0)], dim=1),
    "roll": lambda x: x.roll((1, 2), (0, -1)),
    "diagonal": lambda x: x.diagonal(0, 0, 2),
}


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_random_slices_on_two_axes(data):
    """Tensors of three dims, with dims of one element or fewer elements than ranks, and any placements."""
    shape = data.draw(st.tuples(*[st.integers(1, 5)] * 3))
    names = data.draw(st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=2, max_size=3, unique=True))
    placements = data.draw(st.lists(st.sampled_from(placements_of(3, 2)), min_size=3, max_size=4))

    def check(group):
        mesh = DeviceMesh(group, (2, 2))
        for where in placements:
            for name in names:
                check_operator(mesh, OPERATIONS[name], [make(*shape)], [where])

    run_ranks(check, 4)


@pytest.mark.parametrize("size", [3, 6, 9, 12])
def test_splits_of_a_dim_in_blocks(size):
    """Also if a rank's shard of them is empty."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        for function in (lambda x: x.chunk(3), lambda x: x.split([size // 3] * 3), lambda x: torch.cat([x, x])):
            check_operator(mesh, function, [make(size, 2)], [[Shard(0, blocks=3)]])

    run_ranks(check, 2)


def test_writes_to_a_view_reach_the_tensor():
    """If the view's shard is a view of the tensor's shard; also through a view of a view."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        for function in (
            lambda x: x[:, 1:3].mul_(2),
            lambda x: x[:, 2].t().fill_(3),
            lambda x: x.t()[1:3].add_(1),
            lambda x: x.view(5, 2, 3)[:, 1, 1:].zero_(),
            lambda x: x.chunk(2, dim=1)[1].neg_(),
            lambda x: x.__setitem__((slice(None), slice(1, 3)), 5),
            lambda x: x.__setitem__(slice(None), 2.5),
        ):
            expected, x = make(5, 6), fd.distribute(make(5, 6), mesh, Shard(0))
            function(expected)
            function(x)
            assert_same(x, expected, "what was written to a view")
            assert x.placements == (Shard(0),)

    run_ranks(check, 2)


def test_writes_to_redistributed_views_are_refused():
    """The error says so, and nothing changes."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        x = fd.distribute(make(4, 6), mesh, Shard(0))
        for function in (
            lambda x: x.__setitem__(slice(1, 3), 5),
            lambda x: x[0].zero_(),
            lambda x: x[1:].t().add_(1),
            lambda x: x.view(2, 12).view(24)[5:].detach().mul_(2),
            lambda x: torch._foreach_zero_([x[1:]]),
        ):
            with pytest.raises(UnsupportedOpError, match=r"clone\(\) of the view"):
                function(x)
            assert_same(x, make(4, 6), "what could not be written")
        x[1:].clone().zero_()
        copy.deepcopy(x[1:]).zero_()
        # Nor where a view of the same placements has been written, which is no copy.
        x.redistribute(Replicate())[1:].zero_()
        with pytest.raises(UnsupportedOpError):
            x[1:].zero_()

    run_ranks(check, 2)


def test_gradients_through_writes_to_a_view():
    """Autograd knows the view's offset in the tensor."""

    def write(x, y):
        z = x * 2
        z[:, 1:3] = y
        z[:, 4].mul_(3)
        z.t()[0] = y[:, 0]
        z[:, 2:][:, 3].mul_(y[:, 1])
        return z * x

    def check(group):
        mesh = DeviceMesh(group, (2,))
        for placements in ([[Replicate()], [Shard(0)]], [[Shard(0)], [Shard(0)]], [[Shard(0)], [Replicate()]]):
            check_operator(mesh, write, [make(5, 6), make(5, 2)], placements)
        view = fd.distribute(make(5, 6), mesh, Shard(0))[:, 2:][:, 3]
        assert view.storage_offset() == make(5, 6)[:, 2:][:, 3].storage_offset()

    run_ranks(check, 2)


def test_as_strided_of_sharded_tensors_is_refused():
    """as_strided is of memory, which local shards don't have in common; where gathering is allowed, it is gathered."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        x = make(4, 6).requires_grad_()
        mine = fd.distribute(x.detach(), mesh, Shard(0)).requires_grad_()
        with pytest.raises(UnsupportedOpError, match="full_tensor"):
            mine.as_strided((2,), (1,))
        overlapping = {"size": (3, 6, 2), "stride": (6, 1, 6)}
        with pytest.warns(UserWarning, match="as_strided"), fd.allow_replication():
            result = mine.as_strided(**overlapping)
        assert torch.equal(result.full_tensor(), x.as_strided(**overlapping))
        result.square().sum().backward()
        x.as_strided(**overlapping).square().sum().backward()
        torch.testing.assert_close(mine.grad.full_tensor(), x.grad)
        assert mine.as_strided((4, 6), mine.stride()).placements == (Shard(0),)

    run_ranks(check, 2, backend="native")
