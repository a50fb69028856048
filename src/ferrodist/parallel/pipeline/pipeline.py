"""`Pipeline`: one rank's stages, and the steps that all ranks run together in a `StepScope`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ferrodist.arguments import check_type
from ferrodist.backends.process_group import resolve_group
from ferrodist.backends.subgroup import SubBackend
from ferrodist.collectives.barrier import barrier
from ferrodist.collectives.reduce import allreduce
from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.deadline import Deadline, check_timeout
from ferrodist.errors import (
    CollectiveMismatchError,
    DistributedError,
    DistributedTimeoutError,
    PipelineError,
    describe_error,
)
from ferrodist.parallel.module_init import verify_across_ranks
from ferrodist.parallel.pipeline.microbatch import Losses, LossReduction, Microbatches, Outputs, split_batch
from ferrodist.parallel.pipeline.model_mappings import check_inputs
from ferrodist.parallel.pipeline.model_stage import ModelStage
from ferrodist.parallel.pipeline.schedule.build import PipelineSchedule, resolve_schedule
from ferrodist.parallel.pipeline.schedule.lowering import backward_only, forward_only
from ferrodist.parallel.pipeline.schedule_executor import ScheduleExecutor, StepData
from ferrodist.parallel.pipeline.split import Stages, find_shared
from ferrodist.parallel.pipeline.stage import Stage, find_edges
from ferrodist.parallel.pipeline.state_dict import StateDictMapper
from ferrodist.parallel.pipeline.tied_parameters import TiedParameters, check_locations
from ferrodist.parallel.transparent_wrapper import TransparentWrapper
from ferrodist.torch_private.modules import own_modules
from ferrodist.wording import counted, with_article

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ferrodist.backends.base import Backend
    from ferrodist.parallel.pipeline.schedule.ir import Action, Schedule


class StepScope:
    """The sub-group of steps, made anew after each failure: so no message of a failed step reaches the next.

    A sub-group of a native group has its fast path, too.
    """

    def __init__(self, parent: Backend, executor: ScheduleExecutor, shared: TiedParameters) -> None:
        self._parent, self._executor, self._shared = parent, executor, shared
        self._group: Backend | None = None

    @contextlib.contextmanager
    def run_together(self, timeout: float | None) -> Iterator[tuple[Backend, float]]:
        """Run a block on all ranks; it fails on all or none.

        Yields the steps' sub-group, and the longest wait for another rank, in seconds.
        """
        if self._group is None:
            label = "ferrodist.pipeline"
            self._group = SubBackend(self._parent, range(self._parent.world_size), label=label, name="pipeline")
            self._shared.attach(self._group)
        group = self._group
        try:
            yield group, self._parent.timeout if timeout is None else check_timeout(timeout)
        except BaseException as error:
            reported = self._fail(group, error)
            if reported is None:
                raise
            try:
                raise reported from error
            finally:
                del reported  # it and this frame would reference each other, and hold the activations

    def _fail(self, group: Backend, error: BaseException) -> DistributedError | None:
        """Abort the group with an error and cancel transfers; returns the error to raise in its place, if any."""
        action = self._executor.current_action
        self._group = None
        # Abort before canceling, or other ranks would see transfers end without a reason. Groups get copies of the
        # error, since they store it, and the one raised here references frames.
        if isinstance(error, DistributedError) and group.failure is not None:
            reported = error
        else:
            reported = self._explain(error, action)
            group.abort(reported.fresh())
        self._shared.abort(reported.fresh())
        self._executor.reset()
        self._executor.drop_unsynced()
        return None if reported is error or action is None or not isinstance(error, Exception) else reported

    def _explain(self, error: BaseException, action: Action | None) -> DistributedError:
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


class Pipeline(TransparentWrapper):
    """A model in stages, of which each rank has some; batches flow through them in microbatches.

    Construction is a collective: every rank of the group passes the same arguments, except the stages of other ranks,
    which may be None. Then all ranks call `step`, or `forward`, as often as the others.

    The parameters of this module are those of this rank's stages, so that each rank has an optimizer for its own. They
    have the names of the whole model, here and in the state dict: ``save_distributed`` takes the pipeline, and a
    checkpoint of it can be loaded by any number of ranks, with any schedule, or by the model itself.

    When a stage raises, all ranks raise, and may continue with the next step; gradients are undefined then.

    Args:
        stages: All stages of the model in order; those of other ranks may be None: see `split_sequential`. A single
            module is the only stage of this rank. A stage is called with the result of the previous one: several
            arguments if that is a tuple, but for a `torch.nn.Sequential`, which takes the tuple, as its children do
            from each other. Shapes may differ from microbatch to microbatch.
        group: The group; None is the default group.
        num_microbatches: Number of microbatches of a batch.
        schedule: The schedule; with more stages than ranks one that allows that. A `Schedule` is a custom one.
        loss_fn: Called as ``loss_fn(output, target)`` for each microbatch on the rank of the last stage; returns a
            tensor of one element. None if the last stage returns the loss.
        loss_reduction: Whether the loss of a batch is the mean of its microbatches' losses, by their samples, or their
            sum. The gradients are those of that loss, which is scaled once, at the start of backward.
        skips: Values that bypass stages: names, each with the stage that returns it, in a `PipelineOutput`, and the
            stage that gets it, as a keyword argument.
        shared: Parameters that several stages share: for each the (stage, name) pairs. Their gradients are added up
            over the ranks. None finds them, where this rank is given all stages, or takes those of `Stages`.

    Raises:
        CollectiveMismatchError: On every rank, when their arguments differ, naming the first difference.
        UnsupportedOpError: On every rank, when one rank's arguments can't make a pipeline.
        TypeError, ValueError: An argument is wrong.
    """

    schedule: Schedule
    """The schedule; ``print(draw_text(pipeline.schedule))`` draws it."""
    num_microbatches: int
    """Number of microbatches of a batch."""
    stages: torch.nn.ModuleDict
    """This rank's stages, by their indices."""
    is_partial: bool
    """True if other ranks have other parameters of the model; read by `OptimizerState`."""
    first_names: Mapping[str, str]
    """For each name of a shared parameter in the whole model its first one; read by `OptimizerState`."""

    def __init__(
        self,
        stages: Sequence[torch.nn.Module | None] | torch.nn.Module,
        group: Backend | None = None,
        num_microbatches: int = 1,
        *,
        schedule: PipelineSchedule | Schedule = PipelineSchedule.GPIPE,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        loss_reduction: LossReduction = LossReduction.MEAN,
        skips: Mapping[str, tuple[int, int]] | None = None,
        shared: Sequence[Sequence[tuple[int, str]]] | None = None,
    ) -> None:
        super().__init__()
        self._parent = resolve_group(group)
        rank, num_ranks = self._parent.rank, self._parent.world_size
        if isinstance(stages, torch.nn.Module) and not isinstance(stages, torch.nn.ModuleList):
            alone = stages
            stages = [alone if index == rank else None for index in range(num_ranks)]
        if not isinstance(stages, Stages):
            check_type(stages, Sequence, "stages must be a module or a list of modules; pass list(...) of others")
            stages = Stages(stages)
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function of outputs and targets or None, not {type(loss_fn).__name__}")
        self.is_partial = num_ranks > 1
        self.schedule = resolve_schedule(schedule, num_ranks, num_microbatches, len(stages))
        self.num_microbatches = self.schedule.num_microbatches
        self._edges = find_edges(len(stages), skips or {})
        self._loss_fn = loss_fn
        self._losses = Losses(loss_reduction, self.num_microbatches)
        ranks = self.schedule.stage_ranks
        found = {index: stages[index] for index in self.schedule.rank_stages[rank]}
        self._local_stages = {index: module for index, module in found.items() if module is not None}
        if shared is None:
            shared = find_shared(stages) if stages.shared is None else stages.shared
        shared = check_locations(shared)
        self._shared = self._verify_and_share(stages, shared)
        self.stages = torch.nn.ModuleDict({str(index): module for index, module in self._local_stages.items()})
        self._mapper = StateDictMapper(self._local_stages, stages.prefixes)
        names = [[f"{stages.prefixes[stage]}{name}" for stage, name in locations] for locations in shared]
        self.first_names = {name: same[0] for same in names for name in same}
        self._loaded_prefixes: dict[str, str] = {}  # each stage's prefix here: that in the state being loaded
        self.register_load_state_dict_post_hook(_restore_model_names)  # type: ignore[no-untyped-call]
        orders = self.schedule.backward_orders
        running = {index: Stage(module, orders[index][-1]) for index, module in self._local_stages.items()}
        self._executor = ScheduleExecutor(running, ranks, self._edges, self.num_microbatches)
        self._step_scope = StepScope(self._parent, self._executor, self._shared)
        with self._step_scope.run_together(None) as (_, limit):
            self._shared.broadcast_values(Deadline(limit))

    @property
    def losses(self) -> list[float]:
        """The losses of the last step's microbatches; the same on all ranks."""
        return self._losses.all_losses

    @property
    def peak_activations(self) -> int:
        """The largest number of microbatches between forward and backward in the last step, in this rank's stages."""
        return self._executor.peak_in_flight

    def step(self, inputs: Any = None, targets: Any = None, *, timeout: float | None = None) -> torch.Tensor:
        """Run forward and backward on a batch; all ranks call this, and have their gradients when it returns.

        Gradients are added to existing ones, as by ``backward()``.

        Args:
            inputs: Input of the first stage; read on its rank. Tensors are split along dim 0, in nested values too; a
                tuple is several arguments (a `torch.nn.Sequential` takes it as one). Or `Microbatches`.
            targets: Targets for ``loss_fn``, split in the same way; read on the rank of the last stage.
            timeout: Seconds to wait for another rank, whatever it is doing: as long as a forward of the whole model may
                take. None uses the group's.

        Returns:
            The loss of the batch, on all ranks: no dims, float64, without history.

        Raises:
            PipelineError: On all ranks: a stage has raised; it is named, with the microbatch.
            TypeError, ValueError: An argument is wrong; PipelineError on the other ranks.
            DistributedError: A rank was lost, or is late.
        """
        with (
            self._step_scope.run_together(timeout) as (group, limit),
            torch.inference_mode(mode=False),
            torch.enable_grad(),
        ):
            self._check_stages()
            self._executor.reset()  # after a forward without a backward
            step_data = self._step_data(inputs, targets)
            self._shared.before_step()  # nothing without shared parameters, as after_step
            self._executor.run(self.schedule.actions[self._parent.rank], step_data, group, limit)
            self._shared.after_step(group, Deadline(limit))
            return self._losses.reduce_to_all(group, limit)

    def forward(self, inputs: Any = None, *, timeout: float | None = None) -> Any:
        """Run forward alone; all ranks call this.

        Where gradients are enabled `backward` may follow; in ``torch.no_grad()`` nothing is saved for it.

        Args:
            inputs: As for `step`.
            timeout: As for `step`.

        Returns:
            The result of the last stage, on its rank: concatenated along dim 0, or as `Microbatches` if the inputs are.
            It has no history: pass its gradient to `backward`. None on other ranks.

        Raises:
            As `step`.
        """
        with self._step_scope.run_together(timeout) as (group, limit):
            self._check_stages()
            self._executor.reset()
            outputs = Outputs()
            microbatches = self._split(inputs, 0)
            step_data = StepData(microbatches, outputs.add, {})
            self._executor.run(self._forward_actions, step_data, group, limit)
            is_divided = torch.tensor([self._owns_stage(0) and isinstance(inputs, Microbatches)], device="cpu")
            is_divided = allreduce(is_divided, ReduceOp.MAX, group=group, timeout=limit)
            outputs.is_joined = not is_divided
            result = outputs.result()
            self._executor.outputs_for_backward = outputs if torch.is_grad_enabled() else None
            barrier(group, timeout=limit)
            return result

    def backward(self, gradients: Any = None, *, timeout: float | None = None) -> None:
        """Run backward for the last `forward`; all ranks call this.

        Args:
            gradients: Gradients of the result of `forward`, in the same nesting; read on the rank of the last stage.
            timeout: As for `step`.

        Raises:
            RuntimeError: There was no forward with gradients enabled. Or as `step`.
        """
        with self._step_scope.run_together(timeout) as (group, limit):
            outputs, self._executor.outputs_for_backward = self._executor.outputs_for_backward, None
            if outputs is None:
                raise RuntimeError("there is no forward to run backward from: call forward() first, without no_grad()")
            step_data = StepData([], outputs.add, outputs.split(gradients) if self._owns_stage(-1) else {})
            self._shared.before_step()
            self._executor.run(self._backward_actions, step_data, group, limit)
            self._shared.after_step(group, Deadline(limit))
            barrier(group, timeout=limit)

    @functools.cached_property
    def _forward_actions(self) -> tuple[Action, ...]:
        return forward_only(self.schedule).actions[self._parent.rank]

    @functools.cached_property
    def _backward_actions(self) -> tuple[Action, ...]:
        return backward_only(self.schedule).actions[self._parent.rank]

    def checkpoint_module(self) -> torch.nn.Module:
        """The module that `save_distributed` saves for this wrapper: this rank's part of the whole model."""
        return self._mapper.make_module()

    def inner_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """This rank's stages, by their names in the whole model."""
        return self._mapper.inner_modules()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The tensors of this rank's stages, by their names in the whole model.

        Raises:
            TypeError: A stage is wrapped, as by DDP or FSDP: `save_distributed` takes the pipeline then.
        """
        self._check_unwrapped("state_dict")
        return self.checkpoint_module().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # noqa: FBT001, FBT002 - torch's signature
        """Load this rank's part of a state of the whole model; the rest is ignored.

        Raises:
            RuntimeError: A tensor of this rank's stages is missing, or has another shape.
            TypeError: As for `state_dict`.
        """
        return super().load_state_dict(self._mapper.rename_versions(state_dict), strict=strict, assign=assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Rename the loaded tensors for `stages`, which torch loads next."""
        self._check_unwrapped("load_state_dict")
        self._loaded_prefixes = self._mapper.rename(state_dict, prefix)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a Pipeline belongs to its group and can't be copied or pickled: copy its stages, or save its state_dict()"
        )

    def _check_unwrapped(self, method: str) -> None:
        for index, module in self._local_stages.items():
            if hasattr(module, "checkpoint_module"):
                raise TypeError(
                    f"stage {index} is in {with_article(type(module).__name__)}, so that {method}() of the pipeline is"
                    " ambiguous: call it on the stages, or use save_distributed and load_distributed with the pipeline"
                )

    def _check_stages(self) -> None:
        for index, module in self._local_stages.items():
            if own_modules(self.stages).get(str(index)) is not module:
                raise RuntimeError(f"stage {index} was replaced: make a new Pipeline of the present stages")

    def _owns_stage(self, index: int) -> bool:
        """True if this rank has the stage of index 0 or -1."""
        return self.schedule.stage_ranks[index] == self._parent.rank

    def _split(self, inputs: Any, index: int) -> list[Any]:
        if not self._owns_stage(index):
            return []
        what = "inputs" if index == 0 else "targets"
        if index == 0 and isinstance(self._local_stages[0], ModelStage) and not isinstance(inputs, Microbatches):
            check_inputs((inputs,), {})  # a microbatch has copies of the batch's dicts and lists
        microbatches, counts = split_batch(inputs, self.num_microbatches, what)
        self._losses.set_sample_counts(counts, what)
        return microbatches

    def _step_data(self, inputs: Any, targets: Any) -> StepData:
        self._losses.reset()
        microbatches = self._split(inputs, 0)
        if self._loss_fn is None and targets is not None:
            raise ValueError("targets are for loss_fn, but the pipeline was made without one")
        microbatch_targets = self._split(targets, -1) if self._loss_fn is not None else []

        def on_output(microbatch: int, value: Any) -> list[torch.Tensor]:
            loss = self._loss_fn(value, microbatch_targets[microbatch]) if self._loss_fn else value
            return self._losses.add(microbatch, loss)

        return StepData(microbatches, on_output, self._losses.start_gradients)  # which `Losses.add` fills

    def _verify_and_share(
        self, stages: Sequence[torch.nn.Module | None], shared: Sequence[Sequence[tuple[int, str]]]
    ) -> TiedParameters:
        """Verify that all ranks make the same pipeline; returns this rank's shared parameters."""
        missing = [stage for stage in self.schedule.rank_stages[self._parent.rank] if stages[stage] is None]
        lines = [
            f"{counted(len(stages), 'stage')}",
            f"{counted(self.num_microbatches, 'microbatch')}",
            f"the schedule {self.schedule.name!r}",
            f"the {self._losses.reduction.value} of the losses",
            *(
                f"the skip {edge.name!r} from stage {edge.source} to stage {edge.target}"
                for edge in self._edges
                if edge.name
            ),
            *(
                f"the shared parameter {', '.join(f'{name} of stage {stage}' for stage, name in locations)}"
                for locations in shared
            ),
            *str(self.schedule).splitlines(),
        ]
        refusal = f"its stage {missing[0]} is None" if missing else None
        found = TiedParameters((), {}, ())
        try:
            found = TiedParameters(shared, self._local_stages, self.schedule.stage_ranks)
        except ValueError as error:
            refusal = refusal or str(error)
        deadline = Deadline(self._parent.timeout)
        verify_across_ranks(lines, self._parent, deadline, maker="Pipeline", module="model", refusal=refusal)
        return found


def _restore_model_names(pipeline: Pipeline, keys: Any) -> None:
    """Give missing keys their names in the whole model, and ignore unexpected ones; torch calls this after loading."""
    for own, in_model in pipeline._loaded_prefixes.items():  # noqa: SLF001 - its own hook
        keys.missing_keys[:] = [
            in_model + name[len(own) :] if name.startswith(own) else name for name in keys.missing_keys
        ]
        keys.unexpected_keys[:] = [name for name in keys.unexpected_keys if not name.startswith(own)]
