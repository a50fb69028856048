"""all_gather and reduce_scatter: each is the other's gradient."""

from __future__ import annotations

import math
import struct
from functools import partial
from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.differentiable import attach, records_history
from ferrodist.collectives.operation import Operation, collectives_of, refuse_in_coalesce, run_later, run_now
from ferrodist.collectives.prepare import check_dim, check_tensor, flatten, group_and_timeout, prepare_out
from ferrodist.collectives.reduce_op import Op, PremultipliedSum, ReduceOp, check_reduction, is_linear
from ferrodist.collectives.sharding import compute_shard_sizes
from ferrodist.deadline import Deadline
from ferrodist.errors import CollectiveMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.collectives.pending import PendingCollective

__all__ = [
    "Join",
    "all_gather",
    "all_gather_uneven",
    "async_all_gather",
    "async_reduce_scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "share_sizes",
]

_SIZE = struct.Struct("<qqq")  # size along the dim, the dim, number of dims


def all_gather(
    tensor: torch.Tensor,
    dim: int = 0,
    *,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Join the ranks' tensors along ``dim``, in rank order, on every rank.

    Args:
        tensor: Of equal shape and dtype on all ranks; any strides. Zero-dimensional ones count as shape (1,).
        dim: The dim to join along.
        group: The group, on all of whose ranks this is called; None is the default group.
        out: Where the result goes; None makes a fresh tensor.
        timeout: Seconds; None takes the group's.

    Returns:
        A tensor whose ``dim`` is world_size times as long. Differentiable.

    Raises:
        CollectiveMismatchError, DistributedTimeoutError, PeerLostError: As for `allreduce`.
    """
    return run_now(_all_gather(tensor, dim, group, out, timeout))


def async_all_gather(
    tensor: torch.Tensor,
    dim: int = 0,
    *,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> PendingCollective[torch.Tensor]:
    """Start `all_gather`."""
    return run_later(_all_gather(tensor, dim, group, out, timeout))


def all_gather_uneven(
    tensor: torch.Tensor, dim: int = 0, *, group: Backend | None = None, timeout: float | None = None
) -> torch.Tensor:
    """`all_gather` of tensors that differ in the size of ``dim``, and in no other.

    Costs one more agreement, in which the ranks learn each other's sizes.

    Args:
        tensor: Of equal dtype, and equal shape but for ``dim``, on all ranks; empty ones are all right.
        dim: The dim to join along.
        group: The group, on all of whose ranks this is called; None is the default group.
        timeout: Seconds; None takes the group's.

    Raises:
        CollectiveMismatchError, DistributedTimeoutError, PeerLostError: As for `allreduce`.
    """
    check_tensor(tensor)
    tensor = tensor.unsqueeze(0) if tensor.dim() == 0 else tensor
    chosen, limit = group_and_timeout(group, timeout)
    deadline = Deadline(limit)
    sizes = share_sizes("all_gather_uneven", tensor, check_dim(tensor, dim), chosen, limit)
    return run_now(_all_gather(tensor, dim, chosen, None, deadline.remaining(), sizes))


def share_sizes(operation: str, tensor: torch.Tensor, dim: int, group: Backend, timeout: float) -> list[int]:
    """Learn every rank's size along a dim, which must be the same dim of as many on all ranks."""
    refuse_in_coalesce(operation)
    engine = collectives_of(group)
    payload = _SIZE.pack(tensor.shape[dim], dim, tensor.dim())
    heads = [
        _SIZE.unpack(head) for head in engine.share(operation, payload, timeout=timeout, sequence=engine.reserve())
    ]
    differing = tuple(rank for rank, head in enumerate(heads) if head[1:] != heads[0][1:])
    if differing:
        said = "; ".join(
            f"rank {rank} joins along dim {heads[rank][1]} of {heads[rank][2]}" for rank in (0, differing[0])
        )
        error = CollectiveMismatchError(
            f"the ranks of group {group.name!r} disagree about the dim of {operation}: {said}."
            " Pass the same everywhere.",
            ranks=differing,
        )
        group.abort(error)
        raise error
    return [head[0] for head in heads]


def _all_gather(  # noqa: PLR0917 - the public signature, by position
    tensor: torch.Tensor,
    dim: int,
    group: Backend | None,
    out: torch.Tensor | None,
    timeout: float | None,
    sizes: Sequence[int] | None = None,
) -> Operation[torch.Tensor]:
    check_tensor(tensor)
    tensor = tensor.unsqueeze(0) if tensor.dim() == 0 else tensor
    dim = check_dim(tensor, dim)
    chosen, limit = group_and_timeout(group, timeout)
    sizes = [tensor.shape[dim]] * chosen.world_size if sizes is None else sizes
    source = flatten(tensor.detach().movedim(dim, 0))
    join = Join(tensor, dim, sizes)
    target = prepare_out(out, join.shape, tensor.dtype, tensor)
    flat = target.flat if dim == 0 else torch.empty(sum(join.counts), dtype=tensor.dtype)
    recorded = records_history(tensor) and out is None

    def run(sequence: int) -> None:
        collectives_of(chosen).all_gather(flat, source, join.counts, timeout=limit, sequence=sequence)

    def finish() -> torch.Tensor:
        result = target.finish() if dim == 0 else join.restore(flat, target.result)
        if not recorded:
            return result
        return attach(tensor, result, partial(reduce_scatter_by_sizes, sizes=sizes, dim=dim, group=chosen))

    return Operation(name="all_gather", group=chosen, run=run, finish=finish)


class Join:
    """How parts of given sizes join along a dim, when they lie one after the other with that dim first."""

    def __init__(self, part: torch.Tensor, dim: int, sizes: Sequence[int]) -> None:
        self.dim = dim
        row = [*part.shape[:dim], *part.shape[dim + 1 :]]
        self.counts = [size * math.prod(row) for size in sizes]
        self.moved_shape = (sum(sizes), *row)
        self.shape = (*part.shape[:dim], sum(sizes), *part.shape[dim + 1 :])

    def restore(self, flat: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Put the dim back in its place."""
        with torch.no_grad():
            result.copy_(flat.view(self.moved_shape).movedim(0, self.dim))
        return result


def reduce_scatter(
    tensor: torch.Tensor,
    op: Op = ReduceOp.SUM,
    *,
    dim: int = 0,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Fold a tensor over all ranks and divide the result over them along ``dim``.

    Sizes that the world size doesn't divide follow `compute_shard_sizes`: the first ranks get one more.

    Args:
        tensor: Of equal shape and dtype on all ranks; any strides.
        op: How elements become one, folded in rank order.
        dim: The dim to divide.
        group: The group, on all of whose ranks this is called; None is the default group.
        out: Where this rank's part goes; None makes a fresh tensor.
        timeout: Seconds; None takes the group's.

    Returns:
        This rank's part. Differentiable for SUM, MEAN and premultiplied sums.

    Raises:
        TypeError, CollectiveMismatchError, DistributedTimeoutError, PeerLostError: As for `allreduce`.
    """
    return run_now(_reduce_scatter(tensor, op, dim, group, out, timeout))


def async_reduce_scatter(
    tensor: torch.Tensor,
    op: Op = ReduceOp.SUM,
    *,
    dim: int = 0,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> PendingCollective[torch.Tensor]:
    """Start `reduce_scatter`."""
    return run_later(_reduce_scatter(tensor, op, dim, group, out, timeout))


def reduce_scatter_tensor(
    out: torch.Tensor,
    tensor: torch.Tensor,
    op: Op = ReduceOp.SUM,
    *,
    group: Backend | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """`reduce_scatter` along dim 0 into ``out``, which is returned."""
    return reduce_scatter(tensor, op, group=group, out=out, timeout=timeout)


def reduce_scatter_by_sizes(tensor: torch.Tensor, sizes: Sequence[int], *, dim: int, group: Backend) -> torch.Tensor:
    """`reduce_scatter` with SUM that gives rank r ``sizes[r]`` of ``dim``: the gradient of a gathering."""
    return run_now(_reduce_scatter(tensor, ReduceOp.SUM, dim, group, None, None, sizes))


def _reduce_scatter(  # noqa: PLR0917 - the public signature, by position
    tensor: torch.Tensor,
    op: Op,
    dim: int,
    group: Backend | None,
    out: torch.Tensor | None,
    timeout: float | None,
    sizes: Sequence[int] | None = None,
) -> Operation[torch.Tensor]:
    check_tensor(tensor)
    check_reduction(tensor.dtype, op)
    dim = check_dim(tensor, dim)
    chosen, limit = group_and_timeout(group, timeout)
    sizes = compute_shard_sizes(tensor.shape[dim], chosen.world_size) if sizes is None else sizes
    moved = tensor.detach().movedim(dim, 0)
    row = math.prod(moved.shape[1:])
    source = flatten(moved)
    part = (sizes[chosen.rank], *moved.shape[1:])
    shape = (*tensor.shape[:dim], sizes[chosen.rank], *tensor.shape[dim + 1 :])
    target = prepare_out(out, shape, tensor.dtype, tensor)
    flat = target.flat if dim == 0 else torch.empty(sizes[chosen.rank] * row, dtype=tensor.dtype)
    recorded = records_history(tensor) and out is None

    def run(sequence: int) -> None:
        counts = [size * row for size in sizes]
        collectives_of(chosen).reduce_scatter(flat, source, counts, op, timeout=limit, sequence=sequence)

    def finish() -> torch.Tensor:
        if dim != 0:
            with torch.no_grad():
                target.result.copy_(flat.view(part).movedim(0, dim))
        result = target.result if dim != 0 else target.finish()
        return attach(tensor, result, partial(_reduce_scatter_backward, op, dim, chosen)) if recorded else result

    return Operation(name="reduce_scatter", group=chosen, run=run, finish=finish)


def _reduce_scatter_backward(op: Op, dim: int, group: Backend, grad: torch.Tensor) -> torch.Tensor:
    if not is_linear(op):
        raise RuntimeError(f"reduce_scatter with {op} has no gradient: use allreduce and narrow()")
    whole = all_gather_uneven(grad, dim=dim, group=group)
    if op is ReduceOp.MEAN:
        return whole / group.world_size
    return whole * op.factor if isinstance(op, PremultipliedSum) else whole
