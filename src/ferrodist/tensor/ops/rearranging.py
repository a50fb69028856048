"""Copies of views, and moves of elements between dims: pixels and channels, rotations, diagonals, patches."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.tensor.op_strategy import EinsumPattern, OpRule, all_replicated, einsum_rule, rule_table
from ferrodist.tensor.ops.view import DimMap, dim_map_rule
from ferrodist.torch_private.operators import overload_name, overloads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.tensor.op_strategy import OpCall

_aten = torch.ops.aten


def _embed_diagonal(call: OpCall) -> DimMap:
    """The dims of a tensor whose last dim becomes the diagonal of two."""
    ndim = call.inputs[0].ndim + 1
    diagonal = {call["dim1"] % ndim, call["dim2"] % ndim}
    dims = iter(range(ndim - 2))
    return [None if dim in diagonal else next(dims) for dim in range(ndim)]


def _patches(call: OpCall) -> EinsumPattern:
    """Patches of images, or images of patches: the batch may be sharded."""
    labels = [[0, *[None] * (ndim - 1)] for ndim in (call.inputs[0].ndim, call.results[0].ndim)]
    has_batch = call.inputs[0].ndim == (4 if call.operator.overloadpacket is _aten.im2col else 3)
    first, second = labels if has_batch else [[None] * len(one) for one in labels]
    return EinsumPattern(inputs=[first], outputs=[second], linear=((0,),))


RULES = rule_table(
    (dim_map_rule(_embed_diagonal), "diag_embed.default"),
    (einsum_rule(_patches), "im2col.default col2im.default"),
    (OpRule(strategies=all_replicated), "block_diag.default _chunk_cat.default"),
)


def _split_dim(tensor: Any, dim: int, *sizes: int) -> Any:
    return tensor.reshape(*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])


def _pixel_shuffle(tensor: Any, factor: int) -> Any:
    *batch, channels, height, width = tensor.shape
    split = tensor.reshape(*batch, channels // factor**2, factor, factor, height, width)
    first = len(batch)
    order = [*range(first + 1), first + 3, first + 1, first + 4, first + 2]
    return split.permute(order).reshape(*batch, channels // factor**2, height * factor, width * factor)


def _pixel_unshuffle(tensor: Any, factor: int) -> Any:
    *batch, channels, height, width = tensor.shape
    split = tensor.reshape(*batch, channels, height // factor, factor, width // factor, factor)
    first = len(batch)
    order = [*range(first + 1), first + 2, first + 4, first + 1, first + 3]
    return split.permute(order).reshape(*batch, channels * factor**2, height // factor, width // factor)


def _channel_shuffle(tensor: Any, groups: int) -> Any:
    channels = tensor.shape[1]
    return _split_dim(tensor, 1, groups, channels // groups).transpose(1, 2).reshape(tensor.shape)


def _rotate(tensor: Any, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    first, second = dims
    turns = k % 4
    if turns == 0:
        return tensor.clone()
    if turns == 2:
        return tensor.flip(dims)
    return tensor.flip([second if turns == 1 else first]).transpose(first, second).clone()


def _glu(tensor: Any, dim: int = -1) -> Any:
    values, gates = tensor.chunk(2, dim)
    return values * gates.sigmoid()


def _glu_backward(grad: Any, tensor: Any, dim: int) -> Any:
    values, gates = tensor.chunk(2, dim)
    opened = gates.sigmoid()
    return torch.cat([grad * opened, grad * values * opened * (1 - opened)], dim)


def _copy_view(view: torch._ops.OpOverload, /, *args: Any, **named: Any) -> Any:
    """The copy of a view, or of several."""
    result = view(*args, **named)
    if isinstance(result, list | tuple):
        return [one.clone(memory_format=torch.contiguous_format) for one in result]
    return result.clone(memory_format=torch.contiguous_format)


def _view_overload(copy: torch._ops.OpOverload) -> Any:
    """The view operator of which an operator returns the copy."""
    packet = getattr(_aten, copy.overloadpacket.__name__.removesuffix("_copy"), None)
    return getattr(packet, overload_name(copy), None)


_COPIES = """
alias_copy diagonal_copy expand_copy permute_copy select_copy slice_copy squeeze_copy t_copy transpose_copy
unsqueeze_copy view_copy unfold_copy unbind_copy split_copy split_with_sizes_copy detach_copy
view_as_real_copy view_as_complex_copy _reshape_alias_copy
"""

DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    _aten.pixel_shuffle.default: _pixel_shuffle,
    _aten.pixel_unshuffle.default: _pixel_unshuffle,
    _aten.channel_shuffle.default: _channel_shuffle,
    _aten.native_channel_shuffle.default: _channel_shuffle,
    _aten.rot90.default: _rotate,
    _aten.glu.default: _glu,
    _aten.glu_backward.default: _glu_backward,
    _aten.narrow_copy.default: lambda tensor, dim, start, length: tensor.narrow(dim, start, length).clone(),
    **{
        copy: partial(_copy_view, view)
        for name in _COPIES.split()
        for copy in overloads(name)
        if (view := _view_overload(copy)) is not None
    },
}
