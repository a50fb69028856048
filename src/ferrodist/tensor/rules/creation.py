"""Operators that make new tensors of the shape and dtype of others, whose elements they don't read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ferrodist.errors import UnsupportedOpError
from ferrodist.tensor.call import Choice, Rule
from ferrodist.tensor.layout import Layout
from ferrodist.tensor.placement import Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.tensor.call import Call

__all__ = ["DECOMPOSITIONS", "RULES", "all_whole", "shape_alone"]

_aten = torch.ops.aten


def shape_alone(call: Call, axis: int) -> list[Choice]:
    """As the input is divided, and whole where that is partial: nothing is moved."""
    now = call.inputs[0].placements[axis]
    return [Choice((now,), (now if isinstance(now, Shard) else Replicate(),))]


def all_whole(call: Call, axis: int) -> list[Choice]:
    """Nothing is divided: as what is drawn for an element depends on how many numbers those before it took."""
    del axis
    return [Choice((Replicate(),) * len(call.inputs), (Replicate(),) * len(call.results))]


def _fresh(call: Call, axis: int) -> list[Choice]:
    """Of shapes of their own: whole."""
    return [Choice((call.inputs[0].placements[axis],), (Replicate(),))]


def _as_strided(tensor: Any, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
    """A view of memory: autograd takes such of whole tensors, for the gradient of what was written to a view."""
    layout: Layout = tensor._layout
    local = tensor._local
    if any(placement != Replicate() for placement in layout.placements) or (
        local.numel() > 1 and local.stride() != layout.stride
    ):
        raise UnsupportedOpError(
            f"torch.as_strided is of memory, of which ranks have parts: {layout}; use views that name dims, or"
            " as_strided on full_tensor()"
        )
    start = tensor.storage_offset()
    offset = 0 if storage_offset is None else storage_offset - start
    view = local.as_strided(size, stride, local.storage_offset() + offset)
    result = Layout.of(layout.mesh, layout.placements, view.shape, layout.dtype, view.stride())
    return type(tensor)._wrap_view(view, result, tensor, offset)


RULES: dict[torch._ops.OpOverload, Rule] = {
    **{
        operator: Rule(choices=shape_alone)
        for operator in (
            _aten.zeros_like.default,
            _aten.ones_like.default,
            _aten.empty_like.default,
            _aten.full_like.default,
        )
    },
    **{
        operator: Rule(choices=_fresh)
        for operator in (
            _aten.new_zeros.default,
            _aten.new_ones.default,
            _aten.new_empty.default,
            _aten.new_full.default,
            _aten.new_empty_strided.default,
        )
    },
}

DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {_aten.as_strided.default: _as_strided}
