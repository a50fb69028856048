"""Scheduling of gathering, freeing and reduction of units, driven by hooks and the backward plan.

Each unit's module has forward hooks that call `pre_forward` and `post_forward`; for the outermost one `FSDP.forward`
calls them. Hooks on the outputs call `pre_backward`, and those on the full parameters, which
`FlatParameters.install_full` registers, `on_gradient`.

[Note: phases of a step]
*Forward*: `pre_forward` gathers a unit, and starts gathering those that followed it in the last forward; `post_forward`
frees it. Units that backward needs first stay: the outermost one, and those that ended last in the last forward, as
many as backward gathers at a time. *Backward*: the first gradient of an output begins a run of the trace's plan, the
same list of steps on all ranks: for each unit, the last one first, GATHER (ahead of its turn), USE (the gather ends),
REDUCE and FREE. Reaching a unit executes the steps up to its USE; its last gradient executes its REDUCE, if it is next.
[Note: plan] in `backward_plan.py` says why. A callback that the engine runs at the end, before ``backward()`` returns,
executes the remaining steps and waits for the averages. Between the two nothing is under way, except gathers of
`prefetch_forward`.

A forward inside a backward recomputes a checkpointed segment. It makes no new trace and executes no step of the run: a
recomputed layer doesn't mean that backward has passed the layers behind it. It gathers the units that it needs.

[Note: shared shards]
Where ranks compute with each other's shards in shared memory, a rank that leaves a forward or backward may change its
shard at once, as an optimizer does. So no rank leaves before all of them are done with it: one barrier at each end. And
no rank computes before all have made their last change (`_await_last_writes` in `flat_param.py`). A change between
forward and backward would be visible in backward: it is an error, found by the shards' version counters.

[Note: failures]
A forward that fails in the program on some ranks ends the groups (`report_failure`), else nothing is lost. A backward
that fails leaves its run open, and others wait for its rest: the next forward aborts the group, an error on all ranks.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.backends.weak import weak_method
from ferrodist.collectives.barrier import barrier
from ferrodist.errors import DistributedError, GroupAbortedError, UnsupportedOpError, add_error_context, describe_error
from ferrodist.parallel.backward_hooks import current_backward_id, find_outputs, find_tensors, hook_gradients
from ferrodist.parallel.fsdp.backward_plan import BackwardRun, ForwardTrace, StepKind, plan_backward
from ferrodist.parallel.fsdp.flat_memory import GradientBuffer
from ferrodist.parallel.fsdp.method_rounds import MethodRounds
from ferrodist.parallel.fsdp.unit import ADVICE, Unit, UnitState
from ferrodist.torch_private.autograd import queue_callback
from ferrodist.torch_private.compilers import outside_of_compiler
from ferrodist.wording import counted, with_article

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ferrodist.parallel.fsdp.config import ShardAxes

_OUTSIDE = (
    "call the FSDP, or a method of the model after register_forward_method(fsdp, name) on all ranks, or use"
    " summon_full_params()"
)


class UnitScheduler:
    """Run the units of one model; see [Note: phases of a step]."""

    def __init__(
        self,
        units: Sequence[Unit],
        axes: ShardAxes,
        *,
        device: torch.device,
        prefetch: tuple[int, int],
        reshards_after_forward: bool,
    ) -> None:
        self.units = tuple(units)
        self.is_syncing = True  # True if backward averages gradients; otherwise they stay on this rank
        self._axes, self._group = axes, axes.world
        sizes = [flat.layout.rows_bytes for unit in units for flat in unit.flats if flat.num_trainable]
        self._buffer = GradientBuffer(max(sizes, default=0), axes.shard or axes.replicate, device)
        self._forward_prefetch, self._backward_prefetch = prefetch
        self._reshards_after_forward = reshards_after_forward
        self._forward_order: list[int] = []  # unit indices in the call order of the last forward
        self._last_ended: set[int] = set()
        self._trace: ForwardTrace | None = None  # of the running forward
        self._open_calls: list[tuple[int, int]] = []
        self._run: BackwardRun | None = None
        self._reducing: list[Unit] = []
        self._prefetched: set[int] = set()
        self._unsynced: set[int] = set()  # units with gradients that no_sync left
        self._uses_shared_views = any(flat.uses_shared_view for unit in units for flat in unit.flats)
        # Units that are whole on this rank stay installed from the beginning of a forward to its end.
        self._unsharded_units = dict.fromkeys(unit for unit in self.units if all(flat.is_alias for flat in unit.flats))
        self._rounds: MethodRounds | None = None  # of the method that runs
        self.is_summoned = False
        for unit in self.units:
            # torch holds hooks on full parameters where Python's garbage collector sees no cycle.
            for flat in unit.flats:
                flat.on_gradient = weak_method(self.on_gradient, unit.index)
            self._install_hooks(unit)

    def _install_hooks(self, unit: Unit) -> None:
        """Hook a unit's forward, and refuse calls of modules without their parameters."""

        def forward_pre_hook(_module: torch.nn.Module, _args: object) -> None:
            self.pre_forward(unit)

        def forward_hook(_module: torch.nn.Module, _args: object, output: Any) -> None:
            # With always_call=True torch calls this after an error too, with output None.
            self.post_forward(unit, output, succeeded=output is not None or sys.exc_info()[0] is None)

        def check(module: torch.nn.Module, _args: object) -> None:
            if not unit.has_full_params:
                raise RuntimeError(
                    f"{with_article(type(module).__name__)} of {unit.title} was called while its parameters are not"
                    f" gathered: {_OUTSIDE}"
                )

        for module in {
            module for flat in unit.flats for registrations in flat.registrations for module, _ in registrations
        }:
            # Compiled with the module: a graph is used only while its unit has full parameters, as when it was made.
            module.register_forward_pre_hook(check, prepend=True)
        if not unit.is_root:
            unit.module.register_forward_pre_hook(outside_of_compiler(forward_pre_hook), prepend=True)
            unit.module.register_forward_hook(outside_of_compiler(forward_hook), always_call=True)

    # Forward.

    def prefetch_forward(self) -> None:
        """Start gathering the first units of the next forward."""
        self.recover(keep_prefetched=True)
        with self._abort_on_error():
            for index in (self._forward_order or [0])[: self._forward_prefetch + 1]:
                self.units[index].start_gather()
                self._prefetched.add(index)

    def recover(self, *, keep_prefetched: bool = False) -> None:
        """Free units that an earlier forward left, and abort the group if a backward was cut short."""
        is_in_backward = self._run is not None and current_backward_id() != -1
        if self._trace is not None or is_in_backward or self.is_summoned:
            raise RuntimeError(
                "this method of FSDP can't be called inside of forward, backward or summon_full_params(): call it"
                " before or after"
            )
        if self._run is not None:
            self._abort_incomplete_run(self._run)
        if not keep_prefetched:
            self._prefetched.clear()
        for unit in self.units:
            if not keep_prefetched or unit.state is UnitState.GATHERED or unit.index not in self._prefetched:
                unit.free()

    def _abort_incomplete_run(self, run: BackwardRun) -> None:
        """Abort the group after a backward that failed in the program, while other ranks wait for the rest of it."""
        self._run = None
        if self._group.world_size == 1:
            self._reset()
            return
        error = GroupAbortedError(
            f"an earlier backward of FSDP on rank {self._group.rank} of group {self._group.name!r} ended in an error"
            f" after {run.num_done} of {counted(len(run.steps), 'step')}, so the ranks are out of step. The shards are"
            " intact, the gradients are not: save sharded_state_dict(), and make a new group and a new FSDP on it to"
            " continue.",
            ranks=(self._group.rank,),
        )
        self._fail(error)
        raise error

    @outside_of_compiler
    def pre_forward(self, unit: Unit) -> None:
        """Gather a unit, before its module's forward."""
        if self.is_summoned:
            return
        if self._run is not None and current_backward_id() != -1:
            with self._abort_on_error():
                unit.finish_gather()
            return
        if self._trace is None:
            if not unit.is_root:
                raise RuntimeError(
                    f"{unit.title} was called outside of its model's forward, while its parameters are not gathered:"
                    f" {_OUTSIDE}"
                )
            self.recover(keep_prefetched=True)
            self._trace = ForwardTrace()
            for other in self._unsharded_units:  # a parent may use parameters of children that it does not call
                other.finish_gather()
        call = self._open_call(unit, self._trace)
        if self._rounds is not None:
            if unit.state is not UnitState.GATHERED:
                self._rounds.gather(unit)
            return
        order = self._forward_order
        is_as_before = order[call : call + 1] == [unit.index]
        following = order[call + 1 : call + 1 + self._forward_prefetch] if is_as_before else []
        with self._abort_on_error():
            unit.start_gather()
            for index in following:
                self.units[index].start_gather()
            unit.finish_gather()

    def _open_call(self, unit: Unit, trace: ForwardTrace) -> int:
        trace.versions.setdefault(unit.index, unit.shard_versions())
        call = trace.begin_call(unit.index)
        self._open_calls.append((unit.index, call))
        return call

    @outside_of_compiler
    def post_forward(self, unit: Unit, output: Any, *, succeeded: bool = True) -> None:
        """Free a unit, after its module's forward, and hook the outputs for its backward."""
        if self.is_summoned:
            return
        if self._run is not None:
            call = self._run.recomputed_call(unit.index, is_gathered=unit.state is UnitState.GATHERED)
            self._watch_outputs(output, self._run.trace, call)
            return
        if self._trace is None:  # a failure has ended this forward
            return
        trace, closed = self._trace, self._close_call(unit)
        if closed is None:
            return
        backward_may_follow = succeeded and self._watch_outputs(output, trace, closed)
        if succeeded:
            may_count = backward_may_follow or torch.is_grad_enabled()
            trace.end_call(unit.index, closed, forgets=self._rounds is not None and not may_count)
            self._check_outputs(unit, output)
        is_open = any(index == unit.index for index, _ in self._open_calls)  # as in a recursive module
        if unit.is_root:
            self._trace = None
        if not is_open and not self._stays_gathered(unit, backward_may_follow=backward_may_follow):
            self._free(unit)
        if unit.is_root:
            self._end_forward(trace, succeeded=succeeded, backward_may_follow=backward_may_follow)

    def _close_call(self, unit: Unit) -> int | None:
        """Close a unit's innermost open call, and calls inside it that never ended; returns its index, or None."""
        while self._open_calls:
            index, call = self._open_calls.pop()
            if index == unit.index:
                return call
        return None

    def _stays_gathered(self, unit: Unit, *, backward_may_follow: bool) -> bool:
        """True if a unit is not freed when its forward ends; see [Note: phases of a step]."""
        if unit in self._unsharded_units and not unit.is_root:
            return True
        if self._rounds is not None:
            return False
        is_first_in_backward = unit.is_root or unit.index in self._last_ended
        return backward_may_follow and (is_first_in_backward or not self._reshards_after_forward)

    def _end_forward(self, trace: ForwardTrace, *, succeeded: bool, backward_may_follow: bool) -> None:
        if succeeded:
            self._forward_order = trace.order
            self._last_ended = trace.last_ended(1 + self._backward_prefetch)
        self._open_calls.clear()
        self._prefetched.clear()
        if succeeded and self._uses_shared_views and not backward_may_follow:
            for index, versions in trace.versions.items():  # other ranks may still compute with this rank's shards
                with self._abort_on_error():
                    self.units[index].check_unchanged(versions, until="the end of a forward")
        used = {*trace.versions, *(unit.index for unit in self._unsharded_units)}
        for unit in self.units:
            if not backward_may_follow or unit.index not in used:
                self._free(unit)
            # Programs access gradients and optimizers between forward and backward.
            unit.set_module_params(full=False)
        if succeeded:
            self._wait_for_readers()
            return
        failure = next((group.failure for group in self._axes.other_groups if group.failure is not None), None)
        if failure is not None:  # in the module's own collectives: no rank of the mesh can continue
            self._fail(failure)

    def _watch_outputs(self, output: Any, trace: ForwardTrace, call: int) -> bool:
        """Call `pre_backward` when a gradient reaches an output; returns whether one can."""
        outputs = find_outputs(output)
        hook_gradients(outputs, weak_method(self.pre_backward, trace, call))
        return bool(outputs)

    def _check_outputs(self, unit: Unit, output: Any) -> None:
        """Raise for a parameter among a unit's outputs: it is freed after the call, or after the backward."""
        if any(flat.owns_memory_of(tensor) for tensor in find_tensors(output) for flat in unit.flats):
            with self._abort_on_error():
                raise UnsupportedOpError(
                    f"{unit.title} returned one of its parameters, or a view of one, which exist during its call only:"
                    " return a copy (parameter.clone())"
                )

    # Methods; see [Note: rounds] in `method_rounds.py`.

    @property
    def is_in_call(self) -> bool:
        """True inside of a forward, a method, or `summon_full_params`."""
        return self._trace is not None or self.is_summoned

    @property
    def is_in_method(self) -> bool:
        """True inside of a method."""
        return self._rounds is not None

    def begin_method(self, name: str) -> None:
        """Begin a method, in which units are gathered in rounds; the outermost one from here to the end."""
        self.recover()
        rounds = MethodRounds(name, self.units, self._axes, self._abort_on_error)
        rounds.begin()
        order, self._forward_order = self._forward_order, []  # units that it would prefetch may not be called
        try:
            self.pre_forward(self.units[0])
        finally:
            self._forward_order = order
        self._rounds = rounds

    def end_method(self, output: Any, error: BaseException | None = None) -> None:
        """End a method with an output or an error, when all ranks are done with it."""
        rounds, trace = self._rounds, self._trace
        if rounds is None or trace is None:  # a failure has ended it
            return
        if error is not None and not isinstance(error, Exception):  # as KeyboardInterrupt, which must not wait
            self._fail(error)
            return
        succeeded = False
        try:
            backward_may_follow = error is None and bool(find_outputs(output))
            rounds.finish(error, backward_may_follow=backward_may_follow, digest=trace.digest())
            succeeded = error is None
        finally:
            order, last_ended = self._forward_order, self._last_ended
            self._rounds = None
            self.post_forward(self.units[0], output if succeeded else None, succeeded=succeeded)
            self._forward_order, self._last_ended = order, last_ended

    # Backward.

    def pre_backward(self, trace: ForwardTrace, call: int, _gradient: object = None) -> None:
        """Gather a unit, because autograd has reached the end of its call."""
        if torch.is_grad_enabled():
            with self._abort_on_error():
                raise UnsupportedOpError(
                    "backward or autograd.grad with create_graph=True through an FSDP model: a second backward would"
                    " need parameters that were freed after the first. Use DDP where gradients need gradients."
                )
        if self._rounds is not None:
            raise UnsupportedOpError(
                "a backward inside of a registered forward method of an FSDP: return what it starts from, and call"
                " backward() on that outside"
            )
        if self._run is not None and self._run.trace is not trace and self._run.backward_id != current_backward_id():
            self._abort_incomplete_run(self._run)
        if self._run is None or self._run.trace is not trace:
            self._begin_backward(trace)
        run = self._run
        assert run is not None
        if run.was_used(call):
            return
        with self._abort_on_error():
            while (step := run.next_step) is not None:
                self._execute_next(run)
                if step.call == call:
                    break
            while (step := run.next_step) is not None and step.kind is StepKind.GATHER:
                self._execute_next(run)

    def on_gradient(self, index: int) -> None:
        """Count a gradient, and reduce the next units of the plan that have all of theirs."""
        run, unit = self._run, self.units[index]
        if run is None:
            with self._abort_on_error():
                raise UnsupportedOpError(
                    f"a gradient reached parameters of {unit.title} by another path than through the forward's"
                    " outputs: return all losses, and tensors that lead to one, from forward"
                )
        unit.num_gradients += 1
        if not unit.has_all_gradients:
            return
        with self._abort_on_error():
            while (step := run.next_step) is not None and step.kind is StepKind.REDUCE:
                if not self.units[step.unit].has_all_gradients:
                    return
                self._execute_next(run)

    def reduce_all(self) -> None:
        """Average the gradients that backward passes without synchronisation left on this rank, if any."""
        if not self._unsynced:
            return
        self.recover()
        with self._abort_on_error():
            for index in sorted(self._unsynced, reverse=True):
                self._start_reduce(self.units[index])
            self._finish_reductions()

    def drop_unsynced(self) -> None:
        """Drop gradients that backward passes without synchronisation left."""
        self._unsynced.clear()
        for unit in self.units:
            for flat in unit.flats:
                flat.gradients.drop()

    def _begin_backward(self, trace: ForwardTrace) -> None:
        self._finish_backward()  # of another forward in the same backward, as for the sum of two losses
        for unit in self.units:
            unit.num_gradients = 0
        trainable = [unit.index for unit in self.units if any(flat.num_trainable for flat in unit.flats)]
        self._run = BackwardRun(trace, plan_backward(trace.events, self._backward_prefetch, trainable))
        for unit in self.units:
            unit.set_module_params(full=True)  # for recomputed checkpoints
        queue_callback(self._finish_backward)

    def _finish_backward(self) -> None:
        """Execute the remaining steps of the run, if there is one, and wait for the averages."""
        run = self._run
        if run is None:
            return
        with self._abort_on_error():
            while run.next_step is not None:
                self._execute_next(run)
            self._run = None
            if self.is_syncing:
                # Nested backwards may produce a gradient after its unit was reduced: averages add up.
                for unit in reversed(self.units):
                    if unit.index in self._unsynced or any(flat.gradients.exist for flat in unit.flats):
                        self._start_reduce(unit)
            self._finish_reductions()
            for unit in self.units:
                unit.free()
        self._wait_for_readers()

    def _wait_for_readers(self) -> None:
        """Return when no rank computes with this rank's shards any more; see [Note: shared shards]."""
        if self._uses_shared_views:
            where = f"Rank {self._group.rank} was at the end of a forward or backward of an FSDP model."
            with self._abort_on_error(), add_error_context(lambda: where, ADVICE):
                barrier(group=self._axes.shard)

    def _execute_next(self, run: BackwardRun) -> None:
        step = run.advance()
        unit = self.units[step.unit]
        match step.kind:
            case StepKind.GATHER:
                unit.start_gather()
            case StepKind.USE:
                unit.finish_gather()
                unit.check_unchanged(run.trace.versions[step.unit])
            case StepKind.FREE:
                if unit not in self._unsharded_units:
                    unit.free()
            # Due when the unit has all its gradients (`on_gradient`), at the latest when autograd has passed the
            # beginning of the unit's first call: it reaches an earlier call (`pre_backward`), or backward ends.
            case StepKind.REDUCE if self.is_syncing:
                self._start_reduce(unit)
            case StepKind.REDUCE:
                self._unsynced.add(unit.index)

    def _start_reduce(self, unit: Unit) -> None:
        self._unsynced.discard(unit.index)
        for earlier in self._reducing:
            earlier.continue_reduce()
        unit.start_reduce(self._buffer)
        self._reducing.append(unit)

    def _finish_reductions(self) -> None:
        reducing, self._reducing = self._reducing, []
        for unit in reducing:
            unit.continue_reduce()
        for unit in reducing:
            unit.finish_reduce()

    # Failures and cleanup.

    def _free(self, unit: Unit) -> None:
        with self._abort_on_error():
            unit.free()

    @contextlib.contextmanager
    def _abort_on_error(self) -> Iterator[None]:
        """Abort the groups when something fails inside the block: other ranks wait for later collectives."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Abort the groups, and return to shards: this rank is out of step."""
        here = f"FSDP failed with {describe_error(error)}"
        for group in (self._group, self._axes.shard, self._axes.replicate, *self._axes.other_groups):
            if group is not None and group.failure is None:
                group.abort(error if isinstance(error, DistributedError) else here)
        self._reset()

    def _reset(self) -> None:
        """Forget everything under way, and return to shards."""
        self._trace = self._run = self._rounds = None
        self._open_calls.clear()
        self._reducing.clear()
        self._prefetched.clear()
        self._unsynced.clear()
        self._buffer.reset()
        for unit in self.units:
            unit.reset_after_failure()
