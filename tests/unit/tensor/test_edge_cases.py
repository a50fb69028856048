"""Uses that once went wrong silently: casts of partial sums, blocks within blocks, shared gradients."""

import pytest
import torch
from operator_checks import make, spread
from torch.autograd import forward_ad
from torch.nn import functional

import ferrodist as fd
from ferrodist import DeviceMesh, DTensor, Partial, ReduceOp, Replicate, Shard, UnsupportedOpError
from ferrodist.testing import run_ranks


def alone():
    return DeviceMesh(fd.SimulatedBackend.create_group(1)[0], (1,))


def test_partial_sums_are_reduced_before_a_cast_to_integers():
    """Two halves are one, whether an argument of a sum or the target of a write casts them."""

    def program(group):
        mesh = DeviceMesh(group, (2,))
        tensor = DTensor.from_local(torch.full((4,), 0.5), mesh, Partial())
        assert tensor.sum(dtype=torch.int64).full_tensor() == 4
        assert tensor.cumsum(0, dtype=torch.int64).full_tensor().tolist() == [1, 2, 3, 4]
        target = fd.distribute(torch.zeros(4, dtype=torch.int64), mesh, Shard(0), src=None)
        assert target.copy_(tensor).full_tensor().tolist() == [1] * 4
        partial = target.redistribute(Partial())
        partial.copy_(tensor)
        assert partial.placements == (Partial(),)
        assert partial.full_tensor().tolist() == [1] * 4

    run_ranks(program, 2)


def test_partial_bools():
    """Partial bools are reduced by "or"; numbers made of them are not."""

    def program(group):
        mesh = DeviceMesh(group, (2,))
        tensor = DTensor.from_local(torch.tensor([True, False]), mesh, Partial())
        assert tensor.sum().full_tensor() == 1
        assert tensor.to(torch.float32).full_tensor().tolist() == [1.0, 0.0]
        assert (tensor * 2.0).full_tensor().tolist() == [2.0, 0.0]
        weights = DTensor.from_local(torch.ones(2), mesh, Partial())
        assert (tensor * weights).full_tensor().tolist() == [2.0, 0.0]
        assert (tensor + tensor).full_tensor().tolist() == [True, False]

    run_ranks(program, 2)


def test_blocks_of_shards_stay_even():
    """One axis must not split a dim so that the blocks of the next one are uneven."""

    def program(group):
        mesh = DeviceMesh(group, (2, 2))
        full = make(6)
        blocks = spread(full, mesh, [Replicate(), Shard(0, blocks=2)])
        torch.testing.assert_close((blocks + spread(full, mesh, [Shard(0), Replicate()])).full_tensor(), 2 * full)
        full = make(20)
        torch.testing.assert_close(
            spread(full, mesh, [Partial(), Shard(0, blocks=4)]).sigmoid().full_tensor(), full.sigmoid()
        )

    run_ranks(program, 4)


@pytest.mark.parametrize(("op", "full"), [(ReduceOp.MIN, [3, 4]), (ReduceOp.MAX, [-3, -4])])
def test_identities_of_extrema_are_not_summed(op, full):
    """The smallest integers would overflow if partial sums along another axis were reduced first."""

    def program(group):
        mesh = DeviceMesh(group, (2, 2))
        tensor = spread(torch.tensor(full), mesh, [Partial(), Shard(0, blocks=2)])
        fold = torch.amin if op is ReduceOp.MIN else torch.amax
        assert fold(tensor, 0).full_tensor() == fold(torch.tensor(full), 0)
        sharded = spread(torch.tensor(full), mesh, [Partial(), Shard(0)])
        assert sharded.redistribute([Partial(op), Partial(op)]).full_tensor().tolist() == full

    run_ranks(program, 4)


def test_partial_sums_and_maxima_are_not_mixed():
    """A slice of a sharded dim may be a partial sum, but not if another axis has partial maxima."""

    def program(group):
        mesh = DeviceMesh(group, (2, 2))
        full = make(8, 3)
        tensor = fd.distribute(full, mesh, [Partial(ReduceOp.MAX), Shard(0)], src=None)[1:3]
        torch.testing.assert_close(tensor.redistribute(tensor.placements).full_tensor(), full[1:3])

    run_ranks(program, 4)


def test_gradients_of_local_shards_own_their_memory():
    """Also if the caller passed the gradient, if two shards share one, or if it is an expanded scalar."""
    mesh = alone()
    one, other = (fd.distribute(torch.ones(4), mesh, Shard(0)).requires_grad_() for _ in range(2))
    given = torch.ones(4)
    for _ in range(3):
        one.to_local().backward(given)
    assert one.grad.full_tensor().tolist() == [3.0] * 4
    assert given.tolist() == [1.0] * 4
    one.grad = None
    ((one.to_local() + other.to_local()) * torch.full((4,), 2.0)).sum().backward()
    one.grad.mul_(5)
    assert other.grad.full_tensor().tolist() == [2.0] * 4
    one.grad = None
    for _ in range(2):
        one.to_local().sum().backward()
    assert one.grad.mul_(2).full_tensor().tolist() == [4.0] * 4


def test_writes_to_an_unchanged_redistribution():
    """A redistribution to the same placements is a view: autograd knows of writes to it."""

    def program(group):
        mesh = DeviceMesh(group, (2,))
        tensor, weight = (fd.distribute(torch.ones(5), mesh, Shard(0)) for _ in range(2))
        product = (tensor * weight.requires_grad_()).sum()
        tensor.redistribute(Shard(0)).mul_(5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
        for is_viewed in (False, True):
            viewed = weight * 2
            view = viewed.redistribute(Shard(0))
            view.mul_(5)
            assert viewed.full_tensor().tolist() == [10.0] * 5
            weight.grad = None
            ((viewed if is_viewed else view) * torch.ones(())).sum().backward()
            assert weight.grad.full_tensor().tolist() == [10.0] * 5

    run_ranks(program, 2)


def test_gradient_of_a_product_with_zeros():
    """The formula joins distributed tensors with plain ones."""

    def program(group):
        mesh = DeviceMesh(group, (2,))
        full = torch.tensor([[2.0, 0.0, 3.0], [1.0, 4.0, 5.0]], requires_grad=True)
        tensor = spread(full, mesh, Shard(0))
        full.prod(1).sum().backward()
        tensor.prod(1).sum().backward()
        torch.testing.assert_close(tensor.grad.full_tensor(), full.grad)

    run_ranks(program, 2)


@pytest.mark.parametrize("normalise", [functional.batch_norm, functional.instance_norm])
def test_ranks_without_channels(normalise):
    """torch's kernels for batches refuse empty tensors, or divide by their number of elements."""

    def program(group):
        mesh = DeviceMesh(group, (3,))
        full = make(3, 2, 5).requires_grad_()
        tensor = spread(full, mesh, Shard(1))
        named = {"running_mean": None, "running_var": None}
        named |= {"training": True} if normalise is functional.batch_norm else {"use_input_stats": True}
        results = [normalise(one, **named) for one in (full, tensor)]
        torch.testing.assert_close(results[1].full_tensor(), results[0])
        weights = make(3, 2, 5, seed=3)
        grads = [
            torch.autograd.grad(result, one, weight)[0]
            for result, one, weight in zip(
                results, (full, tensor), (weights, spread(weights, mesh, Shard(1))), strict=True
            )
        ]
        torch.testing.assert_close(grads[1].full_tensor(), grads[0])

    run_ranks(program, 3)


def test_group_norm_of_noncontiguous_shards():
    """torch's kernel needs contiguous memory, and its callers check the full tensor's strides alone."""
    mesh = alone()
    full = make(4, 4, 4)
    parts = full.transpose(0, 2).contiguous().transpose(0, 2)
    tensor = DTensor.from_local(parts, mesh, Shard(0)).requires_grad_()
    full.requires_grad_()
    for one in (full, tensor):
        functional.group_norm(one, 2).square().square().sum().backward()
    torch.testing.assert_close(tensor.grad.full_tensor(), full.grad)


def test_wrappers_without_memory():
    """A wrapper has no memory to hand out; asking for it must not end the process."""
    tensor = fd.distribute(torch.ones(4), alone(), Shard(0))
    for refused in (
        tensor.share_memory_,
        tensor.untyped_storage,
        tensor.__dlpack__,
        lambda: tensor.apply_(lambda number: number),
    ):
        with pytest.raises(TypeError, match=r"full_tensor\(\) or to_local\(\)"):
            refused()
    assert tensor.sum().flip(0).full_tensor() == 4  # of a tensor without dims the first is meant
    with pytest.raises(UnsupportedOpError, match="strided"):
        torch.zeros_like(tensor, layout=torch.sparse_coo)


@pytest.mark.parametrize("kind", ["nested", "sparse"])
@pytest.mark.parametrize("src", [0, None])
@pytest.mark.filterwarnings("ignore:.*nested tensor.*")
def test_nonstrided_tensors_are_not_distributed(kind, src):
    """Tensors that are not strided are refused with the collectives' messages, before anything is sent."""

    def body(group):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        tensor = nested if kind == "nested" else torch.eye(2).to_sparse()
        mesh = DeviceMesh(group, (2,))
        with pytest.raises(UnsupportedOpError, match=r"tensor (is a nested|has layout torch\.sparse)"):
            fd.distribute(tensor, mesh, Replicate(), src=src)
        with pytest.raises(UnsupportedOpError, match=r"local (is a nested|has layout torch\.sparse)"):
            DTensor.from_local(tensor, mesh, Replicate())
        return fd.allreduce(torch.ones(1)).item()

    assert run_ranks(body, 2) == [2.0, 2.0]


@pytest.mark.parametrize("src", [0, None])
@pytest.mark.filterwarnings("ignore:.*quantiz.*")
def test_quantized_tensors_are_not_distributed(src):
    """No rank gets a shard that it could not send."""

    def body(group):
        tensor = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
        mesh = DeviceMesh(group, (2,))
        with pytest.raises(TypeError, match=r"collectives carry .*; not torch\.qint8"):
            fd.distribute(tensor, mesh, Replicate(), src=src)
        with pytest.raises(TypeError, match=r"collectives carry .*; not torch\.qint8"):
            DTensor.from_local(tensor, mesh, Replicate())
        return fd.allreduce(torch.ones(1)).item()

    assert run_ranks(body, 2) == [2.0, 2.0]


def test_select_scatter_of_a_scalar():
    """The gradient of select_scatter writes a plain zero."""

    def program(group):
        mesh = DeviceMesh(group, (2,))
        full, source = make(5).requires_grad_(), make()
        tensor = spread(full, mesh, Shard(0))
        torch.select_scatter(full, source, 0, 2).sum().backward()
        torch.select_scatter(tensor, spread(source, mesh, Replicate()), 0, 2).sum().backward()
        torch.testing.assert_close(tensor.grad.full_tensor(), full.grad)

    run_ranks(program, 2)


def test_inference_mode():
    """In inference mode views of ordinary tensors are ordinary tensors, as in torch."""
    mesh = alone()
    tensor = fd.distribute(make(4, 6), mesh, Shard(0))
    with torch.inference_mode():
        inside = fd.distribute(make(4, 6), mesh, Shard(0))
        for one, is_inference in ((tensor, False), (inside, True)):
            for view in (one.view(24), one.t(), one[:, :2], one.detach(), one.redistribute(Shard(0))):
                assert view.is_inference() == is_inference
            one[:, :2].add_(1)
        torch.testing.assert_close((inside @ inside.t()).full_tensor(), (tensor @ tensor.t()).full_tensor())
    assert (tensor.requires_grad_() * 2).sum().requires_grad


def test_default_dtype_is_part_of_the_cache_key():
    """Quotients of integers have it: a call before a change must not decide."""
    tensor = fd.distribute(torch.arange(4), alone(), Shard(0))
    assert (tensor / 2).dtype is (tensor * 1.5).dtype is tensor.sin().dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        for one in (tensor / 2, tensor * 1.5, tensor.sin()):
            assert one.dtype is one.to_local().dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # which torch.func.jvp calls
def test_forward_mode_is_refused():
    """Redistribution would lose the tangents."""
    tensor = fd.distribute(make(4), alone(), Shard(0))
    with fd.allow_replication():
        with pytest.raises(UnsupportedOpError, match=r"not differentiated forward .*: use backward\(\)"):
            torch.func.jvp(torch.sin, (tensor,), (tensor,))
        with forward_ad.dual_level(), pytest.raises(UnsupportedOpError, match="not differentiated forward"):
            forward_ad.make_dual(tensor, tensor)
    gradient = torch.func.grad(lambda one: one.sin().sum())(tensor)
    torch.testing.assert_close(gradient.full_tensor(), make(4).cos())
    assert torch.is_same_size(tensor, tensor.redistribute(Replicate()))


def test_cached_calls_with_several_results():
    """An output that is not requested is None, also in a cached call."""
    mesh = alone()
    full, weight = make(3, 4), make(4, seed=1)
    for _ in range(2):
        grads = []
        for one in (full.clone(), fd.distribute(full, mesh, Shard(0))):
            scale = spread(weight, mesh, Replicate()) if isinstance(one, DTensor) else weight.clone()
            functional.layer_norm(one, (4,), scale.requires_grad_()).square().sum().backward()
            grads.append(scale.grad)
        torch.testing.assert_close(grads[1].full_tensor(), grads[0])


def test_conjugates():
    """Gradients of complex products need them; a shard never has the conjugate bit."""

    def program(group):
        mesh = DeviceMesh(group, (2,))
        full, weight = (torch.complex(make(4, seed=seed), make(4, seed=seed + 1)) for seed in (0, 2))
        tensor, scale = (fd.distribute(one, mesh, Shard(0), src=None) for one in (full, weight))
        torch.testing.assert_close((tensor.conj() * scale).full_tensor(), full.conj() * weight)
        torch.testing.assert_close(torch.vdot(tensor, scale).full_tensor(), torch.vdot(full, weight))
        mine = DTensor.from_local(tensor.to_local().conj(), mesh, Shard(0))
        assert not mine.to_local().is_conj()
        torch.testing.assert_close((mine * scale).full_tensor(), full.conj() * weight)
        given = fd.distribute(full.conj(), mesh, Replicate(), src=None)
        torch.testing.assert_close((given * given).full_tensor(), full.conj() * full.conj())
        with pytest.raises(UnsupportedOpError, match="would write to a view whose shards had to be redistributed"):
            tensor.conj().mul_(2)
        for fold in (torch.var, torch.std, torch.linalg.vector_norm, lambda one: torch.logsumexp(one, 0)):
            torch.testing.assert_close(fold(tensor).full_tensor(), fold(full))
        for one in (full.requires_grad_(), tensor.requires_grad_()):
            (one * one).abs().sum().backward()
        torch.testing.assert_close(tensor.grad.full_tensor(), full.grad)

    run_ranks(program, 2)
