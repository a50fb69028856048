"""The group in which ranks make steps together: what fails on one of them fails on all."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ferrodist.backends.sub import SubBackend
from ferrodist.deadline import check_timeout
from ferrodist.errors import (
    CollectiveMismatchError,
    DistributedError,
    DistributedTimeoutError,
    PipelineError,
    describe_error,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ferrodist.backends.base import Backend
    from ferrodist.parallel.pipeline.actions import Action
    from ferrodist.parallel.pipeline.executor import Executor
    from ferrodist.parallel.pipeline.shared import SharedParameters

__all__ = ["StepGroup"]


class StepGroup:
    """A group of the pipeline's ranks, made anew after each failure: nothing of what failed can come to the new one.

    Args:
        parent: The group that the pipeline was made with.
        executor: What runs in it; knows what it was doing, and gives it up.
        shared: The parameters that ranks share, which have groups of their own.
    """

    def __init__(self, parent: Backend, executor: Executor, shared: SharedParameters) -> None:
        self._parent = parent
        self._executor = executor
        self._shared = shared
        self._group: Backend | None = None

    @contextlib.contextmanager
    def together(self, timeout: float | None) -> Iterator[tuple[Backend, float]]:
        """A block that all ranks run, with the group and the seconds to wait for one; it fails on all or none."""
        if self._group is None:
            label = "ferrodist.pipeline"
            self._group = SubBackend(self._parent, range(self._parent.world_size), label=label, name="pipeline")
            self._shared.join(self._group)
        group = self._group
        try:
            yield group, self._parent.timeout if timeout is None else check_timeout(timeout)
        except BaseException as error:
            told = self._end(group, error)
            if told is None:
                raise
            try:
                raise told from error
            finally:
                del told  # else it and this frame would hold each other, and the activations

    def _end(self, group: Backend, error: BaseException) -> DistributedError | None:
        """Tell the other ranks of an error, and give up what is under way; gives what to raise in its place."""
        action = self._executor.doing
        self._group = None
        # The others are told before anything is given up here: they would see that transfers end, and not why. They are
        # told copies, for groups keep what they are given, and what is raised here comes to hold frames.
        if isinstance(error, DistributedError) and group.failure is not None:
            told = error
        else:
            told = self._explain(error, action)
            group.abort(told.fresh())
        self._shared.abort(told.fresh())
        self._executor.forget()
        self._executor.drop_unsynced()
        return None if told is error or action is None or not isinstance(error, Exception) else told

    def _explain(self, error: BaseException, action: Action | None) -> DistributedError:
        """What other ranks are told."""
        if isinstance(error, (DistributedTimeoutError, CollectiveMismatchError, PipelineError)):
            return error
        rank = self._parent.rank
        if action is None:
            return PipelineError(f"rank {rank} could not take part in a step: {describe_error(error)}", ranks=(rank,))
        what = "forward" if action.kind.is_forward else "backward"
        return PipelineError(
            f"stage {action.stage} failed in the {what} of microbatch {action.microbatch}, on rank {rank}:"
            f" {describe_error(error)}",
            ranks=(rank,),
        )
