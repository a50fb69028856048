"""New tensors of the shape or dtype of others, whose elements are not read."""

from __future__ import annotations

from ferrodist.tensor.op_strategy import OpRule, OpStrategy, keep_sharding, rule_table
from ferrodist.tensor.placement import Replicate

RULES = rule_table(
    (OpRule(strategies=keep_sharding), "zeros_like.default ones_like.default empty_like.default full_like.default"),
    (
        OpRule(strategies=lambda call, axis: [OpStrategy((call.inputs[0].placements[axis],), (Replicate(),))]),
        "new_zeros.default new_ones.default new_empty.default new_full.default new_empty_strided.default",
    ),
)
