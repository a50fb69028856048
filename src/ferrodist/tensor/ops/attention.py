"""Scaled dot-product attention: the batch and the heads may be divided, the sequences are whole.

With grouped queries each head of keys and values serves several heads of queries. These stay together where the ranks
divide the fewer heads evenly. One head of keys and values for all is whole on every rank, and its gradients are sums.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.op_strategy import EinsumPattern, Labels, OpRule, einsum_strategies
from ferrodist.tensor.placement import Shard
from ferrodist.torch_private.operators import private_aten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.tensor.op_strategy import OpCall, OpStrategy
    from ferrodist.tensor.spec import DTensorSpec

_aten = torch.ops.aten
_BATCH, _HEAD = "b", "h"


def _labels(call: OpCall, first: int) -> tuple[Labels, Labels, list[Labels]]:
    """Of the queries, whose number among the inputs is given, of the keys and values, and of the mask."""
    queries, keys = call.inputs[first], call.inputs[first + 1]
    one_for_all = keys.shape[1] == 1 != queries.shape[1]
    masks: list[Labels] = []
    if call["attn_mask"] is not None:
        shape = call["attn_mask"].shape
        labels = [_BATCH, _HEAD] if len(shape) == 4 else []
        masks = [[*[label if size > 1 else None for label, size in zip(labels, shape, strict=False)], None, None]]
    return [_BATCH, _HEAD, None, None], [_BATCH, None if one_for_all else _HEAD, None, None], masks


def _strategies(call: OpCall, first: int, pattern: EinsumPattern, axis: int) -> list[OpStrategy]:
    """The choices of a pattern that keep the heads of queries with theirs of keys."""
    queries, keys = call.inputs[first], call.inputs[first + 1]
    strategies = einsum_strategies(pattern, call, axis)
    if keys.shape[1] in (1, queries.shape[1]):
        return strategies
    before = [strategy.inputs[first] for strategy in call.selected]
    num_parts = call.mesh.shape[axis] * math.prod(
        size for size, placement in zip(call.mesh.shape, before, strict=False) if placement == Shard(1)
    )
    is_even = keys.shape[1] % num_parts == 0
    return [
        strategy
        for strategy in strategies
        if not isinstance(placement := strategy.inputs[first], Shard)
        or placement.dim != 1
        or (is_even and placement.blocks == 1)
    ]


def _forward_strategies(call: OpCall, axis: int) -> list[OpStrategy]:
    queries, keys, masks = _labels(call, 0)
    pattern = EinsumPattern(inputs=[queries, keys, keys, *masks], outputs=[queries, queries[:3]])
    return _strategies(call, 0, pattern, axis)


def _backward_strategies(call: OpCall, axis: int) -> list[OpStrategy]:
    queries, keys, masks = _labels(call, 1)
    pattern = EinsumPattern(
        inputs=[queries, queries, keys, keys, queries, queries[:3], *masks],
        outputs=[queries, keys, keys],
        reductions={_HEAD: ReduceOp.SUM} if keys[1] is None else {},
        linear=((0,),),
    )
    return _strategies(call, 1, pattern, axis)


def _of_nothing(
    call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]
) -> Callable[..., Any] | None:
    """A rank without heads or samples has empty results, and zero gradients: torch's kernel divides by their number."""
    del call
    if all(0 not in spec.local_shape for spec in inputs):
        return None
    made = [(spec.local_shape, spec.dtype) for spec in outputs]

    def compute(*given: Any, **named: Any) -> list[torch.Tensor]:
        del given, named
        return [torch.zeros(shape, dtype=dtype, device="cpu") for shape, dtype in made]

    return compute


RULES: dict[torch._ops.OpOverload, OpRule] = {
    private_aten.scaled_dot_product_flash_attention_for_cpu.default: OpRule(
        strategies=_forward_strategies, local=_of_nothing
    ),
    private_aten.scaled_dot_product_flash_attention_for_cpu_backward.default: OpRule(
        strategies=_backward_strategies, local=_of_nothing
    ),
}
