"""Layout of a unit's parameters in a flat tensor and of its shards, the same on all ranks.

A layout depends on shapes and the number of ranks alone, but for the ids that it claims in its group when it is made.

[Note: flat units]
The parameters of a unit that have one dtype lie end to end in one flat tensor (row-major, or in the dim order of a
channels-last weight), which is cut into as many equal shards as there are ranks to divide it, wherever the cuts fall.
So a unit is gathered by one all_gather straight to where its parameters are used, without a copy, and no shape or
number of ranks is special: each parameter is padded to 16 elements, and a large shard to whole pages. A parameter that
a cut goes through has a local shard on two or more ranks; a rank's local shard may be empty.

Gradients travel in *rows*, one for each rank that divides the unit: the rank's shard, and behind it a gradient mask
with one element for each parameter: 1 from a rank that has a gradient for it, else 0. So a gradient that no rank has
stays None, as in one process, and optimizers skip it.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from ferrodist.collectives.arguments import offsets_of
from ferrodist.parallel.fsdp.layout_ids import layout_ids
from ferrodist.tensor.local_shards import invert_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend

_ALIGNMENT = 16  # elements: float32 parameters begin at multiples of 64 bytes, as in memory of their own

_PAGE_BYTES, _SMALL_BYTES = 4096, 65536
"""Shards from the second size on are whole pages, so that they can be mapped one behind the other."""

_NUM_DIMS = 32  # half of the number that torch allows

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class ShardRange(NamedTuple):
    """A rank's ``size`` elements of a parameter from its element ``start``, at ``offset`` in the rank's shard."""

    rank: int
    start: int
    offset: int
    size: int


class FlatLayout:
    """Offsets of some parameters in a flat tensor, and of its shards; see [Note: flat units].

    Shards have the ``shard_dtype``, are gathered in the ``param_dtype`` and get gradients in the ``reduce_dtype``.
    ``dim_orders`` are from `dim_order`, and ``group`` is that in which this layout gets an id; see `layout_ids.py`.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        num_shards: int,
        group: Backend,
        *,
        dim_orders: Sequence[tuple[int, ...] | None] | None = None,
        shard_dtype: torch.dtype,
        param_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
    ) -> None:
        self.shard_dtype, self.param_dtype, self.reduce_dtype = shard_dtype, param_dtype, reduce_dtype
        self.shapes = tuple(shapes)
        self.dim_orders = tuple(dim_orders) if dim_orders is not None else (None,) * len(self.shapes)
        self.numels = tuple(prod(shape) for shape in shapes)
        self.offsets = tuple(offsets_of([_align(numel) for numel in self.numels])[:-1])
        self.num_shards = num_shards
        needed = max(1, -(-sum(_align(numel) for numel in self.numels) // num_shards))
        is_small = needed * shard_dtype.itemsize < _SMALL_BYTES
        self.shard_size = _align(needed, _ALIGNMENT if is_small else _PAGE_BYTES // shard_dtype.itemsize)
        ids = layout_ids(group)
        ids.begin(self)
        position = ids.claim(f"{param_dtype}[{self.shard_size}]", 0)
        self.dim = min(position, _NUM_DIMS - 1)  # dim of concatenation
        self.needs_disambiguation_token = position >= _NUM_DIMS - 1  # others of its size may share the dim
        self.index = ids.claim("flats", 0)  # index among all layouts of the group
        self.row_size = ids.claim(f"rows of {reduce_dtype}", _align(self.shard_size + len(shapes)), step=_ALIGNMENT)

    @property
    def total_size(self) -> int:
        """Elements of the flat tensor, with its padding."""
        return self.num_shards * self.shard_size

    @property
    def rows_bytes(self) -> int:
        """Size of the rows of all ranks."""
        return self.num_shards * self.row_size * self.reduce_dtype.itemsize

    def shard_range(self, parameter: int, rank: int) -> ShardRange:
        """A rank's range of a parameter, given by its index."""
        first = self.offsets[parameter]
        last = first + self.numels[parameter]
        begin = min(max(first, rank * self.shard_size), last)
        end = max(min(last, (rank + 1) * self.shard_size), begin)
        offset = min(max(begin - rank * self.shard_size, 0), self.shard_size)
        return ShardRange(rank=rank, start=begin - first, offset=offset, size=end - begin)

    def shard_ranges(self, parameter: int) -> list[ShardRange]:
        """The ranges of a parameter that have elements, by rank."""
        return [found for rank in range(self.num_shards) if (found := self.shard_range(parameter, rank)).size]

    def flatten(self, parameter: int, value: torch.Tensor) -> torch.Tensor:
        """A full parameter's elements in the order of the flat tensor; a view where possible."""
        order = self.dim_orders[parameter]
        return value.reshape(-1) if order is None else value.permute(order).reshape(-1)

    def unflatten(self, parameter: int, elements: torch.Tensor) -> torch.Tensor:
        """A full parameter as a view of elements in the order of the flat tensor."""
        shape, order = self.shapes[parameter], self.dim_orders[parameter]
        if order is None:
            return elements.view(shape)
        return elements.view([shape[dim] for dim in order]).permute(invert_order(order))

    def shape_shard(self, parameter: int, elements: torch.Tensor) -> torch.Tensor:
        """View a local shard with as many dims as the parameter, since rules of optimizers depend on the number."""
        if self.num_shards == 1:
            return self.unflatten(parameter, elements)
        return elements.view(-1, *[1] * (len(self.shapes[parameter]) - 1)) if self.shapes[parameter] else elements


def dim_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The order of a channels-last tensor's dims in memory, or None: convolutions copy weights of another format."""
    if tensor.ndim not in _CHANNELS_LAST:
        return None
    row_major = torch.empty(tensor.shape, device="meta").stride()
    last = torch.empty(tensor.shape, device="meta", memory_format=_CHANNELS_LAST[tensor.ndim]).stride()
    return (0, *range(2, tensor.ndim), 1) if tensor.stride() == last != row_major else None


def _align(size: int, alignment: int = _ALIGNMENT) -> int:
    return -(-size // alignment) * alignment
