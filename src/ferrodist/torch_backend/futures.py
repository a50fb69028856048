"""Futures for torch, and the threads that complete them and run their callbacks.

[Note: callbacks]
A callback of a future may start collectives and wait for them: PowerSGD's do. Their order must not depend on which
bucket is done first on this rank. So callbacks that a thread has added run one after the other, in that order, and
their collectives run in a group of their own, beside those that the thread itself starts. Callbacks that are added in
a callback have a deeper one. They run neither in an engine's thread nor in the thread that adds them.

Python can't set an error on a torch future: torch's reducer crashes after `Future.set_exception`. So the result of a
failed operation is a `RaisingResult`, which raises whenever it is looked into.
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

from ferrodist.backends.lifecycle import ExitStage, at_exit
from ferrodist.backends.weak import snapshot_weak
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError
from ferrodist.resource_limits import naming_limits

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

_IDLE_SECONDS = 2.0

_EXIT_SECONDS = 5.0
"""How long the interpreter's exit waits for callbacks: it kills daemon threads, which in the middle of torch's code
aborts the process."""

_log = logging.getLogger(__name__)


class ThreadPool:
    """Threads for jobs that may block: as many threads as there are unfinished jobs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_idle = 0
        self._members: set[threading.Thread] = set()
        self._is_closed = False
        _all_threads.add(self)

    def run(self, job: Callable[[], None]) -> None:
        """Run a job in a thread; it must not raise. DistributedError: there can be no more threads."""
        with self._lock:
            if self._num_idle:
                self._num_idle -= 1
                self._jobs.put(job)
                return
        made = threading.Thread(target=self._work, name=self._name, daemon=True)
        with naming_limits("a callback of a future has no thread", kind=DistributedError):
            made.start()
        with self._lock:
            self._members.add(made)  # which `join` may join only now that it is started
        self._jobs.put(job)  # not passed to the thread, which would keep it alive until the thread ends

    def close(self) -> None:
        """End idle threads now, and the others when their jobs are done."""
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
            del job  # or a result would live until the next job comes
            with self._lock:
                if self._is_closed:
                    return
                self._num_idle += 1

    def _next(self) -> Callable[[], None] | None:
        with contextlib.suppress(queue.Empty):
            return self._jobs.get(timeout=_IDLE_SECONDS)
        with self._lock:
            if self._num_idle:  # no job has been put for this thread
                self._num_idle -= 1
                return None
        return self._jobs.get()


_all_threads: weakref.WeakSet[ThreadPool] = weakref.WeakSet()


def _end_threads() -> None:
    """End the threads of all pools at exit. Groups are closed by now, so no job waits in them any more."""
    deadline = Deadline(_EXIT_SECONDS)
    for threads in snapshot_weak(lambda: _all_threads):
        threads.close()
        threads.join(deadline)


at_exit(ExitStage.CALLBACK_THREADS, _end_threads)


class SerialQueue:
    """Runs jobs one after the other, in a thread that exists while there are jobs."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._is_running = False
        self._deeper: SerialQueue | None = None

    def run(self, job: Callable[[], None], threads: ThreadPool) -> None:
        """Run a job after all earlier ones; it must not raise."""
        with self._lock:
            self._jobs.append(job)
            if self._is_running:
                return
            self._is_running = True
        try:
            threads.run(self._work)
        except Exception:
            with self._lock:
                self._jobs.remove(job)
                self._is_running = False  # the next job tries again
            raise

    def deeper(self) -> SerialQueue:
        """The queue of callbacks that this queue's callbacks add; called only in its own thread."""
        if self._deeper is None:
            self._deeper = SerialQueue(self.depth + 1)
        return self._deeper

    def _work(self) -> None:
        thread_state.queue = self
        while True:
            with self._lock:
                if not self._jobs:
                    self._is_running = False
                    break
                job = self._jobs.popleft()
            try:
                job()
            except BaseException:  # noqa: BLE001 - the jobs after it must run
                _log.exception("a callback of a future failed")
        thread_state.queue = _OUTSIDE


_OUTSIDE = SerialQueue()


class _ThreadState(threading.local):
    """The queue whose job the thread runs, and the queue of the callbacks that it adds."""

    queue: SerialQueue = _OUTSIDE
    callbacks: SerialQueue | None = None

    def callback_queue(self) -> SerialQueue:
        """The queue of the callbacks that this thread adds to futures."""
        if self.queue.depth:
            return self.queue.deeper()
        if self.callbacks is None:
            self.callbacks = SerialQueue(1)
        return self.callbacks


thread_state = _ThreadState()


class RaisingResult:
    """The result of a failed operation: whatever torch does with it raises the error."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def _raise(self, *_: object) -> NoReturn:
        raise self._error

    # torch's C++ finds the tensors of a result by pickling it, or asks whether it is a tensor.
    __reduce_ex__ = __getitem__ = __iter__ = __len__ = __bool__ = _raise
    __class__ = property(_raise)


class ResultFuture(torch.futures.Future[Any]):
    """A future whose callbacks run in order: [Note: callbacks]. ``devices`` are those of its tensors, but the CPU."""

    def __init__(self, threads: ThreadPool, devices: list[int | str | torch.device]) -> None:
        super().__init__(devices=devices)
        self._threads = threads
        self._devices = devices
        self._error: BaseException | None = None

    def settle(self, outcome: Callable[[], Any]) -> None:
        """Complete the future with the result or the error of ``outcome()``."""
        try:
            result = outcome()
        except BaseException as error:  # noqa: BLE001 - wait and value raise it
            self._error = error
            result = RaisingResult(error)
        self.set_result(result)

    def wait(self) -> Any:
        """Wait for the result and return it, or raise the error."""
        return self._get(super().wait)

    def value(self) -> Any:
        """Return the result of a completed future, or raise the error."""
        return self._get(super().value)

    def _get(self, get: Callable[[], Any]) -> Any:
        try:
            return get()
        finally:
            # With devices, torch looks into the result at once, and raises the error without its class.
            if self._error is not None:
                raise self._error

    def then(self, callback: Callable[[Any], Any]) -> ResultFuture:
        """Call ``callback`` with this future when it is completed; returns a future of the callback's result."""
        following = ResultFuture(self._threads, self._devices)

        def follow() -> None:
            with contextlib.suppress(Exception):  # the callback gets the error with the result
                super(ResultFuture, self).wait()
            with self._on_device():
                following.settle(lambda: callback(self))

        thread_state.callback_queue().run(follow, self._threads)
        return following

    def _on_device(self) -> AbstractContextManager[object]:
        """Make the results' device the current one, if they are on a GPU."""
        if not self._devices or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return contextlib.nullcontext()
        return torch.cuda.device(self._devices[0])

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback`` with this future when it is completed; logs what it raises."""

        def call(future: ResultFuture) -> None:
            try:
                callback(future)
            except Exception:  # noqa: BLE001 - as torch does with it
                _log.exception("a callback of a future failed")

        self.then(call)
