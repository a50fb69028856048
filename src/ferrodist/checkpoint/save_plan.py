"""The plan of a save: which rank writes which box of each tensor, balanced by bytes, and the merged state tree.

Rank 0 plans for all ranks; the functions here touch no storage and no group.
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec

from ferrodist.checkpoint.format.manifest import covers_once
from ferrodist.checkpoint.format.safetensors import MAX_HEADER_BYTES, dtype_from_name, max_entry_bytes
from ferrodist.checkpoint.format.tree import (
    Node,
    decode_leaf,
    is_leaf_node,
    leaf_text,
    path_text,
    referenced_keys,
    tensor_key,
)
from ferrodist.errors import DistCheckpointError, ranks_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

DEFAULT_FILE_BYTES = 5 * 10**9
"""The file size limit of Hugging Face's tools."""

_SHARD_NAME = re.compile(r"(.*)\[\d+:\d+(?:, \d+:\d+)*\]", re.DOTALL)


def merge_trees(nodes: Mapping[int, Node], path: tuple[object, ...] = ()) -> Node:
    """Merge the ranks' state trees into one; dicts may have different keys, all else must be equal."""
    # Compared as JSON: 1, 1.0 and True would be equal.
    texts = ((rank, msgspec.json.encode(node)) for rank, node in nodes.items())
    first_rank, first_text = next(texts)
    first = nodes[first_rank]
    other = next((rank for rank, text in texts if text != first_text), None)
    if other is None:
        return first
    marks = {next(iter(node)) if isinstance(node, dict) else type(node) for node in nodes.values()}
    if marks in ({"dict"}, {"per_rank"}):
        mark = marks.pop()
        return {mark: _merge_dicts({rank: node[mark] for rank, node in nodes.items()}, path)}
    if marks <= {"dict", "pairs"}:
        return _merge_pairs(nodes, path)
    if marks == {list} and (merged := _merge_lists(nodes, path)) is not None:
        return merged
    tuples = {rank: node["tuple"] for rank, node in nodes.items()} if marks == {"tuple"} else None
    if tuples is not None and (merged := _merge_lists(tuples, path)) is not None:
        return {"tuple": merged}
    if marks == {"tensor"}:
        # Ranks with empty shards can't see that tensors are tied; ranks with elements can.
        others = {node["tensor"] for node in nodes.values()} - {tensor_key(path)}
        if len(others) == 1:
            return {"tensor": others.pop()}
    raise DistCheckpointError(
        f"{path_text(path)} differs between ranks: rank {first_rank} has {_abbreviate(first)}, rank {other} has"
        f" {_abbreviate(nodes[other])}. Save PerRank(value) if the ranks are meant to differ",
        ranks=(first_rank, other),
    )


def _merge_dicts(by_rank: Mapping[int, Mapping[Any, Node]], path: tuple[object, ...]) -> dict[Any, Node]:
    keys = dict.fromkeys(key for members in by_rank.values() for key in members)
    return {
        key: merge_trees({rank: members[key] for rank, members in by_rank.items() if key in members}, (*path, key))
        for key in keys
    }


def _merge_pairs(nodes: Mapping[int, Node], path: tuple[object, ...]) -> Node:
    """Merge dicts of which some have keys that are not strings."""
    pairs = {rank: node.get("pairs") or list(node.get("dict", {}).items()) for rank, node in nodes.items()}
    # Equal keys may be encoded differently, as 1 and 1.0 are; they are one key.
    written = {decode_leaf(key): key for members in pairs.values() for key, _ in members}
    by_rank = {rank: {decode_leaf(key): node for key, node in members} for rank, members in pairs.items()}
    return {"pairs": [[written[key], node] for key, node in _merge_dicts(by_rank, path).items()]}


def _merge_lists(nodes: Mapping[int, list[Node]], path: tuple[object, ...]) -> list[Node] | None:
    """Merge lists of one length element by element; None if lengths differ."""
    lengths = {len(node) for node in nodes.values()}
    if len(lengths) > 1:
        return None
    return [
        merge_trees({rank: node[index] for rank, node in nodes.items()}, (*path, index))
        for index in range(lengths.pop())
    ]


def _abbreviate(node: Node) -> str:
    text = leaf_text(node) if is_leaf_node(node) else str(node)
    return text if len(text) < 100 else f"{text[:100]}..."


class BoxReport(msgspec.Struct, frozen=True, array_like=True):
    """A box of a tensor on one rank."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    digest: str | None = None
    """A hash of the elements, if other ranks may have a replica."""
    addend: tuple[int, ...] = ()
    """Identifies this rank's addend of a partial sum; replicas are compared addend by addend."""


class TensorDescription(msgspec.Struct, array_like=True):
    """A tensor's shape and dtype, which are equal on all ranks, and its placement, for display."""

    shape: tuple[int, ...]
    dtype: str
    placement: str


class TensorReport(TensorDescription, array_like=True):
    """One rank's shard of a tensor."""

    boxes: list[BoxReport]
    state_path: str = ""
    """The tensor's path in the state."""


class StateReport(msgspec.Struct, array_like=True):
    """One rank's tree and shards."""

    tree: Node
    tensors: dict[str, TensorReport]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A box of a tensor, as it is written to one file or requested by a rank that loads."""

    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class FilePlan(msgspec.Struct, array_like=True):
    """A file that one rank writes, with its spans in order."""

    name: str
    spans: list[Span]


class SavePlan(msgspec.Struct):
    """The plan of all ranks."""

    tree: Node
    tensors: dict[str, TensorDescription]
    files: list[list[FilePlan]]


def plan_save(reports: Sequence[StateReport], *, prefix: str, max_file_bytes: int) -> SavePlan:
    """Assign each box to one rank that has it, and to a file."""
    tree = merge_trees({rank: report.tree for rank, report in enumerate(reports)})
    wanted = set(referenced_keys(tree))
    tensors: dict[str, TensorDescription] = {}
    holders: dict[str, dict[Span, list[int]]] = {}
    for key in dict.fromkeys(key for report in reports for key in report.tensors):
        by_rank = {rank: report.tensors[key] for rank, report in enumerate(reports) if key in report.tensors}
        if key not in wanted:
            _check_empty(key, by_rank)
            continue
        tensors[key] = _check_same_tensor(key, by_rank)
        holders[key] = _find_holders(key, by_rank)
        _check_coverage(key, tensors[key].shape, holders[key])
    _check_names(holders)
    sizes = {key: dtype_from_name(tensor.dtype).itemsize for key, tensor in tensors.items()}
    assigned = _assign_writers((item for spans in holders.values() for item in spans.items()), sizes, len(reports))
    order = write_order(tensors)
    binned = [
        _split_into_files(sorted(spans, key=lambda span: (order[span.key], span.offsets)), sizes, max_file_bytes)
        for spans in assigned
    ]
    total = sum(map(len, binned))
    names = (f"{prefix}-{index:05d}-of-{total:05d}.safetensors" for index in range(1, total + 1))
    files = [[FilePlan(next(names), spans) for spans in each] for each in binned]
    return SavePlan(tree, tensors, files)


def write_order(tensors: Mapping[str, TensorDescription]) -> dict[str, int]:
    """Return the position of each tensor in files: larger elements first, so that all are aligned to their size."""
    in_order = sorted(tensors, key=lambda key: -dtype_from_name(tensors[key].dtype).itemsize)
    return {key: position for position, key in enumerate(in_order)}


def _check_empty(key: str, by_rank: Mapping[int, TensorReport]) -> None:
    """Check that a tensor that one rank takes for a tied one is empty on the ranks that don't."""
    full = [rank for rank, tensor in by_rank.items() if any(prod(box.shape) for box in tensor.boxes)]
    if full:
        raise DistCheckpointError(
            f"{key!r} is the same memory as another tensor on some ranks, but not on {ranks_text(full)}: tie tensors on"
            " all ranks or on none",
            ranks=tuple(full),
        )


def _check_same_tensor(key: str, by_rank: Mapping[int, TensorReport]) -> TensorDescription:
    first_rank, first = next(iter(by_rank.items()))
    for rank, other in by_rank.items():
        if other.state_path != first.state_path:
            raise DistCheckpointError(
                f"two tensors would be named {key!r} in the files, that of {first.state_path} on rank {first_rank} and"
                f" that of {other.state_path} on rank {rank}: rename one",
                ranks=(first_rank, rank),
            )
        if (other.shape, other.dtype) != (first.shape, first.dtype):
            raise DistCheckpointError(
                f"tensor {key!r} differs between ranks: {first.dtype} of shape {first.shape} on rank {first_rank},"
                f" {other.dtype} of shape {other.shape} on rank {rank}. Save PerRank(tensor) if the ranks are"
                " meant to differ",
                ranks=(first_rank, rank),
            )
    return TensorDescription(first.shape, first.dtype, first.placement)


def _find_holders(key: str, by_rank: Mapping[int, TensorReport]) -> dict[Span, list[int]]:
    """Return the distinct boxes of a tensor, each with the ranks that have it."""
    holders: dict[Span, list[int]] = {}
    digests: dict[tuple[Span, tuple[int, ...]], tuple[int, str]] = {}  # by box and addend: the first rank, its digest
    for rank, tensor in by_rank.items():
        for box in tensor.boxes:
            span = Span(key, box.offsets, box.shape)
            holders.setdefault(span, []).append(rank)
            if box.digest is None:
                continue
            first_rank, digest = digests.setdefault((span, box.addend), (rank, box.digest))
            if digest != box.digest:
                raise DistCheckpointError(
                    f"tensor {key!r} should be the same on ranks {first_rank} and {rank}, but its elements"
                    " differ: broadcast it, save PerRank(tensor) where ranks have their own, or pass"
                    " check_replicas=False to save that of any rank",
                    ranks=(first_rank, rank),
                )
    return holders


def _check_coverage(key: str, shape: tuple[int, ...], spans: Collection[Span]) -> None:
    if not covers_once(((span.offsets, span.shape) for span in spans), shape):
        found = sum(prod(span.shape) for span in spans)
        raise DistCheckpointError(
            f"the shards of tensor {key!r} on all ranks don't have each of its elements once: they have {found}"
            f" elements, and the tensor of shape {shape} has {prod(shape)}. Shards are missing or overlap, or ranks"
            " shard it differently or name it differently: save from all ranks that have one, under one key"
        )


def _check_names(holders: Mapping[str, Mapping[Span, Sequence[int]]]) -> None:
    """Refuse a tensor named as a shard of another one: in files a shard of ``a`` is called ``a[0:2, 0:3]``."""
    for key in holders:
        match = _SHARD_NAME.fullmatch(key)
        if match is not None and len(holders.get(match[1], ())) > 1:
            raise DistCheckpointError(f"tensor {key!r} has the name of a shard of tensor {match[1]!r}: rename one")


def _assign_writers(
    holders: Iterable[tuple[Span, list[int]]], sizes: Mapping[str, int], world_size: int
) -> list[list[Span]]:
    """Choose one of the ranks that have each span to write it, balanced by bytes."""
    assigned: list[list[Span]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    items = [(prod(span.shape) * sizes[span.key], span, ranks) for span, ranks in holders]
    # Spans of a single rank first, then the largest.
    for size, span, ranks in sorted(items, key=lambda item: (len(item[2]) > 1, -item[0])):
        rank = min(ranks, key=lambda each: (load[each], each))
        assigned[rank].append(span)
        load[rank] += size
    return assigned


def _split_into_files(spans: Sequence[Span], sizes: Mapping[str, int], max_file_bytes: int) -> list[list[Span]]:
    """Split spans into files, in order, within the limits of readers for a file and its header."""
    files: list[list[Span]] = []
    filled = header = 0
    for span in spans:
        size, entry = prod(span.shape) * sizes[span.key], max_entry_bytes(span.key, len(span.shape))
        if not files or filled + size > max_file_bytes or header + entry > MAX_HEADER_BYTES:
            files.append([])
            filled = header = 0
        files[-1].append(span)
        filled, header = filled + size, header + entry
    return files
