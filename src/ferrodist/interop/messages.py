"""torch's messages: a tensor's elements as bytes, in the order of its dims."""

from __future__ import annotations

import contextlib
import math
import threading
from functools import partial
from typing import TYPE_CHECKING

import torch

from ferrodist.backends.tags import ANY_SOURCE
from ferrodist.collectives.device_streams import Handover, keep_until_now, streams_of
from ferrodist.collectives.devices import engine_of
from ferrodist.collectives.staged_messages import StagedMessages
from ferrodist.collectives.views import bytes_of
from ferrodist.errors import DistributedError, DistributedTimeoutError
from ferrodist.interop.layouts import Target, source_of
from ferrodist.interop.works import FerrodistWork
from ferrodist.torch_private.compilers import not_compiled

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import Request
    from ferrodist.interop.completion import Threads

__all__ = ["MessageWork", "start_receive", "start_send"]


@not_compiled
class MessageWork(FerrodistWork):
    """A message under way.

    Args:
        request: Its transfer.
        tensor: The user's.
        seconds: How long a wait may take that does not say it.
        what: It, for errors.
        threads: Of its group.
        finish: Called once, when it is there.
        handover: What `finish` does on a device.
    """

    def __init__(
        self,
        request: Request,
        tensor: torch.Tensor,
        *,
        seconds: float,
        what: str,
        threads: Threads,
        finish: Callable[[], None] | None = None,
        handover: Handover | None = None,
    ) -> None:
        super().__init__([tensor], threads)
        self._request = request
        self._seconds = seconds
        self._what = what
        self._finish = finish
        self._handover = handover
        self._lock = threading.Lock()

    def source_rank(self) -> int:
        """The rank that sent it, when it is there."""
        return self._request.peer

    def _source_rank(self) -> int:
        return self.source_rank()

    def has_ended(self) -> bool:
        """See `FerrodistWork`."""
        if not self._request.done():
            return False
        with contextlib.suppress(DistributedError):  # which a wait raises
            self.wait_for(None)  # who asks may look at the tensor, so it is to be there
        return True

    def wait_for(self, seconds: float | None) -> None:
        """See `FerrodistWork`."""
        limit = self._seconds if seconds is None else seconds
        try:
            self._request.wait(limit)
        except DistributedTimeoutError as error:
            if self._request.done():
                self._request.wait(math.inf)
            raise DistributedTimeoutError(f"{self._what} within {limit:g} s", ranks=error.ranks) from None
        with self._lock:
            if self._finish is not None:
                self._finish()
                self._finish = None
            if self._handover is not None:
                self._handover.take()

    def tell(self, settle: Callable[[], None]) -> None:
        """See `FerrodistWork`."""
        self.threads.run(settle)  # it waits no longer than a wait does, also for what never comes


def start_send(group: Backend, tensor: torch.Tensor, dst: int, tag: int, threads: Threads) -> MessageWork:
    """Begin to send a tensor."""
    engine_of(group, tensor.device)  # says whether that may be
    if tensor.device.type == "cpu":
        flat = source_of(tensor)
    else:
        flat = StagedMessages(group).on_host(tensor.data, timeout=group.timeout)
    request = group.isend(bytes_of(flat), dst, tag=tag)
    return MessageWork(request, tensor, seconds=group.timeout, what=f"rank {dst} did not receive it", threads=threads)


def start_receive(group: Backend, tensor: torch.Tensor, src: int | None, tag: int, threads: Threads) -> MessageWork:
    """Begin to receive a tensor, from a rank or from any."""
    engine_of(group, tensor.device)
    target = Target(tensor)
    handover, landing, finish = None, target.flat, target.finish
    if tensor.device.type != "cpu":
        handover = Handover(streams_of(tensor.device))
        landing = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
        finish = partial(_bring, handover, target, landing)
    request = group.irecv(bytes_of(landing), ANY_SOURCE if src is None else src, tag=tag)
    what = f"nothing came from {'any rank' if src is None else f'rank {src}'}"
    return MessageWork(
        request, tensor, seconds=group.timeout, what=what, finish=finish, handover=handover, threads=threads
    )


def _bring(handover: Handover, target: Target, landing: torch.Tensor) -> None:
    with handover.running():
        target.flat.copy_(landing)
        target.finish()
        keep_until_now(target.flat)
