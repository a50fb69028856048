"""Checks of an operator on distributed tensors against the plain one."""

import itertools

import torch

import ferrodist as fd
from ferrodist import DeviceMesh, DTensor, Partial, ReduceOp, Replicate, Shard
from ferrodist.testing import run_ranks

NUM_RANKS = {(1,): 1, (2,): 2, (3,): 3, (4,): 4, (2, 2): 4, (1, 2): 2, (2, 1, 2): 4, (2, 2, 2): 8}


def make(*shape, dtype=torch.float64, seed=0, low=-2.0, high=2.0):
    """A tensor of random elements, the same on every rank; integers and bools for such dtypes."""
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))
    values = torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low
    return values > 0 if dtype is torch.bool else values.to(dtype)


def placements_of(ndim, num_axes, *, partial=True):
    """All placements of a tensor with a number of dims on a mesh with a number of axes."""
    one = [Replicate(), *[Shard(dim) for dim in range(ndim)], *([Partial()] if partial else [])]
    return list(itertools.product(one, repeat=num_axes))


def spread(tensor, mesh, placements):
    """The tensor over the mesh; its partial shards differ from those that redistribute would make."""
    placements = [placements] if not isinstance(placements, list | tuple) else list(placements)
    full = fd.distribute(tensor.detach().clone(), mesh, [Replicate()] * mesh.ndim, src=None)
    first = [Replicate() if isinstance(one, Partial) else one for one in placements]
    result = full.redistribute(first)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            first[axis] = placement
            local = result.redistribute(first).to_local().clone()
            if placement.op is ReduceOp.SUM and local.dtype.is_floating_point:
                size, at = mesh.shape[axis], mesh.coordinate[axis]
                shift = torch.linspace(-1, 1, max(local.numel(), 1), dtype=local.dtype)[: local.numel()].view_as(local)
                if size > 1:
                    local += {0: shift, size - 1: -shift}.get(at, 0 * shift)
            result = DTensor.from_local(local, mesh, first, shape=result.shape)
    return result.detach().requires_grad_(tensor.requires_grad)


def assert_same(got, expected, what, **tolerance):
    """Assert that a distributed result equals a plain one, and has the local shape of its spec."""
    if isinstance(expected, list | tuple):
        assert len(got) == len(expected), what
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other, what, **tolerance)
        return
    if not isinstance(expected, torch.Tensor):
        assert got == expected, what
        return
    assert isinstance(got, DTensor), what
    assert tuple(got.to_local().shape) == got._spec.local_shape, f"{what}: {got._spec}"
    assert got.shape == expected.shape, what
    assert got.dtype == got.to_local().dtype == expected.dtype, what
    full = got.detach().full_tensor()
    torch.testing.assert_close(
        full, expected.detach(), msg=lambda text: f"{what} -> {got._spec}: {text}", equal_nan=True, **tolerance
    )


def check_operator(mesh, function, inputs, placements, *, backward=True, **tolerance):
    """Assert that an operator and its gradients give the same for distributed tensors as for plain ones.

    Args:
        mesh: The mesh.
        function: Takes the tensors, and returns a tensor or several.
        inputs: Plain tensors; floating-point ones get gradients.
        placements: For each input its placements, one for each axis of the mesh.
        backward: Whether gradients are checked.
        tolerance: For torch.testing.assert_close.

    Returns:
        The distributed result.
    """
    what = f"{getattr(function, '__name__', function)} of {[list(map(str, one)) for one in placements]} on {mesh.shape}"
    wants = [backward and tensor.dtype.is_floating_point for tensor in inputs]
    plain = [one.detach().clone().requires_grad_(want) for one, want in zip(inputs, wants, strict=True)]
    sharded = [
        spread(one, mesh, where).requires_grad_(want) for one, where, want in zip(plain, placements, wants, strict=True)
    ]
    expected, got = function(*plain), function(*sharded)
    assert_same(got, expected, what, **tolerance)
    if not backward:
        return got
    outputs = [
        (one, other)
        for one, other in zip(_listed(got), _listed(expected), strict=True)
        if isinstance(other, torch.Tensor) and other.requires_grad
    ]
    assert outputs, f"{what}: nothing to differentiate"
    grads = [make(*other.shape, dtype=other.dtype, seed=7) for _, other in outputs]
    wanted = [one for one in plain if one.requires_grad]
    plain_grads = torch.autograd.grad([other for _, other in outputs], wanted, grads, allow_unused=True)
    spread_grads = [fd.distribute(grad, mesh, [Replicate()] * mesh.ndim, src=None) for grad in grads]
    targets = [one for one in sharded if one.requires_grad]
    found = torch.autograd.grad([one for one, _ in outputs], targets, spread_grads, allow_unused=True)
    for place, (one, other) in enumerate(zip(found, plain_grads, strict=True)):
        assert (one is None) == (other is None), what
        if one is not None:
            assert_same(one, other, f"gradient {place} of {what}", **tolerance)
    return got


def _listed(value):
    return list(value) if isinstance(value, list | tuple) else [value]


def check_everywhere(function, inputs, *, meshes=((2,), (3,)), partial=True, backward=True, **tolerance):
    """Run `check_operator` for every combination of the inputs' placements on each mesh."""
    for shape in meshes:
        choices = [placements_of(one.dim(), len(shape), partial=partial and one.is_floating_point()) for one in inputs]

        def check(group, shape=shape, choices=choices):
            mesh = DeviceMesh(group, shape)
            for placements in itertools.product(*choices):
                check_operator(mesh, function, inputs, placements, backward=backward, **tolerance)

        run_ranks(check, NUM_RANKS[shape])
