"""Calls that come in: a table of functions, and the threads that call them."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ferrodist.errors import describe_error
from ferrodist.rpc.messages import Call, Failure, FailureKind, Result

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.deadline import Deadline

    Answer = Callable[[Result | Failure], None]
    """Takes what a call has come to; must not raise."""

__all__ = ["Functions", "Served", "Workers"]

_LEAVE_SECONDS = 5.0
"""How long a thread may take to end what it is in."""


class Functions:
    """What may be called, by name. Only what was registered can be."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}

    def register(self, name: str, function: Callable[..., Any]) -> None:
        """Have a function called by a name.

        Raises:
            TypeError: It is none, or the name is no text.
            ValueError: There is another one of that name.
        """
        if not isinstance(name, str) or not callable(function):
            raise TypeError(f"register(name, function) takes a text and a function, not {name!r} and {function!r}")
        if self._functions.setdefault(name, function) is not function:
            raise ValueError(f"there is a function {name!r} already: take another name")

    def find(self, name: str) -> Callable[..., Any] | None:
        """The function of a name, or None."""
        return self._functions.get(name)

    def names(self) -> list[str]:
        """All names."""
        return sorted(self._functions)


@dataclass(frozen=True, slots=True)
class Served:
    """A call that waits for its turn.

    Args:
        call: It.
        deadline: When its caller has given up.
        answer: Takes what it comes to.
    """

    call: Call
    deadline: Deadline
    answer: Answer


class Workers:
    """Threads that call functions, in the order in which calls come; asynchronous ones run in one event loop.

    Args:
        functions: What may be called.
        num_workers: How many threads.
        name: Of the threads.
    """

    def __init__(self, functions: Functions, num_workers: int, name: str) -> None:
        self._functions = functions
        self._name = name
        self._queue: queue.SimpleQueue[Served | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(num_workers)
        ]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self._lock = threading.Lock()
        for thread in self._threads:
            thread.start()

    def submit(self, served: Served) -> None:
        """Have a call served; does not wait."""
        self._queue.put(served)

    def close(self) -> None:
        """Serve what is there, and end the threads. A thread that is in a call that doesn't end is left behind."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_LEAVE_SECONDS)
        if self._loop is not None and self._loop_thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop_thread.join(_LEAVE_SECONDS)

    def _work(self) -> None:
        while (served := self._queue.get()) is not None:
            self._serve(served)
            del served  # arguments may be large

    def _serve(self, served: Served) -> None:
        call = served.call
        function = self._functions.find(call.name)
        if function is None:
            known = ", ".join(self._functions.names()) or "none"
            text = f"there is no function {call.name!r} here: register it; there are {known}"
            served.answer(Failure(call.number, FailureKind.UNKNOWN, "", text, ""))
            return
        if served.deadline.expired:
            text = f"{call.name!r} waited for its turn until its caller had given up"
            served.answer(Failure(call.number, FailureKind.EXPIRED, "", text, ""))
            return
        try:
            value = function(*call.arguments, **call.keywords)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            served.answer(_failure(call, error))
            return
        if inspect.isawaitable(value):
            asyncio.run_coroutine_threadsafe(self._finish(served, value), self._event_loop())
        else:
            served.answer(Result(call.number, value))

    async def _finish(self, served: Served, value: Any) -> None:
        try:
            found = Result(served.call.number, await value)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - it is the caller's
            served.answer(_failure(served.call, error))
        else:
            served.answer(found)

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop_thread = threading.Thread(target=self._run_loop, name=f"{self._name}-async", daemon=True)
                self._loop_thread.start()
            return self._loop

    def _run_loop(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


def _failure(call: Call, error: BaseException) -> Failure:
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    text = "".join(traceback.format_exception(type(error), error, frames))
    return Failure(call.number, FailureKind.RAISED, type(error).__name__, describe_error(error), text)
