"""Values on their way from stage to stage: a letter, and the tensors that come apart from it.

See [Note: letter] in `letters.py`. All of it goes under one tag, in this order.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from ferrodist.backends.request import wait_all
from ferrodist.collectives.devices import engine_of
from ferrodist.collectives.letters import Parcel, read_letter, write_letter
from ferrodist.collectives.point_to_point import begin_send, recv
from ferrodist.collectives.tensor_transfers import TensorReceive, start_send
from ferrodist.errors import DistributedError, ProtocolError

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import Request
    from ferrodist.deadline import Deadline

__all__ = ["Receipt", "send_parcel"]

_HOST = torch.device("cpu")


def send_parcel(parcel: Parcel, dst: int, tag: int, group: Backend) -> list[Request]:
    """Start to send a value; its tensors are not to be changed until the requests are done.

    Raises:
        TypeError: A tensor can't travel.
        UnsupportedOpError: It is on a GPU, and the group carries none there.
    """
    for tensor in parcel.tensors:
        if tensor.is_cuda:
            engine_of(group, tensor.device)
    letter, apart = write_letter(parcel, "what goes from stage to stage")
    requests = begin_send(letter, dst, tag=tag, group=group)
    for tensor in apart:
        requests += start_send(group, tensor, dst, tag)
    return requests


class Receipt:
    """A value that is on its way to this rank: the receive of its letter has begun.

    Args:
        src: The rank that sends it.
        tag: Under which.
        group: The group.
        is_ahead: Whether to begin at once, which is worth it for what is large. Else what is small comes by itself, and
            taking it when it is needed costs a fraction.
        device: Where tensors are put that the sender has on a GPU.
    """

    def __init__(self, src: int, tag: int, group: Backend, *, is_ahead: bool, device: torch.device = _HOST) -> None:
        self._group = group
        self._device = device
        self._src = src
        self._tag = tag
        self._lock = threading.Lock()
        self._parcel: Parcel | None = None
        self._error: Exception | None = None
        self._bodies: list[tuple[int, TensorReceive]] = []
        """Of the tensors that come by themselves, with their numbers."""
        self._is_given_up = False
        self._letter: TensorReceive | None = None
        if is_ahead:
            self._letter = TensorReceive(group, src, tag, shape=None, dtype=torch.uint8)
            self._letter.add_done_callback(self._read_ahead)

    def wait(self, deadline: Deadline) -> Parcel:
        """Wait until all of it is there.

        Raises:
            ProtocolError: It is no letter.
            DistributedError: A rank is late, or was lost.
        """
        if self._letter is not None:
            wait_all([self._letter], deadline)
            self._read_ahead()
        else:
            letter = recv(None, torch.uint8, self._src, tag=self._tag, group=self._group, timeout=deadline.remaining())
            self._read(letter)
        if self._error is not None:
            raise self._error
        assert self._parcel is not None, "it was read"
        wait_all([body for _, body in self._bodies], deadline)
        for number, body in self._bodies:
            self._parcel.tensors[number] = body.finish()
        for number, is_on_gpu in enumerate(self._parcel.is_on_gpu):
            if is_on_gpu:
                self._parcel.tensors[number] = self._parcel.tensors[number].to(self._device)
        return self._parcel

    @property
    def has_bodies(self) -> bool:
        """Whether some of it came apart from the letter."""
        return bool(self._bodies)

    def cancel(self) -> None:
        """Give it up."""
        with self._lock:
            self._is_given_up = True
        if self._letter is not None:
            self._letter.cancel()
        for _, body in self._bodies:
            body.cancel()

    def _read_ahead(self) -> None:
        """Read the letter once, whoever is first: who waits for it, or who brings it."""
        with self._lock:
            is_read = self._parcel is not None or self._error is not None
            if self._letter is not None and not (is_read or self._is_given_up or self._letter.error):
                self._read(self._letter.finish())

    def _read(self, letter: torch.Tensor) -> None:
        """Read the letter, and begin to receive what comes apart from it."""
        try:
            self._parcel, apart = read_letter(letter)
            for each in apart:
                body = TensorReceive(self._group, self._src, self._tag, shape=each.shape, dtype=each.dtype)
                self._bodies.append((each.number, body))
        except DistributedError as error:  # of the group, in which the receives begin
            self._error = error
        except Exception as error:  # noqa: BLE001 - a letter may be wrong in any way, and callbacks must not raise
            text = f"rank {self._src} of group {self._group.name!r} sent what is no value of a pipeline: {error}"
            self._error = ProtocolError(text, ranks=(self._src,))
