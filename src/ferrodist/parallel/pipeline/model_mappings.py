"""Mappings that the modules of a model fill, and through which they pass tensors on, besides their results.

So the layers of Gemma 3n have one of keys and values, which later layers share. What a module writes to such an
argument counts as part of its result. A mapping or list that it returns may be one of its arguments: then it is that of
the other stages' calls, too, with the contents that it has where the module runs.
"""

from __future__ import annotations

import copy
from collections import UserDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ferrodist.torch_private.pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Content: TypeAlias = "dict[Any, Any]"
_KINDS = (dict, UserDict)
_LISTS = (list, deque)
_NEW = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The effects of a module's call.

    Args:
        returned: The call's result.
        written: The new and changed entries of each mapping of the arguments.
        aliases: For each mapping and list in these two, depth first: the index of the same object among those of the
            arguments and the earlier ones, or -1.
    """

    returned: Any
    written: list[Content]
    aliases: tuple[int, ...]


class Mappings:
    """The mappings and lists in a call's arguments, with their contents before the call.

    Args:
        path: The module's.
        args: The call's positional arguments.
        kwargs: The call's keyword arguments.
    """

    def __init__(self, path: str, args: Sequence[Any], kwargs: Content) -> None:
        self._path = path
        self._containers = _containers_in((*args, *kwargs.values()))
        self._mappings = [each for each in self._containers if isinstance(each, _KINDS)]
        self._lists = [each for each in self._containers if isinstance(each, _LISTS)]
        self._before = [dict(each) for each in self._mappings]
        self._items = [list(each) for each in self._lists]

    def outcome(self, returned: Any) -> Outcome:
        """The effects of the call, which returned ``returned``.

        Raises:
            ValueError: As for `written`, or the module has changed a list.
        """
        if self.changed_lists():
            raise self._unseen_write()
        written = self.written()
        aliases = self._aliases((returned, written))
        own = {id(each) for each in self._containers if _is_leaf_of_torch(each)}  # whose contents torch wouldn't see
        if own:
            returned = _map_containers(lambda each, _: _plain(each) if id(each) in own else each, returned)
        return Outcome(returned=returned, written=written, aliases=aliases)

    def _aliases(self, value: Any) -> tuple[int, ...]:
        known = {id(each): index for index, each in enumerate(self._containers)}
        aliases: list[int] = []
        entered: set[int] = set()

        def visit(container: Any, enter: Callable[[Any], Any]) -> Any:
            index = known.get(id(container))
            aliases.append(_NEW if index is None else index)
            if index is None:
                index = known[id(container)] = len(known)
            if index not in entered:
                entered.add(index)
                enter(container)
            return container

        _map_containers(visit, value)
        return tuple(aliases)

    def apply(self, outcome: Outcome) -> Any:
        """Write to the arguments what a call of a copy of the module has written and returned; returns the result."""
        returned = outcome.returned
        if any(alias != _NEW for alias in outcome.aliases):
            returned = self._unified(outcome)
        for mapping, content in zip(self._mappings, outcome.written, strict=True):
            for key, value in content.items():
                mapping[key] = value
        return returned

    def _unified(self, outcome: Outcome) -> Any:
        """The result with the objects that its aliases mean; ``written`` is changed in place."""
        aliases, known, entered = iter(outcome.aliases), list(self._containers), set[int]()

        def visit(container: Any, enter: Callable[[Any], Any]) -> Any:
            alias = next(aliases)
            if alias == _NEW:
                alias = len(known)
                known.append(container)
            if alias not in entered:
                entered.add(alias)
                enter(container)
                if known[alias] is not container:
                    _fill(known[alias], container)
            return known[alias]

        returned, _ = _map_containers(visit, (outcome.returned, outcome.written))
        return returned

    def written(self) -> list[Content]:
        """The entries of each mapping that are new or changed since then.

        Raises:
            ValueError: The module has changed the order of a mapping, or removed from it.
        """
        is_reordered = any(
            list(found)[: len(before)] != list(before)
            for before, found in zip(self._before, self._mappings, strict=True)
        )
        if is_reordered:
            raise self._unseen_write()
        missing = object()
        return [
            {key: value for key, value in found.items() if before.get(key, missing) is not value}
            for before, found in zip(self._before, self._mappings, strict=True)
        ]

    def changed_lists(self) -> list[Any]:
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


def check_inputs(args: Sequence[Any], kwargs: Content) -> None:
    """Raise ValueError if one mapping or list is among a model's inputs twice: later stages would get copies."""
    seen: set[int] = set()

    def visit(container: Any, enter: Callable[[Any], Any]) -> Any:
        if id(container) in seen:
            raise ValueError(
                f"the model's inputs have one {type(container).__name__} twice, and stages after the first would get"
                " two: give it once, or give copies"
            )
        seen.add(id(container))
        enter(container)
        return container

    _map_containers(visit, (*args, *kwargs.values()))


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """A nested value with the result of a function for each tensor, and a copy of each mapping and list."""
    made: dict[int, Any] = {}

    def visit(container: Any, enter: Callable[[Any], Any]) -> Any:
        if id(container) not in made:
            made[id(container)] = copy.copy(container)
            enter(made[id(container)])
        return made[id(container)]

    return _map_containers(visit, value, lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def leaves_in(value: Any) -> list[Any]:
    """The leaves of a nested value, also of mappings and lists that aren't torch's pytrees."""
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, _KINDS):
            found += leaves_in(list(leaf.values()))
        else:
            found += leaves_in(list(leaf)) if isinstance(leaf, _LISTS) else [leaf]
    return found


def _containers_in(value: Any) -> list[Any]:
    """The mappings and lists in a nested value, each once."""
    found: dict[int, Any] = {}

    def visit(container: Any, enter: Callable[[Any], Any]) -> Any:
        if id(container) not in found:
            found[id(container)] = container
            enter(container)
        return container

    _map_containers(visit, value)
    return list(found.values())


def _map_containers(
    visit: Callable[[Any, Callable[[Any], Any]], Any],
    value: Any,
    leaf_function: Callable[[Any], Any] = lambda leaf: leaf,
) -> Any:
    """A nested value with the result of a function for each mapping or list, depth first.

    ``visit`` takes the mapping or list, and a function that replaces the items of one in place by their results.
    """

    def change(leaf: Any) -> Any:
        return visit(leaf, enter) if isinstance(leaf, (*_KINDS, *_LISTS)) else leaf_function(leaf)

    def walk(nested: Any) -> Any:
        return tree_map(change, nested, is_leaf=lambda leaf: isinstance(leaf, (*_KINDS, *_LISTS)))

    def enter(container: Any) -> None:
        for key, one in list(container.items() if isinstance(container, _KINDS) else enumerate(container)):
            result = walk(one)
            if result is not one:
                container[key] = result

    return walk(value)


def _fill(target: Any, content: Any) -> None:
    if isinstance(target, _KINDS):
        for key, one in content.items():
            target[key] = one
    else:
        for index, one in enumerate(content):
            target[index] = one


def _plain(container: Any) -> Any:
    return dict(container) if isinstance(container, _KINDS) else list(container)


def _is_leaf_of_torch(value: Any) -> bool:
    return any(leaf is value for leaf in tree_leaves(value))
