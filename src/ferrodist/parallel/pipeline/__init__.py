"""Pipeline parallelism: a model in stages, each on a rank of its own, through which microbatches flow."""

from __future__ import annotations

from ferrodist.parallel.pipeline.building import PipelineSchedule, build_schedule
from ferrodist.parallel.pipeline.losses import LossReduction
from ferrodist.parallel.pipeline.microbatches import Microbatches
from ferrodist.parallel.pipeline.pipeline import Pipeline
from ferrodist.parallel.pipeline.schedule import Schedule
from ferrodist.parallel.pipeline.stage import PipelineOutput
from ferrodist.parallel.pipeline.stages import Stages

__all__ = [
    "LossReduction",
    "Microbatches",
    "Pipeline",
    "PipelineOutput",
    "PipelineSchedule",
    "Schedule",
    "Stages",
    "build_schedule",
]
