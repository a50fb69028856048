"""The end of groups, threads and libraries when the interpreter exits, and of groups in a forked child.

At the exit, `ExitStage` orders what is closed: users of groups before the groups, and threads after what they wait for.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import sys
import threading
import time
import traceback
import weakref
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Protocol

from ferrodist.backends.weak import snapshot_weak
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, GroupClosedError

if TYPE_CHECKING:
    from collections.abc import Callable


_POLL_INTERVAL_SECONDS = 0.001

_THREADS_OUT_SECONDS = 1.0
"""How long threads may take to return from compiled code once the groups that they waited for are closed."""


class ExitStage(IntEnum):
    """The order in which a process ends what is still open when its interpreter exits."""

    RPC_AGENTS = 0
    TORCH_GROUPS = 1
    DEFAULT_GROUP = 2
    MPI = 3
    CALLBACK_THREADS = 4
    OPERATION_QUEUES = 5
    WATCHDOGS = 6
    GROUPS = 7


class _Closeable(Protocol):
    def close(self) -> None: ...


class _Group(_Closeable, Protocol):
    def leave_to_parent(self, error: DistributedError) -> None:
        """Make every use of the group raise ``error`` in a forked child; the parent keeps the group."""


if TYPE_CHECKING:
    Callback = Callable[[], object]

_callbacks: dict[ExitStage, list[tuple[Callback, Callback]]] = {stage: [] for stage in ExitStage}  # and their handlers
_closeables: dict[ExitStage, weakref.WeakSet[_Closeable]] = {stage: weakref.WeakSet() for stage in ExitStage}
_groups: weakref.WeakSet[_Group] = weakref.WeakSet()


def at_exit(stage: ExitStage, callback: Callback) -> None:
    """Call ``callback()`` at the interpreter's exit, after all of earlier stages.

    Callbacks of the stages up to `ExitStage.MPI` run as `atexit` handlers: those that the program registers later run
    before them. Callbacks of later stages run when all of the earlier stages have.
    """
    # No closure over its own entry: such a cycle would keep the callback's object after `cancel_at_exit`.
    handler = partial(_run_at_exit, stage, callback)
    _callbacks[stage].append((callback, handler))
    if stage <= ExitStage.MPI:
        atexit.register(handler)


def cancel_at_exit(stage: ExitStage, callback: Callback) -> None:
    """Undo `at_exit`, if it was called."""
    for entry in _callbacks[stage].copy():
        if entry[0] == callback:
            _callbacks[stage].remove(entry)
            atexit.unregister(entry[1])


def close_at_exit(stage: ExitStage, closeable: _Closeable) -> None:
    """Call ``closeable.close()`` at the interpreter's exit, if it is alive then."""
    _closeables[stage].add(closeable)


def track(group: _Group) -> None:
    """Close ``group`` when the interpreter exits, and leave it to the parent in forked children."""
    _groups.add(group)


def _run_at_exit(stage: ExitStage, callback: Callback) -> None:
    _run_stages_before(stage)
    for entry in _callbacks[stage].copy():
        if entry[0] == callback:
            _callbacks[stage].remove(entry)
            callback()
            return


def _run_stages_before(end: ExitStage) -> None:
    for stage in itertools.takewhile(lambda stage: stage < end, ExitStage):
        callbacks = [callback for callback, _ in reversed(_callbacks[stage])]
        _callbacks[stage].clear()
        callbacks += [item.close for item in snapshot_weak(_closeables[stage].copy)]
        for callback in callbacks:
            try:
                callback()
            except BaseException:  # noqa: BLE001, PERF203 - as the interpreter does between the callbacks of `atexit`
                traceback.print_exc()


@atexit.register
def _run_all_stages() -> None:
    """Run all stages, then close the groups and wait until threads that were in them are out of compiled code.

    Before Python 3.14 a daemon thread that returns from there while the interpreter ends is ended where it stands,
    which terminates the process.
    """
    _run_stages_before(ExitStage.GROUPS)
    groups = snapshot_weak(lambda: _groups)
    for group in groups:
        with contextlib.suppress(Exception):  # one that can't be closed any more keeps none of the others open
            group.close()
    patience = Deadline(_THREADS_OUT_SECONDS)
    while groups and _has_threads_inside() and not patience.expired:
        time.sleep(_POLL_INTERVAL_SECONDS)


def _has_threads_inside() -> bool:
    """Return whether another thread is in code of ours, or in compiled code that ours has called."""
    own = threading.get_ident()
    frames = sys._current_frames()  # noqa: SLF001 - "for specialized purposes", of which this is one
    names = [frame.f_globals.get("__name__", "") for thread, frame in frames.items() if thread != own]
    return any(name.startswith("ferrodist.") for name in names)


def _leave_to_parent() -> None:
    error = GroupClosedError("this group belongs to the process that this one was forked from: make one here")
    for group in list(_groups):
        group.leave_to_parent(error)
    _groups.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
