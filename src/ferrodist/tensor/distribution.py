"""A tensor that one rank has, or every rank, as a tensor over a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ferrodist.backends.base import check_rank
from ferrodist.collectives.objects import all_gather_object
from ferrodist.collectives.prepare import check_layout, prepare_out
from ferrodist.collectives.reduce_op import check_dtype
from ferrodist.collectives.reductions import broadcast
from ferrodist.collectives.scattering import scatter_by_sizes
from ferrodist.collectives.sharding import compute_shard_sizes
from ferrodist.errors import CollectiveMismatchError, UnsupportedOpError
from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.layout import Layout, check_placements, take_part
from ferrodist.tensor.placement import Shard
from ferrodist.tensor.redistribution import redistribute_local

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.mesh import DeviceMesh
    from ferrodist.tensor.placement import Placement

__all__ = ["distribute"]


def distribute(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    placements: Placement | Sequence[Placement],
    *,
    src: int | None = 0,
) -> DTensor:
    """Place a tensor over a mesh; every rank of it calls this.

    Args:
        tensor: Of equal shape and dtype on all ranks; a leaf of autograd. Only that of ``src`` is read.
        mesh: The mesh.
        placements: How it shall lie, for each axis of the mesh; one placement for a mesh of one axis.
        src: The rank of the mesh whose elements count, as ``mesh.group`` numbers them. None sends nothing: each rank
            takes its part of its own tensor, which must be the same on all.

    Returns:
        A leaf, which requires grad if ``tensor`` does.

    Raises:
        TypeError: ``tensor`` is distributed already, or of a dtype that no collective carries.
        ValueError, IndexError: ``placements`` don't fit the mesh or the tensor.
        RuntimeError: ``tensor`` has a history, which would be lost: use `DTensor.from_local`.
        UnsupportedOpError: ``tensor`` is nested, sparse or on a GPU.
        CollectiveMismatchError: On all ranks: ``tensor`` has another shape or dtype on some.
        InvalidRankError: ``src`` is not in the mesh, or this rank is not.
    """
    if isinstance(tensor, DTensor):
        raise TypeError("the tensor is distributed already: use its redistribute()")
    check_layout(tensor)
    if tensor.is_quantized:
        check_dtype(tensor.dtype)
    if tensor.is_cuda:
        raise UnsupportedOpError(
            f"the tensor is on {tensor.device}: distributed tensors are on the CPU, pass tensor.cpu()"
        )
    if not tensor.is_leaf:
        raise RuntimeError(
            "distribute takes leaves, for gradients don't flow back through it: pass tensor.detach(), or use"
            " DTensor.from_local(tensor, mesh, Replicate()) and redistribute(), which are differentiable"
        )
    checked = check_placements(mesh, placements, tensor.shape)
    group = mesh.group
    whole = tensor.detach().resolve_conj().resolve_neg()
    # Parts of a sum are made of whole tensors, without anything sent.
    target = Layout.of(mesh, checked, tensor.shape, tensor.dtype)
    layout = target.folded
    if src is None:
        local = redistribute_local(whole, layout.whole, layout)
        local = local.clone() if local is whole else local
    else:
        root = mesh.coords(mesh.ranks[check_rank(group, src, f"src={src!r}")])
        _agree(tensor, mesh)
        local = _send(whole, layout, root)
    made = DTensor._wrap(redistribute_local(local, layout, target), target)
    made.requires_grad_(tensor.requires_grad)
    return made


def _agree(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    said = all_gather_object((tuple(tensor.shape), str(tensor.dtype)), group=mesh.group)
    for rank, other in zip(mesh.ranks, said, strict=True):
        if other != said[0]:
            raise CollectiveMismatchError(
                f"distribute needs the same shape and dtype on all ranks: rank {mesh.ranks[0]} has {said[0][1]} of"
                f" shape {said[0][0]}, rank {rank} {other[1]} of shape {other[0]}",
                ranks=(rank,),
            )


def _send(tensor: torch.Tensor, layout: Layout, root: Sequence[int]) -> torch.Tensor:
    """This rank's part, from the rank at ``root``: along each axis in turn, from those that have theirs already."""
    mesh = layout.mesh
    here = layout.coordinate
    for axis, (placement, num_ranks) in enumerate(zip(layout.placements, mesh.shape, strict=True)):
        if tuple(here[axis + 1 :]) != tuple(root[axis + 1 :]):
            part = _empty_part(tensor, placement, num_ranks, here[axis])
        elif isinstance(placement, Shard) and placement.blocks == 1:
            group = mesh[mesh.axis_names[axis]].group
            part = _scatter(tensor, placement.dim, root[axis], group)
        else:
            group = mesh[mesh.axis_names[axis]].group
            whole = broadcast(tensor, root[axis], group=group)
            part = take_part(whole, placement, num_ranks, here[axis]) if isinstance(placement, Shard) else whole
        tensor = part.contiguous()
    return tensor


def _empty_part(tensor: torch.Tensor, placement: Placement, num_ranks: int, at: int) -> torch.Tensor:
    """Something of the shape of a part, until it comes along another axis."""
    if not isinstance(placement, Shard):
        return tensor
    return torch.empty_like(take_part(tensor, placement, num_ranks, at))


def _scatter(tensor: torch.Tensor, dim: int, root: int, group: Backend) -> torch.Tensor:
    sizes = compute_shard_sizes(tensor.shape[dim], group.world_size)
    shape = [*tensor.shape[:dim], sizes[group.rank], *tensor.shape[dim + 1 :]]
    target = prepare_out(None, shape, tensor.dtype, device=tensor.device, dim=dim)
    whole = tensor if group.rank == root else None
    return scatter_by_sizes(whole, target, sizes, root, dim=dim, group=group, timeout=group.timeout)
