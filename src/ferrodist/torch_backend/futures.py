"""Futures of torch's, and the threads that complete them.

[Note: callbacks]
A callback of a future may start collectives and wait for them: PowerSGD's do. Which of them starts first must not
depend on which bucket is done first here. So callbacks that a thread has added run one after the other, in that order,
and their collectives are in a group of their own, beside those that the thread itself starts. Callbacks that are added
in a callback have a deeper one. No thread of an engine runs any, nor does the thread that adds them.

A future of torch's can't be told of an error from Python: what `Future.set_exception` sets makes torch's reducer crash.
So a `RaisingResult` is its result, which raises whenever somebody looks into it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ferrodist.backends.lifecycle import ExitStage, at_exit, snapshot_weak
from ferrodist.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

_IDLE_SECONDS = 2.0

_EXIT_SECONDS = 5.0
"""How long the interpreter's exit waits for callbacks: it ends daemon threads where they stand, which in the middle of
torch's code aborts the process."""

_log = logging.getLogger(__name__)


class ThreadPool:
    """Threads for what may block; as many as are blocked at a time.

    Args:
        name: Of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_idle = 0
        self._members: set[threading.Thread] = set()
        self._is_closed = False
        _all_threads.add(self)

    def run(self, job: Callable[[], None]) -> None:
        """Run something in a thread; it must not raise."""
        with self._lock:
            self._jobs.put(job)  # and not into the thread, which would hold it until it ends
            if self._num_idle:
                self._num_idle -= 1
                return
            made = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._members.add(made)
        made.start()

    def close(self) -> None:
        """End the threads that have nothing to do, and the others when they are done."""
        with self._lock:
            self._is_closed = True
            for _ in range(self._num_idle):
                self._jobs.put(None)
            self._num_idle = 0

    def join(self, deadline: Deadline) -> None:
        """Wait for the threads to end."""
        with self._lock:
            members = list(self._members)
        for member in members:
            member.join(deadline.remaining())

    def _work(self) -> None:
        try:
            self._run_all()
        finally:
            with self._lock:
                self._members.discard(threading.current_thread())

    def _run_all(self) -> None:
        while (job := self._next()) is not None:
            job()
            del job  # or a result would live until the next one comes
            with self._lock:
                if self._is_closed:
                    return
                self._num_idle += 1

    def _next(self) -> Callable[[], None] | None:
        with contextlib.suppress(queue.Empty):
            return self._jobs.get(timeout=_IDLE_SECONDS)
        with self._lock:
            if self._num_idle:  # nobody has counted on this thread
                self._num_idle -= 1
                return None
        return self._jobs.get()


_all_threads: weakref.WeakSet[ThreadPool] = weakref.WeakSet()


def _end_threads() -> None:
    """Groups are closed by now, so what waits in them has ended."""
    deadline = Deadline(_EXIT_SECONDS)
    for threads in snapshot_weak(lambda: _all_threads):
        threads.close()
        threads.join(deadline)


at_exit(ExitStage.CALLBACK_THREADS, _end_threads)


class SerialQueue:
    """What runs one after the other, in a thread while there is something.

    Args:
        depth: Of the callbacks that it runs; 0 where it runs none.
    """

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._is_running = False
        self._deeper: SerialQueue | None = None

    def run(self, job: Callable[[], None], threads: ThreadPool) -> None:
        """Run something after all that was given before; it must not raise."""
        with self._lock:
            self._jobs.append(job)
            if self._is_running:
                return
            self._is_running = True
        threads.run(self._work)

    def deeper(self) -> SerialQueue:
        """For callbacks that are added in this one's; only its own thread asks."""
        if self._deeper is None:
            self._deeper = SerialQueue(self.depth + 1)
        return self._deeper

    def _work(self) -> None:
        here.line = self
        while True:
            with self._lock:
                if not self._jobs:
                    self._is_running = False
                    break
                job = self._jobs.popleft()
            try:
                job()
            except BaseException:  # noqa: BLE001 - those after it are to run
                _log.exception("a callback of a future failed")
        here.line = _OUTSIDE


_OUTSIDE = SerialQueue()


class _ThreadState(threading.local):
    """What a thread is doing."""

    line: SerialQueue = _OUTSIDE
    callbacks: SerialQueue | None = None

    def line_of_callbacks(self) -> SerialQueue:
        """Runs what this thread adds to futures."""
        if self.line.depth:
            return self.line.deeper()
        if self.callbacks is None:
            self.callbacks = SerialQueue(1)
        return self.callbacks


here = _ThreadState()


class RaisingResult:
    """The result of what has failed: what torch does with results raises.

    Args:
        error: What it has failed with.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def _raise(self, *_: object) -> NoReturn:
        raise self._error

    # C++ takes tensors out of a result by pickling it, or asks whether it is one.
    __reduce_ex__ = __getitem__ = __iter__ = __len__ = __bool__ = _raise
    __class__ = property(_raise)


class ResultFuture(torch.futures.Future[Any]):
    """A future whose callbacks run as the note says.

    Args:
        threads: Who run them.
        devices: Where its tensors are, but for the host.
    """

    def __init__(self, threads: ThreadPool, devices: list[int | str | torch.device]) -> None:
        super().__init__(devices=devices)
        self._threads = threads
        self._devices = devices
        self._error: BaseException | None = None

    def settle(self, outcome: Callable[[], Any]) -> None:
        """Complete it with what something returns or raises."""
        try:
            result = outcome()
        except BaseException as error:  # noqa: BLE001 - it is for those who ask
            self._error = error
            result = RaisingResult(error)
        self.set_result(result)

    def wait(self) -> Any:
        """Its result, when it is there; raises what it has failed with."""
        return self._look(super().wait)

    def value(self) -> Any:
        """Its result, which is there; raises what it has failed with."""
        return self._look(super().value)

    def _look(self, get: Callable[[], Any]) -> Any:
        try:
            return get()
        finally:
            # With devices, torch looks into a result at once: then it raises an error without its class.
            if self._error is not None:
                raise self._error

    def then(self, callback: Callable[[Any], Any]) -> ResultFuture:
        """Call something with this future when it is completed; returns a future for what that returns."""
        following = ResultFuture(self._threads, self._devices)

        def follow() -> None:
            with contextlib.suppress(Exception):  # the callback asks for the result, and learns of it
                super(ResultFuture, self).wait()
            with self._on_device():
                following.settle(lambda: callback(self))

        here.line_of_callbacks().run(follow, self._threads)
        return following

    def _on_device(self) -> AbstractContextManager[object]:
        """Inside of this the current device is that of the results, if they are on one."""
        if not self._devices or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return contextlib.nullcontext()
        return torch.cuda.device(self._devices[0])

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """As `then`, where nobody needs to know what it returns; what it raises is logged."""

        def call(future: ResultFuture) -> None:
            try:
                callback(future)
            except Exception:  # noqa: BLE001 - as torch does with it
                _log.exception("a callback of a future failed")

        self.then(call)
