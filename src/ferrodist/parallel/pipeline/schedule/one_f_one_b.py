"""One forward, one backward, as soon as there is one: 1F1B, and interleaved 1F1B.

1F1B: D. Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush), ICML 2021
(https://arxiv.org/abs/2006.09503). With several stages a rank, stage s on rank s mod p: D. Narayanan et al., "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021 (https://arxiv.org/abs/2104.04473).

With p ranks, v stages on each and m microbatches, where a forward of one stage takes F and a backward B:

- the bubble is (p-1)(F+B), in addition to m v (F+B) of work, if m >= p or v = 1. As a stage takes a v-th of the time of
  one stage a rank, so does the bubble;
- with v = 1, rank r holds at most min(m, p-r) activations; with more, min(m v, 2(p-r-1) + (v-1)g + 1), where g is the
  number of microbatches in the largest group: p if m is a multiple of p, as in the paper.

[Note: groups of microbatches]
With v > 1 a rank runs its first stage for a group of microbatches, its second for the same group, and so on, then the
next group. The paper's groups have p microbatches: when the last of a group has passed the rank's first stage, the
first one is back from the ring. Larger groups would do as well and hold more, smaller ones would wait. So if m is not a
multiple of p, the microbatches are divided into as many groups of at least p as possible, and the bubble stays the
paper's. The larger groups come first: if the warmup covered less than a later group needs, ranks would wait for each
other forever. With fewer microbatches than ranks there is one group, and it waits.

[Note: length of the warmup]
With one stage a rank, the forwards before the first backward are those that the later ranks need. Megatron's warmup,
with several, has twice as many: a rank continues with forwards while the first gradient returns to it. Without doubling
the bubble would be the same if transfers took no time, and p-r-1 fewer activations would be held. With transfers it
would be longer: with p = 4, v = 2, m = 8 and a transfer of F/10, a step takes 58.4F with doubling and 60.0F without
(57F without transfers), where B = 2F.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from ferrodist.parallel.pipeline.schedule.ir import PipelineSize, Slot, parse_slots

if TYPE_CHECKING:
    from collections.abc import Sequence


def one_f_one_b(size: PipelineSize, rank: int) -> list[Slot]:
    """A rank's slots: forwards until its first backward can come, both alternately, then the remaining backwards."""
    groups = _groups(size)
    local_stages = range(size.stages_per_rank)
    forwards = _grouped("F", local_stages, groups)
    backwards = _grouped("B", list(reversed(local_stages)), groups)
    ranks_after = size.num_ranks - rank - 1
    # See [Note: length of the warmup].
    warmup = ranks_after if size.stages_per_rank == 1 else 2 * ranks_after + (size.stages_per_rank - 1) * groups[0]
    warmup = min(warmup, len(forwards))
    alternating = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
    return [*forwards[:warmup], *alternating, *backwards[len(forwards) - warmup :]]


def _groups(size: PipelineSize) -> list[int]:
    """Number of microbatches of each group; see [Note: groups of microbatches]."""
    number = max(1, size.num_microbatches // size.num_ranks)
    least, larger = divmod(size.num_microbatches, number)
    return [least + 1] * larger + [least] * (number - larger)


def _grouped(kind: str, local_stages: Sequence[int], groups: Sequence[int]) -> list[Slot]:
    return [
        slot for group in groups for local_stage in local_stages for slot in parse_slots(f"{kind}{local_stage}", group)
    ]
