"""Pipeline parallelism: a model in stages, each on a rank of its own, through which microbatches flow.

::

    training     Pipeline with its PipelineSchedule; Microbatches, PipelineOutput, LossReduction
    stages       split_sequential, split_model, Balance -> Stages; find_shared; ModelStage
    schedules    build_schedule -> Schedule, also from text; check_schedule, add_communication
    analysis     predict with Costs -> Timeline; draw_text, plot, count_activations

The modules::

    pipeline.py             Pipeline, and the scope of its steps   microbatch.py          batches split; outputs, losses
    schedule_executor.py    a rank's actions, sends, receives      tied_parameters.py     parameters of several stages
    schedule/ir.py          schedules as data, and as text         stage.py               Stage: forward and backward
    schedule/build.py       a schedule by its name                 split_backward.py      backward in two phases
    schedule/lowering.py    sends and receives added               state_dict.py          names of the whole model
    schedule/simulate.py    when each rank computes                split.py               a Sequential cut into stages
    schedule/validate.py    schedules checked before use           measure.py             time of each of its children
    schedule/timeline.py    predicted time and memory             split_model.py          another model cut into stages
    schedule/visualize.py   pictures, as text and as a plot       model_units.py          its blocks and other parts
    model_tracer.py         traced: what these pass to each other model_skeleton.py       its code without parameters
    model_flow.py           what each stage gets of earlier ones  model_mappings.py       dicts and lists passed on
    model_memory.py         tensors that share memory in a stage  model_state.py          what modules keep and share
    model_division.py       common data of its stages, a trace    model_stage.py          its code, run by each stage
"""

from ferrodist.errors import PipelineError
from ferrodist.parallel.pipeline.microbatch import LossReduction, Microbatches
from ferrodist.parallel.pipeline.model_stage import ModelStage
from ferrodist.parallel.pipeline.pipeline import Pipeline
from ferrodist.parallel.pipeline.schedule.build import PipelineSchedule, build_schedule
from ferrodist.parallel.pipeline.schedule.ir import Action, ActionKind, Schedule
from ferrodist.parallel.pipeline.schedule.lowering import add_communication
from ferrodist.parallel.pipeline.schedule.timeline import Costs, Timeline, count_activations, predict
from ferrodist.parallel.pipeline.schedule.validate import check_schedule
from ferrodist.parallel.pipeline.schedule.visualize import draw_text, plot
from ferrodist.parallel.pipeline.split import Balance, Stages, find_shared, split_sequential
from ferrodist.parallel.pipeline.split_model import split_model
from ferrodist.parallel.pipeline.stage import PipelineOutput

__all__ = [
    "Action",
    "ActionKind",
    "Balance",
    "Costs",
    "LossReduction",
    "Microbatches",
    "ModelStage",
    "Pipeline",
    "PipelineError",
    "PipelineOutput",
    "PipelineSchedule",
    "Schedule",
    "Stages",
    "Timeline",
    "add_communication",
    "build_schedule",
    "check_schedule",
    "count_activations",
    "draw_text",
    "find_shared",
    "plot",
    "predict",
    "split_model",
    "split_sequential",
]


def __dir__() -> list[str]:
    return sorted(__all__)
