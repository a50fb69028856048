"""Rows of a table by their numbers, and the table's gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.op_strategy import EinsumPattern, OpRule, OpStrategy, einsum_strategies
from ferrodist.tensor.placement import Partial, Replicate, Shard
from ferrodist.tensor.spec import local_range

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from ferrodist.tensor.op_strategy import OpCall
    from ferrodist.tensor.spec import DTensorSpec

_aten = torch.ops.aten

# [Note: a divided vocabulary]
# A table that is Shard(0) is not gathered: each rank looks up the rows that it has and takes zeros for the others, so
# that the results add up to the rows. Its gradient is made in the same division. The backward operator does not see the
# table, and a gradient that is whole on all ranks would be right too, but as large as all of the table. So the forward
# operator leaves a remark in the recipes of the group, under the table's shape, of which axes divide the vocabulary.
# The remark decides how a gradient lies, never what it is: where a whole table has the shape of a divided one, its
# gradient comes divided too, and is gathered where it is used.


def _remark(call: OpCall, shape: tuple[int, ...], axis: int) -> tuple[object, ...]:
    return ("vocabulary", call.mesh.identity, shape, axis)


def _leave_remark(dispatch_cache: dict[Any, Any], remark: tuple[object, ...]) -> None:
    """Leave a remark, and forget recipes of gradients that were made without it."""
    if remark not in dispatch_cache:
        backward = id(_aten.embedding_dense_backward.default)
        for key in [key for key in dispatch_cache if key[0] == backward]:
            del dispatch_cache[key]
        dispatch_cache[remark] = True


def _strategies(call: OpCall, axis: int) -> list[OpStrategy]:
    weight, indices = call.inputs
    places = [("i", dim) for dim in range(indices.ndim)]
    pattern = EinsumPattern(inputs=[[None, "d"], places], outputs=[[*places, "d"]], linear=((0,),))
    divided = weight.placements[axis] == Shard(0)
    strategies = einsum_strategies(pattern, call, axis)
    if divided:
        _leave_remark(weight.dispatch_cache, _remark(call, weight.shape, axis))
        strategies.append(OpStrategy((Shard(0), Replicate()), (Partial(),)))
    return strategies


def _look_up(call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]) -> Callable[..., Any] | None:
    """Rows that this rank has, and zeros for the others."""
    del outputs
    if Shard(0) not in inputs[0].placements:
        return None
    start, end = local_range(inputs[0], 0)
    num_rows = inputs[0].shape[0]

    def look_up(weight: torch.Tensor, indices: torch.Tensor, *_: Any) -> torch.Tensor:
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < num_rows:
            raise IndexError(f"index out of range: an embedding has numbers from 0 to {num_rows - 1}")
        if start == end:
            return weight.new_zeros((*indices.shape, weight.shape[1]))
        missing = (indices < start) | (indices >= end)
        rows: torch.Tensor = call.operator(weight, (indices - start).masked_fill_(missing, 0))
        return rows.masked_fill_(missing.unsqueeze(-1), 0)

    return look_up


def _backward_strategies(call: OpCall, axis: int) -> list[OpStrategy]:
    grad, indices = call.inputs
    places = [("i", dim) for dim in range(indices.ndim)]
    # By how often a number is there its gradient is scaled: all of them must be known.
    reductions: dict[Hashable, ReduceOp] = {} if call["scale_grad_by_freq"] else dict.fromkeys(places, ReduceOp.SUM)
    pattern = EinsumPattern(
        inputs=[[*places, "d"], places], outputs=[[None, "d"]], reductions=reductions, linear=((0,),)
    )
    strategies = einsum_strategies(pattern, call, axis)
    divided = OpStrategy((Replicate(), Replicate()), (Shard(0),))
    if _remark(call, (call["num_weights"], grad.shape[-1]), axis) in grad.dispatch_cache:
        strategies.insert(0, divided)
    return strategies


def _backward(call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]) -> Callable[..., Any] | None:
    """The rows that this rank has of the gradient."""
    del inputs
    if Shard(0) not in outputs[0].placements:
        return None
    start, end = local_range(outputs[0], 0)
    padding, by_frequency = call["padding_idx"], call["scale_grad_by_freq"]

    def backward(grad: torch.Tensor, indices: torch.Tensor, *_: Any) -> torch.Tensor:
        if start == end:
            return grad.new_zeros((0, grad.shape[-1]))
        missing = (indices < start) | (indices >= end) | (indices == padding)
        # A row more is for what others have.
        rows = (indices - start).masked_fill_(missing, end - start)
        found: torch.Tensor = call.operator(grad, rows, end - start + 1, end - start, by_frequency)
        return found[: end - start]

    return backward


RULES: dict[torch._ops.OpOverload, OpRule] = {
    _aten.embedding.default: OpRule(strategies=_strategies, local=_look_up),
    _aten.embedding_dense_backward.default: OpRule(strategies=_backward_strategies, local=_backward),
}
