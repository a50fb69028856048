"""Views of distributed tensors."""

import math
import operator as operator_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_checks import assert_same, check_everywhere, check_operator, make, placements_of, spread

import ferrodist as fd
from ferrodist import DeviceMesh, Partial, ReduceOp, Replicate, Shard
from ferrodist.tensor.copied_views import VIEW_COPIES
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
    """With every placement, forward and backward."""
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
    """Only dims of one element in the full tensor are squeezed, whatever a shard has."""
    check_everywhere(function, [make(3, 1, 2)])


# A group of dims of a view: some dims that become some others, of as many elements.
FACTORS = st.lists(st.integers(1, 4), min_size=0, max_size=4)


@st.composite
def reshapes(draw):
    """A shape, and another one with the same number of elements, of flattened and split dims."""
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
def test_random_reshapes(shapes, mesh_shape, data):
    """Flattening and splitting dims adds and removes blocks, and a reshape back restores the tensor."""
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
def test_random_permutations(order, shape, data):
    """Followed by a reshape of the permuted tensor."""
    placements = data.draw(st.lists(st.sampled_from(placements_of(3, 2)), min_size=1, max_size=4))

    def check(group):
        mesh = DeviceMesh(group, (2, 2))
        for where in placements:
            check_operator(mesh, lambda x: x.permute(order).reshape(-1), [make(*shape)], [where])
            check_operator(mesh, lambda x: x.permute(order).flatten(1).unsqueeze(0), [make(*shape)], [where])

    run_ranks(check, 4)


def test_views_that_stay_sharded():
    """Nothing is sent if the view's shards are views of the shards."""

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


def test_views_of_empty_and_scalar_tensors():
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


def test_impossible_views_raise_as_in_torch():
    """By the full tensor's shape and strides, on every rank."""

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


@pytest.mark.parametrize(
    "write",
    [
        lambda x: torch.ops.aten._unsafe_view(x, [4, 3, 2]).add_(1),
        lambda x: x.view(4, 3, 2).add_(1),
        lambda x: x.reshape(4, 3, 2).add_(1),
        lambda x: x.unflatten(1, (3, 2)).mul_(2),
        lambda x: x.flatten().add_(1),
        lambda x: x.ravel()[3].add_(1),
        lambda x: x.contiguous().add_(1),
        lambda x: x.to(x.dtype).add_(1),
        lambda x: x.expand_as(x).add_(1),
        lambda x: x.t().contiguous().t().add_(1),
        lambda x: x.t().reshape(2, 3, 4).add_(1),
        lambda x: torch.ops.aten._reshape_alias(x, [4, 3, 2], [6, 2, 1]).add_(1),
        lambda x: x.detach().view(8, 3).add_(1),
        lambda x: x.data.view(8, 3).add_(1),
        lambda x: x.view(4, 3, 2)[1].add_(1),
        lambda x: x.view(2, 12).view(4, 3, 2).add_(1),
        lambda x: torch.kron(fd_like(torch.ones(2, 3), x), fd_like(torch.ones(2, 2), x), out=x),
        lambda x: torch._foreach_add_([x.view(4, 3, 2)], 1.0),
        lambda x: x.squeeze_().add_(1),
        lambda x: x.split(2, 1)[0].add_(1),
        lambda x: x.unbind(0)[1].add_(1),
        lambda x: x.narrow(0, 1, 2).copy_(x.narrow(0, 0, 2) + 1),
        lambda x: x.diagonal().add_(1),
        lambda x: x.movedim(0, 1).add_(1),
        lambda x: x.chunk(3, 1)[1].zero_(),
        lambda x: x.tensor_split(3)[1].add_(1),
    ],
)
def test_writes_to_a_view_reach_the_tensor_or_raise(write):
    """For all placements and views of views; never is a write lost."""
    expected = make(4, 6)
    write(expected)

    def check(group):
        mesh = DeviceMesh(group, (2,) * (group.world_size // 2))
        outcomes = []
        for where in placements_of(2, mesh.ndim):
            x = spread(make(4, 6), mesh, where)
            try:
                write(x)
            except fd.UnsupportedOpError:
                outcomes.append("refused")
            else:
                assert_same(x, expected, f"{where}")
                outcomes.append("written")
        return outcomes

    for size in (2, 4):
        outcomes = run_ranks(check, size)
        assert outcomes == [outcomes[0]] * size
        assert "written" in outcomes[0]


def fd_like(tensor, other):
    """A tensor that is replicated on the mesh of another one, if that is distributed."""
    full = tensor.to(other.dtype)
    is_plain = not isinstance(other, fd.DTensor)
    return full if is_plain else fd.distribute(full, other.mesh, [Replicate()] * other.mesh.ndim)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(4, 3, 2),
        lambda x: x.view(24)[5:9],
        lambda x: x.unflatten(1, (3, 2)).transpose(0, 1),
        lambda x: torch.ops.aten._unsafe_view(x, [4, 3, 2]),
        lambda x: x[1:3],
        lambda x: x.detach().view(3, 8),
        lambda x: x.view(3, 8).view(24),
        lambda x: x.expand(2, 4, 6),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_views_see_writes_to_the_tensor_or_are_out_of_date(view, inference):
    """Also writes through another view, on lists, and without autograd's versions."""
    writes = (
        lambda x: x.add_(1),
        lambda x: x[0].mul_(3),
        lambda x: x.t().add_(1),
        lambda x: torch._foreach_add_([x], 1.0),
        lambda x: x.data.zero_(),
        lambda x: torch.mul(x, 2, out=x),
    )

    def check(group):
        mesh = DeviceMesh(group, (2,))
        outcomes = []
        with torch.inference_mode(inference):
            for where in placements_of(2, 1, partial=False):
                for write in writes:
                    plain, x = make(4, 6), spread(make(4, 6), mesh, where)
                    expected, got = view(plain), view(x)
                    write(plain)
                    try:
                        write(x)
                    except fd.UnsupportedOpError:
                        continue
                    if "out of date" in repr(got):
                        outcomes.append("refused")
                        with pytest.raises(RuntimeError, match="take the view again"):
                            _ = got * 1
                        got = view(x)
                    else:
                        outcomes.append("read")
                    assert_same(got * 1, expected, f"{where}")
        return outcomes

    outcomes = run_ranks(check, 2)
    assert outcomes[0] == outcomes[1]
    assert "read" in outcomes[0]


def test_shards_with_different_strides_on_ranks():
    """If one rank's view is a copy and another's is not, reads and writes are right."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        local = torch.arange(12.0) + 12 * group.rank
        local = local.view(4, 3).t() if group.rank else local.view(3, 4)
        full = torch.cat([torch.arange(12.0).view(3, 4), (torch.arange(12.0) + 12).view(4, 3).t()])
        for view in ((24,), (6, 2, 2), (2, 12)):
            x, plain = fd.DTensor.from_local(local.clone(), mesh, Shard(0), shape=(6, 4)), full.clone()
            got, expected = x.view(view), plain.view(view)
            got.add_(1), expected.add_(1)
            assert_same(x, plain, "written to the view")
            x.mul_(2), plain.mul_(2)
            assert_same(got, expected, "written to the tensor")
            got.unsqueeze(0).mul_(3), expected.unsqueeze(0).mul_(3)
            assert_same(x, plain, "written to a view of the view")
            x.view(2, 12).sub_(1), plain.view(2, 12).sub_(1)
            assert_same(got, expected, "written to another view")

    run_ranks(check, 2)


def test_redistributed_results_may_be_written():
    """A product returns a view of a tensor that is gone, so it does not matter that shards were redistributed."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        x, w = make(3, 5, 6), make(6, 4)
        for where in placements_of(3, 1):
            for there in placements_of(2, 1):
                got = (spread(x, mesh, where) @ spread(w, mesh, there)).mul_(2)
                assert_same(got, (x @ w) * 2, f"{where} {there}")
            moved = spread(x, mesh, where).transpose(0, 1).reshape(15, 6).add_(1)
            assert_same(moved, x.transpose(0, 1).reshape(15, 6) + 1, f"{where}")

    run_ranks(check, 2)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: x.copy_(torch.ones_like(x)),
        lambda x: x.__setitem__(slice(None), torch.ones_like(x)),
        lambda x: torch._foreach_mul_([x], 2.0),
        lambda x: torch.add(x, 1, out=x),
        lambda x: x.cumsum_(0),
        lambda x: torch.sum(x.clone()[None], 0, out=x),
        torch.relu_,
    ],
)
def test_writes_to_expanded_tensors_raise(write):
    """As in torch, on all ranks, also on those whose shard has one element or none."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        for shape in ((1, 1), (1, 2), (1, 6)):
            for where in placements_of(2, 1):
                x = spread(make(*shape), mesh, where)
                for size in (2, 4):
                    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
                        write(x.expand(size, shape[1]))
                assert_same(x, make(*shape), f"{where}")

    run_ranks(check, 2)


def test_one_value_may_be_written_to_expanded_tensors():
    """As in torch: the tensor that was expanded has it."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        for where in (Shard(1), Replicate()):
            x = spread(make(1, 6), mesh, where)
            x.expand(4, 6).fill_(3)
            assert_same(x, torch.full((1, 6), 3.0).double(), f"{where}")
            x.expand(4, 6)[1].zero_()
            assert_same(x, torch.zeros(1, 6).double(), f"{where}")
            x.fill_(3)
            torch._foreach_zero_([x.expand(4, 6)])
            assert_same(x, torch.zeros(1, 6).double(), f"{where}")

    run_ranks(check, 2)


@pytest.mark.parametrize(
    "change", [torch.Tensor.t_, torch.Tensor.squeeze_, lambda one: one.unsqueeze_(0), lambda one: one.transpose_(0, 1)]
)
def test_expanded_tensors_may_change_shape_in_place(change):
    """Methods such as transpose_ write no element."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        for where in (Shard(1), Replicate()):
            x = spread(make(1, 6), mesh, where)
            assert_same(change(x.expand(4, 6)), change(make(1, 6).expand(4, 6)), f"{where}")

    run_ranks(check, 2)


@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift"]
)
def test_augmented_assignments(name):
    """An augmented assignment writes to the tensor or raises; it never makes a new tensor."""
    operator = getattr(operator_module, f"i{name}")
    dtype = torch.int64 if name in ("and", "or", "xor", "lshift") else torch.float64
    value = torch.full((4, 3, 2), 3, dtype=dtype)

    def check(group):
        mesh = DeviceMesh(group, (2,))
        for where in placements_of(2, 1, partial=dtype is torch.float64):
            full = make(4, 6, low=1, high=9).to(dtype)
            x, other = spread(full, mesh, where), fd_like(value, spread(full, mesh, where))
            view = x.view(4, 3, 2)
            try:
                after = operator(view, other)
            except fd.UnsupportedOpError:
                assert_same(x, full, f"{where}")
            else:
                assert after is view
                assert_same(x, operator(full.view(4, 3, 2), value).view(4, 6), f"{where}")

    run_ranks(check, 2)


def test_dead_views_are_not_tracked():
    """Else each step of a program would leak memory."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        x = spread(make(4, 6), mesh, [Shard(1)])
        storage = x.to_local().untyped_storage()._cdata
        views = [x.view(4, 3, 2), x.view(4, 3, 2)[1], x[:, 1:4]]
        assert storage in VIEW_COPIES
        x.add_(1)
        del views
        assert storage not in VIEW_COPIES

    run_ranks(check, 2)
