"""Ranks as threads of this process."""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ferrodist.deadline import Deadline
from ferrodist.testing.rank_program import is_own_frame
from ferrodist.testing.supervision import Event, Stage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ferrodist.backends.base import Backend
    from ferrodist.testing.rank_program import Outcome, RankProgram

__all__ = ["ThreadRanks"]

_JOIN_SECONDS = 1.0


class ThreadRanks:
    """One thread for each rank; a `RankSet`.

    Python cannot stop a thread. One that is stuck outside the group is left behind: it is a daemon, so that it does not
    keep the process, and its rank is in the error.
    """

    def __init__(self, program: RankProgram, world_size: int) -> None:
        self._groups: dict[int, Backend] = {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._may_close = threading.Event()

        def open_group(rank: int) -> Backend:
            group = self._groups[rank] = program.open_group(rank)
            return group

        remembering = replace(program, open_group=open_group)
        self._threads = [
            threading.Thread(
                target=remembering.run,
                args=(rank, _ThreadChannel(rank, self._events, self._may_close)),
                name=f"rank {rank}",
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for thread in self._threads:
            thread.start()

    def next_event(self, timeout: float) -> Event | None:
        """See `RankSet.next_event`."""
        with suppress(queue.Empty):
            return self._events.get(timeout=timeout)
        return None

    def stack(self, rank: int) -> str:
        """See `RankSet.stack`."""
        frame = sys._current_frames().get(self._threads[rank].ident or 0)  # noqa: SLF001 - the documented way
        if frame is None:
            return "  (the thread has just ended)"
        entries = traceback.extract_stack(frame)
        while len(entries) > 1 and (entries[0].filename == threading.__file__ or is_own_frame(entries[0].filename)):
            del entries[0]
        return "".join(traceback.format_list(entries)).rstrip()

    def stop(self, ranks: Iterable[int]) -> None:
        """See `RankSet.stop`: a thread ends when its group wakes it."""
        for rank in ranks:
            _abort(self._groups.get(rank))

    def release(self) -> None:
        """See `RankSet.release`."""
        self._may_close.set()

    def dispose(self) -> None:
        """See `RankSet.dispose`."""
        if not self._may_close.is_set():  # the caller was interrupted
            for group in list(self._groups.values()):
                _abort(group)
            self._may_close.set()
        deadline = Deadline(_JOIN_SECONDS)
        for thread in self._threads:
            thread.join(deadline.remaining())

    def notes(self) -> list[str]:
        """See `RankSet.notes`."""
        return []


class _ThreadChannel:
    """A `Channel` within one process."""

    def __init__(self, rank: int, events: queue.SimpleQueue[Event], may_close: threading.Event) -> None:
        self._rank = rank
        self._events = events
        self._may_close = may_close

    def ended(self, outcome: Outcome) -> None:
        self._events.put(Event(rank=self._rank, stage=Stage.ENDED, outcome=outcome))

    def await_close(self) -> None:
        self._may_close.wait()

    def closed(self, outcome: Outcome | None) -> None:
        self._events.put(Event(rank=self._rank, stage=Stage.CLOSED, outcome=outcome))


def _abort(group: Backend | None) -> None:
    # A backend under test may do anything here; the error that is being reported matters more.
    with suppress(Exception):
        if group is not None:
            group.abort("run_ranks stopped this rank: it was not done in time")
