"""Gradients become their mean over the ranks while backward is still running.

[Note: round]
A *round* is one reduction of all buckets. It opens with the first gradient that autograd has accumulated, and
closes in a callback that the engine runs at the end of the same backward, before ``backward()`` returns. In
between, a bucket starts as soon as it and all buckets before it are complete, so that all ranks start them in one
order, whatever the order in which their gradients come. When the round closes, the buckets that are still
incomplete start as they are, with zeros for gradients that did not come.

A backward inside a backward (reentrant checkpointing) is a backward of its own to the engine, so the round closes
at its end, and the outer backward opens another. That is right to rounding, for the mean of what is equal on all
ranks is that value again, but it costs messages; checkpoint with ``use_reentrant=False``.

A backward that fails leaves its round open. If nothing had started, the next forward or backward forgets it. If
something had, the other ranks count on the rest of it, and the group is ended: an error on all ranks in place of
mixed-up buckets. What fails in the reduction itself (a sparse gradient, an interruption) ends the round at once, in
the same two ways.

[Note: presence]
A bucket carries one element more for each parameter: 1 from a rank that has a gradient for it, else 0. Their mean
tells a gradient that some rank has (all get the average, in which the others count as zeros) from one that no rank
has, which stays None as it would without DDP, so that optimizers skip the parameter.

Behind these it carries marks, which tell it from the buckets of other models; see [Note: marks] in `marks.py`.

[Note: steps in hooks]
An optimizer that steps in a hook, once a parameter's gradient is there, takes this rank's own gradient, for the mean
comes later: the ranks' models would drift apart. So a round remembers the version counters of all parameters from
when it opened, and the group ends with an error where one has changed by the end, or where a gradient that came is gone
again. Not seen are changes that go around the counters (fused optimizers, ``parameter.data``) and leave the gradient,
and those of the first parameter by a hook that is older than DDP's.
"""

from __future__ import annotations

import contextlib
import weakref
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable

from ferrodist.collectives.explain import explain_errors
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.collectives.reductions import async_allreduce
from ferrodist.collectives.views import elements_overlap
from ferrodist.errors import DistributedError, GroupAbortedError, UnsupportedOpError, describe_error
from ferrodist.parallel.data.buckets import plan_buckets
from ferrodist.parallel.data.marks import MARK_SIZE, check_marks, model_title, write_marks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.utils.hooks import RemovableHandle

    from ferrodist.backends.base import Backend
    from ferrodist.collectives.pending import PendingCollective

__all__ = ["Reducer"]


_ADVICE = (
    "Look for a rank that has fewer batches than the others, skips a backward, or runs the backwards of several models"
    " in another order."
)


class Reducer:
    """Averages the gradients of some parameters over a group, in buckets, during backward; see [Note: round].

    The hooks go when the reducer is collected, so that a module can be wrapped again.

    Args:
        parameters: The parameters that require grad, each once, by name; the same on all ranks.
        group: The group. In a group of one rank nothing is done.
        max_bytes: Size of a bucket.
        model: The model's number in the group, from `number_model`.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], group: Backend, *, max_bytes: float, model: int
    ) -> None:
        self.parameters = tuple(parameters.values())
        self._group = group
        self._model = model
        # Gradients come roughly in the reverse order of the parameters.
        backwards = self._backwards = self.parameters[::-1] if group.world_size > 1 else ()
        plan = plan_buckets(backwards, max_bytes)
        names = self._names = tuple(parameters)[::-1]
        self.buckets = tuple(
            _Bucket({names[place]: backwards[place] for place in bucket.members}, group.world_size) for bucket in plan
        )
        self._num_started = 0
        self._ready: set[int] = set()
        self._versions: tuple[int, ...] = ()  # of the parameters, last first, when the round opened
        self._task: int | None = None  # the engine's number of the backward whose end closes the round
        homes = {place: number for number, bucket in enumerate(plan) for place in bucket.members}
        handles = [_watch(self, parameter, place, homes[place]) for place, parameter in enumerate(backwards)]
        weakref.finalize(self, _remove, handles).atexit = False

    def reduce(self, timeout: float | None = None) -> None:
        """Close the round, or do a whole one: on return every gradient is the mean over the ranks.

        Raises:
            DistributedError: A bucket's reduction failed, and so the group; gradients may be partly averaged.
        """
        with self._failing_together():
            self._start_until(len(self.buckets), timeout)
            self._check_unchanged()
            for number, bucket in enumerate(self.buckets):
                with explain_errors(lambda number=number: self._describe(number), _ADVICE):  # type: ignore[misc]
                    bucket.wait()
                bucket.finish(self._group)
        self._forget_round()

    def fits(self) -> bool:
        """Whether the parameters still have the dtypes, devices and shapes that the buckets were made for."""
        return all(bucket.fits() for bucket in self.buckets)

    def forget_failed_backward(self) -> None:
        """Outside of a backward: drop the round that one left open when it failed.

        Raises:
            GroupAbortedError: Some of its buckets had started, so the ranks are out of step.
        """
        if self._ready and torch._C._current_graph_task_id() == -1:  # noqa: SLF001 - as in on_gradient
            self._abandon_round()

    def on_gradient(self, place: int, home: int) -> None:
        """Take note that a gradient is there, and start the buckets that are now complete; called by autograd."""
        if place in self._ready:
            self._abandon_round()
        task = torch._C._current_graph_task_id()  # noqa: SLF001 - no public name; torch's own FSDP asks the same
        if task != self._task:
            self._task = task
            Variable._execution_engine.queue_callback(self._on_backward_end)  # noqa: SLF001 - as torch's own DDP
        if not self._ready:
            self._versions = self._count_changes()
        self._ready.add(place)
        self.buckets[home].num_missing -= 1
        if self.buckets[home].num_missing == 0:
            complete = takewhile(lambda bucket: bucket.num_missing == 0, self.buckets[self._num_started :])
            with self._failing_together():
                self._start_until(self._num_started + len(list(complete)))

    def _start_until(self, end: int, timeout: float | None = None) -> None:
        """Start the buckets before ``end`` that have not started, or none of them when one can't."""
        for bucket in self.buckets[self._num_started : end]:
            bucket.check_layouts(self._group)
        while self._num_started < end:
            number = self._num_started
            self._num_started += 1  # before the start, which may be interrupted
            self.buckets[number].start(self._group, self._model, number, timeout)

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """End the round when something fails inside the block, and the group if ranks may count on buckets."""
        try:
            yield
        except BaseException as error:
            if self._num_started:
                here = f"averaging gradients failed with {describe_error(error)}"
                self._group.abort(error if isinstance(error, DistributedError) else here)
            self._forget_round()
            raise

    def _count_changes(self) -> tuple[int, ...]:
        return tuple(parameter._version for parameter in self._backwards)  # noqa: SLF001 - torch documents it so

    def _check_unchanged(self) -> None:
        """Raise if a parameter has changed since the round opened; see [Note: steps in hooks]."""
        gone = {place for place in self._ready if self._backwards[place].grad is None}
        if not self._ready or (not gone and self._count_changes() == self._versions):
            return
        changes = enumerate(zip(self._versions, self._count_changes(), strict=True))
        changed = [place for place, (before, after) in changes if before != after]
        place, what = (changed[0], "changed") if changed else (min(gone), "lost its gradient")
        raise UnsupportedOpError(
            f"parameter {self._names[place]!r} of {model_title(self._group, self._model)} {what} during backward on"
            f" rank {self._group.rank} of group {self._group.name!r}, before its gradient was averaged: an optimizer"
            " that steps in a hook makes the ranks' models drift apart. Step when backward() has returned.",
            ranks=(self._group.rank,),
        )

    def _describe(self, number: int) -> str:
        names = self.buckets[number].names
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return (
            f"It was bucket {number} of {len(self.buckets)} of {model_title(self._group, self._model)}, whose gradients"
            f" rank {self._group.rank} was averaging: {names[0]!r}{more}."
        )

    def _on_backward_end(self) -> None:
        if self._ready:  # else a backward inside this one has closed the round
            self.reduce()

    def _abandon_round(self) -> None:
        """A gradient came twice, so the backward of this round ended in an error."""
        if self._num_started:
            error = GroupAbortedError(
                f"an earlier backward of DDP on rank {self._group.rank} of group {self._group.name!r} ended in an"
                f" error after {self._num_started} of {len(self.buckets)} buckets had started, so the ranks are out"
                " of step. Make a new group, and a new DDP on it, to go on after a failed backward.",
                ranks=(self._group.rank,),
            )
            self._group.abort(error)
            raise error
        self._forget_round()

    def _forget_round(self) -> None:
        self._num_started = 0
        self._task = None
        self._ready.clear()
        for bucket in self.buckets:
            bucket.num_missing = len(bucket.parameters)


class _Bucket:
    """The flat memory in which the gradients of some parameters travel; made once and used in every round."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], world_size: int) -> None:
        self.names = tuple(parameters)
        self.parameters = tuple(parameters.values())
        self.num_missing = len(parameters)
        first = self.parameters[0]
        # Behind the gradients: which of them are there, and whose they are; see [Note: presence].
        sizes = [*(parameter.numel() for parameter in self.parameters), len(parameters), world_size * MARK_SIZE]
        self._flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        *parts, self._presence, marks = torch.split(self._flat, sizes)
        self._marks = marks.view(world_size, MARK_SIZE)
        self._views = [part.view(parameter.shape) for part, parameter in zip(parts, self.parameters, strict=True)]
        self._pending: PendingCollective[torch.Tensor] | None = None

    def fits(self) -> bool:
        """Whether each parameter still has the form of its place here."""
        return all(
            parameter.dtype is view.dtype and parameter.device == view.device and parameter.shape == view.shape
            for parameter, view in zip(self.parameters, self._views, strict=True)
        )

    def check_layouts(self, group: Backend) -> None:
        """Raise for a gradient that is not dense."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise UnsupportedOpError(
                    f"the gradient of {name!r} on rank {group.rank} of group {group.name!r} has layout"
                    f" {parameter.grad.layout}: DDP averages dense gradients, as of an embedding with sparse=False",
                    ranks=(group.rank,),
                )

    @torch.no_grad()
    def start(self, group: Backend, model: int, number: int, timeout: float | None = None) -> None:
        """Copy the gradients in and start their allreduce, marked with the numbers of the model and the bucket."""
        write_marks(self._marks, group, model, number)
        self._presence.fill_(1)
        for place, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            if parameter.grad is None:
                view.zero_()
                self._presence[place] = 0
            else:
                view.copy_(parameter.grad)
        self._pending = async_allreduce(self._flat, ReduceOp.MEAN, group=group, out=self._flat, timeout=timeout)

    def wait(self) -> None:
        """Wait for the averages."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        pending.wait()

    @torch.no_grad()
    def finish(self, group: Backend) -> None:
        """Copy the averages out, once it is sure that the ranks averaged the same."""
        check_marks(self._marks, group)
        for place, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            if parameter.grad is not None and _is_writable(parameter.grad):
                parameter.grad.copy_(view)
            elif parameter.grad is not None or self._presence[place]:
                parameter.grad = torch.empty_like(parameter).copy_(view)


def _is_writable(gradient: torch.Tensor) -> bool:
    """Whether elements can be set one by one: not in what a user expanded, or made under inference_mode."""
    return not gradient.is_inference() and (gradient.is_contiguous() or not elements_overlap(gradient))


def _watch(reducer: Reducer, parameter: torch.nn.Parameter, place: int, home: int) -> RemovableHandle:
    # A weak reference, or the parameter would keep the reducer, which keeps the parameter.
    reference = weakref.ref(reducer)

    def notice(_: torch.Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.on_gradient(place, home)

    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(notice)  # type: ignore[no-untyped-call]
    return handle


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
