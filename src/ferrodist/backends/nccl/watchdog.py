"""Deadlines and failures of operations on GPUs: a thread that polls them, and the search for late ranks.

A call of a user returns when its work is enqueued, so that it may never learn of these. So the `Watchdog` polls the
outstanding operations, and when a deadline has passed, `NcclProgressProbe` asks the other ranks how many
operations they have called.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Protocol

from ferrodist.backends.lifecycle import ExitStage, close_at_exit
from ferrodist.backends.nccl.control_messages import post_persistent_recvs, send_without_waiting
from ferrodist.backends.nccl.in_flight import NO_SEQUENCE, OpInfo
from ferrodist.backends.tags import Channel, channel_tag
from ferrodist.deadline import Deadline
from ferrodist.errors import DistributedError, DistributedTimeoutError, describe_error, ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend
    from ferrodist.backends.persistent_recv import PersistentRecv

_MESSAGE = struct.Struct("<BQQ")  # message type, id of the question, operations called
_QUESTION, _ANSWER = 0, 1
_TAG = channel_tag(Channel.DEVICE_PROGRESS, 0)
_ANSWER_SECONDS = 1.0  # how long ranks have to answer. They do so at once unless they are stopped or get no CPU


class NcclProgressProbe:
    """Asks the ranks of a group how many operations they have called, and answers ``num_called()``."""

    def __init__(self, group: Backend, num_called: Callable[[], int]) -> None:
        self._num_called = num_called
        self._others = [rank for rank in range(group.world_size) if rank != group.rank]
        self._listeners: list[PersistentRecv] = []
        self._changed = threading.Condition()
        self._question_id = 0
        self._answers: dict[int, int] = {}

    def open(self, group: Backend) -> None:
        """Begin to listen to the other ranks."""
        on_messages = partial(self._on_messages, weakref.ref(group))  # listeners must not keep a dropped group alive
        self._listeners = post_persistent_recvs(group, self._others, on_messages, tag=_TAG, size_bytes=_MESSAGE.size)

    def close(self) -> None:
        """Stop listening."""
        for listener in self._listeners:
            listener.close()

    def timeout_error(self, group: Backend, info: OpInfo) -> DistributedTimeoutError:
        """The error of an overdue operation, which names the late ranks."""
        where = f"{info.what} on group {group.name!r}"
        after = f"within {info.timeout:g} s"
        advice = f"Look at what is going on there, or pass a larger timeout. Reported by rank {group.rank}."
        if info.sequence == NO_SEQUENCE:
            ranks = info.peers
            text = f"{ranks_text(ranks)} did not make the matching call {after}."
        else:
            where += f", operation {info.sequence}"
            answers = self._ask(group)
            silent = tuple(rank for rank in self._others if rank not in answers)
            late = tuple(rank for rank, num_called in sorted(answers.items()) if num_called <= info.sequence)
            ranks = late or silent
            if late:
                text = f"{ranks_text(late)} {'has' if len(late) == 1 else 'have'} not called it {after}."
            elif silent:
                does = "does" if len(silent) == 1 else "do"
                text = f"not done {after}, and {ranks_text(silent)} {does} not answer."
            else:
                text = (
                    f"all ranks have called it, and the GPUs have not done it {after}. Does a rank's GPU work on"
                    " something that takes longer, or does a message or another group's operation stand before it on"
                    " some rank's stream?"
                )
        return DistributedTimeoutError(f"{where}: {text} {advice}", ranks=ranks)

    def _ask(self, group: Backend) -> dict[int, int]:
        """The other ranks' numbers of called operations, of those that answer in time."""
        with self._changed:
            self._question_id += 1
            self._answers = {}
            question = _MESSAGE.pack(_QUESTION, self._question_id, 0)
        for rank in self._others:
            _post(group, rank, question)
        deadline = Deadline(_ANSWER_SECONDS)
        with self._changed:
            while len(self._answers) < len(self._others) and not deadline.expired:
                self._changed.wait(deadline.remaining())
            return dict(self._answers)

    def _on_messages(self, group_ref: Callable[[], Backend | None], rank: int, messages: list[bytes]) -> None:
        for message in messages:
            message_type, question_id, num_called = _MESSAGE.unpack(message)
            if message_type == _QUESTION:
                group = group_ref()
                if group is not None:
                    _post(group, rank, _MESSAGE.pack(_ANSWER, question_id, self._num_called()))
                continue
            with self._changed:
                if question_id == self._question_id:
                    self._answers[rank] = num_called
                    self._changed.notify_all()


def _post(group: Backend, rank: int, message: bytes) -> None:
    with contextlib.suppress(DistributedError):  # a rank that is gone does not answer, and needs no answer
        send_without_waiting(group, message, rank, _TAG)


_POLL_INTERVAL_SECONDS = 0.01
_JOIN_SECONDS = 3.0


class Watched(Protocol):
    """A group's operations on GPUs, as the watchdog sees them."""

    @property
    def needs_polling(self) -> bool:
        """True if an operation is not known to have ended, or a mismatch was found."""

    def poll(self, now: float) -> bool:
        """Drop operations that have ended, and abort the group for errors; whether operations are left."""

    def fail(self, error: DistributedError) -> None:
        """Abort the group."""


class Watchdog:
    """Polls the outstanding operations of a backend's groups every 10 ms, and sleeps otherwise.

    The thread, which calls ``prepare`` when it starts, starts with the first operation.
    """

    def __init__(
        self, name: str, prepare: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._prepare = prepare
        self._clock = clock
        self._changed = threading.Condition()
        self._busy: set[Watched] = set()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def watch(self, executor: Watched, *, at_once: bool = False) -> None:
        """Poll a group from now on, for as long as it needs that; does not block."""
        if executor in self._busy and not at_once:
            return
        with self._changed:
            self._busy.add(executor)
            if self._is_closed:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()  # if the system refuses a thread, the next operation tries again
                self._thread = thread
                # The interpreter ends daemon threads wherever they are, which may be inside CUDA.
                close_at_exit(ExitStage.WATCHDOGS, self)
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        self._prepare()
        while self._await_work():
            now = self._clock()
            for executor in list(self._busy):
                if not self._poll(executor, now):
                    with self._changed:
                        # `watch` does nothing while a group is in the set, so check for changes since the poll.
                        self._busy.discard(executor)
                        if executor.needs_polling:
                            self._busy.add(executor)
            executor = None  # type: ignore[assignment] # or its group would live until the next operation

    @staticmethod
    def _poll(executor: Watched, now: float) -> bool:
        try:
            return executor.poll(now)
        except Exception as error:  # noqa: BLE001 - CUDA reports a lost device by any class
            executor.fail(DistributedError(f"the GPU can't be asked how far it has come: {describe_error(error)}"))
            return False

    def _await_work(self) -> bool:
        """Sleep until the next poll is due; False once the watchdog is closed."""
        with self._changed:
            if self._busy and not self._is_closed:
                self._changed.wait(_POLL_INTERVAL_SECONDS)
            while not (self._busy or self._is_closed):
                self._changed.wait()
            return not self._is_closed
