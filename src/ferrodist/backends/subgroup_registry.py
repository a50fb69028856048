"""The sub-groups of a group, of which the garbage collector may take any at any time."""

from __future__ import annotations

from collections import deque
from weakref import WeakSet, finalize

from ferrodist.backends.base import Backend


class SubgroupRegistry(WeakSet[Backend]):
    """The sub-groups that the program still references, and the ids of those that it has dropped."""

    def __init__(self) -> None:
        super().__init__()
        # The garbage collector adds to it, in any thread and at any moment: hence no lock.
        self.dropped: deque[int] = deque()

    def add(self, item: Backend) -> None:
        """Add a sub-group."""
        super().add(item)
        finalize(item, self.dropped.append, item.group_id).atexit = False
