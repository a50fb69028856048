"""The way to one other rank: a group of two, and the thread that receives in it."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Protocol

import torch

from ferrodist.collectives.letters import Parcel, read_letter, write_letter
from ferrodist.collectives.point_to_point import recv, send
from ferrodist.collectives.tensor_transfers import start_send
from ferrodist.errors import DistributedError, DistributedTimeoutError, ProtocolError, SizeMismatchError
from ferrodist.rpc.messages import MARKS

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend
    from ferrodist.backends.request import Request

__all__ = ["Link", "Receiver"]

_POLL_SECONDS = 5.0
"""A receive in vain is begun again after this long; the end of the group ends it at once."""


class Receiver(Protocol):
    """Who is told of what comes. All calls come from a link's thread, which nothing else is received in meanwhile."""

    def received(self, peer: int, parcel: Parcel) -> None:
        """A value has come."""

    def garbled(self, peer: int, error: DistributedError) -> None:
        """What has come is no value."""

    def lost(self, peer: int, error: DistributedError) -> None:
        """Nothing comes any more."""


class Link:
    """Sends values to a rank, and receives from it, in the order in which they were sent.

    Args:
        pair: A group of this rank and the other one; the link closes it.
        peer: The other one's number for who uses this.
        receiver: Who is told of what comes.
        limit: Bytes that a value may have.
    """

    def __init__(self, pair: Backend, peer: int, receiver: Receiver, limit: int) -> None:
        self._pair = pair
        self._other = 1 - pair.rank
        self._peer = peer
        self._receiver = receiver
        self._limit = limit
        self._lock = threading.Lock()
        self._sends: list[Request] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"ferrodist-rpc-{peer}", daemon=True)

    def start(self) -> None:
        """Receive from now on."""
        self._thread.start()

    def send(self, parcel: Parcel) -> None:
        """Send a value; its tensors are not to be changed until they are there.

        Raises:
            ValueError: It is too large.
            TypeError: A tensor can't travel.
            DistributedError: The rank was lost, or the link is closed.
        """
        letter, apart = write_letter(parcel, "what is sent")
        size = letter.nbytes + sum(tensor.nbytes for tensor in apart)
        if size > self._limit:
            raise ValueError(
                f"a message of {size:,} bytes is larger than {self._limit:,}, which agents take: send it in parts, or"
                " make the agents with a larger message_limit"
            )
        with self._lock:  # the letter, and what comes apart from it, follow each other
            self._sends = [request for request in self._sends if not request.done()]
            if not apart:
                send(letter, self._other, group=self._pair)
                return
            for tensor in (letter, *apart):
                self._sends += start_send(self._pair, tensor, self._other, 0)

    def close(self) -> None:
        """Send nothing more, and receive nothing more."""
        self._is_closed = True
        self._pair.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                self._receive_one()
        except DistributedError as error:
            if not self._is_closed:
                self._receiver.lost(self._peer, error)

    def _receive_one(self) -> None:
        """Receive a value, or nothing for a while."""
        try:
            parcel = self._receive()
        except (ProtocolError, SizeMismatchError) as error:
            self._receiver.garbled(self._peer, error)
        except DistributedTimeoutError:
            if self._pair.failure is not None:
                raise
        else:
            self._receiver.received(self._peer, parcel)

    def _receive(self) -> Parcel:
        letter = recv(None, torch.uint8, self._other, group=self._pair, timeout=_POLL_SECONDS)
        try:
            parcel, apart = read_letter(letter, MARKS)
        except Exception as error:
            text = f"rank {self._peer} sent what is no value: {error}"
            raise ProtocolError(text, ranks=(self._peer,)) from error
        for each in apart:
            size = math.prod(each.shape) * each.dtype.itemsize
            if size > self._limit:
                raise ProtocolError(f"rank {self._peer} sent a tensor of {size:,} bytes", ranks=(self._peer,))
            parcel.tensors[each.number] = recv(each.shape, each.dtype, self._other, group=self._pair)
        return parcel
