"""DeviceMesh: ranks as a grid with named axes, and the groups along its axes."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ferrodist.arguments import check_type
from ferrodist.backends.process_group import resolve_group
from ferrodist.backends.subgroup import SubBackend
from ferrodist.collectives.objects import all_gather_object
from ferrodist.errors import InvalidRankError
from ferrodist.rendezvous.environment import read_environment
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from typing_extensions import Self

    from ferrodist.backends.base import Backend

_MESH_COUNTS = "mesh.counts"  # the group attachment that counts the meshes of each description that this rank has made

_lock = threading.Lock()

_MAX_DRAWN_RANKS = 1024  # larger grids are not drawn, only described


def draw_grid(shape: Sequence[int], axis_names: Sequence[str], ranks: Sequence[int], own: int, group: str) -> str:
    r"""Draw a grid of ranks: the last axis as columns, the one before as rows, all others as slabs.

    ::

        DeviceMesh of group 'world': replicate 2 x shard 3, this is rank 4 in brackets
        replicate \ shard  0   1   2
                        0  0   1   2
                        1  3  [4]  5
    """
    sizes = " x ".join(f"{name} {size}" for name, size in zip(axis_names, shape, strict=True))
    this_rank = f"this is rank {own} in brackets" if own in ranks else f"without this rank, {own}"
    lines = [f"DeviceMesh of group {group!r}: {sizes}, {this_rank}"]
    if len(ranks) > _MAX_DRAWN_RANKS:
        return lines[0]
    num_columns = shape[-1]
    num_rows = shape[-2] if len(shape) > 1 else 1
    corner = f"{axis_names[-2]} \\ {axis_names[-1]}" if len(shape) > 1 else axis_names[-1]
    width = max(len(str(number)) for number in (*ranks, num_columns)) + 3
    slab_size = num_rows * num_columns
    for slab_index, outer in enumerate(itertools.product(*map(range, shape[:-2]))):
        if outer:
            lines.append(", ".join(f"{name} {index}" for name, index in zip(axis_names, outer, strict=False)) + ":")
        lines.append(corner + "".join(f" {column} ".rjust(width) for column in range(num_columns)))
        slab = ranks[slab_index * slab_size :][:slab_size]
        for row in range(num_rows):
            cells = slab[row * num_columns :][:num_columns]
            header = str(row) if len(shape) > 1 else ""
            marked = [f"[{rank}]" if rank == own else f" {rank} " for rank in cells]
            lines.append(header.rjust(len(corner)) + "".join(cell.rjust(width) for cell in marked))
    return "\n".join(line.rstrip() for line in lines)


class DeviceMesh:
    """A grid of ranks of a group, in row-major order: the last axis varies fastest.

    ::

        mesh = fd.DeviceMesh(group, (2, 4), ("replicate", "shard"))
        mesh["shard"].group  # this rank's row of four, as a group

    Making a mesh sends nothing. The groups along its axes are made on first use, by each member alone; ranks outside do
    not take part. All ranks must make the same number of meshes with the same arguments: the n-th of them on one rank
    has the groups of the n-th on the others.

    Args:
        group: The group that has the ranks; None is the default group.
        shape: The number of ranks along each axis. One of them may be -1, to be inferred.
        axis_names: A name for each axis, all different; None names them ``"0"``, ``"1"``, ...
        ranks: The ranks of ``group`` in row-major order of the grid; None is all ranks in ascending order. This rank
            need not be among them.

    Raises:
        ValueError: The shape doesn't fit the number of ranks, or names are missing, too many or repeated.
        InvalidRankError: A rank is not in the group, or is repeated.
        TypeError: An argument has the wrong type.
    """

    def __init__(
        self,
        group: Backend | None,
        shape: Sequence[int],
        axis_names: Sequence[str] | None = None,
        *,
        ranks: Sequence[int] | None = None,
    ) -> None:
        parent = resolve_group(group)
        members = tuple(range(parent.world_size)) if ranks is None else SubBackend.check_members(parent, ranks)
        sizes = _check_shape(shape, len(members), parent)
        names = _check_names(axis_names, len(sizes))
        label = f"mesh {sizes} {names} {members}"
        with _lock:
            counts: dict[str, int] = parent.attachments.setdefault(_MESH_COUNTS, {})
            counts[label] = counts.get(label, -1) + 1
        self._init(_MeshGroups(parent, f"{label} {counts[label]}"), sizes, names, members)

    def _init(
        self, groups: _MeshGroups, shape: tuple[int, ...], axis_names: tuple[str, ...], ranks: tuple[int, ...]
    ) -> None:
        self._groups = groups
        self._shape = shape
        self._axis_names = axis_names
        self._ranks = ranks
        self._indices = {rank: index for index, rank in enumerate(ranks)}

    @classmethod
    def of_hosts(cls, group: Backend | None = None, axis_names: Sequence[str] = ("host", "local_rank")) -> Self:
        """A mesh of hosts and the ranks of each, from the launcher's variables; every rank of the group calls this.

        Args:
            group: The group; None is the default group.
            axis_names: The names of the axis of hosts and of the axis of ranks within a host.

        Raises:
            ValueError: On every rank: hosts have different numbers of ranks, or some rank has no GROUP_RANK and
                LOCAL_RANK in its environment.
        """
        parent = resolve_group(group)
        environment = read_environment()
        own = (environment.group_rank, environment.local_rank)
        positions = all_gather_object(own, group=parent)
        unknown = [rank for rank, position in enumerate(positions) if None in position]
        if unknown:
            raise ValueError(
                f"rank {unknown[0]} of group {parent.name!r} has no GROUP_RANK and LOCAL_RANK in its environment: start"
                " the ranks with `ferrodist run` or torchrun, or pass the shape to DeviceMesh"
            )
        ranks = sorted(range(parent.world_size), key=lambda rank: positions[rank])
        hosts = [host for host, _ in positions]
        sizes = [hosts.count(host) for host in sorted(set(hosts))]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"the hosts of group {parent.name!r} have {sizes} ranks, and a mesh has as many on each: start equal"
                " numbers, or pass shape and ranks to DeviceMesh"
            )
        return cls(parent, (len(sizes), sizes[0]), axis_names, ranks=ranks)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each axis."""
        return self._shape

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return self._axis_names

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in row-major order, as ranks of `parent`."""
        return self._ranks

    @property
    def parent(self) -> Backend:
        """The group from which the mesh was made; all methods take and return ranks of it."""
        return self._groups.parent

    @property
    def group(self) -> Backend:
        """All ranks of the mesh as one group, in row-major order.

        Raises:
            InvalidRankError: This rank is not in the mesh.
        """
        return self._groups.group_of(self._ranks)

    @property
    def coordinate(self) -> tuple[int, ...] | None:
        """This rank's coordinate, or None if it is not in the mesh."""
        rank = self.parent.rank
        return self.coords(rank) if rank in self._indices else None

    @property
    def identity(self) -> Hashable:
        """A key that is equal for meshes with the same grid and the same groups, such as equal slices of one mesh."""
        return (id(self._groups), self._shape, self._axis_names, self._ranks)

    def axis_index(self, axis: str | int) -> int:
        """The index of an axis, given its name or its index; negative indices count from the last.

        Raises:
            ValueError: There is no such axis.
            TypeError: ``axis`` is neither a name nor an index.
        """
        if isinstance(axis, str):
            if axis not in self._axis_names:
                raise ValueError(f"there is no axis {axis!r}: this mesh has {_listed(self._axis_names)}")
            return self._axis_names.index(axis)
        if isinstance(axis, bool) or not isinstance(axis, int):
            raise TypeError(f"an axis is given by its name or its index, not by {axis!r}")
        if not -self.ndim <= axis < self.ndim:
            raise ValueError(f"there is no axis {axis}: this mesh has {self.ndim}")
        return axis % self.ndim

    def coords(self, rank: int) -> tuple[int, ...]:
        """The coordinate of a rank.

        Raises:
            InvalidRankError: The rank is not in the mesh.
        """
        if rank not in self._indices:
            raise InvalidRankError(f"rank {rank} is not in this mesh of ranks {list(self._ranks)}", ranks=(rank,))
        index, coords = self._indices[rank], []
        for size in reversed(self._shape):
            index, coordinate = divmod(index, size)
            coords.append(coordinate)
        return tuple(reversed(coords))

    def rank_of(self, coords: Sequence[int]) -> int:
        """The rank at a coordinate.

        Raises:
            ValueError: There is no such coordinate.
        """
        if len(coords) != self.ndim or any(not 0 <= one < size for one, size in zip(coords, self._shape, strict=True)):
            raise ValueError(f"there is no coordinate {tuple(coords)} in a mesh of shape {self._shape}")
        index = 0
        for coordinate, size in zip(coords, self._shape, strict=True):
            index = index * size + coordinate
        return self._ranks[index]

    def ranks_along_axis(self, axis: str | int, rank: int | None = None) -> tuple[int, ...]:
        """The ranks that differ from a rank along one axis only, in ascending order of their coordinates.

        Args:
            axis: The axis's name or index.
            rank: A rank of the mesh; None is this one.
        """
        return self._along((self.axis_index(axis),), rank)

    def groups_along_axis(self, axis: str | int) -> list[tuple[int, ...]]:
        """The ranks of each group along an axis; together they are the mesh."""
        index = self.axis_index(axis)
        others = [range(size) if other != index else range(1) for other, size in enumerate(self._shape)]
        return [self._along((index,), self.rank_of(coords)) for coords in itertools.product(*others)]

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        """The sub-mesh along some axes, in this order, that contains this rank.

        Raises:
            ValueError: There is no such axis, or one is repeated.
            InvalidRankError: This rank is not in the mesh.
        """
        names = axes if isinstance(axes, tuple) else (axes,)
        if not names or not all(isinstance(name, str) for name in names):
            raise TypeError(f"a mesh is sliced by names of axes, as mesh[{self._axis_names[0]!r}], not by {axes!r}")
        chosen = tuple(self.axis_index(name) for name in names)
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"an axis comes twice in {_listed(names)}")
        shape = tuple(self._shape[index] for index in chosen)
        return self._sub_mesh(shape, names, self._along(chosen, None))

    def flatten(self, axis_name: str | None = None) -> DeviceMesh:
        """The same ranks along one axis; ``mesh["a", "b"].flatten()`` flattens two axes of several.

        Args:
            axis_name: The axis's name; None joins the names by ``_``.
        """
        name = "_".join(self._axis_names) if axis_name is None else axis_name
        return self._sub_mesh((self.size,), _check_names((name,), 1), self._ranks)

    def __eq__(self, other: object) -> bool:
        """Return whether both are the same grid of one group; the groups along their axes may differ."""
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return self._grid_key() == other._grid_key()

    def __hash__(self) -> int:
        return hash(self._grid_key())

    def __deepcopy__(self, memo: object) -> Self:
        """Return the mesh itself: copies of modules communicate over the same groups."""
        return self

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to be pickled: the groups belong to this process."""
        raise TypeError("a DeviceMesh is not pickled: make it anew where it is needed, of the same shape and names")

    def __copy__(self) -> Self:
        return self

    def __repr__(self) -> str:
        """The grid, with this rank in brackets."""
        return draw_grid(self._shape, self._axis_names, self._ranks, self.parent.rank, self.parent.name)

    def _grid_key(self) -> tuple[object, ...]:
        return (id(self.parent), self._shape, self._axis_names, self._ranks)

    def _sub_mesh(self, shape: tuple[int, ...], axis_names: tuple[str, ...], ranks: tuple[int, ...]) -> DeviceMesh:
        mesh = DeviceMesh.__new__(DeviceMesh)
        mesh._init(self._groups, shape, axis_names, ranks)  # noqa: SLF001 - of its own class
        return mesh

    def _along(self, axes: tuple[int, ...], rank: int | None) -> tuple[int, ...]:
        """The ranks that differ from a rank, or this one, along some axes only, in row-major order of these axes."""
        coords = list(self.coords(self.parent.rank if rank is None else rank))
        found = []
        for values in itertools.product(*[range(self._shape[axis]) for axis in axes]):
            for axis, value in zip(axes, values, strict=True):
                coords[axis] = value
            found.append(self.rank_of(coords))
        return tuple(found)


class _MeshGroups:
    """The groups of a mesh and its sub-meshes on this rank, each made on first use."""

    def __init__(self, parent: Backend, label: str) -> None:
        self.parent = parent
        self._label = label
        self._made: dict[tuple[int, ...], Backend] = {}

    def group_of(self, ranks: tuple[int, ...]) -> Backend:
        """The group of some ranks, in their order."""
        if ranks == tuple(range(self.parent.world_size)):
            return self.parent
        with _lock:
            if ranks not in self._made:
                self._made[ranks] = SubBackend(self.parent, ranks, label=self._label)
            return self._made[ranks]


def _check_shape(shape: Sequence[int], num_ranks: int, parent: Backend) -> tuple[int, ...]:
    sizes = tuple(shape) if isinstance(shape, Iterable) else ()
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) for size in sizes):
        raise TypeError(f"a mesh's shape is one or more integers, as (2, 4), not {shape!r}")
    if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
        raise ValueError(f"a mesh's shape has positive sizes, and at most one -1, not {sizes}")
    known = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and num_ranks % known == 0:
        return tuple(num_ranks // known if size == -1 else size for size in sizes)
    if -1 in sizes or known != num_ranks:
        raise ValueError(
            f"a mesh of shape {sizes} does not fit {counted(num_ranks, 'rank')} of group {parent.name!r}, which has"
            f" {parent.world_size}: pass a shape whose product is the number of ranks, or ranks="
        )
    return sizes


def _check_names(axis_names: Sequence[str] | None, ndim: int) -> tuple[str, ...]:
    if isinstance(axis_names, str):
        raise TypeError(f"axis_names is a sequence of names, as ({axis_names!r},), not one string")
    check_type(axis_names, (Iterable, type(None)), "axis_names is a sequence of names, as ('a', 'b')")
    names = tuple(map(str, range(ndim))) if axis_names is None else tuple(axis_names)
    if not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"names of axes are strings that are not empty, not {names}")
    if len(names) != ndim:
        raise ValueError(f"a mesh of {counted(ndim, 'axis')} needs as many names, not {len(names)}: {_listed(names)}")
    if len(set(names)) < ndim:
        raise ValueError(f"the names of axes must all be different, not {_listed(names)}")
    return names


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


__all__ = ["DeviceMesh"]


def __dir__() -> list[str]:
    return sorted(__all__)
