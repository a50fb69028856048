"""Gradients become their mean over the ranks while backward is still running; see [Note: round] in `autograd_hooks.py`.

[Note: rebuilding]
The first plan of buckets supposes that gradients come in the reverse order of the parameters. The first round notes the
order in which they do, and rank 0's becomes everyone's: buckets that fill in the order of arrival start as early as can
be. These are the buckets of all later rounds, and only they are in symmetric memory, so that it is made once.

[Note: steps in hooks]
An optimizer that steps in a hook, once a parameter's gradient is there, takes this rank's own gradient, for the mean
comes later: the ranks' models would drift apart. So a round remembers the version counters of all parameters from
when it opened, and the group ends with an error where one has changed by the end, or where a gradient that came is gone
again. Not seen are changes that go around the counters (fused optimizers, ``parameter.data``) and leave the gradient,
and those of the first parameter where no output was found, for then its gradient opens the round.

[Note: numbers]
A *key* is a parameter's number when the reducer was made, a *place* its number in the present plan, a *home* the number
of its bucket, and a *spot* its number there.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from typing import TYPE_CHECKING, Concatenate, ParamSpec

import torch

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
from ferrodist.parallel.ddp.autograd_hooks import BackwardRound, ParameterHooks
from ferrodist.parallel.ddp.bucket import make_buckets, model_title, plan_buckets
from ferrodist.parallel.module_guard import current_backward, hook_gradients
from ferrodist.torch_private.autograd import version_of
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.parallel.ddp.config import Options

P = ParamSpec("P")

_FIRST_BYTES = 1 << 20
"""Of the first bucket, whose messages start soonest."""

_ADVICE = (
    "Look for a rank that has fewer batches than the others (see join()), skips a backward or is in no_sync(), or runs"
    " the backwards of several models in another order."
)


class Reducer:
    """Averages the gradients of some parameters over a group, in buckets, during backward; see [Note: round].

    The hooks go when the reducer is collected, so that a module can be wrapped again.

    Args:
        parameters: The parameters that require grad, each once, by name; the same on all ranks.
        group: The group. In a group of one rank nothing is done.
        options: The DDP's.
        model: The model's number in the group, from `number_model`.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], group: Backend, options: Options, *, model: int
    ) -> None:
        self.parameters = tuple(parameters.values())
        self.is_syncing = options.overlap_comm
        """Whether backward averages; else only `reduce` does."""
        self.before_round: Callable[[], tuple[int, float]] | None = None
        """In `DDP.join`: tells the others of a round, and returns a rank that has a batch, and averages' factor."""
        self.after_round: Callable[[int], None] | None = None
        """Called when all gradients are averages, on all ranks, with a rank that has a batch."""
        self.has_own_gradients = False
        """Whether there are gradients that have not been averaged."""
        self._group = group
        self._options = options
        self._model = model
        self._root, self._scale = 0, 1.0
        self._is_rebuilt = False
        self._num_started = 0
        self._has_forwards = False  # since the last round
        # Gradients come roughly in the reverse order of the parameters.
        self._owners = dict(reversed(list(parameters.items()))) if group.world_size > 1 else {}
        self._build(is_symmetric=False)
        self._place_of = list(range(len(self._backwards)))  # by key
        self._hooks = ParameterHooks(
            self._backwards,
            _weakly(self, Reducer.on_arrival),
            _weakly(self, Reducer.on_gradient),
            title=model_title(group, model),
        )

    def _build(self, *, is_symmetric: bool) -> None:
        backwards = self._backwards = tuple(self._owners.values())
        plan = plan_buckets(backwards, self._options.max_bytes, first_bytes=_FIRST_BYTES)
        self._names = tuple(self._owners)
        self.buckets = make_buckets(
            plan,
            self._owners,
            self._group,
            model=self._model,
            as_views=self._options.gradient_as_bucket_view,
            is_symmetric=is_symmetric,
        )
        spots = {
            place: (number, spot) for number, bucket in enumerate(plan) for spot, place in enumerate(bucket.members)
        }
        self._spots = [spots[place] for place in range(len(backwards))]
        self._round = BackwardRound([number for number, _ in self._spots], is_static=self._options.static_graph)

    def reduce(self, timeout: float | None = None, *, one_by_one: bool = False, is_idle: bool = False) -> None:
        """Close the round, or do a whole one: on return every gradient is the mean over the ranks.

        Args:
            timeout: Seconds for each bucket; None takes the group's.
            one_by_one: Start a bucket when the one before it has ended.
            is_idle: This rank has no batch, and only helps the others.

        Raises:
            CollectiveMismatchError: Some ranks have a gradient that others have not. The group stays good.
            DistributedError: A bucket's reduction failed, and so the group; gradients may be partly averaged.
        """
        self._count_lost()
        with self._failing_together():
            for bucket in self.buckets[self._num_started :]:
                bucket.check_layouts()
            if not one_by_one:
                self._start_until(len(self.buckets), timeout, is_idle=is_idle)
            self._check_unchanged()
            for number, bucket in enumerate(self.buckets):
                self._start_until(number + 1, timeout, is_idle=is_idle)
                with add_error_context(lambda number=number: self._describe(number), _ADVICE):  # type: ignore[misc]
                    bucket.wait()
            self._check_learned()
            uneven = [] if self._options.allows_unused else self._find_uneven()
            for bucket in self.buckets:
                bucket.finish(self._scale, is_idle=is_idle)
        self.has_own_gradients = False
        arrived = list(self._round.counts)
        self._forget_round(is_complete=True)
        if uneven:
            self._refuse_uneven(uneven, is_idle=is_idle)
        if not self._is_rebuilt:
            self._rebuild(arrived)
        if self.after_round is not None:
            self.after_round(self._root)

    def continue_from(self, other: Reducer) -> None:
        """Take over what another reducer of the same model was told."""
        self.is_syncing, self.before_round, self.after_round = other.is_syncing, other.before_round, other.after_round
        self.has_own_gradients = other.has_own_gradients

    def check_owns_parameters(self) -> None:
        """Raise if another DDP was made of one of the parameters.

        Raises:
            UnsupportedOpError: It is named.
        """
        taken = self._hooks.find_taken()
        if taken is not None:
            key, holder = taken
            raise UnsupportedOpError(
                f"{self._title_of(self._place_of[key])} belongs to {holder.title} since that was made: two DDPs can't"
                " average one gradient. Put modules that share parameters into one, and wrap that once; to go on with"
                " this DDP, drop the other."
            )

    def watch_outputs(self, outputs: Sequence[torch.Tensor], unreached: frozenset[int]) -> None:
        """Take note of a forward's outputs, so that the round opens where their gradients begin to flow.

        Args:
            outputs: Those that require grad.
            unreached: `id` of the parameters that they don't depend on.
        """
        if not self._backwards:
            return
        if not self._round.is_open:
            places = frozenset(place for place, owner in enumerate(self._backwards) if id(owner) in unreached)
            self._round.unreached = places & self._round.unreached if self._has_forwards else places
            self._has_forwards = True
        reference = weakref.ref(self)

        def notice(_: torch.Tensor) -> None:
            alive = reference()
            if alive is not None and alive.is_syncing:
                alive.enter_round()

        hook_gradients([output for output in outputs if not output.is_leaf], notice)

    def fits(self) -> bool:
        """Whether the parameters still have the dtypes, devices and shapes that the buckets were made for."""
        return all(bucket.fits() for bucket in self.buckets)

    def forget_failed_backward(self) -> None:
        """Outside of a backward: drop the round that one left open when it failed.

        Raises:
            GroupAbortedError: Some of its buckets had started, so the ranks are out of step.
        """
        if self._round.is_open and current_backward() == -1:
            self._abandon_round()

    def enter_round(self) -> None:
        """Say that autograd is at work on this model's gradients."""
        if self._round.has_failed:
            self._abandon_round()
        if self._backwards and self._round.enter(self._on_backward_end):
            self._round.versions = self._count_changes()

    def on_arrival(self) -> None:
        """Take note that a gradient has come, which hooks on the parameter may still change; called by autograd."""
        if torch.is_grad_enabled():
            raise UnsupportedOpError(
                f"backward(create_graph=True) through {model_title(self._group, self._model)}: averaged gradients have"
                " no graph, for it would have to cross the ranks. Take the inner derivative with"
                " torch.autograd.grad(..., create_graph=True), and call backward() once, on a loss made of it."
            )
        self.has_own_gradients = True
        if self.is_syncing:
            self.enter_round()

    def on_gradient(self, key: int) -> None:
        """Take note that a gradient is there, and start the buckets that are now complete; called by autograd."""
        place = self._place_of[key]
        home, spot = self._spots[place]
        if not self.is_syncing:
            self.buckets[home].take_early(spot)
            return
        if home < self._num_started:
            self._refuse_late(place)
        self._round.arrive(place)
        self.buckets[home].take_early(spot)
        end = self._round.count_complete(self._num_started)
        if end > self._num_started:
            with self._failing_together():
                self._start_until(end)

    def _start_until(self, end: int, timeout: float | None = None, *, is_idle: bool = False) -> None:
        """Start the buckets before ``end`` that have not started, or none of them when one can't."""
        if self._num_started >= end:
            return
        for bucket in self.buckets[self._num_started : end]:
            bucket.check_layouts()
        if self._num_started == 0:
            self._root, self._scale = (0, 1.0) if self.before_round is None else self.before_round()
        while self._num_started < end:
            number = self._num_started
            self._num_started += 1  # before the start, which may be interrupted
            self.buckets[number].start(self._options.comm_hook, is_idle=is_idle, timeout=timeout)

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """End the round when something fails inside the block, and the group if ranks may count on buckets."""
        try:
            yield
        except BaseException as error:
            if self._num_started:
                here = f"averaging gradients failed with {describe_error(error)}"
                self._group.abort(error if isinstance(error, DistributedError) else here)
            self._forget_round(is_complete=False)
            raise

    def _rebuild(self, arrived: list[int]) -> None:
        """Plan the buckets anew, in the order in which gradients came; see [Note: rebuilding]."""
        self._is_rebuilt = True
        if not self._backwards:
            return
        names, owners, old = self._names, self._backwards, self._round
        digest = int.from_bytes(hashlib.sha256("\n".join(sorted(names)).encode()).digest()[:8], "little", signed=True)
        rest = sorted(set(range(len(owners))) - set(arrived))
        with add_error_context(
            lambda: f"After its first step {model_title(self._group, self._model)} agrees on the order of gradients.",
            _ADVICE,
        ):
            everyone = all_gather(torch.tensor([[digest, *arrived, *rest]], device="cpu"), group=self._group).tolist()
            self._check_same_names([theirs[0] for theirs in everyone])
            places = everyone[self._root][1:]
            self._owners = {names[place]: owners[place] for place in places}
            self._build(is_symmetric=True)
        self._round.learn_like(old, places)
        now = {place: number for number, place in enumerate(places)}
        self._place_of = [now[place] for place in self._place_of]
        with torch.no_grad():
            for home, spot in self._spots:
                self.buckets[home].take_early(spot)

    def _check_same_names(self, digests: list[int]) -> None:
        """Raise, on all ranks, unless all have averaged the gradients of the same parameters."""
        differing = tuple(rank for rank, digest in enumerate(digests) if digest != digests[0])
        if differing:
            raise CollectiveMismatchError(
                f"{ranks_text(differing)} of group {self._group.name!r} averaged gradients of other parameters of"
                f" {model_title(self._group, self._model)} than rank 0: which parameters require grad must change on"
                " all ranks alike.",
                ranks=differing,
            )

    def _find_uneven(self) -> list[str]:
        """Parameters that some ranks have a gradient for and others have not; see [Note: presence] in `bucket.py`."""
        return [name for bucket in self.buckets for name in bucket.find_uneven()]

    def _refuse_uneven(self, names: list[str], *, is_idle: bool) -> None:
        """Raise, on all ranks, for parameters that some ranks have a gradient for and others have not."""
        lacking = [name for bucket in self.buckets for name in bucket.absent if name in names and not is_idle]
        everyone = all_gather_object(lacking, group=self._group)
        first = names[0]
        ranks = tuple(rank for rank, theirs in enumerate(everyone) if first in theirs)
        more = f" (and {len(names) - 1} more parameters are like it)" if len(names) > 1 else ""
        raise CollectiveMismatchError(
            f"parameter {first!r} of {model_title(self._group, self._model)} got no gradient on {ranks_text(ranks)}"
            f" of group {self._group.name!r}, and one on the others{more}. Pass find_unused_parameters=True to DDP if"
            " ranks use different parts of the module: who has no gradient then counts as zeros.",
            ranks=ranks,
        )

    def _count_changes(self) -> tuple[int, ...]:
        return tuple(map(version_of, self._backwards))

    def _check_unchanged(self) -> None:
        """Raise if a parameter has changed since the round opened; see [Note: steps in hooks]."""
        before = self._round.versions
        gone = [place for place in self._round.counts if self._backwards[place].grad is None]
        if not self._round.counts or (not gone and self._count_changes() == before):
            return
        changes = enumerate(zip(before, self._count_changes(), strict=True))
        changed = [place for place, (old, new) in changes if old != new]
        place, what = (changed[0], "changed") if changed else (min(gone), "lost its gradient")
        raise UnsupportedOpError(
            f"{self._title_of(place)} {what} during backward on"
            f" rank {self._group.rank} of group {self._group.name!r}, before its gradient was averaged: an optimizer"
            " that steps in a hook makes the ranks' models drift apart, and so does a module that changes its weights"
            " when a checkpoint computes it again. Step when backward() has returned.",
            ranks=(self._group.rank,),
        )

    def _check_learned(self) -> None:
        """Raise if a gradient that static_graph counted in the first round did not come."""
        place = self._round.find_unexpected()
        if place is not None:
            raise UnsupportedOpError(
                f"{self._title_of(place)} got its gradient less often on rank {self._group.rank} than in the first"
                " backward, but DDP was told static_graph=True: leave it out for a graph that changes.",
                ranks=(self._group.rank,),
            )

    def _refuse_late(self, place: int) -> None:
        """Raise for a gradient that came when its bucket had started."""
        if self._options.static_graph:
            why = "a graph that changes can't have static_graph=True"
        elif self._round.counts.get(place, 0) == 0:
            why = "it is used outside of what forward returns: compute all of the loss that uses it inside of forward"
        else:
            why = "with re-entrant checkpointing pass static_graph=True to DDP, or use_reentrant=False to checkpoint()"
        error = UnsupportedOpError(
            f"{self._title_of(place)} got a gradient on rank {self._group.rank} when its bucket was being averaged"
            f" already: {why}.",
            ranks=(self._group.rank,),
        )
        with self._failing_together():
            raise error

    def _title_of(self, place: int) -> str:
        return f"parameter {self._names[place]!r} of {model_title(self._group, self._model)}"

    def _describe(self, number: int) -> str:
        names = self.buckets[number].names
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return (
            f"It was bucket {number} of {len(self.buckets)} of {model_title(self._group, self._model)}, whose gradients"
            f" rank {self._group.rank} was averaging: {names[0]!r}{more}."
        )

    def _count_lost(self) -> None:
        """Count the gradients that came without `on_gradient`."""
        for key in self._hooks.find_lost():
            self._round.arrive(self._place_of[key])

    def _on_backward_end(self) -> None:
        self._count_lost()
        if self._round.counts:
            self.reduce()
        else:  # torch.autograd.grad, which leaves the parameters' gradients alone
            self._forget_round(is_complete=False)

    def _abandon_round(self) -> None:
        """The backward of this round ended in an error."""
        if self._num_started:
            error = GroupAbortedError(
                f"an earlier backward of DDP on rank {self._group.rank} of group {self._group.name!r} ended in an"
                f" error after {self._num_started} of {counted(len(self.buckets), 'bucket')} had started, so the ranks"
                " are out"
                " of step. Make a new group, and a new DDP on it, to go on after a failed backward.",
                ranks=(self._group.rank,),
            )
            self._group.abort(error)
            raise error
        self._forget_round(is_complete=False)

    def _forget_round(self, *, is_complete: bool) -> None:
        self._num_started = 0
        self._has_forwards = False
        self._hooks.forget_pending()
        self._round.close(is_complete=is_complete)


def _weakly(reducer: Reducer, method: Callable[Concatenate[Reducer, P], None]) -> Callable[P, None]:
    """A method that does not keep the reducer, which keeps what is hooked."""
    reference = weakref.ref(reducer)

    def call(*arguments: P.args, **keywords: P.kwargs) -> None:
        alive = reference()
        if alive is not None:
            method(alive, *arguments, **keywords)

    return call
