"""Plans of redistribution: the collectives that bring a tensor from one spec to another with the fewest bytes.

A step changes the placement along one axis, or along several at once if one collective over all of them does it. The
plan is a shortest path over the placements that steps reach, by bytes, then by steps.

Let V be the bytes that a rank would have without the axis's sharding. Each of n ranks sends and receives on average:
all_gather, reduce_scatter V(n-1)/n; allreduce 2V(n-1)/n; all_to_all V(n-1)/n^2; slicing and making partial nothing.
Where such steps would send the same bytes twice, as when a dim that two axes shard is gathered along the first of them,
a general all-to-all sends each rank what it lacks; as a step it is named "exchange".
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.general_all_to_all import GeneralAllToAll
from ferrodist.tensor.placement import Partial, Placement, Replicate, Shard, reductions_commute
from ferrodist.tensor.spec import DTensorSpec, has_equal_blocks, sharding_axes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ferrodist.backends.base import Backend

    Placements = tuple[Placement, ...]

_GENERAL_ALL_TO_ALL_STEPS = 4
"""The number of steps that a general all-to-all counts as: of plans with equal bytes, simpler collectives win."""

_MAX_GENERAL_ALL_TO_ALL_RANKS = 64
"""The most ranks for which a general all-to-all is considered: computing its bytes is quadratic in the ranks."""


class RedistributeKind(Enum):
    """The kind of a step."""

    SLICE = "slice"
    MAKE_PARTIAL = "make partial"
    ALL_GATHER = "all_gather"
    ALLREDUCE = "allreduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    EXCHANGE = "exchange"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedistributeStep:
    """One step of a plan: ``before`` and ``after`` are the specs around it, which differ along ``axes`` only."""

    kind: RedistributeKind
    axes: tuple[int, ...]
    before: DTensorSpec
    after: DTensorSpec
    group: Backend  # the ranks along the axes
    size_bytes: float  # the bytes that a rank sends, on average

    def __str__(self) -> str:
        over = ", ".join(self.before.mesh.axis_names[axis] for axis in self.axes)
        return (
            f"{self.kind.value} over {over}: {_listed(self.before.placements)} -> {_listed(self.after.placements)},"
            f" {self.size_bytes:,.0f} bytes"
        )


class _Edge(NamedTuple):
    """A step in the search."""

    kind: RedistributeKind
    axes: tuple[int, ...]
    before: Placements
    after: Placements
    size_bytes: float


@dataclass(frozen=True, eq=False, repr=False)
class RedistributePlan:
    """The steps from one spec to another; ``print(plan)`` shows them with their bytes."""

    source: DTensorSpec
    target: DTensorSpec
    steps: tuple[RedistributeStep, ...]

    @property
    def size_bytes(self) -> float:
        """The bytes that a rank sends in all steps, on average."""
        return sum(step.size_bytes for step in self.steps)

    def __str__(self) -> str:
        lines = [f"{self.source}: {_listed(self.source.placements)} -> {_listed(self.target.placements)}"]
        lines += [f"  {number}. {step}" for number, step in enumerate(self.steps, 1)]
        lines.append(f"  together {self.size_bytes:,.0f} bytes from each rank, on average")
        return "\n".join(lines)


def _listed(placements: Sequence[Placement]) -> str:
    return f"[{', '.join(map(repr, placements))}]"


def make_plan(source: DTensorSpec, target: DTensorSpec) -> RedistributePlan:
    """The plan with the fewest bytes between two specs of one tensor on one mesh."""
    plan: RedistributePlan | None = source.plans.get(target)
    if plan is None:
        assert source.mesh == target.mesh, "a tensor stays on its mesh"
        assert source.shape == target.shape, "placements don't change a tensor's shape"
        steps = tuple(
            RedistributeStep(
                kind=edge.kind,
                axes=edge.axes,
                before=source.with_placements(edge.before),
                after=source.with_placements(edge.after),
                group=source.mesh_along(edge.axes).group,
                size_bytes=edge.size_bytes,
            )
            for edge in _Search(source, target.placements).run()
        )
        plan = source.plans[target] = RedistributePlan(source, target, steps)
    return plan


class _Search:
    """Dijkstra's shortest path over placements."""

    def __init__(self, source: DTensorSpec, target: Placements) -> None:
        self._start, self._target = source.placements, target
        self._mesh_shape = source.mesh.shape
        self._bytes = math.prod(source.shape) * source.dtype.itemsize
        self._shape = source.shape
        dims = {each.dim for each in (*self._start, *target) if isinstance(each, Shard)}
        # The placements that each axis may take: the target's, replicated, or sharded along any dim of either spec.
        common: list[Placement] = [Replicate(), *map(Shard, sorted(dims))]
        self._candidates: list[list[Placement]] = [
            list(dict.fromkeys([end, *common, *([start] if isinstance(start, Shard) else [])]))
            for start, end in zip(self._start, target, strict=True)
        ]

    def run(self) -> list[_Edge]:
        """The steps of the shortest path."""
        tie = itertools.count()
        heap: list[tuple[float, int, int, Placements]] = [(0.0, 0, next(tie), self._start)]
        reached: dict[Placements, _Edge | None] = {self._start: None}
        best: dict[Placements, tuple[float, int]] = {self._start: (0.0, 0)}
        while heap:
            size_bytes, num_steps, _, current = heapq.heappop(heap)
            if current == self._target:
                edges: list[_Edge] = []
                while (edge := reached[current]) is not None:
                    edges.append(edge)
                    current = edge.before
                return edges[::-1]
            if (size_bytes, num_steps) > best[current]:
                continue
            for edge in self._edges_from(current):
                steps = _GENERAL_ALL_TO_ALL_STEPS if edge.kind is RedistributeKind.EXCHANGE else 1
                cost = (round(size_bytes + edge.size_bytes, 3), num_steps + steps)
                if edge.after not in best or cost < best[edge.after]:
                    best[edge.after] = cost
                    reached[edge.after] = edge
                    heapq.heappush(heap, (*cost, next(tie), edge.after))
        raise AssertionError(f"no path from {self._start} to {self._target}")

    def _edges_from(self, current: Placements) -> Iterator[_Edge]:
        for axis, placement in enumerate(current):
            for target in self._candidates[axis]:
                kind = None if target == placement else self._axis_kind(current, axis, target)
                if kind is not None:
                    yield self._edge(kind, (axis,), current, {axis: target})
        yield from self._joint_edges(current)
        yield from self._general_all_to_all_edges(current)

    def _joint_edges(self, current: Placements) -> Iterator[_Edge]:
        """Steps over several axes at once, if one collective over all of them does it."""
        every = range(len(current))
        for axes in itertools.chain(*[itertools.combinations(every, count) for count in range(2, len(current) + 1)]):
            first = current[axes[0]]
            if any(current[axis] != first for axis in axes[1:]) or isinstance(first, Replicate):
                continue
            if isinstance(first, Partial):
                yield self._edge(RedistributeKind.ALLREDUCE, axes, current, dict.fromkeys(axes, Replicate()))
                for target in self._candidates[axes[0]]:
                    if isinstance(target, Shard) and target.blocks == 1 and not sharding_axes(current, (target.dim,)):
                        yield self._edge(RedistributeKind.REDUCE_SCATTER, axes, current, dict.fromkeys(axes, target))
            elif first.blocks == 1 and sharding_axes(current, (first.dim,)) == axes:
                yield self._edge(RedistributeKind.ALL_GATHER, axes, current, dict.fromkeys(axes, Replicate()))

    def _general_all_to_all_edges(self, current: Placements) -> Iterator[_Edge]:
        """The general all-to-all to the target's sharding, once nothing is partial any more.

        Other steps before it are of no use: what they gather it would bring, and it may lack what they slice.
        """
        after = tuple(Replicate() if isinstance(each, Partial) else each for each in self._target)
        if current == after or any(isinstance(each, Partial) for each in current):
            return
        steps = zip(self._start, current, strict=True)
        if any(now != start for start, now in steps if not isinstance(start, Partial)):
            return
        if any(isinstance(each, Shard) and each.blocks > 1 for each in (*current, *after)):
            return
        pattern = GeneralAllToAll(self._shape, current, after, self._mesh_shape)
        if math.prod(self._mesh_shape[axis] for axis in pattern.axes) <= _MAX_GENERAL_ALL_TO_ALL_RANKS:
            size_bytes = pattern.count_sent() * self._bytes / max(math.prod(self._shape), 1)
            yield _Edge(RedistributeKind.EXCHANGE, pattern.axes, current, after, size_bytes)

    def _edge(
        self, kind: RedistributeKind, axes: tuple[int, ...], current: Placements, changes: dict[int, Placement]
    ) -> _Edge:
        after = tuple(changes.get(axis, placement) for axis, placement in enumerate(current))
        num_ranks = math.prod(self._mesh_shape[axis] for axis in axes)
        others = [axis for axis, each in enumerate(current) if isinstance(each, Shard) and axis not in axes]
        full = self._bytes / math.prod(self._mesh_shape[axis] for axis in others)
        share = full * (num_ranks - 1) / num_ranks
        if kind in (RedistributeKind.SLICE, RedistributeKind.MAKE_PARTIAL):
            share = 0.0
        other = {RedistributeKind.ALLREDUCE: 2 * share, RedistributeKind.ALL_TO_ALL: share / num_ranks}
        return _Edge(kind, axes, current, after, other.get(kind, share))

    def _axis_kind(self, current: Placements, axis: int, target: Placement) -> RedistributeKind | None:
        """The step that brings one axis to a placement, or None if it takes several steps or is never of use."""
        placement = current[axis]
        others = (*current[:axis], Replicate(), *current[axis + 1 :])
        is_inner = any(
            isinstance(each, Shard) and innermost_blocks(placements, axis, each, self._mesh_shape) is None
            for placements, each in ((current, placement), (others, target))
        )
        if is_inner or not has_equal_blocks(target, self._shape, others, self._mesh_shape, axis):
            return None
        if isinstance(target, Shard):
            if isinstance(placement, Shard):
                return RedistributeKind.ALL_TO_ALL if placement.dim != target.dim else None
            return RedistributeKind.REDUCE_SCATTER if isinstance(placement, Partial) else RedistributeKind.SLICE
        if isinstance(target, Partial):
            # Shards of a mean, times the number of ranks, would not come back the same.
            is_sharded_mean = isinstance(placement, Shard) and target.op is ReduceOp.MEAN
            # The identity of one reduction is not that of another one, along other axes, which may come first.
            is_mixed = any(isinstance(each, Partial) and not reductions_commute(each, target) for each in others)
            if is_sharded_mean or is_mixed or isinstance(placement, Partial):
                return None
            return RedistributeKind.MAKE_PARTIAL
        return RedistributeKind.ALLREDUCE if isinstance(placement, Partial) else RedistributeKind.ALL_GATHER


# [Note: the innermost axis]
# The sharding along an axis can change by itself if no other axis splits its shards further: then the concatenated
# shards of the axis's ranks are what a rank without that sharding has. That holds for the last of the axes that shard a
# dim, in blocks or not. It also holds for an axis whose blocks are what the later axes split: then each rank's shard is
# within one block, and a contiguous part of it.


def innermost_blocks(placements: Placements, axis: int, placement: Shard, mesh_shape: Sequence[int]) -> int | None:
    """The number of blocks of a rank's shard that an axis splits last; None if it does not split last.

    See [Note: the innermost axis].
    """
    later = [other for other in sharding_axes(placements, (placement.dim,)) if other > axis]
    if not later:
        return placement.blocks
    is_plain = all(placements[other] == Shard(placement.dim) for other in later)
    return 1 if is_plain and placement.blocks == math.prod(mesh_shape[other] for other in later) else None
