"""All forwards, then all backwards: GPipe, and the looped breadth-first pipeline.

GPipe: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019
(https://arxiv.org/abs/1811.06965). With several stages a rank, stage s on rank s mod p: J. Lamy-Poirier, "Breadth-First
Pipeline Parallelism", MLSys 2023 (https://arxiv.org/abs/2211.05953); with sharded parameters those of a stage are
gathered once for all microbatches, and not again for each group of them.

With p ranks, v stages on each and m microbatches, where a forward of one stage takes F and a backward B:

- the bubble is (p-1)(F+B), in addition to m v (F+B) of work, if m >= p; with fewer, a rank's next stage waits for the
  ring;
- every rank holds m v activations.
"""

from ferrodist.parallel.pipeline.schedule.ir import PipelineSize, Slot, parse_slots


def breadth_first(size: PipelineSize, rank: int) -> list[Slot]:
    """A rank's slots: each stage's forwards, first stage first, then each one's backwards, last stage first."""
    del rank  # all ranks have the same slots, and only wait differently
    local_stages = range(size.stages_per_rank)
    forwards = [slot for local_stage in local_stages for slot in parse_slots(f"F{local_stage}", size.num_microbatches)]
    return forwards + [
        slot for local_stage in reversed(local_stages) for slot in parse_slots(f"B{local_stage}", size.num_microbatches)
    ]
