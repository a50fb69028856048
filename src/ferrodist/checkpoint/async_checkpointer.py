"""Saving while the program goes on.

    save_async --all ranks plan, and copy--> returns      thread: write files --commit with other ranks--> future

What the thread says to other ranks goes over a group of its own, so that the program's collectives may come between.

Memory that holds a state while it is written and the program goes on changing the original.
"""

from __future__ import annotations

import logging
import re
import threading
import traceback
import weakref
from concurrent.futures import Future, ThreadPoolExecutor, wait
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.backends.subgroup import SubBackend
from ferrodist.checkpoint.api import check_keep_last, resolve_ranks
from ferrodist.checkpoint.consensus import all_or_none, call_on_all, run_on_rank0
from ferrodist.checkpoint.retention import remove_old, remove_unfinished
from ferrodist.checkpoint.save import DEFAULT_FILE_BYTES, Save
from ferrodist.checkpoint.storage import join_path, open_storage
from ferrodist.deadline import Deadline, resolve_timeout
from ferrodist.errors import DistCheckpointError, DistributedError, describe_error

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from ferrodist.backends.base import Backend
    from ferrodist.checkpoint.save_plan import Span
    from ferrodist.checkpoint.shard_metadata import ShardMetadata
    from ferrodist.checkpoint.storage import Storage

_ALIGNMENT = 64


class StagingBuffer:
    """Holds what one rank writes. It grows when it must, and is used again for the next save."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def size_bytes(self) -> int:
        """What it takes."""
        return self._memory.numel()

    @torch.no_grad()
    def fill(self, views: Mapping[Span, torch.Tensor]) -> Callable[[Span], torch.Tensor]:
        """Copy tensors.

        Args:
            views: What this rank writes.

        Returns:
            A function that gives the copies.
        """
        places: dict[Span, int] = {}
        size = 0
        for span, view in views.items():
            places[span] = size
            size += -(-view.numel() * view.itemsize // _ALIGNMENT) * _ALIGNMENT
        if size > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # not both at a time
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        copies = {}
        for span, view in views.items():
            length = prod(span.shape) * view.itemsize
            copy = self._memory[places[span] :][:length].view(view.dtype).view(span.shape)
            copies[span] = copy.copy_(view)
        return copies.__getitem__


_logger = logging.getLogger(__name__)
_OF_A_STEP = re.compile(r"step-\d{8,}")


class CheckpointFuture:
    """A checkpoint that is being written.

    Args:
        path: Where.
        future: Ends when all ranks have committed it.
    """

    def __init__(self, path: str, future: Future[None]) -> None:
        self.path = path
        self._future = future
        self._is_told = False
        """Whether somebody has asked how it ended."""

    def wait(self, timeout: float | None = None) -> str:
        """Wait until the checkpoint is committed.

        Args:
            timeout: Seconds; None waits as long as the save may take.

        Returns:
            Its path.

        Raises:
            DistCheckpointError, DistributedError: It could not be written. What was there before is as it was.
            TimeoutError: It is not done yet, and goes on.
        """
        if not wait([self._future], timeout).done:
            raise TimeoutError(f"the checkpoint {self.path} is not written after {timeout} s, and goes on")
        self._is_told = True
        self._future.result()
        return self.path

    def done(self) -> bool:
        """Whether it is committed, or has failed."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """Why it failed; None when it is committed, or not done yet."""
        if not self._future.done():
            return None
        self._is_told = True
        return self._future.exception()

    def settle(self) -> None:
        """Wait until it has ended, however it did."""
        wait([self._future])

    def untold(self) -> DistCheckpointError | None:
        """Why it failed, unless somebody knows; now somebody does."""
        if not self.done() or self._is_told or (error := self.exception()) is None:
            return None
        made = DistCheckpointError(f"an earlier checkpoint, {self.path}, failed: {describe_error(error)}", ranks=())
        made.__cause__ = error
        return made


class AsyncCheckpointer:
    """Saves checkpoints into a folder while the program goes on; every rank of the group makes it.

    Each checkpoint is a folder ``step-00000042`` in ``dir``, which is no other's to write to: what killed saves have
    left there is removed at the beginning. `save_async` returns when the state is copied; a thread writes the copy. The
    memory for it is allocated by the first save.

    Args:
        dir: The folder of checkpoints, or a URL of fsspec's.
        group: As for `save_distributed`.
        queue: How many saves may wait for the one that is being written, each with memory of its own; with 0
            `save_async` waits until the one before is written.
        keep_last: As for `save_distributed`.
        max_file_bytes, check_replicas, shards, storage_options, timeout: As for `save_distributed`.

    Raises:
        DistCheckpointError: On all ranks: the folder can't be opened.
        TypeError, ValueError: An argument is wrong.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str],  # noqa: A002 - the name it has in ferrotorch
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
        if isinstance(queue, bool) or not isinstance(queue, int) or queue < 0:
            raise ValueError(f"queue must be a number of saves from 0, not {queue!r}")
        check_keep_last(keep_last)
        self._keep_last = keep_last
        self._group = resolve_ranks(group)
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
            "look through a folder of checkpoints",
            self.dir,
            self._group,
            deadline,
        )
        self._own_group = SubBackend(self._group, range(self._group.world_size), label="ferrodist.checkpoint")
        self._queue = queue
        self._options: dict[str, Any] = {
            "max_file_bytes": max_file_bytes,
            "check_replicas": check_replicas,
            "shards": shards,
        }
        self._storage_options = storage_options
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, thread_name_prefix="ferrodist-checkpoint")
        self._free: list[StagingBuffer] = [StagingBuffer()]
        self._lock = threading.Lock()
        self._futures: list[CheckpointFuture] = []
        """Of saves that nobody has waited for, the oldest first."""
        weakref.finalize(self, _tell_failures, self._futures)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """How many ranks save together."""
        return self._group.world_size

    def path_of(self, step: int) -> str:
        """The path of a step's checkpoint."""
        return join_path(self.dir, f"step-{step:08d}")

    def save_async(self, state: Any, step: int) -> CheckpointFuture:
        """Begin a checkpoint; every rank calls this. When it returns, the program may change the state.

        Args:
            state: As for `save_distributed`.
            step: Names the checkpoint.

        Raises:
            DistCheckpointError: On all ranks: an earlier save failed and on one of them nobody has asked for its
                result, or this one can't be begun. Nothing was begun.
            DistributedError: A rank was lost, or is late.
            RuntimeError: It was closed.
        """
        if self._thread is None:
            raise RuntimeError("this AsyncCheckpointer is closed: make another one")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step must be a number from 0, not {step!r}")
        path = self.path_of(step)
        deadline = Deadline(self._timeout)

        def open_when_there_is_room() -> Storage:
            # What one rank knows to have failed, another may not have heard of, or has been asked about there.
            self._wait_for_room(path)
            return open_storage(path, self._storage_options)

        storage = call_on_all(open_when_there_is_room, "begin a checkpoint", path, self._group, deadline)
        deadline = Deadline(self._timeout)
        save = Save(state, storage, self._group, **self._options, deadline=deadline)
        with self._lock:
            buffer = self._free.pop() if self._free else StagingBuffer()
        try:
            with all_or_none("copy a state to be saved", path, self._group, deadline, about_arguments=False):
                find = buffer.fill(save.own_views())
        except BaseException as error:
            with self._lock:
                self._free.append(buffer)
            save.discard(error)
            raise
        save.forget_state()
        future = CheckpointFuture(path, self._thread.submit(_run_forgetting, self._write, save, buffer, find))
        self._futures.append(future)
        return future

    def _write(self, save: Save, buffer: StagingBuffer, find: Callable[[Span], torch.Tensor]) -> None:
        """In the thread."""
        try:
            # Those that waited for their turn have all of the time for it.
            save.run(find, self._own_group, Deadline(self._timeout))
            if self._keep_last is not None and self.rank == 0:
                remove_old(save.url, self._keep_last, self._storage_options, _OF_A_STEP)
        finally:
            with self._lock:
                self._free.append(buffer)

    def _wait_for_room(self, path: str) -> None:
        """Wait until no more saves are under way than may be, and none to a path; raise what nobody has seen."""
        under_way = [future for future in self._futures if not future.done()]
        for place, future in enumerate(under_way):
            if place < len(under_way) - self._queue or future.path == path:
                future.settle()
        self._raise_untold()

    def _raise_untold(self) -> None:
        """Forget the saves that have ended, up to the first that failed."""
        for future in [future for future in self._futures if future.done()]:
            self._futures.remove(future)
            if (error := future.untold()) is not None:
                raise error

    def wait(self) -> None:
        """Wait until all is written.

        Raises:
            DistCheckpointError: A save failed, and nobody has asked for its result.
        """
        for future in self._futures:
            future.settle()
        self._raise_untold()

    def close(self) -> None:
        """Wait until all is written, and end the thread; raises what `wait` raises. Closing twice is closing once."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except DistributedError as second:
            if error is None:
                raise
            _logger.warning("while another error is raised, so that it is told here only: %s", second)


def _run_forgetting(write: Callable[..., None], *arguments: Any) -> None:
    """Call a function; what it raises keeps nothing of what the function had.

    A future keeps its error, an error its frames, and these all that is in them: the checkpointer that has the future,
    and the memory of the copy.
    """
    try:
        write(*arguments)
    except BaseException as error:
        del write, arguments
        _forget_frames(error)
        raise


def _forget_frames(error: BaseException) -> None:
    """Clear the variables of the frames that an error has passed, and those of its causes."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            left += [each.__cause__, each.__context__]


def _tell_failures(futures: Sequence[CheckpointFuture]) -> None:
    """When nobody has a checkpointer any more, or the program ends without having closed it."""
    for future in futures:
        if (error := future.untold()) is not None:
            _logger.error("%s", error)


def _remove_unfinished(dir: str, storage_options: Mapping[str, Any] | None) -> None:  # noqa: A002
    for name in open_storage(dir, storage_options).list_folders():
        if _OF_A_STEP.fullmatch(name):
            try:
                remove_unfinished(open_storage(join_path(dir, name), storage_options))
            except OSError as error:
                _logger.warning("what is left of a save to %s can't be removed: %s", join_path(dir, name), error)
