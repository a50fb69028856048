"""`CallbackLevels`: which group the collectives of a thread run on, and the order of those that callbacks call.

[Note: callbacks] in `futures` says why callbacks have groups of their own.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from ferrodist.backends.subgroup import SubBackend
from ferrodist.collectives.engines.host import host_engine_of
from ferrodist.collectives.engines.select import engine_of
from ferrodist.collectives.work import CollectiveCall, execute, submit
from ferrodist.errors import DistributedError, describe_error
from ferrodist.torch_backend.futures import SerialQueue, ThreadPool, thread_state
from ferrodist.torch_backend.work import CollectiveWork, seconds_of

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend
    from ferrodist.backends.interfaces import CollectiveEngine
    from ferrodist.collectives.work import PendingCollective
    from ferrodist.torch_backend.general_calls import CheckedCall


class CallbackLevel:
    """The collectives that one depth of callbacks calls: they are ordered among each other, and have a group."""

    __slots__ = ("_callbacks", "_threads", "group")

    def __init__(self, group: Backend, threads: ThreadPool) -> None:
        self.group = group
        self._threads = threads
        self._callbacks = SerialQueue()

    def work_of(self, started: PendingCollective[Any], results: list[Any]) -> CollectiveWork:
        """Return the work of a collective that was started at this level."""
        return CollectiveWork(started, results, self._threads, self._callbacks)

    def run_all(self, calls: list[CheckedCall], opts: Any) -> CollectiveWork | None:
        """Run calls that are one for the user, with the error and the results of the last one; see `run`."""
        for call in calls:
            if call.op.device is not None:
                engine_of(self.group, call.op.device)  # which may refuse, before anything is sent
        if opts.asyncOp:
            return [self.run(call, opts) for call in calls][-1]
        # All of them, as on ranks that don't wait: each reserves a position in the group.
        errors = [error for call in calls if (error := self._error_of(call, opts)) is not None]
        if errors:
            raise errors[0]
        return None

    def _error_of(self, call: CheckedCall, opts: Any) -> DistributedError | None:
        try:
            self.run(call, opts)
        except DistributedError as error:
            return error
        return None

    def run(self, call: CheckedCall, opts: Any) -> CollectiveWork | None:
        """Run a call now and return None, or start it, as torch's options say."""
        group, device = self.group, call.op.device
        engine = host_engine_of(group) if device is None else engine_of(group, device)
        limit = seconds_of(opts.timeout)
        seconds = group.timeout if limit is None else limit
        prepared: CollectiveCall[None] = CollectiveCall(
            op=call.op, group=group, engine=engine, run=partial(self._run_at, call, engine, seconds), finish=call.finish
        )
        if opts.asyncOp:
            return self.work_of(submit(prepared), call.results)
        execute(prepared)
        return None

    def _run_at(self, call: CheckedCall, engine: CollectiveEngine, seconds: float, sequence: int) -> None:
        try:
            call.run(engine, seconds, sequence)
        except DistributedError:
            raise
        except BaseException as error:
            # Other ranks may wait for a call that was never made: there was no memory for a copy, or an interruption.
            self.group.abort(f"{call.op.operation} failed with {describe_error(error)}")
            raise


class CallbackLevels:
    """A group's levels, by the depth of callbacks: [Note: callbacks] in `futures`. Level 0 is outside of callbacks."""

    def __init__(self, group: Backend, threads: ThreadPool) -> None:
        self._group = group
        self._threads = threads
        self._levels = [CallbackLevel(group, threads)]
        self._lock = threading.Lock()

    def current(self) -> CallbackLevel:
        """The level of the calling thread's collectives."""
        depth = thread_state.queue.depth  # of callbacks; [Note: callbacks] in `futures.py`
        return self._levels[depth] if depth < len(self._levels) else self._make(depth)

    @property
    def groups(self) -> list[Backend]:
        """The levels' groups, the group itself first."""
        return [level.group for level in self._levels]

    def _make(self, depth: int) -> CallbackLevel:
        with self._lock:
            for missing in range(len(self._levels), depth + 1):
                label = f"callbacks of depth {missing}"
                name = f"{self._group.name}, {label}"
                ranks = range(self._group.world_size)
                beside = SubBackend(self._group, ranks, name=name, label=label, ends_with_parent=True)
                self._levels.append(CallbackLevel(beside, self._threads))
        return self._levels[depth]
