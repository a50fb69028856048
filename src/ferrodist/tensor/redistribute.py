"""Redistribution of local shards from one spec to another, and the recording of its steps."""

from __future__ import annotations

import contextlib
import math
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.all_gather import all_gather_with_sizes, reduce_scatter_with_sizes
from ferrodist.collectives.all_to_all import all_to_all_single_uneven
from ferrodist.collectives.arguments import compute_shard_sizes
from ferrodist.collectives.reduce import allreduce
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.general_all_to_all import general_all_to_all
from ferrodist.tensor.placement import Partial, Placement, Replicate, Shard
from ferrodist.tensor.redistribute_plan import RedistributeKind, RedistributeStep, innermost_blocks, make_plan
from ferrodist.tensor.replica_check import check_replicated
from ferrodist.tensor.spec import DTensorSpec, shard_of, split_blocks
from ferrodist.tensor.traced import define_operators, traced_redistribute
from ferrodist.torch_private.compilers import is_traced

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


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """A block whose redistributions `record_redistributions` leaves out."""
    token = _records.set(())
    try:
        yield
    finally:
        _records.reset(token)


def _record(step: RedistributeStep) -> None:
    for record in _records.get():
        record.append(step)


def record_step(local: torch.Tensor, mesh: DeviceMesh, before: Placement, after: Placement) -> None:
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
        _record(step)


def redistribute_local(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> torch.Tensor:
    """Redistribute a tensor, given this rank's shard; all ranks of the mesh call this.

    ``local`` is not changed, and is returned if the specs are the same.
    """
    if source is target:
        return local
    if is_traced(local):
        return traced_redistribute(local, source, target)
    for step in make_plan(source, target).steps:
        _record(step)
        local = _STEP_FUNCTIONS[step.kind](local, step)
    return local


def full_local(tensor: Any) -> torch.Tensor:
    """The full plain tensor of a distributed one, on every rank of its mesh; `DTensor.full_tensor` without autograd."""
    return redistribute_local(tensor._local, tensor._spec, tensor._spec.replicated)


def _innermost(spec: DTensorSpec, axis: int) -> Shard:
    """The sharding of a shard by its innermost axis; see [Note: the innermost axis] in `redistribute_plan`."""
    placement = spec.placements[axis]
    assert isinstance(placement, Shard), "such a step is of a sharded axis"
    blocks = innermost_blocks(spec.placements, axis, placement, spec.mesh.shape)
    assert blocks is not None, "plans have no such step"
    return Shard(placement.dim, blocks)


def _slice(local: torch.Tensor, step: RedistributeStep) -> torch.Tensor:
    (axis,), spec = step.axes, step.after
    shard = shard_of(local, _innermost(spec, axis), spec.mesh.shape[axis], spec.coordinate[axis])
    return shard.clone(memory_format=torch.contiguous_format)


def _make_partial(local: torch.Tensor, step: RedistributeStep) -> torch.Tensor:
    (axis,), spec = step.axes, step.after
    placement = spec.placements[axis]
    assert isinstance(placement, Partial), "it is what the step makes"
    # None for reductions that are idempotent, of which every rank may contribute the value.
    identity = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1}.get(placement.op)
    if isinstance(step.before.placements[axis], Replicate):
        if spec.coordinate[axis] == 0 or identity is None:
            return local.clone()
        return torch.full_like(local, identity)
    filler = extremum_identity(placement.op, local.dtype) if identity is None else identity
    full = local.new_full(spec.local_shape, filler)
    shard = _innermost(step.before, axis)
    blocks = split_blocks(full, shard.dim, shard.blocks)
    own = shard_of(blocks, Shard(shard.dim + 1), spec.mesh.shape[axis], spec.coordinate[axis])
    own.copy_(split_blocks(local, shard.dim, shard.blocks))
    return full


def extremum_identity(op: ReduceOp, dtype: torch.dtype) -> float:
    """The identity of MIN or MAX: the value that every other one of the dtype wins against."""
    if dtype is torch.bool:
        return op is not ReduceOp.MAX
    if dtype.is_floating_point:
        return -math.inf if op is ReduceOp.MAX else math.inf
    return torch.iinfo(dtype).min if op is ReduceOp.MAX else torch.iinfo(dtype).max


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
    (axis,), num_ranks = step.axes, step.group.world_size
    old, new = _innermost(step.before, axis), _innermost(step.after, axis)
    splits = [shard_of(local, new, num_ranks, index) for index in range(num_ranks)]
    shape = list(step.after.local_shape)
    old_sizes = compute_shard_sizes(shape[old.dim] // old.blocks, num_ranks)
    rest = math.prod([*shape[: old.dim], *shape[old.dim + 1 :]])
    sent = [split.numel() for split in splits]
    received = [old.blocks * size * rest for size in old_sizes]
    flat = torch.cat([split.reshape(-1) for split in splits])
    arrived = torch.split(all_to_all_single_uneven(flat, sent, received, group=step.group), received)
    shards = [
        flat_shard.view(*shape[: old.dim], old.blocks, size, *shape[old.dim + 1 :])
        for flat_shard, size in zip(arrived, old_sizes, strict=True)
    ]
    return torch.cat(shards, dim=old.dim + 1).flatten(old.dim, old.dim + 1)


_STEP_FUNCTIONS: dict[RedistributeKind, Callable[[torch.Tensor, RedistributeStep], torch.Tensor]] = {
    RedistributeKind.SLICE: _slice,
    RedistributeKind.MAKE_PARTIAL: _make_partial,
    RedistributeKind.ALL_GATHER: _all_gather,
    RedistributeKind.ALLREDUCE: lambda local, step: allreduce(local, _op(step), group=step.group),
    RedistributeKind.REDUCE_SCATTER: _reduce_scatter,
    RedistributeKind.ALL_TO_ALL: _all_to_all,
    RedistributeKind.EXCHANGE: lambda local, step: general_all_to_all(local, step.before, step.after, step.group),
}

define_operators(redistribute_local, check_replicated)
