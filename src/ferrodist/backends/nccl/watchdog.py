"""How far the ranks have come with what they call: who is late is asked when somebody is.

The thread that looks after what is on streams: deadlines, and failures of which no call would learn.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Protocol

from ferrodist.backends.lifecycle import ExitStage, close_at_exit
from ferrodist.backends.nccl.streams import NO_PLACE
from ferrodist.backends.tags import Channel, channel_tag
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, DistributedTimeoutError, describe_error, ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend
    from ferrodist.backends.nccl.streams import OpInfo
    from ferrodist.backends.request import PersistentRecv

_MESSAGE = struct.Struct("<BQQ")  # kind, number of the question, operations called
_QUESTION, _ANSWER = 0, 1
_TAG = channel_tag(Channel.DEVICE_PROGRESS, 0)

_ANSWER_SECONDS = 1.0
"""How long ranks have to answer. They do at once, but for those that have been stopped, or get no processor."""


class NcclLivenessProbe:
    """Asks the ranks of a group how many operations they have called, and answers that.

    Args:
        group: The group.
        num_called: Gives this rank's number.
    """

    def __init__(self, group: Backend, num_called: Callable[[], int]) -> None:
        self._num_called = num_called
        self._rank = group.rank
        self._listeners: list[PersistentRecv] = []
        self._changed = threading.Condition()
        self._num_questions = 0
        self._answers: dict[int, int] = {}

    def open(self, group: Backend) -> None:
        """Begin to listen to all others."""
        itself = weakref.ref(group)  # the listeners must not keep a group that was dropped
        for rank in range(group.world_size):
            if rank != self._rank:
                hear = partial(self._hear, rank, itself)
                self._listeners.append(group.listen(rank, _MESSAGE.size, hear, self._nothing_more, tag=_TAG))

    def close(self) -> None:
        """Hear nothing more."""
        for listener in self._listeners:
            listener.close()

    def late_error(self, group: Backend, launched: OpInfo) -> DistributedTimeoutError:
        """The error of an operation whose time has passed."""
        where = f"{launched.what} on group {group.name!r}"
        after = f"within {launched.timeout:g} s"
        advice = f"Look at what is going on there, or pass a larger timeout. Reported by rank {group.rank}."
        if launched.sequence == NO_PLACE:
            others = ranks_text(launched.peers)
            return DistributedTimeoutError(
                f"{where}: {others} did not make the matching call {after}. {advice}", ranks=launched.peers
            )
        where += f", operation {launched.sequence}"
        answers = self._ask(group)
        silent = tuple(rank for rank in range(group.world_size) if rank != group.rank and rank not in answers)
        late = tuple(rank for rank, number in sorted(answers.items()) if number <= launched.sequence)
        if late:
            has = "has" if len(late) == 1 else "have"
            return DistributedTimeoutError(
                f"{where}: {ranks_text(late)} {has} not called it {after}. {advice}", ranks=late
            )
        if silent:
            does = "does" if len(silent) == 1 else "do"
            return DistributedTimeoutError(
                f"{where}: not done {after}, and {ranks_text(silent)} {does} not answer. {advice}", ranks=silent
            )
        return DistributedTimeoutError(
            f"{where}: all ranks have called it, and the GPUs have not done it {after}. Does a rank's GPU work on"
            " something that takes longer, or does a message or another group's operation stand before it on some"
            f" rank's stream? {advice}"
        )

    def _ask(self, group: Backend) -> dict[int, int]:
        """What the others answer in time, by rank."""
        with self._changed:
            self._num_questions += 1
            self._answers = {}
            question = _MESSAGE.pack(_QUESTION, self._num_questions, 0)
        for rank in range(group.world_size):
            if rank != group.rank:
                _send(group, rank, question)
        deadline = Deadline(_ANSWER_SECONDS)
        with self._changed:
            while len(self._answers) < group.world_size - 1 and not deadline.expired:
                self._changed.wait(deadline.remaining())
            return dict(self._answers)

    def _hear(self, rank: int, itself: Callable[[], Backend | None], messages: list[bytes]) -> None:
        for message in messages:
            kind, number, count = _MESSAGE.unpack(message)
            if kind == _QUESTION:
                group = itself()
                if group is not None:
                    _send(group, rank, _MESSAGE.pack(_ANSWER, number, self._num_called()))
                continue
            with self._changed:
                if number == self._num_questions:
                    self._answers[rank] = count
                    self._changed.notify_all()

    def _nothing_more(self, error: DistributedError) -> None:
        """The group has ended, which the watch sees by itself."""


def _send(group: Backend, rank: int, message: bytes) -> None:
    with contextlib.suppress(DistributedError):  # a rank that is gone does not answer, and needs no answer
        if not group.try_send(message, rank, tag=_TAG):
            group.isend(message, rank, tag=_TAG)


_PERIOD_SECONDS = 0.01
_JOIN_SECONDS = 3.0


class WatchedGroup(Protocol):
    """A group's work on GPUs, as the watch sees it."""

    @property
    def has_outstanding(self) -> bool:
        """Whether something has been launched whose end has not been seen."""

    def look(self, now: float) -> bool:
        """Let go of what has ended, and end the group for what is late; whether anything is left."""

    def fail(self, error: DistributedError) -> None:
        """End the group."""


class Watchdog:
    """Looks at the outstanding work of a backend's groups every 10 ms, and sleeps while there is none.

    The thread starts with the first work.

    Args:
        name: The thread's.
        begin: Called in it at first.
        clock: Where the time comes from.
    """

    def __init__(
        self, name: str, begin: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._begin = begin
        self._clock = clock
        self._changed = threading.Condition()
        self._busy: set[WatchedGroup] = set()
        self._reports: deque[tuple[WatchedGroup, DistributedError]] = deque()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def look_after(self, launcher: WatchedGroup) -> None:
        """Look at a group's work from now on, until there is none."""
        if launcher in self._busy:
            return
        with self._changed:
            self._busy.add(launcher)
            self._wake()

    def report(self, launcher: WatchedGroup, error: DistributedError) -> None:
        """Have the group ended in the watch's thread: who reports must not block."""
        with self._changed:
            self._reports.append((launcher, error))
            self._wake()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

    def _wake(self) -> None:
        if self._is_closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
            # The interpreter ends daemon threads where they stand, which may be in CUDA.
            close_at_exit(ExitStage.WATCHDOGS, self)
        self._changed.notify_all()

    def _run(self) -> None:
        self._begin()
        while self._await_work():
            with contextlib.suppress(IndexError):
                while True:
                    launcher, error = self._reports.popleft()
                    launcher.fail(error)
            now = self._clock()
            for launcher in list(self._busy):
                if not self._look(launcher, now):
                    with self._changed:
                        # What was launched since the look has not been seen: `look_after` found the group here.
                        self._busy.discard(launcher)
                        if launcher.has_outstanding:
                            self._busy.add(launcher)
            launcher = None  # type: ignore[assignment] # or its group would live until the next work

    @staticmethod
    def _look(launcher: WatchedGroup, now: float) -> bool:
        try:
            return launcher.look(now)
        except Exception as error:  # noqa: BLE001 - CUDA tells by any class that a device is lost
            launcher.fail(DistributedError(f"the GPU can't be asked how far it has come: {describe_error(error)}"))
            return False

    def _await_work(self) -> bool:
        """Sleep until there is something to look at; False when the watch was closed."""
        with self._changed:
            if self._busy and not self._reports and not self._is_closed:
                self._changed.wait(_PERIOD_SECONDS)
            while not (self._busy or self._reports or self._is_closed):
                self._changed.wait()
            return not self._is_closed
