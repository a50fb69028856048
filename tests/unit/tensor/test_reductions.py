"""Reductions of distributed tensors."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_checks import NUM_RANKS, check_operator, make, spread

from ferrodist import DeviceMesh, DTensor, Partial, ReduceOp, Replicate, Shard
from ferrodist.tensor.ops.table import RULES
from ferrodist.testing import run_ranks

DIFFERENTIABLE = {
    "mean": lambda x: x.mean(),
    "mean of a dim": lambda x: x.mean(1),
    "mean of dims": lambda x: x.mean((0, 2), keepdim=True),
    "amax": lambda x: x.amax(1),
    "amin of all": lambda x: x.amin(),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "aminmax": lambda x: torch.aminmax(x, dim=0),
    "nansum": lambda x: x.nansum(),
    "var": lambda x: x.var(1),
    "var of all": lambda x: x.var(correction=0),
    "std": lambda x: x.std((0, 1), keepdim=True),
    "var_mean": lambda x: torch.var_mean(x, 1),
    "std_mean": lambda x: torch.std_mean(x, (0, 2), keepdim=True),
    "logsumexp": lambda x: x.logsumexp(1),
    "logsumexp of dims": lambda x: x.logsumexp((0, 1), keepdim=True),
    "norm": lambda x: x.norm(),
    "norm of a dim": lambda x: torch.linalg.vector_norm(x, 3, dim=1),
    "1-norm": lambda x: torch.linalg.vector_norm(x, 1, dim=(0, 1), keepdim=True),
    "largest": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=1),
    "smallest": lambda x: torch.linalg.vector_norm(x, float("-inf"), dim=0),
    "negative order": lambda x: torch.linalg.vector_norm(x, -1.5, dim=1),
}

OTHERS = {
    "prod": lambda x: x.prod(),
    "prod of a dim": lambda x: x.prod(1, keepdim=True),
    "argmax": lambda x: x.argmax(),
    "argmax of a dim": lambda x: x.argmax(1),
    "argmin": lambda x: x.argmin(0, keepdim=True),
    "argmin of all": lambda x: x.argmin(keepdim=True),
    "max of a dim": lambda x: x.max(1),
    "min of a dim": lambda x: x.min(0, keepdim=True),
    "count_nonzero": lambda x: x.count_nonzero(),
    "count_nonzero of a dim": lambda x: x.round().count_nonzero(1),
    "all": lambda x: x.round().all(),
    "all of a dim": lambda x: x.round().all(1),
    "any": lambda x: x.round().any(),
    "any of dims": lambda x: torch.any(x.round(), dim=(0, 1), keepdim=True),
    "any of no dims": lambda x: torch.any(x.round(), dim=()),
    "0-norm": lambda x: torch.linalg.vector_norm(x.round(), 0, dim=1),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(0),
    "cummax": lambda x: x.cummax(1),
    "topk": lambda x: x.topk(1, 1),
    "sort": lambda x: x.sort(1, descending=True),
    "argsort": lambda x: x.argsort(0),
    "stable sort": lambda x: x.sort(dim=0, stable=True),
    "median": lambda x: x.median(1),
    "kthvalue": lambda x: x.kthvalue(1, 1),
    "old norm": lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, None, [1]),
}


def has_derivative(function):
    """Return whether this torch can differentiate an operator: 2.10 can't aminmax."""
    found = function(make(2, 2, 2).requires_grad_())
    try:
        sum(each.sum() for each in (found if isinstance(found, tuple) else (found,))).backward()
    except RuntimeError as error:
        return "derivative" not in str(error)
    return True


@pytest.mark.parametrize("name", [*DIFFERENTIABLE, *OTHERS])
@settings(max_examples=8, deadline=None)
@given(
    shape=st.tuples(*[st.integers(1, 5)] * 3),
    mesh_shape=st.sampled_from([(2,), (2,), (3,), (2, 2)]),
    data=st.data(),
)
def test_reduction_equals_plain_reduction(name, shape, mesh_shape, data):
    function = DIFFERENTIABLE.get(name) or OTHERS[name]
    backward = name in DIFFERENTIABLE and has_derivative(function)
    # A variance of one element is none, and the gradient of a deviation of 0 is none either.
    if name.startswith(("var", "std")):
        shape = tuple(max(size, 2) for size in shape)
    placement = st.sampled_from([Shard(0), Shard(1), Shard(2), Replicate(), Partial()])
    placements = data.draw(st.tuples(*[placement] * len(mesh_shape)))
    tensor = make(*shape)

    def check(group):
        check_operator(DeviceMesh(group, mesh_shape), function, [tensor], [placements], backward=backward)

    run_ranks(check, NUM_RANKS[mesh_shape])


def everywhere(function, tensor, *, num_ranks=3, blocks=(), **tolerance):
    """Compare with the plain function, for each sharding and replicated."""

    def check(group):
        mesh = DeviceMesh(group, (num_ranks,))
        for placement in [Replicate(), *map(Shard, range(tensor.dim())), *blocks]:
            check_operator(mesh, function, [tensor], [[placement]], backward=False, **tolerance)

    run_ranks(check, num_ranks)


def test_nan_and_the_first_of_equal_elements_are_found():
    tensor = torch.tensor([[1.0, 3, 3, 3, 2], [0, 0, float("nan"), float("nan"), 9], [7, 7, 7, 7, 7]])

    def extremes(x):
        both = [one for dim in (0, 1) for found in (x.max(dim), x.min(dim)) for one in found]
        return [*both, x.argmax(1), x.argmin(1), x.argmax(), x.argmin(), x.amax(1), x.max(), x.amin()]

    everywhere(extremes, tensor)


def test_equal_blocks_of_a_dim_are_reduced():
    tensor = make(8, 3).round()
    for function in (lambda x: x.argmax(0), lambda x: x.max(0)[1], lambda x: x.logsumexp(0), lambda x: x.mean(0)):
        everywhere(function, tensor, num_ranks=2, blocks=[Shard(0, blocks=2), Shard(0, blocks=4)])


def test_infinities_do_not_become_nan():
    inf = float("inf")
    tensor = torch.tensor([[-inf, -inf, -inf, -inf], [1.0, inf, 2.0, 0.0], [0.0, -inf, 1.0, 2.0]])
    everywhere(lambda x: x.logsumexp(1), tensor)


def test_integers_and_small_floats_are_reduced_as_torch_reduces_them():
    integers = make(5, 4, low=-9, high=9, dtype=torch.int32)
    for function in (torch.sum, torch.prod, torch.amax, torch.argmin, torch.all, torch.count_nonzero, torch.min):
        everywhere(function, integers)
    everywhere(lambda x: x.mean(0, dtype=torch.float64), integers)
    bools = make(5, 4, dtype=torch.bool)
    for function in (torch.all, torch.any, torch.sum, lambda x: x.amax(0), lambda x: x.max(0)[1]):
        everywhere(function, bools)
    small = make(7, 4, dtype=torch.bfloat16)
    for function in (torch.var, torch.amax, torch.linalg.vector_norm, lambda x: x.logsumexp(0)):
        everywhere(function, small)
    everywhere(torch.mean, make(7, 4, dtype=torch.bfloat16), rtol=0.02, atol=0.01)


def test_scalar_tensors_are_reduced():
    for function in (torch.mean, torch.amax, torch.argmax, torch.linalg.vector_norm, torch.prod, lambda x: x.max(0)[0]):
        everywhere(function, make())


def test_norms_along_dims_of_size_one():
    """By negative numbers; torch 2.10's meta kernel, which gives the shape of the result, keeps such a dim."""
    for dim in (-1, (-1, 1)):
        everywhere(lambda x, dim=dim: torch.linalg.vector_norm(x, 2, dim), make(4, 1, 1))


def test_partial_extrema_are_reduced_without_communication():
    def reduce(group):
        mesh = DeviceMesh(group, (2,))
        local = torch.tensor([[1.0, 5.0], [2.0, 0.0]]) * (1 if group.rank else -1)
        largest = DTensor.from_local(local, mesh, Partial(ReduceOp.MAX))
        result = largest.amax(1)
        assert result.placements == (Partial(ReduceOp.MAX),)
        return result.full_tensor().tolist(), largest.sum().full_tensor().item()

    assert run_ranks(reduce, 2) == [([5.0, 2.0], 8.0)] * 2


def test_reductions_without_gradients():
    tensor = make(5, 4)

    def check(group):
        mesh = DeviceMesh(group, (2,))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                for function in [*DIFFERENTIABLE.values(), *OTHERS.values()]:
                    three = tensor.view(5, 2, 2)
                    check_operator(mesh, function, [three], [[Shard(0)]], backward=False)

    run_ranks(check, 2)


def test_a_reduced_dim_without_elements_raises_as_in_torch():
    def reduce(group):
        mesh = DeviceMesh(group, (2,))
        empty = spread(torch.empty(0, 3), mesh, [Shard(0)])
        for function in (torch.amax, torch.argmax, lambda x: x.max(0)):
            with pytest.raises((IndexError, RuntimeError)):
                function(empty)
        return empty.sum().full_tensor().item()

    assert run_ranks(reduce, 2) == [0.0, 0.0]


def test_norms_of_lists_are_of_each_tensor():
    first, second = make(5, 4), make(3, seed=1)

    def norms(group):
        mesh = DeviceMesh(group, (2,))
        tensors = [spread(first, mesh, [Shard(0)]), spread(second, mesh, [Partial()])]
        return [norm.full_tensor() for norm in torch._foreach_norm(tensors, 3)]

    for found in run_ranks(norms, 2):
        torch.testing.assert_close(found, [torch.linalg.vector_norm(one, 3) for one in (first, second)])


@pytest.mark.skipif(torch.ops.aten.stack.default not in RULES, reason="the norms are stacked, which has no rule")
@pytest.mark.parametrize("foreach", [True, False, None])
def test_gradients_are_clipped_by_their_norm_as_in_torch(foreach):
    values = [make(5, 4), make(3, seed=1), make(2, 2, seed=2)]
    plain = [torch.nn.Parameter(value.clone()) for value in values]
    for parameter in plain:
        parameter.grad = parameter.detach() * 3
    expected = torch.nn.utils.clip_grad_norm_(plain, 1.5, foreach=foreach)

    def clip(group):
        mesh = DeviceMesh(group, (2,))
        parameters = [
            torch.nn.Parameter(spread(value, mesh, [placement]))
            for value, placement in zip(values, (Shard(0), Replicate(), Shard(1)), strict=True)
        ]
        for parameter, placement in zip(parameters, (Shard(0), Partial(), Shard(1)), strict=True):
            parameter.grad = (parameter.detach() * 3).redistribute([placement])
        total = torch.nn.utils.clip_grad_norm_(parameters, 1.5, foreach=foreach)
        return total.full_tensor(), [parameter.grad.full_tensor() for parameter in parameters]

    for total, grads in run_ranks(clip, 2):
        torch.testing.assert_close(total, expected)
        torch.testing.assert_close(grads, [parameter.grad for parameter in plain])


def test_uneven_shards_are_not_gathered():
    """A replicated input is sliced as the other one is sharded."""

    def add(group):
        mesh = DeviceMesh(group, (2,))
        one, other = spread(make(5, 3), mesh, [Shard(0)]), spread(make(5, 3, seed=1), mesh, [Replicate()])
        return (one * other).placements

    assert run_ranks(add, 2) == [(Shard(0),)] * 2


def test_scalar_is_added_in_place_to_a_partial_sum_once():
    """As rms_norm adds its epsilon to the variance."""

    def add(group):
        mesh = DeviceMesh(group, (2, 2))
        total = spread(make(4, 4), mesh, [Shard(0), Shard(1)]).sum()
        total += 3
        total.sub_(1).add_(total)
        assert total.placements == (Partial(), Partial())
        return total.full_tensor().item()

    expected = 2 * (make(4, 4).sum().item() + 2)
    assert run_ranks(add, 4) == pytest.approx([expected] * 4)


def test_partial_sums_are_masked_in_place():
    """Zeros in each part, other numbers in the sum."""

    def mask(group):
        mesh = DeviceMesh(group, (2,))
        total = spread(make(4, 4), mesh, [Shard(0)]).sum(0)
        where = spread(make(4), mesh, [Replicate()]) > 0
        total.masked_fill_(where, 0.0)
        zeros = total.full_tensor()
        total.masked_fill_(where, 1.0)
        assert total.placements == (Partial(),)
        return zeros, total.full_tensor()

    for zeros, ones in run_ranks(mask, 2):
        torch.testing.assert_close(zeros, make(4, 4).sum(0).masked_fill(make(4) > 0, 0.0))
        torch.testing.assert_close(ones, make(4, 4).sum(0).masked_fill(make(4) > 0, 1.0))


def test_from_local_with_long_placements():
    def make_one(group):
        mesh = DeviceMesh(group, (2, 1, 1))
        return DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0), Partial(ReduceOp.MEAN), Replicate()]).shape

    assert run_ranks(make_one, 2) == [(4, 3)] * 2


def test_variance_without_degrees_of_freedom():
    """Such a variance is NaN, as in torch, which warns; it is never negative."""
    tensor = make(4, 3)

    def program(group):
        sharded = spread(tensor, DeviceMesh(group, (2,)), [Shard(0)])
        return [sharded.var(0, correction=correction).full_tensor() for correction in (3, 4, 6)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = [tensor.var(0, correction=correction) for correction in (3, 4, 6)]
    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, expected)
