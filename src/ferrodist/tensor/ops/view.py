"""Operators that cut dims, join tensors along a dim, or move elements along dims.

Operators that name the same elements otherwise: other shapes, orders of dims, and repeated elements.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.errors import UnsupportedOpError
from ferrodist.tensor.op_strategy import EinsumPattern, OpRule, OpStrategy, einsum_strategies
from ferrodist.tensor.placement import PARTIAL_OPS, Partial, Replicate, Shard
from ferrodist.torch_private.operators import private_aten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.tensor.op_strategy import OpCall
    from ferrodist.tensor.placement import Placement
    from ferrodist.tensor.spec import DTensorSpec

_aten = torch.ops.aten
_OTHER_FOLDS = (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)

Order = list[int | None]
"""For each dim of a result, the dim of the input that it is, or None where it is none or has been cut."""


def dim_map_strategies(order: Callable[[OpCall], Sequence[int | None]], call: OpCall, axis: int) -> list[OpStrategy]:
    """The ways of an operator that only places elements: each dim of its results is one of its input's, or none."""
    results = len(call.results)
    pattern = EinsumPattern(
        inputs=[range(call.inputs[0].ndim)],
        outputs=[order(call)] * results,
        linear=((0,),),
        commuting=_OTHER_FOLDS,
    )
    return drop_needless_partials(einsum_strategies(pattern, call, axis), call, axis)


def drop_needless_partials(strategies: Sequence[OpStrategy], call: OpCall, axis: int) -> list[OpStrategy]:
    """Leave out ways that make a divided tensor the parts of a sum, if these are not much fewer bytes in the end.

    A divided dim that is cut may be gathered, once; or each rank may take zeros for what others have, and each result
    is a sum that costs twice its bytes when it is read. That is for results that are a small part of the tensor, and
    not for bools, as masks are: most operators on them need them whole.
    """
    divided = [spec for spec in call.inputs if isinstance(spec.placements[axis], Shard)]
    results = sum(result.numel() for result in call.results)
    small = 2 * results <= sum(math.prod(spec.shape) for spec in divided)
    if small and not any(spec.dtype is torch.bool for spec in divided):
        return list(strategies)
    return [
        strategy
        for strategy in strategies
        if not any(
            isinstance(spec.placements[axis], Shard) and isinstance(placement, Partial)
            for spec, placement in zip(call.inputs, strategy.inputs, strict=True)
        )
    ]


def _dims(call: OpCall, *cut: int) -> Order:
    """All dims of the input, but None for those that are cut."""
    ndim = call.inputs[0].ndim
    gone = {dim % max(ndim, 1) for dim in cut}
    return [None if dim in gone else dim for dim in range(ndim)]


def _takes_all(call: OpCall) -> bool:
    """Whether a slice, or the gradient of one, takes every element of the dim."""
    dim = call["dim"]
    return bool(call.results[0].shape[dim] == call.inputs[0].shape[dim])


def _sliced(call: OpCall) -> Order:
    return _dims(call) if _takes_all(call) else _dims(call, call["dim"])


def _whole_slice(call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]) -> Mapping[str, Any]:
    del inputs
    ends = {"start": 0, "end": outputs[0].local_shape[call["dim"]], "step": 1} if _takes_all(call) else {}
    sizes = {"input_sizes": list(outputs[0].local_shape)} if "input_sizes" in call.arguments else {}
    return {**ends, **sizes}


def _selected(call: OpCall) -> Order:
    cut = call["dim"] % call.inputs[0].ndim
    return [dim for dim in range(call.inputs[0].ndim) if dim != cut]


def _inserted(call: OpCall) -> Order:
    """Of the gradient of a select."""
    order: Order = list(range(call.inputs[0].ndim))
    order.insert(call["dim"] % (len(order) + 1), None)
    return order


def _diagonal(call: OpCall) -> Order:
    ndim = call.inputs[0].ndim
    gone = (call["dim1"] % ndim, call["dim2"] % ndim)
    return [*(dim for dim in range(ndim) if dim not in gone), None]


def _diagonal_backward(call: OpCall) -> Order:
    order: Order = list(range(call.inputs[0].ndim - 1))
    ndim = len(order) + 2
    for dim in sorted((call["dim1"] % ndim, call["dim2"] % ndim)):
        order.insert(dim, None)
    return order


def _unfolded(call: OpCall) -> Order:
    return [*(_dims(call, call["dimension"]) if call.inputs[0].ndim else []), None]


def _unfold_backward(call: OpCall) -> Order:
    ndim = call.inputs[0].ndim - 1
    if not ndim:
        return []
    cut = call["dim"] % ndim
    return [None if dim == cut else dim for dim in range(ndim)]


def _local_input_sizes(
    call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]
) -> Mapping[str, Any]:
    del inputs
    name = "input_sizes" if "input_sizes" in call.arguments else "input_size"
    return {name: list(outputs[0].local_shape)}


def _rolled(call: OpCall) -> Order:
    dims = call["dims"]
    return _dims(call, *(dims or range(call.inputs[0].ndim)))


def _repeated(call: OpCall) -> Order:
    repeats = call["repeats"]
    more = len(repeats) - call.inputs[0].ndim
    return [None] * more + [dim if repeats[more + dim] == 1 else None for dim in range(call.inputs[0].ndim)]


def _padded(call: OpCall, axis: int) -> list[OpStrategy]:
    """Dims that get longer, or shorter, are whole; parts of a sum are padded with zeros only."""
    ndim, pad = call.inputs[0].ndim, call["pad"]
    order = _dims(call, *[ndim - 1 - place // 2 for place, size in enumerate(pad) if size])
    pattern = EinsumPattern(inputs=[range(ndim)], outputs=[order], linear=((0,),) if call["value"] == 0 else ())
    return drop_needless_partials(einsum_strategies(pattern, call, axis), call, axis)


# [Note: pieces of a divided dim]
# A dim in equal blocks, each divided by itself, is cut between the blocks without anything moved: of the dim of
# ``Shard(dim, blocks=3)`` three equal pieces are ``Shard(dim)`` each. The other way round, equal tensors that are
# ``Shard(dim)``, joined along the dim, are ``Shard(dim, blocks=3)`` together. Both need parts of one size.


def _divides(call: OpCall, axis: int, placement: Shard, place: int = 0) -> bool:
    """Whether all ranks that divide the dim of an input have parts of one size."""
    num_ranks = call.mesh.shape[axis] * math.prod(
        size
        for strategy, size in zip(call.selected, call.mesh.shape, strict=False)
        if isinstance(before := strategy.inputs[place], Shard) and before.dim == placement.dim
    )
    return call.inputs[place].shape[placement.dim] % (placement.blocks * num_ranks) == 0


def _split(call: OpCall, axis: int) -> list[OpStrategy]:
    spec, dim = call.inputs[0], call["dim"] % call.inputs[0].ndim
    sizes = [result.shape[dim] for result in call.results]
    order = _dims(call) if len(sizes) == 1 else _dims(call, dim)
    strategies = dim_map_strategies(lambda _: order, call, axis)
    now = spec.placements[axis]
    if isinstance(now, Shard) and now.dim == dim and len(sizes) > 1 and len(set(sizes)) == 1 and sizes[0]:
        blocks, rest = divmod(now.blocks, len(sizes))
        if not rest and _divides(call, axis, now):
            strategies.append(OpStrategy((now,), (Shard(dim, blocks),) * len(sizes)))
    return strategies


def _local_split(call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]) -> Mapping[str, Any]:
    del inputs
    dim = call["dim"]
    sizes = [spec.local_shape[dim] for spec in outputs]
    if "split_size" in call.arguments:
        # One piece is more than a part has, where the dim is not cut.
        return {"split_size": max(sizes[0], 1) if len(sizes) > 1 else max(call["split_size"], 1)}
    return {"split_sizes": sizes}


def _joined(call: OpCall, axis: int) -> list[OpStrategy]:
    """Of tensors one after the other along a dim; empty ones of one dim may be among them."""
    shapes = [spec.shape for spec in call.inputs]
    ndim = call.results[0].ndim
    dim = call["dim"] % max(ndim, 1)
    labels: Order = [None if place == dim else place for place in range(ndim)]
    inputs: list[Order] = [labels if len(shape) == ndim and shape != (0,) else [None] * len(shape) for shape in shapes]
    strategies = drop_needless_partials(einsum_strategies(_all_together(call, inputs, labels), call, axis), call, axis)
    now = call.inputs[0].placements[axis]
    if isinstance(now, Shard) and now.dim == dim:
        alike = all(spec.shape == shapes[0] and spec.placements[axis] == now for spec in call.inputs)
        if alike and all(_divides(call, axis, now, place) for place in range(len(shapes))):
            strategies.append(OpStrategy((now,) * len(shapes), (Shard(dim, now.blocks * len(shapes)),)))
    return strategies


def _stacked(call: OpCall, axis: int) -> list[OpStrategy]:
    order: Order = list(range(call.inputs[0].ndim))
    inputs = [list(order)] * len(call.inputs)
    order.insert(call["dim"] % (len(order) + 1), None)
    return drop_needless_partials(einsum_strategies(_all_together(call, inputs, order), call, axis), call, axis)


def _all_together(call: OpCall, inputs: Sequence[Order], output: Order) -> EinsumPattern:
    """All inputs are parts that are folded, or none; not where elements are cast, which may lose some of a sum."""
    alike = len({spec.dtype for spec in call.inputs}) == 1
    return EinsumPattern(
        inputs=inputs,
        outputs=[output],
        linear=(range(len(inputs)),) if alike else (),
        commuting=_OTHER_FOLDS if alike else (),
    )


def _scattered(order: Callable[[OpCall], Order], call: OpCall, axis: int) -> list[OpStrategy]:
    """A tensor with what a slice, select or diagonal takes replaced by another."""
    taken = order(call)
    labels = [dim if dim in taken else None for dim in range(call.inputs[0].ndim)]
    if len(call.inputs) == 1:  # A plain number replaces one element.
        return einsum_strategies(EinsumPattern(inputs=[labels], outputs=[labels]), call, axis)
    pattern = EinsumPattern(inputs=[labels, taken], outputs=[labels], linear=((0, 1),))
    return einsum_strategies(pattern, call, axis)


def _order_of_slice_scatter(call: OpCall) -> Order:
    whole = call.inputs[1].shape[call["dim"]] == call.inputs[0].shape[call["dim"]]
    return _dims(call) if whole else _dims(call, call["dim"])


def _slice_of_scatter(call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]) -> Mapping[str, Any]:
    del inputs
    if None in _order_of_slice_scatter(call):
        return {}
    return {"start": 0, "end": outputs[0].local_shape[call["dim"]], "step": 1}


def _rule(order: Callable[[OpCall], Order], **more: Any) -> OpRule:
    return OpRule(strategies=partial(dim_map_strategies, order), **more)


_triangle_rule = _rule(lambda call: _dims(call, -2, -1))

RULES: dict[torch._ops.OpOverload, OpRule] = {
    _aten.slice.Tensor: _rule(_sliced, arguments=_whole_slice),
    _aten.slice_backward.default: _rule(_sliced, arguments=_whole_slice),
    _aten.select.int: _rule(_selected),
    _aten.select_backward.default: _rule(_inserted, arguments=_local_input_sizes),
    _aten.diagonal.default: _rule(_diagonal),
    _aten.diagonal_backward.default: _rule(_diagonal_backward, arguments=_local_input_sizes),
    _aten.unfold.default: _rule(_unfolded),
    _aten.unfold_backward.default: _rule(_unfold_backward, arguments=_local_input_sizes),
    _aten.unbind.int: _rule(_selected),
    _aten.split.Tensor: OpRule(strategies=_split, arguments=_local_split),
    _aten.split_with_sizes.default: OpRule(strategies=_split, arguments=_local_split),
    _aten.unsafe_split.Tensor: OpRule(strategies=_split, arguments=_local_split),
    _aten.unsafe_split_with_sizes.default: OpRule(strategies=_split, arguments=_local_split),
    _aten.cat.default: OpRule(strategies=_joined),
    _aten.stack.default: OpRule(strategies=_stacked),
    _aten.constant_pad_nd.default: OpRule(strategies=_padded, depends_on_values=True),
    _aten.flip.default: _rule(lambda call: _dims(call, *call["dims"])),
    _aten.roll.default: _rule(_rolled),
    _aten.repeat.default: _rule(_repeated),
    _aten.tril.default: _triangle_rule,
    _aten.triu.default: _triangle_rule,
    _aten.tril_.default: _triangle_rule,
    _aten.triu_.default: _triangle_rule,
    _aten.slice_scatter.default: OpRule(
        strategies=partial(_scattered, _order_of_slice_scatter), arguments=_slice_of_scatter
    ),
    _aten.select_scatter.default: OpRule(strategies=partial(_scattered, _selected)),
    _aten.diagonal_scatter.default: OpRule(strategies=partial(_scattered, _diagonal)),
}


def _transposed(call: OpCall) -> list[int | None]:
    ndim = call.inputs[0].ndim
    order: list[int | None] = list(range(ndim))
    one, other = (0, -1) if call.operator is _aten.t.default else (call["dim0"], call["dim1"])
    if ndim:
        order[one], order[other] = order[other], order[one]
    return order


def _permuted(call: OpCall) -> list[int | None]:
    ndim = call.inputs[0].ndim
    return [dim % ndim for dim in call["dims"]]


def _unsqueezed(call: OpCall) -> list[int | None]:
    ndim = call.inputs[0].ndim
    order: list[int | None] = list(range(ndim))
    order.insert(call["dim"] % (ndim + 1), None)
    return order


def _squeezed(call: OpCall) -> list[int | None]:
    spec = call.inputs[0]
    given = call.arguments.get("dim")
    dims = range(spec.ndim) if given is None else [given] if isinstance(given, int) else given
    gone = {dim % max(spec.ndim, 1) for dim in dims}
    return [dim for dim in range(spec.ndim) if dim not in gone or spec.shape[dim] != 1]


def _expanded(call: OpCall) -> list[int | None]:
    shape, result = call.inputs[0].shape, call.results[0].shape
    more = len(result) - len(shape)
    return [None] * more + [dim if shape[dim] == result[more + dim] else None for dim in range(len(shape))]


def _squeeze_strategies(call: OpCall, axis: int) -> list[OpStrategy]:
    """A dim that goes has one element, which is on one rank only when it is divided: it must be whole."""
    order = _squeezed(call)
    return [
        strategy
        for strategy in dim_map_strategies(_squeezed, call, axis)
        if not isinstance(strategy.inputs[0], Shard) or strategy.inputs[0].dim in order
    ]


def _squeeze(call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]) -> Callable[..., Any]:
    """Squeeze the dims that go; a part may have others of one element."""
    del inputs, outputs
    order = _squeezed(call)
    dims = [dim for dim in range(call.inputs[0].ndim) if dim not in order]
    return lambda local, *_: _aten.squeeze.dims(local, dims)


def _local_size(call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]) -> Mapping[str, Any]:
    del call, inputs
    return {"size": list(outputs[0].local_shape)}


# [Note: views of divided dims]
# A view of another shape joins and cuts dims: (4, 6) as (24,), or as (2, 2, 6). What goes together is a group: some
# dims of the input, and some of the output, with as many elements. Where a dim of the input is divided over n ranks,
# the elements of a rank are every n-th part of B blocks of the group: B is what the dims before it come to, times the
# blocks of the dim itself. The same is a division of a dim of the output when the output's dims before that one come to
# a divisor of B, and what is then left of B are equal blocks of it that n divides. A dim that is a group of its own
# stays divided as it is, evenly or not.


def _groups(shape: Sequence[int], result: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The dims of the input and of the output that go together; dims of one element are in none."""
    groups = []
    one = [dim for dim, size in enumerate(shape) if size != 1]
    other = [dim for dim, size in enumerate(result) if size != 1]
    while one or other:
        here, there = ([one.pop(0)], [other.pop(0)]) if one and other else (one, other)
        if not (one or other) and (not here or not there):
            break
        while (left := math.prod(shape[dim] for dim in here)) != (right := math.prod(result[dim] for dim in there)):
            if left < right:
                here.append(one.pop(0))
            else:
                there.append(other.pop(0))
        groups.append((here, there))
    return groups


def _reshaped(call: OpCall, axis: int) -> list[OpStrategy]:
    spec, result = call.inputs[0], call.results[0]
    whole: list[Placement] = [Replicate(), *[Partial(op) for op in PARTIAL_OPS]]
    strategies = [OpStrategy((placement,), (placement,)) for placement in whole]
    now = spec.placements[axis]
    if isinstance(now, Shard) and 0 not in spec.shape:
        then = _follow(call, axis, now, list(result.shape))
        if then is not None:
            strategies.append(OpStrategy((now,), (then,)))
    return strategies


def _follow(call: OpCall, axis: int, now: Shard, result: list[int]) -> Shard | None:
    """How a view is divided whose input is, or None where it is in no such way; see [Note: views of divided dims]."""
    shape = list(call.inputs[0].shape)
    found = [pair for pair in _groups(shape, result) if now.dim in pair[0]]
    if not found:
        return None
    ((here, there),) = found
    if len(here) == len(there) == 1:
        return Shard(there[0], now.blocks)
    for strategy, num_ranks in zip(call.selected, call.mesh.shape, strict=False):
        (before,), (after,) = strategy.inputs, strategy.outputs
        if isinstance(before, Shard) and isinstance(after, Shard) and before.dim in here:
            shape[before.dim] //= num_ranks
            result[after.dim] //= num_ranks
    num_ranks = call.mesh.shape[axis]
    if shape[now.dim] % (now.blocks * num_ranks):
        return None
    blocks = now.blocks * math.prod(shape[dim] for dim in here[: here.index(now.dim)])
    ways = []
    for place, dim in enumerate(there):
        before_it = math.prod(result[other] for other in there[:place])
        if blocks % before_it == 0 and result[dim] % (blocks // before_it * num_ranks) == 0:
            ways.append(Shard(dim, blocks // before_it))
    return min(ways, key=lambda way: way.blocks, default=None)


def _reshape(call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]) -> Callable[..., Any]:
    """A part may lie otherwise in memory than the whole's stride says, so that its view takes a copy."""
    del call, inputs, outputs
    return torch.reshape


_RENAMED = [
    ("t.default transpose.int", _transposed),
    ("permute.default", _permuted),
    ("unsqueeze.default", _unsqueezed),
]


def _overload(name: str) -> torch._ops.OpOverload:
    packet, overload = name.split(".")
    found: torch._ops.OpOverload = getattr(getattr(_aten, packet), overload)
    return found


_reshape_rule = OpRule(strategies=_reshaped, arguments=_local_size, local=_reshape)

RULES |= {
    **{
        _overload(name): OpRule(strategies=partial(dim_map_strategies, order))
        for names, order in _RENAMED
        for name in names.split()
    },
    **{
        _overload(name): OpRule(strategies=_squeeze_strategies, local=_squeeze)
        for name in ("squeeze.default", "squeeze.dim", "squeeze.dims")
    },
    _aten.expand.default: OpRule(strategies=partial(dim_map_strategies, _expanded), arguments=_local_size),
    _aten.view.default: _reshape_rule,
    private_aten.unsafe_view.default: _reshape_rule,
}


def _reshape_alias(tensor: Any, size: Sequence[int], stride: Sequence[int]) -> Any:
    """A view of another shape, whose stride torch has computed already."""
    view = tensor.view(size)
    if view.stride() != tuple(stride):
        raise UnsupportedOpError(f"_reshape_alias to stride {tuple(stride)}, where view() gives {view.stride()}")
    return view


DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {_aten._reshape_alias.default: _reshape_alias}
