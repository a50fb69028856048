"""Views: other shapes and orders of dims, and expanded dims."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.errors import UnsupportedOpError
from ferrodist.tensor.copied_views import rebind
from ferrodist.tensor.op_strategy import EinsumPattern, OpRule, OpStrategy, einsum_strategies, rule_table
from ferrodist.tensor.placement import PARTIAL_OPS, Partial, Placement, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.tensor.op_strategy import LocalFunction, OpCall

_aten = torch.ops.aten

EXTREMA_AND_PRODUCT = (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)

DimMap = list[int | None]
"""For each dim of a result, the dim of the input that it is, or None if it is new or has been cut."""


def dim_map_strategies(dim_map: Callable[[OpCall], DimMap], call: OpCall, axis: int) -> list[OpStrategy]:
    """The strategies of an operator that only moves elements, given which dim of its input each result's dim is."""
    pattern = EinsumPattern(
        inputs=[range(call.inputs[0].ndim)],
        outputs=[dim_map(call)] * len(call.results),
        linear=((0,),),
        commuting=EXTREMA_AND_PRODUCT,
    )
    return move_strategies(pattern, call, axis)


def dim_map_rule(dim_map: Callable[[OpCall], DimMap], **options: Any) -> OpRule:
    """A rule with the strategies of `dim_map_strategies`."""
    return OpRule(strategies=partial(dim_map_strategies, dim_map), **options)


def move_rule(pattern_of: Callable[[OpCall], EinsumPattern], **options: Any) -> OpRule:
    """A rule of an operator that moves elements: an `einsum_rule` with the strategies of `move_strategies`."""
    return OpRule(strategies=lambda call, axis: move_strategies(pattern_of(call), call, axis), **options)


def move_strategies(pattern: EinsumPattern, call: OpCall, axis: int) -> list[OpStrategy]:
    """The strategies of a pattern, without those that turn a shard into a partial sum at too high a price.

    If a sharded dim is cut, the tensor may be gathered once; or each rank may put zeros for the other ranks' elements,
    and each result is a partial sum, which costs twice its bytes when it is read. The latter is for results that are a
    small share of the tensor, and not for bools, as masks are: most operators need those replicated.
    """
    strategies = einsum_strategies(pattern, call, axis)
    sharded = [spec for spec in call.inputs if isinstance(spec.placements[axis], Shard)]
    num_results = sum(result.numel() for result in call.results)
    is_small = 2 * num_results <= sum(math.prod(spec.shape) for spec in sharded)
    if is_small and not any(spec.dtype is torch.bool for spec in sharded):
        return strategies
    return [
        strategy
        for strategy in strategies
        if not any(
            isinstance(spec.placements[axis], Shard) and isinstance(placement, Partial)
            for spec, placement in zip(call.inputs, strategy.inputs, strict=True)
        )
    ]


def _dims_after_transpose(call: OpCall) -> DimMap:
    ndim = call.inputs[0].ndim
    dims: DimMap = list(range(ndim))
    one, other = (0, -1) if call.operator is _aten.t.default else (call["dim0"], call["dim1"])
    if ndim:
        dims[one], dims[other] = dims[other], dims[one]
    return dims


def insert_dims(ndim: int, *new: int) -> DimMap:
    """The dims of an input among new ones, given the indices of these in the result."""
    dims = iter(range(ndim))
    inserted = {dim % (ndim + len(new)) for dim in new}
    return [None if dim in inserted else next(dims) for dim in range(ndim + len(new))]


def _dims_after_squeeze(call: OpCall) -> DimMap:
    spec = call.inputs[0]
    given = call.arguments.get("dim")
    dims = range(spec.ndim) if given is None else [given] if isinstance(given, int) else given
    squeezed = {dim % max(spec.ndim, 1) for dim in dims}
    return [dim for dim in range(spec.ndim) if dim not in squeezed or spec.shape[dim] != 1]


def _dims_after_expand(call: OpCall) -> DimMap:
    shape, result = call.inputs[0].shape, call.results[0].shape
    more = len(result) - len(shape)
    return [None] * more + [dim if shape[dim] == result[more + dim] else None for dim in range(len(shape))]


def _squeeze_strategies(call: OpCall, axis: int) -> list[OpStrategy]:
    """A squeezed dim has one element, which only one rank has if the dim is sharded: it must be replicated."""
    kept = _dims_after_squeeze(call)
    return [
        strategy
        for strategy in dim_map_strategies(_dims_after_squeeze, call, axis)
        if not isinstance(strategy.inputs[0], Shard) or strategy.inputs[0].dim in kept
    ]


def _squeeze(call: OpCall) -> LocalFunction:
    """Squeeze the same dims as of the full tensor; a shard may have others of one element."""
    kept = _dims_after_squeeze(call)
    dims = [dim for dim in range(call.inputs[0].ndim) if dim not in kept]
    return lambda local, *_: _aten.squeeze.dims(local, dims)


def _local_size(call: OpCall) -> Mapping[str, Any]:
    return {"size": list(call.outputs[0].local_shape)}


# [Note: views of sharded dims]
# A view of another shape flattens and splits dims: (4, 6) as (24,), or as (2, 2, 6). Dims of the input and of the
# output that have the same elements form a group. If a dim of the input is sharded over n ranks, the elements of a rank
# are every n-th part of B blocks of the group: B is the product of the group's dims before it, times the blocks of the
# dim itself. That is also a sharding of a dim of the output if the product of the output's dims before that one divides
# B, and n divides the blocks that are then left of it evenly. A dim that is a group by itself keeps its sharding,
# evenly or not.


def _dim_groups(shape: Sequence[int], result: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The groups of dims of the input and of the output with the same elements; dims of one element are in none."""
    groups = []
    inputs = [dim for dim, size in enumerate(shape) if size != 1]
    outputs = [dim for dim, size in enumerate(result) if size != 1]
    while inputs or outputs:
        before, after = ([inputs.pop(0)], [outputs.pop(0)]) if inputs and outputs else (inputs, outputs)
        if not (inputs or outputs) and (not before or not after):
            break
        while (left := math.prod(shape[dim] for dim in before)) != (right := math.prod(result[dim] for dim in after)):
            if left < right:
                before.append(inputs.pop(0))
            else:
                after.append(outputs.pop(0))
        groups.append((before, after))
    return groups


def _reshape_strategies(call: OpCall, axis: int) -> list[OpStrategy]:
    spec, result = call.inputs[0], call.results[0]
    unsharded: list[Placement] = [Replicate(), *[Partial(op) for op in PARTIAL_OPS]]
    strategies = [OpStrategy((placement,), (placement,)) for placement in unsharded]
    current = spec.placements[axis]
    if isinstance(current, Shard) and 0 not in spec.shape:
        reshaped = _reshape_sharding(call, axis, current, list(result.shape))
        if reshaped is not None:
            strategies.append(OpStrategy((current,), (reshaped,)))
    return strategies


def _reshape_sharding(call: OpCall, axis: int, placement: Shard, result: list[int]) -> Shard | None:
    """The view's sharding given its input's, or None if it has no sharding; see [Note: views of sharded dims]."""
    shape = list(call.inputs[0].shape)
    found = [group for group in _dim_groups(shape, result) if placement.dim in group[0]]
    if not found:
        return None
    ((before, after),) = found
    if len(before) == len(after) == 1:
        return Shard(after[0], placement.blocks)
    for strategy, num_ranks in zip(call.selected, call.mesh.shape, strict=False):
        (input_,), (output,) = strategy.inputs, strategy.outputs
        if isinstance(input_, Shard) and isinstance(output, Shard) and input_.dim in before:
            shape[input_.dim] //= num_ranks
            result[output.dim] //= num_ranks
    num_ranks = call.mesh.shape[axis]
    if shape[placement.dim] % (placement.blocks * num_ranks):
        return None
    blocks = placement.blocks * math.prod(shape[dim] for dim in before[: before.index(placement.dim)])
    possible = []
    for index, dim in enumerate(after):
        outer = math.prod(result[other] for other in after[:index])
        if blocks % outer == 0 and result[dim] % (blocks // outer * num_ranks) == 0:
            possible.append(Shard(dim, blocks // outer))
    return min(possible, key=lambda shard: shard.blocks, default=None)


RULES = rule_table(
    (dim_map_rule(_dims_after_transpose), "t.default"),
    (dim_map_rule(_dims_after_transpose), "transpose.int"),
    (dim_map_rule(lambda call: [dim % call.inputs[0].ndim for dim in call["dims"]]), "permute.default"),
    (dim_map_rule(lambda call: insert_dims(call.inputs[0].ndim, call["dim"])), "unsqueeze.default"),
    (OpRule(strategies=_squeeze_strategies, local=_squeeze), "squeeze.default"),
    (OpRule(strategies=_squeeze_strategies, local=_squeeze), "squeeze.dim"),
    (OpRule(strategies=_squeeze_strategies, local=_squeeze), "squeeze.dims"),
    (dim_map_rule(_dims_after_expand, arguments=_local_size), "expand.default"),
    (
        # A shard may have other strides than the full tensor, so that its view is a copy.
        OpRule(strategies=_reshape_strategies, arguments=_local_size, local=lambda _: torch.reshape),
        "view.default _unsafe_view.default",
    ),
)


def _reshape_alias(tensor: Any, size: Sequence[int], stride: Sequence[int]) -> Any:
    """A view of another shape, whose stride torch has computed already."""
    view = tensor.view(size)
    if view.stride() != tuple(stride):
        raise UnsupportedOpError(f"_reshape_alias to stride {tuple(stride)}, where view() gives {view.stride()}")
    return view


def _set(tensor: Any, source: Any) -> Any:
    """Give a tensor the memory and the placements of another."""
    if not (hasattr(tensor, "_spec") and hasattr(source, "_spec")):
        raise UnsupportedOpError("set_() takes distributed tensors: distribute both, or work on to_local()")
    return rebind(tensor, source)


DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    _aten._reshape_alias.default: _reshape_alias,
    _aten.set_.source_Tensor: _set,
}
