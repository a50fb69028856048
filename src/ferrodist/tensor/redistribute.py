"""The steps of a plan, done: a rank's part of a tensor under one layout becomes its part under another.

Which steps were taken to bring tensors from one layout to another, for those who want to know.
"""

from __future__ import annotations

import contextlib
import math
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.all_gather import all_gather_with_sizes, reduce_scatter_with_sizes
from ferrodist.collectives.all_to_all import all_to_all_single_uneven
from ferrodist.collectives.arguments import compute_shard_sizes
from ferrodist.collectives.reduce import allreduce
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.placement import Partial, Replicate, Shard
from ferrodist.tensor.redistribute_plan import RedistributeKind, exchange, innermost_blocks, make_plan
from ferrodist.tensor.spec import DTensorSpec, shard_of, split_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ferrodist.mesh import DeviceMesh
    from ferrodist.tensor.placement import Placement
    from ferrodist.tensor.redistribute_plan import RedistributeStep

_records: ContextVar[tuple[list[RedistributeStep], ...]] = ContextVar("records", default=())


@contextlib.contextmanager
def record_redistributions() -> Iterator[list[RedistributeStep]]:
    """Collect the steps of all redistributions inside the block on this rank, also of those that operators ask for.

    What operators send themselves is among them: a softmax along a divided dim folds two numbers of each row, a chunked
    linear layer gathers its input in pieces.

    ::

        with fd.record_redistributions() as steps:
            loss = model(batch)
        for step in steps:
            print(step)

    Yields:
        A list that grows: of each step the ``move`` (as an allreduce), the ``axes`` of the mesh, the layouts ``before``
        and ``after``, and ``size_bytes``.
    """
    steps: list[RedistributeStep] = []
    token = _records.set((*_records.get(), steps))
    try:
        yield steps
    finally:
        _records.reset(token)


def record_step(step: RedistributeStep) -> None:
    """Tell those who record of a step that is being taken."""
    for record in _records.get():
        record += [step]


def record_move(part: torch.Tensor, mesh: DeviceMesh, before: Placement, after: Placement) -> None:
    """Tell those who record that a tensor, of which this rank has a part, is being moved by what computes an operator.

    Args:
        part: Under ``before``, which is partial, or divides a dim evenly.
        mesh: The ranks that take part, all of its axes alike.
        before: How the tensor lies along each axis.
        after: How it will lie.
    """
    if not _records.get():
        return
    shape = list(part.shape)
    if isinstance(before, Shard):
        shape[before.dim] *= mesh.size
    source = DTensorSpec.make(mesh, [before] * mesh.ndim, shape, part.dtype)
    for step in make_plan(source, source.with_placements([after] * mesh.ndim)).steps:
        record_step(step)


def redistribute_local(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> torch.Tensor:
    """This rank's part under ``target``; all ranks of the mesh that share data with it call this.

    Args:
        local: This rank's part under ``source``. It is not changed, and is returned when the layouts are one.
        source: How the tensor lies.
        target: How it shall lie.
    """
    if source is target:
        return local
    for step in make_plan(source, target).steps:
        record_step(step)
        local = _STEP_FUNCTIONS[step.move](local, step)
    return local


def _innermost(spec: DTensorSpec, axis: int) -> Shard:
    """How an axis divides what a rank without it would have; see [Note: the innermost axis]."""
    placement = spec.placements[axis]
    assert isinstance(placement, Shard), "such a step is of a divided axis"
    blocks = innermost_blocks(spec.placements, axis, placement, spec.mesh.shape)
    assert blocks is not None, "plans have no such step"
    return Shard(placement.dim, blocks)


def _at(spec: DTensorSpec, axis: int) -> tuple[int, int]:
    """The ranks of an axis, and this one's place among them."""
    return spec.mesh.shape[axis], spec.coordinate[axis]


def _slice(local: torch.Tensor, step: RedistributeStep) -> torch.Tensor:
    (axis,) = step.axes
    part = shard_of(local, _innermost(step.after, axis), *_at(step.after, axis))
    return part.clone(memory_format=torch.contiguous_format)


def _make_partial(local: torch.Tensor, step: RedistributeStep) -> torch.Tensor:
    (axis,) = step.axes
    placement = step.after.placements[axis]
    assert isinstance(placement, Partial), "it is what the step makes"
    num_ranks, at = _at(step.after, axis)
    neutral = _neutral(placement.op)
    if isinstance(step.before.placements[axis], Replicate):
        if at == 0 or neutral is None:
            return local.clone()
        return torch.full_like(local, neutral)
    if neutral is None:
        neutral = extremum_identity(placement.op, local.dtype)
    whole = local.new_full(step.after.local_shape, neutral)
    write_shard(whole, local, _innermost(step.before, axis), num_ranks, at)
    return whole


def write_shard(whole: torch.Tensor, part: torch.Tensor, placement: Shard, num_ranks: int, at: int) -> None:
    """Write a rank's part to where it belongs in the whole."""
    dim, blocks = placement.dim, placement.blocks
    block = whole.shape[dim] // blocks
    sizes = compute_shard_sizes(block, num_ranks)
    place = split_blocks(whole, dim, blocks).narrow(dim + 1, sum(sizes[:at]), sizes[at])
    place.copy_(split_blocks(part, dim, blocks))


def _neutral(op: ReduceOp) -> float | None:
    """What changes nothing when it is folded in; None where folding a value with itself changes nothing."""
    return {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1}.get(op)


def extremum_identity(op: ReduceOp, dtype: torch.dtype) -> float:
    """The value that every other one of the dtype wins against."""
    low, high = (False, True) if dtype is torch.bool else _range(dtype)
    return low if op is ReduceOp.MAX else high


def _range(dtype: torch.dtype) -> tuple[float, float]:
    if dtype.is_floating_point:
        return -math.inf, math.inf
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def _all_gather(local: torch.Tensor, step: RedistributeStep) -> torch.Tensor:
    group = step.group
    if len(step.axes) > 1:
        first = step.before.placements[step.axes[0]]
        assert isinstance(first, Shard), "such a step is of a divided axis"
        sizes = step.before.sizes_along(step.axes, first.dim)
        return all_gather_with_sizes(local, sizes, dim=first.dim, group=group)
    (axis,) = step.axes
    placement = _innermost(step.before, axis)
    dim, blocks = placement.dim, placement.blocks
    sizes = compute_shard_sizes(step.after.local_shape[dim] // blocks, group.world_size)
    if blocks == 1:
        return all_gather_with_sizes(local, sizes, dim=dim, group=group)
    parted = split_blocks(local, dim, blocks)
    return all_gather_with_sizes(parted, sizes, dim=dim + 1, group=group).flatten(dim, dim + 1)


def _allreduce(local: torch.Tensor, step: RedistributeStep) -> torch.Tensor:
    return allreduce(local, _op(step), group=step.group)


def _op(step: RedistributeStep) -> ReduceOp:
    placement = step.before.placements[step.axes[0]]
    assert isinstance(placement, Partial), "such a step is of a partial axis"
    return placement.op


def _reduce_scatter(local: torch.Tensor, step: RedistributeStep) -> torch.Tensor:
    group, op = step.group, _op(step)
    if len(step.axes) > 1:
        first = step.after.placements[step.axes[0]]
        assert isinstance(first, Shard), "it is what the step makes"
        sizes = step.after.sizes_along(step.axes, first.dim)
        return reduce_scatter_with_sizes(local, sizes, op, dim=first.dim, group=group)
    placement = _innermost(step.after, step.axes[0])
    dim, blocks = placement.dim, placement.blocks
    block = local.shape[dim] // blocks
    sizes = compute_shard_sizes(block, group.world_size)
    if blocks == 1:
        return reduce_scatter_with_sizes(local, sizes, op, dim=dim, group=group)
    parted = split_blocks(local, dim, blocks)
    return reduce_scatter_with_sizes(parted, sizes, op, dim=dim + 1, group=group).flatten(dim, dim + 1)


def _all_to_all(local: torch.Tensor, step: RedistributeStep) -> torch.Tensor:
    """Cut this rank's part along the new dim, send a piece to each rank, and join what comes along the old dim."""
    group = step.group
    (axis,) = step.axes
    old, new = _innermost(step.before, axis), _innermost(step.after, axis)
    num_ranks = group.world_size
    pieces = [shard_of(local, new, num_ranks, at) for at in range(num_ranks)]
    # This rank's part along the new dim, of what the others had along the old one.
    shape = list(step.after.local_shape)
    old_sizes = compute_shard_sizes(shape[old.dim] // old.blocks, num_ranks)
    rest = math.prod([*shape[: old.dim], *shape[old.dim + 1 :]])
    sent = [piece.numel() for piece in pieces]
    received = [old.blocks * size * rest for size in old_sizes]
    flat = torch.cat([piece.reshape(-1) for piece in pieces])
    came = torch.split(all_to_all_single_uneven(flat, sent, received, group=group), received)
    joined = [
        part.view(*shape[: old.dim], old.blocks, size, *shape[old.dim + 1 :])
        for part, size in zip(came, old_sizes, strict=True)
    ]
    return torch.cat(joined, dim=old.dim + 1).flatten(old.dim, old.dim + 1)


def _exchange(local: torch.Tensor, step: RedistributeStep) -> torch.Tensor:
    return exchange(local, step.before, step.after, step.group)


_STEP_FUNCTIONS: dict[RedistributeKind, Callable[[torch.Tensor, RedistributeStep], torch.Tensor]] = {
    RedistributeKind.SLICE: _slice,
    RedistributeKind.MAKE_PARTIAL: _make_partial,
    RedistributeKind.ALL_GATHER: _all_gather,
    RedistributeKind.ALLREDUCE: _allreduce,
    RedistributeKind.REDUCE_SCATTER: _reduce_scatter,
    RedistributeKind.ALL_TO_ALL: _all_to_all,
    RedistributeKind.EXCHANGE: _exchange,
}
