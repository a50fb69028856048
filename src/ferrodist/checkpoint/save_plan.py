"""Who writes what: each element once, the work divided over ranks by bytes. Pure; rank 0 plans for all.

One tree of those of all ranks.
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec

from ferrodist.checkpoint.format.coverage import covers_once
from ferrodist.checkpoint.format.dtypes import dtype_from_name
from ferrodist.checkpoint.format.manifest import MAX_HEADER_BYTES
from ferrodist.checkpoint.format.safetensors import most_entry_bytes
from ferrodist.checkpoint.format.tree import (
    decode_leaf,
    is_leaf_node,
    leaf_text,
    path_text,
    referenced_keys,
    tensor_key,
)
from ferrodist.errors import DistCheckpointError, ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ferrodist.checkpoint.format.tree import Node


def merge_trees(trees: Mapping[int, Node]) -> Node:
    """One tree of what ranks have: dicts may have other keys on other ranks, all else must be the same.

    Args:
        trees: By rank.

    Raises:
        DistCheckpointError: Ranks have different values in one place.
    """
    return _merge(dict(trees), ())


def _merge(nodes: dict[int, Node], path: tuple[object, ...]) -> Node:
    first_rank, first = next(iter(nodes.items()))
    # As text: 1, 1.0 and True are equal otherwise.
    other = _find_other(nodes)
    if other is None:
        return first
    marks = {next(iter(node)) if isinstance(node, dict) else type(node) for node in nodes.values()}
    if marks in ({"dict"}, {"per_rank"}):
        mark = marks.pop()
        return {mark: _merge_members({rank: node[mark] for rank, node in nodes.items()}, path)}
    if marks <= {"dict", "pairs"}:
        return _merge_pairs(nodes, path)
    if marks == {list} and (members := _merge_lists(nodes, path)) is not None:
        return members
    if marks == {"tuple"}:
        members = _merge_lists({rank: node["tuple"] for rank, node in nodes.items()}, path)
        if members is not None:
            return {"tuple": members}
    if marks == {"tensor"}:
        # Empty parts don't show that tensors are one: ranks that have elements know.
        others = {node["tensor"] for node in nodes.values()} - {tensor_key(path)}
        if len(others) == 1:
            return {"tensor": others.pop()}
    raise DistCheckpointError(
        f"{path_text(path)} differs between ranks: rank {first_rank} has {_shown(first)}, rank {other} has"
        f" {_shown(nodes[other])}. What each rank has its own of is saved as PerRank(value)",
        ranks=(first_rank, other),
    )


def _find_other(nodes: Mapping[int, Node]) -> int | None:
    """The first rank whose node is not the same as the first one."""
    texts = ((rank, msgspec.json.encode(node)) for rank, node in nodes.items())
    _, first = next(texts)
    return next((rank for rank, text in texts if text != first), None)


def _merge_members(having: Mapping[int, Mapping[Any, Node]], path: tuple[object, ...]) -> dict[Any, Node]:
    keys = dict.fromkeys(key for members in having.values() for key in members)
    return {
        key: _merge({rank: members[key] for rank, members in having.items() if key in members}, (*path, key))
        for key in keys
    }


def _merge_pairs(nodes: Mapping[int, Node], path: tuple[object, ...]) -> Node:
    """Of dicts of which some have keys that are no text."""
    pairs = {rank: node.get("pairs") or list(node.get("dict", {}).items()) for rank, node in nodes.items()}
    # Keys that are equal may be written in two ways, as 1 and 1.0 are: the same place, whatever it is called.
    written = {decode_leaf(key): key for members in pairs.values() for key, _ in members}
    having = {rank: {decode_leaf(key): node for key, node in members} for rank, members in pairs.items()}
    return {"pairs": [[written[key], node] for key, node in _merge_members(having, path).items()]}


def _merge_lists(nodes: Mapping[int, list[Node]], path: tuple[object, ...]) -> list[Node] | None:
    """Of lists of one length their members, merged; else None."""
    lengths = {len(node) for node in nodes.values()}
    if len(lengths) > 1:
        return None
    return [
        _merge({rank: node[place] for rank, node in nodes.items()}, (*path, place)) for place in range(lengths.pop())
    ]


def _shown(node: Node) -> str:
    text = leaf_text(node) if is_leaf_node(node) else str(node)
    return text if len(text) < 100 else f"{text[:100]}..."


_NAME_OF_PART = re.compile(r"(.*)\[\d+:\d+(?:, \d+:\d+)*\]", re.DOTALL)


class BoxReport(msgspec.Struct, frozen=True, array_like=True):
    """A box that a rank has; ``digest`` is of its elements, where other ranks may have them too."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    digest: str | None = None


class TensorReport(msgspec.Struct, array_like=True):
    """What a rank has of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    placement: str
    boxes: list[BoxReport]
    place: str = ""
    """Where it is in the state."""


class StateReport(msgspec.Struct, array_like=True):
    """What a rank has of a state."""

    tree: Any
    tensors: dict[str, TensorReport]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A box of a tensor, as it goes to a file."""

    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class FilePlan(msgspec.Struct, array_like=True):
    """A file that one rank writes: what lies in it, in order."""

    name: str
    spans: list[Span]


class SavePlan(msgspec.Struct):
    """What all ranks write together.

    Args:
        tree: Of the whole state.
        tensors: Whole tensors, without their boxes.
        files: For each rank.
    """

    tree: Any
    tensors: dict[str, TensorReport]
    files: list[list[FilePlan]]


def plan_save(reports: Sequence[StateReport], *, prefix: str, max_file_bytes: int) -> SavePlan:
    """Divide a state over the ranks that have it.

    Args:
        reports: Of each rank.
        prefix: How names of files begin.
        max_file_bytes: Files get no longer, but for one with a single shard.

    Raises:
        DistCheckpointError: What ranks have doesn't fit together; it says what and on which ranks.
    """
    tree = merge_trees({rank: report.tree for rank, report in enumerate(reports)})
    wanted = set(referenced_keys(tree))
    tensors: dict[str, TensorReport] = {}
    holders: dict[str, dict[Span, list[int]]] = {}
    for key in dict.fromkeys(key for report in reports for key in report.tensors):
        having = {rank: report.tensors[key] for rank, report in enumerate(reports) if key in report.tensors}
        if key not in wanted:
            _check_empty(key, having)
            continue
        tensors[key] = _agree(key, having)
        holders[key] = _find_holders(key, having)
        _check_whole(key, tensors[key], holders[key])
    _check_names(holders)
    sizes = {key: dtype_from_name(tensor.dtype).itemsize for key, tensor in tensors.items()}
    owned = _divide((item for spans in holders.values() for item in spans.items()), sizes, len(reports))
    # Larger elements first: then all lie at multiples of their size.
    order = {key: place for place, key in enumerate(tensors)}
    binned = [
        _bin(sorted(spans, key=lambda span: (-sizes[span.key], order[span.key], span.offsets)), sizes, max_file_bytes)
        for spans in owned
    ]
    total = sum(map(len, binned))
    numbers = iter(range(1, total + 1))
    files = [
        [FilePlan(f"{prefix}-{next(numbers):05d}-of-{total:05d}.safetensors", spans) for spans in each]
        for each in binned
    ]
    return SavePlan(tree, tensors, files)


def _check_empty(key: str, having: Mapping[int, TensorReport]) -> None:
    """What one rank takes for another tensor that it shares memory with must be so where there are elements."""
    full = [rank for rank, tensor in having.items() if any(prod(box.shape) for box in tensor.boxes)]
    if full:
        raise DistCheckpointError(
            f"{key!r} is the same memory as another tensor on some ranks, but not on {ranks_text(full)}: tie tensors on"
            " all ranks or on none",
            ranks=tuple(full),
        )


def _agree(key: str, having: Mapping[int, TensorReport]) -> TensorReport:
    first_rank, first = next(iter(having.items()))
    for rank, other in having.items():
        if other.place != first.place:
            raise DistCheckpointError(
                f"two tensors would be named {key!r} in the files, that of {first.place} on rank {first_rank} and that"
                f" of {other.place} on rank {rank}: rename one",
                ranks=(first_rank, rank),
            )
        if (other.shape, other.dtype) != (first.shape, first.dtype):
            raise DistCheckpointError(
                f"tensor {key!r} differs between ranks: {first.dtype} of shape {first.shape} on rank {first_rank},"
                f" {other.dtype} of shape {other.shape} on rank {rank}. What each rank has its own of is saved as"
                " PerRank(value)",
                ranks=(first_rank, rank),
            )
    return TensorReport(first.shape, first.dtype, first.placement, [])


def _find_holders(key: str, having: Mapping[int, TensorReport]) -> dict[Span, list[int]]:
    """The distinct boxes of a tensor, and which ranks have each."""
    holders: dict[Span, list[int]] = {}
    digests: dict[Span, str] = {}
    for rank, tensor in having.items():
        for box in tensor.boxes:
            span = Span(key, box.offsets, box.shape)
            holders.setdefault(span, []).append(rank)
            if box.digest is not None and digests.setdefault(span, box.digest) != box.digest:
                raise DistCheckpointError(
                    f"tensor {key!r} should be the same on ranks {holders[span][0]} and {rank}, but its elements"
                    " differ: broadcast it, save PerRank(tensor) where ranks have their own, or pass"
                    " check_replicas=False to save that of any rank",
                    ranks=(holders[span][0], rank),
                )
    return holders


def _check_whole(key: str, tensor: TensorReport, holders: Mapping[Span, list[int]]) -> None:
    if covers_once(((span.offsets, span.shape) for span in holders), tensor.shape):
        return
    found = sum(prod(span.shape) for span in holders)
    raise DistCheckpointError(
        f"the parts of tensor {key!r} that ranks have are not each of its elements once: they are {found} together, and"
        f" the tensor of shape {tensor.shape} has {prod(tensor.shape)}. Parts are missing or overlap, or ranks divide"
        " it in different ways or call it by different names"
    )


def _check_names(holders: Mapping[str, Mapping[Span, Sequence[int]]]) -> None:
    """In files parts of tensor ``a`` are called ``a[0:2, 0:3]``; no other tensor may be called so."""
    for key in holders:
        match = _NAME_OF_PART.fullmatch(key)
        if match is not None and len(holders.get(match[1], ())) > 1:
            raise DistCheckpointError(f"tensor {key!r} is named as a part of tensor {match[1]!r} is: rename one")


def _divide(holders: Iterable[tuple[Span, list[int]]], sizes: Mapping[str, int], world_size: int) -> list[list[Span]]:
    """Give each span to one of the ranks that have it, so that all get about as many bytes."""
    owned: list[list[Span]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    items = [(prod(span.shape) * sizes[span.key], span, ranks) for span, ranks in holders]
    # Those that leave no choice first, then from the largest on.
    for size, span, ranks in sorted(items, key=lambda item: (len(item[2]) > 1, -item[0])):
        rank = min(ranks, key=lambda each: (load[each], each))
        owned[rank].append(span)
        load[rank] += size
    return owned


def _bin(spans: Sequence[Span], sizes: Mapping[str, int], max_file_bytes: int) -> list[list[Span]]:
    """Spans for each file, in order; readers take no longer files, and no longer headers."""
    files: list[list[Span]] = []
    filled = header = 0
    for span in spans:
        size, entry = prod(span.shape) * sizes[span.key], most_entry_bytes(span.key, len(span.shape))
        if not files or filled + size > max_file_bytes or header + entry > MAX_HEADER_BYTES:
            files.append([])
            filled = header = 0
        files[-1].append(span)
        filled, header = filled + size, header + entry
    return files
