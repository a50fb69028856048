"""Operators that pick elements by the numbers in another tensor, or place them so."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.op_strategy import EinsumPattern, OpRule, einsum_strategies
from ferrodist.tensor.ops.view import drop_needless_partials
from ferrodist.tensor.spec import DTensorSpec
from ferrodist.torch_private.operators import private_aten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ferrodist.tensor.op_strategy import Labels, OpCall, OpStrategy

_aten = torch.ops.aten
_INDEX = "i"
"""The letter of a dim that the numbers of an index lie along."""


def _except(call: OpCall, dim: int, label: str | None) -> list[Any]:
    """The letters of the first input: its dims, but another one for that which is indexed."""
    ndim = call.inputs[0].ndim
    return [label if place == dim % max(ndim, 1) else place for place in range(ndim)]


def _index_select(call: OpCall, axis: int) -> list[OpStrategy]:
    dim = call["dim"]
    index = [_INDEX] * call.inputs[1].ndim
    output = _except(call, dim, _INDEX if index else None)
    pattern = EinsumPattern(inputs=[_except(call, dim, None), index], outputs=[output], linear=((0,),))
    return drop_needless_partials(einsum_strategies(pattern, call, axis), call, axis)


def _index_add(call: OpCall, axis: int) -> list[OpStrategy]:
    """Ranks that have some of the index each add theirs."""
    dim = call["dim"]
    label = _INDEX if call.inputs[1].ndim and call.inputs[0].ndim else None
    whole = _except(call, dim, None)
    pattern = EinsumPattern(
        inputs=[whole, [label] * call.inputs[1].ndim, _except(call, dim, label)[: call.inputs[2].ndim]],
        outputs=[whole],
        reductions={_INDEX: ReduceOp.SUM},
        linear=((0, 2),),
        addends=(0,),
    )
    return einsum_strategies(pattern, call, axis)


def _index_copy(call: OpCall, axis: int) -> list[OpStrategy]:
    whole = _except(call, call["dim"], None)
    source = whole[: call.inputs[2].ndim]
    pattern = EinsumPattern(inputs=[whole, [None] * call.inputs[1].ndim, source], outputs=[whole], linear=((0, 2),))
    return einsum_strategies(pattern, call, axis)


def _index_fill(call: OpCall, axis: int) -> list[OpStrategy]:
    whole = _except(call, call["dim"], None)
    more: list[Labels] = [[] for _ in call.inputs[2:]]
    pattern = EinsumPattern(inputs=[whole, [None] * call.inputs[1].ndim, *more], outputs=[whole])
    return einsum_strategies(pattern, call, axis)


def _gathered(call: OpCall, axis: int) -> list[OpStrategy]:
    """Beside the indexed dim, a dim may be divided where the index has as much of it as the tensor has."""
    spec, index = call.inputs
    labels = _shared(call, spec.shape, index.shape)
    pattern = EinsumPattern(
        inputs=[[None if one == _INDEX else one for one in labels], labels], outputs=[labels], linear=((0,),)
    )
    return drop_needless_partials(einsum_strategies(pattern, call, axis), call, axis)


def _shared(call: OpCall, *shapes: Sequence[int]) -> list[Any]:
    """The letters of an index: dims that are of one size in all of the shapes, and that which is indexed."""
    ndim = len(shapes[0])
    indexed = call["dim"] % max(ndim, 1)
    if not all(map(len, shapes)):
        return [None] * len(shapes[1])
    return [
        _INDEX if dim == indexed else dim if len({shape[dim] for shape in shapes}) == 1 else None for dim in range(ndim)
    ]


def _scattered(call: OpCall, axis: int, *, reductions: bool = False, linear: bool = False) -> list[OpStrategy]:
    """``folds`` says whether what is placed is added to what is there, ``linear`` whether parts of sums stay such."""
    spec, index, *source = call.inputs
    labels = _shared(call, spec.shape, index.shape, *[one.shape for one in source if one.ndim])
    if any(one.ndim and one.shape != index.shape for one in source) or not reductions:
        # More is there to be placed than there are numbers; or the last one of several that go to one place counts.
        labels = [None if one == _INDEX else one for one in labels]
    whole = [None if one == _INDEX else one for one in labels] if spec.ndim == index.ndim else [None] * spec.ndim
    pattern = EinsumPattern(
        inputs=[whole, labels, *[labels if one.ndim == index.ndim else [None] * one.ndim for one in source]],
        outputs=[whole],
        reductions={_INDEX: ReduceOp.SUM} if reductions else {},
        linear=((0, 2),) if linear and source else (),
        addends=(0,),
    )
    return einsum_strategies(pattern, call, axis)


def _index_labels(call: OpCall) -> tuple[list[Any], list[Labels], list[Any]]:
    """The letters of an indexed tensor, of its indices, and of what the indices pick."""
    spec: DTensorSpec = call["self"]
    given = list(call["indices"])
    indices = [one for one in given if isinstance(one, DTensorSpec)]
    masks = [place for place, one in enumerate(given) if one is not None and one.dtype in (torch.bool, torch.uint8)]
    if masks:
        return _mask_labels(spec, given)
    ndim = max((one.ndim for one in indices), default=0)
    shape = [
        max((one.shape[one.ndim - place] for one in indices if one.ndim >= place), default=1)
        for place in range(ndim, 0, -1)
    ]
    if any(0 in one.shape for one in indices):
        shape = [0] * ndim
    labels: list[Labels] = [
        [
            (_INDEX, ndim - place) if one.shape[one.ndim - place] == shape[ndim - place] else None
            for place in range(one.ndim, 0, -1)
        ]
        for one in indices
    ]
    places = [place for place, one in enumerate(given) if one is not None]
    whole = [None if place in places else place for place in range(spec.ndim)]
    picked: list[Any] = [(_INDEX, dim) for dim in range(ndim)]
    first = places[0] if places and places[-1] - places[0] + 1 == len(places) else 0
    before = [place for place in range(spec.ndim) if place not in places and place < first]
    after = [place for place in range(spec.ndim) if place not in places and place >= first]
    return whole, labels, [*before, *picked, *after]


def _is_data_dependent(arguments: Mapping[str, Any]) -> bool:
    """Whether a mask says which elements are taken, or written each by a value of its own."""
    given = [one for one in arguments["indices"] if one is not None]
    if not any(one.dtype in (torch.bool, torch.uint8) for one in given):
        return False
    value = arguments.get("values")
    is_one = value is not None and all(size == 1 for size in value.shape)
    return len(given) != 1 or not is_one or bool(arguments.get("accumulate"))


def _mask_labels(spec: DTensorSpec, given: Sequence[Any]) -> tuple[list[Any], list[Labels], list[Any]]:
    """Where a mask says which elements are written: each element is by itself, for one value is for all."""
    masks = [one for one in given if one is not None]
    first = list(given).index(masks[0])
    labels: list[Labels] = [[first + dim for dim in range(masks[0].ndim)]] if isinstance(masks[0], DTensorSpec) else []
    whole: list[Any] = list(range(spec.ndim))
    return whole, labels, []


def _indexed(call: OpCall, axis: int) -> list[OpStrategy]:
    whole, labels, picked = _index_labels(call)
    pattern = EinsumPattern(inputs=[whole, *labels], outputs=[picked], linear=((0,),))
    return drop_needless_partials(einsum_strategies(pattern, call, axis), call, axis)


def _index_put(call: OpCall, axis: int) -> list[OpStrategy]:
    """What is added may be added by ranks that have some of the indices each."""
    whole, labels, picked = _index_labels(call)
    adds = call["accumulate"]
    if not adds:
        labels = [[None if isinstance(one, tuple) else one for one in dims] for dims in labels]
    values = [call["values"]] if isinstance(call["values"], DTensorSpec) else []
    # Values are as what the indices pick, with broadcasting.
    sizes = dict(zip(whole, call["self"].shape, strict=True))
    for dims, spec in zip(labels, call.inputs[1:], strict=False):
        sizes.update({label: size for label, size in zip(dims, spec.shape, strict=True) if label is not None})
    given = []
    for spec in values:
        last = [label if label in sizes else None for label in picked[len(picked) - spec.ndim :]]
        last = [None] * (spec.ndim - len(last)) + last
        given.append(
            [
                label if label is not None and sizes[label] == size else None
                for label, size in zip(last, spec.shape, strict=True)
            ]
        )
    found = {label for dims in labels for label in dims if isinstance(label, tuple)}
    inputs = [whole, *labels, *given]
    pattern = EinsumPattern(
        inputs=inputs,
        outputs=[whole],
        reductions=dict.fromkeys(found, ReduceOp.SUM) if adds else {},
        linear=((0, len(inputs) - 1),) if values and not _is_mask(call) else (),
        addends=(0,),
    )
    return einsum_strategies(pattern, call, axis)


def _is_mask(call: OpCall) -> bool:
    return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in call["indices"])


_REDUCING = ("value", "reduce", "value_reduce")

_TABLE: list[tuple[OpRule, Sequence[torch._ops.OpOverload]]] = [
    (OpRule(strategies=_index_select), (_aten.index_select.default,)),
    (OpRule(strategies=_index_add), (_aten.index_add.default, _aten.index_add_.default)),
    (OpRule(strategies=_index_copy), (_aten.index_copy.default, _aten.index_copy_.default)),
    (OpRule(strategies=_gathered), (_aten.gather.default,)),
    (
        OpRule(strategies=_indexed, is_data_dependent=_is_data_dependent),
        (_aten.index.Tensor, private_aten.unsafe_index.Tensor),
    ),
    (
        OpRule(strategies=_index_fill),
        [
            getattr(packet, kind)
            for packet in (_aten.index_fill, _aten.index_fill_)
            for kind in ("int_Scalar", "int_Tensor")
        ],
    ),
    (
        OpRule(strategies=_index_put, is_data_dependent=_is_data_dependent),
        (_aten.index_put.default, _aten.index_put_.default),
    ),
    (
        OpRule(strategies=partial(_scattered, reductions=True, linear=True)),
        (_aten.scatter_add.default, _aten.scatter_add_.default),
    ),
    (
        OpRule(strategies=partial(_scattered, linear=True)),
        (_aten.scatter.src, _aten.scatter_.src),
    ),
    (
        OpRule(strategies=_scattered),
        (
            *(getattr(packet, kind) for packet in (_aten.scatter, _aten.scatter_) for kind in _REDUCING),
            *(_aten.scatter_reduce.two, _aten.scatter_reduce_.two),
        ),
    ),
]

RULES: dict[torch._ops.OpOverload, OpRule] = {operator: rule for rule, operators in _TABLE for operator in operators}
