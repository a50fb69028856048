"""New tensors of the shape or dtype of others, whose elements are not read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrodist.tensor.op_strategy import OpRule, OpStrategy, keep_sharding, rule_table
from ferrodist.tensor.placement import Replicate

if TYPE_CHECKING:
    from ferrodist.tensor.op_strategy import OpCall


def _replicated_output(call: OpCall, axis: int) -> list[OpStrategy]:
    return [OpStrategy((call.inputs[0].placements[axis],), (Replicate(),))]


RULES = rule_table(
    (OpRule(strategies=keep_sharding), "zeros_like.default ones_like.default empty_like.default full_like.default"),
    (
        OpRule(strategies=_replicated_output),
        "new_zeros.default new_ones.default new_empty.default new_full.default new_empty_strided.default",
    ),
)
