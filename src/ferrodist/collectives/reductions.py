"""allreduce; reduce and broadcast, of which each is the other's gradient."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.differentiable import attach, records_history
from ferrodist.collectives.gathering import all_gather
from ferrodist.collectives.operation import Fusible, Operation, collectives_of, run_later, run_now
from ferrodist.collectives.prepare import check_root, check_tensor, flatten, group_and_timeout, prepare_out
from ferrodist.collectives.reduce_op import Op, PremultipliedSum, ReduceOp, check_reduction, is_linear

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend
    from ferrodist.collectives.pending import PendingCollective

__all__ = ["allreduce", "async_allreduce", "async_broadcast", "broadcast", "reduce"]


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
        tensor: Of equal shape and dtype on all ranks; any strides.
        op: How elements become one, folded in rank order.
        group: The group, on all of whose ranks this is called; None is the default group.
        out: Where the result goes, which may be ``tensor``; None makes a fresh tensor.
        timeout: Seconds; None takes the group's.

    Returns:
        ``out``, or a fresh tensor of ``tensor``'s shape. Differentiable for all operations but the bitwise ones.

    Raises:
        TypeError: ``op`` is not defined for the dtype; raised before anything is sent.
        CollectiveMismatchError: On all ranks, when one called something else.
        DistributedTimeoutError: On all ranks, when one is late.
        PeerLostError: On all ranks, when one died.
    """
    return run_now(_allreduce(tensor, op, group, out, timeout))


def async_allreduce(
    tensor: torch.Tensor,
    op: Op = ReduceOp.SUM,
    *,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> PendingCollective[torch.Tensor]:
    """Start `allreduce`."""
    return run_later(_allreduce(tensor, op, group, out, timeout))


def _allreduce(
    tensor: torch.Tensor, op: Op, group: Backend | None, out: torch.Tensor | None, timeout: float | None
) -> Operation[torch.Tensor]:
    check_tensor(tensor)
    check_reduction(tensor.dtype, op)
    chosen, limit = group_and_timeout(group, timeout)
    target = prepare_out(out, tensor.shape, tensor.dtype, tensor)
    source = flatten(tensor)
    engine = collectives_of(chosen)

    def on(target: torch.Tensor, flat: torch.Tensor, sequence: int) -> None:
        engine.allreduce(target, flat, op, timeout=limit, sequence=sequence)

    def finish() -> torch.Tensor:
        result = target.finish()
        return _attach_reduction(tensor, result, op, chosen) if recorded and out is None else result

    recorded = records_history(tensor)
    # Ranks whose factors happen to be equal would join premultiplied sums that other ranks can't.
    fusible = Fusible(key=("allreduce", tensor.dtype, op, limit), source=source, out=target.flat, run=on)
    return Operation(
        name="allreduce",
        group=chosen,
        run=partial(on, target.flat, source),
        finish=finish,
        fusible=None if isinstance(op, PremultipliedSum) else fusible,
    )


def _attach_reduction(tensor: torch.Tensor, result: torch.Tensor, op: Op, group: Backend) -> torch.Tensor:
    """The gradient of allreduce: every rank's output depends on every rank's input."""
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        return attach(tensor, result, lambda grad: allreduce(grad, op, group=group))
    if isinstance(op, PremultipliedSum):
        return attach(tensor, result, lambda grad: allreduce(grad, group=group) * op.factor)

    if op is ReduceOp.PRODUCT:
        return attach(
            tensor, result, lambda grad, own: _times_other_factors(own, allreduce(grad, group=group), group), tensor
        )
    assert op in (ReduceOp.MIN, ReduceOp.MAX), f"{op} is for dtypes that have no gradient"

    def backward(grad: torch.Tensor, own: torch.Tensor, extremum: torch.Tensor) -> torch.Tensor:
        return _share_of_extremum(own, extremum, allreduce(grad, group=group), group)

    return attach(tensor, result, backward, tensor, result)


def _share_of_extremum(own: torch.Tensor, extremum: torch.Tensor, grad: torch.Tensor, group: Backend) -> torch.Tensor:
    """The gradient goes to the ranks that have the extremum, in equal parts, as torch's amin and amax divide it."""
    own, extremum = own.detach(), extremum.detach()
    mine = ((own == extremum) | (own.isnan() & extremum.isnan())).to(grad.dtype)
    return grad * mine / allreduce(mine, group=group)


def _times_other_factors(own: torch.Tensor, grad: torch.Tensor, group: Backend) -> torch.Tensor:
    """The product of the other ranks' elements: gathered, not divided out, so that zeros are right."""
    everyone = all_gather(own.unsqueeze(0), group=group)
    others = torch.cat([everyone[: group.rank], everyone[group.rank + 1 :]])
    return grad * others.prod(dim=0).conj()


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
        tensor: Of equal shape and dtype on all ranks; any strides.
        dst: The rank that gets the result, the same on all ranks.
        op: How elements become one, folded in rank order.
        group: The group, on all of whose ranks this is called; None is the default group.
        out: On rank ``dst``: where the result goes, which may be ``tensor``. Refused elsewhere.
        timeout: Seconds; None takes the group's.

    Returns:
        On ``dst`` the result, of ``tensor``'s shape; elsewhere an empty tensor, through which backward runs.
        Differentiable once.

    Raises:
        TypeError, CollectiveMismatchError, DistributedTimeoutError, PeerLostError: As for `allreduce`.
    """
    check_tensor(tensor)
    check_reduction(tensor.dtype, op)
    chosen, limit = group_and_timeout(group, timeout)
    check_root(chosen, dst, "dst")
    is_root = chosen.rank == dst
    if out is not None and not is_root:
        raise ValueError(f"only rank {dst} gets a result: pass out= there, not on rank {chosen.rank}")
    target = prepare_out(out, tensor.shape if is_root else (0,), tensor.dtype, tensor)
    source = flatten(tensor)
    recorded = records_history(tensor) and out is None

    def run(sequence: int) -> None:
        collectives_of(chosen).reduce(
            target.flat if is_root else None, source, op, dst, timeout=limit, sequence=sequence
        )

    def finish() -> torch.Tensor:
        result = target.finish()
        saved = () if is_linear(op) else (tensor,) if op is ReduceOp.PRODUCT else (tensor, result)
        return (
            attach(tensor, result, partial(_reduce_backward, tensor.shape, op, dst, chosen), *saved, once=True)
            if recorded
            else result
        )

    return run_now(Operation(name="reduce", group=chosen, run=run, finish=finish))


def _reduce_backward(
    shape: torch.Size, op: Op, dst: int, group: Backend, grad: torch.Tensor, *saved: torch.Tensor
) -> torch.Tensor:
    """The gradient of reduce: the root's gradient goes to all ranks, then as for allreduce."""
    is_root = group.rank == dst
    whole = broadcast(grad if is_root else grad.new_empty(shape), dst, group=group)
    if op is ReduceOp.SUM:
        return whole
    if op is ReduceOp.MEAN:
        return whole / group.world_size
    if isinstance(op, PremultipliedSum):
        return whole * op.factor
    if op is ReduceOp.PRODUCT:
        return _times_other_factors(saved[0], whole, group)
    own, result = saved
    extremum = broadcast(result.detach() if is_root else torch.empty_like(own), dst, group=group)
    return _share_of_extremum(own, extremum, whole, group)


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
        ``out``, or a fresh tensor. Differentiable on ranks whose ``tensor`` requires grad, which then must on
        all; once.

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
        return attach(tensor, result, backward, once=True) if recorded else result

    return Operation(
        name="broadcast",
        group=chosen,
        run=partial(on, target.flat, source),
        finish=finish,
        fusible=Fusible(key=("broadcast", tensor.dtype, root, limit), source=source, out=target.flat, run=on),
    )
