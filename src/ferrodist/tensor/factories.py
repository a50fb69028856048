"""New tensors over a mesh: what torch's functions of these names make, in parts.

A tensor that one rank has, or every rank, as a tensor over a mesh.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ferrodist.backends.base import check_rank
from ferrodist.collectives.arguments import check_layout, compute_shard_sizes, prepare_out
from ferrodist.collectives.gather import scatter_with_sizes
from ferrodist.collectives.objects import all_gather_object
from ferrodist.collectives.reduce import broadcast
from ferrodist.collectives.reduce_op import check_dtype
from ferrodist.errors import CollectiveMismatchError, UnsupportedOpError
from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.ops.random import check_generators, local_of_full
from ferrodist.tensor.placement import Shard
from ferrodist.tensor.redistribute import redistribute_local
from ferrodist.tensor.spec import DTensorSpec, check_placements, shard_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.mesh import DeviceMesh
    from ferrodist.tensor.placement import Placement


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
    target = DTensorSpec.make(mesh, checked, tensor.shape, tensor.dtype)
    spec = target.without_partial
    if src is None:
        local = redistribute_local(whole, spec.replicated, spec)
        local = local.clone() if local is whole else local
    else:
        root = mesh.coords(mesh.ranks[check_rank(group, src, f"src={src!r}")])
        _agree(tensor, mesh)
        local = _send(whole, spec, root)
    made = DTensor._wrap(redistribute_local(local, spec, target), target)
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


def _send(tensor: torch.Tensor, spec: DTensorSpec, root: Sequence[int]) -> torch.Tensor:
    """This rank's part, from the rank at ``root``: along each axis in turn, from those that have theirs already."""
    mesh = spec.mesh
    here = spec.coordinate
    for axis, (placement, num_ranks) in enumerate(zip(spec.placements, mesh.shape, strict=True)):
        if tuple(here[axis + 1 :]) != tuple(root[axis + 1 :]):
            part = _empty_part(tensor, placement, num_ranks, here[axis])
        elif isinstance(placement, Shard) and placement.blocks == 1:
            group = mesh[mesh.axis_names[axis]].group
            part = _scatter(tensor, placement.dim, root[axis], group)
        else:
            group = mesh[mesh.axis_names[axis]].group
            whole = broadcast(tensor, root[axis], group=group)
            part = shard_of(whole, placement, num_ranks, here[axis]) if isinstance(placement, Shard) else whole
        tensor = part.contiguous()
    return tensor


def _empty_part(tensor: torch.Tensor, placement: Placement, num_ranks: int, at: int) -> torch.Tensor:
    """Something of the shape of a part, until it comes along another axis."""
    if not isinstance(placement, Shard):
        return tensor
    return torch.empty_like(shard_of(tensor, placement, num_ranks, at))


def _scatter(tensor: torch.Tensor, dim: int, root: int, group: Backend) -> torch.Tensor:
    sizes = compute_shard_sizes(tensor.shape[dim], group.world_size)
    shape = [*tensor.shape[:dim], sizes[group.rank], *tensor.shape[dim + 1 :]]
    target = prepare_out(None, shape, tensor.dtype, device=tensor.device, dim=dim)
    whole = tensor if group.rank == root else None
    return scatter_with_sizes(whole, target, sizes, root, dim=dim, group=group, timeout=group.timeout)


if TYPE_CHECKING:
    Placements = Placement | Sequence[Placement]


def empty(
    shape: Sequence[int],
    *,
    mesh: DeviceMesh,
    placements: Placements,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """A tensor whose elements are not set. Nothing is sent.

    Args:
        shape: Of the whole tensor.
        mesh: The mesh; every rank of it calls this.
        placements: How it lies, for each axis of the mesh; one placement for a mesh of one axis.
        dtype: None is torch's default.
        requires_grad: Whether it gets a gradient.
    """
    target = _spec(shape, mesh, placements, dtype)
    return _leaf(torch.empty(target.local_shape, dtype=target.dtype, device="cpu"), target, requires_grad=requires_grad)


def full(
    shape: Sequence[int],
    value: complex,
    *,
    mesh: DeviceMesh,
    placements: Placements,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """A tensor of which every element is ``value``, whose type decides where ``dtype`` is None; else as `empty`."""
    target = _spec(shape, mesh, placements, torch.full((), value, device="cpu").dtype if dtype is None else dtype)
    # Parts of a sum are made of whole tensors.
    first = target.without_partial
    local = torch.full(first.local_shape, value, dtype=target.dtype, device="cpu")
    return _leaf(redistribute_local(local, first, target), target, requires_grad=requires_grad)


def zeros(
    shape: Sequence[int],
    *,
    mesh: DeviceMesh,
    placements: Placements,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """A tensor of zeros, as `full`."""
    kind = torch.get_default_dtype() if dtype is None else dtype
    return full(shape, 0, mesh=mesh, placements=placements, dtype=kind, requires_grad=requires_grad)


def ones(
    shape: Sequence[int],
    *,
    mesh: DeviceMesh,
    placements: Placements,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """A tensor of ones, as `full`."""
    kind = torch.get_default_dtype() if dtype is None else dtype
    return full(shape, 1, mesh=mesh, placements=placements, dtype=kind, requires_grad=requires_grad)


def rand(
    shape: Sequence[int],
    *,
    mesh: DeviceMesh,
    placements: Placements,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    generator: torch.Generator | None = None,
) -> DTensor:
    """A tensor of numbers from 0 to 1, the same that ``torch.rand(shape)`` draws in one process; else as `empty`.

    Args:
        shape: As of `empty`, and the following.
        mesh: The mesh.
        placements: How it lies.
        dtype: None is torch's default.
        requires_grad: Whether it gets a gradient.
        generator: What draws, in the same state on all ranks. None is torch's default generator, which ranks that are
            threads share: they pass one of their own each.

    Raises:
        CollectiveMismatchError: On all ranks: their generators are in different states.
    """
    target = _spec(shape, mesh, placements, dtype)
    check_generators(mesh, generator, "rand")
    return _part(
        torch.rand(target.shape, dtype=target.dtype, generator=generator, device="cpu"),
        target,
        requires_grad=requires_grad,
    )


def randn(
    shape: Sequence[int],
    *,
    mesh: DeviceMesh,
    placements: Placements,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    generator: torch.Generator | None = None,
) -> DTensor:
    """A tensor of normally distributed numbers, those that ``torch.randn(shape)`` draws in one process; as `rand`."""
    target = _spec(shape, mesh, placements, dtype)
    check_generators(mesh, generator, "randn")
    return _part(
        torch.randn(target.shape, dtype=target.dtype, generator=generator, device="cpu"),
        target,
        requires_grad=requires_grad,
    )


def arange(
    start: float,
    end: float | None = None,
    step: float = 1,
    *,
    mesh: DeviceMesh,
    placements: Placements,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """The numbers that ``torch.arange`` of the same gives, which starts from 0 when there is no ``end``; as `empty`."""
    if end is None:
        start, end = 0, start
    whole = torch.arange(start, end, step, dtype=dtype, device="cpu")
    target = _spec(whole.shape, mesh, placements, whole.dtype)
    return _part(whole, target, requires_grad=requires_grad)


def _spec(shape: Sequence[int], mesh: DeviceMesh, placements: Placements, dtype: torch.dtype | None) -> DTensorSpec:
    kind = torch.get_default_dtype() if dtype is None else dtype
    return DTensorSpec.make(mesh, check_placements(mesh, placements, shape), shape, kind)


def _part(whole: torch.Tensor, target: DTensorSpec, *, requires_grad: bool) -> DTensor:
    return _leaf(local_of_full(whole, target), target, requires_grad=requires_grad)


def _leaf(local: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool) -> DTensor:
    made = DTensor._wrap(local, spec)
    made.requires_grad_(requires_grad)
    return made
