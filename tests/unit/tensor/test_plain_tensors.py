"""Plain tensors beside distributed ones: refused, unless they can't differ between ranks or the ranks compare them."""

import pytest
import torch
from operator_checks import assert_same, make, placements_of, spread
from torch.nn import functional

import ferrodist as fd
from ferrodist import CollectiveMismatchError, DeviceMesh, DTensor, Partial, Replicate, Shard, UnsupportedOpError
from ferrodist.testing import run_ranks


def on_two(check):
    return run_ranks(lambda group: check(DeviceMesh(group, (2,))), 2)


class Scaled(torch.nn.Module):
    """A module that `parallelize` has not sharded, which mixes a plain tensor with its parameter."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 6))

    def forward(self, x):
        scale = torch.ones(4, 6)
        return x * self.weight * scale


def test_a_plain_tensor_is_refused():
    """The error says which module's code has it, and where it counts as replicated."""

    def check(mesh):
        x = fd.distribute(make(4, 6), mesh, Shard(0))
        with pytest.raises(
            ValueError, match=r"aten.mul.Tensor got .* shape \(4, 6\): distribute it too.*fd.parallelize"
        ):
            _ = x * make(4, 6)
        model = torch.nn.Sequential(torch.nn.Sequential(Scaled()))
        model[0][0].weight = torch.nn.Parameter(fd.distribute(torch.ones(4, 6), mesh, Shard(0)))
        with pytest.raises(ValueError, match=r"aten.mul.Tensor in module '0.0' \(Scaled\) got distributed tensors"):
            model(x)
        weight, other = make(6, 6).requires_grad_(), make(6, 6)
        for use in (
            lambda: functional.linear(x, weight),
            lambda: functional.linear(x, other),
            lambda: x @ other.t(),
            lambda: torch.stack([x, make(4, 6)]),
            lambda: make(4, 6) + x,
            lambda: x[:, torch.arange(2)],
            lambda: functional.linear(x, torch.ones(6, 6).double()),
        ):
            with pytest.raises(ValueError, match="distribute it too"):
                use()

    on_two(check)


def test_empty_tensors():
    """Empty tensors are accepted, as no element can differ: caches begin with one."""

    def check(mesh):
        for where in placements_of(2, 1):
            x = spread(make(4, 6), mesh, where)
            empty = torch.tensor([], dtype=torch.float64)
            assert_same(torch.cat([empty, x]), make(4, 6), f"{where}")
            assert_same(torch.cat([x, empty, x], 1), torch.cat([make(4, 6)] * 2, 1), f"{where}")
            assert_same(torch.cat([torch.zeros(0, 6).double(), x]), make(4, 6), f"{where}")
            assert_same(x[torch.tensor([], dtype=torch.int64)], make(0, 6), f"{where}")
            assert_same(x[:, []], make(4, 0), f"{where}")

    on_two(check)


def test_scalars_in_lists():
    """A plain scalar counts as replicated, as it does beside a single tensor."""

    def check(mesh):
        for where in placements_of(2, 1):
            x = spread(make(4, 6), mesh, where)
            expected = torch.stack([make(4, 6).sum(), torch.tensor(1.0).double()])
            assert_same(torch.stack([x.sum(), torch.tensor(1.0).double()]), expected, f"{where}")
            assert_same(torch.stack([torch.tensor(1.0).double(), x.sum()]), expected.flip(0), f"{where}")

    on_two(check)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, number: x.masked_fill(x > 0, number),
        lambda x, number: x.index_fill(1, (x[0] * 0).long(), number),
        lambda x, number: x.index_select(1, number.long()),
        lambda x, number: torch.addmm(number, x, x.mT),
        lambda x, number: torch.baddbmm(number, x[None], x.mT[None]),
        lambda x, number: torch.where(x > 0, x, number),
        lambda x, number: torch.lerp(x, 2 * x, number),
        torch.heaviside,
        lambda x, number: torch.addcmul(number, x, x),
        lambda x, number: torch.clamp(x, number, number + 1),
    ],
)
def test_scalars_beside_tensors(function):
    """A tensor without dims counts as replicated, in all operators and beside all placements."""
    number = torch.tensor(2.0).double()
    expected = function(make(4, 6), number)

    def check(mesh):
        for where in placements_of(2, 1):
            assert_same(function(spread(make(4, 6), mesh, where), number), expected, f"{where}")

    on_two(check)


@pytest.mark.parametrize("foreach", [False, True])
def test_clipping_plain_and_distributed_gradients(foreach):
    """As of a model of which some layers are sharded; plain gradients stay plain."""
    grads = [make(4, 6), make(5, seed=1), make(3, 2, seed=2)]
    expected = [torch.nn.Parameter(torch.zeros_like(one)) for one in grads]
    for one, grad in zip(expected, grads, strict=True):
        one.grad = grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(expected, 0.5, foreach=foreach)

    def check(mesh):
        for where in (Shard(0), Shard(1), Replicate(), Partial()):
            parameters = [torch.nn.Parameter(torch.zeros_like(one)) for one in grads]
            parameters[0] = torch.nn.Parameter(fd.distribute(torch.zeros(4, 6).double(), mesh, Shard(0)))
            for one, grad in zip(parameters[1:], grads[1:], strict=True):
                one.grad = grad.clone()
            parameters[0].grad = spread(grads[0], mesh, where)
            got = torch.nn.utils.clip_grad_norm_(parameters, 0.5, foreach=foreach)
            assert_same(got, norm, f"{where}")
            assert_same(parameters[0].grad, expected[0].grad, f"{where}")
            for one, other in zip(parameters[1:], expected[1:], strict=True):
                assert type(one.grad) is torch.Tensor
                torch.testing.assert_close(one.grad, other.grad)

    on_two(check)


def test_lists_as_indices():
    """torch makes tensors of them that only it holds; if the lists differ, all ranks raise."""

    def check(mesh):
        for where in placements_of(2, 1):
            x = spread(make(4, 6), mesh, where)
            assert_same(x[[0, 1]], make(4, 6)[[0, 1]], f"{where}")
            assert_same(x[:, [3, 0, 3]], make(4, 6)[:, [3, 0, 3]], f"{where}")
            assert_same(x[[0, 1], [2, 3]], make(4, 6)[[0, 1], [2, 3]], f"{where}")
            if where == (Replicate(),):
                x[[0, 1]] = 2.0
                assert_same(x[[0, 1]], torch.full((2, 6), 2.0).double(), f"{where}")
        with pytest.raises(CollectiveMismatchError, match=r"int64 of shape \(1,\) with other elements for aten.index"):
            x[[mesh.coordinate[0]]]

    on_two(check)


@pytest.mark.filterwarnings("ignore:aten.* has no rule")
@pytest.mark.parametrize(
    "function",
    [
        lambda q: functional.scaled_dot_product_attention(q, q, q, is_causal=True),
        lambda q: functional.scaled_dot_product_attention(q[0], q[0], q[0], is_causal=True),
        lambda q: functional.interpolate(q, scale_factor=2, mode="nearest"),
        lambda q: functional.interpolate(q, size=(3, 5), mode="nearest-exact"),
        lambda q: torch.quantile(q, 0.3, dim=-1),
        lambda q: torch.quantile(q, 0.3),
        lambda q: torch.nanquantile(q, 0.3, dim=1),
        lambda q: torch.linalg.matrix_power(q @ q.mT, 0),
        lambda q: torch.linalg.matrix_power(q @ q.mT, 3),
        lambda q: torch.stack(torch.unravel_index((q[0, 0, 0] * 0).long() + 7, (3, 5))),
        lambda q: functional.one_hot((q[0, 0, 0] * 0).long() + 1, 4),
        lambda q: torch.tensor_split(q, torch.tensor([1, 3]), 3),
        lambda q: torch.tensor_split(q, torch.tensor([1, 3]), 2),
    ],
)
def test_tensors_made_by_torch_functions(function):
    """Tensors that torch's functions make are accepted: all ranks have the same."""
    q = make(2, 4, 5, 8)
    expected = function(q)

    def check(mesh):
        for where in (Replicate(), Shard(0), Shard(1)):
            with fd.allow_replication():
                assert_same(function(spread(q, mesh, where)), expected, f"{where}")

    on_two(check)


def attend(q, seed):
    torch.manual_seed(seed)
    return functional.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=0.3)


def test_causal_attention_with_dropout():
    """As in a GPT's training: the result of one process, with the same dropout."""
    q = make(2, 4, 5, 8)
    group = fd.SimulatedBackend.create_group(1)[0]
    for seed in range(3):
        assert_same(attend(spread(q, DeviceMesh(group, (1,)), Replicate()), seed), attend(q, seed), "attention")


@pytest.mark.parametrize(
    "function",
    [
        torch.nonzero,
        lambda x: torch.nonzero(x, as_tuple=True),
        lambda x: torch.where(x > 0),
        torch.argwhere,
        lambda x: x[x > 0],
        lambda x: x[x[:, 0] > 0],
        lambda x: torch.masked_select(x, x > 0),
        lambda x: torch.unique(x.round()),
        lambda x: torch.unique_consecutive(x.round()),
        lambda x: torch.bincount(x.abs().long().flatten()),
        lambda x: torch.repeat_interleave(x[0], (x[0] > 0).long() + 1),
    ],
)
def test_data_dependent_shapes(function):
    """Shapes that depend on the elements are the same on all ranks if replicated; sharded tensors are refused."""
    x = make(4, 6)
    expected = function(x)

    def check(mesh):
        assert_same(function(spread(x, mesh, Replicate())), expected, "replicated")
        with pytest.raises(UnsupportedOpError, match=r"depends on the elements.*redistribute"):
            function(spread(x, mesh, Shard(0)))

    on_two(check)


def test_gradients_of_masked_selection_and_writes():
    """With all placements of the incoming gradient."""
    x, weight = make(4, 6), make(6, 6, seed=1)
    mask = x[:, 0] > 0

    def use(x, mask, weight):
        picked = x[mask] @ weight
        return (torch.masked_select(x, x > 0).sum() + picked.square().sum()) * 1.0

    plain = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    use(plain[0], mask, plain[1]).backward()

    def check(mesh):
        for where in (Shard(0), Shard(1), Replicate()):
            mine = [spread(x, mesh, Replicate()).requires_grad_(), spread(weight, mesh, where).requires_grad_()]
            use(mine[0], spread(mask, mesh, Replicate()), mine[1]).backward()
            assert_same([one.grad for one in mine], [one.grad for one in plain], f"{where}")
            target = spread(x, mesh, Replicate())
            target[spread(mask, mesh, Replicate())] = spread(make(int(mask.sum()), 6, seed=2), mesh, Replicate())
            written = x.clone()
            written[mask] = make(int(mask.sum()), 6, seed=2)
            assert_same(target, written, f"{where}")

    on_two(check)


@pytest.mark.parametrize("pad", [(0, 1), (1, 0, 0, 2), (-1, 2), (0, 0, 1, 1), (0, 0), (2, 0, -1, 0)])
@pytest.mark.parametrize("value", [0, 1.5])
def test_padding_with_a_constant(pad, value):
    """With every placement, forward and backward, on one axis and on two."""
    x = make(4, 6)
    mine = x.clone().requires_grad_()
    expected = functional.pad(mine, pad, value=value)
    grad = make(*expected.shape, seed=5)
    expected.backward(grad)

    def check(group):
        mesh = DeviceMesh(group, (2,) * (group.world_size // 2))
        for where in placements_of(2, mesh.ndim):
            its = spread(x, mesh, where).requires_grad_()
            got = functional.pad(its, pad, value=value)
            assert_same(got, expected, f"{where}")
            got.backward(spread(grad, mesh, [Replicate()] * mesh.ndim))
            assert_same(its.grad, mine.grad, f"{where}")
            labels = spread(x.long(), mesh, [Replicate() if one == Partial() else one for one in where])
            assert_same(functional.pad(labels, pad, value=-100), functional.pad(x.long(), pad, value=-100), f"{where}")

    run_ranks(check, 2)
    run_ranks(check, 4)


def test_writes_to_plain_tensors():
    """A replicated scalar may be written to each rank's own tensor; a distributed tensor may not."""

    def check(mesh):
        total, number = make(4, 6), fd.distribute(torch.tensor(2.0).double(), mesh, Replicate())
        assert total.mul_(number) is total
        torch.testing.assert_close(total, make(4, 6) * 2)
        with pytest.raises(ValueError, match="distribute it too"):
            total.add_(fd.distribute(make(4, 6), mesh, Shard(0)))
        assert isinstance(number, DTensor)

    on_two(check)
