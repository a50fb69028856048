"""When units are gathered, freed and reduced: hooks in, the plan's steps out.

[Note: stages of a step]
*Forward*: `before_call` gathers a unit, and begins to gather those that came after it in the last forward; `after_call`
frees it. What is needed first in backward stays: the outermost unit, and those that ended last in the last forward, as
many as backward has gathered at a time.
*Backward*: the first gradient of an output begins a run of the trace's plan (see [Note: plan]); a callback that the
engine runs at the end, before ``backward()`` returns, does what is left of it and waits for the averages.
Between the two nothing is under way, but for what `prefetch_forward` began.

A forward inside a backward recomputes a checkpointed segment. It is no new trace, and no step of the run is done for
it: that a layer is computed again does not mean that backward has left those behind it. What it needs is gathered.

[Note: joined shards]
Where ranks compute with each other's shards as they lie, in memory that they share, a rank that leaves a forward or
backward may change its shard at once, as an optimizer does. So none leaves before all of them are done with it: one
barrier at each end. And none computes before all have made their last change: the collective that begins each unit's
use. What is changed between forward and backward would be seen in backward: it is an error, by the pieces' counters.

A forward or backward that fails in the program leaves its run open. The next forward frees what is left, and if a
backward had begun, the other ranks count on its rest: the group is ended, an error on all ranks.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.all_to_all import barrier
from ferrodist.errors import DistributedError, GroupAbortedError, UnsupportedOpError, add_error_context, describe_error
from ferrodist.parallel.fsdp.backward_plan import Action, BackwardRun, ForwardTrace, Step, plan_backward
from ferrodist.parallel.fsdp.unit import ADVICE, Unit, UnitState
from ferrodist.parallel.module_guard import current_backward_id, find_outputs, find_tensors, hook_gradients
from ferrodist.torch_private.autograd import queue_callback
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ferrodist.parallel.fsdp.config import ShardAxes
    from ferrodist.parallel.fsdp.memory import GradientBuffer


class Schedule:
    """Runs the units of one model; see [Note: stages of a step].

    Args:
        units: The units; the first is the whole model.
        axes: Their groups are ended when this rank falls out of step.
        buffer: Where gradients wait to be averaged.
        prefetch: How many units to gather before they are needed, in forward and in backward.
        reshards_after_forward: Whether units are freed between forward and backward.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        axes: ShardAxes,
        buffer: GradientBuffer,
        *,
        prefetch: tuple[int, int],
        reshards_after_forward: bool,
    ) -> None:
        self.units = tuple(units)
        self.is_syncing = True
        """Whether backward averages gradients; else they stay with this rank."""
        self._axes = axes
        self._group = axes.whole
        self._buffer = buffer
        self._num_forward, self._num_backward = prefetch
        self._reshards = reshards_after_forward
        self._order: list[int] = []  # of the units, as their calls began in the last forward
        self._last_ended: set[int] = set()
        self._trace: ForwardTrace | None = None  # of the forward under way
        self._open_calls: list[tuple[int, int]] = []
        self._run: BackwardRun | None = None
        self._reducing: list[Unit] = []
        self._prefetched: set[int] = set()
        self._unsynced: set[int] = set()  # units with gradients that no_sync left
        self._is_joined = any(flat.is_joined for unit in units for flat in unit.flats)
        self._undivided = dict.fromkeys(unit for unit in self.units if unit.is_undivided)
        self.is_summoned = False
        for unit in self.units:
            _watch_gradients(self, unit)

    # Forward.

    def prefetch_forward(self) -> None:
        """Begin to gather what the next forward needs first."""
        self.recover(keeps_prefetched=True)
        with self._failing_together():
            for number in (self._order or [0])[: self._num_forward + 1]:
                self.units[number].start_gather()
                self._prefetched.add(number)

    @property
    def has_pending_prefetch(self) -> bool:
        """Whether a unit is being gathered that nobody waits for yet."""
        return any(unit.state is UnitState.GATHERING for unit in self.units)

    def recover(self, *, keeps_prefetched: bool = False) -> None:
        """Free what an earlier forward left, and end the group if a backward was cut short.

        Args:
            keeps_prefetched: Don't free what `prefetch_forward` has begun to gather.

        Raises:
            RuntimeError: This is inside of a forward or backward, or of summon_full_params().
            GroupAbortedError: An earlier backward failed on this rank, and the others count on it.
        """
        is_in_backward = self._run is not None and current_backward_id() != -1
        if self._trace is not None or is_in_backward or self.is_summoned:
            raise RuntimeError(
                "this is for outside of forward, backward and summon_full_params(): call it before or after"
            )
        if self._run is not None:
            self._end_cut_run(self._run)
        for unit in self.units:
            if not keeps_prefetched or unit.state is UnitState.GATHERED or unit.number not in self._prefetched:
                unit.free()

    def _end_cut_run(self, run: BackwardRun) -> None:
        """A backward has failed in the program, while the other ranks count on the rest of it."""
        self._run = None
        if self._group.world_size == 1:
            self._forget_all()
            return
        error = GroupAbortedError(
            f"an earlier backward of FSDP on rank {self._group.rank} of group {self._group.name!r} ended in an error"
            f" after {run.num_done} of {counted(len(run.steps), 'step')}, so the ranks are out of step. The shards are"
            " whole, the"
            " gradients are not: save sharded_state_dict(), and make a new group and a new FSDP on it to go on.",
            ranks=(self._group.rank,),
        )
        self._fail(error)
        raise error

    def before_call(self, unit: Unit) -> None:
        """Gather a unit, for its module is being called."""
        if self.is_summoned:
            return
        if self._run is not None and current_backward_id() != -1:
            with self._failing_together():
                unit.finish_gather()
            return
        if self._trace is None:
            if unit.number:
                raise RuntimeError(
                    f"{unit.title} was called outside of its model's forward, where its parameters are not gathered:"
                    " call the FSDP, or use summon_full_params()"
                )
            self.recover(keeps_prefetched=True)
            self._trace = ForwardTrace()
            for other in self._undivided:  # a parent may use what it does not call
                other.finish_gather()
        trace = self._trace
        call = trace.begin_call(unit.number)
        position = call if call < len(self._order) and self._order[call] == unit.number else len(self._order)
        trace.versions.setdefault(unit.number, unit.count_changes())
        self._open_calls.append((unit.number, call))
        with self._failing_together():
            unit.start_gather()
            for number in self._order[position + 1 : position + 1 + self._num_forward]:
                self.units[number].start_gather()
            unit.finish_gather()

    def after_call(self, unit: Unit, output: Any, *, succeeded: bool = True) -> None:
        """Free a unit, for its module's call has ended; its backward will be noticed through the outputs."""
        if self.is_summoned:
            return
        if self._run is not None:
            self._watch_outputs(output, self._run.trace, self._recomputed_call(unit, self._run))
            return
        if self._trace is None:  # a failure has ended this forward
            return
        trace = self._trace
        call = self._close_call(unit)
        if call is None:
            return
        if succeeded:
            trace.end_call(unit.number, call)
            self._check_outputs(unit, output)
        will_return = succeeded and self._watch_outputs(output, trace, call)
        is_open = any(number == unit.number for number, _ in self._open_calls)
        stays = will_return and (not self._reshards or unit.number in {0, *self._last_ended})
        stays |= unit.number != 0 and unit in self._undivided
        if not unit.number:
            self._trace = None
        if not stays and not is_open:
            self._free(unit)
        if not unit.number:
            self._end_forward(trace, succeeded=succeeded, will_return=will_return)

    def _close_call(self, unit: Unit) -> int | None:
        while self._open_calls:
            number, call = self._open_calls.pop()
            if number == unit.number:
                return call
        return None

    def _end_forward(self, trace: ForwardTrace, *, succeeded: bool, will_return: bool) -> None:
        if succeeded:
            self._order = trace.order
            self._last_ended = trace.last_ended(1 + self._num_backward)
        self._open_calls.clear()
        self._prefetched.clear()
        if succeeded and self._is_joined and not will_return:
            self._check_unchanged(trace)
        used = {*trace.versions, *(unit.number for unit in self._undivided)}
        for unit in self.units:
            if not will_return or unit.number not in used:
                self._free(unit)
            unit.show(is_whole=False)  # between forward and backward programs look for gradients and optimizers
        if succeeded:
            self._await_readers()
            return
        failure = next((group.failure for group in self._axes.others if group.failure is not None), None)
        if failure is not None:  # in the module's own collectives, after which no rank of the mesh can go on
            self._fail(failure)

    def _check_unchanged(self, trace: ForwardTrace) -> None:
        """Raise if the program has changed a shard with which other ranks may still compute."""
        for number, versions in trace.versions.items():
            with self._failing_together():
                self.units[number].check_unchanged(versions, until="the end of a forward")

    def _watch_outputs(self, output: Any, trace: ForwardTrace, call: int) -> bool:
        """Have `before_backward` called when a gradient reaches an output; whether one can."""
        reference = weakref.ref(self)

        def notice(_: torch.Tensor) -> None:
            alive = reference()
            if alive is not None:
                alive.before_backward(trace, call)

        outputs = find_outputs(output)
        hook_gradients(outputs, notice)
        return bool(outputs)

    def _check_outputs(self, unit: Unit, output: Any) -> None:
        """Raise for a parameter among a unit's outputs: it is given up when the call, or the backward, has ended."""
        if any(unit.owns_memory_of(tensor) for tensor in find_tensors(output)):
            error = UnsupportedOpError(
                f"{unit.title} returned one of its parameters, or a view of one, which are there during its call only:"
                " return a copy (parameter.clone())"
            )
            with self._failing_together():
                raise error

    def _recomputed_call(self, unit: Unit, run: BackwardRun) -> int:
        return run.recomputed_call(unit.number, is_gathered=unit.state is UnitState.GATHERED)

    # Backward.

    def before_backward(self, trace: ForwardTrace, call: int) -> None:
        """Have a unit gathered, for autograd has come to the end of its call."""
        if torch.is_grad_enabled():
            error = UnsupportedOpError(
                "backward or autograd.grad with create_graph=True through an FSDP model: a second backward would need"
                " parameters that were given up after the first. Use DDP where gradients need gradients."
            )
            with self._failing_together():
                raise error
        if self._run is not None and self._run.trace is not trace and self._run.backward != current_backward_id():
            self._end_cut_run(self._run)
        if self._run is None or self._run.trace is not trace:
            self._begin_run(trace)
        run = self._run
        assert run is not None
        if run.is_past(call):
            return
        with self._failing_together():
            while (step := run.next_step) is not None:
                self._do(run, step)
                if step.call == call:
                    break
            while (step := run.next_step) is not None and step.action is Action.GATHER:
                self._do(run, step)

    def on_gradient(self, unit: Unit) -> None:
        """Take note that a parameter's gradient is there, and reduce what is complete and next."""
        run = self._run
        if run is None:
            error = UnsupportedOpError(
                f"a gradient reached parameters of {unit.title} by a way that is not through what forward returned:"
                " return all losses, and tensors that lead to one, from forward"
            )
            with self._failing_together():
                raise error
        if not unit.note_gradient():
            return
        with self._failing_together():
            while (step := run.next_step) is not None and step.action is Action.REDUCE:
                if not self.units[step.unit].has_all_gradients:
                    return
                self._do(run, step)

    def reduce_all(self) -> None:
        """Average the gradients that backwards without synchronisation left on this rank."""
        self.recover()
        with self._failing_together():
            for number in sorted(self._unsynced, reverse=True):
                self._reduce(self.units[number])
            self._finish_reductions()

    @property
    def has_unsynced(self) -> bool:
        """Whether backwards without synchronisation left gradients on this rank."""
        return bool(self._unsynced)

    def drop_unsynced(self) -> None:
        """Forget what they left."""
        self._unsynced.clear()
        for unit in self.units:
            for flat in unit.flats:
                flat.gradients.drop()

    def _begin_run(self, trace: ForwardTrace) -> None:
        if self._run is not None:  # of another forward, within one backward: as with two losses of two forwards
            self._finish_run()
        for unit in self.units:
            unit.forget_gradients()
        trainable = [unit.number for unit in self.units if unit.is_trainable]
        self._run = BackwardRun(trace, plan_backward(trace.events, self._num_backward, trainable))
        for unit in self.units:
            unit.show(is_whole=True)  # for what checkpoints compute again
        queue_callback(self._on_backward_end)

    def _on_backward_end(self) -> None:
        if self._run is not None:
            self._finish_run()

    def _finish_run(self) -> None:
        run = self._run
        assert run is not None
        with self._failing_together():
            while (step := run.next_step) is not None:
                self._do(run, step)
            self._run = None
            if self.is_syncing:
                # Several backwards inside this one may bring a gradient after its unit was reduced: averages add up.
                for unit in reversed(self.units):
                    if unit.number in self._unsynced or unit.has_gradients:
                        self._reduce(unit)
            self._finish_reductions()
            for unit in self.units:
                unit.free()
        self._await_readers()

    def _await_readers(self) -> None:
        """Return when no rank computes with this rank's shards any more; see [Note: joined shards]."""
        if self._is_joined:
            with self._failing_together(), add_error_context(self._doing, ADVICE):
                barrier(group=self._axes.shard)

    def _doing(self) -> str:
        return f"Rank {self._group.rank} was at the end of a forward or backward of an FSDP model."

    def _do(self, run: BackwardRun, step: Step) -> None:
        run.take_step()
        unit = self.units[step.unit]
        if step.action is Action.GATHER:
            unit.start_gather()
        elif step.action is Action.USE:
            unit.finish_gather()
            unit.check_unchanged(run.trace.versions[step.unit])
        elif step.action is Action.FREE:
            if unit not in self._undivided:
                unit.free()
        elif self.is_syncing:
            self._reduce(unit)
        else:
            self._unsynced.add(unit.number)

    def _reduce(self, unit: Unit) -> None:
        self._unsynced.discard(unit.number)
        for earlier in self._reducing:
            earlier.settle()
        unit.start_reduce(self._buffer)
        self._reducing.append(unit)

    def _finish_reductions(self) -> None:
        reducing, self._reducing = self._reducing, []
        for unit in reducing:
            unit.settle()
        for unit in reducing:
            unit.finish_reduce()

    # Ends.

    def _free(self, unit: Unit) -> None:
        with self._failing_together():
            unit.free()

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """End the groups when something fails inside the block: other ranks count on what would have come."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """This rank is out of step: end the group, and leave the shards."""
        here = f"FSDP failed with {describe_error(error)}"
        for group in (self._group, self._axes.shard, self._axes.replicate, *self._axes.others):
            if group is not None and group.failure is None:
                group.abort(error if isinstance(error, DistributedError) else here)
        self._forget_all()

    def _forget_all(self) -> None:
        """Nothing is under way any more, and ranks hold shards only."""
        self._trace = self._run = None
        self._open_calls.clear()
        self._reducing.clear()
        self._prefetched.clear()
        self._buffer.forget()
        for unit in self.units:
            unit.abandon()


def _watch_gradients(schedule: Schedule, unit: Unit) -> None:
    # Hooks on whole parameters are kept by torch, where Python's collector sees no cycle.
    references = weakref.ref(schedule), weakref.ref(unit)

    def notice() -> None:
        alive, its_unit = references[0](), references[1]()
        if alive is not None and its_unit is not None:
            alive.on_gradient(its_unit)

    for flat in unit.flats:
        flat.watch(notice)
