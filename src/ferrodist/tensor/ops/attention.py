"""Scaled dot-product attention: the batch and the heads may be sharded, sequences are replicated.

With grouped queries each head of keys and values serves several heads of queries, which stay together if the ranks
shard the fewer heads evenly. A single head of keys and values is replicated, and its gradients are partial sums.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.op_strategy import (
    EinsumPattern,
    Labels,
    OpCall,
    OpRule,
    OpStrategy,
    einsum_strategies,
    rule_table,
    zeros_if_empty,
)
from ferrodist.tensor.placement import Shard

if TYPE_CHECKING:
    from ferrodist.tensor.op_strategy import LocalFunction

_BATCH, _HEAD = "b", "h"


def _labels(call: OpCall, first: int) -> tuple[Labels, Labels, list[Labels]]:
    """The labels of the queries, of the keys and values, and of the mask; ``first`` is the queries' index."""
    queries, keys = call.inputs[first], call.inputs[first + 1]
    is_shared = keys.shape[1] == 1 != queries.shape[1]
    masks: list[Labels] = []
    if call["attn_mask"] is not None:
        shape = call["attn_mask"].shape
        labels = [_BATCH, _HEAD] if len(shape) == 4 else []
        masks = [[*[label if size > 1 else None for label, size in zip(labels, shape, strict=False)], None, None]]
    return [_BATCH, _HEAD, None, None], [_BATCH, None if is_shared else _HEAD, None, None], masks


def _strategies(call: OpCall, first: int, pattern: EinsumPattern, axis: int) -> list[OpStrategy]:
    """The strategies of a pattern that keep heads of queries together with their heads of keys."""
    queries, keys = call.inputs[first], call.inputs[first + 1]
    strategies = einsum_strategies(pattern, call, axis)
    if keys.shape[1] in (1, queries.shape[1]):
        return strategies
    before = [strategy.inputs[first] for strategy in call.selected]
    num_shards = call.mesh.shape[axis] * math.prod(
        size for size, placement in zip(call.mesh.shape, before, strict=False) if placement == Shard(1)
    )
    is_even = keys.shape[1] % num_shards == 0
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


def _zeros_if_empty(call: OpCall) -> LocalFunction | None:
    """`zeros_if_empty` with the kernel's types: on torch 2.10's meta device sums for float64 have another one."""
    compute = zeros_if_empty(call)
    if compute is None:
        return None

    def compute_as_kernel(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        output, log_sum_exp = compute(*args, **kwargs)
        return [output, log_sum_exp.to(torch.promote_types(output.dtype, torch.float32))]

    return compute_as_kernel


_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"

RULES = rule_table(
    (OpRule(strategies=_forward_strategies, local=_zeros_if_empty), f"{_KERNEL}.default"),
    (OpRule(strategies=_backward_strategies, local=zeros_if_empty), f"{_KERNEL}_backward.default"),
)
