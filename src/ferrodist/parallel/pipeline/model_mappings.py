"""Mappings that the modules of a model fill, and through which they pass tensors on, besides their results.

So the layers of Gemma 3n have one of keys and values, which later layers share. What a module writes to such an
argument counts as part of its result; an argument that it returns goes to other stages as its position.
"""

from __future__ import annotations

import copy
from collections import UserDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from ferrodist.torch_private.pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Content: TypeAlias = "dict[Any, Any]"
_KINDS = (dict, UserDict)


@dataclass(frozen=True)
class _Argument:
    """A mapping or list of the arguments, in a result.

    Args:
        index: Its index among all of them.
    """

    index: int


class Outcome(NamedTuple):
    """What a module's call gives, apart from the identity of its arguments.

    Args:
        returned: Its result, with an `_Argument` in place of a mapping or list that it got.
        written: The new and changed entries of each mapping.
    """

    returned: Any
    written: list[Content]


class Mappings:
    """The mappings and lists in a call's arguments, with their contents before the call.

    Args:
        path: The module's.
        args: The call's positional arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(self, path: str, args: Sequence[Any], kwargs: Content) -> None:
        self._path = path
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

    def outcome(self, returned: Any) -> Outcome:
        """What the call has given.

        Raises:
            ValueError: As for `written`, or the module has changed a list.
        """
        if self.changed_lists():
            raise self._unseen_write()
        indexes = {id(each): index for index, each in enumerate((*self._found, *self._lists))}
        packed = tree_map(
            lambda leaf: _Argument(indexes[id(leaf)]) if id(leaf) in indexes else leaf,
            returned,
            is_leaf=lambda leaf: id(leaf) in indexes,
        )
        return Outcome(packed, self.written())

    def apply(self, outcome: Outcome) -> Any:
        """Write what a call of a copy of the module has written; returns the call's result.

        Raises:
            ValueError: A mapping that is written to is twice among the arguments.
        """
        if any(outcome.written) and len({id(each) for each in self._found}) < len(self._found):
            raise ValueError(
                f"module {self._path!r} writes to a mapping that is among its arguments twice, of which other stages"
                " would see one: give it once"
            )
        for mapping, content in zip(self._found, outcome.written, strict=True):
            for key, value in content.items():
                mapping[key] = value
        arguments = (*self._found, *self._lists)
        return tree_map(lambda leaf: arguments[leaf.index] if isinstance(leaf, _Argument) else leaf, outcome.returned)

    def written(self) -> list[Content]:
        """The entries of each mapping that are new or changed since then.

        Raises:
            ValueError: The module has changed the order of a mapping, or removed from it.
        """
        is_reordered = any(
            list(found)[: len(before)] != list(before) for before, found in zip(self._before, self._found, strict=True)
        )
        if is_reordered:
            raise self._unseen_write()
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

    def _unseen_write(self) -> ValueError:
        return ValueError(
            f"module {self._path!r} changes a list among its arguments, or removes from a mapping or moves its keys,"
            " which other stages would not see: let it return what it computes, or write to a mapping"
        )


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
