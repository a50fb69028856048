"""Which elements of a whole tensor a rank has, as boxes, whatever divided it.

A tensor that is divided by `Shard` placements, in blocks too, is divided in each dim by itself: the rank has some
*runs* of each dim, and the boxes are the products of these. FSDP divides flat: a *piece* of the elements in row-major
order, of a whole tensor or of what `Shard` left. Such a range is at most two boxes for each dim but the last, and one
more, that lie one after the other in the piece.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from torch.utils.weak import WeakTensorKeyDictionary

from ferrodist.collectives.arguments import compute_shard_sizes
from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.placement import Partial, Replicate, Shard
from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from ferrodist.tensor.spec import DTensorSpec

if TYPE_CHECKING:
    Run = tuple[int, int]
    """Where elements of a dim begin in the whole, and how many they are."""


_flat_shards = WeakTensorKeyDictionary()
"""What `annotate_flat_shard` was told."""


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor with edges along its dims.

    Args:
        offsets: Where it begins, in each dim.
        shape: Its size in each dim.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """What both have, or None if that is nothing."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = [min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.shape, other.offsets, other.shape)]  # noqa: B905 - hot
        shape = tuple(end - begin for begin, end in zip(offsets, ends, strict=True))
        return None if any(size <= 0 for size in shape) else Box(offsets, shape)

    def within(self, outer: Box) -> Box:
        """The same elements, counted from where ``outer`` begins."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.shape)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor, as a view."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.shape, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
        return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatShard:
    """What a tensor is that has a part of another one's elements, in row-major order or that of some dims.

    Args:
        shape: Of that other one: a whole tensor, or this rank's part of a distributed one.
        start: The first element.
        spec: How the distributed one lies.
        num_shards: Over how many ranks the elements are divided.
        num_copies: How many ranks have the same piece.
        order: The dims in the order in which elements lie, the last one fastest; None for their own.
    """

    shape: tuple[int, ...]
    start: int
    spec: DTensorSpec | None
    num_shards: int
    num_copies: int
    order: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """What a rank has of a tensor.

    Args:
        shape: Of the whole tensor.
        dtype: Of its elements.
        boxes: Boxes of the whole tensor, each with the rank's memory of it; these are views, in the boxes' shapes.
        placement: In words, how the tensor lies.
        is_replicated: Whether other ranks may have the same elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: list[tuple[Box, torch.Tensor]]
    placement: str
    is_replicated: bool


def annotate_flat_shard(tensor: torch.Tensor, piece: FlatShard) -> None:
    """Have `local_shard` know that a plain tensor is a part of another one."""
    _flat_shards[tensor] = piece


def flat_shard_of(tensor: torch.Tensor) -> FlatShard | None:
    """What `annotate_flat_shard` was told of a tensor."""
    found: FlatShard | None = _flat_shards.get(tensor)  # type: ignore[no-untyped-call]
    return found


def local_shard(tensor: torch.Tensor) -> LocalShard:
    """What this rank has of a tensor: a distributed one, a piece that `annotate_flat_shard` was told of, or a plain
    one.

    Raises:
        ValueError: It is partial: no rank has any of its elements.
    """
    if isinstance(tensor, DTensor):
        spec, local = tensor._spec, tensor._local
        if any(isinstance(placement, Partial) for placement in spec.placements):
            raise ValueError(f"of {spec} no rank has the elements: redistribute it")
        copies = any(
            isinstance(placement, Replicate) and size > 1
            for placement, size in zip(spec.placements, spec.mesh.shape, strict=True)
        )
        whole = Box((0,) * local.ndim, tuple(local.shape))
        boxes = [(box, view) for box, view in _spread(whole, local.detach(), spec) if box.numel]
        return LocalShard(
            shape=spec.shape, dtype=spec.dtype, boxes=boxes, placement=_describe(spec), is_replicated=copies
        )
    if (piece := flat_shard_of(tensor)) is not None:
        return _part_of_piece(tensor.detach(), piece)
    shape = tuple(tensor.shape)
    boxes = [(Box((0,) * len(shape), shape), tensor.detach())]
    return LocalShard(shape=shape, dtype=tensor.dtype, boxes=boxes, placement="whole", is_replicated=True)


def invert_order(order: Sequence[int]) -> list[int]:
    """The order of dims that undoes another one."""
    return [order.index(dim) for dim in range(len(order))]


def _part_of_piece(tensor: torch.Tensor, piece: FlatShard) -> LocalShard:
    spec = piece.spec
    boxes: list[tuple[Box, torch.Tensor]] = []
    for box, view in _boxes_of_piece(tensor, piece):
        boxes.extend([(box, view)] if spec is None else _spread(box, view, spec))
    placement = f"flat over {counted(piece.num_shards, 'rank')}"
    return LocalShard(
        shape=piece.shape if spec is None else spec.shape,
        dtype=tensor.dtype,
        boxes=boxes,
        placement=placement if spec is None else f"{placement}, of {_describe(spec)}",
        is_replicated=piece.num_copies > 1 or (spec is not None and Replicate() in spec.placements),
    )


def _boxes_of_piece(tensor: torch.Tensor, piece: FlatShard) -> Iterator[tuple[Box, torch.Tensor]]:
    """The piece as boxes of the tensor of which it is one, each with its view."""
    if piece.num_shards == 1 and tensor.shape == piece.shape:  # the whole tensor, in whatever order its memory has
        if tensor.numel():
            yield Box((0,) * len(piece.shape), piece.shape), tensor
        return
    flat = tensor.reshape(-1)
    order = piece.order if piece.order is not None else tuple(range(len(piece.shape)))
    back = invert_order(order)
    at = 0
    for box in _boxes_of_range([piece.shape[dim] for dim in order], piece.start, piece.start + flat.numel()):
        view = flat[at : at + box.numel].view(box.shape).permute(back)
        at += box.numel
        yield Box(tuple(box.offsets[dim] for dim in back), tuple(box.shape[dim] for dim in back)), view


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


def _spread(box: Box, view: torch.Tensor, spec: DTensorSpec) -> Iterator[tuple[Box, torch.Tensor]]:
    """A box of this rank's part as boxes of the whole tensor, each with its view."""
    dims = [
        list(_cut_runs(_runs(spec, dim), offset, offset + size))
        for dim, (offset, size) in enumerate(zip(box.offsets, box.shape, strict=True))
    ]
    for strategy in itertools.product(*dims):
        inner = Box(tuple(at for at, _, _ in strategy), tuple(size for _, _, size in strategy))
        yield Box(tuple(start for _, start, _ in strategy), inner.shape), inner.take(view)


def _runs(spec: DTensorSpec, dim: int) -> list[Run]:
    """The elements of a dim that this rank has."""
    runs = [(0, spec.shape[dim])]
    for placement, num_ranks, at in zip(spec.placements, spec.mesh.shape, spec.coordinate, strict=True):
        if not isinstance(placement, Shard) or placement.dim != dim:
            continue
        block = sum(size for _, size in runs) // placement.blocks
        sizes = compute_shard_sizes(block, num_ranks)
        begin = sum(sizes[:at])
        starts = [number * block + begin for number in range(placement.blocks)]
        cut = [(first, size) for start in starts for _, first, size in _cut_runs(runs, start, start + sizes[at])]
        runs = _join_runs(cut)
    return runs


def _join_runs(runs: Sequence[Run]) -> list[Run]:
    """As few runs as have the same elements."""
    joined: list[Run] = []
    for first, size in runs:
        if joined and sum(joined[-1]) == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((first, size))
    return joined


def _cut_runs(runs: Sequence[Run], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """What of some runs, end to end, lies between two places: where it begins there, and in the whole, and its size."""
    at = 0
    for first, size in runs:
        begin, end = max(start, at), min(stop, at + size)
        if begin < end:
            yield begin - start, first + begin - at, end - begin
        at += size


def _describe(spec: DTensorSpec) -> str:
    mesh = spec.mesh
    along = zip(mesh.axis_names, mesh.shape, spec.placements, strict=True)
    return ", ".join(f"{placement} along {name!r} of {size}" for name, size, placement in along)
