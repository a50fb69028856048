"""Requests: those that repeat a blocking call in a thread, and the callbacks of all."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from ferrodist.backends import request as request_module
from ferrodist.backends.request import BaseRequest, ThreadedRequest
from ferrodist.backends.tags import ANY_SOURCE
from ferrodist.errors import DistributedTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(("size_bytes", "longest"), [(0, 0.5), (10_000_000, 1.5)])
def test_attempts_of_a_threaded_request_stay_short(
    size_bytes: int, longest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelling waits for the attempt under way: however long the request has waited, only a large one is long."""
    monkeypatch.setattr(request_module, "_EARLY", 0.0)  # these attempts don't wait
    attempts: list[float] = []
    enough = threading.Event()

    def attempt(timeout: float) -> int:
        attempts.append(timeout)
        if len(attempts) >= 40:
            enough.set()
            threading.Event().wait(0.01)
        raise DistributedTimeoutError("nothing came")

    request = ThreadedRequest(attempt, 1, lambda: None, size_bytes=size_bytes)
    assert enough.wait(20)
    assert request.cancel()
    assert attempts == sorted(attempts)
    assert attempts[0] == 0.05
    assert max(attempts) == longest


def test_a_threaded_request_ends_with_a_timeout_that_came_too_early() -> None:
    """A group that has failed by a timeout raises it at once: trying again would only burn a processor."""
    request = ThreadedRequest(_raise_at_once, 1, lambda: None)
    with pytest.raises(DistributedTimeoutError, match="the group's own"):
        request.wait(10)


def _raise_at_once(timeout: float) -> int:
    raise DistributedTimeoutError(f"the group's own, not that of {timeout} s")


def test_a_cancelled_threaded_request_ends_with_its_attempt() -> None:
    """The caller has the buffer back when `cancel` returns."""
    started = threading.Event()

    def attempt(timeout: float) -> int:
        started.set()
        threading.Event().wait(timeout)
        raise DistributedTimeoutError("nothing came")

    request = ThreadedRequest(attempt, ANY_SOURCE, lambda: None)
    assert started.wait(10)
    begin = time.monotonic()
    assert request.cancel()
    assert request.done()
    assert time.monotonic() - begin < 5
    with pytest.raises(DistributedTimeoutError, match="cancelled") as caught:
        request.wait(0)
    assert caught.value.ranks == (), "no rank was waited for"


class _TakenByAnother(list["Callable[[], None]"]):
    """Callbacks of which another thread takes the last one just after somebody saw that there is one."""

    def __bool__(self) -> bool:
        had_one = len(self) > 0
        self.clear()
        return had_one


def test_a_callback_taken_by_another_thread_is_left_to_it() -> None:
    """The thread that ends a request doesn't fail when the one that adds a callback takes it back to call it."""
    request = BaseRequest(1)
    request._callbacks = _TakenByAnother([lambda: None])
    request.end()
    assert request.wait(0) == 1
