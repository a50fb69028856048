"""Who calls functions here: the other ranks, each at the end of a link, and this one itself."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ferrodist.errors import DistributedError, ProtocolError
from ferrodist.rpc.calls import Waits, Window
from ferrodist.rpc.link import Link
from ferrodist.rpc.messages import (
    ARRAYS,
    Call,
    Failure,
    FailureKind,
    MessageKind,
    pack_call,
    pack_failure,
    pack_result,
    unpack_call,
)
from ferrodist.rpc.serving import Served, Workers

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend
    from ferrodist.rpc.buffers import Buffers
    from ferrodist.rpc.messages import Content
    from ferrodist.rpc.statistics import Counters

__all__ = ["Neighbor", "Office", "OwnCaller"]


@dataclass(frozen=True, slots=True)
class Office:
    """What an agent's callers share.

    Args:
        workers: Who serve them.
        waits: What threads wait with.
        counters: Of calls.
        buffers: Where large tensors arrive.
        answered: Called with a rank, the number of a call of this rank, and what it has come to.
        lost: Called with a rank that is gone, and why.
        most_outstanding: Calls that a rank may have without a result.
        message_limit: Bytes that a message may have.
    """

    workers: Workers
    waits: Waits
    counters: Counters
    buffers: Buffers
    answered: Callable[[int, int, MessageKind, Content], None]
    lost: Callable[[int, DistributedError], None]
    most_outstanding: int
    message_limit: int


class _Incoming(Served):
    """A call of a caller's."""

    __slots__ = ("_caller", "_content", "_number")

    def __init__(self, caller: _Caller, number: int, content: Content) -> None:
        super().__init__()
        self._caller = caller
        self._number = number
        self._content: Content | None = content

    def read(self) -> Call:
        content, self._content = self._content, None  # its tensors are the function's now
        assert content is not None
        return self._caller.read_call(content)

    def answer(self, found: Any) -> None:
        self._caller.answer(self._number, found)


class _Caller(ABC):
    """A rank that makes calls here.

    Args:
        rank: It.
        office: Of the agent.
    """

    def __init__(self, rank: int, office: Office) -> None:
        self.rank = rank
        self.window = Window(office.most_outstanding, office.waits)
        self._office = office
        self._served: dict[int, Served] = {}  # by number: calls that have come and are not answered

    def write_call(self, call: Call) -> Content:
        """A call to this rank, or from it to itself, written down; see `pack_call`."""
        return pack_call(call, (ARRAYS,))

    def read_call(self, content: Content) -> Call:
        """The reverse."""
        return unpack_call(content, self.rank, (ARRAYS,))

    def take_call(self, number: int, content: Content) -> None:
        """Have a call served."""
        if len(self._served) >= self._office.most_outstanding:
            text = f"rank {self.rank} has {len(self._served)} calls here without a result, as many as may be"
            self._reply(MessageKind.FAILURE, number, pack_failure(Failure(FailureKind.OVERLOADED, "", text, "")))
            return
        served = _Incoming(self, number, content)
        if self._served.setdefault(number, served) is not served:
            raise ProtocolError(f"rank {self.rank} made call {number} twice", ranks=(self.rank,))
        self._office.workers.submit(served)

    def take_withdrawal(self, number: int) -> None:
        """Nobody waits for the result of a call any more."""
        served = self._served.get(number)
        if served is not None:
            served.withdraw()

    def answer(self, number: int, found: Any) -> None:
        """Send what a call has come to; does not raise."""
        self._served.pop(number, None)
        is_failure = isinstance(found, Failure)
        self._office.counters.count("failed" if is_failure else "served")
        try:
            if not is_failure:
                self._reply(MessageKind.RESULT, number, pack_result(found, (ARRAYS,)))
                return
        except (TypeError, ValueError) as error:  # it can't travel, or is too large
            found = Failure(FailureKind.UNENCODABLE, type(error).__name__, str(error), "")
        except DistributedError:
            return  # whoever waited is gone
        try:
            self._reply(MessageKind.FAILURE, number, pack_failure(found))
        except DistributedError:
            pass
        except (TypeError, ValueError) as error:  # a traceback may be too large, or no text that travels
            text = f"what it raised can't travel: {type(error).__name__}"
            self._reply(MessageKind.FAILURE, number, pack_failure(Failure(found.kind, found.type_name, text, "")))

    @abstractmethod
    def send_call(self, number: int, content: Content) -> None:
        """Send a call to this rank; raises as `Link.send` does."""

    @abstractmethod
    def send_withdrawal(self, number: int) -> None:
        """Tell this rank that nobody waits for a call's result any more; does not raise."""

    @abstractmethod
    def _reply(self, kind: MessageKind, number: int, content: Content) -> None:
        """Send an answer; raises as `Link.send` does."""

    def _end(self) -> None:
        """Serve nothing more of it."""
        self.window.close()
        for served in self._served.copy().values():
            served.withdraw()


class OwnCaller(_Caller):
    """This rank, which calls itself without a network; tensors are not copied."""

    def send_call(self, number: int, content: Content) -> None:
        """See `Link.send`."""
        self.take_call(number, content)

    def send_withdrawal(self, number: int) -> None:
        """Nobody waits any more."""
        self.take_withdrawal(number)

    def _reply(self, kind: MessageKind, number: int, content: Content) -> None:
        self._office.answered(self.rank, number, kind, content)

    def close(self) -> None:
        """Serve nothing more of it."""
        self._end()


class Neighbor(_Caller):
    """Another rank; it is its link's `Receiver`.

    Args:
        rank: It.
        office: Of the agent.
        pair: A group of this rank and that one, which the neighbor closes.
    """

    def __init__(self, rank: int, office: Office, pair: Backend) -> None:
        super().__init__(rank, office)
        self._link = Link(pair, rank, self, office.message_limit)
        self._link.start()

    def send_call(self, number: int, content: Content) -> None:
        """See `Link.send`."""
        self._link.send(MessageKind.CALL, number, content)

    def send_withdrawal(self, number: int) -> None:
        """Nobody waits any more."""
        with contextlib.suppress(DistributedError):  # or there is nobody who serves it
            self._link.send(MessageKind.WITHDRAWAL, number, b"")

    def close(self) -> None:
        """Send nothing more, and receive nothing more."""
        self._link.close()
        self._end()

    def _reply(self, kind: MessageKind, number: int, content: Content) -> None:
        self._link.send(kind, number, content)

    # What the link tells.

    @property
    def buffers(self) -> Buffers:
        """See `Receiver`."""
        return self._office.buffers

    def attend(self, change: int) -> None:
        """See `Receiver`."""
        self._office.workers.attend(change)

    def received(self, peer: int, kind: MessageKind, number: int, content: Content) -> None:
        """See `Receiver`."""
        if kind is MessageKind.CALL:
            self.take_call(number, content)
        elif kind is MessageKind.WITHDRAWAL:
            self.take_withdrawal(number)
        else:
            self._office.answered(peer, number, kind, content)

    def garbled(self, peer: int, kind: MessageKind, number: int, error: DistributedError) -> None:
        """See `Receiver`."""
        failure = pack_failure(Failure(FailureKind.UNDECODABLE, "", str(error), ""))
        if kind is MessageKind.CALL:
            self._reply(MessageKind.FAILURE, number, failure)
        else:
            self._office.answered(peer, number, MessageKind.FAILURE, failure)

    def lost(self, peer: int, error: DistributedError) -> None:
        """See `Receiver`."""
        self._office.lost(peer, error)
        self._end()
