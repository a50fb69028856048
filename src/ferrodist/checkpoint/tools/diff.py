"""The differences of two checkpoints, whatever ranks and placements they were saved with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.checkpoint.format.dtypes import dtype_from_name
from ferrodist.checkpoint.format.tree import child_nodes, decode_leaf, leaf_text, path_text, split_node
from ferrodist.checkpoint.reader import CheckpointReader
from ferrodist.checkpoint.retention import read_manifest
from ferrodist.checkpoint.storage import open_storage
from ferrodist.checkpoint.tools.reshard import ROW_BLOCK_BYTES, ProgressCounter, row_blocks
from ferrodist.wording import counted, with_article

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from ferrodist.checkpoint.format.manifest import Manifest
    from ferrodist.checkpoint.tools.reshard import ProgressCallback

if TYPE_CHECKING:
    Path = tuple[object, ...]


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
    storages = open_storage(path, storage_options), open_storage(other, other_storage_options)
    try:
        manifests = [read_manifest(storage) for storage in storages]
        readers = [
            CheckpointReader(storage, manifest, verify=True)
            for storage, manifest in zip(storages, manifests, strict=True)
        ]
        walk = _TreeComparison(manifests[0], manifests[1])
        found = list(walk.compare(manifests[0].tree, manifests[1].tree, ()))
        total = sum(_size_bytes(manifests[0], key) for key, _ in walk.pairs)
        progress_meter = ProgressCounter(total, progress)
        elements = {
            pair: _compare_elements((readers[0], readers[1]), (manifests[0], manifests[1]), pair, progress_meter)
            for pair in walk.pairs
        }
    finally:
        for storage in storages:
            storage.close()
    result: list[Difference] = []
    for each in found:
        if isinstance(each, Difference):
            result.append(each)
        elif (counted := elements[each[1]]) is not None:
            result.append(_elements_difference(path_text(each[0]), *counted))
    return result


class _TreeComparison:
    """Walks through two trees side by side."""

    def __init__(self, first: Manifest, second: Manifest) -> None:
        self._manifests = first, second
        self.pairs: dict[tuple[str, str], None] = {}
        """Keys of the tensors to compare: those with the same path and shape; tied ones come once."""

    def compare(self, one: Any, two: Any, path: Path) -> Iterator[Difference | tuple[Path, tuple[str, str]]]:
        """Yield differences, and the paths and keys of tensors whose elements may differ."""
        (mark, first), (other_mark, second) = split_node(one), split_node(two)
        if mark != other_mark or (mark == "leaf" and not _is_same_value(one, two)):
            yield _value_difference(path, one, two)
        elif mark in ("tensor", "array"):
            yield from self._compare_tensors(first, second, path)
        else:
            yield from self._compare_members(_children(one), _children(two), path)

    def _compare_members(
        self, one: dict[Any, Any], two: dict[Any, Any], path: Path
    ) -> Iterator[Difference | tuple[Path, tuple[str, str]]]:
        for key in dict.fromkeys([*one, *two]):
            if key not in two:
                yield _only(DifferenceKind.ONLY_IN_FIRST, (*path, key), one[key])
            elif key not in one:
                yield _only(DifferenceKind.ONLY_IN_SECOND, (*path, key), two[key])
            else:
                yield from self.compare(one[key], two[key], (*path, key))

    def _compare_tensors(self, one: str, two: str, path: Path) -> Iterator[Difference | tuple[Path, tuple[str, str]]]:
        first, second = self._manifests[0].tensors[one], self._manifests[1].tensors[two]
        place = path_text(path)
        if first.dtype != second.dtype:
            yield Difference(place=place, kind=DifferenceKind.DTYPE, what=f"dtype {first.dtype} and {second.dtype}")
        if first.shape != second.shape:
            yield Difference(place=place, kind=DifferenceKind.SHAPE, what=f"shape {first.shape} and {second.shape}")
            return
        self.pairs[one, two] = None
        yield path, (one, two)


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


def _value_difference(path: Path, one: Any, two: Any) -> Difference:
    what = f"{_abbreviate(one)} and {_abbreviate(two)}"
    return Difference(place=path_text(path), kind=DifferenceKind.VALUE, what=what)


def _only(kind: DifferenceKind, path: Path, node: Any) -> Difference:
    return Difference(place=path_text(path), kind=kind, what=f"{kind.value}: {_abbreviate(node)}")


def _size_bytes(manifest: Manifest, key: str) -> int:
    tensor = manifest.tensors[key]
    return math.prod(tensor.shape) * dtype_from_name(tensor.dtype).itemsize


def _elements_difference(place: str, count: int, total: int, largest: float) -> Difference:
    what = f"{count} of {counted(total, 'element')} differ, by up to {largest:.6g}"
    return Difference(place=place, kind=DifferenceKind.ELEMENTS, what=what, num_elements=count, largest=largest)


def _compare_elements(
    readers: tuple[CheckpointReader, CheckpointReader],
    manifests: tuple[Manifest, Manifest],
    keys: tuple[str, str],
    progress_meter: ProgressCounter,
) -> tuple[int, int, float] | None:
    """Return the number of differing elements, of all elements, and the largest difference; None if none differ."""
    dtypes = [dtype_from_name(manifest.tensors[key].dtype) for manifest, key in zip(manifests, keys, strict=True)]
    shape = manifests[0].tensors[keys[0]].shape
    count, largest = 0, 0.0
    # A difference takes up to 16 bytes per element.
    for band in row_blocks(shape, ROW_BLOCK_BYTES // 16):
        parts = [torch.empty(band.shape, dtype=dtype, device="cpu") for dtype in dtypes]
        for reader, key, part in zip(readers, keys, parts, strict=True):
            reader.read_box(key, band, part)
        progress_meter.add(band.numel * dtypes[0].itemsize)
        if _is_equal(*parts):
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
    bits, rounded = zip(*[(_integer_bits(each), each.to(torch.float64)) for each in (one, two)], strict=True)
    differs = (bits[0] != bits[1]) | (rounded[0] != rounded[1])
    exact = (bits[0] - bits[1])[differs].to(torch.float64).abs()
    about = (rounded[0] - rounded[1])[differs].abs()
    # Small differences are exact in 64-bit integers; large ones overflow.
    distance = torch.where(about < 2.0**62, exact, about)
    return distance.numel(), float(distance.max()) if distance.numel() else 0.0


def _integer_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int64) if tensor.dtype is torch.uint64 else tensor.to(torch.int64)


def _is_equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two tensors are equal bit by bit."""
    if one.dtype is not two.dtype:
        return False
    return torch.equal(*[each.reshape(-1).view(torch.uint8) for each in (one, two)])
