"""Operators that pick elements by the numbers in another tensor, or place them so."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.op_strategy import EinsumPattern, OpRule, strategies_of
from ferrodist.tensor.ops.view import without_unasked_sums
from ferrodist.tensor.spec import DTensorSpec
from ferrodist.torch_private.operators import private_aten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ferrodist.tensor.op_strategy import Letters, OpCall, OpStrategy

_aten = torch.ops.aten
_INDEX = "i"
"""The letter of a dim that the numbers of an index lie along."""


def _except(call: OpCall, dim: int, letter: str | None) -> list[Any]:
    """The letters of the first input: its dims, but another one for that which is indexed."""
    ndim = call.inputs[0].ndim
    return [letter if place == dim % max(ndim, 1) else place for place in range(ndim)]


def _index_select(call: OpCall, axis: int) -> list[OpStrategy]:
    dim = call["dim"]
    index = [_INDEX] * call.inputs[1].ndim
    output = _except(call, dim, _INDEX if index else None)
    pattern = EinsumPattern(inputs=[_except(call, dim, None), index], outputs=[output], linear=((0,),))
    return without_unasked_sums(strategies_of(pattern, call, axis), call, axis)


def _index_add(call: OpCall, axis: int) -> list[OpStrategy]:
    """Ranks that have some of the index each add theirs."""
    dim = call["dim"]
    letter = _INDEX if call.inputs[1].ndim and call.inputs[0].ndim else None
    whole = _except(call, dim, None)
    pattern = EinsumPattern(
        inputs=[whole, [letter] * call.inputs[1].ndim, _except(call, dim, letter)[: call.inputs[2].ndim]],
        outputs=[whole],
        folds={_INDEX: ReduceOp.SUM},
        linear=((0, 2),),
        added=(0,),
    )
    return strategies_of(pattern, call, axis)


def _index_copy(call: OpCall, axis: int) -> list[OpStrategy]:
    whole = _except(call, call["dim"], None)
    source = whole[: call.inputs[2].ndim]
    pattern = EinsumPattern(inputs=[whole, [None] * call.inputs[1].ndim, source], outputs=[whole], linear=((0, 2),))
    return strategies_of(pattern, call, axis)


def _index_fill(call: OpCall, axis: int) -> list[OpStrategy]:
    whole = _except(call, call["dim"], None)
    more: list[Letters] = [[] for _ in call.inputs[2:]]
    pattern = EinsumPattern(inputs=[whole, [None] * call.inputs[1].ndim, *more], outputs=[whole])
    return strategies_of(pattern, call, axis)


def _gathered(call: OpCall, axis: int) -> list[OpStrategy]:
    """Beside the indexed dim, a dim may be divided where the index has as much of it as the tensor has."""
    layout, index = call.inputs
    letters = _shared(call, layout.shape, index.shape)
    pattern = EinsumPattern(
        inputs=[[None if one == _INDEX else one for one in letters], letters], outputs=[letters], linear=((0,),)
    )
    return without_unasked_sums(strategies_of(pattern, call, axis), call, axis)


def _shared(call: OpCall, *shapes: Sequence[int]) -> list[Any]:
    """The letters of an index: dims that are of one size in all of the shapes, and that which is indexed."""
    ndim = len(shapes[0])
    indexed = call["dim"] % max(ndim, 1)
    if not all(map(len, shapes)):
        return [None] * len(shapes[1])
    return [
        _INDEX if dim == indexed else dim if len({shape[dim] for shape in shapes}) == 1 else None for dim in range(ndim)
    ]


def _scattered(call: OpCall, axis: int, *, folds: bool = False, linear: bool = False) -> list[OpStrategy]:
    """``folds`` says whether what is placed is added to what is there, ``linear`` whether parts of sums stay such."""
    layout, index, *source = call.inputs
    letters = _shared(call, layout.shape, index.shape, *[one.shape for one in source if one.ndim])
    if any(one.ndim and one.shape != index.shape for one in source) or not folds:
        # More is there to be placed than there are numbers; or the last one of several that go to one place counts.
        letters = [None if one == _INDEX else one for one in letters]
    whole = [None if one == _INDEX else one for one in letters] if layout.ndim == index.ndim else [None] * layout.ndim
    pattern = EinsumPattern(
        inputs=[whole, letters, *[letters if one.ndim == index.ndim else [None] * one.ndim for one in source]],
        outputs=[whole],
        folds={_INDEX: ReduceOp.SUM} if folds else {},
        linear=((0, 2),) if linear and source else (),
        added=(0,),
    )
    return strategies_of(pattern, call, axis)


def _index_letters(call: OpCall) -> tuple[list[Any], list[Letters], list[Any]]:
    """The letters of an indexed tensor, of its indices, and of what the indices pick."""
    layout: DTensorSpec = call["self"]
    given = list(call["indices"])
    indices = [one for one in given if isinstance(one, DTensorSpec)]
    masks = [place for place, one in enumerate(given) if one is not None and one.dtype in (torch.bool, torch.uint8)]
    if masks:
        return _mask_letters(layout, given)
    ndim = max((one.ndim for one in indices), default=0)
    shape = [
        max((one.shape[one.ndim - place] for one in indices if one.ndim >= place), default=1)
        for place in range(ndim, 0, -1)
    ]
    if any(0 in one.shape for one in indices):
        shape = [0] * ndim
    letters: list[Letters] = [
        [
            (_INDEX, ndim - place) if one.shape[one.ndim - place] == shape[ndim - place] else None
            for place in range(one.ndim, 0, -1)
        ]
        for one in indices
    ]
    places = [place for place, one in enumerate(given) if one is not None]
    whole = [None if place in places else place for place in range(layout.ndim)]
    picked: list[Any] = [(_INDEX, dim) for dim in range(ndim)]
    first = places[0] if places and places[-1] - places[0] + 1 == len(places) else 0
    before = [place for place in range(layout.ndim) if place not in places and place < first]
    after = [place for place in range(layout.ndim) if place not in places and place >= first]
    return whole, letters, [*before, *picked, *after]


def _picks(arguments: Mapping[str, Any]) -> bool:
    """Whether a mask says which elements are taken, or written each by a value of its own."""
    given = [one for one in arguments["indices"] if one is not None]
    if not any(one.dtype in (torch.bool, torch.uint8) for one in given):
        return False
    value = arguments.get("values")
    is_one = value is not None and all(size == 1 for size in value.shape)
    return len(given) != 1 or not is_one or bool(arguments.get("accumulate"))


def _mask_letters(layout: DTensorSpec, given: Sequence[Any]) -> tuple[list[Any], list[Letters], list[Any]]:
    """Where a mask says which elements are written: each element is by itself, for one value is for all."""
    masks = [one for one in given if one is not None]
    first = list(given).index(masks[0])
    letters: list[Letters] = (
        [[first + dim for dim in range(masks[0].ndim)]] if isinstance(masks[0], DTensorSpec) else []
    )
    whole: list[Any] = list(range(layout.ndim))
    return whole, letters, []


def _indexed(call: OpCall, axis: int) -> list[OpStrategy]:
    whole, letters, picked = _index_letters(call)
    pattern = EinsumPattern(inputs=[whole, *letters], outputs=[picked], linear=((0,),))
    return without_unasked_sums(strategies_of(pattern, call, axis), call, axis)


def _index_put(call: OpCall, axis: int) -> list[OpStrategy]:
    """What is added may be added by ranks that have some of the indices each."""
    whole, letters, picked = _index_letters(call)
    adds = call["accumulate"]
    if not adds:
        letters = [[None if isinstance(one, tuple) else one for one in dims] for dims in letters]
    values = [call["values"]] if isinstance(call["values"], DTensorSpec) else []
    # Values are as what the indices pick, with broadcasting.
    sizes = dict(zip(whole, call["self"].shape, strict=True))
    for dims, layout in zip(letters, call.inputs[1:], strict=False):
        sizes.update({letter: size for letter, size in zip(dims, layout.shape, strict=True) if letter is not None})
    given = []
    for layout in values:
        last = [letter if letter in sizes else None for letter in picked[len(picked) - layout.ndim :]]
        last = [None] * (layout.ndim - len(last)) + last
        given.append(
            [
                letter if letter is not None and sizes[letter] == size else None
                for letter, size in zip(last, layout.shape, strict=True)
            ]
        )
    found = {letter for dims in letters for letter in dims if isinstance(letter, tuple)}
    inputs = [whole, *letters, *given]
    pattern = EinsumPattern(
        inputs=inputs,
        outputs=[whole],
        folds=dict.fromkeys(found, ReduceOp.SUM) if adds else {},
        linear=((0, len(inputs) - 1),) if values and not _is_mask(call) else (),
        added=(0,),
    )
    return strategies_of(pattern, call, axis)


def _is_mask(call: OpCall) -> bool:
    return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in call["indices"])


_REDUCING = ("value", "reduce", "value_reduce")

_TABLE: list[tuple[OpRule, Sequence[torch._ops.OpOverload]]] = [
    (OpRule(choices=_index_select), (_aten.index_select.default,)),
    (OpRule(choices=_index_add), (_aten.index_add.default, _aten.index_add_.default)),
    (OpRule(choices=_index_copy), (_aten.index_copy.default, _aten.index_copy_.default)),
    (OpRule(choices=_gathered), (_aten.gather.default,)),
    (OpRule(choices=_indexed, picks=_picks), (_aten.index.Tensor, private_aten.unsafe_index.Tensor)),
    (
        OpRule(choices=_index_fill),
        [
            getattr(packet, kind)
            for packet in (_aten.index_fill, _aten.index_fill_)
            for kind in ("int_Scalar", "int_Tensor")
        ],
    ),
    (OpRule(choices=_index_put, picks=_picks), (_aten.index_put.default, _aten.index_put_.default)),
    (
        OpRule(choices=partial(_scattered, folds=True, linear=True)),
        (_aten.scatter_add.default, _aten.scatter_add_.default),
    ),
    (
        OpRule(choices=partial(_scattered, linear=True)),
        (_aten.scatter.src, _aten.scatter_.src),
    ),
    (
        OpRule(choices=_scattered),
        (
            *(getattr(packet, kind) for packet in (_aten.scatter, _aten.scatter_) for kind in _REDUCING),
            *(_aten.scatter_reduce.two, _aten.scatter_reduce_.two),
        ),
    ),
]

RULES: dict[torch._ops.OpOverload, OpRule] = {operator: rule for rule, operators in _TABLE for operator in operators}
