"""Tensors of random bits, and ranks' shards of them, cut at places unrelated to boxes."""

import torch

from ferrodist import DTensor, Replicate, Shard
from ferrodist.tensor.spec import DTensorSpec, check_placements, shard_of


def random_bits(shape, dtype, seed=0):
    """A tensor of any bits that the dtype has, the same wherever it is made."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    data = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


def bits_of(tensor):
    """A tensor's elements as bytes, so that NaNs are compared too, and signs of zeros."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def part_of(whole, mesh, placements):
    """This rank's part of a tensor."""
    for placement, size, at in zip(placements, mesh.shape, mesh.coordinate, strict=True):
        if isinstance(placement, Shard):
            whole = shard_of(whole, placement, size, at)
    return whole.contiguous()


def divide(whole, mesh, placements):
    """A tensor over a mesh, this rank's part in memory of its own."""
    placed = check_placements(mesh, placements, whole.shape)
    layout = DTensorSpec.make(mesh, placed, whole.shape, whole.dtype)
    local = part_of(whole.detach(), mesh, placed).clone()
    assert tuple(local.shape) == layout.local_shape
    return DTensor._wrap(local, layout)


def layouts_of(shape, world_size):
    """Meshes of so many ranks, and placements over them that a tensor of the shape can have."""
    meshes = {4: [(4,), (2, 2)], 3: [(3,), (1, 3)]}.get(world_size, [(world_size,)])
    for mesh in meshes:
        dims = [Replicate(), *[Shard(dim) for dim in range(len(shape))]]
        dims += [Shard(dim, 2) for dim in range(len(shape)) if shape[dim] % 2 == 0]
        for one in dims:
            if len(mesh) == 1:
                yield mesh, (one,)
                continue
            for other in dims:
                is_blocked = isinstance(one, Shard) and isinstance(other, Shard) and one.dim == other.dim
                if not (is_blocked and other.blocks > 1):
                    yield mesh, (one, other)
