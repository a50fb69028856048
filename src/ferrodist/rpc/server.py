"""A table of functions: what may be called.

A call that has come is served: its function is called, and what that returns is the answer.
"""

from __future__ import annotations

import contextvars
import inspect
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ferrodist.errors import describe_error
from ferrodist.rpc.messages import OWN_NAMES, Call, Failure, FailureKind
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from collections.abc import Callable


class Functions:
    """What may be called, by name. Only what was registered can be."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}

    def register(self, name: str, function: Callable[..., Any]) -> None:
        """Have a function called by a name.

        Raises:
            TypeError: It is none, or the name is no text.
            ValueError: There is another one of that name, it is empty, or agents have such names for themselves.
        """
        if not isinstance(name, str) or not callable(function):
            raise TypeError(f"register(name, function) takes a text and a function, not {name!r} and {function!r}")
        if not name:
            raise ValueError("the name of a function is empty: give it one by which others call it")
        if name.startswith(OWN_NAMES):
            raise ValueError(f"names that begin with {OWN_NAMES!r} are the agents' own: take another one")
        if self._functions.setdefault(name, function) is not function:
            raise ValueError(f"there is a function {name!r} already: take another name")

    def register_all(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        """Register functions by their names.

        Raises:
            TypeError, ValueError: As for `register`, or they have no names.
        """
        if not isinstance(functions, Mapping):
            raise TypeError(
                f"functions are given by their names, as in {{'add': add}}, not as"
                f" {with_article(type(functions).__name__)}"
            )
        for name, function in functions.items():
            self.register(name, function)

    def find(self, name: str) -> Callable[..., Any] | None:
        """The function of a name, or None."""
        return self._functions.get(name)

    def classes(self) -> set[type]:
        """Those that are classes."""
        return {function for function in list(self._functions.values()) if isinstance(function, type)}

    def names(self) -> list[str]:
        """All names."""
        return sorted(self._functions)


if TYPE_CHECKING:
    Answer = Callable[[Any], None]
    """Takes what a call has come to, a value or a `Failure`; must not raise."""


serving: contextvars.ContextVar[Any] = contextvars.ContextVar("ferrodist-rpc-agent")
"""The agent that serves what a thread is at."""


class Served(ABC):
    """A call that has come, until it is answered."""

    __slots__ = ("_cancel", "function", "is_withdrawn")

    def __init__(self) -> None:
        self.function: Callable[..., Any] | None = None  # in place of the one of the call's name
        self.is_withdrawn = False
        self._cancel: Callable[[], object] | None = None

    @abstractmethod
    def read(self) -> Call:
        """Read what has come; may raise anything."""

    @abstractmethod
    def answer(self, found: Any) -> None:
        """Take what the call has come to, a value or a `Failure`; must not raise."""

    def withdraw(self) -> None:
        """Its caller waits no more: it is not begun, and what is asynchronous in it is cancelled."""
        self.is_withdrawn = True
        if self._cancel is not None:
            self._cancel()

    def on_withdrawal(self, cancel: Callable[[], object]) -> None:
        """Have something called by `withdraw`, at least once if that has been called."""
        self._cancel = cancel
        if self.is_withdrawn:
            cancel()


def serve(served: Served, functions: Functions, finish_later: Callable[[Served, Any], None]) -> None:
    """Serve a call, in this thread.

    Args:
        served: It.
        functions: What may be called.
        finish_later: Called with a call and the awaitable that its function has returned.
    """
    try:
        call = served.read()
    except Exception as error:  # noqa: BLE001 - it is the caller's
        served.answer(Failure(FailureKind.UNDECODABLE, "", str(error), ""))
        return
    function = served.function or functions.find(call.name)
    if function is None:
        known = ", ".join(functions.names()) or "none"
        text = f"there is no function {call.name!r} here: register it; those registered: {known}"
        served.answer(Failure(FailureKind.UNKNOWN, "", text, ""))
        return
    if served.is_withdrawn:
        text = f"{call.name!r} waited for its turn until its caller had given up"
        served.answer(Failure(FailureKind.EXPIRED, "", text, ""))
        return
    try:
        value = function(*call.arguments, **call.keywords)
        is_later = inspect.isawaitable(value)
    except BaseException as error:  # noqa: BLE001 - it is the caller's, and no reason for this thread to end
        served.answer(failure_of(error))
        return
    if is_later:
        finish_later(served, value)
    else:
        served.answer(value)


def failure_of(error: BaseException) -> Failure:
    """What a caller is told that its function has raised."""
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    name = type(error).__name__
    try:
        text = "".join(traceback.format_exception(type(error), error, frames))
        return Failure(FailureKind.RAISED, name, describe_error(error), text)
    except BaseException:  # noqa: BLE001 - of its own text
        return Failure(FailureKind.RAISED, name, f"{name}, whose text can't be had", "")
