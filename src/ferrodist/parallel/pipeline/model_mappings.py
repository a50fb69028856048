"""Mappings that the modules of a model fill, and through which they pass tensors on, besides their results.

So the layers of Gemma 3n have one of keys and values, which later layers share. What a module writes to such an
argument counts as part of its result.
"""

from __future__ import annotations

import copy
from collections import UserDict
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ferrodist.torch_private.pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Content: TypeAlias = "dict[Any, Any]"
_KINDS = (dict, UserDict)


class Mappings:
    """The mappings and lists in a call's arguments, with their contents before the call."""

    def __init__(self, args: Sequence[Any], kwargs: Content) -> None:
        self._found: list[Any] = []
        self._lists: list[list[Any]] = []
        for value in (*args, *kwargs.values()):
            self._add(value)
        self._before = [dict(each) for each in self._found]
        self._items = [list(each) for each in self._lists]

    def _add(self, value: Any) -> None:
        if isinstance(value, _KINDS):
            self._found.append(value)
            value = list(value.values())
        elif isinstance(value, list):
            self._lists.append(value)
        if isinstance(value, (list, tuple)):
            for each in value:
                self._add(each)

    def written(self, path: str, *, is_everywhere: bool = False) -> list[Content]:
        """The entries of each mapping that are new or changed since then.

        Args:
            path: The module's.
            is_everywhere: Whether all stages run the module, and see what it does to lists.

        Raises:
            ValueError: The module has changed a list, or the order of a mapping, or removed from a mapping.
        """
        is_reordered = any(
            list(found)[: len(before)] != list(before) for before, found in zip(self._before, self._found, strict=True)
        )
        if is_reordered or (not is_everywhere and self.changed_lists()):
            raise ValueError(
                f"module {path!r} changes a list among its arguments, or removes from a mapping or moves its keys,"
                " which other stages would not see: let it return what it computes, or write to a mapping"
            )
        missing = object()
        return [
            {key: value for key, value in found.items() if before.get(key, missing) is not value}
            for before, found in zip(self._before, self._found, strict=True)
        ]

    def changed_lists(self) -> list[list[Any]]:
        """The lists that have other items since then."""
        return [
            each
            for each, items in zip(self._lists, self._items, strict=True)
            if len(each) != len(items) or any(one is not other for one, other in zip(each, items, strict=True))
        ]

    def write(self, written: Sequence[Content]) -> None:
        """Write what `written` has found in a call of a copy of the module."""
        for mapping, content in zip(self._found, written, strict=True):
            for key, value in content.items():
                mapping[key] = value


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """A nested value with the result of a function for each tensor, and copies of its mappings."""

    def change(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if not isinstance(leaf, _KINDS):
            return leaf
        made = copy.copy(leaf)  # of a class that isn't one of torch's pytrees
        for key, one in leaf.items():
            made[key] = map_tensors(function, one)
        return made

    return tree_map(change, value)


def leaves_in(value: Any) -> list[Any]:
    """The leaves of a nested value, also of mappings that aren't torch's pytrees."""
    found = []
    for leaf in tree_leaves(value):
        found += leaves_in(list(leaf.values())) if isinstance(leaf, _KINDS) else [leaf]
    return found
