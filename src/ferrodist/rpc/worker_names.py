"""What ranks are called, beside their numbers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ferrodist.errors import GroupClosedError, InvalidRankError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.deadline import Deadline

_LOOK_SECONDS = 0.2
"""Between two looks whether a rank may still come, of which nobody tells."""


class Names:
    """The names of ranks, as each has told.

    A name is that of the rank which is there; of lost ones only where none is, so that calls of it raise at once.

    Args:
        is_complete: Whether no name can come any more that is not known; called under a lock, and takes none.
    """

    def __init__(self, is_complete: Callable[[], bool] = lambda: False) -> None:
        self._is_complete = is_complete
        self._changed = threading.Condition()
        self._names: dict[int, str] = {}
        self._told: set[int] = set()
        self._lost: dict[str, int] = {}  # which rank had a name last
        self._is_closed = False

    def close(self) -> None:
        """Let nobody wait for a name any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def add(self, rank: int, name: str) -> None:
        """A rank has told its name; an empty one for none."""
        with self._changed:
            self._told.add(rank)
            if name:
                self._names[rank] = name
            self._changed.notify_all()

    def has_told(self, rank: int) -> bool:
        """Whether a rank that is there has told its name, or that it has none. Takes no lock."""
        return rank in self._told

    def joined(self, rank: int) -> None:
        """A rank is there, for the first time or again, and has not told its name."""
        with self._changed:
            self._forget(rank)

    def lost(self, rank: int) -> None:
        """A rank is gone."""
        with self._changed:
            name = self._names.get(rank)
            self._forget(rank)
            if name is not None:
                self._lost[name] = rank
                self._changed.notify_all()

    def find(self, name: str, deadline: Deadline) -> int:
        """The rank of a name, waiting for one that has not been there yet.

        Raises:
            InvalidRankError: There is none in time, or none once all ranks are there, or more than one.
            GroupClosedError: The agent is closed.
        """
        return self._find(name, deadline, among_lost=True)

    def wait_for(self, name: str, deadline: Deadline) -> int:
        """The rank of a name, waiting also for the next one of a name whose rank was lost. Raises as `find`."""
        return self._find(name, deadline, among_lost=False)

    def _find(self, name: str, deadline: Deadline, *, among_lost: bool) -> int:
        def is_known() -> bool:
            is_there = name in self._names.values() or (among_lost and name in self._lost)
            return self._is_closed or is_there or self._is_complete()

        with self._changed:
            while not (is_known() or deadline.expired):
                self._changed.wait(min(deadline.remaining(), _LOOK_SECONDS))
            if self._is_closed:
                raise GroupClosedError("the agent was closed")
            ranks = [rank for rank, each in self._names.items() if each == name]
            if not ranks and among_lost and name in self._lost:
                return self._lost[name]
            if len(ranks) == 1:
                return ranks[0]
            known = ", ".join(f"{each!r} (rank {rank})" for rank, each in sorted(self._names.items())) or "none"
        if ranks:
            raise InvalidRankError(f"ranks {sorted(ranks)} are all called {name!r}: give each a name of its own")
        when = f"was there within {deadline.timeout:g} s" if deadline.expired else "is there, and none can come"
        raise InvalidRankError(
            f"no rank called {name!r} {when}; the names are {known}: agents are given theirs when they are made"
        )

    def _forget(self, rank: int) -> None:
        self._names.pop(rank, None)
        self._told.discard(rank)
        self._lost = {name: each for name, each in self._lost.items() if each != rank}
