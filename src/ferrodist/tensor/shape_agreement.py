"""Agreement of the ranks on the shape of a tensor of which each has a shard."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

from ferrodist.backends.signature import MAX_PAYLOAD
from ferrodist.collectives.engines.host import share_bytes
from ferrodist.collectives.payloads import dtype_text, unpack_payloads
from ferrodist.collectives.reduce_op import DTYPES
from ferrodist.errors import CollectiveMismatchError
from ferrodist.tensor.placement import Placement, Shard
from ferrodist.tensor.spec import local_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ferrodist.mesh import DeviceMesh

_MAX_DIMS = 8
_SHARD = struct.Struct(f"<BB{_MAX_DIMS}q8s")
"""A rank's shard: the dtype's index in DTYPES, the number of dims, the shape, and a digest of the placements."""


def agree_on_shape(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, ...]:
    """The shape of the full tensor that the ranks' shards make; all ranks of the mesh call this.

    CollectiveMismatchError, on all ranks: the shards make no tensor.
    """
    if local.dim() > _MAX_DIMS:
        raise ValueError(f"from_local takes tensors of at most {_MAX_DIMS} dims without shape=, not {local.dim()}")
    group = mesh.group
    padded = [*local.shape, *[0] * (_MAX_DIMS - local.dim())]
    # The text is for error messages, as much of it as fits.
    text = repr(list(placements)).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    header = _SHARD.pack(DTYPES.index(local.dtype), local.dim(), *padded, digest)
    payload = header + text[: MAX_PAYLOAD - len(header)]
    payloads = share_bytes(group, "from_local", payload, group.timeout)
    descriptions = unpack_payloads(_SHARD, payloads, group, "from_local")
    shapes = [tuple(sizes[:num_dims]) for _, num_dims, *sizes, _ in descriptions]
    for index, (dtype, num_dims, *_, placements_digest) in enumerate(descriptions):
        if (dtype, num_dims, placements_digest) != (*descriptions[0][:2], descriptions[0][-1]):
            raise CollectiveMismatchError(
                "the ranks' shards don't make a tensor: "
                + " and ".join(
                    f"rank {mesh.ranks[at]} has torch.{dtype_text(descriptions[at][0])} of shape {shapes[at]},"
                    f" placed as {payloads[at][_SHARD.size :].decode(errors='replace')}"
                    for at in (0, index)
                ),
                ranks=(mesh.ranks[index],),
            )
    full = [_full_size(mesh, placements, shapes, dim) for dim in range(local.dim())]
    for rank, shape in zip(mesh.ranks, shapes, strict=True):
        expected = tuple(local_sizes(full, placements, mesh.shape, mesh.coords(rank)))
        if shape != expected:
            raise CollectiveMismatchError(
                f"the ranks' shards don't make a tensor: they have {tuple(full)} together, of which, placed as"
                f" {list(placements)}, rank {rank} has a shard of shape {expected}, not {shape}",
                ranks=(rank,),
            )
    return tuple(full)


def _full_size(mesh: DeviceMesh, placements: Sequence[Placement], shapes: Sequence[tuple[int, ...]], dim: int) -> int:
    """The full size of a dim: the sum over the ranks along the axes that shard it, at index 0 along all others."""
    is_sharding = [isinstance(one, Shard) and one.dim == dim for one in placements]
    return sum(
        shape[dim]
        for rank, shape in zip(mesh.ranks, shapes, strict=True)
        if all(shards or not index for shards, index in zip(is_sharding, mesh.coords(rank), strict=True))
    )
