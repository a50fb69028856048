"""The end of groups, threads and libraries when the interpreter exits, and of groups in a forked child.

At the exit, `ExitStage` orders what is closed: users of groups before the groups, and threads after what they wait for.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
import weakref
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol, TypeVar

from ferrodist.deadline import Deadline
from ferrodist.errors import GroupClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ferrodist.errors import DistributedError

_Item = TypeVar("_Item")


def snapshot_weak(collection: Callable[[], Iterable[_Item]]) -> list[_Item]:
    """Copy a weak collection to a list: ``snapshot_weak(lambda: weak_set)``, ``snapshot_weak(weak_dictionary.items)``.

    ``list(weak_set)`` runs Python code for each element, so another thread may add one meanwhile, for which Python
    raises; the copy is then made again. Elements added after it was made are missing.
    """
    while True:
        try:
            return list(collection())
        except RuntimeError:  # noqa: PERF203 - the loop is for this
            continue


_POLL_INTERVAL_SECONDS = 0.001

_THREADS_OUT_SECONDS = 1.0
"""How long threads may take to return from compiled code once the groups that they waited for are closed."""


class ExitStage(IntEnum):
    """The order in which a process ends what is still open when its interpreter exits.

    The stages up to MPI run before handlers that the program registered with `atexit` earlier than the newest of their
    callbacks; the others, on which all stand, run where this module was imported.
    """

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


_callbacks: dict[ExitStage, list[Callable[[], object]]] = {stage: [] for stage in ExitStage}
_closeables: dict[ExitStage, weakref.WeakSet[_Closeable]] = {stage: weakref.WeakSet() for stage in ExitStage}
_groups: weakref.WeakSet[_Group] = weakref.WeakSet()


def at_exit(stage: ExitStage, callback: Callable[[], object]) -> None:
    """Call ``callback()`` at the interpreter's exit, before those of its stage that were given earlier."""
    _callbacks[stage].append(callback)
    if stage <= ExitStage.MPI:
        atexit.unregister(_run_first_stages)
        atexit.register(_run_first_stages)


def cancel_at_exit(stage: ExitStage, callback: Callable[[], object]) -> None:
    """Undo `at_exit`, if it was called."""
    _callbacks[stage] = [other for other in _callbacks[stage] if other != callback]


def close_at_exit(stage: ExitStage, closeable: _Closeable) -> None:
    """Call ``closeable.close()`` at the interpreter's exit, if it is alive then."""
    _closeables[stage].add(closeable)


def track(group: _Group) -> None:
    """Close ``group`` when the interpreter exits, and leave it to the parent in forked children."""
    _groups.add(group)


def _run_first_stages() -> None:
    """Run the callbacks of the stages up to MPI; the interpreter calls it."""
    for stage in ExitStage:
        if stage <= ExitStage.MPI:
            _run_exit_stage(stage)


@atexit.register
def _run_last_stages() -> None:
    for stage in ExitStage:
        if stage > ExitStage.MPI:
            _run_exit_stage(stage)
    _close_groups()


def _run_exit_stage(stage: ExitStage) -> None:
    closes: list[Callable[[], object]] = [item.close for item in snapshot_weak(lambda: _closeables[stage])]
    for callback in [*reversed(_callbacks[stage]), *closes]:
        try:
            callback()
        except BaseException:  # noqa: BLE001, PERF203 - as the interpreter does between the callbacks of `atexit`
            traceback.print_exc()


def _close_groups() -> None:
    """Close the groups that nobody closed, and wait until threads that were in them are out of compiled code.

    Before Python 3.14 a daemon thread that returns from there while the interpreter ends is ended where it stands,
    which terminates the process.
    """
    groups = snapshot_weak(lambda: _groups)
    for group in groups:
        with contextlib.suppress(Exception):  # one that can't be closed any more keeps none of the others open
            group.close()
    patience = Deadline(_THREADS_OUT_SECONDS)
    while groups and _has_threads_inside() and not patience.expired:
        time.sleep(_POLL_INTERVAL_SECONDS)


def _has_threads_inside() -> bool:
    """Whether another thread is in code of ours, or in compiled code that ours has called."""
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
