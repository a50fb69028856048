"""`Future`: the result of a call under way; `OneShot`: a one-shot value with callbacks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ferrodist.deadline import check_timeout
from ferrodist.rpc.executor import FOREVER_SECONDS, Executor

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    _Callback = Callable[[concurrent.futures.Future[Any]], object]


_log = logging.getLogger(__name__)

_POLL_INTERVAL_SECONDS = 1.0  # how long a thread sleeps whose wake-up may be lost, when an interruption came between


class Future(concurrent.futures.Future[Any]):
    """The result of a call that is under way: a `concurrent.futures.Future` that can be awaited.

    Callbacks run in the thread that brings the result and must not wait for other calls. It can't be cancelled: a call
    ends by its timeout.
    """

    _sent: OneShot[BaseException | None] | None = None
    """Why the call could not be sent; or, once it was sent after references in it had been registered, None."""

    def __init__(self, executor: Executor) -> None:
        super().__init__()
        self._executor = executor

    def cancel(self) -> bool:
        """Return False: a call goes on until its result comes, or its timeout."""
        return False

    def result(self, timeout: float | None = None) -> Any:
        """The call's result; raises the call's error, or TimeoutError after so many seconds."""
        self._await(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The call's error, or None; raises TimeoutError after so many seconds."""
        self._await(timeout)
        return super().exception(0)

    def add_done_callback(self, fn: _Callback) -> None:
        """Call ``fn(future)`` at the end, or now; an exception that it raises is logged."""
        super().add_done_callback(functools.partial(_call_guarded, fn))

    def settle(self, value: Any, error: BaseException | None = None) -> None:
        """Set the result or the error, unless a function of the user's has done that."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            if error is None:
                self.set_result(value)
            else:
                self.set_exception(error)

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()

    def _await(self, timeout: float | None) -> None:
        """Wait as `RpcAgent.rpc_sync` does: a worker makes room for another one, and messages are moved."""
        if self.done():
            return
        end = time.monotonic() + (FOREVER_SECONDS if timeout is None else check_timeout(timeout))
        event = self._executor.wait_events.current()

        def wake(_: object) -> None:
            event.set()

        with self._executor.waiting():
            try:
                super().add_done_callback(wake)
                while not self.done() and (left := end - time.monotonic()) > 0:
                    self._executor.wait_events.wait(event, min(left, _POLL_INTERVAL_SECONDS))
            finally:
                with self._condition, contextlib.suppress(ValueError):  # an interruption came before it was added
                    if self._state == "PENDING":  # or they are being called
                        self._done_callbacks.remove(wake)  # type: ignore[attr-defined]


def _call_guarded(fn: _Callback, future: concurrent.futures.Future[Any]) -> None:
    """Call a callback, and log an exception that would end the thread: other messages are received there."""
    try:
        fn(future)
    except Exception:
        raise  # which `concurrent.futures` logs
    except BaseException:  # noqa: BLE001 - see above
        _log.exception("a callback of a call's future raised an exception that ends threads")


_Value = TypeVar("_Value")


class OneShot(Generic[_Value]):
    """A one-shot value with callbacks.

    Unlike a future it drops its callbacks once they are called: they may hold RRefs, whose lifetime is counted.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: list[_Value] = []  # empty, or one
        self._callbacks: list[Callable[[_Value], object]] = []

    def set(self, value: _Value, *, replace: bool = False) -> None:
        """Set the value, if there is none or to replace it, and call the callbacks that have not been called."""
        with self._changed:
            if self._values and not replace:
                return
            self._values = [value]
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            callback(value)

    def add_callback(self, callback: Callable[[_Value], object]) -> None:
        """Call a function with the value: at once if it is set, or else in the thread that sets it."""
        with self._changed:
            if not self._values:
                self._callbacks.append(callback)
                return
            value = self._values[0]
        callback(value)

    def peek(self) -> list[_Value]:
        """The value in a list, or an empty list."""
        return self._values[:]

    def wait(self, timeout: float) -> list[_Value]:
        """The same, after waiting for the value."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._values), timeout)
            return self._values[:]
