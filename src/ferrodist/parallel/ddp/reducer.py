"""Averaging of gradients while backward is still running: the reducer, and its round of one backward.

[Note: round]
A *round* is one reduction of all buckets. It opens when autograd first reaches one of the model's outputs or
parameters, and closes in a callback that the engine runs at the end of that backward, before ``backward()`` returns. In
between, a bucket starts as soon as it and all buckets before it are complete, so that all ranks start them in one
order, whatever the order of their gradients. When the round closes, the remaining buckets start as they are, with zeros
for gradients that did not arrive.

A backward inside the backward (re-entrant checkpointing) has an id of its own. The hook on the outputs opens the round
in the outer one, so that it lasts as long as that; but gradients of one parameter may now arrive more than once, so
buckets wait for the end, unless ``static_graph`` has counted how often each arrives. Where no output was found, a round
opens and closes with the inner backward; that is right to rounding, since the mean of values that are equal on all
ranks is that value again, but it costs messages.

A backward that fails leaves its round open. The engine then drops its callbacks, which the next round notices. If no
bucket had started, the round is discarded. If one had, the other ranks count on the rest, and the group is aborted: an
error on all ranks in place of mixed-up buckets. A failure of the reduction itself (a sparse gradient, an interruption)
ends the round at once, with the same two outcomes.

[Note: indices]
A *param_id* is a parameter's index when the reducer was made, a *position* its index in the present order of gradients,
a *bucket_index* the index of its bucket, and *index_in_bucket* its index there.

[Note: rebuilding buckets]
The first buckets suppose that gradients arrive in the reverse order of the parameters. The first round notes the actual
order. That of rank 0, or in a join of a rank that has a batch, becomes the order of all ranks: buckets that fill in the
order of arrival start as early as possible. They serve all later rounds, and only they are in symmetric memory, so that
it is allocated once.

[Note: steps in hooks]
An optimizer that steps in a hook, once a parameter's gradient is ready, uses this rank's own gradient, since the mean
comes later: the ranks' models would drift apart. So a round remembers the version counters of all parameters when it
opens, and the group is aborted with an error if one has changed by the end, or if a gradient has disappeared again.
Changes that bypass the counters (fused optimizers, ``parameter.data``) and leave the gradient are not seen, nor those
of the first parameter where no output was found, since then its gradient opens the round.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from functools import partial
from typing import TYPE_CHECKING

import torch

from ferrodist.backends.weak import weak_method
from ferrodist.collectives.all_gather import all_gather
from ferrodist.collectives.objects import all_gather_object
from ferrodist.errors import (
    CollectiveMismatchError,
    DistributedError,
    GroupAbortedError,
    UnsupportedOpError,
    add_error_context,
    describe_error,
    ranks_text,
)
from ferrodist.parallel.backward_hooks import check_dense, current_backward_id, hook_gradients
from ferrodist.parallel.ddp.autograd_hooks import ParameterHooks
from ferrodist.parallel.ddp.bucket import compute_bucket_assignment, make_buckets
from ferrodist.parallel.ddp.fingerprints import model_title
from ferrodist.torch_private.autograd import queue_callback, version_of
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.parallel.ddp.config import Options

_FIRST_BYTES = 1 << 20  # size limit of the first bucket, which starts first

_ADVICE = (
    "Look for a rank that has fewer batches than the others (see join()), skips a backward or is in no_sync(), or runs"
    " the backward passes of several models in another order."
)


class BackwardRound:
    """The gradients that have arrived in one backward, and the buckets that are complete; see [Note: round].

    A static round learns at first how often each gradient arrives, and relies on it.
    """

    def __init__(self, bucket_indices: Sequence[int], *, is_static: bool) -> None:
        self._bucket_indices = bucket_indices
        self._is_static = is_static
        self._num_expected = [1] * len(bucket_indices)  # gradients of each position in a backward
        self.has_learned = not is_static
        self.unused: frozenset[int] = frozenset()  # positions that the outputs of the forwards so far don't depend on
        self.counts: dict[int, int] = {}  # number of gradients that have arrived, by position
        self.versions: tuple[int, ...] = ()  # the parameters' version counters when the round opened
        self._num_missing: list[int] = []
        self._backward_id = -1
        self._is_nested = False
        self._end_callback: weakref.ref[partial[None]] | None = None

    @property
    def is_open(self) -> bool:
        """True if a backward is under way, or has failed."""
        return self._end_callback is not None

    @property
    def has_failed(self) -> bool:
        """True if the backward that opened the round has ended without closing it."""
        return self._end_callback is not None and self._end_callback() is None

    def enter(self, on_end: Callable[[], None]) -> bool:
        """Open the round unless it is open, with a callback at the end of the backward; True if this opened it."""
        backward_id = current_backward_id()
        if self._end_callback is not None:
            self._is_nested |= backward_id != self._backward_id
            return False
        end = partial(on_end)  # alive as long as the engine's backward
        queue_callback(end)
        self._end_callback, self._backward_id = weakref.ref(end), backward_id
        self._num_missing = [0] * (max(self._bucket_indices, default=-1) + 1)
        for position, bucket_index in enumerate(self._bucket_indices):
            self._num_missing[bucket_index] += self._expected_count(position) > 0
        return True

    def count_gradient(self, position: int) -> None:
        """Count a gradient that has arrived."""
        count = self.counts[position] = self.counts.get(position, 0) + 1
        if count == self._expected_count(position):
            self._num_missing[self._bucket_indices[position]] -= 1

    def end_of_complete(self, first: int) -> int:
        """Index of the first bucket, from ``first`` on, that may not start yet."""
        if not self.has_learned or (self._is_nested and not self._is_static):
            return first
        while first < len(self._num_missing) and self._num_missing[first] == 0:
            first += 1
        return first

    def find_missing(self) -> int | None:
        """A position whose gradient arrived less often than in the learned round, if any."""
        if not (self._is_static and self.has_learned and self.is_open):
            return None
        expected = enumerate(self._num_expected)
        return next((position for position, count in expected if self.counts.get(position, 0) < count), None)

    def close(self, *, is_complete: bool) -> None:
        """Close the round; a complete one teaches a static graph its counts."""
        if is_complete and not self.has_learned and self.counts:
            self._num_expected = [self.counts.get(position, 0) for position in range(len(self._bucket_indices))]
            self.has_learned = True
        self.counts = {}
        self.unused = frozenset()
        self._is_nested = False
        self._end_callback = None

    def inherit_counts(self, other: BackwardRound, old_positions: Sequence[int]) -> None:
        """Take over the counts that ``other`` has learned, given each position's old one."""
        self._num_expected = [other._num_expected[position] for position in old_positions]
        self.has_learned = other.has_learned

    def _expected_count(self, position: int) -> int:
        return 0 if position in self.unused else self._num_expected[position]


class Reducer:
    """Average the gradients of some parameters over a group, in buckets, during backward; see [Note: round]."""

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], group: Backend, options: Options, *, model_id: int
    ) -> None:
        self.parameters = tuple(parameters.values())
        self.is_syncing = options.overlap_comm  # True if backward averages gradients; else `DDP.sync_gradients` does
        self.before_round: Callable[[], tuple[int, float]] | None = None
        """In `DDP.join`: announces a round, and returns a rank that has a batch and the factor for averages."""
        self.after_round: Callable[[int], None] | None = None
        """Called on all ranks when all gradients are averaged, with a rank that has a batch."""
        self.has_unreduced_gradients = False
        self._group, self._options, self._model_id = group, options, model_id
        self._title = model_title(group, model_id)
        self._root, self._scale = 0, 1.0
        self._is_rebuilt = False
        self._num_started = 0
        self._has_forwards = False  # since the last round
        # Gradients arrive roughly in the reverse order of the parameters.
        reverse = dict(reversed(list(parameters.items()))) if group.world_size > 1 else {}
        self._build_buckets(reverse, is_symmetric=False)
        self._positions = list(range(len(self._ordered)))  # by param_id
        self.hooks = ParameterHooks(
            reverse,
            weak_method(self.on_accumulated),
            weak_method(self.on_ready),
            title=self._title,
        )

    def _build_buckets(self, parameters: Mapping[str, torch.nn.Parameter], *, is_symmetric: bool) -> None:
        self._names, self._ordered = tuple(parameters), tuple(parameters.values())
        specs = compute_bucket_assignment(self._ordered, self._options.max_bytes, first_bytes=_FIRST_BYTES)
        self.buckets = make_buckets(
            specs,
            parameters,
            self._group,
            model_id=self._model_id,
            as_views=self._options.gradient_as_bucket_view,
            is_symmetric=is_symmetric,
        )
        locations = {
            position: (index, index_in_bucket)
            for index, spec in enumerate(specs)
            for index_in_bucket, position in enumerate(spec.members)
        }
        self._locations = [locations[position] for position in range(len(self._ordered))]
        self._round = BackwardRound([index for index, _ in self._locations], is_static=self._options.static_graph)

    def finish_round(self, timeout: float | None = None, *, one_by_one: bool = False, is_joined: bool = False) -> None:
        """Wait for all buckets and close the round; on return every gradient is the mean over the ranks.

        Buckets that have not started are started first, which are all of them if no round is open. Called at the end of
        a backward (`_on_backward_end`), by `DDP.sync_gradients`, and in a join. With ``one_by_one`` a bucket starts
        when the one before it has ended. An ``is_joined`` rank has no batch, and only helps the others.
        """
        self._count_missed()
        with self._abort_on_error():
            self._check_dense(self._num_started)
            if not one_by_one:
                self._start_buckets(len(self.buckets), timeout, is_joined=is_joined)
            self._check_unchanged()
            for index, bucket in enumerate(self.buckets):
                self._start_buckets(index + 1, timeout, is_joined=is_joined)
                with add_error_context(partial(self._describe_bucket, index), _ADVICE):
                    bucket.wait()
            position = self._round.find_missing()
            if position is not None:
                raise UnsupportedOpError(
                    f"{self._parameter_title(position)} got its gradient less often on rank {self._group.rank} than in"
                    " the first backward, but DDP was made with static_graph=True: leave it out for a graph that"
                    " changes.",
                    ranks=(self._group.rank,),
                )
            may_be_uneven = self._options.find_unused_parameters or self._options.static_graph
            uneven = [] if may_be_uneven else [name for each in self.buckets for name in each.find_uneven()]
            for bucket in self.buckets:
                bucket.finish(self._scale, is_joined=is_joined)
        self.has_unreduced_gradients = False
        arrived = list(self._round.counts)
        self._reset_round(is_complete=True)
        if uneven:
            self._raise_uneven(uneven, timeout, is_joined=is_joined)
        if not self._is_rebuilt:
            self._rebuild_buckets(arrived, timeout)
        if self.after_round is not None:
            self.after_round(self._root)

    def inherit_state(self, other: Reducer) -> None:
        """Take over the settings and callbacks of another reducer of the same model."""
        self.is_syncing, self.before_round, self.after_round = other.is_syncing, other.before_round, other.after_round
        self.has_unreduced_gradients = other.has_unreduced_gradients

    def watch_outputs(self, outputs: Sequence[torch.Tensor], unused_ids: frozenset[int]) -> None:
        """Hook a forward's outputs that require grad, so that the round opens where their gradients begin to flow.

        ``unused_ids`` are the ids of the parameters that the outputs don't depend on.
        """
        if not self._ordered:
            return
        if not self._round.is_open:
            positions = frozenset(position for position, owner in enumerate(self._ordered) if id(owner) in unused_ids)
            # After several forwards a parameter is unused if none of them uses it.
            self._round.unused = positions & self._round.unused if self._has_forwards else positions
            self._has_forwards = True
        hook = weak_method(self._on_output_gradient)
        hook_gradients([output for output in outputs if not output.is_leaf], hook)

    def _on_output_gradient(self, _: torch.Tensor) -> None:
        if self.is_syncing:
            self.enter_round()

    def discard_failed_round(self) -> None:
        """Outside of a backward, discard a round that a failed backward left open."""
        if self._round.is_open and current_backward_id() == -1:
            self._fail_round()

    def enter_round(self) -> None:
        """Open the round, unless it is open: autograd is at work on this model's gradients."""
        if self._round.has_failed:
            self._fail_round()
        if self._ordered and self._round.enter(self._on_backward_end):
            self._round.versions = self._read_versions()

    def _on_backward_end(self) -> None:
        self._count_missed()
        if self._round.counts:
            self.finish_round()
        else:  # torch.autograd.grad, which accumulates no gradients of parameters
            self._reset_round(is_complete=False)

    def on_accumulated(self) -> None:
        """Autograd has accumulated a gradient, which later hooks on the parameter may still change."""
        if torch.is_grad_enabled():
            raise UnsupportedOpError(
                f"backward(create_graph=True) through {self._title}: averaged gradients have no graph, since it would"
                " have to cross the ranks. Take the inner derivative with"
                " torch.autograd.grad(..., create_graph=True), and call backward() once, on a loss made of it."
            )
        self.has_unreduced_gradients = True
        if self.is_syncing:
            self.enter_round()

    def on_ready(self, param_id: int) -> None:
        """A gradient is final: give it to its bucket (`GradientBucket.copy_in`), and start the complete buckets."""
        position = self._positions[param_id]
        bucket_index, index_in_bucket = self._locations[position]
        if not self.is_syncing:
            self.buckets[bucket_index].copy_in(index_in_bucket)
            return
        if bucket_index < self._num_started:
            self._raise_late(position)
        self._round.count_gradient(position)
        self.buckets[bucket_index].copy_in(index_in_bucket)
        end = self._round.end_of_complete(self._num_started)
        if end > self._num_started:
            with self._abort_on_error():
                self._start_buckets(end)

    def _start_buckets(self, end: int, timeout: float | None = None, *, is_joined: bool = False) -> None:
        """Start the buckets before index ``end`` that have not started, or none of them if one has a wrong gradient."""
        if self._num_started >= end:
            return
        self._check_dense(self._num_started, end)
        if self._num_started == 0:
            self._root, self._scale = (0, 1.0) if self.before_round is None else self.before_round()
        while self._num_started < end:
            index = self._num_started
            self._num_started += 1  # before the start, which an interrupt may end
            self.buckets[index].start(self._options.comm_hook, is_joined=is_joined, timeout=timeout)

    def _check_dense(self, first: int, end: int | None = None) -> None:
        for bucket in self.buckets[first:end]:
            check_dense(bucket.names, bucket.parameters, self._group, wrapper="DDP")

    @contextlib.contextmanager
    def _abort_on_error(self) -> Iterator[None]:
        """On an error inside the block end the round, and abort the group if other ranks may wait for buckets."""
        try:
            yield
        except BaseException as error:
            if self._num_started:
                here = f"averaging gradients failed with {describe_error(error)}"
                self._group.abort(error if isinstance(error, DistributedError) else here)
            self._reset_round(is_complete=False)
            raise

    def _rebuild_buckets(self, arrived: list[int], timeout: float | None) -> None:
        """Rebuild the buckets in the order of arrival; see [Note: rebuilding buckets]."""
        self._is_rebuilt = True
        if not self._ordered:
            return
        names, parameters, old = self._names, self._ordered, self._round
        digest = int.from_bytes(hashlib.sha256("\n".join(sorted(names)).encode()).digest()[:8], "little", signed=True)
        rest = sorted(set(range(len(parameters))) - set(arrived))
        with add_error_context(lambda: f"{self._title} agrees on the order of gradients after a step.", _ADVICE):
            own = torch.tensor([[digest, *arrived, *rest]], device="cpu")
            orders = all_gather(own, group=self._group, timeout=timeout).tolist()
            differing = tuple(rank for rank, order in enumerate(orders) if order[0] != orders[0][0])
            if differing:
                raise CollectiveMismatchError(
                    f"{ranks_text(differing)} of group {self._group.name!r} averaged gradients of other parameters of"
                    f" {self._title} than rank 0: which parameters require grad must change on all ranks alike.",
                    ranks=differing,
                )
            old_positions = orders[self._root][1:]
            self._build_buckets({names[each]: parameters[each] for each in old_positions}, is_symmetric=True)
        self._round.inherit_counts(old, old_positions)
        new_positions = {old_position: position for position, old_position in enumerate(old_positions)}
        self._positions = [new_positions[position] for position in self._positions]
        with torch.no_grad():
            for bucket_index, index_in_bucket in self._locations:
                self.buckets[bucket_index].copy_in(index_in_bucket)

    def _raise_uneven(self, names: list[str], timeout: float | None, *, is_joined: bool) -> None:
        """Raise, on all ranks, for parameters that only some ranks have a gradient for."""
        lacking = [name for bucket in self.buckets for name in bucket.absent if name in names and not is_joined]
        everyone = all_gather_object(lacking, group=self._group, timeout=timeout)
        first = names[0]
        ranks = tuple(rank for rank, theirs in enumerate(everyone) if first in theirs)
        more = f" (and {len(names) - 1} more parameters likewise)" if len(names) > 1 else ""
        raise CollectiveMismatchError(
            f"parameter {first!r} of {self._title} got no gradient on {ranks_text(ranks)} of group"
            f" {self._group.name!r}, and one on the others{more}. Pass find_unused_parameters=True to DDP if ranks use"
            " different parts of the module: a rank without a gradient then contributes zeros.",
            ranks=ranks,
        )

    def _read_versions(self) -> tuple[int, ...]:
        return tuple(map(version_of, self._ordered))

    def _check_unchanged(self) -> None:
        """Raise if a parameter has changed since the round opened; see [Note: steps in hooks]."""
        before = self._round.versions
        gone = [position for position in self._round.counts if self._ordered[position].grad is None]
        if not self._round.counts or (not gone and self._read_versions() == before):
            return
        changes = enumerate(zip(before, self._read_versions(), strict=True))
        changed = [position for position, (old, new) in changes if old != new]
        position, what = (changed[0], "changed") if changed else (min(gone), "lost its gradient")
        raise UnsupportedOpError(
            f"{self._parameter_title(position)} {what} during backward on rank {self._group.rank} of group"
            f" {self._group.name!r}, before its gradient was averaged: an optimizer that steps in a hook makes the"
            " ranks' models drift apart, and so does a module that changes its weights when a checkpoint recomputes"
            " it. Step when backward() has returned.",
            ranks=(self._group.rank,),
        )

    def _raise_late(self, position: int) -> None:
        """Raise for a gradient that arrived after its bucket had started."""
        if self._options.static_graph:
            why = "a graph that changes can't have static_graph=True"
        elif self._round.counts.get(position, 0) == 0:
            why = "it is used outside of the forward's outputs: compute the whole loss that uses it inside of forward"
        else:
            why = "with re-entrant checkpointing pass static_graph=True to DDP, or use_reentrant=False to checkpoint()"
        with self._abort_on_error():
            raise UnsupportedOpError(
                f"{self._parameter_title(position)} got a gradient on rank {self._group.rank} when its bucket was"
                f" being averaged already: {why}.",
                ranks=(self._group.rank,),
            )

    def _parameter_title(self, position: int) -> str:
        return f"parameter {self._names[position]!r} of {self._title}"

    def _describe_bucket(self, index: int) -> str:
        names = self.buckets[index].names
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return (
            f"It was bucket {index} of {len(self.buckets)} of {self._title}, whose gradients rank {self._group.rank}"
            f" was averaging: {names[0]!r}{more}."
        )

    def _count_missed(self) -> None:
        """Count the gradients that arrived without `on_ready`."""
        for param_id in self.hooks.missed_hooks():
            self._round.count_gradient(self._positions[param_id])

    def _fail_round(self) -> None:
        """End the round of a backward that failed."""
        if self._num_started:
            error = GroupAbortedError(
                f"an earlier backward of {self._title} on rank {self._group.rank} of group {self._group.name!r} ended"
                f" in an error after {self._num_started} of {counted(len(self.buckets), 'bucket')} had started, so the"
                " ranks are out of step. Make a new group, and a new DDP on it, to continue after a failed backward.",
                ranks=(self._group.rank,),
            )
            self._group.abort(error)
            raise error
        self._reset_round(is_complete=False)

    def _reset_round(self, *, is_complete: bool) -> None:
        self._num_started = 0
        self._has_forwards = False
        self.hooks.pending.clear()  # of a backward that failed
        self._round.close(is_complete=is_complete)
