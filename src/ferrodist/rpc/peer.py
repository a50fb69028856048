"""Who calls functions here, and is called: another rank, or this one itself.

Another rank, at the end of a link.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, PeerLostError, ProtocolError, describe_error
from ferrodist.rpc.connection import Link
from ferrodist.rpc.messages import (
    HELLO,
    MET,
    NO_NUMBER,
    Call,
    Failure,
    FailureKind,
    MessageKind,
    pack_call,
    pack_failure,
    pack_result,
    unpack_call,
    unpack_result,
)
from ferrodist.rpc.server import Served
from ferrodist.rpc.window import Window
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.rpc.agent_context import Office
    from ferrodist.rpc.large_messages import Buffers
    from ferrodist.rpc.messages import Content
    from ferrodist.rpc.refcount_protocol import Passing

_MOST_BESIDE = 100

_MOST_LETTERS, _MOST_OF_A_NAME = 300, 40
"""Of a failure that can't travel as it is; a frame has room for them whatever the limit of messages."""


class _Incoming(Served):
    """A call of a caller's."""

    __slots__ = ("_caller", "_content", "_number")

    def __init__(self, caller: Caller, number: int, content: Content) -> None:
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


class Withdrawable(Protocol):
    """What is done for a caller, until it is answered."""

    def withdraw(self) -> None:
        """The caller waits no more."""


class Reply:
    """Takes what a call of an agent's own has come to, which may be a call of a function in turn.

    Args:
        caller: Who made it.
        number: Of it.
    """

    __slots__ = ("_caller", "_number", "_served", "is_withdrawn")

    def __init__(self, caller: Caller, number: int) -> None:
        self._caller = caller
        self._number = number
        self._served: Served | None = None
        self.is_withdrawn = False

    def __call__(self, found: Any) -> None:
        """Send it."""
        self._served = None  # which keeps this, and the function
        self._caller.reply(self._number, found)

    def withdraw(self) -> None:
        """The caller waits no more."""
        self.is_withdrawn = True
        if self._served is not None:
            self._served.withdraw()

    def leave_to(self, served: Served) -> None:
        """It will be answered by the call of a function."""
        self._served = served
        if self.is_withdrawn:
            served.withdraw()


class Caller(ABC):
    """A rank that makes calls here, and is called.

    Args:
        rank: It.
        office: Of the agent.
    """

    def __init__(self, rank: int, office: Office) -> None:
        self.rank = rank
        self.window = Window(office.most_outstanding, office.waits)
        self._office = office
        self._served: dict[int, Withdrawable] = {}  # by number: calls that have come and are not answered

    def write_call(self, call: Call) -> tuple[Content, Passing | None]:
        """A call to this rank, written down, and the references in it; see `pack_call`."""
        return self._office.objects.pack(self.rank, pack_call, call)

    def read_call(self, content: Content) -> Call:
        """A call of this rank; see `unpack_call`."""
        return unpack_call(content, self.rank, self._office.objects.extensions[self.rank])

    def read_result(self, content: Content) -> Any:
        """A result of this rank's; see `unpack_result`."""
        return unpack_result(content, self.rank, self._office.objects.extensions[self.rank])

    def answer(self, number: int, found: Any) -> None:
        """Send what a call has come to, a value or a `Failure`; does not raise."""
        self._office.counters.count("failed" if isinstance(found, Failure) else "served")
        self.reply(number, found)

    def reply(self, number: int, found: Any) -> None:
        """`answer`, of what is no call of a user's."""
        self._served.pop(number, None)
        self._send_answer(number, found)

    def num_served(self) -> int:
        """How many of its calls of functions have no answer; those of methods count for themselves."""
        return sum(isinstance(each, _Incoming) for each in self._served.copy().values())

    def close(self, seconds: float) -> None:
        """Serve nothing more of it, and call it no more.

        Args:
            seconds: How long it may take to take the goodbye.
        """
        del seconds
        self.window.close()
        for served in self._served.copy().values():
            served.withdraw()

    @abstractmethod
    def send(self, kind: MessageKind, number: int, content: Content) -> None:
        """Send a message to this rank; see `Link.send`."""

    def _take(self, kind: MessageKind, number: int, content: Content) -> None:
        """Act on a message of this rank."""
        if kind is MessageKind.CALL:
            self._take_call(number, content)
        elif kind is MessageKind.INTERNAL_CALL:
            reply = Reply(self, number)
            if self._has_room(number, content) and self._is_new(number, reply):
                self._take_internal_call(content, reply)
        elif kind is MessageKind.NOTICE:
            self._take_internal_call(content, _no_answer)
        elif kind is MessageKind.WITHDRAWAL:
            served = self._served.get(number)
            if served is not None:
                served.withdraw()
        else:
            self._office.answered(self.rank, number, kind, content)

    def _take_withdrawn(self, number: int, content: Content) -> None:
        """Refuse a call whose caller had given up while its tensors were on their way: they may have changed."""
        with contextlib.suppress(ProtocolError, PeerLostError):
            self.read_call(content)  # references in it have been counted for this rank
        text = "the call's tensors were on their way until its caller had given up"
        self.answer(number, Failure(FailureKind.EXPIRED, "", text, ""))

    def _take_call(self, number: int, content: Content) -> None:
        served = _Incoming(self, number, content)
        if self._has_room(number, content) and self._is_new(number, served):
            self._office.workers.submit(served)

    def _has_room(self, number: int, content: Content) -> bool:
        # Agents' calls of each other that take no place in a window are few: one for each answer with references.
        most = 2 * self._office.most_outstanding + _MOST_BESIDE
        if len(self._served) < most:
            return True
        with contextlib.suppress(ProtocolError, PeerLostError):
            self.read_call(content)  # references in it have been counted for this rank
        text = f"rank {self.rank} has {counted(len(self._served), 'call')} here without a result, as many as may be"
        self._send_answer(number, Failure(FailureKind.OVERLOADED, "", text, ""))
        return False

    def _is_new(self, number: int, served: Withdrawable) -> bool:
        if self._served.setdefault(number, served) is not served:
            raise ProtocolError(f"rank {self.rank} made call {number} twice", ranks=(self.rank,))
        return True

    def _take_internal_call(self, content: Content, answer: Callable[[Any], None]) -> None:
        try:
            call = self.read_call(content)
        except (ProtocolError, PeerLostError) as error:
            answer(Failure(FailureKind.UNDECODABLE, "", str(error), ""))
        else:
            self._office.serve_internal(self.rank, call, answer)

    def _send_answer(self, number: int, found: Any) -> None:
        if isinstance(found, Failure):
            if not self._office.objects.is_closed:  # what fails then fails for that, which the caller is about to learn
                self._send_failure(number, found)
            return
        try:
            content, passing = self._office.objects.pack(self.rank, pack_result, found)
            send = functools.partial(self.send, MessageKind.RESULT, number, content)
            if passing is None:
                send()
                return
            sent = passing.send(send, functools.partial(self._fail_answer, number), Deadline(self._office.timeout))
            if sent is not None:
                sent.when_set(passing.forget)
        except (TypeError, ValueError, DistributedError) as error:
            self._fail_answer(number, error)
        except Exception as error:  # noqa: BLE001 - a value of the user's may raise anything when it is looked at
            self._fail_answer(number, TypeError(f"the result can't travel: {describe_error(error)}"))

    def _fail_answer(self, number: int, error: BaseException) -> None:
        """An answer can't travel, or is too large, or its caller is gone."""
        self._send_failure(number, Failure(FailureKind.UNENCODABLE, type(error).__name__, str(error), ""))

    def _send_failure(self, number: int, failure: Failure) -> None:
        with contextlib.suppress(DistributedError):  # whoever waited is gone
            try:
                self.send(MessageKind.FAILURE, number, pack_failure(failure))
            except Exception:  # noqa: BLE001 - a traceback may be too large, or no text that travels
                text = failure.text[:_MOST_LETTERS].encode("ascii", "backslashreplace")[:_MOST_LETTERS].decode("ascii")
                short = Failure(failure.kind, failure.type_name[:_MOST_OF_A_NAME], text, "")
                self.send(MessageKind.FAILURE, number, pack_failure(short))


def _no_answer(found: Any) -> None:
    del found  # nobody waits for it


class OwnCaller(Caller):
    """This rank, which calls itself without a network; tensors are not copied."""

    def send(self, kind: MessageKind, number: int, content: Content) -> None:
        """Take a message of its own."""
        self._take(kind, number, content)


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
