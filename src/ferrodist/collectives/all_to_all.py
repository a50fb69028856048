"""all_to_all, which is its own gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, overload

import torch
from msgspec.structs import replace

from ferrodist.arguments import check_int, check_type
from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.backends.cuda_streams import record_use_on_streams
from ferrodist.backends.native.binding import compiled
from ferrodist.collectives.arguments import (
    check_dim,
    check_out,
    check_tensor,
    elements_overlap,
    finish_with,
    flatten,
    group_and_timeout,
    prepare_out,
    writing_to,
)
from ferrodist.collectives.engines.select import engine_of
from ferrodist.collectives.fast_path import start_all_to_all
from ferrodist.collectives.graphs import in_graphs
from ferrodist.collectives.profiling import is_recorded, profiled, record
from ferrodist.collectives.work import CollectiveCall, execute, submit
from ferrodist.torch_private.profiling import is_profiling
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.collectives.work import PendingCollective


@overload
def all_to_all(
    tensors: torch.Tensor,
    *,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> torch.Tensor: ...
@overload
def all_to_all(
    tensors: Sequence[torch.Tensor],
    *,
    group: Backend | None = None,
    out: Sequence[torch.Tensor] | None = None,
    timeout: float | None = None,
) -> list[torch.Tensor]: ...
@in_graphs
def all_to_all(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    *,
    group: Backend | None = None,
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
    timeout: float | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """Send a tensor to each rank and receive one from each.

    Args:
        tensors: One tensor for each rank, all of one shape and dtype, on all ranks; ``tensors[r]`` goes to rank r. Or
            one tensor that is divided evenly along dim 0, of equal size on all ranks. Ranks compare the dtype and the
            number of elements for each rank.
        group: The group, on all of whose ranks this is called; None is the default group.
        out: The output: a tensor, or one tensor for each rank if ``tensors`` is a list. May be ``tensors``. None makes
            fresh tensors.
        timeout: Seconds; None takes the group's.

    Returns:
        The received tensors in rank order: a list of tensors with memory of their own, or their concatenation along dim
            0 if one tensor was given. Differentiable.

    Raises:
        ValueError: The tensors differ in shape, or there is not one for each rank: use `all_to_all_single_uneven`. Or
            ``out`` has another shape, or elements that share memory.
        TypeError, RuntimeError: ``tensors`` or ``out`` is invalid, as for `allreduce`.
        CollectiveMismatchError, DistributedTimeoutError, PeerLostError: As for `allreduce`.
    """
    if is_profiling() and not is_recorded():
        return record(all_to_all, tensors, group=group, out=out, timeout=timeout)
    if isinstance(tensors, torch.Tensor) and (out is None or isinstance(out, torch.Tensor)):
        result: torch.Tensor | None = compiled.fast_all_to_all(tensors, group, out, timeout)
        if result is not None:
            return result
    else:
        results: list[torch.Tensor] | None = compiled.fast_all_to_all_list(tensors, group, out, timeout)
        if results is not None:
            return results
    return execute(all_to_all_call(tensors, group, out, timeout))


@profiled
def async_all_to_all(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    *,
    group: Backend | None = None,
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
    timeout: float | None = None,
) -> PendingCollective[torch.Tensor | list[torch.Tensor]]:
    """Start `all_to_all`."""
    if timeout is None and isinstance(tensors, torch.Tensor) and (out is None or isinstance(out, torch.Tensor)):
        pending: PendingCollective[torch.Tensor | list[torch.Tensor]] | None = start_all_to_all(tensors, group, out)
        if pending is not None:
            return pending
    return submit(all_to_all_call(tensors, group, out, timeout))


def all_to_all_call(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    group: Backend | None,
    out: torch.Tensor | Sequence[torch.Tensor] | None,
    timeout: float | None,
) -> CollectiveCall[torch.Tensor | list[torch.Tensor]]:
    """Check the arguments of `all_to_all` and return the call, which has not been run; raises what that does."""
    chosen, limit = group_and_timeout(group, timeout)
    size = chosen.world_size
    if isinstance(tensors, torch.Tensor):
        check_tensor(tensors, in_graphs=True)
        check_dim(tensors, 0)
        if out is not None and not isinstance(out, torch.Tensor):
            raise TypeError(f"out must be a torch.Tensor, as tensors is, not {type(out).__name__}")
        if tensors.shape[0] % size:
            raise ValueError(
                f"dim 0 has {counted(tensors.shape[0], 'row')}, which {counted(size, 'rank')} can't share evenly:"
                " use all_to_all_single_uneven"
            )
        rows = [tensors.shape[0] // size] * size
        return _all_to_all_rows(tensors, rows, rows, unit=tensors.numel() // size, group=chosen, out=out, timeout=limit)
    check_type(tensors, Iterable, "tensors must be a torch.Tensor or a list of them")
    parts = list(tensors)
    _check_parts(parts)
    if len(parts) != size:
        raise ValueError(f"all_to_all needs one tensor for each of the {counted(size, 'rank')}, not {len(parts)}")
    outs = None if out is None else _check_outs(out, parts)
    ones = [1] * size
    call = _all_to_all_rows(
        torch.stack(parts), ones, ones, unit=parts[0].numel(), group=chosen, out=None, timeout=limit
    )

    def finish() -> list[torch.Tensor]:
        joined = call.finish()
        if outs is None:
            # Not views of one tensor: autograd forbids writes to these, and each would keep all of it alive.
            results = [received.clone() for received in joined.unbind(0)]
        else:
            results = outs
            for mine, received in zip(outs, joined, strict=True):
                with writing_to(mine):
                    mine.copy_(received)
        record_use_on_streams(joined)
        return results

    return replace(call, finish=finish)


def _check_parts(parts: Sequence[torch.Tensor]) -> None:
    """Raise unless the tensors are supported and of one shape, dtype and device."""
    for i, part in enumerate(parts):
        check_tensor(part, f"tensors[{i}]", in_graphs=True)
        if part.device != parts[0].device:
            raise ValueError(
                f"tensors[{i}] is on {part.device}, tensors[0] on {parts[0].device}: pass tensors of one device"
            )
        if part.shape != parts[0].shape or part.dtype is not parts[0].dtype:
            raise ValueError(
                f"tensors[{i}] is {part.dtype} of shape {tuple(part.shape)}, tensors[0] {parts[0].dtype} of shape"
                f" {tuple(parts[0].shape)}: all must be alike, or use all_to_all_single_uneven"
            )


def _check_outs(out: torch.Tensor | Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``out`` as a list; raises unless its tensors match ``parts``."""
    if isinstance(out, torch.Tensor):
        raise TypeError("out must be a list of tensors, as tensors is")
    check_type(out, Iterable, "out must be a list of tensors, as tensors is")
    outs = list(out)
    if len(outs) != len(parts):
        raise ValueError(f"out must have one tensor for each of the {counted(len(parts), 'rank')}, not {len(outs)}")
    for i, (one, part) in enumerate(zip(outs, parts, strict=True)):
        check_tensor(one, f"out[{i}]")
        check_out(one, part, shape=part.shape, dtype=part.dtype)
    if elements_overlap(*outs):
        raise ValueError("the tensors of out share memory: pass tensors of their own memory")
    return outs


@in_graphs
def all_to_all_single_uneven(
    tensor: torch.Tensor,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    *,
    group: Backend | None = None,
    out: torch.Tensor | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Send rows of a tensor to each rank and receive rows from each.

    Args:
        tensor: The input, whose first ``send_counts[0]`` rows (of dim 0) go to rank 0, the next ``send_counts[1]`` to
            rank 1, and so on.
        send_counts: The number of rows for each rank; together all rows of ``tensor``.
        recv_counts: The number of rows from each rank, equal to its ``send_counts`` for this one. Ranks compare the
            dtype and the number of elements of a row.
        group: The group, on all of whose ranks this is called; None is the default group.
        out: The output tensor, which may be ``tensor``; None makes a fresh one.
        timeout: Seconds; None takes the group's.

    Returns:
        ``out``, or a fresh tensor: the received rows, in rank order. Differentiable.

    Raises:
        ValueError: The counts don't fit the tensor or the group, or ``out`` is not of ``sum(recv_counts)`` rows or has
            elements that share memory.
        TypeError: ``send_counts`` or ``recv_counts`` is not a sequence of integers.
        TypeError, RuntimeError: ``tensor`` or ``out`` is invalid, as for `allreduce`.
        SizeMismatchError: A rank's ``recv_counts`` does not match another's ``send_counts``. The group has failed; a
            rank whose own counts match may raise this only at its next call.
        CollectiveMismatchError, DistributedTimeoutError, PeerLostError: As for `allreduce`.
    """
    if is_profiling() and not is_recorded():
        return record(all_to_all_single_uneven, tensor, send_counts, recv_counts, group=group, out=out, timeout=timeout)
    result: torch.Tensor | None = compiled.fast_all_to_all_single_uneven(
        tensor, send_counts, recv_counts, group, out, timeout
    )
    if result is not None:
        return result
    check_tensor(tensor, in_graphs=True)
    check_dim(tensor, 0)
    chosen, limit = group_and_timeout(group, timeout)
    send_counts = _check_counts(send_counts, "send_counts", chosen)
    recv_counts = _check_counts(recv_counts, "recv_counts", chosen)
    if sum(send_counts) != tensor.shape[0]:
        raise ValueError(f"send_counts {send_counts} don't add up to the tensor's {counted(tensor.shape[0], 'row')}")
    if send_counts[chosen.rank] != recv_counts[chosen.rank]:
        raise ValueError(
            f"rank {chosen.rank} sends itself {counted(send_counts[chosen.rank], 'row')} and expects"
            f" {recv_counts[chosen.rank]}"
        )
    unit = math.prod(tensor.shape[1:])
    return execute(_all_to_all_rows(tensor, send_counts, recv_counts, unit=unit, group=chosen, out=out, timeout=limit))


def _check_counts(counts: Sequence[int], name: str, group: Backend) -> list[int]:
    """Return ``counts`` as a list of ints, one for each rank."""
    check_type(counts, Iterable, f"{name} must be a list of integers, one for each rank")
    checked = [check_int(f"{name}[{rank}]", count) for rank, count in enumerate(counts)]
    if len(checked) != group.world_size or any(count < 0 for count in checked):
        raise ValueError(f"{name} needs a number of rows for each rank, {group.world_size} in all, not {checked}")
    return checked


def _all_to_all_rows(
    tensor: torch.Tensor,
    send_rows: Sequence[int],
    receive_rows: Sequence[int],
    *,
    unit: int,
    group: Backend,
    out: torch.Tensor | None,
    timeout: float,
) -> CollectiveCall[torch.Tensor]:
    row = math.prod(tensor.shape[1:])
    engine = engine_of(group, tensor.device)
    source = flatten(tensor)
    target = prepare_out(out, (sum(receive_rows), *tensor.shape[1:]), tensor.dtype, tensor)

    def backward(grad: torch.Tensor) -> torch.Tensor:
        return execute(
            _all_to_all_rows(grad, receive_rows, send_rows, unit=unit, group=group, out=None, timeout=group.timeout)
        )

    op = CollectiveOp(
        kind=CollectiveKind.ALL_TO_ALL,
        source=source,
        out=target.flat,
        counts=[rows * row for rows in send_rows],
        recv_counts=[rows * row for rows in receive_rows],
        unit=unit,
        timeout=timeout,
    )
    return CollectiveCall(op=op, group=group, engine=engine, finish=finish_with(target, tensor, out, backward))
