"""Who calls functions here, and is called: another rank, or this one itself."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, PeerLostError, ProtocolError, describe_error
from ferrodist.rpc.messages import (
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
from ferrodist.rpc.serving import Served
from ferrodist.rpc.window import Window
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.rpc.messages import Content
    from ferrodist.rpc.office import Office
    from ferrodist.rpc.passing import Passing

__all__ = ["Caller", "OwnCaller", "Reply"]

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
