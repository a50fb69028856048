"""The result of a call that is under way.

Something that will be known, for those who want to know.
"""

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
from ferrodist.rpc.executor import AGES

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from ferrodist.rpc.executor import Waiters

if TYPE_CHECKING:
    _Callback = Callable[[concurrent.futures.Future[Any]], object]


_log = logging.getLogger(__name__)

_PENDING = "PENDING"

_LOOK_SECONDS = 1.0
"""How long a thread sleeps that may not be told of the end, as an interruption came between."""


class Future(concurrent.futures.Future[Any]):
    """The result of a call that is under way: a `concurrent.futures.Future` that can be awaited.

    Callbacks run in the thread that brings the result and must not wait for other calls. It can't be cancelled: a call
    ends by its timeout.
    """

    _sent: Outcome[BaseException | None] | None = None
    """Where the call waits for references in it to be registered: why it could not be sent, or None if it was."""

    def __init__(self, workers: Waiters) -> None:
        super().__init__()
        self._workers = workers

    def cancel(self) -> bool:
        """A call goes on until its result comes, or its timeout."""
        return False

    def result(self, timeout: float | None = None) -> Any:
        """The call's result; raises what the call has failed with, or TimeoutError after so many seconds."""
        self._await(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call has failed with, or None; raises TimeoutError after so many seconds."""
        self._await(timeout)
        return super().exception(0)

    def add_done_callback(self, fn: _Callback) -> None:
        """Have ``fn(future)`` called at the end, or now; what it raises is logged."""
        super().add_done_callback(functools.partial(_call_guarded, fn))

    def settle(self, value: Any, error: BaseException | None = None) -> None:
        """End it, if it has not ended: a function of the user's may have done that."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            if error is None:
                self.set_result(value)
            else:
                self.set_exception(error)

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()

    def _await(self, timeout: float | None) -> None:
        """Wait as `RpcAgent.rpc_sync` does: a worker gives its place to another one, and messages are moved."""
        if self.done():
            return
        end = time.monotonic() + (AGES if timeout is None else check_timeout(timeout))
        signal = self._workers.waits.signal()

        def tell(_: object) -> None:
            signal.set()

        is_worker = self._workers.begin_wait()
        try:
            super().add_done_callback(tell)
            while not self.done() and (left := end - time.monotonic()) > 0:
                self._workers.waits.wait(signal, min(left, _LOOK_SECONDS))
        finally:
            if is_worker:
                self._workers.end_wait()
            with self._condition, contextlib.suppress(ValueError):  # an interruption came before it was added
                if self._state == _PENDING:  # or they are being called
                    self._done_callbacks.remove(tell)  # type: ignore[attr-defined]


def _call_guarded(fn: _Callback, future: concurrent.futures.Future[Any]) -> None:
    """Call a callback. It runs where messages are received: what ends a thread would end that, and hold up others."""
    try:
        fn(future)
    except Exception:
        raise  # which `concurrent.futures` logs
    except BaseException:  # noqa: BLE001 - see above
        _log.exception("a callback of a call's future raised what ends threads")


_Value = TypeVar("_Value")


class Outcome(Generic[_Value]):
    """What something comes to.

    Other than a future it keeps nothing of whom it has told: those may hold references, whose ends count here.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: list[_Value] = []  # none, or one
        self._then: list[Callable[[_Value], object]] = []

    def set(self, value: _Value) -> None:
        """Tell what it came to; the first time counts."""
        self._set(value, is_new=True)

    def replace(self, value: _Value) -> None:
        """Have it come to something else, for those who have not been told."""
        self._set(value, is_new=False)

    def when_set(self, then: Callable[[_Value], object]) -> None:
        """Call something with it: at once if it is known, or else in the thread that sets it."""
        with self._changed:
            if not self._values:
                self._then.append(then)
                return
            value = self._values[0]
        then(value)

    def look(self) -> list[_Value]:
        """It in a list, or an empty one."""
        return self._values[:]

    def wait(self, seconds: float) -> list[_Value]:
        """The same, after no longer than that."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._values), seconds)
            return self._values[:]

    def _set(self, value: _Value, *, is_new: bool) -> None:
        with self._changed:
            if is_new and self._values:
                return
            self._values = [value]
            then, self._then = self._then, []
            self._changed.notify_all()
        for each in then:
            each(value)
