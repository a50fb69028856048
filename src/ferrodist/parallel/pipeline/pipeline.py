"""`Pipeline`: one rank's stages, and the steps that all ranks make together.

The group in which ranks make steps together: what fails on one of them fails on all.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ferrodist.backends.process_group import resolve_group
from ferrodist.backends.subgroup import SubBackend
from ferrodist.collectives.all_to_all import barrier
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
from ferrodist.parallel.pipeline.runtime import Executor, StepInputs
from ferrodist.parallel.pipeline.schedule.build import PipelineSchedule, resolve_schedule
from ferrodist.parallel.pipeline.schedule.lowering import backward_only, forward_only
from ferrodist.parallel.pipeline.split import Stages, find_shared
from ferrodist.parallel.pipeline.stage import Stage, find_edges
from ferrodist.parallel.pipeline.state_dict import StateDictMapper
from ferrodist.parallel.pipeline.tied_weights import TiedParameters
from ferrodist.parallel.wrapped_names import TransparentWrapper
from ferrodist.torch_private.modules import own_modules
from ferrodist.wording import counted, with_article

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.parallel.pipeline.schedule.ir import Action, Schedule


class StepScope:
    """A group of the pipeline's ranks, made anew after each failure: nothing of what failed can come to the new one.

    Args:
        parent: The group that the pipeline was made with.
        executor: What runs in it; knows what it was doing, and gives it up.
        shared: The parameters that ranks share, which have groups of their own.
    """

    def __init__(self, parent: Backend, executor: Executor, shared: TiedParameters) -> None:
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


class Pipeline(TransparentWrapper):
    """A model in stages, of which each rank has some; batches flow through them in microbatches.

    Making it is a collective: every rank of the group makes it with the same arguments, but for the stages of other
    ranks, which may be None. Then all ranks call `step`, or `forward`, as often as the others.

    The parameters of this module are those of this rank's stages, so that each rank has an optimizer for its own. They
    have the names that they have in the whole model, here and in the state dict: ``save_distributed`` takes the
    pipeline, and a checkpoint of it can be loaded by any number of ranks, with any schedule, or by the model itself.

    When a stage raises, all ranks raise, and may go on with the next step; gradients have no meaning then.

    Args:
        stages: All stages of the model in their order, with None for those of other ranks, if you like: see
            `split_sequential`. A module alone is the only stage of this rank. A stage is called with what the one
            before returned: several arguments if that is a tuple, but for a `torch.nn.Sequential`, which takes the
            tuple, as its children do from each other. Shapes may differ from microbatch to microbatch.
        group: The group; None is the default group.
        num_microbatches: How many parts a batch is divided into.
        schedule: What is done when; with more stages than ranks one that allows that. A `Schedule` is your own.
        loss_fn: Called as ``loss_fn(output, target)`` for each microbatch where the last stage is; gives a tensor of
            one element. None if the last stage returns that.
        loss_reduction: Whether the loss of a batch is the mean of its microbatches' losses, by their samples, or their
            sum. The gradients are those of that loss: it is scaled once, where it begins.
        skips: What goes past stages: names, each with the stage that gives it, in a `PipelineOutput`, and the one that
            takes it, as a keyword argument.
        shared: Parameters that several stages have in common: for each its places, as (stage, name). Their gradients
            are added up over the ranks. None finds them, where this rank is given all stages.

    Raises:
        CollectiveMismatchError: On every rank, when they were not given the same, naming the first difference.
        UnsupportedOpError: On every rank, when one can't make it of what it was given.
        TypeError, ValueError: An argument is wrong.
    """

    stages: torch.nn.ModuleDict

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
        if isinstance(stages, torch.nn.Module):
            alone = stages
            stages = Stages([alone if number == rank else None for number in range(num_ranks)])
        self._schedule = resolve_schedule(schedule, num_ranks, num_microbatches, len(stages))
        self._edges = find_edges(len(stages), skips or {})
        self._loss_fn = loss_fn
        self._losses = Losses(loss_reduction, self._schedule.num_microbatches)
        ranks = self._schedule.stage_ranks
        found = {number: stages[number] for number in self._schedule.rank_stages[rank]}
        self._own = {number: module for number, module in found.items() if module is not None}
        shared = find_shared(stages) if shared is None else shared
        self._shared = self._compare(stages, shared)
        self.stages = torch.nn.ModuleDict({str(number): module for number, module in self._own.items()})
        """This rank's stages, by their numbers."""
        prefixes = (stages if isinstance(stages, Stages) else Stages(stages)).prefixes
        self._whole = StateDictMapper(self._own, prefixes)
        names = [[f"{prefixes[stage]}{name}" for stage, name in places] for places in shared]
        self._first_names = {name: of[0] for of in names for name in of}
        self._loaded: dict[str, str] = {}
        """For each stage what the names in the state that is being loaded begin with, and what they began with."""
        self.register_load_state_dict_post_hook(_tell_whole_names)  # type: ignore[no-untyped-call]
        self._own_actions = self._schedule.actions[rank]
        orders = self._schedule.backward_orders
        running = {number: Stage(module, orders[number][-1]) for number, module in self._own.items()}
        self._executor = Executor(running, ranks, self._edges, self._schedule.num_microbatches)
        self._step_group = StepScope(self._parent, self._executor, self._shared)
        with self._step_group.together(None) as (_, limit):
            self._shared.equalize(Deadline(limit))

    @property
    def schedule(self) -> Schedule:
        """What is done when; ``print(draw_text(pipeline.schedule))`` draws it."""
        return self._schedule

    @property
    def num_microbatches(self) -> int:
        """How many parts a batch is divided into."""
        return self._schedule.num_microbatches

    @property
    def losses(self) -> list[float]:
        """Of the microbatches of the last step; the same on all ranks."""
        return self._losses.values

    @property
    def peak_activations(self) -> int:
        """How many microbatches were at most between forward and backward in the last step, in this rank's stages."""
        return self._executor.peak_live

    def step(self, inputs: Any = None, targets: Any = None, *, timeout: float | None = None) -> torch.Tensor:
        """Go forward and backward with a batch; all ranks call this, and have their gradients when it returns.

        Gradients are added to those that are there, as by ``backward()``.

        Args:
            inputs: What the first stage is called with; read where that is. Tensors are divided along dim 0, in nested
                values too; a tuple is several arguments (a `torch.nn.Sequential` takes it as one). Or `Microbatches`.
            targets: For ``loss_fn``, divided in the same way; read where the last stage is.
            timeout: Seconds to wait for another rank, whatever it is doing: as long as a forward of the whole model may
                take. None takes the group's.

        Returns:
            The loss of the batch, on all ranks: no dims, float64, without history.

        Raises:
            PipelineError: On all ranks: a stage has raised; it is named, with the microbatch.
            TypeError, ValueError: An argument is wrong; PipelineError on the other ranks.
            DistributedError: A rank was lost, or is late.
        """
        with (
            self._step_group.together(timeout) as (group, limit),
            torch.inference_mode(mode=False),
            torch.enable_grad(),
        ):
            self._check_stages()
            self._executor.forget()  # a forward may have been there without a backward
            feed = self._feed(inputs, targets)
            self._shared.begin()
            self._executor.run(self._own_actions, feed, group, limit)
            self._shared.finish(group, Deadline(limit))
            return self._losses.share(group, limit)

    def forward(self, inputs: Any = None, *, timeout: float | None = None) -> Any:
        """Go forward alone; all ranks call this.

        Where gradients are enabled `backward` may follow; in ``torch.no_grad()`` nothing is kept for it.

        Args:
            inputs: As for `step`.
            timeout: As for `step`.

        Returns:
            What the last stage returns, where that is: joined along dim 0, or as `Microbatches` if the inputs are. It
            has no history: give its gradient to `backward`. None on other ranks.

        Raises:
            As `step`.
        """
        with self._step_group.together(timeout) as (group, limit):
            self._check_stages()
            self._executor.forget()
            outputs = Outputs()
            microbatches = self._split(inputs, 0)
            feed = StepInputs(microbatches, outputs.take, {})
            self._executor.run(self._forward_actions, feed, group, limit)
            was_divided = torch.tensor([self._has(0) and isinstance(inputs, Microbatches)], device="cpu")
            was_divided = allreduce(was_divided, ReduceOp.MAX, group=group, timeout=limit)
            outputs.is_joined = not was_divided
            result = outputs.give()
            self._executor.outputs = outputs if self._executor.has_live else None
            barrier(group, timeout=limit)
            return result

    def backward(self, gradients: Any = None, *, timeout: float | None = None) -> None:
        """Go backward from the last `forward`; all ranks call this.

        Args:
            gradients: Of what `forward` returned, and nested as that is; read where the last stage is.
            timeout: As for `step`.

        Raises:
            RuntimeError: There was no forward with gradients enabled. Or as `step`.
        """
        with self._step_group.together(timeout) as (group, limit):
            outputs, self._executor.outputs = self._executor.outputs, None
            if outputs is None:
                raise RuntimeError("there is no forward to go backward from: call forward() first, without no_grad()")
            feed = StepInputs([], outputs.take, outputs.split(gradients) if self._has(-1) else {})
            self._shared.begin()
            self._executor.run(self._backward_actions, feed, group, limit)
            self._shared.finish(group, Deadline(limit))
            barrier(group, timeout=limit)

    @functools.cached_property
    def _forward_actions(self) -> tuple[Action, ...]:
        return forward_only(self._schedule).actions[self._parent.rank]

    @functools.cached_property
    def _backward_actions(self) -> tuple[Action, ...]:
        return backward_only(self._schedule).actions[self._parent.rank]

    @property
    def is_partial(self) -> bool:
        """Whether other ranks have other parameters of the model, as `OptimizerState` asks."""
        return self._parent.world_size > 1

    @property
    def first_names(self) -> Mapping[str, str]:
        """For names of shared parameters in the whole model those they have there first, as `OptimizerState` asks."""
        return self._first_names

    def checkpoint_module(self) -> torch.nn.Module:
        """The module that `save_distributed` saves when it is given this: this rank's part of the whole model."""
        return self._whole.make()

    def inner_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """This rank's stages, by their places in the whole model."""
        return self._whole.places()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The tensors of this rank's stages, by their names in the whole model.

        Raises:
            TypeError: A stage is wrapped, as DDP and FSDP do: `save_distributed` takes the pipeline then.
        """
        self._check_plain("state_dict")
        return self.checkpoint_module().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # noqa: FBT001, FBT002 - torch's signature
        """Take this rank's part of a state of the whole model; the rest is passed over.

        Raises:
            RuntimeError: Something of this rank's stages is missing, or has another shape.
            TypeError: As for `state_dict`.
        """
        return super().load_state_dict(self._whole.rename_versions(state_dict), strict=strict, assign=assign)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        *_: Any,
    ) -> None:
        """Give what is loaded the names of `stages`; torch calls this, and then goes on to those."""
        self._check_plain("load_state_dict")
        self._loaded = self._whole.rename(state_dict, prefix)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a Pipeline belongs to its group and can't be copied or pickled: copy its stages, or save its state_dict()"
        )

    def _check_plain(self, method: str) -> None:
        for number, module in self._own.items():
            if hasattr(module, "checkpoint_module"):
                raise TypeError(
                    f"stage {number} is in {with_article(type(module).__name__)}, so that {method}() of the"
                    " pipeline has no one"
                    " meaning: call it on the stages, or use save_distributed and load_distributed with the pipeline"
                )

    def _check_stages(self) -> None:
        for number, module in self._own.items():
            if own_modules(self.stages).get(str(number)) is not module:
                raise RuntimeError(f"stage {number} was replaced: make a new Pipeline of the stages that there are now")

    def _has(self, number: int) -> bool:
        """Whether the first stage, or the last with -1, is this rank's."""
        return self._schedule.stage_ranks[number] == self._parent.rank

    def _split(self, inputs: Any, number: int) -> list[Any]:
        if not self._has(number):
            return []
        what = "inputs" if number == 0 else "targets"
        parts, counts = split_batch(inputs, self.num_microbatches, what)
        self._losses.count(counts, what)
        return parts

    def _feed(self, inputs: Any, targets: Any) -> StepInputs:
        self._losses.begin()
        microbatches = self._split(inputs, 0)
        if self._loss_fn is None and targets is not None:
            raise ValueError("targets are for loss_fn, and the pipeline was made without one")
        of = self._split(targets, -1) if self._loss_fn is not None else []

        def take(microbatch: int, value: Any) -> list[torch.Tensor]:
            return self._losses.take(microbatch, self._loss_fn(value, of[microbatch]) if self._loss_fn else value)

        return StepInputs(microbatches, take, self._losses.gradients)

    def _compare(
        self, stages: Sequence[torch.nn.Module | None], shared: Sequence[Sequence[tuple[int, str]]]
    ) -> TiedParameters:
        """See that all ranks make the same pipeline; gives the parameters that this one's stages share."""
        missing = [stage for stage in self._schedule.rank_stages[self._parent.rank] if stages[stage] is None]
        lines = [
            f"{counted(len(stages), 'stage')}",
            f"{counted(self.num_microbatches, 'microbatch')}",
            f"the schedule {self._schedule.name!r}",
            f"the {self._losses.reduction.value} of the losses",
            *(
                f"the skip {edge.name!r} from stage {edge.source} to stage {edge.target}"
                for edge in self._edges
                if edge.name
            ),
            *(
                f"the shared parameter {', '.join(f'{name} of stage {stage}' for stage, name in places)}"
                for places in shared
            ),
            *str(self._schedule).splitlines(),
        ]
        refusal = f"its stage {missing[0]} is None" if missing else None
        found = TiedParameters((), {}, ())
        try:
            found = TiedParameters(shared, self._own, self._schedule.stage_ranks)
        except ValueError as error:
            refusal = refusal or str(error)
        deadline = Deadline(self._parent.timeout)
        verify_across_ranks(lines, self._parent, deadline, maker="Pipeline", module="model", refusal=refusal)
        return found


def _tell_whole_names(pipeline: Pipeline, keys: Any) -> None:
    """Name what a state lacks as in the whole model, and pass over the rest; torch calls this after loading."""
    for own, place in pipeline._loaded.items():  # noqa: SLF001 - its own hook
        keys.missing_keys[:] = [
            place + name[len(own) :] if name.startswith(own) else name for name in keys.missing_keys
        ]
        keys.unexpected_keys[:] = [name for name in keys.unexpected_keys if not name.startswith(own)]
