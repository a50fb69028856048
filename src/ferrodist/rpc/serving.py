"""Calls that come in: a table of functions, and the threads that call them.

[Note: who takes a call]
To wake a thread costs more than a small call. So one worker that has nothing to do is awake for a while, and moves
messages meanwhile: what it hears itself it serves itself (`Workers._lead`). And while a worker is at something, what
comes waits for it: only when it has taken nothing for a tick others are woken, by the overseer. A worker that waits for
a call of its own does not count, nor against `num_workers`: ranks that call each other back and forth would else run
out of workers and wait for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import threading
import traceback
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any

from ferrodist.deadline import Deadline
from ferrodist.errors import describe_error
from ferrodist.rpc.messages import Call, Failure, FailureKind

if TYPE_CHECKING:
    from collections.abc import Callable

    Answer = Callable[[Any], None]
    """Takes what a call has come to, a value or a `Failure`; must not raise."""

    from ferrodist.rpc.calls import Waits

__all__ = ["Functions", "Served", "Workers", "serving"]

_log = logging.getLogger(__name__)

_LEAVE_SECONDS = 5.0
"""How long all threads together may take to end what they are in."""

_AGES = 1e6  # seconds
_LEAD_SECONDS = 0.001
_TICK_SECONDS = 0.001
_MOST_IDLE_TICKS = 5


serving: contextvars.ContextVar[Any] = contextvars.ContextVar("ferrodist-rpc-agent")
"""The agent that serves what a thread is at."""


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

    def classes(self) -> set[type]:
        """Those that are classes."""
        return {function for function in list(self._functions.values()) if isinstance(function, type)}

    def names(self) -> list[str]:
        """All names."""
        return sorted(self._functions)


class Served(ABC):
    """A call that has come, until it is answered."""

    __slots__ = ("_cancel", "function", "is_withdrawn")

    def __init__(self) -> None:
        self.function: Callable[..., Any] | None = None  # in place of the one of the call's name
        self.is_withdrawn = False
        self._cancel: Callable[[], object] | None = None

    @abstractmethod
    def read(self) -> Call:
        """Read what has come; may raise anything."""

    @abstractmethod
    def answer(self, found: Any) -> None:
        """Take what the call has come to, a value or a `Failure`; must not raise."""

    def withdraw(self) -> None:
        """Its caller waits no more: it is not begun, and what is asynchronous in it is cancelled."""
        self.is_withdrawn = True
        if self._cancel is not None:
            self._cancel()

    def on_withdrawal(self, cancel: Callable[[], object]) -> None:
        """Have something called by `withdraw`, at least once if that has been called."""
        self._cancel = cancel
        if self.is_withdrawn:
            cancel()


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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None

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
        """This thread waits for a call of its own; whether it is a worker, and has to `end_wait`."""
        if not hasattr(self._local, "is_worker"):
            return False
        with self._lock:
            self._num_running -= 1
            self._num_waiting += 1
            if self._queue:
                self._stir()
        return True

    def end_wait(self) -> None:
        """This worker goes on."""
        with self._lock:
            self._num_running += 1
            self._num_waiting -= 1

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
        if self._loop is not None and self._loop_thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            if self._loop_thread is not threading.current_thread():
                self._loop_thread.join(_LEAVE_SECONDS)

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
            number = len(self._threads)
            thread = threading.Thread(target=self._work, name=f"{self._name}-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()
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
        self._local.is_worker = True
        serving.set(self._agent)
        while True:
            try:
                served = self._queue.popleft()
            except IndexError:
                if not self._rest():
                    return
                continue
            self._num_taken += 1  # a hint: two threads may count as one
            self._serve(served)
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
            signal.wait(_AGES)
        return False

    # Calls.

    def _serve(self, served: Served) -> None:
        try:
            call = served.read()
        except Exception as error:  # noqa: BLE001 - it is the caller's
            served.answer(Failure(FailureKind.UNDECODABLE, "", str(error), ""))
            return
        function = served.function or self._functions.find(call.name)
        if function is None:
            known = ", ".join(self._functions.names()) or "none"
            text = f"there is no function {call.name!r} here: register it; there are {known}"
            served.answer(Failure(FailureKind.UNKNOWN, "", text, ""))
            return
        if served.is_withdrawn:
            text = f"{call.name!r} waited for its turn until its caller had given up"
            served.answer(Failure(FailureKind.EXPIRED, "", text, ""))
            return
        try:
            value = function(*call.arguments, **call.keywords)
        except BaseException as error:  # noqa: BLE001 - it is the caller's, and no reason for this thread to end
            served.answer(_failure(error))
            return
        if inspect.isawaitable(value):
            self._finish_later(served, value)
        else:
            served.answer(value)

    def _finish_later(self, served: Served, value: Any) -> None:
        finishing = self._finish(served, value)
        try:
            future = asyncio.run_coroutine_threadsafe(finishing, self._event_loop())
        except RuntimeError:  # closed meanwhile
            finishing.close()
            if inspect.iscoroutine(value):
                value.close()
            served.answer(Failure(FailureKind.EXPIRED, "", "the agent was closed", ""))
        else:
            served.on_withdrawal(future.cancel)

    async def _finish(self, served: Served, value: Any) -> None:
        try:
            found = await value
        except BaseException as error:  # noqa: BLE001 - it is the caller's, and no reason for the loop to end
            found = _failure(error)
        served.answer(found)

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                if self._is_closed:
                    raise RuntimeError("the agent was closed")
                self._loop = asyncio.new_event_loop()
                self._loop_thread = threading.Thread(target=self._run_loop, name=f"{self._name}-async", daemon=True)
                self._loop_thread.start()
            return self._loop

    def _has_run(self) -> bool:
        """Run the event loop until it is stopped; False where a task that a function started has ended it."""
        assert self._loop is not None
        try:
            self._loop.run_forever()
        except (KeyboardInterrupt, SystemExit):
            return False
        return True

    def _run_loop(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        try:
            while not self._has_run():
                _log.error("a task in %s asked for the end of the process", self._name)
        finally:
            self._loop.run_until_complete(asyncio.sleep(0))  # what is not begun could not be cancelled in peace
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()


def _failure(error: BaseException) -> Failure:
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    text = "".join(traceback.format_exception(type(error), error, frames))
    return Failure(FailureKind.RAISED, type(error).__name__, describe_error(error), text)
