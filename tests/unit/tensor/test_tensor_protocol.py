"""DTensor in Python and in modules: copies, parameters, numbers, comparisons, state dicts."""

import copy

import pytest
import torch
from operator_checks import assert_same, make, placements_of, spread

import ferrodist as fd
from ferrodist import DeviceMesh, DTensor, Partial, ReduceOp, Replicate, Shard
from ferrodist.errors import CollectiveMismatchError
from ferrodist.tensor.dtensor import keep_grad_placements
from ferrodist.testing import run_ranks


def on_two(check):
    run_ranks(lambda group: check(DeviceMesh(group, (2,))), 2)


def test_deepcopy():
    """A copy has memory of its own, the same spec, and is a parameter if the original is."""

    def check(mesh):
        parameter = torch.nn.Parameter(fd.distribute(make(4, 5), mesh, Shard(0)))
        parameter.grad = fd.distribute(make(4, 5, seed=1), mesh, Replicate())
        other = copy.deepcopy(parameter)
        assert isinstance(other, torch.nn.Parameter)
        assert isinstance(other, DTensor)
        assert other.requires_grad
        assert other.is_leaf
        assert other._spec is parameter._spec
        with torch.no_grad():
            parameter.zero_()
        assert_same(other, make(4, 5), "the copy")
        assert_same(other.grad, make(4, 5, seed=1), "its gradient")
        assert other.grad.placements == (Replicate(),)
        both = copy.deepcopy([parameter, parameter])
        assert both[0] is both[1]
        with pytest.raises(RuntimeError, match="only leaves"):
            copy.deepcopy(parameter * 2)

    on_two(check)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_deepcopy_keeps_the_hook_for_gradient_placements(is_frozen):
    """A copy redistributes its gradients as the original does, if frozen once it is trained; it lacks other hooks."""

    def check(mesh):
        parameter = torch.nn.Parameter(fd.distribute(make(4, 5), mesh, Replicate()), requires_grad=not is_frozen)
        rows = fd.distribute(make(6, 4, seed=1), mesh, Shard(0))

        def grad_placements(one):
            one.requires_grad_(True)
            (rows @ one).sum().backward()
            return one.grad.placements

        without = copy.deepcopy(parameter)
        keep_grad_placements(parameter)
        calls = []
        if not is_frozen:
            parameter.register_hook(calls.append)
        copies = [copy.deepcopy(parameter), copy.deepcopy(torch.nn.ParameterList([parameter]))[0]]
        copies.append(copy.deepcopy(copies[0]))
        assert [one.requires_grad for one in copies] == [not is_frozen] * 3
        assert grad_placements(without) == (Partial(),)
        for one in copies:
            assert grad_placements(one) == (Replicate(),)
            assert_same(one.grad, without.grad.full_tensor(), "the gradient")
        assert not calls
        assert grad_placements(parameter) == (Replicate(),)
        assert len(calls) == (not is_frozen)

    on_two(check)


def layer(mesh, *placements, seed=0):
    """A linear layer with sharded parameters."""
    module = torch.nn.Linear(5, 4)
    module.weight = torch.nn.Parameter(fd.distribute(make(4, 5, dtype=torch.float32, seed=seed), mesh, placements[0]))
    module.bias = torch.nn.Parameter(fd.distribute(make(4, dtype=torch.float32, seed=seed), mesh, placements[1]))
    return module


def test_module_conversions():
    """Module.to and the like change parameters, which stay the same objects."""

    def check(mesh):
        module = layer(mesh, Shard(0), Shard(0))
        weight = module.weight
        for convert, dtype in (
            (module.double, torch.float64),
            (lambda: module.to(torch.bfloat16), torch.bfloat16),
            (module.float, torch.float32),
        ):
            convert()
            assert module.weight is weight
            assert weight.dtype == weight.to_local().dtype == dtype
            assert weight.placements == (Shard(0),)
        full = make(4, 5, dtype=torch.float32).bfloat16().float()
        assert_same(module.weight, full, "there and back")
        x = fd.distribute(make(3, 5, dtype=torch.float32), mesh, Replicate())
        module(x).sum().backward()
        assert_same(weight.grad, make(3, 5, dtype=torch.float32).sum(0).expand(4, 5), "gradient")
        assert copy.deepcopy(module).weight.placements == (Shard(0),)

    on_two(check)


def test_data():
    """``.data`` is the tensor without history, and can be set to another DTensor, not to a plain tensor."""

    def check(mesh):
        parameter = torch.nn.Parameter(fd.distribute(make(4, 5), mesh, Shard(0)))
        parameter.data.mul_(2)
        assert_same(parameter, 2 * make(4, 5), "what was written to data")
        parameter.data = fd.distribute(make(4, 5, seed=1), mesh, Shard(1))
        assert parameter.placements == (Shard(1),)
        assert_same(parameter, make(4, 5, seed=1), "other data")
        with pytest.raises(TypeError, match="distribute"):
            parameter.data = make(4, 5)

    on_two(check)


def test_states_are_loaded_into_other_placements():
    """Plain tensors are refused by an error that says so."""

    def check(mesh):
        source, target = layer(mesh, Shard(0), Shard(0), seed=1), layer(mesh, Shard(1), Replicate())
        state = source.state_dict()
        assert isinstance(state["weight"], DTensor)
        target.load_state_dict(state)
        assert target.weight.placements == (Shard(1),)
        assert_same(target.weight, make(4, 5, dtype=torch.float32, seed=1), "the weight")
        assert_same(target.bias, make(4, dtype=torch.float32, seed=1), "the bias")
        with pytest.raises(RuntimeError, match="distribute it too"):
            target.load_state_dict(torch.nn.Linear(5, 4).state_dict())
        assert_same(target.weight, make(4, 5, dtype=torch.float32, seed=1), "the weight")

    on_two(check)


def test_item():
    """A tensor of one element is its number on every rank, under all placements."""

    def check(mesh):
        for placements in placements_of(0, 1):
            x = spread(torch.tensor(3.5), mesh, placements)
            assert x.item() == float(x) == 3.5
            assert int(x) == 3
            assert bool(x)
            assert f"{x:.2f}" == "3.50"
            assert x.tolist() == 3.5
            assert torch.tensor([x, x + 1]).tolist() == [3.5, 4.5]
            assert torch.tensor([x > 1, x > 4]).tolist() == [True, False]
            assert "abc"[spread(torch.tensor(2), mesh, placements)] == "c"
            assert torch.tensor([[spread(torch.tensor(2), mesh, placements)]]).tolist() == [[2]]
            assert "3.5" in repr(spread(torch.tensor(3.5), mesh, [Replicate()]))
            assert f"{spread(torch.tensor(3), mesh, [Replicate()])}" == "3"
            assert "Partial" in f"{spread(torch.tensor(3), mesh, [Partial()])}"
        for placement in (Shard(0), Shard(1), Replicate()):
            assert spread(torch.tensor([[2]]), mesh, [placement]).item() == 2
        x = spread(make(4, 5), mesh, [Shard(0)])
        with pytest.raises(RuntimeError, match="cannot be converted"):
            x.item()
        with pytest.raises(RuntimeError, match="ambiguous"):
            bool(x)
        assert x.requires_grad_().tolist() == make(4, 5).tolist()
        for convert in (DTensor.numpy, lambda x: x.__array__()):
            with pytest.raises(TypeError, match=r"full_tensor\(\)"):
                convert(x)

    on_two(check)


def test_equal_and_allclose():
    """Comparisons return the same on all ranks, also if only one rank has a difference."""

    def check(mesh):
        one, other = make(4, 5), make(4, 5)
        other[3, 4] += 1e-9
        for here in placements_of(2, 1):
            for there in placements_of(2, 1):
                x, y, z = spread(one, mesh, here), spread(one, mesh, there), spread(other, mesh, there)
                assert torch.allclose(x, y)
                assert torch.allclose(x, z)
                assert not torch.allclose(x, z, rtol=0, atol=1e-12)
                if Partial() not in (*here, *there):
                    assert torch.equal(x, y)
                    assert not torch.equal(x, z)
        assert not torch.equal(x, x[1:])
        nothing = spread(one * float("nan"), mesh, [Shard(0)])
        assert not torch.equal(nothing, nothing)
        assert torch.allclose(nothing, nothing, equal_nan=True)

    on_two(check)


def test_sequence_protocol():
    """len, iteration, unpacking and printing."""

    def check(mesh):
        x = spread(make(3, 2), mesh, [Shard(1)])
        assert len(x) == 3
        for row, expected in zip(x, make(3, 2), strict=True):
            assert_same(row, expected, "a row")
        one, _, _ = x
        assert one.placements == (Shard(0),)
        assert str(x) == repr(x)
        assert "float64[3, 2] over {0: Shard(1)}" in f"{x}"

    on_two(check)


def test_sums_in_a_python_loop():
    """A plain number may be the start."""

    def check(mesh):
        for placement in (Replicate(), Partial()):
            loss, total = spread(torch.tensor(1.5), mesh, [placement]), torch.tensor(0.0)
            for _ in range(3):
                total += loss
            assert type(total) is torch.Tensor
            assert total == 4.5

    on_two(check)


def test_from_local_with_all_placements():
    """Without a given shape, and on three axes; different placements on ranks are an error on all."""

    def check(group):
        mesh = DeviceMesh(group, (1, 2, 1))
        placements = [Replicate(), Partial(ReduceOp.MAX), Partial(ReduceOp.MAX)]
        local = torch.full((2, 3), float(group.rank))
        assert_same(DTensor.from_local(local, mesh, placements), torch.ones(2, 3), "a maximum")
        with pytest.raises(
            CollectiveMismatchError, match=r"rank 0 has .* placed as .*Shard\(0\).* rank 1 has .*Shard\(1\)"
        ):
            DTensor.from_local(local, mesh, [Replicate(), Shard(group.rank), Replicate()])

    run_ranks(check, 2)
