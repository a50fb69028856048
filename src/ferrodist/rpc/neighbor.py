"""Another rank, at the end of a link."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from ferrodist.errors import DistributedError
from ferrodist.rpc.caller import Caller
from ferrodist.rpc.link import Link
from ferrodist.rpc.messages import (
    HELLO,
    MET,
    NO_NUMBER,
    Call,
    Failure,
    FailureKind,
    MessageKind,
    pack_failure,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.rpc.buffers import Buffers
    from ferrodist.rpc.messages import Content
    from ferrodist.rpc.office import Office

__all__ = ["Neighbor"]


class Neighbor(Caller):
    """Another rank; it is its link's `Receiver`.

    Args:
        rank: It.
        office: Of the agent.
        pair: A group of this rank and that one, which the neighbor closes.
        ended: Called with this, and why nothing comes any more; must not block.
    """

    def __init__(
        self, rank: int, office: Office, pair: Backend, ended: Callable[[Neighbor, DistributedError], None]
    ) -> None:
        super().__init__(rank, office)
        self.pair = pair
        self._ended = ended
        self._link = Link(pair, rank, self, office.message_limit)
        self._taking = threading.RLock()  # what belongs to objects
        self._taker: int | None = None  # the thread that has it
        self._later: list[tuple[int, Any]] = []  # its answers: to send may be to receive, from other ranks too
        self._is_lost = False

    def start(self) -> None:
        """Receive from now on."""
        self._link.start()
        self._tell(Call(MET, (), {}))
        self._tell(Call(HELLO, (self._office.name or "",), {}))

    def _tell(self, call: Call) -> None:
        content, _ = self.write_call(call)
        with contextlib.suppress(DistributedError):  # its end is told apart
            self.send(MessageKind.NOTICE, NO_NUMBER, content)

    def send(self, kind: MessageKind, number: int, content: Content) -> None:
        """See `Link.send`."""
        self._link.send(kind, number, content)

    def close(self, seconds: float) -> None:
        """Send nothing more, and receive nothing more."""
        self._link.close(seconds)
        super().close(seconds)

    def forget(self) -> None:
        """Let it have no more to do with objects here: what it has left behind is about to be cleared away.

        Messages of their own that follow a frame may be taken after the end of the link has been told.
        """
        with self._taking:
            self._is_lost = True

    def _take_internal_call(self, content: Content, answer: Callable[[Any], None]) -> None:
        with self._taking:
            if self._is_lost:
                return
            before, self._taker = self._taker, threading.get_ident()
            try:
                super()._take_internal_call(content, answer)
            finally:
                self._taker = before
                answers: list[tuple[int, Any]] = []
                if before is None:
                    answers, self._later = self._later, answers
        for number, found in answers:
            super()._send_answer(number, found)

    def _send_answer(self, number: int, found: Any) -> None:
        if self._taker == threading.get_ident():
            self._later.append((number, found))
        else:
            super()._send_answer(number, found)

    # What the link tells.

    @property
    def buffers(self) -> Buffers:
        """See `Receiver`."""
        return self._office.buffers

    @property
    def marks(self) -> Sequence[str]:
        """See `Receiver`."""
        return self._office.objects.marks

    def attend(self, change: int) -> None:
        """See `Receiver`."""
        self._office.workers.attend(change)

    def received(self, peer: int, kind: MessageKind, number: int, content: Content) -> None:
        """See `Receiver`."""
        del peer
        self._take(kind, number, content)

    def withdrawn(self, peer: int, kind: MessageKind, number: int, content: Content) -> None:
        """See `Receiver`."""
        del peer, kind
        self._take_withdrawn(number, content)

    def garbled(self, peer: int, kind: MessageKind, number: int, error: DistributedError) -> None:
        """See `Receiver`."""
        failure = Failure(FailureKind.UNDECODABLE, "", str(error), "")
        if kind in (MessageKind.CALL, MessageKind.INTERNAL_CALL):
            self._send_answer(number, failure)
        else:
            self._office.answered(peer, number, MessageKind.FAILURE, pack_failure(failure))

    def lost(self, peer: int, error: DistributedError) -> None:
        """See `Receiver`."""
        del peer
        self._ended(self, error)
