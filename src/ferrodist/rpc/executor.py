"""The threads of an agent: a pool for calls, an event loop for coroutines, and a serial queue.

[Note: the ordinary call]
A thread that receives a call submits it (`Executor.submit`), which puts it into the queue. If no worker runs, one is
woken or started (`_ensure_worker`), and takes the call from the queue (`_work`); otherwise one that runs takes it next.
A worker that finds the queue empty becomes the leader, or sleeps if there is one (`_rest`). One that waits for a call
of its own says so (`begin_wait`, `end_wait`), so that another runs meanwhile. All else is for calls that take long.

[Note: who takes a call]
Waking a thread costs more than a small call. So one idle worker, the leader, stays awake for a while and moves messages
meanwhile; a call that it receives it serves itself (`Executor._lead`). While a worker is busy, new calls wait for it:
only when no task has been taken for a tick does the overseer wake others. A worker that waits for a call of its own
does not count against `num_workers`: ranks that call each other back and forth would otherwise run out of workers and
wait for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from ferrodist.deadline import Deadline

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Coroutine, Iterator

    from ferrodist.backends.persistent_recv import WaitEvent

_log = logging.getLogger(__name__)

FOREVER_SECONDS = 1e6
"""Timeout of a wait that something else ends."""

_JOIN_SECONDS = 5.0  # how long all threads of a pool together may take to end their tasks at its close

_LEAD_SECONDS = 0.001
_TICK_SECONDS = 0.001
_MAX_IDLE_TICKS = 5
_RETRY_SECONDS = 0.2  # between two attempts to start the only worker

_MUST_NOT_WAIT = -1  # `num_waits` of the event loop's thread


class EventLoop:
    """An event loop in its own thread, started by the first coroutine."""

    def __init__(self, name: str, initialize: Callable[[], object]) -> None:
        self._name = name
        self._initialize = initialize
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def run(self, coroutine: Coroutine[Any, Any, None]) -> concurrent.futures.Future[None]:
        """Run a coroutine; raises RuntimeError if the loop is closed, or there can be no thread for it."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the agent was closed")
            if self._loop is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=self._run, args=(loop,), name=self._name, daemon=True)
                try:
                    thread.start()
                except BaseException:
                    loop.close()
                    raise
                self._loop, self._thread = loop, thread
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def cancel(self, future: concurrent.futures.Future[None]) -> None:
        """Cancel a coroutine of `run`, once it has begun: before, it could not say that it was cancelled."""
        with self._lock:
            if self._loop is not None and not self._is_closed:  # `close` cancels all
                self._loop.call_soon_threadsafe(self._loop.call_soon, future.cancel)

    def close(self, timeout: float) -> None:
        """Cancel all coroutines, and wait for the thread's end."""
        with self._lock:
            self._is_closed = True
            loop, thread = self._loop, self._thread
        if loop is not None and thread is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(loop.stop)
            if thread is not threading.current_thread():
                thread.join(timeout)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        self._initialize()
        try:
            while not self._is_closed:
                with contextlib.suppress(KeyboardInterrupt, SystemExit):  # which a task may raise
                    loop.run_forever()
                if not self._is_closed:
                    _log.error("a function in %s asked for the end of the event loop, or of the process", self._name)
        finally:
            loop.run_until_complete(asyncio.sleep(0))  # a task that has not begun could not be cancelled cleanly
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.close()


class WaitEvents:
    """The wait events of an agent's threads, one for each thread."""

    def __init__(self, make: Callable[[], WaitEvent]) -> None:
        self._make = make
        self._local = threading.local()
        self._lock = threading.Lock()
        self.num_waiting = 0  # threads that wait for their calls, and move messages meanwhile

    def current(self) -> WaitEvent:
        """This thread's event. A thread waits for one thing at a time, so one is enough."""
        try:
            return self._local.event  # type: ignore[no-any-return]
        except AttributeError:
            event = self._local.event = self._make()
            return event

    def wait(self, event: WaitEvent, timeout: float) -> bool:
        """Wait for the result of a call; see `WaitEvent.wait`, by which waiting may move messages."""
        with self._lock:
            self.num_waiting += 1
        try:
            return event.wait(timeout)
        finally:
            with self._lock:
                self.num_waiting -= 1


class Executor:
    """A pool of threads that runs tasks in their order, and coroutines in an event loop."""

    def __init__(
        self, num_workers: int, name: str, wait_events: WaitEvents, initialize: Callable[[], object] = lambda: None
    ) -> None:
        self._num_workers = num_workers
        self._name = name
        self.wait_events = wait_events
        self._initialize = initialize
        self._queue: deque[Callable[[], object]] = deque()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._num_running = 0  # workers that run a task, or are about to look for one
        self._num_waiting = 0  # workers that wait for calls of their own
        self._num_taken = 0
        self._num_transfers = 0
        self._idle: list[threading.Lock] = []  # each is released to wake a worker
        self._leader: WaitEvent | None = None  # the event of the worker that is awake with nothing to do
        self._is_closed = False
        self._local = threading.local()
        self._is_overseen = False
        self._oversee_now = threading.Lock()
        self._oversee_now.acquire()
        self._overseer = threading.Thread(target=self._oversee, name=f"{name}-overseer", daemon=True)
        self._overseer.start()
        self.event_loop = EventLoop(f"{name}-async", lambda: setattr(self._local, "num_waits", _MUST_NOT_WAIT))

    def submit(self, task: Callable[[], object]) -> None:
        """Have a worker run a task; does not wait."""
        with self._lock:
            self._queue.append(task)
            self._ensure_worker()

    def add_transfers(self, change: int) -> None:
        """Count the large messages under way; while there are any, some thread stays awake to move them."""
        with self._lock:
            self._num_transfers += change
            if change > 0 and not (self._num_running or self._leader or self.wait_events.num_waiting):
                self._wake_one()

    def begin_wait(self) -> bool:
        """Note that this thread waits for its own call; returns whether it is a worker, and has to `end_wait`."""
        num_waits = getattr(self._local, "num_waits", None)
        if num_waits is None:
            return False
        if num_waits == _MUST_NOT_WAIT:
            raise RuntimeError("an async function must not wait for a call as others do: await agent.rpc_async(...)")
        self._local.num_waits = num_waits + 1
        if num_waits:
            return True
        with self._lock:
            self._num_running -= 1
            self._num_waiting += 1
            if self._queue:
                self._ensure_worker()
        return True

    def end_wait(self) -> None:
        """Note that this worker goes on."""
        self._local.num_waits -= 1
        if self._local.num_waits:
            return
        with self._lock:
            self._num_running += 1
            self._num_waiting -= 1

    @contextlib.contextmanager
    def waiting(self, *, also_in_event_loop: bool = False) -> Iterator[None]:
        """Within this block the thread waits: another worker runs tasks in its place.

        In the event loop's thread that is an error; with ``also_in_event_loop`` it holds up all coroutines.
        """
        if also_in_event_loop and getattr(self._local, "num_waits", None) == _MUST_NOT_WAIT:
            yield
            return
        is_worker = self.begin_wait()
        try:
            yield
        finally:
            if is_worker:
                self.end_wait()

    def close(self) -> None:
        """Run what is queued, and end the threads. A thread whose task does not end is left behind."""
        with self._lock:
            self._is_closed = True
            threads = [*self._threads, self._overseer]
            idle, self._idle = self._idle, []
            leader, self._leader = self._leader, None
            self._num_running += len(idle) + (leader is not None)
        for sleeper in idle:
            sleeper.release()
        if leader is not None:
            leader.set()
        self._call_overseer()
        deadline = Deadline(_JOIN_SECONDS)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(deadline.remaining())
        self.event_loop.close(_JOIN_SECONDS)

    # Who is awake. The lock is held in `_ensure_worker` and `_wake_one`.

    def _ensure_worker(self) -> None:
        """Have a worker take what is queued: at once, or when the overseer finds it untouched."""
        if self._num_running == 0 and self._wake_one():
            return
        if not self._is_overseen:
            self._is_overseen = True
            self._call_overseer()

    def _call_overseer(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has been called
            self._oversee_now.release()

    def _wake_one(self) -> bool:
        """Wake or start one more worker, if there may be one."""
        if self._leader is not None:
            self._leader.set()
            self._leader = None
        elif self._idle:
            self._idle.pop().release()
        elif len(self._threads) - self._num_waiting < self._num_workers and not self._is_closed:
            return self._start_thread()
        else:
            return False
        self._num_running += 1
        return True

    def _start_thread(self) -> bool:
        thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
        # Counted first: an interrupt may leave `start` when the thread runs already.
        self._threads.append(thread)
        self._num_running += 1
        try:
            thread.start()
        except BaseException as error:
            if thread not in threading.enumerate():
                self._threads.remove(thread)
                self._num_running -= 1
            if not isinstance(error, RuntimeError):
                raise
            _log.exception("no thread can be started for the calls of %s: they wait for one that is there", self._name)
            return False
        return True

    def _oversee(self) -> None:
        """Wake more workers when the running ones take no task for a tick."""
        while True:
            self._oversee_now.acquire()
            seen, num_idle_ticks = -1, 0
            while num_idle_ticks < _MAX_IDLE_TICKS or self._queue:
                if self._is_closed:
                    return
                self._oversee_now.acquire(timeout=_TICK_SECONDS)
                num_idle_ticks = 0 if self._queue else num_idle_ticks + 1
                if self._queue and self._num_taken == seen:
                    with self._lock:
                        for _ in range(len(self._queue)):
                            if not self._wake_one():
                                break
                        is_stuck = self._num_running == 0
                    if is_stuck:  # no thread could be started
                        self._oversee_now.acquire(timeout=_RETRY_SECONDS)
                seen = self._num_taken
            with self._lock:
                if self._is_closed:  # the call for that may have ended the last tick
                    return
                self._is_overseen = False
                if self._queue:
                    self._ensure_worker()

    def _work(self) -> None:
        self._local.num_waits = 0
        self._initialize()
        while True:
            try:
                task = self._queue.popleft()
            except IndexError:
                if not self._rest():
                    return
                continue
            self._num_taken += 1  # a hint: two threads may count as one
            try:
                task()
            except BaseException:  # noqa: BLE001 - whatever a function has returned, the next call is to be served
                _log.exception("a call of %s was not answered", self._name)
            del task  # arguments may be large

    def _rest(self) -> bool:
        """Wait until there may be a task; False when this worker is to end."""
        sleeper = threading.Lock()
        sleeper.acquire()
        with self._lock:
            if self._queue:
                return True
            if self._is_closed or len(self._threads) - self._num_waiting > self._num_workers:
                self._num_running -= 1
                self._threads.remove(threading.current_thread())
                return False
            self._num_running -= 1
            leads = self._leader is None
            if leads:
                self._leader = self.wait_events.current()
            else:
                self._idle.append(sleeper)
        if leads and not self._lead(sleeper):
            return True
        sleeper.acquire()
        return True

    def _lead(self, sleeper: threading.Lock) -> bool:
        """Stay awake for a while; True when nothing has come, and this worker is among the idle ones.

        The wait itself moves messages; see `WaitEvent.wait`.
        """
        event = self.wait_events.current()
        while True:
            was_set = event.wait(_LEAD_SECONDS)
            with self._lock:
                if self._leader is not event:  # this one was woken
                    break
                if not was_set and (not self._num_transfers or self._is_closed):
                    self._leader = None
                    self._idle.append(sleeper)
                    return True
        if not was_set:
            event.wait(FOREVER_SECONDS)
        return False


class SerialExecutor:
    """A background thread that runs queued tasks in order."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], object]) -> None:
        """Queue a task; it should not wait for another task of this queue.

        Takes no Python lock, so finalizers may call this wherever the garbage collector runs.
        """
        self._queue.put(task)

    def close(self) -> None:
        """Run what is queued, and end the thread; tasks that are queued later are not run."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                task()
            except Exception:  # noqa: BLE001 - the other tasks are to be run all the same
                _log.exception("a task of %s failed", self._thread.name)
            del task  # it may hold the last reference to something whose end others wait for
