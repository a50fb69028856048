"""Messages around a ring of ranks, which travel while the ranks compute."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from ferrodist.backends.verification import left_reason
from ferrodist.collectives.host_p2p import Recv, Send, receive_into, wait_for
from ferrodist.collectives.p2p import batch
from ferrodist.collectives.tensor_protocol import start_send
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import Request
    from ferrodist.collectives.tensor_protocol import TensorReceive

FORWARD_TAG = (1 << 56) - 0x52494E47  # a tag that no program is likely to use for messages of its own
GRADIENT_TAG = FORWARD_TAG + 1


class RingExchange:
    """A tensor sent to the next rank and one received from the previous one, under way.

    On the CPU it travels from now on; both tensors belong to it until `wait` returns. On a GPU `wait` makes the
    exchange.

    Args:
        outgoing: The contiguous tensor to send.
        incoming: The contiguous tensor to receive into.
        group: The group, of two ranks or more.
        tag: The tag of both messages.
        timeout: Seconds that `wait` waits.
    """

    def __init__(
        self, outgoing: torch.Tensor, incoming: torch.Tensor, *, group: Backend, tag: int, timeout: float
    ) -> None:
        self._group, self._timeout = group, timeout
        size = group.world_size
        self._send = Send(outgoing, (group.rank + 1) % size, tag)
        self._recv = Recv(incoming, (group.rank - 1) % size, tag)
        self._requests: list[Request] = []
        self._receive: TensorReceive | None = None
        if outgoing.device.type == "cpu":
            self._receive = receive_into(group, self._recv)
            self._requests.append(self._receive)
            try:
                self._requests += start_send(group, outgoing, self._send.dst, tag)
            except BaseException:
                self.cancel()
                raise

    def wait(self) -> torch.Tensor:
        """Wait for both messages; returns the received tensor."""
        if self._receive is None:
            batch([self._recv, self._send], group=self._group, timeout=self._timeout)
            return self._recv.tensor
        what = f"ring: send to rank {self._send.dst}, recv from rank {self._recv.src}"
        wait_for(self._requests, Deadline(self._timeout), self._group, what)
        self._receive.finish()
        return self._recv.tensor

    def cancel(self) -> None:
        """End the messages that are still under way."""
        for request in self._requests:
            request.cancel()


@contextlib.contextmanager
def end_group_on_error(operation: str, group: Backend, *under_way: list[RingExchange]) -> Iterator[None]:
    """Cancel messages when the block raises, and end the group if the error is this rank's own: others wait for it."""
    try:
        yield
    except BaseException as error:
        for exchange in (each for exchanges in under_way for each in exchanges):
            exchange.cancel()
        if not isinstance(error, DistributedError):
            group.abort(left_reason(group.rank, operation, error))
        raise


class PairBuffer:
    """Memory for two tensors, of different shapes in turn, which travel as one message.

    Args:
        dtype: Their dtype.
        device: Their device.
        numel: The largest number of elements of both.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, numel: int) -> None:
        self._memory = torch.empty(numel, dtype=dtype, device=device)

    def flat(self, shapes: tuple[torch.Size, torch.Size]) -> torch.Tensor:
        """Both tensors as one, in one dim."""
        return self._memory[: sum(shape.numel() for shape in shapes)]

    def pair(self, shapes: tuple[torch.Size, torch.Size]) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensors, views of the memory."""
        one, other = torch.split(self.flat(shapes), [shape.numel() for shape in shapes])
        return one.view(shapes[0]), other.view(shapes[1])
