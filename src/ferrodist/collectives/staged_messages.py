"""Tensors on GPUs from rank to rank, through the host's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ferrodist.collectives.batches import Recv, Send, batch_on_host
from ferrodist.collectives.device_streams import streams_of
from ferrodist.collectives.prepare import writing_to
from ferrodist.collectives.staging import NotReachedError, wait_until_passed
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.collectives.device_streams import Streams

__all__ = ["StagedMessages"]


class StagedMessages:
    """`DeviceMessages` over a group's own messages: tensors are on their way when the device has come to them.

    Args:
        group: Any backend whose messages carry tensors on the CPU.
        find_streams: The streams of a device.
    """

    def __init__(self, group: Backend, find_streams: Callable[[torch.device], Streams] = streams_of) -> None:
        self._group = group
        self._find_streams = find_streams

    def exchange(self, operations: Sequence[Send | Recv], *, timeout: float) -> list[int]:
        """Do all of these at the same time; returns the other rank of each."""
        deadline = Deadline(timeout)
        streams = self._find_streams(operations[0].tensor.device)
        # Fresh memory each time: messages may stay in it when the call has raised.
        on_host = [_Pinned(streams, operation.tensor) for operation in operations]
        self._fill(
            [pair for pair in zip(operations, on_host, strict=True) if isinstance(pair[0], Send)], deadline, timeout
        )
        peers = batch_on_host(
            [
                Send(pinned.shaped, operation.dst, operation.tag)
                if isinstance(operation, Send)
                else Recv(pinned.shaped, operation.src, operation.tag)
                for operation, pinned in zip(operations, on_host, strict=True)
            ],
            self._group,
            deadline.remaining(),
        )
        for operation, pinned in zip(operations, on_host, strict=True):
            if isinstance(operation, Recv):
                with writing_to(operation.tensor):
                    streams.copy(operation.tensor.detach(), pinned.shaped, streams.current())
        return peers

    def on_host(self, tensor: torch.Tensor, *, timeout: float) -> torch.Tensor:
        """A copy of a tensor's elements, flat; waits for the device as `exchange` does, and raises the same."""
        pinned = _Pinned(self._find_streams(tensor.device), tensor)
        self._fill([(Send(tensor, 0), pinned)], Deadline(timeout), timeout)
        return pinned.flat

    def _fill(self, sends: Sequence[tuple[Send | Recv, _Pinned]], deadline: Deadline, timeout: float) -> None:
        if not sends:
            return
        streams = self._find_streams(sends[0][0].tensor.device)
        stream = streams.current()
        for operation, pinned in sends:
            streams.copy(pinned.flat, _dense(operation.tensor), stream)
        try:
            wait_until_passed(streams, streams.record(stream), deadline, self._check_alive)
        except NotReachedError:
            raise DistributedTimeoutError(
                f"messages on group {self._group.name!r}: the GPU is still busy with what came before them in the"
                f" current stream, after {timeout:g} s. The group is still good: the call may be made again.",
                ranks=(self._group.rank,),
            ) from None

    def _check_alive(self) -> None:
        if self._group.failure is not None:
            raise self._group.failure.fresh()


class _Pinned:
    """Host memory for the elements of a tensor: ``flat``, and in the tensor's shape."""

    def __init__(self, streams: Streams, like: torch.Tensor) -> None:
        memory = streams.pinned(like.nbytes) if like.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")
        self.flat = memory.view(like.dtype)
        self.shaped = self.flat.view(like.shape)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
