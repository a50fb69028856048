"""Forwards paired with backwards of other microbatches, in a V: DualPipeV.

DualPipe: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024 (https://arxiv.org/abs/2412.19437). Half of it, in which no
stage exists twice: P. Qi et al., "DualPipe could be better without the Dual", 2025
(https://hackmd.io/@ufotalent/r1lVXsa9Jg), which is called DualPipeV. Rank r has the stages r and 2p-1-r.

With p ranks and m microbatches, where a forward of one stage takes F, the gradients of its inputs I and those of its
parameters W, and B = I + W:

- the bubble is (p-1)(F&B+B-3W), in addition to the work, if m >= 2p, where F&B is the time of a forward and a backward
  that overlap. Here they run one after the other, each sending its result at once; then it is (p-1)(F+I-W), in addition
  to 2m(F+B), at F = I = W. The gain is in the pairs: each overlaps the transfers of the other;
- a rank holds at most 2p+1 activations, of stages half as long as with one a rank.

Backwards are split only where a half lets other ranks begin earlier. The schedule is built for at least 2p
microbatches; see [Note: fewer microbatches] in `ir.py`.
"""

from ferrodist.parallel.pipeline.schedule.ir import PipelineSize, Slot, parse_slots


def dual_pipe_v(size: PipelineSize, rank: int) -> list[Slot]:
    """A rank's slots: local stage 0 goes down the V, local stage 1 comes up."""
    num_microbatches = max(size.num_microbatches, 2 * size.num_ranks)
    ranks_after = size.num_ranks - rank - 1
    split_pairs, split_alone = divmod(rank + 1, 2)
    return (
        parse_slots("F0", 2 * ranks_after)
        + parse_slots("F0 F1", rank + 1)
        + parse_slots("I1 W1 F1", ranks_after)
        + parse_slots("F0 B1 F1 B0", num_microbatches - size.num_ranks - ranks_after)
        + parse_slots("B1 F1 B0", ranks_after)
        # The remaining backwards: rank + 1 pairs, split in the second half, then those down to the first rank.
        + parse_slots("B1 B0", split_pairs)
        + parse_slots("B1 I0", split_alone)
        + parse_slots("I1 I0", split_pairs)
        # Each waits for the next rank, and a pending W fills the time.
        + parse_slots("W0 I0", ranks_after)
        + parse_slots("W1", split_pairs)
        + parse_slots("W0", split_pairs + split_alone)
    )
