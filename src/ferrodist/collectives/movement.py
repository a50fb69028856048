"""Collectives that move elements and compute nothing: broadcast, gathering, scattering, all-to-all, barrier."""

from __future__ import annotations

import math
import struct
from functools import partial
from typing import TYPE_CHECKING, overload

import torch

from ferrodist.collectives.differentiable import attach, records_history
from ferrodist.collectives.operation import Fusible, Operation, collectives_of, run_later, run_now
from ferrodist.collectives.prepare import (
    check_dim,
    check_root,
    check_tensor,
    flatten,
    group_and_timeout,
    prepare_out,
)
from ferrodist.collectives.reduce_op import DTYPES
from ferrodist.collectives.reductions import reduce, reduce_scatter_by_sizes
from ferrodist.collectives.sharding import compute_shard_sizes
from ferrodist.deadline import Deadline
from ferrodist.errors import CollectiveMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.collectives.pending import PendingCollective

__all__ = [
    "all_gather",
    "all_gather_uneven",
    "all_to_all",
    "all_to_all_single_uneven",
    "async_all_gather",
    "async_all_to_all",
    "async_broadcast",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "scatter",
]

_SIZE = struct.Struct("<q")

_MAX_SCATTER_DIMS = 12
# dim (every rank's); of the root also: dtype's place in DTYPES, records history, dims, shape
_SCATTER_HEAD = struct.Struct(f"<qBBB{_MAX_SCATTER_DIMS}q")


def barrier(group: Backend | None = None, *, timeout: float | None = None) -> None:
    """Return when every rank of the group has called it.

    Args:
        group: The group; None is the default group.
        timeout: Seconds; None takes the group's.

    Raises:
        CollectiveMismatchError: On all ranks, when one called something else.
        DistributedTimeoutError: On all ranks, naming every rank that is late.
        PeerLostError: On all ranks, when one died.
    """
    chosen, limit = group_and_timeout(group, timeout)

    def run(sequence: int) -> None:
        collectives_of(chosen).barrier(timeout=limit, sequence=sequence)

    run_now(Operation(name="barrier", group=chosen, run=run, finish=lambda: None))


def monitored_barrier(group: Backend | None = None, *, timeout: float | None = None) -> None:
    """`barrier`, under the name it has in torch: every barrier here names all the ranks that are late."""
    barrier(group, timeout=timeout)


def broadcast(
    tensor: torch.Tensor,
    root: int = 0,
    *,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Give every rank the root's tensor.

    Args:
        tensor: The elements on the root; elsewhere any tensor of the same shape and dtype, whose elements are not read.
        root: The rank whose elements everyone gets, the same on all ranks.
        group: The group, on all of whose ranks this is called; None is the default group.
        out: Where the result goes, which may be ``tensor``; None makes a fresh tensor.
        timeout: Seconds; None takes the group's.

    Returns:
        ``out``, or a fresh tensor. Differentiable on ranks whose ``tensor`` requires grad, which then must on all.

    Raises:
        CollectiveMismatchError, DistributedTimeoutError, PeerLostError: As for `allreduce`.
    """
    return run_now(_broadcast(tensor, root, group, out, timeout))


def async_broadcast(
    tensor: torch.Tensor,
    root: int = 0,
    *,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> PendingCollective[torch.Tensor]:
    """Start `broadcast`."""
    return run_later(_broadcast(tensor, root, group, out, timeout))


def _broadcast(
    tensor: torch.Tensor, root: int, group: Backend | None, out: torch.Tensor | None, timeout: float | None
) -> Operation[torch.Tensor]:
    check_tensor(tensor)
    chosen, limit = group_and_timeout(group, timeout)
    check_root(chosen, root, "root")
    target = prepare_out(out, tensor.shape, tensor.dtype, tensor)
    source = flatten(tensor) if chosen.rank == root else target.flat
    recorded = records_history(tensor) and out is None

    def on(flat: torch.Tensor, source: torch.Tensor, sequence: int) -> None:
        if source.data_ptr() != flat.data_ptr():
            flat.copy_(source)
        collectives_of(chosen).broadcast(flat, root, timeout=limit, sequence=sequence)

    def backward(grad: torch.Tensor) -> torch.Tensor:
        total = reduce(grad, root, group=chosen)
        return total if chosen.rank == root else torch.zeros_like(grad)

    def finish() -> torch.Tensor:
        result = target.finish()
        return attach(tensor, result, backward) if recorded else result

    return Operation(
        name="broadcast",
        group=chosen,
        run=partial(on, target.flat, source),
        finish=finish,
        fusible=Fusible(key=("broadcast", tensor.dtype, root), source=source, out=target.flat, run=on),
    )


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
    sizes = _share_sizes("all_gather_uneven", tensor.shape[check_dim(tensor, dim)], chosen, limit)
    return run_now(_all_gather(tensor, dim, chosen, None, deadline.remaining(), sizes))


def _share_sizes(operation: str, size: int, group: Backend, timeout: float) -> list[int]:
    """Learn every rank's size along a dim."""
    engine = collectives_of(group)
    payloads = engine.share(operation, _SIZE.pack(size), timeout=timeout, sequence=engine.reserve())
    return [_SIZE.unpack(payload)[0] for payload in payloads]


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
    join = _Join(tensor, dim, sizes)
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


class _Join:
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
        On ``dst`` the joined tensor; elsewhere an empty one, through which backward runs. Differentiable.

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
    sizes = _share_sizes("gather", part.shape[dim], chosen, limit)
    join = _Join(part, dim, sizes)
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
        return attach(tensor, result, backward) if records_history(tensor) else result

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
        This rank's part. Differentiable when ``src``'s tensor requires grad: on all ranks.

    Raises:
        CollectiveMismatchError, DistributedTimeoutError, PeerLostError: As for `allreduce`.
    """
    chosen, limit = group_and_timeout(group, timeout)
    check_root(chosen, src, "src")
    head = _SIZE.pack(dim)
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
        head = _SCATTER_HEAD.pack(dim, DTYPES.index(tensor.dtype), records_history(tensor), tensor.dim(), *shape)
    elif tensor is not None:
        raise ValueError(f"rank {src} scatters: pass None on rank {chosen.rank}")
    deadline = Deadline(limit)
    engine = collectives_of(chosen)
    heads = engine.share("scatter", head, timeout=limit, sequence=engine.reserve())
    dim, place, recorded, num_dims, *shape = _SCATTER_HEAD.unpack(heads[src])
    _compare_dims([_SIZE.unpack_from(head)[0] for head in heads], src, num_dims, chosen)
    sizes = compute_shard_sizes(shape[dim], chosen.world_size)
    whole = tensor if tensor is not None else torch.empty(0, dtype=DTYPES[place])
    part = torch.empty([*shape[:dim], sizes[chosen.rank], *shape[dim + 1 : num_dims]], dtype=DTYPES[place])
    if recorded and tensor is None:  # so that backward comes through here too
        whole.requires_grad_()
    with torch.enable_grad() if recorded else torch.no_grad():
        return scatter_by_sizes(whole, part, sizes, src, dim=dim, group=chosen, timeout=deadline.remaining())


def _compare_dims(dims: Sequence[int], src: int, num_dims: int, group: Backend) -> None:
    """Raise, the same on every rank, when a rank scatters along another dim than the root."""
    odd = tuple(rank for rank, dim in enumerate(dims) if not -num_dims <= dim < num_dims or dim % num_dims != dims[src])
    if odd:
        error = CollectiveMismatchError(
            f"the ranks of group {group.name!r} disagree about the dim of a scatter: rank {src}, which has the tensor,"
            f" divides dim {dims[src]} of {num_dims}, rank {odd[0]} passed dim={dims[odd[0]]}. Pass the same everywhere.",
            ranks=odd,
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
        return attach(whole, result, backward) if records_history(whole) else result

    return run_now(Operation(name="scatter", group=group, run=run, finish=finish))


@overload
def all_to_all(
    tensors: torch.Tensor, *, group: Backend | None = None, timeout: float | None = None
) -> torch.Tensor: ...
@overload
def all_to_all(
    tensors: Sequence[torch.Tensor], *, group: Backend | None = None, timeout: float | None = None
) -> list[torch.Tensor]: ...
def all_to_all(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    *,
    group: Backend | None = None,
    timeout: float | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """Send a tensor to each rank and receive one from each.

    Args:
        tensors: One tensor a rank, all of one shape and dtype, on all ranks; ``tensors[r]`` goes to rank r. Or one
            tensor that is divided evenly along dim 0.
        group: The group, on all of whose ranks this is called; None is the default group.
        timeout: Seconds; None takes the group's.

    Returns:
        What the ranks sent here, in rank order: a list, or joined along dim 0 when one tensor was given.
            Differentiable.

    Raises:
        CollectiveMismatchError, DistributedTimeoutError, PeerLostError: As for `allreduce`.
        ValueError: The tensors differ in shape, or there is not one for each rank: use `all_to_all_single_uneven`.
    """
    operation, finish = _all_to_all(tensors, group, timeout)
    return finish(run_now(operation))


def async_all_to_all(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    *,
    group: Backend | None = None,
    timeout: float | None = None,
) -> PendingCollective[torch.Tensor | list[torch.Tensor]]:
    """Start `all_to_all`."""
    operation, finish = _all_to_all(tensors, group, timeout)
    return run_later(
        Operation(
            name=operation.name,
            group=operation.group,
            run=operation.run,
            finish=lambda: finish(operation.finish()),
        )
    )


def _all_to_all(
    tensors: torch.Tensor | Sequence[torch.Tensor], group: Backend | None, timeout: float | None
) -> tuple[Operation[torch.Tensor], Callable[[torch.Tensor], torch.Tensor | list[torch.Tensor]]]:
    chosen, limit = group_and_timeout(group, timeout)
    size = chosen.world_size
    if isinstance(tensors, torch.Tensor):
        check_dim(tensors, 0)
        if tensors.shape[0] % size:
            raise ValueError(
                f"dim 0 has {tensors.shape[0]} rows, which {size} ranks can't share evenly:"
                " use all_to_all_single_uneven"
            )
        rows = [tensors.shape[0] // size] * size
        return _all_to_all_rows(tensors, rows, rows, chosen, limit), lambda joined: joined
    parts = list(tensors)
    for i, part in enumerate(parts):
        check_tensor(part, f"tensors[{i}]")
        if part.shape != parts[0].shape or part.dtype is not parts[0].dtype:
            raise ValueError(
                f"tensors[{i}] is {part.dtype} of shape {tuple(part.shape)}, tensors[0] {parts[0].dtype} of shape"
                f" {tuple(parts[0].shape)}: all must be alike, or use all_to_all_single_uneven"
            )
    if len(parts) != size:
        raise ValueError(f"all_to_all needs one tensor for each of the {size} ranks, not {len(parts)}")
    return _all_to_all_rows(torch.stack(parts), [1] * size, [1] * size, chosen, limit), lambda joined: list(
        joined.unbind(0)
    )


def all_to_all_single_uneven(
    tensor: torch.Tensor,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    *,
    group: Backend | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Send rows of a tensor to each rank and receive rows from each.

    Args:
        tensor: Its first ``send_counts[0]`` rows (of dim 0) go to rank 0, the next ``send_counts[1]`` to rank 1, ...
        send_counts: Rows for each rank; together all rows of ``tensor``.
        recv_counts: Rows from each rank: what its ``send_counts`` says for this one.
        group: The group, on all of whose ranks this is called; None is the default group.
        timeout: Seconds; None takes the group's.

    Returns:
        The rows received, in rank order. Differentiable.

    Raises:
        ValueError: The counts don't fit the tensor or the group.
        SizeMismatchError: On all ranks, when a rank's ``recv_counts`` is not what another sends.
        CollectiveMismatchError, DistributedTimeoutError, PeerLostError: As for `allreduce`.
    """
    check_tensor(tensor)
    check_dim(tensor, 0)
    chosen, limit = group_and_timeout(group, timeout)
    for name, counts in (("send_counts", send_counts), ("recv_counts", recv_counts)):
        if len(counts) != chosen.world_size or any(count < 0 for count in counts):
            raise ValueError(
                f"{name} needs a number of rows for each of the {chosen.world_size} ranks, not {list(counts)}"
            )
    if sum(send_counts) != tensor.shape[0]:
        raise ValueError(f"send_counts {list(send_counts)} don't add up to the tensor's {tensor.shape[0]} rows")
    if send_counts[chosen.rank] != recv_counts[chosen.rank]:
        raise ValueError(
            f"rank {chosen.rank} sends itself {send_counts[chosen.rank]} rows and expects {recv_counts[chosen.rank]}"
        )
    return run_now(_all_to_all_rows(tensor, send_counts, recv_counts, chosen, limit))


def _all_to_all_rows(
    tensor: torch.Tensor,
    send_rows: Sequence[int],
    receive_rows: Sequence[int],
    group: Backend,
    timeout: float,
) -> Operation[torch.Tensor]:
    check_tensor(tensor)
    row = math.prod(tensor.shape[1:])
    source = flatten(tensor)
    result = torch.empty((sum(receive_rows), *tensor.shape[1:]), dtype=tensor.dtype)
    recorded = records_history(tensor)

    def run(sequence: int) -> None:
        collectives_of(group).all_to_all(
            result.view(-1),
            source,
            [rows * row for rows in send_rows],
            [rows * row for rows in receive_rows],
            timeout=timeout,
            sequence=sequence,
        )

    def backward(grad: torch.Tensor) -> torch.Tensor:
        return run_now(_all_to_all_rows(grad, receive_rows, send_rows, group, group.timeout))

    def finish() -> torch.Tensor:
        return attach(tensor, result, backward) if recorded else result

    return Operation(name="all_to_all", group=group, run=run, finish=finish)
