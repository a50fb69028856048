"""Asynchronous saves: the state is copied, and a thread writes it while training goes on.

    save_async --all ranks plan, and copy--> returns      thread: write files --commit with other ranks--> future

The thread communicates over a group of its own, so that the program's collectives may come in between.
"""

from __future__ import annotations

import logging
import re
import threading
import traceback
import weakref
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.arguments import check_int
from ferrodist.backends.subgroup import SubBackend
from ferrodist.checkpoint.collective_steps import all_or_none, call_on_all, resolve_group_or_alone, run_on_rank0
from ferrodist.checkpoint.commit import remove_uncommitted
from ferrodist.checkpoint.save_distributed import Save, SaveOptions
from ferrodist.checkpoint.save_plan import DEFAULT_FILE_BYTES
from ferrodist.checkpoint.storage import join_path, open_storage
from ferrodist.deadline import Deadline, resolve_timeout
from ferrodist.errors import DistCheckpointError, DistributedError, describe_error

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

    from ferrodist.backends.base import Backend
    from ferrodist.checkpoint.save_plan import Span
    from ferrodist.checkpoint.shard_metadata import ShardMetadata

_logger = logging.getLogger(__name__)

_ALIGNMENT = 64
_STEP_FOLDER = re.compile(r"step-\d{8,}")


class StagingBuffer:
    """Host memory for a copy of one rank's data. It grows as needed and is reused by the next save."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    @torch.no_grad()
    def fill(self, views: Mapping[Span, torch.Tensor]) -> Callable[[Span], torch.Tensor]:
        """Copy the views, and return a function from a span to its copy."""
        sizes = [-(-view.nbytes // _ALIGNMENT) * _ALIGNMENT for view in views.values()]
        size = sum(sizes)
        if size > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # not both at a time
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        copies = {}
        slots = torch.split(self._memory[:size], sizes)
        for (span, view), slot in zip(views.items(), slots, strict=True):
            copies[span] = slot[: view.nbytes].view(view.dtype).view(span.shape).copy_(view)
        return copies.__getitem__


class CheckpointFuture:
    """A save in progress.

    Args:
        path: The checkpoint.
        future: Completes when all ranks have committed it.
    """

    def __init__(self, path: str, future: Future[None]) -> None:
        self.path = path
        self._future = future
        self._was_reported = False
        """True once somebody has asked for the outcome."""

    def wait(self, timeout: float | None = None) -> str:
        """Wait until the checkpoint is committed.

        Args:
            timeout: Seconds; None waits as long as the save may take.

        Returns:
            The checkpoint's path.

        Raises:
            DistCheckpointError, DistributedError: The save failed. The previous checkpoint is unchanged.
            TimeoutError: The save is not done yet; it continues.
            TypeError, ValueError: ``timeout`` is not a number of seconds.
        """
        if not wait([self._future], None if timeout is None else Deadline(timeout).remaining()).done:
            raise TimeoutError(f"the checkpoint {self.path} is not written after {timeout} s, and goes on")
        self._was_reported = True
        self._future.result()
        return self.path

    def done(self) -> bool:
        """Return whether the save has committed or failed."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """The error of the save; None if it is committed or not done yet."""
        if not self._future.done():
            return None
        self._was_reported = True
        return self._future.exception()

    def settle(self) -> None:
        """Wait until the save has ended, without raising its error."""
        wait([self._future])

    def unreported_error(self) -> DistCheckpointError | None:
        """The error of the save if it was not reported yet; it counts as reported then."""
        if not self.done() or self._was_reported or (error := self.exception()) is None:
            return None
        made = DistCheckpointError(f"an earlier checkpoint, {self.path}, failed: {describe_error(error)}", ranks=())
        made.__cause__ = error
        return made


class AsyncCheckpointer:
    """Saves checkpoints into a folder while training goes on; every rank of the group constructs it.

    Each checkpoint is a folder ``step-00000042`` in ``dir``. No other job may write to ``dir``: leftovers of killed
    saves are removed at the beginning. `save_async` returns when the state is copied; a thread writes the copy. Its
    memory is allocated by the first save.

    Args:
        dir: The folder of checkpoints, or an fsspec URL.
        group: As for `save_distributed`.
        queue: The number of saves that may wait for the one in progress, each with memory of its own; with 0
            `save_async` waits until the previous save is done.
        keep_last: As for `save_distributed`.
        max_file_bytes, check_replicas, shards, storage_options, timeout: As for `save_distributed`.

    Raises:
        DistCheckpointError: On all ranks: the folder can't be opened.
        TypeError, ValueError: An argument is wrong.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str],  # noqa: A002 - a public name
        *,
        group: Backend | None = None,
        queue: int = 0,
        keep_last: int | None = None,
        max_file_bytes: int = DEFAULT_FILE_BYTES,
        check_replicas: bool = True,
        shards: ShardMetadata | None = None,
        storage_options: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        if keep_last is not None:
            check_int("keep_last", keep_last, min=1)
        self._queue = check_int("queue", queue, min=0)
        self._group = resolve_group_or_alone(group)
        self._timeout = resolve_timeout(timeout)
        deadline = Deadline(self._timeout)
        self.dir = call_on_all(
            lambda: open_storage(dir, storage_options).url,
            "open a folder of checkpoints",
            str(dir),
            self._group,
            deadline,
        )
        """The folder of checkpoints."""

        run_on_rank0(
            lambda: _remove_unfinished(self.dir, storage_options),
            "list a folder of checkpoints",
            self.dir,
            self._group,
            deadline,
        )
        self._own_group = SubBackend(self._group, range(self._group.world_size), label="ferrodist.checkpoint")
        self._options = SaveOptions(max_file_bytes, check_replicas, shards, keep_last, storage_options)
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, thread_name_prefix="ferrodist-checkpoint")
        self._free: list[StagingBuffer] = [StagingBuffer()]
        self._lock = threading.Lock()
        self._futures: list[CheckpointFuture] = []
        """Saves that nobody has waited for, oldest first."""
        weakref.finalize(self, _log_unreported, self._futures)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """The number of ranks that save together."""
        return self._group.world_size

    def path_of(self, step: int) -> str:
        """The path of a step's checkpoint."""
        return join_path(self.dir, f"step-{check_int('step', step, min=0):08d}")

    def save_async(self, state: Any, step: int) -> CheckpointFuture:
        """Begin a save; every rank calls this. The program may change the state as soon as it returns.

        Args:
            state: As for `save_distributed`.
            step: The training step; names the checkpoint.

        Raises:
            DistCheckpointError: On all ranks: an earlier save failed whose error was not reported on one of them, or
                this one can't begin. Nothing was begun.
            DistributedError: A rank was lost or is late.
            RuntimeError: The checkpointer is closed.
        """
        if self._thread is None:
            raise RuntimeError("this AsyncCheckpointer is closed: make another one")
        path = self.path_of(step)
        self._wait_for_room(path)
        earlier_error = self._first_unreported()  # ranks may differ in which failures they know of and have reported
        deadline = Deadline(self._timeout)
        save = Save(path, self._group, self._options)
        save.prepare(state, "begin a checkpoint", deadline, earlier_error=earlier_error)
        with self._lock:
            buffer = self._free.pop() if self._free else StagingBuffer()
        try:
            with all_or_none("copy a state to be saved", path, self._group, deadline, about_arguments=False):
                find = buffer.fill(save.take_views())
        except BaseException as error:
            with self._lock:
                self._free.append(buffer)
            save.discard(error)
            raise
        future = CheckpointFuture(path, self._thread.submit(_run_without_references, self._write, save, buffer, find))
        self._futures.append(future)
        return future

    def _write(self, save: Save, buffer: StagingBuffer, find: Callable[[Span], torch.Tensor]) -> None:
        """Write and commit, in the thread."""
        try:
            # The time in the queue doesn't count.
            save.write_and_commit(self._own_group, Deadline(self._timeout), find)
            if self._options.keep_last is not None:
                save.remove_old_checkpoints(self._options.keep_last, _STEP_FOLDER)
        finally:
            with self._lock:
                self._free.append(buffer)

    def _wait_for_room(self, path: str) -> None:
        """Wait until the queue has room and no save to the path is in progress."""
        in_progress = [future for future in self._futures if not future.done()]
        for index, future in enumerate(in_progress):
            if index < len(in_progress) - self._queue or future.path == path:
                future.settle()

    def _first_unreported(self) -> DistCheckpointError | None:
        """Drop finished saves, up to the first that failed; return its error."""
        for future in [future for future in self._futures if future.done()]:
            self._futures.remove(future)
            if (error := future.unreported_error()) is not None:
                return error
        return None

    def wait(self) -> None:
        """Wait until all saves have ended.

        Raises:
            DistCheckpointError: A save failed whose error was not reported yet.
        """
        for future in self._futures:
            future.settle()
        if (error := self._first_unreported()) is not None:
            raise error

    def close(self) -> None:
        """Wait until all saves have ended, and stop the thread; raises as `wait` does. Closing again does nothing."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            self.wait()
        finally:
            thread.shutdown()
            self._own_group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self.close()
        except DistributedError as second:
            if error is None:
                raise
            _logger.warning("another error is being raised, so this one is only logged: %s", second)


def _run_without_references(write: Callable[..., None], *arguments: Any) -> None:
    """Call a function whose error must not, through its frames, keep the checkpointer and the copy's memory alive."""
    try:
        write(*arguments)
    except BaseException as error:
        del write, arguments
        _clear_frames(error)
        raise


def _clear_frames(error: BaseException) -> None:
    """Clear the local variables in the tracebacks of an error and its causes."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        each = pending.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            pending += [each.__cause__, each.__context__]


def _log_unreported(futures: Sequence[CheckpointFuture]) -> None:
    """Log unreported errors when the checkpointer is garbage collected, or the program ends without closing it."""
    for future in futures:
        if (error := future.unreported_error()) is not None:
            _logger.error("%s", error)


def _remove_unfinished(dir: str, storage_options: Mapping[str, Any] | None) -> None:  # noqa: A002
    for name in open_storage(dir, storage_options).list_folders():
        if _STEP_FOLDER.fullmatch(name):
            try:
                remove_uncommitted(open_storage(join_path(dir, name), storage_options))
            except OSError as error:
                _logger.warning("the leftovers of a save to %s can't be removed: %s", join_path(dir, name), error)
