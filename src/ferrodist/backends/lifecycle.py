"""Looking through collections of weak references that other threads add to.

What becomes of groups that are open when their process forks or ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Protocol, TypeVar

from ferrodist.deadline import Deadline
from ferrodist.errors import GroupClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ferrodist.errors import DistributedError

_Held = TypeVar("_Held")


def snapshot_weak(collection: Callable[[], Iterable[_Held]]) -> list[_Held]:
    """What a weak collection holds: ``snapshot_weak(lambda: weak_set)``, ``snapshot_weak(weak_dictionary.items)``.

    ``list(weak_set)`` runs Python code for each element, so another thread may add one meanwhile, for which Python
    raises. The look is taken again then. What is added after it was taken is not in it: who adds must see to that.
    """
    while True:
        try:
            return list(collection())
        except RuntimeError:  # noqa: PERF203 - the loop is for this
            continue


_POLL_SECONDS = 0.001

_THREADS_OUT_SECONDS = 1.0
"""How long threads may take to come back from compiled code, once the groups that they waited for are closed."""


class _Tracked(Protocol):
    """A group as it is seen here."""

    def close(self) -> None:
        """Leave the group; does nothing where it is closed."""

    def leave_to_parent(self, error: DistributedError) -> None:
        """In a forked child: the group stays the parent's, and using it here raises ``error``."""


_live: weakref.WeakSet[_Tracked] = weakref.WeakSet()


def track(group: _Tracked) -> None:
    """Close ``group`` when the interpreter exits, and leave it to the parent in forked children."""
    _live.add(group)


@atexit.register
def _close_all() -> None:
    """Close the groups that nobody closed, and wait until threads that were in them are out of compiled code.

    Before Python 3.14 a daemon thread that comes back from there while the interpreter ends is ended where it stands,
    which terminates the process.
    """
    groups = snapshot_weak(lambda: _live)
    for group in groups:
        with contextlib.suppress(Exception):  # one that can't be closed any more keeps none of the others open
            group.close()
    patience = Deadline(_THREADS_OUT_SECONDS)
    while groups and _has_threads_inside() and not patience.expired:
        time.sleep(_POLL_SECONDS)


def _has_threads_inside() -> bool:
    """Whether another thread is in code of ours, or in what that has called and Python doesn't see."""
    own = threading.get_ident()
    frames = sys._current_frames()  # noqa: SLF001 - "for specialized purposes", of which this is one
    names = [frame.f_globals.get("__name__", "") for thread, frame in frames.items() if thread != own]
    return any(name.startswith("ferrodist.") for name in names)


def _leave_to_parent() -> None:
    error = GroupClosedError("this group belongs to the process that this one was forked from: make one here")
    for group in list(_live):
        group.leave_to_parent(error)
    _live.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
