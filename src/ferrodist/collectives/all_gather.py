"""all_gather and reduce_scatter, which are each other's gradient."""

from __future__ import annotations

import math
import struct
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.backends.native.binding import compiled
from ferrodist.collectives.arguments import (
    check_dim,
    check_out,
    check_tensor,
    compute_shard_sizes,
    finish_with,
    flatten,
    flatten_parts,
    group_and_timeout,
    prepare_late_out,
    prepare_out,
)
from ferrodist.collectives.engines.host import host_engine_of, share_bytes
from ferrodist.collectives.engines.select import engine_of
from ferrodist.collectives.fast_path import (
    all_gather_along,
    reduce_scatter_along,
    start_all_gather,
    start_reduce_scatter,
)
from ferrodist.collectives.graphs import in_graphs
from ferrodist.collectives.mpi_small_calls import small_mpi_all_gather
from ferrodist.collectives.payloads import (
    abort_for_disagreement,
    check_sizes,
    dtype_at,
    elements_after,
    few_elements,
    unpack_payloads,
)
from ferrodist.collectives.profiling import is_recorded, profiled, record
from ferrodist.collectives.reduce_op import DTYPES, Op, PremultipliedSum, ReduceOp, check_reduction, is_linear, widen
from ferrodist.collectives.work import CollectiveCall, complete, execute, refuse_in_coalesce, submit
from ferrodist.deadline import Deadline
from ferrodist.torch_private.compilers import is_traced
from ferrodist.torch_private.profiling import is_profiling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.collectives.work import PendingCollective

# Size along the dim, elements of the other dims, the dim, number of dims, root or -1, dtype's index in DTYPES, whether
# it is on a GPU. The elements follow if they are few: see [Note: shared sizes] in native/bindings/shared_sizes.h.
_PART = struct.Struct("<qqhhiBB")


@in_graphs
def all_gather(
    tensor: torch.Tensor,
    dim: int = 0,
    *,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Concatenate the ranks' tensors along ``dim``, in rank order, on every rank.

    Args:
        tensor: The input, of equal shape and dtype on all ranks; any strides. A zero-dimensional tensor counts as shape
            (1,). Ranks compare the dtype, ``dim`` and the number of elements, not the shape: another rank's elements
            are taken as of the shape of this rank's tensor.
        dim: The dim to concatenate along.
        group: The group, on all of whose ranks this is called; None is the default group.
        out: The output tensor; None makes a fresh one.
        timeout: Seconds; None takes the group's.

    Returns:
        ``out``, or a fresh tensor whose ``dim`` is world_size times as long. Differentiable.

    Raises:
        IndexError: ``tensor`` has no such ``dim``.
        TypeError, ValueError, RuntimeError: ``tensor`` or ``out`` is invalid, as for `allreduce`.
        CollectiveMismatchError, DistributedTimeoutError, PeerLostError: As for `allreduce`.
    """
    if is_profiling() and not is_recorded():
        return record(all_gather, tensor, dim, group=group, out=out, timeout=timeout)
    if out is None and dim != 0:
        result = all_gather_along(tensor, dim, group, timeout)
    else:
        result = compiled.fast_all_gather(tensor, dim, group, out, timeout)
    if result is None:
        result = small_mpi_all_gather(tensor, dim, group, out, timeout)
    return execute(all_gather_call(tensor, dim, group, out, timeout)) if result is None else result


@profiled
def async_all_gather(
    tensor: torch.Tensor,
    dim: int = 0,
    *,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> PendingCollective[torch.Tensor]:
    """Start `all_gather`."""
    pending = start_all_gather(tensor, dim, group, out) if timeout is None else None
    return submit(all_gather_call(tensor, dim, group, out, timeout)) if pending is None else pending


def all_gather_uneven(
    tensor: torch.Tensor,
    dim: int = 0,
    *,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """`all_gather` of tensors that differ in the size of ``dim``, and in no other.

    The ranks share their sizes first, which costs one more verification, unless all their tensors are small: those are
    shared with the sizes.

    Args:
        tensor: The input, of equal dtype, and equal shape but for ``dim``, on all ranks; may be empty. Ranks compare
            the dtype, ``dim``, the number of dims, and the result's number of elements.
        dim: The dim to concatenate along.
        group: The group, on all of whose ranks this is called; None is the default group.
        out: The output tensor; None makes a fresh one.
        timeout: Seconds; None takes the group's.

    Returns:
        ``out``, or a fresh tensor whose ``dim`` has the sizes of all ranks. Differentiable.

    Raises:
        ValueError: ``out`` has another shape, which is known only after the sizes were shared: this rank takes part
            first, and the others get their results. Or as for `all_gather`.
        IndexError, TypeError, RuntimeError: As for `all_gather`.
        CollectiveMismatchError, DistributedTimeoutError, PeerLostError: As for `allreduce`.
    """
    if is_profiling() and not is_recorded():
        return record(all_gather_uneven, tensor, dim, group=group, out=out, timeout=timeout)
    # A list has the payloads that the ranks have shared: the general path goes on from there.
    began = time.monotonic()
    result = compiled.fast_all_gather_uneven(tensor, dim, group, out, timeout)
    if isinstance(result, torch.Tensor):
        return result
    check_tensor(tensor, in_graphs=True)
    tensor = tensor.unsqueeze(0) if tensor.dim() == 0 else tensor
    dim = check_dim(tensor, dim)
    chosen, limit = group_and_timeout(group, timeout)
    check_out(out, tensor, dtype=tensor.dtype)
    deadline = Deadline(limit, elapsed=time.monotonic() - began)
    shared = share_parts("all_gather_uneven", tensor, dim, chosen, limit, payloads=result)
    call = all_gather_call(tensor, dim, chosen, out, deadline.remaining(), shared.sizes)
    return execute(call) if shared.elements is None else complete(call, shared.elements)


class SharedParts(NamedTuple):
    """The ranks' parts that are to be joined, as far as they have been shared."""

    sizes: list[int]  # of each rank, along the dim
    elements: list[memoryview] | None  # of each rank, if all have come and fit together


def share_parts(
    operation: str,
    tensor: torch.Tensor,
    dim: int,
    group: Backend,
    timeout: float,
    *,
    root: int = -1,
    payloads: Sequence[bytes] | None = None,
) -> SharedParts:
    """Share each rank's size along a dim, and elements if they are few.

    ``dim`` and the number of dims must be equal on all ranks. What else is different is found by the collective that
    joins the parts: without ``elements`` it is to run on all ranks. ``payloads`` are what the ranks have shared, if
    they have.
    """
    if payloads is None:
        refuse_in_coalesce(operation)
        engine_of(group, tensor.device)  # raises before other ranks wait for this one
        row = math.prod([*tensor.shape[:dim], *tensor.shape[dim + 1 :]])
        number = DTYPES.index(tensor.dtype)
        head = _PART.pack(tensor.shape[dim], row, dim, tensor.dim(), root, number, tensor.is_cuda)
        if not is_traced(tensor):
            head += few_elements(flatten(tensor), host_engine_of(group).share_room - len(head))
        payloads = share_bytes(group, operation, head, timeout)
    shared = unpack_payloads(_PART, payloads, group, operation)
    differing = tuple(rank for rank, each in enumerate(shared) if _along(each) != _along(shared[0]))
    if differing:
        calls = (
            "rank {} joins along dim {} of {}, {}".format(rank, *_along(shared[rank])) for rank in (0, differing[0])
        )
        raise abort_for_disagreement(group, operation, calls, "Pass the same everywhere.", differing)
    elements = []
    for rank, (size, row, _, _, _, number, is_on_gpu) in enumerate(shared):
        check_sizes((size, row), group, rank, operation)
        size_bytes = size * row * dtype_at(number, group, rank, operation).itemsize
        come = elements_after(_PART.size, payloads[rank], size_bytes, group=group, rank=rank, operation=operation)
        if come is not None and not is_on_gpu:
            elements.append(come)
    fit = len({(row, root, number) for _, row, _, _, root, number, _ in shared}) == 1
    sizes = [each[0] for each in shared]
    return SharedParts(sizes, elements if fit and len(elements) == len(sizes) else None)


def _along(part: tuple[int, ...]) -> tuple[int, int, str]:
    """The fields of a `_PART` that must be equal on all ranks: the dim, the number of dims, the kind of device."""
    _, _, dim, num_dims, _, _, is_on_gpu = part
    return dim, num_dims, "on a GPU" if is_on_gpu else "on the CPU"


def all_gather_call(  # noqa: PLR0917 - the public signature
    tensor: torch.Tensor,
    dim: int,
    group: Backend | None,
    out: torch.Tensor | None,
    timeout: float | None,
    sizes: Sequence[int] | None = None,
) -> CollectiveCall[torch.Tensor]:
    """Check the arguments of `all_gather` and return the call, which has not been run; raises what that does."""
    check_tensor(tensor, in_graphs=True)
    tensor = tensor.unsqueeze(0) if tensor.dim() == 0 else tensor
    dim = check_dim(tensor, dim)
    chosen, limit = group_and_timeout(group, timeout)
    engine = engine_of(chosen, tensor.device)
    prepare = prepare_out if sizes is None else prepare_late_out
    sizes = [tensor.shape[dim]] * chosen.world_size if sizes is None else sizes
    source = flatten(tensor)
    concat = ConcatSpec(tensor, dim, sizes)
    target = prepare(out, concat.shape, tensor.dtype, tensor, dim=dim, sizes=sizes)
    backward = partial(reduce_scatter_with_sizes, sizes=sizes, dim=dim, group=chosen)
    op = CollectiveOp(
        kind=CollectiveKind.ALL_GATHER, source=source, out=target.flat, counts=concat.counts, dim=dim, timeout=limit
    )
    return CollectiveCall(op=op, group=chosen, engine=engine, finish=finish_with(target, tensor, out, backward))


class ConcatSpec:
    """A concatenation along a dim: the result's ``shape``, and ``counts``, the number of elements of each part."""

    def __init__(self, part: torch.Tensor, dim: int, sizes: Sequence[int]) -> None:
        row = math.prod([*part.shape[:dim], *part.shape[dim + 1 :]])
        self.counts = [size * row for size in sizes]
        self.shape = (*part.shape[:dim], sum(sizes), *part.shape[dim + 1 :])


@in_graphs
def reduce_scatter(
    tensor: torch.Tensor,
    op: Op = ReduceOp.SUM,
    *,
    dim: int = 0,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Fold a tensor over all ranks and scatter the result along ``dim``.

    Sizes that the world size doesn't divide follow `compute_shard_sizes`: the first ranks get one more.

    Args:
        tensor: The input, of equal shape and dtype on all ranks, compared as for `all_gather`; any strides.
        op: The reduction, folded in rank order.
        dim: The dim to divide.
        group: The group, on all of whose ranks this is called; None is the default group.
        out: The output tensor for this rank's part; None makes a fresh one.
        timeout: Seconds; None takes the group's.

    Returns:
        ``out``, or a fresh tensor: this rank's part. Differentiable for SUM, MEAN and premultiplied sums.

    Raises:
        IndexError: ``tensor`` has no such ``dim``.
        TypeError, ValueError, RuntimeError: ``tensor``, ``op`` or ``out`` is invalid, as for `allreduce`.
        CollectiveMismatchError, DistributedTimeoutError, PeerLostError: As for `allreduce`.
    """
    if is_profiling() and not is_recorded():
        return record(reduce_scatter, tensor, op, dim=dim, group=group, out=out, timeout=timeout)
    if out is None and dim != 0:
        result = reduce_scatter_along(tensor, op, dim, group, timeout)
    else:
        result = compiled.fast_reduce_scatter(tensor, op, dim, group, out, timeout)
    return execute(reduce_scatter_call(tensor, op, dim, group, out, timeout)) if result is None else result


@profiled
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
    pending = start_reduce_scatter(tensor, op, dim, group, out) if timeout is None else None
    return submit(reduce_scatter_call(tensor, op, dim, group, out, timeout)) if pending is None else pending


@profiled
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


def all_gather_with_sizes(
    tensor: torch.Tensor, sizes: Sequence[int], *, dim: int, group: Backend, timeout: float | None = None
) -> torch.Tensor:
    """`all_gather_uneven` with known sizes: rank r's tensor has ``sizes[r]`` along ``dim``."""
    if is_profiling() and not is_recorded():
        return record(all_gather_with_sizes, tensor, sizes, dim=dim, group=group, timeout=timeout)
    result = all_gather_along(tensor, dim, group, timeout, sizes)
    return execute(all_gather_call(tensor, dim, group, None, timeout, sizes)) if result is None else result


def reduce_scatter_with_sizes(
    tensor: torch.Tensor, sizes: Sequence[int], op: Op = ReduceOp.SUM, *, dim: int, group: Backend
) -> torch.Tensor:
    """`reduce_scatter` with given sizes: rank r gets ``sizes[r]`` along ``dim``. SUM is the gradient of all_gather."""
    if is_profiling() and not is_recorded():
        return record(reduce_scatter_with_sizes, tensor, sizes, op, dim=dim, group=group)
    result = reduce_scatter_along(tensor, op, dim, group, None, sizes)
    return execute(reduce_scatter_call(tensor, op, dim, group, None, None, sizes)) if result is None else result


def reduce_scatter_call(  # noqa: PLR0917 - the public signature
    tensor: torch.Tensor,
    op: Op,
    dim: int,
    group: Backend | None,
    out: torch.Tensor | None,
    timeout: float | None,
    sizes: Sequence[int] | None = None,
) -> CollectiveCall[torch.Tensor]:
    """Check the arguments of `reduce_scatter` and return the call, which has not been run; raises what that does."""
    check_tensor(tensor, in_graphs=True)
    check_reduction(tensor.dtype, op)
    dim = check_dim(tensor, dim)
    chosen, limit = group_and_timeout(group, timeout)
    engine = engine_of(chosen, tensor.device)
    sizes = compute_shard_sizes(tensor.shape[dim], chosen.world_size) if sizes is None else sizes
    row = math.prod([*tensor.shape[:dim], *tensor.shape[dim + 1 :]])
    source = flatten_parts(tensor, dim, sizes)
    shape = (*tensor.shape[:dim], sizes[chosen.rank], *tensor.shape[dim + 1 :])
    target = prepare_out(out, shape, tensor.dtype, tensor)
    finish = finish_with(target, tensor, out, partial(_reduce_scatter_backward, op, sizes, dim, chosen))
    call = CollectiveOp(
        kind=CollectiveKind.REDUCE_SCATTER,
        source=source,
        out=target.flat,
        reduction=op,
        counts=[size * row for size in sizes],
        dim=dim,
        timeout=limit,
    )
    return CollectiveCall(op=call, group=chosen, engine=engine, finish=finish)


def _reduce_scatter_backward(
    op: Op, sizes: Sequence[int], dim: int, group: Backend, grad: torch.Tensor
) -> torch.Tensor:
    if not is_linear(op):
        raise RuntimeError(f"reduce_scatter with {op} has no gradient: use allreduce and narrow()")
    return scale_gradient(all_gather_with_sizes(grad, sizes, dim=dim, group=group), op, group)


def scale_gradient(grad: torch.Tensor, op: Op, group: Backend) -> torch.Tensor:
    """The gradient of this rank's input of a linear reduction: its share of the result's, rounded once."""
    if op is ReduceOp.MEAN:
        return (widen(grad) / group.world_size).to(grad.dtype)
    return (widen(grad) * op.factor).to(grad.dtype) if isinstance(op, PremultipliedSum) else grad
