"""Point-to-point operations on host tensors: several at once, waited for and cancelled together.

Each is a transfer of `tensor_protocol.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ferrodist.backends.request import wait_all
from ferrodist.backends.stragglers import warn_about_late_peers
from ferrodist.backends.tags import ANY_SOURCE
from ferrodist.collectives.arguments import prepare_out
from ferrodist.collectives.tensor_protocol import TensorReceive, cancel_payload, start_payload, start_send
from ferrodist.deadline import Elapsed
from ferrodist.errors import DistributedTimeoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import Request
    from ferrodist.deadline import Deadline


@dataclass(frozen=True, slots=True)
class Send:
    """A send for `batch`: ``tensor`` to rank ``dst``, under ``tag``."""

    tensor: torch.Tensor
    dst: int
    tag: int = 0


@dataclass(frozen=True, slots=True)
class Recv:
    """A receive for `batch`: into ``tensor`` from rank ``src`` (or `ANY_SOURCE`), under ``tag``."""

    tensor: torch.Tensor
    src: int
    tag: int = 0


class Progress(NamedTuple):
    """The progress of a call, or of an operation of a batch, on the fast path."""

    seconds: float = 0.0  # elapsed time
    payload_id: int | None = None  # of a send: the payload's, if the header was sent and the payload was not
    is_sent: bool = False  # of a send that is one of several operations: whether all was sent
    received: Any = None  # of a receive that is one of several operations: its result, if it is done


NOT_STARTED = Progress()


def batch_on_host(
    operations: Sequence[Send | Recv], group: Backend, deadline: Deadline, progress: Sequence[Progress] | None = None
) -> list[int]:
    """`batch` of checked operations on the host; ``progress`` is what each has made on the fast path."""
    progress = [NOT_STARTED] * len(operations) if progress is None else progress
    receives: dict[int, TensorReceive] = {}
    requests: list[Request] = []
    unsent: dict[int | None, int] = {
        each.payload_id: op.dst for op, each in zip(operations, progress, strict=True) if isinstance(op, Send)
    }
    try:
        for i, operation in enumerate(operations):
            if isinstance(operation, Recv) and progress[i].received is None:
                receives[i] = receive_into(group, operation)
                requests.append(receives[i])
        for operation, each in zip(operations, progress, strict=True):
            if isinstance(operation, Send):
                requests.extend(continue_send(group, operation, each))
                unsent.pop(each.payload_id, None)
    except BaseException:
        for request in requests:
            request.cancel()
        for payload_id, dst in unsent.items():
            if payload_id is not None:
                cancel_payload(group, dst, payload_id)
        raise
    what = ", ".join(
        f"send to {peer_name(op.dst)}" if isinstance(op, Send) else f"recv from {peer_name(op.src)}"
        for op in operations
    )
    wait_for(requests, deadline, group, what)
    for receive in receives.values():
        receive.finish()
    return [
        op.dst if isinstance(op, Send) else receives[i].peer if i in receives else progress[i].received
        for i, op in enumerate(operations)
    ]


def continue_send(group: Backend, operation: Send, progress: Progress) -> list[Request]:
    """Start the rest of a send, after the progress that it made on the fast path."""
    if progress.is_sent:
        return []
    if progress.payload_id is not None:
        return [start_payload(group, operation.tensor, operation.dst, progress.payload_id)]
    return start_send(group, operation.tensor, operation.dst, operation.tag)


def receive_into(group: Backend, operation: Recv) -> TensorReceive:
    """Start a checked receive."""
    tensor = operation.tensor
    with torch.no_grad():
        target = prepare_out(tensor, tensor.shape, tensor.dtype)
    return TensorReceive(group, operation.src, operation.tag, shape=tensor.shape, dtype=tensor.dtype, target=target)


def wait_for(requests: list[Request], deadline: Deadline, group: Backend, what: str) -> None:
    """Wait for all requests; warns about stragglers, and names ``what`` in the error when the deadline passes."""

    def warn(waiting: list[Request]) -> None:
        receives = [request for request in waiting if isinstance(request, TensorReceive)]
        sends = {request.peer for request in waiting if not isinstance(request, TensorReceive)}
        stragglers = sends | {request.peer for request in receives if not request.is_coming}
        warn_about_late_peers(
            what,
            sorted(stragglers - {ANY_SOURCE}),
            is_sent=len(receives) < len(waiting),
            group=group.name,
            rank=group.rank,
            elapsed=Elapsed.of(deadline),
        )

    try:
        wait_all(requests, deadline, warn)
    except DistributedTimeoutError as error:
        if group.failure is not None:
            raise
        raise DistributedTimeoutError(
            f"{what} on group {group.name!r}: not done after {deadline.elapsed():.2f} s of"
            f" {deadline.timeout:g} s allowed{error.detail} (rank {group.rank}). The other side has not made the"
            " matching call.",
            ranks=tuple(rank for rank in error.ranks if rank != ANY_SOURCE),
        ) from None


def peer_name(rank: int) -> str:
    """A peer in messages of errors."""
    return "any rank" if rank == ANY_SOURCE else f"rank {rank}"
