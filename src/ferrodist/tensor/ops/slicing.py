"""Operators that slice, split, join, pad or reorder along dims."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from ferrodist.tensor.op_strategy import EinsumPattern, OpCall, OpRule, OpStrategy, einsum_rule, rule_table
from ferrodist.tensor.ops.view import (
    EXTREMA_AND_PRODUCT,
    DimMap,
    dim_map_rule,
    dim_map_strategies,
    insert_dims,
    move_rule,
    move_strategies,
)
from ferrodist.tensor.placement import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def _dims(call: OpCall, *cut: int) -> DimMap:
    """All dims of the input, but None for those that are cut."""
    ndim = call.inputs[0].ndim
    removed = {dim % max(ndim, 1) for dim in cut}
    return [None if dim in removed else dim for dim in range(ndim)]


def _dims_after_slice(call: OpCall) -> DimMap:
    """The dims of a slice, of the gradient of one, or of a tensor of which a slice is replaced."""
    dim, part = call["dim"], (call.inputs[1] if len(call.inputs) > 1 else call.results[0])
    return _dims(call) if part.shape[dim] == call.inputs[0].shape[dim] else _dims(call, dim)


def _local_slice(call: OpCall) -> Mapping[str, Any]:
    shape = call.outputs[0].local_shape
    bounds = {} if None in _dims_after_slice(call) else {"start": 0, "end": shape[call["dim"]], "step": 1}
    sizes = {"input_sizes": list(shape)} if "input_sizes" in call.arguments else {}
    return {**bounds, **sizes}


def _dims_after_select(call: OpCall) -> DimMap:
    return [dim for dim in _dims(call, call["dim"]) if dim is not None]


def _dims_after_diagonal(call: OpCall) -> DimMap:
    return [*[dim for dim in _dims(call, call["dim1"], call["dim2"]) if dim is not None], None]


def _unfold_backward(call: OpCall) -> DimMap:
    ndim = call.inputs[0].ndim - 1
    return [None if dim == call["dim"] % ndim else dim for dim in range(ndim)]


def _local_input_sizes(call: OpCall) -> Mapping[str, Any]:
    name = "input_sizes" if "input_sizes" in call.arguments else "input_size"
    return {name: list(call.outputs[0].local_shape)}


def _dims_after_repeat(call: OpCall) -> DimMap:
    repeats = call["repeats"]
    more = len(repeats) - call.inputs[0].ndim
    return [None] * more + [dim if repeats[more + dim] == 1 else None for dim in range(call.inputs[0].ndim)]


def _pad(call: OpCall) -> EinsumPattern:
    """The pattern of padding: padded dims are replicated; partial sums are padded with zeros only."""
    ndim, pad = call.inputs[0].ndim, call["pad"]
    dims = _dims(call, *[ndim - 1 - index // 2 for index, size in enumerate(pad) if size])
    return EinsumPattern(inputs=[range(ndim)], outputs=[dims], linear=((0,),) if call["value"] == 0 else ())


# [Note: split and joined dims]
# A dim in equal blocks, each sharded by itself, is split between blocks without communication: three equal splits of
# the dim of ``Shard(dim, blocks=3)`` are ``Shard(dim)`` each. Conversely, equal tensors that are ``Shard(dim)``, joined
# along the dim, are ``Shard(dim, blocks=3)`` together. Both need shards of equal size.


def _has_equal_shards(call: OpCall, axis: int, placement: Shard, index: int = 0) -> bool:
    """Return whether all ranks that shard the dim of an input have shards of equal size."""
    num_ranks = call.mesh.shape[axis] * math.prod(
        size
        for strategy, size in zip(call.selected, call.mesh.shape, strict=False)
        if isinstance(before := strategy.inputs[index], Shard) and before.dim == placement.dim
    )
    return call.inputs[index].shape[placement.dim] % (placement.blocks * num_ranks) == 0


def _split_strategies(call: OpCall, axis: int) -> list[OpStrategy]:
    spec, dim = call.inputs[0], call["dim"] % call.inputs[0].ndim
    sizes = [result.shape[dim] for result in call.results]
    dims = _dims(call) if len(sizes) == 1 else _dims(call, dim)
    strategies = dim_map_strategies(lambda _: dims, call, axis)
    current = spec.placements[axis]
    if isinstance(current, Shard) and current.dim == dim and len(sizes) > 1 and len(set(sizes)) == 1 and sizes[0]:
        blocks, rest = divmod(current.blocks, len(sizes))
        if not rest and _has_equal_shards(call, axis, current):
            strategies.append(OpStrategy((current,), (Shard(dim, blocks),) * len(sizes)))
    return strategies


def _local_split(call: OpCall) -> Mapping[str, Any]:
    dim = call["dim"]
    sizes = [spec.local_shape[dim] for spec in call.outputs]
    if "split_size" in call.arguments:
        # If the dim is not cut, the only split may be larger than the shard.
        return {"split_size": max(sizes[0], 1) if len(sizes) > 1 else max(call["split_size"], 1)}
    return {"split_sizes": sizes}


def _cat_strategies(call: OpCall, axis: int) -> list[OpStrategy]:
    """Strategies for tensors joined along a dim, among which may be empty tensors of one dim."""
    shapes = [spec.shape for spec in call.inputs]
    ndim = call.results[0].ndim
    dim = call["dim"] % max(ndim, 1)
    labels: DimMap = [None if other == dim else other for other in range(ndim)]
    inputs: list[DimMap] = [labels if len(shape) == ndim and shape != (0,) else [None] * len(shape) for shape in shapes]
    strategies = move_strategies(_joined(call, inputs, labels), call, axis)
    current = call.inputs[0].placements[axis]
    if isinstance(current, Shard) and current.dim == dim:
        are_equal = all(spec.shape == shapes[0] and spec.placements[axis] == current for spec in call.inputs)
        if are_equal and all(_has_equal_shards(call, axis, current, index) for index in range(len(shapes))):
            strategies.append(OpStrategy((current,) * len(shapes), (Shard(dim, current.blocks * len(shapes)),)))
    return strategies


def _stack(call: OpCall) -> EinsumPattern:
    ndim = call.inputs[0].ndim
    return _joined(call, [list(range(ndim))] * len(call.inputs), insert_dims(ndim, call["dim"]))


def _joined(call: OpCall, inputs: Sequence[DimMap], output: DimMap) -> EinsumPattern:
    """All inputs are partial, or none is; none if elements are cast, which may lose some of a sum."""
    is_uniform = len({spec.dtype for spec in call.inputs}) == 1
    return EinsumPattern(
        inputs=inputs,
        outputs=[output],
        linear=(range(len(inputs)),) if is_uniform else (),
        commuting=EXTREMA_AND_PRODUCT if is_uniform else (),
    )


def _scatter(dim_map: Callable[[OpCall], DimMap], call: OpCall) -> EinsumPattern:
    """The pattern of a tensor of which a slice, select or diagonal is replaced by another tensor."""
    replaced = dim_map(call)
    labels = [dim if dim in replaced else None for dim in range(call.inputs[0].ndim)]
    if len(call.inputs) == 1:  # a plain scalar replaces one element
        return EinsumPattern(inputs=[labels], outputs=[labels])
    return EinsumPattern(inputs=[labels, replaced], outputs=[labels], linear=((0, 1),))


def _scatter_rule(dim_map: Callable[[OpCall], DimMap], **options: Any) -> OpRule:
    return einsum_rule(partial(_scatter, dim_map), **options)


RULES = rule_table(
    (dim_map_rule(_dims_after_slice, arguments=_local_slice), "slice.Tensor"),
    (dim_map_rule(_dims_after_slice, arguments=_local_slice), "slice_backward.default"),
    (dim_map_rule(_dims_after_select), "select.int"),
    (
        dim_map_rule(lambda call: insert_dims(call.inputs[0].ndim, call["dim"]), arguments=_local_input_sizes),
        "select_backward.default",
    ),
    (dim_map_rule(_dims_after_diagonal), "diagonal.default"),
    (
        dim_map_rule(
            lambda call: insert_dims(call.inputs[0].ndim - 1, call["dim1"], call["dim2"]),
            arguments=_local_input_sizes,
        ),
        "diagonal_backward.default",
    ),
    (dim_map_rule(lambda call: [*_dims(call, call["dimension"]), None]), "unfold.default"),
    (dim_map_rule(_unfold_backward, arguments=_local_input_sizes), "unfold_backward.default"),
    (dim_map_rule(_dims_after_select), "unbind.int"),
    (OpRule(strategies=_split_strategies, arguments=_local_split), "split.Tensor"),
    (OpRule(strategies=_split_strategies, arguments=_local_split), "split_with_sizes.default"),
    (OpRule(strategies=_split_strategies, arguments=_local_split), "unsafe_split.Tensor"),
    (OpRule(strategies=_split_strategies, arguments=_local_split), "unsafe_split_with_sizes.default"),
    (OpRule(strategies=_cat_strategies), "cat.default"),
    (move_rule(_stack), "stack.default"),
    (move_rule(_pad, depends_on_values=True), "constant_pad_nd.default"),
    (dim_map_rule(lambda call: _dims(call, *call["dims"])), "flip.default"),
    (dim_map_rule(lambda call: _dims(call, *(call["dims"] or range(call.inputs[0].ndim)))), "roll.default"),
    (dim_map_rule(_dims_after_repeat), "repeat.default"),
    (dim_map_rule(lambda call: _dims(call, -2, -1)), "tril.default triu.default tril_.default triu_.default"),
    (_scatter_rule(_dims_after_slice, arguments=_local_slice), "slice_scatter.default"),
    (_scatter_rule(_dims_after_select), "select_scatter.default"),
    (_scatter_rule(_dims_after_diagonal), "diagonal_scatter.default"),
)
