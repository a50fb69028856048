"""One tree of those of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ferrodist.checkpoint.tree import decode_leaf, is_leaf_node, leaf_text, path_text, tensor_key
from ferrodist.errors import DistCheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ferrodist.checkpoint.tree import Node

__all__ = ["merge_trees"]


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
