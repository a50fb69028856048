"""Redistribution of local shards from one spec to another, and the recording of its steps."""

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
from ferrodist.tensor.general_all_to_all import exchange
from ferrodist.tensor.placement import Partial, Placement, Replicate, Shard
from ferrodist.tensor.redistribute_plan import RedistributeKind, RedistributeStep, innermost_blocks, make_plan
from ferrodist.tensor.spec import DTensorSpec, shard_of, split_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ferrodist.mesh import DeviceMesh

_records: ContextVar[tuple[list[RedistributeStep], ...]] = ContextVar("records", default=())


@contextlib.contextmanager
def record_redistributions() -> Iterator[list[RedistributeStep]]:
    """Record the steps of all redistributions inside the block on this rank, those by operators included.

    What operators send themselves is recorded too: a softmax along a sharded dim reduces two numbers of each row, a
    chunked linear layer gathers its input chunk by chunk.

    ::

        with fd.record_redistributions() as steps:
            loss = model(batch)
        for step in steps:
            print(step)

    Yields:
        A list that grows by steps, each with its ``move`` (such as an allreduce), the ``axes`` of the mesh, the specs
        ``before`` and ``after``, and ``size_bytes``.
    """
    steps: list[RedistributeStep] = []
    token = _records.set((*_records.get(), steps))
    try:
        yield steps
    finally:
        _records.reset(token)


def record_step(step: RedistributeStep) -> None:
    """Add a step to all active records."""
    for record in _records.get():
        record += [step]


def record_move(local: torch.Tensor, mesh: DeviceMesh, before: Placement, after: Placement) -> None:
    """Record a redistribution that an operator's local function does itself.

    The placements are those along each axis of the mesh; ``before`` is partial, or an even sharding.
    """
    if not _records.get():
        return
    shape = list(local.shape)
    if isinstance(before, Shard):
        shape[before.dim] *= mesh.size
    source = DTensorSpec.make(mesh, [before] * mesh.ndim, shape, local.dtype)
    for step in make_plan(source, source.with_placements([after] * mesh.ndim)).steps:
        record_step(step)


def redistribute_local(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> torch.Tensor:
    """Redistribute a tensor, given this rank's shard; all ranks of the mesh call this.

    ``local`` is not changed, and is returned if the specs are the same.
    """
    if source is target:
        return local
    for step in make_plan(source, target).steps:
        record_step(step)
        local = _STEP_FUNCTIONS[step.move](local, step)
    return local


def _innermost(spec: DTensorSpec, axis: int) -> Shard:
    """The sharding of a shard by its innermost axis; see [Note: the innermost axis]."""
    placement = spec.placements[axis]
    assert isinstance(placement, Shard), "such a step is of a sharded axis"
    blocks = innermost_blocks(spec.placements, axis, placement, spec.mesh.shape)
    assert blocks is not None, "plans have no such step"
    return Shard(placement.dim, blocks)


def _size_and_index(spec: DTensorSpec, axis: int) -> tuple[int, int]:
    """The number of ranks along an axis, and this rank's index among them."""
    return spec.mesh.shape[axis], spec.coordinate[axis]


def _slice(local: torch.Tensor, step: RedistributeStep) -> torch.Tensor:
    (axis,) = step.axes
    shard = shard_of(local, _innermost(step.after, axis), *_size_and_index(step.after, axis))
    return shard.clone(memory_format=torch.contiguous_format)


def _make_partial(local: torch.Tensor, step: RedistributeStep) -> torch.Tensor:
    (axis,) = step.axes
    placement = step.after.placements[axis]
    assert isinstance(placement, Partial), "it is what the step makes"
    num_ranks, index = _size_and_index(step.after, axis)
    # None for reductions that are idempotent, of which every rank may contribute the value.
    identity = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1}.get(placement.op)
    if isinstance(step.before.placements[axis], Replicate):
        if index == 0 or identity is None:
            return local.clone()
        return torch.full_like(local, identity)
    filler = extremum_identity(placement.op, local.dtype) if identity is None else identity
    full = local.new_full(step.after.local_shape, filler)
    _write_shard(full, local, _innermost(step.before, axis), num_ranks, index)
    return full


def _write_shard(full: torch.Tensor, shard: torch.Tensor, placement: Shard, num_ranks: int, index: int) -> None:
    """Write the shard of one of an axis's ranks into a tensor that has all of them."""
    dim, blocks = placement.dim, placement.blocks
    block = full.shape[dim] // blocks
    sizes = compute_shard_sizes(block, num_ranks)
    view = split_blocks(full, dim, blocks).narrow(dim + 1, sum(sizes[:index]), sizes[index])
    view.copy_(split_blocks(shard, dim, blocks))


def extremum_identity(op: ReduceOp, dtype: torch.dtype) -> float:
    """The identity of MIN or MAX: the value that every other one of the dtype wins against."""
    low: float
    high: float
    if dtype is torch.bool:
        low, high = False, True
    elif dtype.is_floating_point:
        low, high = -math.inf, math.inf
    else:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return low if op is ReduceOp.MAX else high


def _split_of(step: RedistributeStep, sharded: DTensorSpec, shape: Sequence[int]) -> tuple[int, int, list[int]]:
    """The dim that a step's axes shard, its blocks, and the sizes of a block's shards; ``shape`` is without these."""
    if len(step.axes) > 1:
        placement = sharded.placements[step.axes[0]]
        assert isinstance(placement, Shard), "such a step is of sharded axes"
        return placement.dim, 1, sharded.sizes_along(step.axes, placement.dim)
    placement = _innermost(sharded, step.axes[0])
    dim, blocks = placement.dim, placement.blocks
    return dim, blocks, compute_shard_sizes(shape[dim] // blocks, step.group.world_size)


def _all_gather(local: torch.Tensor, step: RedistributeStep) -> torch.Tensor:
    dim, blocks, sizes = _split_of(step, step.before, step.after.local_shape)
    if blocks == 1:
        return all_gather_with_sizes(local, sizes, dim=dim, group=step.group)
    split = split_blocks(local, dim, blocks)
    return all_gather_with_sizes(split, sizes, dim=dim + 1, group=step.group).flatten(dim, dim + 1)


def _allreduce(local: torch.Tensor, step: RedistributeStep) -> torch.Tensor:
    return allreduce(local, _op(step), group=step.group)


def _op(step: RedistributeStep) -> ReduceOp:
    placement = step.before.placements[step.axes[0]]
    assert isinstance(placement, Partial), "such a step is of a partial axis"
    return placement.op


def _reduce_scatter(local: torch.Tensor, step: RedistributeStep) -> torch.Tensor:
    dim, blocks, sizes = _split_of(step, step.after, local.shape)
    if blocks == 1:
        return reduce_scatter_with_sizes(local, sizes, _op(step), dim=dim, group=step.group)
    split = split_blocks(local, dim, blocks)
    return reduce_scatter_with_sizes(split, sizes, _op(step), dim=dim + 1, group=step.group).flatten(dim, dim + 1)


def _all_to_all(local: torch.Tensor, step: RedistributeStep) -> torch.Tensor:
    """Split this rank's shard along the new dim, send a split to each rank, and concatenate along the old dim."""
    group = step.group
    (axis,) = step.axes
    old, new = _innermost(step.before, axis), _innermost(step.after, axis)
    num_ranks = group.world_size
    splits = [shard_of(local, new, num_ranks, index) for index in range(num_ranks)]
    shape = list(step.after.local_shape)
    old_sizes = compute_shard_sizes(shape[old.dim] // old.blocks, num_ranks)
    rest = math.prod([*shape[: old.dim], *shape[old.dim + 1 :]])
    sent = [split.numel() for split in splits]
    received = [old.blocks * size * rest for size in old_sizes]
    flat = torch.cat([split.reshape(-1) for split in splits])
    arrived = torch.split(all_to_all_single_uneven(flat, sent, received, group=group), received)
    shards = [
        flat_shard.view(*shape[: old.dim], old.blocks, size, *shape[old.dim + 1 :])
        for flat_shard, size in zip(arrived, old_sizes, strict=True)
    ]
    return torch.cat(shards, dim=old.dim + 1).flatten(old.dim, old.dim + 1)


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
