"""What a tree from a file must be, before anybody follows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrodist.checkpoint.tree import MAX_DEPTH, decode_leaf, is_leaf_node

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from ferrodist.checkpoint.tree import Node

__all__ = ["check_tree"]


def check_tree(node: Node, keys: Collection[str], depth: int = 0) -> None:
    """See that a tree is what `Encoder` and `merge_trees` make.

    Args:
        node: The tree.
        keys: Of the tensors that there are.
        depth: How deep the node is.

    Raises:
        ValueError: It is something else.
    """
    if depth > MAX_DEPTH:
        raise ValueError("a state that is nested too deeply")
    if isinstance(node, dict) and len(node) != 1:
        raise ValueError(f"a node with {len(node)} marks")
    if is_leaf_node(node):
        decode_leaf(node)
        return
    mark, content = ("list", node) if isinstance(node, list) else next(iter(node.items()))
    kind, members = _BRANCH_CHECKS[mark]
    if not isinstance(content, kind):
        raise ValueError(f"a {mark} of {str(content)[:100]}")  # noqa: TRY004 - it is no argument
    if kind is str and content not in keys:
        raise ValueError(f"a state with tensor {content!r}, of which nothing else is said")
    for each in members(content):
        check_tree(each, keys, depth + 1)


def _pairs(content: list[Any]) -> list[Node]:
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in content):
        raise ValueError("pairs of a key and a node that are none")
    _hashable([key for key, _ in content])
    return [node for _, node in content]


def _of_ranks(content: dict[str, Node]) -> Iterable[Node]:
    if not all(rank.isdecimal() and str(int(rank[:10])) == rank for rank in content):
        raise ValueError(f"ranks {list(content)[:10]}")
    return content.values()


def _sizes(content: list[Any]) -> list[Node]:
    if not all(type(size) is int and -(1 << 63) <= size < 1 << 63 for size in content):
        raise ValueError(f"a torch.Size of {content[:10]}")
    return []


def _hashable(content: list[Any]) -> list[Node]:
    try:
        hash(decode_leaf({"frozenset": content}))
    except TypeError as error:
        raise ValueError(f"what can't be a key: {str(content)[:100]}") from error
    return []


_BRANCH_CHECKS: dict[str, tuple[type, Callable[[Any], Iterable[Node]]]] = {
    "list": (list, list),
    "tuple": (list, list),
    "dict": (dict, dict.values),
    "per_rank": (dict, _of_ranks),
    "pairs": (list, _pairs),
    "size": (list, _sizes),
    "set": (list, _hashable),
    "frozenset": (list, _hashable),
    "tensor": (str, lambda _: ()),
    "array": (str, lambda _: ()),
}
"""By marks: what a node has, and the members of it that are left to check."""
