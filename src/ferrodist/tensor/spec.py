"""The spec of a distributed tensor: its mesh, placements, shape, strides and dtype, and the shards these give."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from ferrodist.arguments import check_type
from ferrodist.collectives.arguments import compute_shard_sizes
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.mesh import DeviceMesh
from ferrodist.tensor.placement import Partial, Placement, Replicate, Shard
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_DISPATCH_CACHE = "tensor.dispatch_cache"
"""The group attachment that holds `DTensorSpec.dispatch_cache`, for all specs on the group's meshes."""

_specs: WeakValueDictionary[tuple[object, ...], DTensorSpec] = WeakValueDictionary()
_lock = threading.Lock()


@dataclass(eq=False, repr=False, kw_only=True)
class DTensorSpec:
    """A mesh, a placement for each of its axes, and the shape, strides and dtype of the full tensor.

    `DTensorSpec.make` interns specs: equal ones are one object, compared and hashed by identity.
    """

    __slots__ = (
        "__weakref__",
        "coordinate",
        "dispatch_cache",
        "dtype",
        "local_shape",
        "mesh",
        "placements",
        "plans",
        "shape",
        "stride",
        "targets",
        "wrapper_arguments",
    )

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    coordinate: tuple[int, ...]  # this rank's coordinate in the mesh
    local_shape: tuple[int, ...]  # the shape of this rank's shard
    wrapper_arguments: tuple[Any, ...]
    """The arguments that make a wrapper of this shape, strides and dtype, without memory."""
    plans: dict[DTensorSpec, Any]  # the plans to other specs, as `redistribute_plan.make_plan` found them
    targets: dict[Any, DTensorSpec]  # what `resolve` found
    dispatch_cache: dict[Any, Any]
    """The calls that `dispatch` prepared for tensors of the mesh's group.

    The key of a call is a tuple that begins with the id of its operator. `ops.embedding` and `linear` have records here
    too.
    """

    @staticmethod
    def make(
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        shape: Sequence[int],
        dtype: torch.dtype,
        stride: Sequence[int] | None = None,
    ) -> DTensorSpec:
        """The spec of these values; placements are as `check_placements` returns them, and None strides contiguous."""
        sizes = tuple(shape)
        if torch.SymInt in map(type, (*sizes, *(stride or ()))):  # while a compiler traces: its graph is for this shape
            sizes, stride = tuple(map(int, sizes)), None if stride is None else tuple(map(int, stride))
        steps = contiguous_stride(sizes) if stride is None else tuple(stride)
        key = (mesh.identity, tuple(placements), sizes, steps, dtype)
        with _lock:
            found = _specs.get(key)
            if found is None:
                coordinate = mesh.coords(mesh.parent.rank)  # InvalidRankError: only ranks of a mesh have tensors on it
                found = _specs[key] = DTensorSpec(
                    mesh=mesh,
                    placements=tuple(placements),
                    shape=sizes,
                    stride=steps,
                    dtype=dtype,
                    coordinate=coordinate,
                    local_shape=tuple(local_sizes(sizes, placements, mesh.shape, coordinate)),
                    wrapper_arguments=(sizes, steps, None, None, dtype, torch.strided, torch.device("cpu")),
                    plans={},
                    targets={},
                    dispatch_cache=mesh.parent.attachments.setdefault(_DISPATCH_CACHE, {}),
                )
        return found

    def with_placements(self, placements: Sequence[Placement]) -> DTensorSpec:
        """The same tensor with other placements."""
        return DTensorSpec.make(self.mesh, placements, self.shape, self.dtype, self.stride)

    def resolve(self, placements: Placement | Sequence[Placement]) -> DTensorSpec:
        """The same tensor with placements as users give them, which are checked."""
        try:
            return self.targets[placements]
        except (KeyError, TypeError):  # new ones, or a list
            found = self.with_placements(check_placements(self.mesh, placements, self.shape))
            if isinstance(placements, Shard | Replicate | Partial | tuple):
                self.targets[placements] = found
            return found

    @property
    def replicated(self) -> DTensorSpec:
        """The same tensor, replicated along all axes."""
        return self.with_placements([Replicate()] * self.mesh.ndim)

    @property
    def without_partial(self) -> DTensorSpec:
        """The same tensor, replicated along the axes along which it is partial; gradients have these placements."""
        if not any(isinstance(one, Partial) for one in self.placements):
            return self
        return self.with_placements([Replicate() if isinstance(one, Partial) else one for one in self.placements])

    def forget_calls(self, operator: torch._ops.OpOverload) -> None:
        """Remove the calls of an operator from `dispatch_cache`."""
        for key in [key for key in self.dispatch_cache if key[0] == id(operator)]:
            del self.dispatch_cache[key]

    def mesh_along(self, axes: Sequence[int]) -> DeviceMesh:
        """The sub-mesh of the ranks that differ from this one along some axes only."""
        mesh = self.mesh
        return mesh if len(axes) == mesh.ndim else mesh[tuple(mesh.axis_names[axis] for axis in axes)]

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def sizes_along(self, axes: Sequence[int], dim: int) -> list[int]:
        """The local size of a dim on each rank of `mesh_along` some axes, in row-major order."""
        mesh = self.mesh
        coordinate = list(self.coordinate)
        found = []
        for indices in itertools.product(*[range(mesh.shape[axis]) for axis in axes]):
            for axis, index in zip(axes, indices, strict=True):
                coordinate[axis] = index
            found.append(local_sizes(self.shape, self.placements, mesh.shape, coordinate)[dim])
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensorSpec:
        """The spec itself, which doesn't change and is the only one of its values; the compiler copies it."""
        return self

    def __repr__(self) -> str:
        axes = ", ".join(
            f"{name}: {placement}" for name, placement in zip(self.mesh.axis_names, self.placements, strict=True)
        )
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} over {{{axes}}}"


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))


def local_sizes(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> list[int]:
    """The shape of the shard on the rank at a coordinate."""
    sizes = list(shape)
    for placement, num_ranks, index in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, Shard):
            block = sizes[placement.dim] // placement.blocks
            sizes[placement.dim] = placement.blocks * compute_shard_sizes(block, num_ranks)[index]
    return sizes


def local_range(spec: DTensorSpec, dim: int) -> tuple[int, int]:
    """The start and the end of this rank's shard in a dim that is not sharded in blocks."""
    start, size = 0, spec.shape[dim]
    for placement, num_ranks, index in zip(spec.placements, spec.mesh.shape, spec.coordinate, strict=True):
        if isinstance(placement, Shard) and placement.dim == dim:
            assert placement.blocks == 1, "a shard of blocks is no range"
            sizes = compute_shard_sizes(size, num_ranks)
            start, size = start + sum(sizes[:index]), sizes[index]
    return start, start + size


def shard_of(tensor: torch.Tensor, placement: Shard, num_ranks: int, index: int) -> torch.Tensor:
    """The shard of a tensor on one of the ranks of an axis: a view, or a copy if it is of several blocks."""
    dim, blocks = placement.dim, placement.blocks
    sizes = compute_shard_sizes(tensor.shape[dim] // blocks, num_ranks)
    start, length = sum(sizes[:index]), sizes[index]
    if blocks == 1:
        return tensor.narrow(dim, start, length)
    return split_blocks(tensor, dim, blocks).narrow(dim + 1, start, length).flatten(dim, dim + 1)


def split_blocks(tensor: torch.Tensor, dim: int, blocks: int) -> torch.Tensor:
    """The tensor with a dim split in two: the blocks, and the elements of each."""
    shape = tensor.shape
    return tensor.view(*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :])


def sharding_axes(placements: Sequence[Placement], dims: Collection[int]) -> tuple[int, ...]:
    """The axes that shard any of some dims."""
    return tuple(axis for axis, one in enumerate(placements) if isinstance(one, Shard) and one.dim in dims)


def check_placements(
    mesh: DeviceMesh, placements: Placement | Sequence[Placement], shape: Sequence[int]
) -> tuple[Placement, ...]:
    """The placements of a tensor of this shape, one for each axis of the mesh, as a tuple with non-negative dims."""
    check_type(mesh, DeviceMesh, "a tensor is distributed over a ferrodist.DeviceMesh")
    given = tuple(placements) if isinstance(placements, Iterable) else (placements,)
    for placement in given:
        if not isinstance(placement, Shard | Replicate | Partial):
            raise TypeError(
                f"a placement is Shard(dim), Replicate() or Partial() of ferrodist, not {_with_origin(placement)}"
            )
    if len(given) != mesh.ndim:
        raise ValueError(
            f"a mesh of axes {', '.join(map(repr, mesh.axis_names))} needs {counted(mesh.ndim, 'placement')}, one for"
            f" each, not {len(given)}: {list(given)}"
        )
    ops = {placement.op for placement in given if isinstance(placement, Partial)}
    if len(ops) > 1 and not ops <= {ReduceOp.SUM, ReduceOp.MEAN}:
        raise ValueError(
            f"{list(given)} reduces by {' and '.join(sorted(map(str, ops)))}, whose result depends on which comes first"
        )
    checked = list(given)
    for axis, placement in enumerate(given):
        if not isinstance(placement, Shard):
            continue
        along = f"{placement} along axis {mesh.axis_names[axis]!r}"
        if not -len(shape) <= placement.dim < len(shape):
            raise IndexError(f"{along}: a tensor of shape {tuple(shape)} has no such dim")
        dim = placement.dim % len(shape)
        sizes = sizes_before_axis(shape, checked, mesh.shape, axis, dim)
        if any(size % placement.blocks for size in sizes):
            raise ValueError(f"{along}: dim {dim} of {max(sizes)} is not {placement.blocks} equal blocks")
        checked[axis] = Shard(dim, placement.blocks)
    return tuple(checked)


def _with_origin(placement: object) -> str:
    """A wrong placement with its module, for torch has placements of the same names."""
    module = type(placement).__module__
    return repr(placement) if module == "builtins" else f"{placement!r} of {module}"


def has_equal_blocks(
    placement: Placement, shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], axis: int
) -> bool:
    """Return whether a placement shards in equal blocks, or in none, after the axes before ``axis``."""
    if not isinstance(placement, Shard) or placement.blocks == 1:
        return True
    sizes = sizes_before_axis(shape, placements, mesh_shape, axis, placement.dim)
    return all(size % placement.blocks == 0 for size in sizes)


def sizes_before_axis(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], axis: int, dim: int
) -> set[int]:
    """The sizes of a dim's shards, on any rank, after the axes before ``axis`` have split it."""
    sizes = {shape[dim]}
    for placement, num_ranks in zip(placements[:axis], mesh_shape, strict=False):
        if isinstance(placement, Shard) and placement.dim == dim:
            shards = [compute_shard_sizes(size // placement.blocks, num_ranks) for size in sizes]
            sizes = {placement.blocks * size for size in itertools.chain(*shards)}
    return sizes
