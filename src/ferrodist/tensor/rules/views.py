"""Operators that name the same elements otherwise: other shapes, orders of dims, and repeated elements."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.errors import UnsupportedOpError
from ferrodist.tensor.call import Choice, Rule
from ferrodist.tensor.placement import PARTIAL_OPS, Partial, Replicate, Shard
from ferrodist.tensor.rules.cutting import renamed
from ferrodist.torch_private.operators import private_aten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.tensor.call import Call
    from ferrodist.tensor.layout import Layout
    from ferrodist.tensor.placement import Placement

__all__ = ["DECOMPOSITIONS", "RULES"]

_aten = torch.ops.aten


def _transposed(call: Call) -> list[int | None]:
    ndim = call.inputs[0].ndim
    order: list[int | None] = list(range(ndim))
    one, other = (0, -1) if call.operator is _aten.t.default else (call["dim0"], call["dim1"])
    if ndim:
        order[one], order[other] = order[other], order[one]
    return order


def _permuted(call: Call) -> list[int | None]:
    ndim = call.inputs[0].ndim
    return [dim % ndim for dim in call["dims"]]


def _unsqueezed(call: Call) -> list[int | None]:
    ndim = call.inputs[0].ndim
    order: list[int | None] = list(range(ndim))
    order.insert(call["dim"] % (ndim + 1), None)
    return order


def _squeezed(call: Call) -> list[int | None]:
    layout = call.inputs[0]
    given = call.arguments.get("dim")
    dims = range(layout.ndim) if given is None else [given] if isinstance(given, int) else given
    gone = {dim % max(layout.ndim, 1) for dim in dims}
    return [dim for dim in range(layout.ndim) if dim not in gone or layout.shape[dim] != 1]


def _expanded(call: Call) -> list[int | None]:
    shape, result = call.inputs[0].shape, call.results[0].shape
    more = len(result) - len(shape)
    return [None] * more + [dim if shape[dim] == result[more + dim] else None for dim in range(len(shape))]


def _squeeze_choices(call: Call, axis: int) -> list[Choice]:
    """A dim that goes has one element, which is on one rank only when it is divided: it must be whole."""
    order = _squeezed(call)
    return [
        choice
        for choice in renamed(_squeezed, call, axis)
        if not isinstance(choice.inputs[0], Shard) or choice.inputs[0].dim in order
    ]


def _squeeze(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Callable[..., Any]:
    """Squeeze the dims that go; a part may have others of one element."""
    del inputs, outputs
    order = _squeezed(call)
    dims = [dim for dim in range(call.inputs[0].ndim) if dim not in order]
    return lambda local, *_: _aten.squeeze.dims(local, dims)


def _local_size(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Mapping[str, Any]:
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


def _reshaped(call: Call, axis: int) -> list[Choice]:
    layout, result = call.inputs[0], call.results[0]
    whole: list[Placement] = [Replicate(), *[Partial(op) for op in PARTIAL_OPS]]
    choices = [Choice((placement,), (placement,)) for placement in whole]
    now = layout.placements[axis]
    if isinstance(now, Shard) and 0 not in layout.shape:
        then = _follow(call, axis, now, list(result.shape))
        if then is not None:
            choices.append(Choice((now,), (then,)))
    return choices


def _follow(call: Call, axis: int, now: Shard, result: list[int]) -> Shard | None:
    """How a view is divided whose input is, or None where it is in no such way; see [Note: views of divided dims]."""
    shape = list(call.inputs[0].shape)
    found = [pair for pair in _groups(shape, result) if now.dim in pair[0]]
    if not found:
        return None
    ((here, there),) = found
    if len(here) == len(there) == 1:
        return Shard(there[0], now.blocks)
    for choice, num_ranks in zip(call.chosen, call.mesh.shape, strict=False):
        (before,), (after,) = choice.inputs, choice.outputs
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


def _reshape(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Callable[..., Any]:
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


_reshape_rule = Rule(choices=_reshaped, arguments=_local_size, local=_reshape)

RULES: dict[torch._ops.OpOverload, Rule] = {
    **{_overload(name): Rule(choices=partial(renamed, order)) for names, order in _RENAMED for name in names.split()},
    **{
        _overload(name): Rule(choices=_squeeze_choices, local=_squeeze)
        for name in ("squeeze.default", "squeeze.dim", "squeeze.dims")
    },
    _aten.expand.default: Rule(choices=partial(renamed, _expanded), arguments=_local_size),
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
