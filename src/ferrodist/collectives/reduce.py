"""allreduce, reduce and broadcast; reduce and broadcast are each other's gradient. reduce_scatter is in `all_gather`.

A plain call goes straight into the compiled engine, and a small one over an MPI into that; every other call takes the
general path, as a `CollectiveOp`. `gpu_allreduce` and `gpu_broadcast` take tensors on GPUs only.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.backends.native.binding import compiled
from ferrodist.collectives.all_gather import all_gather, scale_gradient
from ferrodist.collectives.arguments import (
    check_out_of_root,
    check_root,
    check_tensor,
    finish_with,
    flatten,
    group_and_timeout,
    prepare_out,
)
from ferrodist.collectives.engines.select import engine_of
from ferrodist.collectives.fast_path import start_allreduce, start_broadcast
from ferrodist.collectives.graphs import in_graphs
from ferrodist.collectives.mpi_small_calls import small_mpi_allreduce, small_mpi_broadcast
from ferrodist.collectives.profiling import is_recorded, profiled, record
from ferrodist.collectives.reduce_op import Op, ReduceOp, check_reduction, is_linear, widen
from ferrodist.collectives.work import CollectiveCall, execute, submit
from ferrodist.errors import UnsupportedOpError
from ferrodist.torch_private.profiling import is_profiling

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend
    from ferrodist.collectives.work import PendingCollective


@in_graphs  # only for compilers: eager calls run the function itself
def allreduce(
    tensor: torch.Tensor,
    op: Op = ReduceOp.SUM,
    *,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Fold a tensor over all ranks; every rank gets the result.

    Args:
        tensor: The input, of equal shape and dtype on all ranks; any strides. Ranks compare the dtype and the number
            of elements: shapes (2, 3) and (3, 2) match, element by element, and each rank's result has its own shape.
        op: The reduction, folded in rank order.
        group: The group, on all of whose ranks this is called; None is the default group.
        out: The output tensor, which may be ``tensor``; None makes a fresh one.
        timeout: Seconds; None takes the group's.

    Returns:
        ``out``, or a fresh tensor of ``tensor``'s shape. Differentiable for all operations but the bitwise ones.

    Raises:
        TypeError: ``op`` is not defined for the dtype, or ``out`` is of another one; raised before anything is sent.
        ValueError: ``out`` has another shape, or elements that share memory; raised before anything is sent.
        RuntimeError: ``out`` is given where gradients would be lost; raised before anything is sent.
        NotImplementedError: ``tensor`` or ``out`` carries a tangent of forward-mode differentiation, or the call is
            inside a functorch transform (vmap, torch.func.grad) or make_fx; raised before anything is sent.
        UnsupportedOpError: ``tensor`` is on a GPU, and the group has no engine for it; raised before anything is sent.
        CollectiveMismatchError: On all ranks, when one called something else.
        DistributedTimeoutError: On all ranks, when one is late.
        PeerLostError: On all ranks, when one died.
    """
    if is_profiling() and not is_recorded():
        return record(allreduce, tensor, op, group=group, out=out, timeout=timeout)
    # Plain calls go straight into C++, native/bindings/fast_path.cpp. The others get None and take the general path, as
    # does a sub-group's first call, which opens the engine.
    result = compiled.fast_allreduce(tensor, op, group, out, timeout)
    if result is None:
        result = small_mpi_allreduce(tensor, op, group, out, timeout)
    return execute(allreduce_call(tensor, op, group, out, timeout)) if result is None else result


@profiled
def async_allreduce(
    tensor: torch.Tensor,
    op: Op = ReduceOp.SUM,
    *,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> PendingCollective[torch.Tensor]:
    """Start `allreduce`."""
    pending = start_allreduce(tensor, op, group, out) if timeout is None else None
    return submit(allreduce_call(tensor, op, group, out, timeout)) if pending is None else pending


def allreduce_call(
    tensor: torch.Tensor, op: Op, group: Backend | None, out: torch.Tensor | None, timeout: float | None
) -> CollectiveCall[torch.Tensor]:
    """Check the arguments of `allreduce` and return the call, which has not been run; raises what that does."""
    check_tensor(tensor, in_graphs=True)
    check_reduction(tensor.dtype, op)
    chosen, limit = group_and_timeout(group, timeout)
    engine = engine_of(chosen, tensor.device)
    target = prepare_out(out, tensor.shape, tensor.dtype, tensor, in_place=True)
    source = target.flat if out is tensor and not target.parts else flatten(tensor)
    saved, saves_result = _saved_for_backward(tensor, op)
    backward = partial(_allreduce_backward, op, chosen)
    finish = finish_with(target, tensor, out, backward, *saved, saves_result=saves_result)
    call = CollectiveOp(kind=CollectiveKind.ALLREDUCE, source=source, out=target.flat, reduction=op, timeout=limit)
    return CollectiveCall(op=call, group=chosen, engine=engine, finish=finish)


def _saved_for_backward(tensor: torch.Tensor, op: Op) -> tuple[tuple[torch.Tensor, ...], bool]:
    """The tensors that the gradient of a reduction needs, and whether it needs the result."""
    return () if is_linear(op) else (tensor,), op in (ReduceOp.MIN, ReduceOp.MAX)


def _allreduce_backward(op: Op, group: Backend, grad: torch.Tensor, *saved: torch.Tensor) -> torch.Tensor:
    """The gradient of allreduce: every rank's output depends on every rank's input."""
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        return allreduce(grad, op, group=group)
    return _times_derivative(op, group, allreduce(grad, group=group), *saved)


def _times_derivative(op: Op, group: Backend, grad: torch.Tensor, *saved: torch.Tensor) -> torch.Tensor:
    """The gradient of a reduction's result times the derivative by this rank's elements."""
    if is_linear(op):
        return scale_gradient(grad, op, group)
    if op is ReduceOp.PRODUCT:
        return _times_other_factors(saved[0], grad, group)
    assert op in (ReduceOp.MIN, ReduceOp.MAX), f"{op} is for dtypes that have no gradient"
    return _share_of_extremum(saved[0], saved[1], grad, group)


def _share_of_extremum(own: torch.Tensor, extremum: torch.Tensor, grad: torch.Tensor, group: Backend) -> torch.Tensor:
    """The gradient of this rank: equal shares for the ranks that have the extremum, as in torch's amin and amax."""
    own, extremum, wide = own.detach(), extremum.detach(), widen(grad)
    mine = ((own == extremum) | (own.isnan() & extremum.isnan())).to(wide.dtype)
    return (wide * mine / allreduce(mine, group=group)).to(grad.dtype)


def _times_other_factors(own: torch.Tensor, grad: torch.Tensor, group: Backend) -> torch.Tensor:
    """The gradient times the product of the other ranks' elements, which are gathered so that zeros are right."""
    everyone = all_gather(own.unsqueeze(0), group=group)
    others = widen(torch.cat([everyone[: group.rank], everyone[group.rank + 1 :]]))
    return (widen(grad) * others.prod(dim=0).conj()).to(grad.dtype)


@in_graphs
def reduce(
    tensor: torch.Tensor,
    dst: int = 0,
    op: Op = ReduceOp.SUM,
    *,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Fold a tensor over all ranks; rank ``dst`` gets the result.

    Args:
        tensor: The input, of equal shape and dtype on all ranks, compared as for `allreduce`; any strides.
        dst: The rank that gets the result, the same on all ranks.
        op: The reduction, folded in rank order.
        group: The group, on all of whose ranks this is called; None is the default group.
        out: The output tensor on rank ``dst``, which may be ``tensor``; refused elsewhere.
        timeout: Seconds; None takes the group's.

    Returns:
        On ``dst`` the result, of ``tensor``'s shape; elsewhere an empty tensor, through which backward runs.
        Differentiable once.

    Raises:
        ValueError: Also when ``out`` is given on another rank than ``dst``.
        TypeError, RuntimeError, CollectiveMismatchError, DistributedTimeoutError, PeerLostError: As for `allreduce`.
        InvalidRankError: ``dst`` is not a rank of the group.
    """
    if is_profiling() and not is_recorded():
        return record(reduce, tensor, dst, op, group=group, out=out, timeout=timeout)
    result = compiled.fast_reduce(tensor, dst, op, group, out, timeout)
    return execute(_reduce(tensor, dst, op, group, out, timeout)) if result is None else result


def _reduce(  # noqa: PLR0917 - the public signature
    tensor: torch.Tensor, dst: int, op: Op, group: Backend | None, out: torch.Tensor | None, timeout: float | None
) -> CollectiveCall[torch.Tensor]:
    check_tensor(tensor, in_graphs=True)
    check_reduction(tensor.dtype, op)
    chosen, limit = group_and_timeout(group, timeout)
    dst = check_root(chosen, dst, "dst")
    engine = engine_of(chosen, tensor.device)
    is_root = chosen.rank == dst
    check_out_of_root(chosen, dst, out)
    target = prepare_out(out, tensor.shape if is_root else (0,), tensor.dtype, tensor, in_place=True)
    source = flatten(tensor)
    saved, saves_result = _saved_for_backward(tensor, op)
    backward = partial(_reduce_backward, tensor.shape, op, dst, chosen)
    finish = finish_with(target, tensor, out, backward, *saved, saves_result=saves_result, once=True)
    call = CollectiveOp(
        kind=CollectiveKind.REDUCE,
        source=source,
        out=target.flat if is_root else None,
        reduction=op,
        root=dst,
        timeout=limit,
    )
    return CollectiveCall(op=call, group=chosen, engine=engine, finish=finish)


def _reduce_backward(
    shape: torch.Size, op: Op, dst: int, group: Backend, grad: torch.Tensor, *saved: torch.Tensor
) -> torch.Tensor:
    """The gradient of reduce: the root's gradient is broadcast, then as for allreduce."""
    is_root = group.rank == dst
    whole = broadcast(grad if is_root else grad.new_empty(shape), dst, group=group)
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        own, result = saved
        saved = own, broadcast(result.detach() if is_root else torch.empty_like(own), dst, group=group)
    return _times_derivative(op, group, whole, *saved)


@in_graphs
def broadcast(
    tensor: torch.Tensor,
    root: int = 0,
    *,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Copy the root's tensor to every rank.

    Args:
        tensor: The elements on the root; elsewhere any tensor of the same shape and dtype, compared as for `allreduce`,
            whose elements are not read.
        root: The rank whose elements are copied, the same on all ranks.
        group: The group, on all of whose ranks this is called; None is the default group.
        out: The output tensor, which may be ``tensor``; None makes a fresh one.
        timeout: Seconds; None takes the group's.

    Returns:
        ``out``, or a fresh tensor. Differentiable on ranks whose ``tensor`` requires grad, which then must on
        all; once.

    Raises:
        InvalidRankError: ``root`` is not a rank of the group.
        TypeError, ValueError, RuntimeError: ``tensor`` or ``out`` is invalid, as for `allreduce`.
        CollectiveMismatchError, DistributedTimeoutError, PeerLostError: As for `allreduce`.
    """
    if is_profiling() and not is_recorded():
        return record(broadcast, tensor, root, group=group, out=out, timeout=timeout)
    result = compiled.fast_broadcast(tensor, root, group, out, timeout)
    if result is None:
        result = small_mpi_broadcast(tensor, root, group, out, timeout)
    return execute(broadcast_call(tensor, root, group, out, timeout)) if result is None else result


@profiled
def async_broadcast(
    tensor: torch.Tensor,
    root: int = 0,
    *,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> PendingCollective[torch.Tensor]:
    """Start `broadcast`."""
    pending = start_broadcast(tensor, root, group, out) if timeout is None else None
    return submit(broadcast_call(tensor, root, group, out, timeout)) if pending is None else pending


def broadcast_call(
    tensor: torch.Tensor, root: int, group: Backend | None, out: torch.Tensor | None, timeout: float | None
) -> CollectiveCall[torch.Tensor]:
    """Check the arguments of `broadcast` and return the call, which has not been run; raises what that does."""
    check_tensor(tensor, in_graphs=True)
    chosen, limit = group_and_timeout(group, timeout)
    root = check_root(chosen, root, "root")
    engine = engine_of(chosen, tensor.device)
    target = prepare_out(out, tensor.shape, tensor.dtype, tensor, in_place=True)
    source = flatten(tensor) if chosen.rank == root else target.flat

    def backward(grad: torch.Tensor) -> torch.Tensor:
        total = reduce(grad, root, group=chosen)
        return total if chosen.rank == root else torch.zeros_like(grad)

    finish = finish_with(target, tensor, out, backward, once=True)
    call = CollectiveOp(kind=CollectiveKind.BROADCAST, source=source, out=target.flat, root=root, timeout=limit)
    return CollectiveCall(op=call, group=chosen, engine=engine, finish=finish)


def gpu_allreduce(
    tensor: torch.Tensor,
    op: Op = ReduceOp.SUM,
    *,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """`allreduce` of a tensor on a GPU.

    Raises:
        UnsupportedOpError: ``tensor`` is on the CPU; or the group has no engine for tensors on GPUs, and
            FERRODIST_ENABLE_GPU_FALLBACK is not 1.
        Exception: As for `allreduce`.
    """
    _check_on_gpu(tensor, "allreduce")
    return allreduce(tensor, op, group=group, out=out, timeout=timeout)


def gpu_broadcast(
    tensor: torch.Tensor,
    root: int = 0,
    *,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """`broadcast` of a tensor on a GPU.

    Raises:
        UnsupportedOpError: As for `gpu_allreduce`.
        Exception: As for `broadcast`.
    """
    _check_on_gpu(tensor, "broadcast")
    return broadcast(tensor, root, group=group, out=out, timeout=timeout)


def _check_on_gpu(tensor: torch.Tensor, name: str) -> None:
    check_tensor(tensor, in_graphs=True)
    if not tensor.is_cuda:
        raise UnsupportedOpError(f"gpu_{name} is for tensors on a GPU, and this one is on {tensor.device}: use {name}")
