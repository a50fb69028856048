"""Makers of distributed tensors: `distribute` for a plain tensor, and torch's factories such as `zeros` and `randn`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ferrodist.arguments import check_type
from ferrodist.backends.base import Backend, check_rank
from ferrodist.collectives.arguments import check_layout, check_shape, compute_shard_sizes, prepare_out
from ferrodist.collectives.gather import scatter_call
from ferrodist.collectives.objects import all_gather_object
from ferrodist.collectives.reduce import broadcast
from ferrodist.collectives.reduce_op import check_dtype
from ferrodist.collectives.work import execute
from ferrodist.errors import CollectiveMismatchError, UnsupportedOpError
from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.ops.random import check_generators, local_of_full
from ferrodist.tensor.placement import Placement, Shard
from ferrodist.tensor.redistribute import redistribute_local
from ferrodist.tensor.spec import DTensorSpec, check_placements, shard_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.mesh import DeviceMesh

    Placements = Placement | Sequence[Placement]

__all__ = ["arange", "empty", "full", "ones", "rand", "randn", "zeros"]  # `fd.factories`


def distribute(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Placement | Sequence[Placement], *, src: int | None = 0
) -> DTensor:
    """Distribute a tensor over a mesh; every rank of the mesh calls this.

    Args:
        tensor: The full tensor, a leaf of autograd, with the same shape and dtype on all ranks. Only the elements of
            ``src`` are read.
        mesh: The mesh.
        placements: The placement along each axis of the mesh; one placement for a mesh of one axis.
        src: The rank whose elements are sent, by its index in ``mesh.group``. With None nothing is sent: each rank
            takes its shard of its own tensor, which must be the same on all.

    Returns:
        A leaf, which requires grad if ``tensor`` does.

    Raises:
        TypeError: ``tensor`` is distributed already, or no tensor; it is quantized, or is to be sent and has a dtype
            that no collective carries; or ``mesh`` or ``placements`` is of another type.
        ValueError, IndexError: ``placements`` don't fit the mesh or the tensor.
        RuntimeError: ``tensor`` has an autograd history, which would be lost: use `DTensor.from_local`.
        UnsupportedOpError: ``tensor`` is nested, sparse or on a GPU.
        CollectiveMismatchError: On all ranks: the ranks' tensors differ in shape or dtype.
        InvalidRankError: ``src``, or this rank, is not in the mesh.
    """
    if isinstance(tensor, DTensor):
        raise TypeError("the tensor is distributed already: use its redistribute()")
    check_type(tensor, torch.Tensor, "distribute takes a torch.Tensor")
    check_layout(tensor)
    if src is not None or tensor.is_quantized:
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
    full = tensor.detach().resolve_conj().resolve_neg()
    # Partial tensors are made of replicated ones, with nothing sent.
    target = DTensorSpec.make(mesh, checked, tensor.shape, tensor.dtype)
    spec = target.without_partial
    if src is None:
        local = redistribute_local(full, spec.replicated, spec)
        local = local.clone() if local is full else local
    else:
        root = mesh.coords(mesh.ranks[check_rank(group, src, f"src={src!r}")])
        _check_same_form(tensor, mesh)
        local = _send_shards(full, spec, root)
    made = DTensor._wrap(redistribute_local(local, spec, target), target)
    made.requires_grad_(tensor.requires_grad)
    return made


def _check_same_form(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    forms = all_gather_object((tuple(tensor.shape), str(tensor.dtype)), group=mesh.group)
    for rank, other in zip(mesh.ranks, forms, strict=True):
        if other != forms[0]:
            raise CollectiveMismatchError(
                f"distribute needs the same shape and dtype on all ranks: rank {mesh.ranks[0]} has {forms[0][1]} of"
                f" shape {forms[0][0]}, rank {rank} {other[1]} of shape {other[0]}",
                ranks=(rank,),
            )


def _send_shards(tensor: torch.Tensor, spec: DTensorSpec, root: Sequence[int]) -> torch.Tensor:
    """This rank's shard, sent from the rank at a coordinate: along each axis in turn, by ranks that have theirs."""
    mesh = spec.mesh
    own = spec.coordinate
    for axis, (placement, num_ranks) in enumerate(zip(spec.placements, mesh.shape, strict=True)):
        if tuple(own[axis + 1 :]) != tuple(root[axis + 1 :]):
            # The shard arrives along a later axis: until then a tensor of its shape.
            shard = tensor
            if isinstance(placement, Shard):
                shard = torch.empty_like(shard_of(tensor, placement, num_ranks, own[axis]))
        elif isinstance(placement, Shard) and placement.blocks == 1:
            group = mesh[mesh.axis_names[axis]].group
            shard = _scatter(tensor, placement.dim, root[axis], group)
        else:
            group = mesh[mesh.axis_names[axis]].group
            full = broadcast(tensor, root[axis], group=group)
            shard = shard_of(full, placement, num_ranks, own[axis]) if isinstance(placement, Shard) else full
        tensor = shard.contiguous()
    return tensor


def _scatter(tensor: torch.Tensor, dim: int, root: int, group: Backend) -> torch.Tensor:
    sizes = compute_shard_sizes(tensor.shape[dim], group.world_size)
    shape = [*tensor.shape[:dim], sizes[group.rank], *tensor.shape[dim + 1 :]]
    target = prepare_out(None, shape, tensor.dtype, device=tensor.device, dim=dim)
    full = tensor if group.rank == root else None
    return execute(scatter_call(full, target, sizes, root, dim=dim, group=group, timeout=group.timeout))


def empty(
    shape: Sequence[int],
    *,
    mesh: DeviceMesh,
    placements: Placements,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """An uninitialized tensor. Nothing is sent.

    Args:
        shape: The shape of the full tensor.
        mesh: The mesh; every rank of it calls this.
        placements: The placement along each axis of the mesh; one placement for a mesh of one axis.
        dtype: The dtype; None is torch's default.
        requires_grad: Whether the tensor requires grad.
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
    """A tensor filled with ``value``, whose type gives the dtype if ``dtype`` is None; else like `empty`."""
    target = _spec(shape, mesh, placements, torch.full((), value, device="cpu").dtype if dtype is None else dtype)
    source = target.without_partial  # partial tensors are made of replicated ones
    local = torch.full(source.local_shape, value, dtype=target.dtype, device="cpu")
    return _leaf(redistribute_local(local, source, target), target, requires_grad=requires_grad)


def zeros(
    shape: Sequence[int],
    *,
    mesh: DeviceMesh,
    placements: Placements,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """A tensor of zeros; else like `full`."""
    return full(shape, 0.0, mesh=mesh, placements=placements, dtype=dtype, requires_grad=requires_grad)


def ones(
    shape: Sequence[int],
    *,
    mesh: DeviceMesh,
    placements: Placements,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """A tensor of ones; else like `full`."""
    return full(shape, 1.0, mesh=mesh, placements=placements, dtype=dtype, requires_grad=requires_grad)


def rand(
    shape: Sequence[int],
    *,
    mesh: DeviceMesh,
    placements: Placements,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    generator: torch.Generator | None = None,
) -> DTensor:
    """A tensor of uniform random numbers in [0, 1), those that ``torch.rand(shape)`` draws in one process.

    Args:
        shape: The shape of the full tensor.
        mesh: The mesh; every rank of it calls this.
        placements: The placement along each axis of the mesh; one placement for a mesh of one axis.
        dtype: The dtype; None is torch's default.
        requires_grad: Whether the tensor requires grad.
        generator: The generator, in the same state on all ranks. None is torch's default one, which ranks that are
            threads share: they pass a generator each.

    Raises:
        CollectiveMismatchError: On all ranks: their generators are in different states.
    """
    target = _spec(shape, mesh, placements, dtype)
    check_generators(mesh, generator, "rand")
    drawn = torch.rand(target.shape, dtype=target.dtype, generator=generator, device="cpu")
    return _leaf(local_of_full(drawn, target), target, requires_grad=requires_grad)


def randn(
    shape: Sequence[int],
    *,
    mesh: DeviceMesh,
    placements: Placements,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    generator: torch.Generator | None = None,
) -> DTensor:
    """A tensor of normal random numbers, those that ``torch.randn(shape)`` draws in one process; else like `rand`."""
    target = _spec(shape, mesh, placements, dtype)
    check_generators(mesh, generator, "randn")
    drawn = torch.randn(target.shape, dtype=target.dtype, generator=generator, device="cpu")
    return _leaf(local_of_full(drawn, target), target, requires_grad=requires_grad)


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
    """The range of ``torch.arange``, which starts from 0 if ``end`` is omitted; else like `empty`."""
    if end is None:
        start, end = 0, start
    full_range = torch.arange(start, end, step, dtype=dtype, device="cpu")
    target = _spec(full_range.shape, mesh, placements, full_range.dtype)
    return _leaf(local_of_full(full_range, target), target, requires_grad=requires_grad)


def _spec(shape: Sequence[int], mesh: DeviceMesh, placements: Placements, dtype: torch.dtype | None) -> DTensorSpec:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    sizes = check_shape(shape)
    return DTensorSpec.make(mesh, check_placements(mesh, placements, sizes), sizes, dtype)


def _leaf(local: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool) -> DTensor:
    made = DTensor._wrap(local, spec)
    made.requires_grad_(requires_grad)
    return made
