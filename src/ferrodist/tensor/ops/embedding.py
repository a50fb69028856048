"""Embeddings, which look up rows of a table, and the table's gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.op_strategy import EinsumPattern, LocalFunction, OpCall, OpRule, OpStrategy, einsum_strategies
from ferrodist.tensor.placement import Partial, Replicate, Shard
from ferrodist.tensor.spec import local_range
from ferrodist.tensor.traced import traced_bounds
from ferrodist.torch_private.compilers import is_traced

if TYPE_CHECKING:
    from collections.abc import Hashable


_aten = torch.ops.aten

# [Note: a sharded vocabulary]
# A table that is Shard(0) is not gathered: each rank looks up its own rows and gives zeros for the others, so that the
# results add up to the rows. The table's gradient is computed with the same sharding. The backward operator does not
# see the table, and a replicated gradient would be right too, but as large as the full table. So the forward operator
# records in the group's dispatch cache, under the table's shape, which axes shard the vocabulary. The record decides
# the gradient's placements, never its value: if a replicated table has the shape of a sharded one, its gradient is
# sharded too, and gathered where it is used.


def _record_key(call: OpCall, shape: tuple[int, ...], axis: int) -> tuple[object, ...]:
    return ("vocabulary", call.mesh.identity, shape, axis)


def _strategies(call: OpCall, axis: int) -> list[OpStrategy]:
    weight, indices = call.inputs
    tokens = [("i", dim) for dim in range(indices.ndim)]
    pattern = EinsumPattern(inputs=[[None, "d"], tokens], outputs=[[*tokens, "d"]], linear=((0,),))
    strategies = einsum_strategies(pattern, call, axis)
    if weight.placements[axis] == Shard(0):
        cache, key = weight.dispatch_cache, _record_key(call, weight.shape, axis)
        if key not in cache:
            # The cached backward calls were prepared without knowing.
            weight.forget_calls(_aten.embedding_dense_backward.default)
            cache[key] = True
        strategies.append(OpStrategy((Shard(0), Replicate()), (Partial(),)))
    return strategies


def _look_up(call: OpCall) -> LocalFunction | None:
    """Look up this rank's rows, with zeros for the others."""
    weight_spec, operator = call.placed_inputs[0], call.operator
    if Shard(0) not in weight_spec.placements:
        return None
    start, end = local_range(weight_spec, 0)
    num_rows = weight_spec.shape[0]

    def look_up(weight: torch.Tensor, indices: torch.Tensor, *_: Any) -> torch.Tensor:
        if is_traced(indices):
            indices = traced_bounds(
                indices, num_rows, None, f"index out of range: {{}} in an embedding of {num_rows} rows"
            )
        elif indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < num_rows:
            wrong = int(indices.min()) if int(indices.min()) < 0 else int(indices.max())
            raise IndexError(
                f"index out of range: token index {wrong}, but the embedding has {num_rows} rows, with the indices 0 to"
                f" {num_rows - 1}"
            )
        if start == end:
            return weight.new_zeros((*indices.shape, weight.shape[1]))
        missing = (indices < start) | (indices >= end)
        rows: torch.Tensor = operator(weight, (indices - start).masked_fill_(missing, 0))
        return rows.masked_fill_(missing.unsqueeze(-1), 0)

    return look_up


def _backward_strategies(call: OpCall, axis: int) -> list[OpStrategy]:
    grad, indices = call.inputs
    tokens = [("i", dim) for dim in range(indices.ndim)]
    # A row's gradient may be scaled by the row's frequency, which needs all tokens.
    reductions: dict[Hashable, ReduceOp] = {} if call["scale_grad_by_freq"] else dict.fromkeys(tokens, ReduceOp.SUM)
    pattern = EinsumPattern(
        inputs=[[*tokens, "d"], tokens], outputs=[[None, "d"]], reductions=reductions, linear=((0,),)
    )
    strategies = einsum_strategies(pattern, call, axis)
    if _record_key(call, (call["num_weights"], grad.shape[-1]), axis) in grad.dispatch_cache:
        strategies.insert(0, OpStrategy((Replicate(), Replicate()), (Shard(0),)))
    return strategies


def _local_gradient(call: OpCall) -> LocalFunction | None:
    """The gradient of this rank's rows."""
    (output,), operator = call.outputs, call.operator
    if Shard(0) not in output.placements:
        return None
    start, end = local_range(output, 0)
    padding, by_frequency = call["padding_idx"], call["scale_grad_by_freq"]

    def backward(grad: torch.Tensor, indices: torch.Tensor, *_: Any) -> torch.Tensor:
        if start == end:
            return grad.new_zeros((0, grad.shape[-1]))
        missing = (indices < start) | (indices >= end) | (indices == padding)
        # An extra row takes the gradients of other ranks' rows.
        rows = (indices - start).masked_fill_(missing, end - start)
        found: torch.Tensor = operator(grad, rows, end - start + 1, end - start, by_frequency)
        return found[: end - start]

    return backward


RULES: dict[torch._ops.OpOverload, OpRule] = {
    _aten.embedding.default: OpRule(strategies=_strategies, local=_look_up),
    _aten.embedding_dense_backward.default: OpRule(strategies=_backward_strategies, local=_local_gradient),
}
