"""Which collectives bring a tensor from one layout to another, with the fewest bytes.

A step changes the placement along one axis, or along several at once where one collective over all of them does it.
The plan is a shortest path over the placements that steps reach, by bytes, then by steps.

Of V bytes that n ranks share (what a rank has where the axis does not divide it), each sends and receives on average:
all_gather, reduce_scatter V(n-1)/n; allreduce 2V(n-1)/n; all_to_all V(n-1)/n^2; slices and the parts of a sum nothing.
Where such steps would send the same bytes twice, as when the first of two axes that divide a dim shall leave, an
exchange between all ranks sends what each lacks.

One exchange from any way of dividing a tensor to any other: each rank gets what it lacks, and nothing else.

A rank's part is a box: an interval of each dim. What rank s sends to rank r is where the box that s has meets the box
that r shall have; of ranks that have the same box, r hears the one that is where it is along the axes that don't divide
the tensor. No plan sends fewer bytes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.all_to_all import all_to_all_single_uneven
from ferrodist.collectives.arguments import compute_shard_sizes, offsets_of
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.placement import Partial, Replicate, Shard, reductions_commute
from ferrodist.tensor.spec import sharding_axes, sizes_before_axis

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.tensor.placement import Placement
    from ferrodist.tensor.spec import DTensorSpec

_Box = list[tuple[int, int]]
"""Of each dim, where it begins and ends."""


class GeneralAllToAll:
    """What goes from where to where.

    Args:
        shape: The tensor's.
        before: How it lies: whole or divided, without blocks, along each axis.
        after: How it shall lie.
        mesh_shape: The number of ranks along each axis.
    """

    def __init__(
        self,
        shape: Sequence[int],
        before: Sequence[Placement],
        after: Sequence[Placement],
        mesh_shape: Sequence[int],
    ) -> None:
        self._shape, self._mesh_shape = shape, mesh_shape
        self._before, self._after = before, after
        self.axes = tuple(
            axis
            for axis, pair in enumerate(zip(before, after, strict=True))
            if any(isinstance(placement, Shard) for placement in pair)
        )
        """The axes along which ranks take part together."""
        self._whole = [axis for axis in self.axes if not isinstance(before[axis], Shard)]

    def coordinates(self, here: Sequence[int]) -> list[tuple[int, ...]]:
        """Where the ranks are that take part with one, in row-major order of the axes."""
        ways = [range(size) if axis in self.axes else [here[axis]] for axis, size in enumerate(self._mesh_shape)]
        return list(itertools.product(*ways))

    def piece(self, sender: Sequence[int], receiver: Sequence[int]) -> _Box:
        """What one rank sends to another, which may be itself; without elements where that is nothing."""
        had = self.box(sender, self._before)
        if any(sender[axis] != receiver[axis] for axis in self._whole):
            return [(0, 0)] * len(had)
        return _meet(had, self.box(receiver))

    def box(self, coordinate: Sequence[int], placements: Sequence[Placement] | None = None) -> _Box:
        """What the rank at a coordinate has in the end, or under other placements."""
        box = [(0, size) for size in self._shape]
        selected = self._after if placements is None else placements
        for placement, num_ranks, at in zip(selected, self._mesh_shape, coordinate, strict=True):
            if isinstance(placement, Shard):
                start, stop = box[placement.dim]
                offsets = offsets_of(compute_shard_sizes(stop - start, num_ranks))
                box[placement.dim] = (start + offsets[at], start + offsets[at + 1])
        return box

    def count_sent(self) -> float:
        """How many elements a rank sends to others, on average."""
        ranks = self.coordinates([0] * len(self._mesh_shape))
        had = [self.box(rank, self._before) for rank in ranks]
        kinds = [tuple(rank[axis] for axis in self._whole) for rank in ranks]
        sent = 0
        for receiver, rank in enumerate(ranks):
            wanted = self.box(rank)
            sent += sum(
                _numel(_meet(box, wanted))
                for sender, box in enumerate(had)
                if sender != receiver and kinds[sender] == kinds[receiver]
            )
        return sent / len(ranks)


def _meet(one: _Box, other: _Box) -> _Box:
    return [(max(a, c), max(min(b, d), a, c)) for (a, b), (c, d) in zip(one, other, strict=True)]


def exchange(local: torch.Tensor, before: DTensorSpec, after: DTensorSpec, group: Backend) -> torch.Tensor:
    """Do it: this rank's part becomes the one that it shall have.

    Args:
        local: This rank's part.
        before: How the tensor lies.
        after: How it shall lie.
        group: The ranks along `GeneralAllToAll.axes`.
    """
    here = before.coordinate
    way = GeneralAllToAll(before.shape, before.placements, after.placements, before.mesh.shape)
    ranks = way.coordinates(here)
    mine = way.box(here, before.placements)
    sent = [_cut(local, mine, way.piece(here, rank)).reshape(-1) for rank in ranks]
    pieces = [way.piece(rank, here) for rank in ranks]
    counts = [_numel(piece) for piece in pieces]
    flat = all_to_all_single_uneven(torch.cat(sent), [part.numel() for part in sent], counts, group=group)
    result = local.new_empty(after.local_shape)
    wanted = way.box(here)
    for piece, part in zip(pieces, torch.split(flat, counts), strict=True):
        if part.numel():
            place = _cut(result, wanted, piece)
            place.copy_(part.view(place.shape))
    return result


def _cut(part: torch.Tensor, box: _Box, piece: _Box) -> torch.Tensor:
    """A piece of the part that is the box, as a view; both are places in the whole tensor."""
    for dim, ((begin, _), (start, stop)) in enumerate(zip(box, piece, strict=True)):
        part = part.narrow(dim, start - begin if stop > start else 0, stop - start)
    return part


def _numel(box: _Box) -> int:
    return math.prod(stop - start for start, stop in box)


Placements = tuple["Placement", ...]

_STEPS_OF_EXCHANGE = 4
"""As how many steps an exchange counts: of plans with equal bytes the one of plainer collectives is taken."""

_MAX_EXCHANGE_RANKS = 64
"""Between more ranks what an exchange sends is not worked out, which takes time with the square of them."""


class RedistributeKind(Enum):
    """What a step does."""

    SLICE = "slice"
    MAKE_PARTIAL = "make partial"
    ALL_GATHER = "all_gather"
    ALLREDUCE = "allreduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    EXCHANGE = "exchange"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedistributeStep:
    """One step: ``before`` and ``after`` are the layouts around it, which differ along ``axes`` only."""

    move: RedistributeKind
    axes: tuple[int, ...]
    before: DTensorSpec
    after: DTensorSpec
    group: Backend
    """The ranks along the axes."""
    size_bytes: float
    """What a rank sends, on average."""

    def __str__(self) -> str:
        over = ", ".join(self.before.mesh.axis_names[axis] for axis in self.axes)
        return (
            f"{self.move.value} over {over}: {_listed(self.before.placements)} -> {_listed(self.after.placements)},"
            f" {self.size_bytes:,.0f} bytes"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edge:
    """A step of the search."""

    move: RedistributeKind
    axes: tuple[int, ...]
    before: Placements
    after: Placements
    size_bytes: float


class RedistributePlan:
    """The steps from one layout to another; ``print(plan)`` shows them with their bytes."""

    def __init__(self, source: DTensorSpec, target: DTensorSpec, steps: Sequence[RedistributeStep]) -> None:
        self.source = source
        self.target = target
        self.steps = tuple(steps)

    @property
    def size_bytes(self) -> float:
        """What a rank sends in all steps, on average."""
        return sum(step.size_bytes for step in self.steps)

    def __str__(self) -> str:
        lines = [f"{self.source}: {_listed(self.source.placements)} -> {_listed(self.target.placements)}"]
        lines += [f"  {number}. {step}" for number, step in enumerate(self.steps, 1)]
        lines.append(f"  together {self.size_bytes:,.0f} bytes from each rank, on average")
        return "\n".join(lines)


def _listed(placements: Sequence[Placement]) -> str:
    return f"[{', '.join(map(repr, placements))}]"


def make_plan(source: DTensorSpec, target: DTensorSpec) -> RedistributePlan:
    """The plan with the fewest bytes; both layouts are of one tensor on one mesh."""
    plan: RedistributePlan | None = source.plans.get(target)
    if plan is None:
        assert source.mesh == target.mesh, "a tensor stays on its mesh"
        assert source.shape == target.shape, "placements don't change a tensor's shape"
        steps = [_as_step(source, edge) for edge in _Search(source, target.placements).run()]
        plan = source.plans[target] = RedistributePlan(source, target, steps)
    return plan


def _as_step(source: DTensorSpec, edge: _Edge) -> RedistributeStep:
    return RedistributeStep(
        move=edge.move,
        axes=edge.axes,
        before=source.with_placements(edge.before),
        after=source.with_placements(edge.after),
        group=source.mesh_along(edge.axes).group,
        size_bytes=edge.size_bytes,
    )


class _Search:
    """Dijkstra's search over the placements."""

    def __init__(self, source: DTensorSpec, target: Placements) -> None:
        self._start, self._target = source.placements, target
        self._sizes = source.mesh.shape
        self._bytes = math.prod(source.shape) * source.dtype.itemsize
        self._shape = source.shape
        dims = {one.dim for one in (*self._start, *target) if isinstance(one, Shard)}
        self._wanted = [self._strategies(axis, dims) for axis in range(len(self._sizes))]

    def _strategies(self, axis: int, dims: set[int]) -> list[Placement]:
        """What an axis may become: what it ends as, whole, or divided along any dim that is divided in the end."""
        strategies: list[Placement] = [self._target[axis], Replicate()]
        strategies += [Shard(dim) for dim in sorted(dims)]
        strategies += [self._start[axis]] if isinstance(self._start[axis], Shard) else []
        return list(dict.fromkeys(strategies))

    def run(self) -> list[_Edge]:
        """The steps."""
        tie = itertools.count()
        heap: list[tuple[float, int, int, Placements]] = [(0.0, 0, next(tie), self._start)]
        reached: dict[Placements, _Edge | None] = {self._start: None}
        best: dict[Placements, tuple[float, int]] = {self._start: (0.0, 0)}
        while heap:
            size_bytes, num_steps, _, here = heapq.heappop(heap)
            if here == self._target:
                return self._trace(reached)
            if (size_bytes, num_steps) > best[here]:
                continue
            for edge in self._steps_from(here):
                steps = _STEPS_OF_EXCHANGE if edge.move is RedistributeKind.EXCHANGE else 1
                cost = (round(size_bytes + edge.size_bytes, 3), num_steps + steps)
                if edge.after not in best or cost < best[edge.after]:
                    best[edge.after] = cost
                    reached[edge.after] = edge
                    heapq.heappush(heap, (*cost, next(tie), edge.after))
        raise AssertionError(f"no way from {self._start} to {self._target}")

    def _trace(self, reached: dict[Placements, _Edge | None]) -> list[_Edge]:
        steps: list[_Edge] = []
        edge = reached[self._target]
        while edge is not None:
            steps.append(edge)
            edge = reached[edge.before]
        return steps[::-1]

    def _steps_from(self, here: Placements) -> Iterator[_Edge]:
        for axis, now in enumerate(here):
            for then in self._wanted[axis]:
                move = None if then == now else self._move(here, axis, then)
                if move is not None:
                    yield self._edge(move, (axis,), here, {axis: then})
        yield from self._joint_steps(here)
        yield from self._exchange(here)

    def _joint_steps(self, here: Placements) -> Iterator[_Edge]:
        """Steps over several axes at once, where one collective over all of them does it."""
        axes = range(len(here))
        for axes_ in itertools.chain(*[itertools.combinations(axes, count) for count in range(2, len(here) + 1)]):
            first = here[axes_[0]]
            if any(here[axis] != first for axis in axes_[1:]) or isinstance(first, Replicate):
                continue
            if isinstance(first, Partial):
                yield self._edge(RedistributeKind.ALLREDUCE, axes_, here, dict.fromkeys(axes_, Replicate()))
                for then in self._wanted[axes_[0]]:
                    if isinstance(then, Shard) and then.blocks == 1 and not sharding_axes(here, (then.dim,)):
                        yield self._edge(RedistributeKind.REDUCE_SCATTER, axes_, here, dict.fromkeys(axes_, then))
            elif first.blocks == 1 and sharding_axes(here, (first.dim,)) == axes_:
                yield self._edge(RedistributeKind.ALL_GATHER, axes_, here, dict.fromkeys(axes_, Replicate()))

    def _exchange(self, here: Placements) -> Iterator[_Edge]:
        """The step that divides the tensor as in the end, once nothing is partial any more.

        Before it other steps are of no use: what they bring the exchange would bring, and what they cut it may lack.
        """
        then = tuple(Replicate() if isinstance(one, Partial) else one for one in self._target)
        if here == then or any(isinstance(one, Partial) for one in here):
            return
        if any(one != first for one, first in zip(here, self._start, strict=True) if not isinstance(first, Partial)):
            return
        if any(isinstance(one, Shard) and one.blocks > 1 for one in (*here, *then)):
            return
        way = GeneralAllToAll(self._shape, here, then, self._sizes)
        if math.prod(self._sizes[axis] for axis in way.axes) <= _MAX_EXCHANGE_RANKS:
            size_bytes = way.count_sent() * self._bytes / max(math.prod(self._shape), 1)
            yield _Edge(move=RedistributeKind.EXCHANGE, axes=way.axes, before=here, after=then, size_bytes=size_bytes)

    def _edge(
        self, move: RedistributeKind, axes: tuple[int, ...], here: Placements, changes: dict[int, Placement]
    ) -> _Edge:
        after = tuple(changes.get(axis, placement) for axis, placement in enumerate(here))
        num_ranks = math.prod(self._sizes[axis] for axis in axes)
        others = [axis for axis, one in enumerate(here) if isinstance(one, Shard) and axis not in axes]
        whole = self._bytes / math.prod(self._sizes[axis] for axis in others)
        share = whole * (num_ranks - 1) / num_ranks
        size_bytes = {
            RedistributeKind.SLICE: 0.0,
            RedistributeKind.MAKE_PARTIAL: 0.0,
            RedistributeKind.ALL_GATHER: share,
            RedistributeKind.ALLREDUCE: 2 * share,
            RedistributeKind.REDUCE_SCATTER: share,
            RedistributeKind.ALL_TO_ALL: share / num_ranks,
        }[move]
        return _Edge(move=move, axes=axes, before=here, after=after, size_bytes=size_bytes)

    def _move(self, here: Placements, axis: int, then: Placement) -> RedistributeKind | None:
        """What brings one axis there, or None where that takes several steps or is never of use."""
        now = here[axis]
        leaves = not isinstance(now, Shard) or innermost_blocks(here, axis, now, self._sizes) is not None
        others = (*here[:axis], Replicate(), *here[axis + 1 :])
        enters = not isinstance(then, Shard) or innermost_blocks(others, axis, then, self._sizes) is not None
        if not leaves or not enters or not self._divides(others, axis, then):
            return None
        if isinstance(then, Shard):
            if isinstance(now, Shard):
                return RedistributeKind.ALL_TO_ALL if now.dim != then.dim else None
            return RedistributeKind.REDUCE_SCATTER if isinstance(now, Partial) else RedistributeKind.SLICE
        if isinstance(then, Partial):
            # The parts of a mean, times the number of ranks, would not come back the same.
            in_parts = isinstance(now, Shard) and then.op is ReduceOp.MEAN
            # What loses against every other value does not when other axes add it up first.
            mixed = any(isinstance(one, Partial) and not reductions_commute(one, then) for one in others)
            return None if in_parts or mixed or isinstance(now, Partial) else RedistributeKind.MAKE_PARTIAL
        return RedistributeKind.ALLREDUCE if isinstance(now, Partial) else RedistributeKind.ALL_GATHER

    def _divides(self, others: Placements, axis: int, then: Placement) -> bool:
        """Whether the blocks of a placement are equal, given what axes before divide."""
        if not isinstance(then, Shard) or then.blocks == 1:
            return True
        sizes = sizes_before_axis(self._shape, others, self._sizes, axis, then.dim)
        return all(size % then.blocks == 0 for size in sizes)


def innermost_blocks(placements: Placements, axis: int, placement: Shard, mesh_shape: Sequence[int]) -> int | None:
    """How many blocks of a rank's own part an axis divides last, so that its parts can be joined or cut; else None.

    [Note: the innermost axis]
    An axis can come or go by itself when no other divides further what it divided: then the parts of its ranks joined
    are what a rank without it has. That is so for the last of the axes that divide a dim, in blocks or not. And for one
    whose blocks are what the later axes divide: then each rank's part lies in one block, and is a plain part of it.
    """
    later = [at for at in sharding_axes(placements, (placement.dim,)) if at > axis]
    if not later:
        return placement.blocks
    plain = all(placements[at] == Shard(placement.dim) for at in later)
    return 1 if plain and placement.blocks == math.prod(mesh_shape[at] for at in later) else None
