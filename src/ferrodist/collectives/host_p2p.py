"""Point-to-point operations on host tensors: several at once, waited for and cancelled together.

Each is a transfer of `tensor_protocol.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ferrodist.backends.request import wait_all
from ferrodist.backends.stragglers import warn_about_late_peers
from ferrodist.backends.tags import ANY_SOURCE
from ferrodist.collectives.arguments import prepare_out
from ferrodist.collectives.tensor_protocol import TensorReceive, start_send
from ferrodist.deadline import Deadline, Elapsed
from ferrodist.errors import DistributedTimeoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import Request


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


def batch_on_host(operations: Sequence[Send | Recv], group: Backend, timeout: float) -> list[int]:
    """`batch` of checked operations on the host."""
    receives: dict[int, TensorReceive] = {}
    requests: list[Request] = []
    try:
        for i, operation in enumerate(operations):
            if isinstance(operation, Recv):
                receives[i] = receive_into(group, operation)
                requests.append(receives[i])
        for operation in operations:
            if isinstance(operation, Send):
                requests.extend(start_send(group, operation.tensor, operation.dst, operation.tag))
    except BaseException:
        for request in requests:
            request.cancel()
        raise
    what = ", ".join(
        f"send to {peer_name(op.dst)}" if isinstance(op, Send) else f"recv from {peer_name(op.src)}"
        for op in operations
    )
    wait_for(requests, Deadline(timeout), group, what)
    for receive in receives.values():
        receive.finish()
    return [op.dst if isinstance(op, Send) else receives[i].peer for i, op in enumerate(operations)]


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
