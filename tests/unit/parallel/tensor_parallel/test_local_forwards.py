"""Layers of parallel models that compute on local shards at once: as their operators on DTensors do, in fewer steps."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

import ferrodist as fd
from ferrodist.tensor import dispatch
from ferrodist.tensor.linear import linear
from ferrodist.tensor.redistribute import record_redistributions
from ferrodist.testing import run_ranks

R, P = fd.Replicate(), fd.Partial()


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def leaf(tensor, mesh, placement):
    return fd.distribute(tensor, mesh, placement).requires_grad_()


def gradients(result, given, grad, mesh):
    result.backward(fd.distribute(grad, mesh, R))
    return [result.full_tensor().detach(), *[one.grad.full_tensor() for one in given if one is not None]]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("shape", [(5, 7), (2, 4, 7), (0, 7)])
@pytest.mark.parametrize(
    ("input_placement", "weight", "bias", "output"),
    [
        (R, R, R, R),
        (R, fd.Shard(0), fd.Shard(0), fd.Shard(-1)),
        (R, fd.Shard(0, blocks=2), fd.Shard(0, blocks=2), fd.Shard(-1, blocks=2)),
        (fd.Shard(-1), fd.Shard(1), R, P),
    ],
    ids=["replicated", "columns", "columns in blocks", "rows"],
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_is_what_its_operators_compute(n, shape, input_placement, weight, bias, output, has_bias):
    """A wrong shard of the output, of a gradient, or a bias that is added on each rank would show; also if uneven."""
    x, w, b, grad = random(*shape), random(8, 7, seed=1), random(8, seed=2), random(*shape[:-1], 8, seed=3)

    def program(group):
        mesh = fd.DeviceMesh(group, (n,))
        found = []
        for function in (linear, functional.linear):
            given = (leaf(x, mesh, input_placement), leaf(w, mesh, weight), leaf(b, mesh, bias) if has_bias else None)
            result = function(*given)
            if function is linear:
                assert result.placements == result.redistribute(output).placements
            found.append(gradients(result, given, grad, mesh))
        return found

    for mine, expected in run_ranks(program, n):
        for one, other in zip(mine, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_linear_leaves_other_placements_to_the_operators():
    """A sequence that is sharded, a partial input, a mesh of two axes, or mixed dtypes have no single call."""

    def program(group):
        mesh, square = fd.DeviceMesh(group, (4,)), fd.DeviceMesh(group, (2, 2))
        x, w = random(4, 8), random(8, 8)
        return [
            linear(fd.distribute(x, mesh, fd.Shard(0)), fd.distribute(w, mesh, R), None),
            linear(fd.distribute(x, mesh, fd.Shard(1)), fd.distribute(w, mesh, fd.Shard(0)), None),
            linear(fd.distribute(x, mesh, P), fd.distribute(w, mesh, R), None),
            linear(fd.distribute(x, square, [R, R]), fd.distribute(w, square, [R, R]), None),
            linear(fd.distribute(x, mesh, R), fd.distribute(w.float(), mesh, R), None),
            linear(fd.distribute(x, mesh, R), fd.distribute(w, mesh, R), fd.distribute(w[0], mesh, fd.Shard(0))),
        ]

    assert run_ranks(program, 4) == [[None] * 6] * 4


def test_linear_of_many_shapes_keeps_a_bounded_cache(monkeypatch):
    """A network of linear layers alone, whose batches differ in shape, would fill the memory with placements."""
    monkeypatch.setattr(dispatch, "_MAX_CACHED", 8)

    def program(group):
        mesh = fd.DeviceMesh(group, (2,))
        weight = fd.distribute(random(8, 7), mesh, fd.Shard(0))
        inputs = [fd.distribute(random(size, 7), mesh, R) for size in range(1, 31)]
        results = [linear(one, weight, None).full_tensor().shape for one in inputs]
        return results, len(weight._spec.dispatch_cache)

    for results, num_cached in run_ranks(program, 2):
        assert results == [(size, 8) for size in range(1, 31)]
        assert num_cached <= 8


def test_gradients_of_gradients_of_a_parallel_network():
    """A gradient penalty must reach the weights through the single call, too."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    x = random(3, 6)

    def penalty(model):
        given = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(given).square().sum(), given, create_graph=True)
        grad.square().sum().backward()
        return [one.grad for one in model.parameters()]

    expected = penalty(copy.deepcopy(network))

    def program(group):
        plan = {"0": fd.ColumnParallel(), "2": fd.RowParallel()}
        model = fd.parallelize(copy.deepcopy(network), fd.DeviceMesh(group, (2,)), plan)
        return [one.full_tensor() for one in penalty(model)]

    for grads in run_ranks(program, 2):
        for one, other in zip(grads, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


class CountingNorm(nn.Module):
    """A norm as models write them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(random(6))
        self.eps = 1e-6

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Block(nn.Module):
    """Three layers that share an input, after a norm, with a residual connection."""

    def __init__(self):
        super().__init__()
        self.norm, self.other_norm = CountingNorm(), nn.LayerNorm(6)
        self.q, self.k, self.v = (nn.Linear(6, 4) for _ in range(3))
        self.out = nn.Linear(4, 6)

    def forward(self, x):
        y = self.norm(x)
        return self.other_norm(x + self.out(self.q(y) * self.k(y) + self.v(y)))


PLAN = {"q": fd.ColumnParallel(), "k": fd.ColumnParallel(), "v": fd.ColumnParallel(), "out": fd.RowParallel()}


@pytest.mark.parametrize("n", [1, 2, 3])
def test_layers_that_share_an_input_reduce_its_gradient_once(n):
    """Each layer would otherwise send as much as the sum of their gradients."""
    torch.manual_seed(0)
    block = Block().double()
    x = random(2, 5, 6)
    mine = copy.deepcopy(block)
    given = x.clone().requires_grad_()
    mine(given).square().sum().backward()

    def program(group):
        model = fd.parallelize(copy.deepcopy(block), fd.DeviceMesh(group, (n,)), PLAN)
        own = x.clone().requires_grad_()
        with record_redistributions() as forward:
            result = model(own)
        with record_redistributions() as backward:
            result.square().sum().backward()
        grads = [own.grad, *[one.grad.full_tensor() for one in model.parameters()]]
        return grads, len(forward), len(backward)

    for grads, num_forward, num_backward in run_ranks(program, n):
        assert (num_forward, num_backward) == (1, 1)
        for one, other in zip(grads, [given.grad, *[one.grad for one in mine.parameters()]], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_copies_of_a_parallel_model_have_layers_of_their_own():
    """A copied model's forwards must not read the original's parameters."""

    def program(group):
        model = fd.parallelize(Block().double(), fd.DeviceMesh(group, (2,)), PLAN)
        other = copy.deepcopy(model)
        with torch.no_grad():
            for one in model.parameters():
                one.zero_()
        return model(random(2, 6)).abs().max().item(), other(random(2, 6)).abs().max().item()

    assert all(zeroed == 0 and kept > 0 for zeroed, kept in run_ranks(program, 2))


class TwoResultsNorm(CountingNorm):
    """A norm that adds the residual, too."""

    def forward(self, x, residual):
        total = x + residual
        return super().forward(total), {"residual": total}


class StatefulNorm(CountingNorm):
    """A norm that counts its calls, and keeps its last result for others."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        self.last = super().forward(x) * self.calls
        return self.last


class WritingNorm(CountingNorm):
    """A norm that changes its input in place."""

    def forward(self, x):
        return super().forward(x.mul_(2))


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return weight * 2


class NormedSum(nn.Module):
    """A norm in a network of linear layers."""

    def __init__(self, kind):
        super().__init__()
        self.up, self.out, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), kind()

    def forward(self, x):
        hidden = self.out(torch.tanh(self.up(x)))
        if isinstance(self.norm, TwoResultsNorm):
            result, others = self.norm(hidden, x)
            return self.out(self.up(result)) * others["residual"]
        result = self.norm(hidden)
        return self.out(self.up(result)) * getattr(self.norm, "last", hidden)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("kind", [TwoResultsNorm, StatefulNorm, WritingNorm, CountingNorm])
@pytest.mark.parametrize("is_parametrized", [False, True])
def test_norms_of_unusual_code(n, kind, is_parametrized):
    """Several results, assigned attributes, inputs that are written and parameters that are computed: as unsharded."""
    torch.manual_seed(0)
    network, x = NormedSum(kind).double(), random(2, 5, 6)

    def steps(model):
        if is_parametrized:
            parametrize.register_parametrization(model.norm, "weight", Doubled())
        results = [model(x) for _ in range(3)]
        torch.stack(results).square().sum().backward()
        return [*results, *[one.grad for one in model.parameters()]], getattr(model.norm, "calls", 0)

    expected, num_calls = steps(copy.deepcopy(network))

    def program(group):
        plan = {"up": fd.ColumnParallel(), "out": fd.RowParallel()}
        found, calls = steps(fd.parallelize(copy.deepcopy(network), fd.DeviceMesh(group, (n,)), plan))
        return [one.full_tensor() if isinstance(one, fd.DTensor) else one for one in found], calls

    for found, calls in run_ranks(program, n):
        assert calls == num_calls
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_autocast_reaches_linear_layers():
    """The single call would compute in float32 what autocast has in bfloat16."""

    def program(group):
        model = fd.parallelize(nn.Sequential(nn.Linear(6, 4)), fd.DeviceMesh(group, (2,)), {"0": fd.ColumnParallel()})
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(torch.randn(2, 6)).dtype

    assert run_ranks(program, 2) == [torch.bfloat16] * 2
