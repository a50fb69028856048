"""The result of a call that is under way."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from typing import TYPE_CHECKING, Any

from ferrodist.rpc.waits import AGES

if TYPE_CHECKING:
    from collections.abc import Generator

    from ferrodist.rpc.outcome import Outcome
    from ferrodist.rpc.waits import Waiters

__all__ = ["Future"]


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

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()

    def _await(self, timeout: float | None) -> None:
        """Wait as `RpcAgent.rpc_sync` does: a worker gives its place to another one, and messages are moved."""
        if self.done():
            return
        end = time.monotonic() + (AGES if timeout is None else timeout)
        signal = self._workers.waits.signal()

        def tell(_: object) -> None:
            signal.set()

        self.add_done_callback(tell)
        is_worker = self._workers.begin_wait()
        try:
            while not self.done() and (left := end - time.monotonic()) > 0:
                self._workers.waits.wait(signal, left)
        finally:
            if is_worker:
                self._workers.end_wait()
            with self._condition, contextlib.suppress(ValueError):  # it has been called
                self._done_callbacks.remove(tell)  # type: ignore[attr-defined]
