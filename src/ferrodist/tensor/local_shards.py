"""The elements of a full tensor that this rank has, as boxes, however the tensor is sharded.

`Shard` placements, in blocks too, shard each dim by itself: a rank has some *runs* of each dim, and its boxes are the
products of these; a plain tensor is one box. FSDP shards flat: a *flat shard* is a range of the elements in row-major
order, of a full tensor or of a local shard. Such a range consists of at most two boxes for each dim but the last, and
one more, one after the other in the flat shard.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from torch.utils.weak import WeakTensorKeyDictionary

from ferrodist.collectives.arguments import compute_shard_sizes
from ferrodist.tensor.box import Box
from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.placement import Partial, Replicate, Shard
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from ferrodist.tensor.spec import DTensorSpec

    Run = tuple[int, int]  # consecutive elements of a dim: the first one's index in the full tensor, and their number

_flat_shards = WeakTensorKeyDictionary()  # the annotations of `annotate_flat_shard`


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatShard:
    """The description of a tensor that holds a range of another tensor's elements, as FSDP's shards do."""

    shape: tuple[int, ...]  # of the other tensor: a full tensor, or the local shard of a distributed one
    start: int  # the index of the first element
    spec: DTensorSpec | None  # the spec of the distributed tensor; None for a full tensor
    num_shards: int  # ranks over which the elements are sharded
    num_copies: int  # ranks that have the same flat shard
    order: tuple[int, ...] | None = None  # dims as elements are stored, the last one fastest; None: row-major


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """A rank's elements of a tensor: boxes of the full tensor, each with a view of the rank's memory in its shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: list[tuple[Box, torch.Tensor]]
    placement: str  # in words
    is_replicated: bool  # whether other ranks may have the same elements


def annotate_flat_shard(tensor: torch.Tensor, shard: FlatShard) -> None:
    """Let `local_shard` know that a plain tensor holds a range of another one's elements."""
    _flat_shards[tensor] = shard


def flat_shard_of(tensor: torch.Tensor) -> FlatShard | None:
    """The tensor's annotation, or None."""
    found: FlatShard | None = _flat_shards.get(tensor)  # type: ignore[no-untyped-call]
    return found


def local_shard(tensor: torch.Tensor) -> LocalShard:
    """This rank's elements of a tensor: a distributed one, an annotated flat shard, or a plain one.

    ValueError: the tensor is partial, so that no rank has any of its elements.
    """
    if isinstance(tensor, DTensor):
        spec, local = tensor._spec, tensor._local
        if any(isinstance(placement, Partial) for placement in spec.placements):
            raise ValueError(f"of {spec} no rank has the elements: redistribute it")
        is_replicated = any(
            isinstance(placement, Replicate) and size > 1
            for placement, size in zip(spec.placements, spec.mesh.shape, strict=True)
        )
        full = Box((0,) * local.ndim, tuple(local.shape))
        boxes = [(box, view) for box, view in _global_boxes(full, local.detach(), spec) if box.numel]
        return LocalShard(
            shape=spec.shape, dtype=spec.dtype, boxes=boxes, placement=_describe(spec), is_replicated=is_replicated
        )
    if (shard := flat_shard_of(tensor)) is not None:
        return _local_of_flat(tensor.detach(), shard)
    shape = tuple(tensor.shape)
    boxes = [(Box((0,) * len(shape), shape), tensor.detach())]
    return LocalShard(shape=shape, dtype=tensor.dtype, boxes=boxes, placement="whole", is_replicated=True)


def invert_order(order: Sequence[int]) -> list[int]:
    """The permutation of dims that undoes another one."""
    return [order.index(dim) for dim in range(len(order))]


def _local_of_flat(tensor: torch.Tensor, shard: FlatShard) -> LocalShard:
    spec = shard.spec
    boxes: list[tuple[Box, torch.Tensor]] = []
    for box, view in _boxes_of_flat(tensor, shard):
        boxes.extend([(box, view)] if spec is None else _global_boxes(box, view, spec))
    placement = f"flat over {counted(shard.num_shards, 'rank')}"
    return LocalShard(
        shape=shard.shape if spec is None else spec.shape,
        dtype=tensor.dtype,
        boxes=boxes,
        placement=placement if spec is None else f"{placement}, of {_describe(spec)}",
        is_replicated=shard.num_copies > 1 or (spec is not None and Replicate() in spec.placements),
    )


def _boxes_of_flat(tensor: torch.Tensor, shard: FlatShard) -> Iterator[tuple[Box, torch.Tensor]]:
    """A flat shard as boxes of the tensor whose elements it holds, each with its view."""
    if shard.num_shards == 1 and tensor.shape == shard.shape:  # the full tensor, whatever its memory order
        if tensor.numel():
            yield Box((0,) * len(shard.shape), shard.shape), tensor
        return
    flat = tensor.reshape(-1)
    order = shard.order if shard.order is not None else tuple(range(len(shard.shape)))
    inverse = invert_order(order)
    offset = 0
    for box in _boxes_of_range([shard.shape[dim] for dim in order], shard.start, shard.start + flat.numel()):
        view = flat[offset : offset + box.numel].view(box.shape).permute(inverse)
        offset += box.numel
        yield Box(tuple(box.offsets[dim] for dim in inverse), tuple(box.shape[dim] for dim in inverse)), view


def _boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The elements from ``start`` to ``stop`` in row-major order, as boxes in that order."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    rest = tuple(shape[1:])
    size = prod(rest)
    first, last = -(-start // size), stop // size
    if first > last:  # within one row
        yield from _in_row(last, _boxes_of_range(rest, start - last * size, stop - last * size))
        return
    if start < first * size:
        yield from _in_row(first - 1, _boxes_of_range(rest, start - (first - 1) * size, size))
    if first < last:
        yield Box((first, *[0] * len(rest)), (last - first, *rest))
    if last * size < stop:
        yield from _in_row(last, _boxes_of_range(rest, 0, stop - last * size))


def _in_row(row: int, boxes: Iterator[Box]) -> Iterator[Box]:
    for box in boxes:
        yield Box((row, *box.offsets), (1, *box.shape))


def _global_boxes(box: Box, view: torch.Tensor, spec: DTensorSpec) -> Iterator[tuple[Box, torch.Tensor]]:
    """A box of this rank's shard as boxes of the full tensor, each with its view."""
    dims = [
        list(_slice_runs(_runs(spec, dim), offset, offset + size))
        for dim, (offset, size) in enumerate(zip(box.offsets, box.shape, strict=True))
    ]
    for runs in itertools.product(*dims):
        inner = Box(tuple(local for local, _, _ in runs), tuple(size for _, _, size in runs))
        yield Box(tuple(start for _, start, _ in runs), inner.shape), inner.take(view)


def _runs(spec: DTensorSpec, dim: int) -> list[Run]:
    """The runs of a dim that this rank has."""
    runs = [(0, spec.shape[dim])]
    for placement, num_ranks, index in zip(spec.placements, spec.mesh.shape, spec.coordinate, strict=True):
        if not isinstance(placement, Shard) or placement.dim != dim:
            continue
        block_size = sum(size for _, size in runs) // placement.blocks
        sizes = compute_shard_sizes(block_size, num_ranks)
        begin = sum(sizes[:index])
        starts = [block * block_size + begin for block in range(placement.blocks)]
        sliced = [
            (first, size) for start in starts for _, first, size in _slice_runs(runs, start, start + sizes[index])
        ]
        runs = _merge_runs(sliced)
    return runs


def _merge_runs(runs: Sequence[Run]) -> list[Run]:
    """The same elements in as few runs as possible."""
    merged: list[Run] = []
    for first, size in runs:
        if merged and sum(merged[-1]) == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((first, size))
    return merged


def _slice_runs(runs: Sequence[Run], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The slice of concatenated runs: for each run in it the index in the slice, the first element, and the size."""
    offset = 0
    for first, size in runs:
        begin, end = max(start, offset), min(stop, offset + size)
        if begin < end:
            yield begin - start, first + begin - offset, end - begin
        offset += size


def _describe(spec: DTensorSpec) -> str:
    mesh = spec.mesh
    along = zip(mesh.axis_names, mesh.shape, spec.placements, strict=True)
    return ", ".join(f"{placement} along {name!r} of {size}" for name, size, placement in along)
