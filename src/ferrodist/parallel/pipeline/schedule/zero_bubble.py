"""Split backwards whose weight halves, for which no rank waits, fill the bubble: ZB-H1 and ZB-V.

ZB-H1: P. Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024 (https://arxiv.org/abs/2401.10241). ZB-V: P. Qi et
al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024 (https://arxiv.org/abs/2405.15362), and the former's
section on schedules of that memory.

With p ranks and m microbatches, where a forward of one stage takes F, the gradients of its inputs I and those of its
parameters W, and B = I + W:

- ZB-H1, one stage a rank: the bubble is (p-1)(F+I-W), in addition to m(F+B) of work, if m >= p and F = I = W: a third
  of 1F1B's. Every rank holds min(m, p) activations, as 1F1B's first does;
- ZB-V, stages r and 2p-1-r on rank r: from its first action to its last, no rank waits, if m >= 2p-1 and F = I = W.
  Rank r begins rF after the first and ends as much later, so that a step takes 2m(F+B) + (p-1)F. Every rank holds at
  most 2p activations, of stages half as long as with one a rank: as much as 1F1B's first. The last term is a bubble
  only if all ranks wait for each other between steps, as for the norm of all gradients.

Both are built for those numbers of microbatches at least; see [Note: fewer microbatches] in `ir.py`. If I and W differ
from F, ranks wait for part of the difference; a schedule made for measured times, as in the papers, can do with less.
"""

from ferrodist.parallel.pipeline.schedule.ir import PipelineSize, Slot, parse_slots


def zero_bubble_h1(size: PipelineSize, rank: int) -> list[Slot]:
    """A rank's slots: 1F1B with weight halves of backwards that begin later on later ranks."""
    num_microbatches = max(size.num_microbatches, size.num_ranks)
    ranks_after = size.num_ranks - rank - 1
    return (
        parse_slots("F0", ranks_after)
        # Previous ranks are as many forwards ahead, so there is memory to defer as many W.
        + parse_slots("F0 I0", rank)
        + parse_slots("F0 I0 W0", num_microbatches - ranks_after - rank)
        + parse_slots("I0 W0", ranks_after)
        + parse_slots("W0", rank)
    )


def zero_bubble_v(size: PipelineSize, rank: int) -> list[Slot]:
    """A rank's slots: local stage 0 goes down the V, local stage 1 comes up."""
    ranks_here_on = size.num_ranks - rank
    num_microbatches = max(size.num_microbatches, 2 * size.num_ranks - 1)
    return (
        # One forward for each stage from this rank down to the point of the V and up again.
        parse_slots("F0", 2 * ranks_here_on - 1)
        # Forwards up the V continue to the first rank, where the backwards begin.
        + parse_slots("F1 F0", rank)
        + parse_slots("F1 I1 W1", ranks_here_on)
        + parse_slots("F0 I0 W0 F1 I1 W1", num_microbatches - size.num_ranks - ranks_here_on + 1)
        # All forwards down are done: as many were ahead of those up.
        + parse_slots("I0 W0 F1 I1 W1", ranks_here_on - 1)
        # Previous ranks wait for these, and none for W, which comes last.
        + parse_slots("I0 I1", rank)
        + parse_slots("I0 W0", ranks_here_on)
        + parse_slots("W1", rank)
        + parse_slots("W0", rank)
    )
