"""all_to_all, its own gradient; and the barrier, which moves nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, overload

import torch

from ferrodist.collectives.differentiable import attach, records_history
from ferrodist.collectives.operation import Operation, collectives_of, run_later, run_now
from ferrodist.collectives.prepare import check_dim, check_tensor, flatten, group_and_timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.collectives.pending import PendingCollective

__all__ = ["all_to_all", "all_to_all_single_uneven", "async_all_to_all", "barrier", "monitored_barrier"]


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
        SizeMismatchError: A rank's ``recv_counts`` is not what another sends. The group has failed; a rank whose own
            counts fit may hear of it at its next call.
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
