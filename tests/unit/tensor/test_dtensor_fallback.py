"""Operators without a rule, and those that write to ``out``, or write what they don't return."""

import pytest
import torch
from operator_checks import assert_same, make, placements_of, spread
from torch.nn import functional

import ferrodist as fd
from ferrodist import CollectiveMismatchError, DeviceMesh, DTensor, Partial, Replicate, Shard, UnsupportedOpError
from ferrodist.tensor.plain_tensors import returned_arguments
from ferrodist.testing import run_ranks
from ferrodist.torch_private.operators import create_operators

pytestmark = [
    pytest.mark.filterwarnings("ignore:aten.* has no rule"),
    pytest.mark.filterwarnings("ignore:index_reduce.. is in beta"),
]


def on_two(check):
    def program(group):
        with fd.allow_replication():
            check(DeviceMesh(group, (2,)))

    run_ranks(program, 2)


def positive(*shape, **named):
    """A well-conditioned matrix."""
    x = make(*shape, **named)
    return x @ x.mT + 3 * torch.eye(shape[-1], dtype=x.dtype)


@pytest.mark.parametrize(
    "function",
    [
        functional.rrelu,
        lambda x: functional.rrelu(x, 0.2, 0.2, training=True),
        torch.nn.RReLU(0.25, 0.25).train(),
        lambda x: functional.rrelu(x, 0.1, 0.1, training=False, inplace=True),
    ],
)
def test_writes_that_are_not_returned(function):
    """A leaky ReLU with random slopes writes the slopes, and returns its output."""

    def check(mesh):
        for where in placements_of(2, 1):
            x, target = make(4, 6), spread(make(4, 6), mesh, where)
            assert_same(function(target), function(x), f"{where}")

    on_two(check)


aten = torch.ops.aten


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


MOVING_AVERAGE = (
    make(4, 6).float(),
    *(torch.ones(1), torch.ones(1)),
    *(torch.zeros(1), torch.zeros(1), torch.ones(1), torch.zeros(1, dtype=torch.int32)),
    *(0.1, 0, 255, 0, False, False),
)
GROWTH = (torch.zeros(1), 2.0, 0.5, 2)  # of a gradient scaler: nothing is infinite, for the second time in a row


@pytest.mark.parametrize(
    ("operator", "arguments", "named"),
    [
        (aten.rrelu_with_noise, (make(4, 6), zeros(4, 6), 0.2, 0.2, True), {}),
        (aten.rrelu_with_noise_, (make(4, 6), zeros(4, 6), 0.2, 0.2, True), {}),
        (aten.rrelu_with_noise, (make(4, 6), zeros(4, 6), 0.2, 0.2, True), {"out": zeros(4, 6)}),
        (aten._batch_norm_with_update, (make(4, 6), None, None, zeros(6), zeros(6), 0.1, 1e-5), {}),
        (aten._native_batch_norm_legit, (make(4, 6), None, None, zeros(6), zeros(6), True, 0.1, 1e-5), {}),
        (aten._fused_moving_avg_obs_fq_helper, MOVING_AVERAGE, {}),
        (aten.fused_moving_avg_obs_fake_quant, MOVING_AVERAGE, {}),
        (aten._amp_update_scale_, (zeros(1).float() + 8, torch.ones(1, dtype=torch.int32), *GROWTH), {}),
    ],
)
def test_all_operators_with_unreturned_writes(operator, arguments, named):
    """All of torch's: their writes are done, and their results returned."""

    def fresh(place=lambda one: one.clone()):
        def of(one):
            return place(one) if isinstance(one, torch.Tensor) else one

        return [of(one) for one in arguments], {name: of(one) for name, one in named.items()}

    plain, plain_named = fresh()
    expected = operator(*plain, **plain_named)

    def check(mesh):
        for where in placements_of(2, 1, partial=False):
            mine, its = fresh(lambda one, where=where: spread(one, mesh, where if one.dim() == 2 else Replicate()))
            got = operator(*mine, **its)
            pairs = zip(got, expected, strict=True) if isinstance(expected, tuple) else [(got, expected)]
            assert_same(*map(list, zip(*[pair for pair in pairs if pair[1].numel()], strict=True)), f"{where}")
            tensors = [one for one in (*mine, *its.values()) if isinstance(one, torch.Tensor)]
            assert_same(
                tensors, [one for one in (*plain, *plain_named.values()) if isinstance(one, torch.Tensor)], f"{where}"
            )

    on_two(check)


def test_no_other_operator_has_unreturned_writes():
    """Operators of a newer torch would need a look."""
    create_operators()
    found = set()
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            schema = getattr(packet, overload)._schema
            written = {argument.name for argument in schema.arguments if argument.is_write and not argument.is_out}
            returned = set(returned_arguments(getattr(packet, overload)))
            if schema.returns and written - returned and "Tensor" in str(schema.arguments[0].type):
                found.add(name)
    tested = {
        *("_batch_norm_with_update", "_native_batch_norm_legit", "rrelu_with_noise", "rrelu_with_noise_"),
        *("_amp_update_scale_", "_fused_moving_avg_obs_fq_helper", "fused_moving_avg_obs_fake_quant"),
    }
    assert tested <= found
    of_gpus = {"_cudnn_attention_forward_no_dropout_inplace", "_flash_attention_forward_no_dropout_inplace"}
    of_packed_weights = {"fbgemm_linear_fp16_weight", "fbgemm_linear_fp16_weight_fp32_activation"}  # no tensors
    assert found - tested <= {"_amp_update_scale", *of_gpus, *of_packed_weights}  # whose form with out= calls another


def test_random_operators_without_a_rule_compare_generators():
    """Random operators draw from each rank's generator, which must be in the same state on all ranks."""

    def program(group):
        mesh = DeviceMesh(group, (2,))
        x = fd.distribute(make(4, 6), mesh, Shard(0))
        generator = torch.Generator().manual_seed(group.rank)
        noise = fd.distribute(torch.zeros(4, 6, dtype=torch.float64), mesh, Replicate())
        with (
            fd.allow_replication(),
            pytest.raises(CollectiveMismatchError, match="draws the same numbers on all ranks, but the generators"),
        ):
            torch.ops.aten.rrelu_with_noise(x, noise, 0.1, 0.3, True, generator)

    run_ranks(program, 2)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, out: torch.linalg.inv(x, out=out), [(4, 4)]),
        (lambda x, out: torch.linalg.det(x, out=out), [()]),
        (lambda x, out: torch.linalg.cholesky(x, out=out), [(4, 4)]),
        (lambda x, out: torch.linalg.eigvalsh(x, out=out), [(4,)]),
        (lambda x, out: torch.linalg.svdvals(x, out=out), [(4,)]),
        (lambda x, out: torch.linalg.solve(x, x, out=out), [(4, 4)]),
        (lambda x, out: torch.linalg.eigh(x, out=out), [(4,), (4, 4)]),
        (lambda x, out: torch.linalg.qr(x, out=out), [(4, 4), (4, 4)]),
        (lambda x, out: torch.geqrf(x, out=out), [(4, 4), (4,)]),
        (lambda x, out: torch.linalg.slogdet(x, out=out), [(), ()]),
    ],
)
def test_out_arguments_without_a_rule(function, shapes):
    """Several tensors may be written, and tensors that torch makes itself; they are the results."""
    expected = function(positive(4, 4), None if len(shapes) > 1 else torch.empty(shapes[0], dtype=torch.float64))

    def check(mesh):
        for where in (Replicate(), Shard(0)):
            outs = [
                spread(torch.zeros(shape, dtype=torch.float64), mesh, where if shape else Replicate())
                for shape in shapes
            ]
            got = function(spread(positive(4, 4), mesh, where), outs[0] if len(outs) == 1 else tuple(outs))
            given = [got] if isinstance(got, torch.Tensor) else got
            assert all(one is out for one, out in zip(given, outs, strict=True))
            assert_same(outs, [expected] if len(outs) == 1 else list(expected), f"{where}")

    on_two(check)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, out: torch.max(x, 1, out=out), [(4,), (4,)]),
        (lambda x, out: torch.sort(x, 1, out=out), [(4, 6), (4, 6)]),
        (lambda x, out: torch.topk(x, 2, 1, out=out), [(4, 2), (4, 2)]),
        (lambda x, out: torch.matmul(x.view(2, 2, 6), x.t(), out=out), [(2, 2, 4)]),
        (lambda x, out: torch.matmul(x, x.t(), out=out), [(4, 4)]),
        (lambda x, out: torch.matmul(x.view(2, 2, 6), x[0], out=out), [(2, 2)]),
        (lambda x, out: torch.add(x, 1, out=out), [(4, 6)]),
        (lambda x, out: torch.cat([x, x], out=out), [(8, 6)]),
        (lambda x, out: torch.kron(x, x, out=out), [(16, 36)]),
    ],
)
def test_out_arguments_with_a_rule(function, shapes):
    """Several tensors too, and products that torch computes in another shape; or all ranks refuse."""
    dtypes = [torch.float64, torch.int64]

    def plain():
        return [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]

    expected = plain()
    function(make(4, 6), expected[0] if len(shapes) == 1 else tuple(expected))

    def program(group):
        mesh, outcomes = DeviceMesh(group, (2,)), []
        for where in placements_of(2, 1):
            for there in (Replicate(), Shard(0), Shard(len(shapes[0]) - 1)):
                outs = [spread(one, mesh, there) for one in plain()]
                try:
                    got = function(spread(make(4, 6), mesh, where), outs[0] if len(outs) == 1 else tuple(outs))
                except UnsupportedOpError:
                    outcomes.append(False)
                    continue
                outcomes.append(True)
                assert_same(outs, expected, f"{where} {there}")
                assert_same([got] if len(outs) == 1 else list(got), expected, f"{where} {there}")
        return outcomes

    first, second = run_ranks(program, 2)
    assert first == second
    assert sum(first) > len(first) // 2


@pytest.mark.filterwarnings(
    "ignore:An output with one or more elements was resized"
)  # torch 2.15's, of what it was given
def test_out_arguments_that_do_not_fit():
    """Another shape, or a dtype that would truncate the result, is an error, with nothing written."""

    def check(mesh):
        x = spread(make(4, 6), mesh, Shard(0))
        for shape in ((6,), (4, 6), ()):
            out = spread(torch.zeros(shape, dtype=torch.float64), mesh, Replicate())
            with pytest.raises(UnsupportedOpError, match="keeps its shape"):
                torch.linalg.eigvalsh(spread(positive(4, 4), mesh, Shard(0)), out=out)
        with pytest.raises(RuntimeError, match="can't be cast"):
            torch.add(x, 1, out=spread(torch.zeros(4, 6, dtype=torch.int64), mesh, Replicate()))
        with pytest.raises(UnsupportedOpError, match="keeps its shape"):
            x.resize_(3, 3)
        with pytest.raises(RuntimeError, match="can't be broadcast"):
            x.copy_(spread(make(3, 3), mesh, Shard(0)))
        assert_same(x, make(4, 6), "nothing is written")

    on_two(check)


def test_set():
    """``set_`` shares the other tensor's memory, and takes its placements and shape."""

    def check(mesh):
        x, other = spread(make(4, 6), mesh, Shard(0)), spread(make(4, 6, seed=1), mesh, Shard(1))
        x.set_(other)
        other.add_(1)
        assert_same(x, make(4, 6, seed=1) + 1, "written to the other")
        assert_same(x.set_(spread(make(5, 3), mesh, Shard(0))), make(5, 3), "of another shape")
        assert_same(x * 2, make(5, 3) * 2, "of another shape")


def test_empty_out_arguments():
    """Empty out arguments take the result's shape, as in torch."""

    def check(mesh):
        x, out = spread(make(4, 6), mesh, Shard(0)), spread(torch.zeros(0, dtype=torch.float64), mesh, Replicate())
        assert torch.add(x, x, out=out) is out
        assert_same(out, make(4, 6) * 2, "of an operator with a rule")
        assert_same(x, make(4, 6), "which shares no memory")
        out = spread(torch.zeros(0, dtype=torch.float64), mesh, Replicate())
        torch.linalg.inv(spread(positive(4, 4), mesh, Shard(0)), out=out)
        assert_same(out, torch.linalg.inv(positive(4, 4)), "of one without")

    on_two(check)


def test_views_by_operators_without_a_rule():
    """Such views are copies: a write to one is refused, and so is a read after a write to the tensor."""

    def check(mesh):
        x = fd.distribute(make(4, 6), mesh, Shard(0))
        view = x.view(torch.int64)
        with pytest.raises(UnsupportedOpError, match="would write to a view"):
            view.add_(1)
        x.mul_(2)
        with pytest.raises(RuntimeError, match="out of date"):
            view.sum()
        with pytest.raises(AttributeError, match="'DTensor' object has no attribute 'nothing'"):
            view.nothing  # noqa: B018
        view.data = x.view(torch.int64)
        assert type(view) is fd.DTensor
        assert_same(view, (make(4, 6) * 2).view(torch.int64), "given another shard")

    on_two(check)


def test_plain_tensors_without_a_rule_are_refused():
    """Scalars are taken, and tensors that are only written."""

    def check(mesh):
        x = spread(positive(4, 4), mesh, Shard(0))
        with pytest.raises(ValueError, match="distribute it too"):
            torch.linalg.solve(x, make(4, 4))
        out = torch.zeros(4, 4, dtype=torch.float64)
        assert torch.linalg.inv(x, out=out) is out
        torch.testing.assert_close(out, torch.linalg.inv(positive(4, 4)))

    on_two(check)


def test_gradient_formulas_that_write_in_place():
    """To a partial tensor of their own, which is reduced first."""

    def check(mesh):
        for where in (Shard(0), Shard(1), Replicate(), Partial()):
            # Partial sums are rounded, so the largest of equal elements may differ.
            for reduce in ("mean", "prod") if where == Partial() else ("mean", "amax", "amin", "prod"):
                grads = []
                for place in (lambda t, *_: t, lambda t, to: spread(t, mesh, to)):
                    a = place(make(4, 6), Replicate()).requires_grad_()
                    b = place(make(3, 6, seed=1), where).requires_grad_()
                    index = place(torch.tensor([0, 2, 0]), Replicate())
                    a.index_reduce(0, index, b, reduce).square().sum().backward()
                    grads.append((a.grad, b.grad))
                assert_same(grads[1], grads[0], f"{where} {reduce}")
                assert isinstance(grads[1][0], DTensor)

    on_two(check)
