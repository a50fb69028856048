"""Elementwise operators, on replicated, sharded and partial tensors."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_checks import assert_same, check_everywhere, check_operator, make, placements_of, spread
from operator_samples import bind_sample

from ferrodist import DeviceMesh, DTensor, Partial, ReduceOp, Replicate, Shard
from ferrodist.tensor.ops import pointwise
from ferrodist.testing import run_ranks

# Operators that are linear in partial sums, and some that look as if they were.
ON_PARTS = {
    "add": lambda x, y: x + y,
    "add a number": lambda x, y: x + 2 + y * 0,
    "subtract from a number": lambda x, y: 2 - x + y,
    "add with a factor": lambda x, y: torch.add(x, y, alpha=3),
    "multiply": lambda x, y: x * y,
    "square": lambda x, y: x * x + y,
    "divide": lambda x, y: x / (y.abs() + 1),
    "divide and round": lambda x, y: torch.div(x, y.abs() + 1, rounding_mode="floor") + y,
    "divide a number": lambda x, y: torch.div(torch.tensor(2.0), x) + y,
    "divide a number, by a function": lambda x, y: torch.div(2.0, x) + y,
    "add to a number, by a function": lambda x, y: torch.add(0.5, x, alpha=2) + y,
    "multiply a number, by a function": lambda x, y: torch.mul(2, x) + torch.sub(1, y),
    "interpolate": lambda x, y: torch.lerp(x, y, 0.25),
    "interpolate by weights": lambda x, y: torch.lerp(x, y, x * y),
    "choose": lambda x, y: torch.where(x > y, x, y),
    "fill in zeros": lambda x, y: x.masked_fill(y > 0, 0.0) + y,
    "fill in ones": lambda x, y: x.masked_fill(y > 0, 1.0) + y,
    "maximum": torch.maximum,
    "negate": lambda x, y: -x - y,
    "power": lambda x, y: x.abs() ** 1.5 + y,
    "relu": lambda x, y: torch.relu(x) * torch.sigmoid(y),
    "add and multiply": lambda x, y: torch.addcmul(x, x, y, value=2),
    "list": lambda x, y: torch._foreach_add([x, y], [y, x], alpha=2)[0],
    "list and a number": lambda x, y: torch._foreach_add([x, y], 2)[0] + y,
    "list and numbers": lambda x, y: torch._foreach_add([x, y], [1, 2])[1] + x,
    "list by weights": lambda x, y: torch._foreach_lerp([x], [y], [x * y])[0],
}


@pytest.mark.parametrize("name", ON_PARTS)
def test_placements_of_both_inputs(name):
    backward = "list" not in name
    check_everywhere(ON_PARTS[name], [make(4, 3), make(4, 3, seed=1)], meshes=[(2,)], backward=backward)


@pytest.mark.parametrize("op", [ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.MAX])
def test_partial_extrema_and_products(op):
    """Partial tensors with other reductions than sums."""

    def check(group):
        mesh = DeviceMesh(group, (2,))
        for name, one, other in itertools.product(ON_PARTS, [Partial(op)], [Partial(op), Replicate(), Partial()]):
            operands = [make(4, 3), make(4, 3, seed=1)]
            check_operator(mesh, ON_PARTS[name], operands, [[one], [other]], backward="list" not in name)

    run_ranks(check, 2)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_broadcasting(data):
    """Any shapes that broadcast, any placements, on one axis or two."""
    shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
    shapes = [
        [data.draw(st.sampled_from([size, 1])) for size in shape[data.draw(st.integers(0, len(shape))) :]]
        for _ in range(2)
    ]
    mesh_shape = data.draw(st.sampled_from([(2,), (3,), (2, 2)]))
    placements = [data.draw(st.sampled_from(placements_of(len(one), len(mesh_shape)))) for one in shapes]
    inputs = [make(*one, seed=seed) for seed, one in enumerate(shapes)]
    function = data.draw(st.sampled_from([torch.add, torch.mul, torch.maximum]))

    def check(group):
        check_operator(DeviceMesh(group, mesh_shape), function, inputs, placements)

    run_ranks(check, torch.Size(mesh_shape).numel())


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.complex128, torch.bool])
def test_exact_casts(dtype):
    """Partial sums are cast if that loses nothing."""
    check_everywhere(lambda x: (3 * x).to(dtype), [make(4, 3)], backward=False)


@pytest.mark.parametrize(("dtype", "then"), [("float16", "bfloat16"), ("int64", "float32"), ("int8", "float32")])
def test_inexact_casts(dtype, then):
    """Partial sums are reduced before the cast."""
    dtype, then = getattr(torch, dtype), getattr(torch, then)
    local = {torch.int64: 2**24 + 1, torch.int8: 100, torch.float16: 1 + 2**-10}[dtype]

    def program(group):
        mesh = DeviceMesh(group, (2,))
        tensor = DTensor.from_local(torch.full((3,), local, dtype=dtype), mesh, Partial())
        return tensor.full_tensor().to(then), tensor.to(then).full_tensor()

    for expected, got in run_ranks(program, 2):
        assert torch.equal(expected, got)


def test_bools_true_on_several_ranks():
    """The partial sum is true, which counts once."""

    def program(group):
        mesh = DeviceMesh(group, (2,))
        mask = DTensor.from_local(torch.tensor([True, group.rank == 0, False]), mesh, Partial())
        numbers = spread(torch.tensor([2.0, 3.0, 4.0]), mesh, Replicate())
        found = [mask, mask.float(), mask.sum(), mask * numbers, mask.cumsum(0), mask | mask, mask + mask]
        return [one.full_tensor().tolist() for one in found]

    bools = [True, True, False]
    assert run_ranks(program, 2) == [[bools, [1, 1, 0], 2, [2, 3, 0], [1, 2, 2], bools, bools]] * 2


def test_plain_scalar_gradient():
    """The gradient of a product with a plain scalar is not linear in partial sums."""

    def program(group):
        mesh = DeviceMesh(group, (2,))
        x = spread(torch.tensor(0.7), mesh, Partial()).requires_grad_()
        torch.nn.functional.gelu(x).backward(torch.tensor(2.0))
        return x.grad.full_tensor()

    plain = torch.tensor(0.7, requires_grad=True)
    torch.nn.functional.gelu(plain).backward(torch.tensor(2.0))
    for grad in run_ranks(program, 2):
        torch.testing.assert_close(grad, plain.grad)


def test_lists_and_a_scalar_tensor():
    """A list is multiplied by a scalar tensor, as clipping does with gradients; also in a cached call."""

    def program(group):
        mesh = DeviceMesh(group, (2,))
        tensors = [spread(make(4, 3), mesh, Shard(0)), spread(make(5), mesh, Shard(0))]
        factor = spread(torch.tensor(2.0, dtype=torch.float64), mesh, Replicate())
        for _ in range(2):
            torch._foreach_mul_(tensors, factor)
        assert_same(tensors, [make(4, 3) * 4, make(5) * 4], "twice times 2")
        assert_same(torch._foreach_mul(tensors, factor), [make(4, 3) * 8, make(5) * 8], "another time")

    run_ranks(program, 2)


UNARY_LISTS = """
acos asin atan ceil cos cosh erf erfc expm1 floor frac lgamma log log10 log1p log2 round rsqrt sigmoid sin sinh tan tanh
trunc
"""


@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Partial()], ids=str)
def test_functions_of_lists(placement):
    """Each returns new tensors, or writes to its own, which keep their placements."""
    plain = [make(4, 3, low=0.1, high=0.9), make(5, low=0.1, high=0.9)]

    def check(group):
        mesh = DeviceMesh(group, (2,))
        for name in UNARY_LISTS.split():
            new, over = (getattr(torch, f"_foreach_{name}{suffix}") for suffix in ("", "_"))
            tensors = [spread(one, mesh, [placement]) for one in plain]
            assert_same(new(tensors), list(new(plain)), name)
            over(tensors)
            assert_same(tensors, list(new(plain)), f"{name}_")
            assert [one.placements for one in tensors] == [(placement,)] * 2
        tensors = [spread(one, mesh, [placement]) for one in plain]
        assert_same(torch._foreach_max(tensors), [one.max() for one in plain], "max")
        if hasattr(torch.ops.aten, "_foreach_clone"):  # not in torch 2.10
            assert_same(torch.ops.aten._foreach_clone(tensors), plain, "clone")
        if hasattr(torch.ops.aten, "_foreach_mm"):
            products = torch.ops.aten._foreach_mm(tensors[:1], [spread(plain[0].T.contiguous(), mesh, [Replicate()])])
            assert_same(products, [plain[0] @ plain[0].T], "mm")

    run_ranks(check, 2)


NAMES = sorted(
    {
        overload
        for overload in pointwise.RULES
        if not overload._schema.is_mutable and not overload.name().startswith(("aten::_foreach", "aten::_fused"))
    },
    key=str,
)


def test_every_operator_equals_the_plain_one():
    """Each on inputs of several dtypes until one fits: sharded, replicated and partial."""
    tried = []

    def check(group):
        mesh = DeviceMesh(group, (2,))
        for overload in NAMES:
            for dtype, placement in itertools.product((torch.float64, torch.int64, torch.bool), (Shard(0), Partial())):
                if placement == Partial() and dtype is torch.bool:
                    continue
                tensors = [make(5, 3, dtype=dtype, seed=seed, low=0.1, high=0.9) for seed in range(4)]
                bound = bind_sample(overload, iter(tensors), 1.0 if dtype.is_floating_point else 1)
                if bound is None:
                    break
                arguments, named = bound
                try:
                    expected = overload(*arguments, **named)
                    # Shifts of booleans have no result on the meta device.
                    overload(*[one.to("meta") if isinstance(one, torch.Tensor) else one for one in arguments], **named)
                except (RuntimeError, TypeError, NotImplementedError):
                    continue  # not of this dtype
                sharded = [
                    spread(one, mesh, [placement]) if isinstance(one, torch.Tensor) else one for one in arguments
                ]
                assert_same(overload(*sharded, **named), expected, f"{overload} of {dtype} as {placement}")
                tried.append(overload)

    run_ranks(check, 2)
    # These take complex numbers, values without dims, or a limit: what their schemas don't say.
    others = ["_conj.default", "clamp.Tensor", "clamp.default", "fill.Tensor", "imag.default", "masked_fill.Tensor"]
    assert {str(one).removeprefix("aten.") for one in set(NAMES) - set(tried)} <= set(others)
