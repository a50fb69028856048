"""gather and scatter: each is the other's gradient."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.differentiable import attach, records_history
from ferrodist.collectives.gathering import Join, share_sizes
from ferrodist.collectives.operation import Operation, collectives_of, refuse_in_coalesce, run_now
from ferrodist.collectives.prepare import check_dim, check_root, check_tensor, flatten, group_and_timeout
from ferrodist.collectives.reduce_op import DTYPES
from ferrodist.collectives.sharding import compute_shard_sizes
from ferrodist.deadline import Deadline
from ferrodist.errors import CollectiveMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend

__all__ = ["gather", "scatter", "scatter_by_sizes"]

_MAX_SCATTER_DIMS = 12

# Every rank's dim and src; of the root also: dtype's place in DTYPES, records history, dims, shape.
_SCATTER_CALL = struct.Struct("<ii")
_SCATTER_HEAD = struct.Struct(f"<iiBBB{_MAX_SCATTER_DIMS}q")


def gather(
    tensor: torch.Tensor,
    dst: int = 0,
    *,
    dim: int = 0,
    group: Backend | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Join the ranks' tensors along ``dim``, in rank order, on rank ``dst``.

    Args:
        tensor: Of equal dtype on all ranks, and equal shape but for ``dim``; any strides.
        dst: The rank that gets the result, the same on all ranks.
        dim: The dim to join along.
        group: The group, on all of whose ranks this is called; None is the default group.
        timeout: Seconds; None takes the group's.

    Returns:
        On ``dst`` the joined tensor; elsewhere an empty one, through which backward runs. Differentiable once.

    Raises:
        CollectiveMismatchError, DistributedTimeoutError, PeerLostError: As for `allreduce`.
    """
    check_tensor(tensor)
    part = tensor.unsqueeze(0) if tensor.dim() == 0 else tensor
    dim = check_dim(part, dim)
    chosen, limit = group_and_timeout(group, timeout)
    check_root(chosen, dst, "dst")
    is_root = chosen.rank == dst
    deadline = Deadline(limit)
    sizes = share_sizes("gather", part, dim, chosen, limit)
    join = Join(part, dim, sizes)
    source = flatten(part.detach().movedim(dim, 0))
    flat = torch.empty(sum(join.counts) if is_root else 0, dtype=tensor.dtype)

    def run(sequence: int) -> None:
        collectives_of(chosen).gather(
            flat if is_root else None,
            source,
            join.counts,
            dst,
            timeout=deadline.remaining(),
            sequence=sequence,
        )

    def backward(grad: torch.Tensor) -> torch.Tensor:
        return scatter_by_sizes(
            grad if is_root else None, part, sizes, dst, dim=dim, group=chosen, timeout=chosen.timeout
        )

    def finish() -> torch.Tensor:
        result = join.restore(flat, torch.empty(join.shape, dtype=tensor.dtype)) if is_root else flat
        return attach(tensor, result, backward, once=True) if records_history(tensor) else result

    return run_now(Operation(name="gather", group=chosen, run=run, finish=finish))


def scatter(
    tensor: torch.Tensor | None,
    src: int = 0,
    *,
    dim: int = 0,
    group: Backend | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Divide rank ``src``'s tensor over the ranks along ``dim``.

    Sizes that the world size doesn't divide follow `compute_shard_sizes`. The other ranks learn shape and dtype from
    ``src``, at the cost of one more agreement.

    Args:
        tensor: On rank ``src`` the tensor, of at most 12 dims; None elsewhere.
        src: The rank that has it, the same on all ranks.
        dim: The dim to divide.
        group: The group, on all of whose ranks this is called; None is the default group.
        timeout: Seconds; None takes the group's.

    Returns:
        This rank's part. Differentiable once, when ``src``'s tensor requires grad: on all ranks.

    Raises:
        CollectiveMismatchError, DistributedTimeoutError, PeerLostError: As for `allreduce`.
    """
    chosen, limit = group_and_timeout(group, timeout)
    check_root(chosen, src, "src")
    head = _SCATTER_CALL.pack(dim, src)
    if chosen.rank == src:
        if tensor is None:
            raise ValueError(f"rank {src} scatters: pass the tensor there")
        check_tensor(tensor)
        dim = check_dim(tensor, dim)
        if tensor.dim() > _MAX_SCATTER_DIMS:
            raise ValueError(
                f"scatter takes tensors of at most {_MAX_SCATTER_DIMS} dims, not {tensor.dim()}: reshape it"
            )
        shape = [*tensor.shape, *[0] * (_MAX_SCATTER_DIMS - tensor.dim())]
        head = _SCATTER_HEAD.pack(dim, src, DTYPES.index(tensor.dtype), records_history(tensor), tensor.dim(), *shape)
    elif tensor is not None:
        raise ValueError(f"rank {src} scatters: pass None on rank {chosen.rank}")
    deadline = Deadline(limit)
    refuse_in_coalesce("scatter")
    engine = collectives_of(chosen)
    heads = engine.share("scatter", head, timeout=limit, sequence=engine.reserve())
    _compare_scatters(heads, chosen)
    dim, _, place, recorded, num_dims, *shape = _SCATTER_HEAD.unpack(heads[src])
    sizes = compute_shard_sizes(shape[dim], chosen.world_size)
    whole = tensor if tensor is not None else torch.empty(0, dtype=DTYPES[place])
    part = torch.empty([*shape[:dim], sizes[chosen.rank], *shape[dim + 1 : num_dims]], dtype=DTYPES[place])
    if recorded and tensor is None:  # so that backward comes through here too
        whole.requires_grad_()
    with torch.enable_grad() if recorded else torch.no_grad():
        return scatter_by_sizes(whole, part, sizes, src, dim=dim, group=chosen, timeout=deadline.remaining())


def _compare_scatters(heads: Sequence[bytes], group: Backend) -> None:
    """Raise, the same on every rank, unless all ranks scatter the tensor of one rank along one dim."""
    said = [_SCATTER_CALL.unpack_from(head) for head in heads]
    if len({src for _, src in said}) == 1:
        dim, _, _, _, num_dims, *_ = _SCATTER_HEAD.unpack(heads[said[0][1]])
        if all(other in (dim, dim - num_dims) for other, _ in said):
            return
    calls = "; ".join(f"rank {rank} called scatter(src={src}, dim={dim})" for rank, (dim, src) in enumerate(said))
    error = CollectiveMismatchError(
        f"the ranks of group {group.name!r} disagree about a scatter: {calls}. Pass the same src and dim on every rank."
    )
    group.abort(error)
    raise error


def scatter_by_sizes(
    tensor: torch.Tensor | None,
    part: torch.Tensor,
    sizes: Sequence[int],
    src: int,
    *,
    dim: int,
    group: Backend,
    timeout: float,
) -> torch.Tensor:
    """Give rank r ``sizes[r]`` of ``dim`` of the tensor of ``src``; ``part`` has this rank's shape and dtype."""
    is_root = group.rank == src
    whole = tensor if tensor is not None else part.new_empty(0)
    source = flatten(whole.detach().movedim(dim, 0)) if is_root else None
    row = [*part.shape[:dim], *part.shape[dim + 1 :]]
    counts = [size * math.prod(row) for size in sizes]
    flat = torch.empty(counts[group.rank], dtype=part.dtype)

    def run(sequence: int) -> None:
        collectives_of(group).scatter(flat, source, counts, src, timeout=timeout, sequence=sequence)

    def backward(grad: torch.Tensor) -> torch.Tensor:
        joined = gather(grad, src, dim=dim, group=group)
        return joined if is_root else torch.zeros_like(whole)

    def finish() -> torch.Tensor:
        result = flat.view(sizes[group.rank], *row).movedim(0, dim).contiguous()
        return attach(whole, result, backward, once=True) if records_history(whole) else result

    return run_now(Operation(name="scatter", group=group, run=run, finish=finish))
