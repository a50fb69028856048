"""Operators that gather or scatter elements by indices."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.op_strategy import EinsumPattern, Labels, OpCall, einsum_rule, rule_table
from ferrodist.tensor.ops.view import move_rule
from ferrodist.tensor.spec import DTensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_INDEX = "i"  # the label of the dim along which an index has its elements


def _replace_label(call: OpCall, dim: int, label: str | None) -> list[Any]:
    """The labels of the first input: its dims, but another label for the indexed one."""
    ndim = call.inputs[0].ndim
    return [label if other == dim % max(ndim, 1) else other for other in range(ndim)]


def _index_select(call: OpCall) -> EinsumPattern:
    dim = call["dim"]
    index = [_INDEX] * call.inputs[1].ndim
    output = _replace_label(call, dim, _INDEX if index else None)
    return EinsumPattern(inputs=[_replace_label(call, dim, None), index], outputs=[output], linear=((0,),))


def _index_add(call: OpCall) -> EinsumPattern:
    """The pattern of an addition, to which ranks may contribute by different parts of the index."""
    dim = call["dim"]
    label = _INDEX if call.inputs[1].ndim and call.inputs[0].ndim else None
    target = _replace_label(call, dim, None)
    return EinsumPattern(
        inputs=[target, [label] * call.inputs[1].ndim, _replace_label(call, dim, label)[: call.inputs[2].ndim]],
        outputs=[target],
        reductions={_INDEX: ReduceOp.SUM},
        linear=((0, 2),),
        addends=(0,),
    )


def _index_write(linear: Sequence[Sequence[int]], call: OpCall) -> EinsumPattern:
    """The pattern of a write of slices of another tensor, or of a value."""
    target = _replace_label(call, call["dim"], None)
    written: list[Labels] = [target[: spec.ndim] for spec in call.inputs[2:]]
    return EinsumPattern(inputs=[target, [None] * call.inputs[1].ndim, *written], outputs=[target], linear=linear)


def _without_index(labels: Sequence[Any]) -> list[Any]:
    return [None if label == _INDEX else label for label in labels]


def _gather(call: OpCall) -> EinsumPattern:
    """The pattern of a gather: dims of which the index has as much as the tensor may be sharded."""
    spec, index = call.inputs
    labels = _shared_labels(call, spec.shape, index.shape)
    return EinsumPattern(inputs=[_without_index(labels), labels], outputs=[labels], linear=((0,),))


def _shared_labels(call: OpCall, *shapes: Sequence[int]) -> list[Any]:
    """The labels of an index: the indexed dim, and dims of equal size in all of the shapes."""
    ndim = len(shapes[0])
    indexed = call["dim"] % max(ndim, 1)
    if not all(map(len, shapes)):
        return [None] * len(shapes[1])
    return [
        _INDEX if dim == indexed else dim if len({shape[dim] for shape in shapes}) == 1 else None for dim in range(ndim)
    ]


def _scatter(call: OpCall, *, adds: bool = False, is_linear: bool = False) -> EinsumPattern:
    """The pattern of a scatter, which may add to the target, and be linear."""
    spec, index, *source = call.inputs
    labels = _shared_labels(call, spec.shape, index.shape, *[one.shape for one in source if one.ndim])
    if any(one.ndim and one.shape != index.shape for one in source) or not adds:
        # The source is larger than the index; or the last of several elements for one index wins.
        labels = _without_index(labels)
    target = _without_index(labels) if spec.ndim == index.ndim else [None] * spec.ndim
    return EinsumPattern(
        inputs=[target, labels, *[labels if one.ndim == index.ndim else [None] * one.ndim for one in source]],
        outputs=[target],
        reductions={_INDEX: ReduceOp.SUM} if adds else {},
        linear=((0, 2),) if is_linear and source else (),
        addends=(0,),
    )


_MASK_DTYPES = (torch.bool, torch.uint8)


def _index_labels(call: OpCall) -> tuple[list[Any], list[Labels], list[Any]]:
    """The labels of an indexed tensor, of its indices, and of the elements that the indices pick."""
    spec: DTensorSpec = call["self"]
    given = list(call["indices"])
    indices = [one for one in given if isinstance(one, DTensorSpec)]
    if any(one is not None and one.dtype in _MASK_DTYPES for one in given):
        # A mask says where one value is written: each element is independent.
        first, mask = next((at, one) for at, one in enumerate(given) if one is not None)
        masks: list[Labels] = [[first + dim for dim in range(mask.ndim)]] if isinstance(mask, DTensorSpec) else []
        return list(range(spec.ndim)), masks, []
    ndim = max((one.ndim for one in indices), default=0)
    # Empty indices pick nothing along any dim.
    is_empty = any(0 in one.shape for one in indices)
    shape = [0 if is_empty else max(one.shape[dim] for one in indices if one.ndim >= -dim) for dim in range(-ndim, 0)]
    labels: list[Labels] = [
        [(_INDEX, ndim + dim) if one.shape[dim] == shape[dim] else None for dim in range(-one.ndim, 0)]
        for one in indices
    ]
    indexed = [dim for dim, one in enumerate(given) if one is not None]
    target = [None if dim in indexed else dim for dim in range(spec.ndim)]
    picked: list[Any] = [(_INDEX, dim) for dim in range(ndim)]
    first = indexed[0] if indexed and indexed[-1] - indexed[0] + 1 == len(indexed) else 0
    before = [dim for dim in range(spec.ndim) if dim not in indexed and dim < first]
    after = [dim for dim in range(spec.ndim) if dim not in indexed and dim >= first]
    return target, labels, [*before, *picked, *after]


def _is_data_dependent(arguments: Mapping[str, Any]) -> bool:
    """Return whether a mask picks elements, or writes each by a value of its own."""
    given = [one for one in arguments["indices"] if one is not None]
    if not any(one.dtype in _MASK_DTYPES for one in given):
        return False
    value = arguments.get("values")
    is_scalar = value is not None and all(size == 1 for size in value.shape)
    return len(given) != 1 or not is_scalar or bool(arguments.get("accumulate"))


def _index(call: OpCall) -> EinsumPattern:
    target, labels, picked = _index_labels(call)
    return EinsumPattern(inputs=[target, *labels], outputs=[picked], linear=((0,),))


def _index_put(call: OpCall) -> EinsumPattern:
    """The pattern of a write by indices; to an addition ranks may contribute by different parts of the indices."""
    target, labels, picked = _index_labels(call)
    adds = call["accumulate"]
    if not adds:
        labels = [[None if isinstance(one, tuple) else one for one in dims] for dims in labels]
    values = [call["values"]] if isinstance(call["values"], DTensorSpec) else []
    # Values have the dims of the picked elements, with broadcasting.
    sizes = dict(zip(target, call["self"].shape, strict=True))
    for dims, spec in zip(labels, call.inputs[1:], strict=False):
        sizes.update({label: size for label, size in zip(dims, spec.shape, strict=True) if label is not None})
    value_labels = []
    for spec in values:
        last = ([None] * spec.ndim + picked)[len(picked) :]
        pairs = zip(last, spec.shape, strict=True)
        value_labels.append(
            [label if label is not None and sizes.get(label) == size else None for label, size in pairs]
        )
    index_labels = {label for dims in labels for label in dims if isinstance(label, tuple)}
    has_mask = any(one is not None and one.dtype in _MASK_DTYPES for one in call["indices"])
    inputs = [target, *labels, *value_labels]
    return EinsumPattern(
        inputs=inputs,
        outputs=[target],
        reductions=dict.fromkeys(index_labels, ReduceOp.SUM) if adds else {},
        linear=((0, len(inputs) - 1),) if values and not has_mask else (),
        addends=(0,),
    )


RULES = rule_table(
    (move_rule(_index_select), "index_select.default"),
    (einsum_rule(_index_add), "index_add.default index_add_.default"),
    (einsum_rule(partial(_index_write, ())), "index_reduce.default index_reduce_.default"),
    (einsum_rule(partial(_index_write, ((0, 2),))), "index_copy.default index_copy_.default"),
    (move_rule(_gather), "gather.default"),
    (move_rule(_index, is_data_dependent=_is_data_dependent), "index.Tensor _unsafe_index.Tensor"),
    (
        einsum_rule(partial(_index_write, ())),
        "index_fill.int_Scalar index_fill.int_Tensor index_fill_.int_Scalar index_fill_.int_Tensor",
    ),
    (einsum_rule(_index_put, is_data_dependent=_is_data_dependent), "index_put.default index_put_.default"),
    (einsum_rule(partial(_scatter, adds=True, is_linear=True)), "scatter_add.default scatter_add_.default"),
    (einsum_rule(partial(_scatter, is_linear=True)), "scatter.src scatter_.src"),
    (
        einsum_rule(_scatter),
        (
            "scatter.value scatter.reduce scatter.value_reduce scatter_.value scatter_.reduce scatter_.value_reduce"
            " scatter_reduce.two scatter_reduce_.two"
        ),
    ),
)
