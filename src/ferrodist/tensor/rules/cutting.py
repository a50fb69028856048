"""Operators that cut dims, join tensors along a dim, or move elements along dims."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.call import Choice, Rule
from ferrodist.tensor.patterns import Pattern, choices_of
from ferrodist.tensor.placement import Partial, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.tensor.call import Call
    from ferrodist.tensor.layout import Layout

__all__ = ["RULES", "renamed", "without_unasked_sums"]

_aten = torch.ops.aten
_OTHER_FOLDS = (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)

Order = list[int | None]
"""For each dim of a result, the dim of the input that it is, or None where it is none or has been cut."""


def renamed(order: Callable[[Call], Sequence[int | None]], call: Call, axis: int) -> list[Choice]:
    """The ways of an operator that only places elements: each dim of its results is one of its input's, or none."""
    results = len(call.results)
    pattern = Pattern(
        inputs=[range(call.inputs[0].ndim)],
        outputs=[order(call)] * results,
        linear=((0,),),
        keeps=_OTHER_FOLDS,
    )
    return without_unasked_sums(choices_of(pattern, call, axis), call, axis)


def without_unasked_sums(choices: Sequence[Choice], call: Call, axis: int) -> list[Choice]:
    """Leave out ways that make a divided tensor the parts of a sum, if these are not much fewer bytes in the end.

    A divided dim that is cut may be gathered, once; or each rank may take zeros for what others have, and each result
    is a sum that costs twice its bytes when it is read. That is for results that are a small part of the tensor, and
    not for bools, as masks are: most operators on them need them whole.
    """
    divided = [layout for layout in call.inputs if isinstance(layout.placements[axis], Shard)]
    results = sum(result.numel() for result in call.results)
    small = 2 * results <= sum(math.prod(layout.shape) for layout in divided)
    if small and not any(layout.dtype is torch.bool for layout in divided):
        return list(choices)
    return [
        choice
        for choice in choices
        if not any(
            isinstance(layout.placements[axis], Shard) and isinstance(placement, Partial)
            for layout, placement in zip(call.inputs, choice.inputs, strict=True)
        )
    ]


def _dims(call: Call, *cut: int) -> Order:
    """All dims of the input, but None for those that are cut."""
    ndim = call.inputs[0].ndim
    gone = {dim % max(ndim, 1) for dim in cut}
    return [None if dim in gone else dim for dim in range(ndim)]


def _takes_all(call: Call) -> bool:
    """Whether a slice, or the gradient of one, takes every element of the dim."""
    dim = call["dim"]
    return bool(call.results[0].shape[dim] == call.inputs[0].shape[dim])


def _sliced(call: Call) -> Order:
    return _dims(call) if _takes_all(call) else _dims(call, call["dim"])


def _whole_slice(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Mapping[str, Any]:
    del inputs
    ends = {"start": 0, "end": outputs[0].local_shape[call["dim"]], "step": 1} if _takes_all(call) else {}
    sizes = {"input_sizes": list(outputs[0].local_shape)} if "input_sizes" in call.arguments else {}
    return {**ends, **sizes}


def _selected(call: Call) -> Order:
    cut = call["dim"] % call.inputs[0].ndim
    return [dim for dim in range(call.inputs[0].ndim) if dim != cut]


def _inserted(call: Call) -> Order:
    """Of the gradient of a select."""
    order: Order = list(range(call.inputs[0].ndim))
    order.insert(call["dim"] % (len(order) + 1), None)
    return order


def _diagonal(call: Call) -> Order:
    ndim = call.inputs[0].ndim
    gone = (call["dim1"] % ndim, call["dim2"] % ndim)
    return [*(dim for dim in range(ndim) if dim not in gone), None]


def _diagonal_backward(call: Call) -> Order:
    order: Order = list(range(call.inputs[0].ndim - 1))
    ndim = len(order) + 2
    for dim in sorted((call["dim1"] % ndim, call["dim2"] % ndim)):
        order.insert(dim, None)
    return order


def _unfolded(call: Call) -> Order:
    return [*(_dims(call, call["dimension"]) if call.inputs[0].ndim else []), None]


def _unfold_backward(call: Call) -> Order:
    ndim = call.inputs[0].ndim - 1
    if not ndim:
        return []
    cut = call["dim"] % ndim
    return [None if dim == cut else dim for dim in range(ndim)]


def _local_input_sizes(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Mapping[str, Any]:
    del inputs
    name = "input_sizes" if "input_sizes" in call.arguments else "input_size"
    return {name: list(outputs[0].local_shape)}


def _rolled(call: Call) -> Order:
    dims = call["dims"]
    return _dims(call, *(dims or range(call.inputs[0].ndim)))


def _repeated(call: Call) -> Order:
    repeats = call["repeats"]
    more = len(repeats) - call.inputs[0].ndim
    return [None] * more + [dim if repeats[more + dim] == 1 else None for dim in range(call.inputs[0].ndim)]


def _padded(call: Call, axis: int) -> list[Choice]:
    """Dims that get longer, or shorter, are whole; parts of a sum are padded with zeros only."""
    ndim, pad = call.inputs[0].ndim, call["pad"]
    order = _dims(call, *[ndim - 1 - place // 2 for place, size in enumerate(pad) if size])
    pattern = Pattern(inputs=[range(ndim)], outputs=[order], linear=((0,),) if call["value"] == 0 else ())
    return without_unasked_sums(choices_of(pattern, call, axis), call, axis)


# [Note: pieces of a divided dim]
# A dim in equal blocks, each divided by itself, is cut between the blocks without anything moved: of the dim of
# ``Shard(dim, blocks=3)`` three equal pieces are ``Shard(dim)`` each. The other way round, equal tensors that are
# ``Shard(dim)``, joined along the dim, are ``Shard(dim, blocks=3)`` together. Both need parts of one size.


def _divides(call: Call, axis: int, placement: Shard, place: int = 0) -> bool:
    """Whether all ranks that divide the dim of an input have parts of one size."""
    num_ranks = call.mesh.shape[axis] * math.prod(
        size
        for choice, size in zip(call.chosen, call.mesh.shape, strict=False)
        if isinstance(before := choice.inputs[place], Shard) and before.dim == placement.dim
    )
    return call.inputs[place].shape[placement.dim] % (placement.blocks * num_ranks) == 0


def _split(call: Call, axis: int) -> list[Choice]:
    layout, dim = call.inputs[0], call["dim"] % call.inputs[0].ndim
    sizes = [result.shape[dim] for result in call.results]
    order = _dims(call) if len(sizes) == 1 else _dims(call, dim)
    choices = renamed(lambda _: order, call, axis)
    now = layout.placements[axis]
    if isinstance(now, Shard) and now.dim == dim and len(sizes) > 1 and len(set(sizes)) == 1 and sizes[0]:
        blocks, rest = divmod(now.blocks, len(sizes))
        if not rest and _divides(call, axis, now):
            choices.append(Choice((now,), (Shard(dim, blocks),) * len(sizes)))
    return choices


def _local_split(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Mapping[str, Any]:
    del inputs
    dim = call["dim"]
    sizes = [layout.local_shape[dim] for layout in outputs]
    if "split_size" in call.arguments:
        # One piece is more than a part has, where the dim is not cut.
        return {"split_size": max(sizes[0], 1) if len(sizes) > 1 else max(call["split_size"], 1)}
    return {"split_sizes": sizes}


def _joined(call: Call, axis: int) -> list[Choice]:
    """Of tensors one after the other along a dim; empty ones of one dim may be among them."""
    shapes = [layout.shape for layout in call.inputs]
    ndim = call.results[0].ndim
    dim = call["dim"] % max(ndim, 1)
    letters: Order = [None if place == dim else place for place in range(ndim)]
    inputs: list[Order] = [letters if len(shape) == ndim and shape != (0,) else [None] * len(shape) for shape in shapes]
    choices = without_unasked_sums(choices_of(_all_together(call, inputs, letters), call, axis), call, axis)
    now = call.inputs[0].placements[axis]
    if isinstance(now, Shard) and now.dim == dim:
        alike = all(layout.shape == shapes[0] and layout.placements[axis] == now for layout in call.inputs)
        if alike and all(_divides(call, axis, now, place) for place in range(len(shapes))):
            choices.append(Choice((now,) * len(shapes), (Shard(dim, now.blocks * len(shapes)),)))
    return choices


def _stacked(call: Call, axis: int) -> list[Choice]:
    order: Order = list(range(call.inputs[0].ndim))
    inputs = [list(order)] * len(call.inputs)
    order.insert(call["dim"] % (len(order) + 1), None)
    return without_unasked_sums(choices_of(_all_together(call, inputs, order), call, axis), call, axis)


def _all_together(call: Call, inputs: Sequence[Order], output: Order) -> Pattern:
    """All inputs are parts that are folded, or none; not where elements are cast, which may lose some of a sum."""
    alike = len({layout.dtype for layout in call.inputs}) == 1
    return Pattern(
        inputs=inputs,
        outputs=[output],
        linear=(range(len(inputs)),) if alike else (),
        keeps=_OTHER_FOLDS if alike else (),
    )


def _scattered(order: Callable[[Call], Order], call: Call, axis: int) -> list[Choice]:
    """A tensor with what a slice, select or diagonal takes replaced by another."""
    taken = order(call)
    letters = [dim if dim in taken else None for dim in range(call.inputs[0].ndim)]
    if len(call.inputs) == 1:  # A plain number replaces one element.
        return choices_of(Pattern(inputs=[letters], outputs=[letters]), call, axis)
    pattern = Pattern(inputs=[letters, taken], outputs=[letters], linear=((0, 1),))
    return choices_of(pattern, call, axis)


def _order_of_slice_scatter(call: Call) -> Order:
    whole = call.inputs[1].shape[call["dim"]] == call.inputs[0].shape[call["dim"]]
    return _dims(call) if whole else _dims(call, call["dim"])


def _slice_of_scatter(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Mapping[str, Any]:
    del inputs
    if None in _order_of_slice_scatter(call):
        return {}
    return {"start": 0, "end": outputs[0].local_shape[call["dim"]], "step": 1}


def _rule(order: Callable[[Call], Order], **more: Any) -> Rule:
    return Rule(choices=partial(renamed, order), **more)


_triangle_rule = _rule(lambda call: _dims(call, -2, -1))

RULES: dict[torch._ops.OpOverload, Rule] = {
    _aten.slice.Tensor: _rule(_sliced, arguments=_whole_slice),
    _aten.slice_backward.default: _rule(_sliced, arguments=_whole_slice),
    _aten.select.int: _rule(_selected),
    _aten.select_backward.default: _rule(_inserted, arguments=_local_input_sizes),
    _aten.diagonal.default: _rule(_diagonal),
    _aten.diagonal_backward.default: _rule(_diagonal_backward, arguments=_local_input_sizes),
    _aten.unfold.default: _rule(_unfolded),
    _aten.unfold_backward.default: _rule(_unfold_backward, arguments=_local_input_sizes),
    _aten.unbind.int: _rule(_selected),
    _aten.split.Tensor: Rule(choices=_split, arguments=_local_split),
    _aten.split_with_sizes.default: Rule(choices=_split, arguments=_local_split),
    _aten.unsafe_split.Tensor: Rule(choices=_split, arguments=_local_split),
    _aten.unsafe_split_with_sizes.default: Rule(choices=_split, arguments=_local_split),
    _aten.cat.default: Rule(choices=_joined),
    _aten.stack.default: Rule(choices=_stacked),
    _aten.constant_pad_nd.default: Rule(choices=_padded, by_value=True),
    _aten.flip.default: _rule(lambda call: _dims(call, *call["dims"])),
    _aten.roll.default: _rule(_rolled),
    _aten.repeat.default: _rule(_repeated),
    _aten.tril.default: _triangle_rule,
    _aten.triu.default: _triangle_rule,
    _aten.tril_.default: _triangle_rule,
    _aten.triu_.default: _triangle_rule,
    _aten.slice_scatter.default: Rule(
        choices=partial(_scattered, _order_of_slice_scatter), arguments=_slice_of_scatter
    ),
    _aten.select_scatter.default: Rule(choices=partial(_scattered, _selected)),
    _aten.diagonal_scatter.default: Rule(choices=partial(_scattered, _diagonal)),
}
