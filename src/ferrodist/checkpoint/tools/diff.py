"""The differences of two checkpoints, whatever ranks and placements they were saved with."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.checkpoint.format.safetensors import dtype_from_name
from ferrodist.checkpoint.format.tree import child_nodes, decode_leaf, leaf_text, path_text, split_node
from ferrodist.checkpoint.reader import CheckpointReader, read_manifest
from ferrodist.checkpoint.storage import open_storage
from ferrodist.checkpoint.tools.rewrite import ROW_BLOCK_BYTES, ProgressCallback, ProgressCounter, row_blocks
from ferrodist.wording import counted, with_article

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from ferrodist.checkpoint.format.manifest import Manifest

    Path = tuple[object, ...]
    Pair = tuple[str, str]
    """The keys of a tensor in both checkpoints."""

_ABSENT = object()
_MAX_VALUE_LENGTH = 60


class DifferenceKind(Enum):
    """The kind of a difference."""

    ONLY_IN_FIRST = "only in the first"
    ONLY_IN_SECOND = "only in the second"
    VALUE = "value"
    SHAPE = "shape"
    DTYPE = "dtype"
    ELEMENTS = "elements"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One difference of two checkpoints.

    Args:
        place: The path in the state, as in Python: ``['model']['weight']``.
        kind: The kind of difference.
        what: A description.
        num_elements: For elements: the number that differ.
        largest: For elements: the largest absolute difference; infinite if one is NaN or infinite and the other is not.
    """

    place: str
    kind: DifferenceKind
    what: str
    num_elements: int | None = None
    largest: float | None = None

    def __str__(self) -> str:
        return f"{self.place}: {self.what}"


def compare(
    path: str | os.PathLike[str],
    other: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    other_storage_options: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
) -> list[Difference]:
    """Compare two checkpoints in one process, in bounded memory.

    NaN equals NaN, and 0.0 equals -0.0. Hashes are checked.

    Args:
        path: The first checkpoint.
        other: The second checkpoint.
        storage_options: Options of the first's file system, if it is a URL.
        other_storage_options: Options of the second's.
        progress: Called with the bytes of tensors compared, and their total.

    Returns:
        All differences, in the first's order; empty if the same state was saved.

    Raises:
        DistCheckpointError: A checkpoint is missing or damaged.
    """
    with (
        closing(open_storage(path, storage_options)) as storage,
        closing(open_storage(other, other_storage_options)) as other_storage,
    ):
        one, two = read_manifest(storage), read_manifest(other_storage)
        found = list(_compare_nodes((one, two), one.tree, two.tree, ()))
        pairs = dict.fromkeys(each[1] for each in found if not isinstance(each, Difference))  # tied ones come once
        counter = ProgressCounter(sum(one.tensors[key].size_bytes for key, _ in pairs), progress)
        readers = CheckpointReader(storage, one, verify=True), CheckpointReader(other_storage, two, verify=True)
        elements = {pair: _compare_elements(readers, pair, counter) for pair in pairs}
    result: list[Difference] = []
    for each in found:
        if isinstance(each, Difference):
            result.append(each)
        elif (differing := elements[each[1]]) is not None:
            count, total, largest = differing
            what = f"{count} of {counted(total, 'element')} differ, by up to {largest:.6g}"
            place, kind = path_text(each[0]), DifferenceKind.ELEMENTS
            result.append(Difference(place=place, kind=kind, what=what, num_elements=count, largest=largest))
    return result


def _compare_nodes(
    manifests: tuple[Manifest, Manifest], one: Any, two: Any, path: Path
) -> Iterator[Difference | tuple[Path, Pair]]:
    """Yield differences, and the paths and keys of tensors of one shape, whose elements may differ."""
    place = path_text(path)
    (mark, first), (other_mark, second) = split_node(one), split_node(two)
    if mark != other_mark or (mark == "leaf" and not _is_same_value(one, two)):
        what = f"{_abbreviate(one)} and {_abbreviate(two)}"
        yield Difference(place=place, kind=DifferenceKind.VALUE, what=what)
    elif mark in ("tensor", "array"):
        tensor, other = manifests[0].tensors[first], manifests[1].tensors[second]
        if tensor.dtype != other.dtype:
            yield Difference(place=place, kind=DifferenceKind.DTYPE, what=f"dtype {tensor.dtype} and {other.dtype}")
        if tensor.shape != other.shape:
            yield Difference(place=place, kind=DifferenceKind.SHAPE, what=f"shape {tensor.shape} and {other.shape}")
        else:
            yield path, (first, second)
    else:
        members, others = _children(one), _children(two)
        for key in dict.fromkeys([*members, *others]):
            inner = (*path, key)
            if key in members and key in others:
                yield from _compare_nodes(manifests, members[key], others[key], inner)
                continue
            kind = DifferenceKind.ONLY_IN_FIRST if key in members else DifferenceKind.ONLY_IN_SECOND
            what = f"{kind.value}: {_abbreviate((members if key in members else others)[key])}"
            yield Difference(place=path_text(inner), kind=kind, what=what)


def _children(node: Any) -> dict[Any, Any]:
    """Return the children of a node, by key."""
    has_encoded_keys = split_node(node)[0] == "pairs"
    return {decode_leaf(key) if has_encoded_keys else key: each for key, each in child_nodes(node)}


def _is_same_value(one: Any, two: Any) -> bool:
    """Return whether two leaves are the same value: 1, 1.0 and True are three."""
    if type(one) is not type(two):
        return False
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_is_same_value(one[key], two[key]) for key in one)
    if isinstance(one, list):
        return all(_is_same_value(a, b) for a, b in zip_longest(one, two, fillvalue=_ABSENT))
    return bool(one == two)


def _abbreviate(node: Any) -> str:
    mark, content = split_node(node)
    if mark == "leaf":
        text = leaf_text(node)
    elif mark in ("tensor", "array", "per_rank"):
        text = with_article(mark.replace("_", " "))
    else:
        text = f"a {'dict' if mark == 'pairs' else mark} of {len(content)}"
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[:_MAX_VALUE_LENGTH]}..."


def _compare_elements(
    readers: tuple[CheckpointReader, CheckpointReader], keys: Pair, counter: ProgressCounter
) -> tuple[int, int, float] | None:
    """Return the number of differing elements, of all elements, and the largest difference; None if none differ."""
    tensors = [reader.manifest.tensors[key] for reader, key in zip(readers, keys, strict=True)]
    dtypes, shape = [dtype_from_name(tensor.dtype) for tensor in tensors], tensors[0].shape
    count, largest = 0, 0.0
    # A difference takes up to 16 bytes per element.
    for band in row_blocks(shape, ROW_BLOCK_BYTES // 16):
        parts = [torch.empty(band.shape, dtype=dtype, device="cpu") for dtype in dtypes]
        for reader, key, part in zip(readers, keys, parts, strict=True):
            reader.read_box(key, band, part)
        counter.add(band.numel * dtypes[0].itemsize)
        # Most are equal bit by bit, which is found at once.
        if dtypes[0] is dtypes[1] and torch.equal(*[each.reshape(-1).view(torch.uint8) for each in parts]):
            continue
        found, most = _count_differences(*parts)
        count, largest = count + found, max(largest, most)
    return (count, math.prod(shape), largest) if count else None


def _count_differences(one: torch.Tensor, two: torch.Tensor) -> tuple[int, float]:
    """Return the number of differing elements and the largest difference."""
    if not any(each.is_floating_point() or each.is_complex() for each in (one, two)):
        return _count_integer_differences(one, two)
    wide = torch.complex128 if one.is_complex() or two.is_complex() else torch.float64
    one, two = one.to(wide), two.to(wide)
    differs = (one != two) & ~(one.isnan() & two.isnan())
    distance = (one[differs] - two[differs]).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return distance.numel(), float(distance.max()) if distance.numel() else 0.0


def _count_integer_differences(one: torch.Tensor, two: torch.Tensor) -> tuple[int, float]:
    """The same for integers, exact beyond float64's precision."""
    bits = [each.view(torch.int64) if each.dtype is torch.uint64 else each.to(torch.int64) for each in (one, two)]
    rounded = [each.to(torch.float64) for each in (one, two)]
    differs = (bits[0] != bits[1]) | (rounded[0] != rounded[1])
    exact = (bits[0] - bits[1])[differs].to(torch.float64).abs()
    about = (rounded[0] - rounded[1])[differs].abs()
    # Small differences are exact in 64-bit integers; large ones overflow.
    distance = torch.where(about < 2.0**62, exact, about)
    return distance.numel(), float(distance.max()) if distance.numel() else 0.0
