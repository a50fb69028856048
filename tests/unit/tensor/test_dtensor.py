"""DTensor: its attributes, how it is made, and what it refuses."""

import gc
import io
import warnings
import weakref

import pytest
import torch
from operator_checks import make, spread
from operator_samples import bind_sample
from torch.distributed.tensor import Shard as TorchShard
from torch.utils._python_dispatch import TorchDispatchMode

import ferrodist as fd
from ferrodist import (
    CollectiveMismatchError,
    DeviceMesh,
    DTensor,
    InvalidRankError,
    Partial,
    ReduceOp,
    Replicate,
    Shard,
    UnsupportedOpError,
)
from ferrodist.backends.native import is_native_available
from ferrodist.testing import run_ranks
from ferrodist.torch_private import operators


def alone(shape=(1,), names=None):
    return DeviceMesh(fd.SimulatedBackend.create_group(1)[0], shape, names)


def test_metadata_is_that_of_the_full_tensor():
    """Shape, dtype and strides are the full tensor's; mesh and placements are attributes."""

    def program(group):
        mesh = DeviceMesh(group, (2, 2), ("dp", "tp"))
        tensor = fd.distribute(torch.zeros(5, 6, dtype=torch.float64), mesh, [Shard(0), Partial()], src=None)
        assert (tensor.shape, tensor.stride(), tensor.dtype, tensor.numel()) == ((5, 6), (6, 1), torch.float64, 30)
        assert tensor.placements == (Shard(0), Partial())
        assert tensor.mesh is mesh
        assert tensor.device.type == "cpu"
        assert repr(tensor).startswith("DTensor(float64[5, 6] over {dp: Shard(0), tp: Partial()}, local=tensor(")
        return tuple(tensor.to_local().shape)

    assert run_ranks(program, 4) == [(3, 6), (3, 6), (2, 6), (2, 6)]


@pytest.mark.parametrize("src", [0, 2, 3])
def test_distribute_sends_the_values_of_one_rank(src):
    """Along each axis in turn, for all placements; other ranks' values are not used."""

    def program(group):
        mesh = DeviceMesh(group, (2, 2))
        full = torch.arange(35.0).view(5, 7)
        own = full.clone() if group.rank == src else torch.full((5, 7), -1.0)
        for placements in (
            [Shard(0), Shard(1)],
            [Shard(1), Shard(1)],
            [Replicate(), Shard(0)],
            [Partial(), Replicate()],
        ):
            tensor = fd.distribute(own, mesh, placements, src=src)
            assert tensor.placements == tuple(placements)
            assert torch.equal(tensor.full_tensor(), full)
        strided = fd.distribute(own[:4], mesh, [Shard(0, blocks=2), Shard(0)], src=src)
        assert torch.equal(strided.full_tensor(), full[:4])

    run_ranks(program, 4)


def test_distribute_without_a_source_sends_nothing():
    """Each rank takes its shard of its own tensor, in memory of its own."""
    group = fd.SimulatedBackend.create_group(4)[2]  # the others never come
    mesh = DeviceMesh(group, (2, 2))
    full = torch.arange(12.0).view(4, 3)
    tensor = fd.distribute(full, mesh, [Shard(0), Replicate()], src=None)
    assert torch.equal(tensor.to_local(), full[2:])
    tensor.to_local().zero_()
    replica = fd.distribute(full, mesh, [Replicate(), Replicate()], src=None)
    replica.to_local().zero_()
    assert full.sum() == 66


def test_distribute_returns_leaves():
    """A parameter becomes a leaf that requires grad; a tensor with a history, which would be lost, is refused."""
    mesh = alone()
    source = torch.ones(2, requires_grad=True)
    tensor = fd.distribute(source, mesh, Replicate())
    assert tensor.is_leaf
    assert tensor.requires_grad
    with pytest.raises(RuntimeError, match="distribute takes leaves"):
        fd.distribute(source * 2, mesh, Replicate())
    with pytest.raises(TypeError, match="distributed already: use its redistribute"):
        fd.distribute(tensor, mesh, Replicate())


def test_distribute_compares_shapes_and_dtypes():
    """Different shapes or dtypes raise the same error on all ranks."""

    def program(group):
        mesh = DeviceMesh(group, (2,))
        with pytest.raises(CollectiveMismatchError, match=r"rank 0 has torch.float32 of shape \[2\], rank 1") as caught:
            fd.distribute(torch.zeros(2 + group.rank), mesh, Shard(0))
        assert caught.value.ranks == (1,)
        assert fd.allreduce(torch.ones(1), group=group) == 2  # the group goes on

    run_ranks(program, 2)


def test_from_local_infers_the_shape():
    """From the ranks' shards: uneven ones, on several axes, and with axes that shard one dim."""

    def program(group):
        mesh = DeviceMesh(group, (2, 2))
        rows, columns = mesh.coordinate
        tensor = DTensor.from_local(torch.ones(3 - rows, 2 - columns), mesh, [Shard(0), Shard(1)])
        assert tensor.shape == (5, 3)
        nested = DTensor.from_local(torch.ones([2, 1, 1, 1][group.rank]), mesh, [Shard(0), Shard(0)])
        assert nested.shape == (5,)
        assert DTensor.from_local(torch.ones(()), mesh, [Replicate(), Partial()]).full_tensor() == 2

    run_ranks(program, 4)


@pytest.mark.parametrize(
    ("shapes", "placement", "message"),
    [
        (
            [(3, 2), (1, 2)],
            Shard(0),
            r"they have \(4, 2\) together, .* rank 0 has a shard of shape \(2, 2\), not \(3, 2\)",
        ),
        ([(2, 2), (2, 3)], Shard(0), r"rank 1 has a shard of shape \(2, 2\), not \(2, 3\)"),
        ([(2, 2), (3, 2)], Replicate(), r"rank 1 has a shard of shape \(2, 2\), not \(3, 2\)"),
        ([(2, 2), (2,)], Replicate(), r"rank 0 has torch.float32 of shape \(2, 2\).* and rank 1 has"),
    ],
)
def test_shards_that_make_no_tensor(shapes, placement, message):
    """All ranks raise the same error, and the group stays usable."""

    def program(group):
        with pytest.raises(CollectiveMismatchError, match=message):
            DTensor.from_local(torch.zeros(shapes[group.rank]), DeviceMesh(group, (2,)), placement)
        return fd.allreduce(torch.ones(1), group=group).item()

    assert run_ranks(program, 2) == [2, 2]


def test_different_placements_on_ranks():
    def program(group):
        with pytest.raises(CollectiveMismatchError, match=r"placed as \[Shard\(0\)\] and rank 1 .* \[Replicate\(\)\]"):
            DTensor.from_local(torch.zeros(2), DeviceMesh(group, (2,)), [Shard(0), Replicate()][group.rank])

    run_ranks(program, 2)


def test_from_local_with_a_shape_sends_nothing():
    """Each rank checks its own shard."""
    mesh = DeviceMesh(fd.SimulatedBackend.create_group(2)[1], (2,))
    assert DTensor.from_local(torch.zeros(2, 4), mesh, Shard(0), shape=(5, 4)).shape == (5, 4)
    with pytest.raises(ValueError, match=r"this rank's shard .* has shape \(2, 4\), not \(3, 4\)"):
        DTensor.from_local(torch.zeros(3, 4), mesh, Shard(0), shape=(5, 4))


@pytest.mark.parametrize(
    ("placements", "error", "message"),
    [
        ([Shard(0)], ValueError, "a mesh of axes 'a', 'b' needs 2 placements, one for each, not 1"),
        ([Shard(2), Replicate()], IndexError, r"Shard\(2\) along axis 'a': a tensor of shape \(4, 6\) has no such dim"),
        (["row", Replicate()], TypeError, "a placement is .*, not 'row'"),
        ([Shard(0), Shard(0, blocks=4)], ValueError, "dim 0 of 2 is not 4 equal blocks"),
        ([Partial(), Partial(ReduceOp.MAX)], ValueError, "reduces by max and sum, whose result depends on which comes"),
        (Replicate(), ValueError, "needs 2 placements"),
    ],
)
def test_placements_that_do_not_fit_the_tensor(placements, error, message):
    mesh = DeviceMesh(fd.SimulatedBackend.create_group(4)[0], (2, 2), ("a", "b"))
    with pytest.raises(error, match=message):
        fd.distribute(torch.zeros(4, 6), mesh, placements, src=None)


def test_blocks_of_an_uneven_shard():
    """A shard of 3 of 5 rows is not two equal blocks, which is an error."""
    mesh = DeviceMesh(fd.SimulatedBackend.create_group(4)[0], (2, 2))
    with pytest.raises(ValueError, match="dim 0 of 3 is not 2 equal blocks"):
        fd.distribute(torch.zeros(5), mesh, [Shard(0), Shard(0, blocks=2)], src=None)


def test_invalid_placements():
    with pytest.raises(TypeError, match="the index of a dim"):
        Shard(1.0)
    with pytest.raises(ValueError, match="at least one block"):
        Shard(0, blocks=0)
    with pytest.raises(TypeError, match="Partial takes one of"):
        Partial(ReduceOp.BAND)
    with pytest.raises(TypeError, match="Partial takes one of"):
        Partial("sum")
    assert repr([Shard(-1), Shard(0, blocks=2), Replicate(), Partial(), Partial(ReduceOp.MAX)]) == (
        "[Shard(-1), Shard(0, blocks=2), Replicate(), Partial(), Partial(max)]"
    )


def test_a_rank_outside_of_the_mesh():
    mesh = DeviceMesh(fd.SimulatedBackend.create_group(3)[2], (2,), ranks=[0, 1])
    with pytest.raises(InvalidRankError):
        fd.distribute(torch.zeros(4), mesh, Shard(0))
    for call in (
        lambda: fd.factories.zeros((4,), mesh=mesh, placements=Shard(0)),
        lambda: DTensor.from_local(torch.zeros(2), mesh, Shard(0), shape=(4,)),
    ):
        with pytest.raises(InvalidRankError, match="rank 2 is not in this mesh"):
            call()


def test_arguments_of_other_types():
    """They are named at the call, before any rank is waited for."""
    mesh, tensor = alone(), torch.zeros(4)
    for call, error, message in (
        (lambda: fd.distribute([1.0], mesh, Shard(0)), TypeError, "distribute takes a torch.Tensor, not list"),
        (lambda: fd.distribute(tensor, None, Shard(0)), TypeError, "over a ferrodist.DeviceMesh, not NoneType"),
        (lambda: fd.distribute(tensor, mesh, 0), TypeError, "a placement is .*, not 0$"),
        (lambda: fd.distribute(tensor, mesh, TorchShard(0)), TypeError, "of ferrodist, not .* of torch.distributed"),
        (lambda: fd.factories.zeros(4, mesh=mesh, placements=Shard(0)), TypeError, "a sequence of integers, .* not 4"),
        (lambda: fd.factories.zeros((-4,), mesh=mesh, placements=Shard(0)), ValueError, "at least 0, not -4"),
        (lambda: DTensor.from_local(tensor, mesh, Shard(0), shape=4), TypeError, "a sequence of integers, .* not 4"),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.skipif(not is_native_available(), reason="this installation was built without the native engine")
def test_dtypes_that_no_collective_carries():
    """They are refused before anything is sent, so the group goes on; without ``src`` nothing is sent."""

    def program(group):
        mesh, tensor = DeviceMesh(group, (2,)), torch.zeros(400_000, dtype=torch.uint16)
        with pytest.raises(TypeError, match=r"not torch\.uint16"):
            fd.distribute(tensor, mesh, Shard(0))
        assert fd.distribute(tensor, mesh, Shard(0), src=None).to_local().numel() == 200_000
        assert fd.allreduce(torch.ones(1)) == 2

    run_ranks(program, 2, backend="native-threads")


def test_wrong_arguments_of_operators_are_refused_by_torch():
    """Also where a rule would fail on them."""
    matrix, scalar = (fd.distribute(tensor, alone(), Replicate()) for tensor in (torch.ones(2, 3), torch.tensor(1.0)))
    with pytest.raises(IndexError, match="Dimension out of range"):
        matrix.transpose(0, 5)
    with pytest.raises(RuntimeError, match="at least a 1-dimensional tensor"):
        scalar.split(1)
    with pytest.raises(RuntimeError, match="number of dimensions"):
        scalar.permute(0)


def test_invalid_arguments_of_from_local():
    mesh = alone()
    with pytest.raises(TypeError, match="not DTensor"):
        DTensor.from_local(fd.distribute(torch.zeros(2), mesh, Shard(0)), mesh, Shard(0))
    with pytest.raises(TypeError, match="not list"):
        DTensor.from_local([1.0], mesh, Shard(0))


def test_plain_and_distributed_tensors_do_not_mix():
    """Except for scalars, which optimizers use."""
    tensor = fd.distribute(torch.ones(2, 3), alone(), Shard(0))
    with pytest.raises(
        ValueError, match=r"aten.add.Tensor got distributed tensors and a Tensor of shape \(3,\): distr"
    ):
        _ = tensor + torch.ones(3)
    with pytest.raises(ValueError, match="to_local"):
        tensor.copy_(torch.ones(2, 3))
    # Only one_hot is known to make these.
    assert (tensor == torch.arange(3)).full_tensor().tolist() == [[False, True, False]] * 2
    with pytest.raises(ValueError, match="distribute it too"):
        _ = tensor + torch.arange(3)
    assert (tensor * torch.tensor(2.0)).sum().full_tensor() == 12


def test_plain_zeros_are_taken_in_backward():
    """Gradient formulas make them; other plain tensors may differ between ranks."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor, factor):
            ctx.factor = factor
            return tensor.clone()

        @staticmethod
        def backward(ctx, *grads):
            return grads[0] * ctx.factor, None

    tensor = fd.distribute(torch.ones(3), alone(), Shard(0)).requires_grad_()
    Scaled.apply(tensor, torch.zeros(3)).sum().backward()
    assert not tensor.grad.full_tensor().any()
    with pytest.raises(ValueError, match="distribute it too"):
        Scaled.apply(tensor, torch.tensor([0.0, 0.0, 1.0])).sum().backward()


def test_tensors_of_different_meshes_do_not_mix():
    group = fd.SimulatedBackend.create_group(1)[0]
    one, other = (
        fd.distribute(torch.ones(2), DeviceMesh(group, (1,), (name,)), Shard(0), src=None) for name in ("dp", "tp")
    )
    with pytest.raises(ValueError, match="got tensors of different meshes"):
        _ = one + other
    mesh = DeviceMesh(group, (1, 1), ("dp", "tp"))
    first, second = (fd.distribute(torch.ones(2), mesh["tp"], Shard(0), src=None) for _ in range(2))
    assert (first + second).sum().full_tensor() == 4  # slices of one mesh are one mesh


def test_an_operator_without_a_rule():
    """An operator without a rule raises an error with advice, or warns and uses full tensors if that is allowed."""

    def program(group):
        mesh = DeviceMesh(group, (2,))
        full = make(4, 4)
        tensor = spread(full, mesh, Shard(0))
        with pytest.raises(UnsupportedOpError, match=r"no rule for aten\.geqrf.*allow_replication"):
            torch.geqrf(tensor)
        with fd.allow_replication():
            got = torch.geqrf(tensor)
        torch.testing.assert_close(got.tau.full_tensor(), torch.geqrf(full).tau)
        assert got.tau.placements == (Replicate(),)
        with pytest.raises(UnsupportedOpError):
            torch.geqrf(tensor)  # outside of the block it is refused again

    # Around all ranks: they are threads, and what to do with warnings is one for the process.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(program, 2)
    assert [one for one in caught if "has no rule: its inputs are gathered" in str(one.message)]


def test_gradients_of_from_local_and_to_local():
    """A shard of a partial sum gets the full gradient, one of a mean its share."""

    def program(group):
        mesh = DeviceMesh(group, (2,))
        weights = torch.tensor([1.0, 2.0, 3.0])
        for op, expected in ((ReduceOp.SUM, weights), (ReduceOp.MEAN, weights / 2)):
            local = torch.ones(3, requires_grad=True)
            (DTensor.from_local(local, mesh, Partial(op)).full_tensor() * weights).sum().backward()
            assert torch.equal(local.grad, expected)
        local = torch.ones(3, requires_grad=True)
        largest = DTensor.from_local(local, mesh, Partial(ReduceOp.MAX)).full_tensor()
        with pytest.raises(RuntimeError, match=r"the shards of Partial\(max\) have no gradient"):
            largest.sum().backward()
        tensor = fd.distribute(torch.ones(3), mesh, Replicate(), src=None).requires_grad_()
        (tensor.to_local(grad_placements=Partial()) * (group.rank + 1)).sum().backward()
        return tensor.grad.full_tensor().tolist()

    assert run_ranks(program, 2) == [[3.0, 3.0, 3.0]] * 2


def test_a_dtensor_is_not_pickled():
    tensor = fd.distribute(torch.ones(3), alone(), Replicate())
    with pytest.raises(TypeError, match=r"save its to_local\(\) or full_tensor\(\)"):
        torch.save(tensor, io.BytesIO())


def test_specs_are_interned():
    """Equal specs are one object, compared by identity and freed with its group."""
    mesh = alone((1, 1), ("a", "b"))
    one, other = (fd.distribute(torch.ones(2, 3), mesh, [Shard(0), Replicate()]) for _ in range(2))
    assert one._spec is other._spec
    assert (one + other)._spec is one._spec
    gone = weakref.ref(mesh.parent)
    del mesh, one, other
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.masked_fill(x > 0, 0.5),
        lambda x: x.masked_fill_(x > 0, 0.5),
        lambda x: x.split(2, 1)[1] + x.unbind(1)[0][:, None],
        lambda x: x.detach() + x.view(4, 2, 2)[:, 1].sum(1, keepdim=True),
    ],
)
def test_repeated_calls_take_no_detour(monkeypatch, call):
    """Calls that only compute on shards are not prepared again, nor given to `dispatch`."""
    x = fd.distribute(torch.arange(16.0).view(4, 4), alone(), Shard(0))
    expected = call(x).full_tensor()

    def refuse(func, *_):
        pytest.fail(f"{func} is not run inline")

    monkeypatch.setattr(fd.tensor.dtensor, "dispatch", refuse)
    assert torch.equal(call(x).full_tensor(), expected)


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, [one.shape if isinstance(one, torch.Tensor) else one for one in args], kwargs))
        return func(*args, **(kwargs or {}))


def test_methods_in_the_place_of_operators():
    """They call just what the operators call."""
    shapes = {"bmm": (2, 3, 3), "view": (1,), "expand": (1,), "permute": (2,), "squeeze": (2, 1)}
    for name in operators._METHODS.split():
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload)
        sizes = [(3, 3), (3,)] if packet == "mv" else [shapes.get(packet, (3, 3))] * 3
        tensors = [torch.ones(size, dtype=torch.bool if packet == "where" else None) for size in sizes]
        if packet.startswith("masked_fill"):
            tensors[1] = tensors[1] > 0
        positional, named = bind_sample(operator, iter(tensors))
        if packet in ("permute", "clamp"):
            positional, named = {"permute": [[1, 0]], "clamp": [None, 1.0]}[packet], {}
            positional.insert(0, torch.ones(3, 3))
        recorded = []
        for call in (operators.method_call(operator), operators.plain_call(operator)):
            with _Recorder() as recorder, torch.no_grad():
                call(*positional, **named)
            recorded.append(recorder.calls)
        assert recorded[0] == recorded[1], name
        assert recorded[0], name


def test_dispatch_cache_is_bounded(monkeypatch):
    """A program with new shapes or numbers in each step keeps only the last ones."""
    monkeypatch.setattr(fd.tensor.dispatch, "_MAX_CACHED", 8)
    mesh = alone()
    for size in range(1, 30):
        tensor = fd.distribute(torch.ones(size), mesh, Shard(0), src=None)
        assert (tensor + tensor).sum().full_tensor() == 2 * size
    assert len(tensor._spec.dispatch_cache) <= 8
    for value in range(30):
        assert tensor.masked_fill(tensor > 0, float(value)).sum().full_tensor() == 29 * value
    assert len(tensor._spec.dispatch_cache) <= 8


def test_number_types_are_cached_separately():
    """1, 1.0 and True are equal, but give different dtypes; so do scalar tensors."""
    tensor = fd.distribute(torch.ones(2, dtype=torch.int64), alone(), Shard(0))
    expected = [torch.int64, torch.float32, torch.int64, torch.complex64]
    for factors in ((1, 1.0, True, 1j), map(torch.tensor, (1, 1.0, True, 1j))):
        results = [tensor * factor for factor in factors]
        assert [result.dtype for result in results] == expected
        assert [result.to_local().dtype for result in results] == expected


def test_redistributions_are_recorded():
    """A block records redistributions by operators too, also inside of another block."""

    def program(group):
        mesh = DeviceMesh(group, (2,), ("tp",))
        tensor = fd.distribute(torch.ones(4, 4), mesh, Shard(1), src=None)
        with fd.record_redistributions() as outer:
            tensor.redistribute(Replicate())
            with fd.record_redistributions() as inner:
                _ = tensor @ tensor
        assert len(outer) == 2
        assert inner == outer[1:]
        return str(outer[0])

    assert run_ranks(program, 2)[0] == "all_gather over tp: [Shard(1)] -> [Replicate()], 32 bytes"


def test_default_device_is_ignored():
    """Shards are on the CPU, whatever device torch makes tensors on by default."""

    def program(group):
        mesh = DeviceMesh(group, (2,))
        scores = spread(make(4, 5), mesh, Shard(1)).requires_grad_()
        targets = fd.distribute(make(4, low=0, high=5).long(), mesh, Replicate(), src=None)
        torch.set_default_device("meta")  # of this thread
        try:
            weights = fd.factories.ones((5,), mesh=mesh, placements=Shard(0), dtype=torch.float64)
            loss = torch.nn.functional.cross_entropy(scores, targets, weight=weights)
            loss.backward()
            found = (
                scores.max(dim=1).indices.sum()
                + torch.linalg.vector_norm(scores)
                + fd.factories.arange(3, mesh=mesh, placements=Replicate()).sum()
            )
            return [one.full_tensor().isfinite().all().item() for one in (loss.detach(), scores.grad, found.detach())]
        finally:
            torch.set_default_device(None)

    assert run_ranks(program, 2) == [[True] * 3] * 2


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
def test_gradients_of_gradients_of_partial_sums(op):
    """Each rank uses the gradient of a sum for its part: the gradient of that gradient is the sum of the ranks'."""

    def program(group):
        mesh = DeviceMesh(group, (group.world_size,), ("x",))
        x = torch.linspace(-1, 1, 5, dtype=torch.float64)
        weights = [torch.linspace(1, 2, 5, dtype=torch.float64) * (rank + 1) for rank in range(group.world_size)]

        def gradient_of_gradient(sum_of_parts):
            own = x.clone().requires_grad_()
            (first,) = torch.autograd.grad(sum_of_parts(own).pow(2).sum(), own, create_graph=True)
            (second,) = torch.autograd.grad(first.pow(2).sum(), own)
            return second

        def over_ranks(own):
            tensor = DTensor.from_local(own, mesh, Replicate(), shape=own.shape)
            part = tensor.to_local(grad_placements=Partial()).sin() * weights[group.rank]
            return DTensor.from_local(part, mesh, Partial(op), shape=own.shape).full_tensor()

        scale = 1 / group.world_size if op is ReduceOp.MEAN else 1
        expected = gradient_of_gradient(lambda own: sum(own.sin() * weight for weight in weights) * scale)
        torch.testing.assert_close(gradient_of_gradient(over_ranks), expected)

    for size in (1, 2, 3):
        run_ranks(program, size)
