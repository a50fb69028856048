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
        stream = streams.current()
        # Fresh memory each time: messages may stay in it when the call has raised.
        on_host = [_Pinned(streams, operation.tensor) for operation in operations]
        sends = [pair for pair in zip(operations, on_host, strict=True) if isinstance(pair[0], Send)]
        for operation, pinned in sends:
            streams.copy(pinned.flat, _dense(operation.tensor), stream)
        try:
            if sends:
                wait_until_passed(streams, streams.record(stream), deadline, self._check_alive)
        except NotReachedError:
            raise DistributedTimeoutError(
                f"messages on group {self._group.name!r}: the GPU is still busy with what came before them in the"
                f" current stream, after {timeout:g} s. The group is still good: the call may be made again.",
                ranks=(self._group.rank,),
            ) from None
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
                    streams.copy(operation.tensor.detach(), pinned.shaped, stream)
        return peers

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
