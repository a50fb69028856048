"""The threads that serve calls.

[Note: who takes a call]
To wake a thread costs more than a small call. So one worker that has nothing to do is awake for a while, and moves
messages meanwhile: what it hears itself it serves itself (`Workers._lead`). And while a worker is at something, what
comes waits for it: only when it has taken nothing for a tick others are woken, by the overseer. A worker that waits for
a call of its own does not count, nor against `num_workers`: ranks that call each other back and forth would else run
out of workers and wait for each other.

Functions that are asynchronous: a thread whose event loop runs them.

What the threads of an agent wait with.

What must be done soon, but by no thread that notices it: a thread that does it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import queue
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from ferrodist.deadline import Deadline
from ferrodist.rpc.messages import Failure, FailureKind
from ferrodist.rpc.server import Served, failure_of, serve, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ferrodist.backends.request import WaitEvent
    from ferrodist.rpc.server import Functions

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


AGES = 1e6
"""Seconds: of a wait that something else ends."""


class Waits:
    """What the threads of an agent wait with, one `WaitEvent` each.

    Args:
        make: Makes one.
    """

    def __init__(self, make: Callable[[], WaitEvent]) -> None:
        self._make = make
        self._local = threading.local()
        self._lock = threading.Lock()
        self.num_waiting = 0  # for calls that they have made; they move messages

    def signal(self) -> WaitEvent:
        """This thread's. It waits for one thing at a time, so there is one."""
        try:
            return self._local.signal  # type: ignore[no-any-return]
        except AttributeError:
            found = self._local.signal = self._make()
            return found

    def wait(self, signal: WaitEvent, seconds: float) -> bool:
        """Wait for what a call brings; see `WaitEvent.wait`."""
        with self._lock:
            self.num_waiting += 1
        try:
            return signal.wait(seconds)
        finally:
            with self._lock:
                self.num_waiting -= 1


class Waiters(Protocol):
    """Whose threads wait for calls."""

    @property
    def waits(self) -> Waits:
        """What they wait with."""

    def begin_wait(self) -> bool:
        """This thread waits; whether it has to `end_wait`."""

    def end_wait(self) -> None:
        """It goes on."""


_LEAVE_SECONDS = 5.0
"""How long all threads together may take to end what they are in."""

_LEAD_SECONDS = 0.001
_TICK_SECONDS = 0.001
_MOST_IDLE_TICKS = 5

_NO_WAITS = -1
"""Of a thread that must not wait."""


class Workers:
    """Threads that call functions, in the order in which calls come; asynchronous ones run in one event loop.

    Args:
        agent: Whose they are.
        functions: What may be called.
        num_workers: How many threads may be at a call at once.
        name: Of the threads.
        waits: What threads wait with.
    """

    def __init__(self, agent: object, functions: Functions, num_workers: int, name: str, waits: Waits) -> None:
        self._agent = agent
        self._functions = functions
        self._num_workers = num_workers
        self._name = name
        self.waits = waits
        self._queue: deque[Served] = deque()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._num_running = 0  # workers that are at a call, or about to look for one
        self._num_waiting = 0  # workers that wait for calls of their own
        self._num_taken = 0
        self._num_moving = 0
        self._idle: list[threading.Lock] = []  # each is released to wake a worker
        self._leader: Any = None  # the signal of the one that is awake with nothing to do
        self._is_closed = False
        self._local = threading.local()
        self._is_overseen = False
        self._oversee_now = threading.Lock()
        self._oversee_now.acquire()
        self._overseer = threading.Thread(target=self._oversee, name=f"{name}-overseer", daemon=True)
        self._overseer.start()
        self._event_loop = EventLoop(f"{name}-async", self._begin_loop)

    def submit(self, served: Served) -> None:
        """Have a call served; does not wait."""
        with self._lock:
            self._queue.append(served)
            self._stir()

    def attend(self, change: int) -> None:
        """So many more large messages are on their way; while there are any, somebody moves them."""
        with self._lock:
            self._num_moving += change
            if change > 0 and not (self._num_running or self._leader or self.waits.num_waiting):
                self._wake_one()

    def begin_wait(self) -> bool:
        """This thread waits for a call of its own; whether it is a worker, and has to `end_wait`.

        Raises:
            RuntimeError: It runs what is asynchronous, all of which would wait.
        """
        num_waits = getattr(self._local, "num_waits", None)
        if num_waits is None:
            return False
        if num_waits == _NO_WAITS:
            raise RuntimeError("an async function must not wait for a call as others do: await agent.rpc_async(...)")
        self._local.num_waits = num_waits + 1
        if num_waits:
            return True
        with self._lock:
            self._num_running -= 1
            self._num_waiting += 1
            if self._queue:
                self._stir()
        return True

    def end_wait(self) -> None:
        """This worker goes on."""
        self._local.num_waits -= 1
        if self._local.num_waits:
            return
        with self._lock:
            self._num_running += 1
            self._num_waiting -= 1

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Within it a thread waits for what calls bring: another one serves in its place, if it is a worker."""
        is_worker = self.begin_wait()
        try:
            yield
        finally:
            if is_worker:
                self.end_wait()

    def close(self) -> None:
        """Serve what is there, and end the threads. A thread that is in a call that doesn't end is left behind."""
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
        patience = Deadline(_LEAVE_SECONDS)  # for all: each of them may be in a call that doesn't end
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(patience.remaining())
        self._event_loop.close(_LEAVE_SECONDS)

    def _begin_loop(self) -> None:
        self._local.num_waits = _NO_WAITS

    # Who is awake. Both of these hold the lock.

    def _stir(self) -> None:
        """See that somebody takes what is in the queue: at once, or the overseer sees to it."""
        if self._num_running == 0:
            self._wake_one()
        elif not self._is_overseen:
            self._is_overseen = True
            self._call_overseer()

    def _call_overseer(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has been called
            self._oversee_now.release()

    def _wake_one(self) -> bool:
        """One more worker runs, if there may be one."""
        if self._leader is not None:
            self._leader.set()
            self._leader = None
        elif self._idle:
            self._idle.pop().release()
        elif len(self._threads) - self._num_waiting < self._num_workers and not self._is_closed:
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
                _log.exception(
                    "there is no thread for the calls of %s: those that there are do what they can", self._name
                )
                return False
            return True
        else:
            return False
        self._num_running += 1
        return True

    def _oversee(self) -> None:
        """Wake more workers where those that run take nothing for a tick."""
        while True:
            self._oversee_now.acquire()
            seen, num_idle_ticks = -1, 0
            while num_idle_ticks < _MOST_IDLE_TICKS or self._queue:
                if self._is_closed:
                    return
                self._oversee_now.acquire(timeout=_TICK_SECONDS)
                num_idle_ticks = 0 if self._queue else num_idle_ticks + 1
                if self._queue and self._num_taken == seen:
                    with self._lock:
                        for _ in range(len(self._queue)):
                            if not self._wake_one():
                                break
                seen = self._num_taken
            with self._lock:
                if self._is_closed:  # the call for that may have ended the last tick
                    return
                self._is_overseen = False
                if self._queue:
                    self._stir()

    def _work(self) -> None:
        self._local.num_waits = 0
        serving.set(self._agent)
        while True:
            try:
                served = self._queue.popleft()
            except IndexError:
                if not self._rest():
                    return
                continue
            self._num_taken += 1  # a hint: two threads may count as one
            try:
                serve(served, self._functions, self._event_loop.finish)
            except BaseException:  # noqa: BLE001 - whatever a function has given, the next call is to be served
                _log.exception("a call of %s was not answered", self._name)
            del served  # arguments may be large

    def _rest(self) -> bool:
        """Wait until there may be something to do; False when there will be nothing any more."""
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
                self._leader = self.waits.signal()
            else:
                self._idle.append(sleeper)
        if leads and not self._lead(sleeper):
            return True
        sleeper.acquire()
        return True

    def _lead(self, sleeper: threading.Lock) -> bool:
        """Be awake for a while; whether nothing has come, and this worker is among the idle ones."""
        signal = self.waits.signal()
        while True:
            was_set = signal.wait(_LEAD_SECONDS)
            with self._lock:
                if self._leader is not signal:  # this one was woken
                    break
                if not was_set and (not self._num_moving or self._is_closed):
                    self._leader = None
                    self._idle.append(sleeper)
                    return True
        if not was_set:
            signal.wait(AGES)
        return False


class Errands:
    """Does one thing after the other, in the order in which they are put.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, errand: Callable[[], object]) -> None:
        """Have something done; it should not wait for anything that is put here.

        Takes no lock of Python's, so that the garbage collector may call it wherever it comes by.
        """
        self._queue.put(errand)

    def close(self) -> None:
        """Do what is there, and end the thread; what is put after that is not done."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_LEAVE_SECONDS)

    def _run(self) -> None:
        while (errand := self._queue.get()) is not None:
            try:
                errand()
            except Exception:  # noqa: BLE001 - the others are to be done all the same
                _log.exception("an errand of %s failed", self._thread.name)
            del errand  # what it holds may be what somebody waits for the end of
