"""Functions that are asynchronous: a thread whose event loop runs them."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from typing import TYPE_CHECKING, Any

from ferrodist.rpc.messages import Failure, FailureKind
from ferrodist.rpc.serving import failure_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.rpc.serving import Served

__all__ = ["EventLoop"]

_log = logging.getLogger(__name__)


class EventLoop:
    """An event loop in a thread of its own, from the first call that needs it.

    Args:
        name: Of the thread.
        begin: Called in it, first of all.
    """

    def __init__(self, name: str, begin: Callable[[], None]) -> None:
        self._name = name
        self._begin = begin
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def finish(self, served: Served, value: Any) -> None:
        """Answer a call with what an awaitable comes to."""
        finishing = _finish(served, value)
        try:
            future = asyncio.run_coroutine_threadsafe(finishing, self._running())
        except RuntimeError:  # closed meanwhile
            finishing.close()
            if inspect.iscoroutine(value):
                value.close()
            served.answer(Failure(FailureKind.EXPIRED, "", "the agent was closed", ""))
        else:
            served.on_withdrawal(future.cancel)

    def close(self, seconds: float) -> None:
        """Cancel what is under way, and end the thread, which may take so long."""
        with self._lock:
            self._is_closed = True
            loop, thread = self._loop, self._thread
        if loop is not None and thread is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(loop.stop)
            if thread is not threading.current_thread():
                thread.join(seconds)

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the agent was closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._run, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        self._begin()
        try:
            while not self._is_closed:
                _run_until_stopped(loop)
                if not self._is_closed:
                    _log.error("a function in %s asked for the end of the event loop, or of the process", self._name)
        finally:
            loop.run_until_complete(asyncio.sleep(0))  # what is not begun could not be cancelled in peace
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.close()


async def _finish(served: Served, value: Any) -> None:
    try:
        found = await value
    except BaseException as error:  # noqa: BLE001 - it is the caller's, and no reason for the loop to end
        found = failure_of(error)
    served.answer(found)


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.suppress(KeyboardInterrupt, SystemExit):  # which a task may raise
        loop.run_forever()
