"""Operators without a rule in parallel models: computed replicated with a warning, or refused."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn

import ferrodist as fd
from ferrodist import CollectiveMismatchError, ColumnParallel, DeviceMesh, RowParallel, UnsupportedOpError
from ferrodist.testing import run_ranks

PLAN = {"up": ColumnParallel(), "down": RowParallel()}


class Solutions(nn.Module):
    """A model that calls an operator without a rule on sharded activations, and one by elements."""

    def __init__(self):
        super().__init__()
        self.up, self.mix, self.down = nn.Linear(4, 16), Mix(), nn.Linear(16, 4)

    def forward(self, x):
        return self.down(self.mix(self.up(x)))


class Mix(nn.Module):
    def forward(self, x):
        square = x.unflatten(-1, (4, 4)) + 3 * torch.eye(4, dtype=x.dtype)
        return x * torch.linalg.lstsq(square, x.unflatten(-1, (4, 4))[..., :1]).solution.sum(-2)


class Selection(nn.Module):
    """A model that selects elements of sharded activations by a mask."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 16)

    def forward(self, x):
        hidden = self.up(x)
        return hidden[hidden > 0].square().sum() + hidden.nonzero().sum()


def make(kind):
    torch.manual_seed(0)
    return kind().double()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_operators_without_a_rule_are_replicated(num_ranks):
    """Forward and gradients are one process's; one warning names operator, module and bytes, whatever the steps."""
    start, alone = make(Solutions), make(Solutions)
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = alone(x)
    expected.square().sum().backward()

    def program(group):
        model = fd.parallelize(copy.deepcopy(start), DeviceMesh(group, (num_ranks,)), PLAN)
        for _ in range(2):
            model.zero_grad()
            result = model(x)
            result.square().sum().backward()
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-12, atol=1e-12)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(program, num_ranks)
    found = [str(one.message) for one in caught if "has no rule" in str(one.message)]
    forward = [one for one in found if "linalg_lstsq.default in module 'mix'" in one]
    assert len(forward) == (num_ranks if num_ranks > 1 else 0)
    assert len(set(found)) * num_ranks == len(found), "each operator and module once on each rank"
    for one in found:
        size = int(re.search(r"are gathered, (\d+) bytes? from each rank", one)[1])
        assert size > 0, one


@pytest.mark.filterwarnings("ignore:aten.* has no rule")
def test_shapes_that_depend_on_elements():
    """A mask that selects elements of a sharded tensor gathers it, and the gradients come back."""
    start, alone = make(Selection), make(Selection)
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    expected = alone(x)
    expected.backward()

    def program(group):
        model = fd.parallelize(copy.deepcopy(start), DeviceMesh(group, (2,)), {"up": ColumnParallel()})
        result = model(x)
        result.backward()
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(model.up.weight.grad.full_tensor(), alone.up.weight.grad, rtol=1e-12, atol=1e-12)

    run_ranks(program, 2)


@pytest.mark.parametrize(
    ("kind", "plan", "message"),
    [
        (Solutions, PLAN, r"no rule for aten\.linalg_lstsq.* in module 'mix' \(Mix\)"),
        (Selection, {"up": ColumnParallel()}, "depends on the elements"),
    ],
)
def test_error_refuses(kind, plan, message):
    """``fallback="error"`` refuses on all ranks, also in a copy of the model."""

    def program(group):
        model = fd.parallelize(make(kind), DeviceMesh(group, (2,)), plan, fallback="error")
        for one in (model, copy.deepcopy(model)):
            with pytest.raises(UnsupportedOpError, match=message):
                one(torch.ones(3, 4, dtype=torch.float64))

    run_ranks(program, 2)


class _Factors(torch.autograd.Function):
    """A function whose gradient's formula needs an operator without a rule."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.geqrf(grad)[0]


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 16)

    def forward(self, x):
        return _Factors.apply(self.up(x))


@pytest.mark.filterwarnings("ignore:aten.* has no rule")
def test_a_backward_has_the_setting_of_its_own_model():
    """Not of another model on the mesh that was parallelized later."""

    def program(group):
        mesh, x = DeviceMesh(group, (2,)), torch.ones(3, 4, dtype=torch.float64)
        strict = fd.parallelize(make(Factors), mesh, {"up": ColumnParallel()}, fallback="error")
        loose = fd.parallelize(make(Factors), mesh, {"up": ColumnParallel()})
        with pytest.raises(UnsupportedOpError, match="no rule"):
            strict(x).sum().backward()
        loose(x).sum().backward()

    run_ranks(program, 2)


def test_wrong_values():
    """Others than the two strings are refused by name, and ranks that differ are told so."""

    def program(group):
        mesh = DeviceMesh(group, (2,))
        with pytest.raises(ValueError, match='fallback must be "replicate" or "error", not \'gather\''):
            fd.parallelize(make(Solutions), mesh, PLAN, fallback="gather")
        with pytest.raises(TypeError, match='fallback must be "replicate" or "error", not bool'):
            fd.parallelize(make(Solutions), mesh, PLAN, fallback=True)
        with pytest.raises(CollectiveMismatchError, match="fallback"):
            fd.parallelize(make(Solutions), mesh, PLAN, fallback=["replicate", "error"][group.rank])

    run_ranks(program, 2)
