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

from ferrodist.torch_private.autograd import version_of
from ferrodist.torch_private.pytree import tree_leaves, tree_map
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Content: TypeAlias = "dict[Any, Any]"
_KINDS = (dict, UserDict)
_LISTS = (list, deque)
_NEW = -1
_MISSING = object()


Slot: TypeAlias = "tuple[int, Any]"
"""The index of a mapping or list among those of the arguments, and a key of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The effects of a module's call.

    Args:
        returned: The call's result.
        written: The new and changed entries of each mapping of the arguments.
        aliases: For each mapping and list in these two, depth first: the index of the same object among those of the
            arguments and the earlier ones, or -1.
        kept: Entries of the arguments that the call has left as they were.
    """

    returned: Any
    written: list[Content]
    aliases: tuple[int, ...]
    kept: frozenset[Slot]


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
        self._before = [dict(_items_of(each)) for each in self._containers]
        self._versions = {
            (index, key): _versions_in(one) for index, items in enumerate(self._before) for key, one in items.items()
        }

    def outcome(self, returned: Any) -> Outcome:
        """The effects of the call, which returned ``returned``.

        Raises:
            ValueError: As for `written`, or the module has changed a list.
        """
        if self.changed_lists():
            raise self._unseen_write()
        value = returned, self.written()
        packed, written = self._packed(value)
        kept = frozenset(
            (index, key)
            for index, container in enumerate(self._containers)
            for key, one in _items_of(container)
            if self._before[index].get(key, _MISSING) is one and _versions_in(one) == self._versions[index, key]
        )
        return Outcome(returned=packed, written=written, aliases=self.aliases_in(value), kept=kept)

    def aliases_in(self, value: Any) -> tuple[int, ...]:
        """The `Outcome.aliases` of a nested value."""
        known = {id(each): index for index, each in enumerate(self._containers)}
        aliases: list[int] = []
        entered: set[int] = set()

        def visit(container: Any) -> bool:
            index = known.get(id(container))
            aliases.append(_NEW if index is None else index)
            if index is None:
                index = known[id(container)] = len(known)
            is_first = index not in entered
            entered.add(index)
            return is_first

        _visit(visit, value)
        return tuple(aliases)

    def _packed(self, value: Any) -> Any:
        """A nested value in copies of its mappings and lists: plain ones of arguments that torch doesn't know."""
        own = {id(each) for each in self._containers}

        def copy_of(container: Any) -> Any:
            if not _is_leaf_of_torch(container):
                return copy.copy(container)
            return _plain(container) if id(container) in own else None

        return _copied(value, lambda leaf: leaf, copy_of)

    def apply(self, outcome: Outcome) -> Any:
        """Write to the arguments what a call of a copy of the module has written and returned; returns the result.

        ``outcome`` must be this call's alone: it is changed.
        """
        returned = outcome.returned
        if any(alias != _NEW for alias in outcome.aliases):
            returned = self._unified(outcome)
        mappings = [each for each in self._containers if isinstance(each, _KINDS)]
        for mapping, content in zip(mappings, outcome.written, strict=True):
            for key, value in content.items():
                mapping[key] = value
        return returned

    def _unified(self, outcome: Outcome) -> Any:
        """The result with the objects that its aliases mean; ``written`` is changed in place."""
        aliases, known, entered = iter(outcome.aliases), list(self._containers), set[int]()

        def change(leaf: Any) -> Any:
            if not is_container(leaf):
                return leaf
            alias = next(aliases)
            content = leaf
            if alias == _NEW:
                alias = len(known)
                content = copy.copy(leaf) if _is_leaf_of_torch(leaf) else leaf  # which a trace has, too
                known.append(content)
            if alias not in entered:
                entered.add(alias)
                target = known[alias]
                for key, one in list(_items_of(content)):
                    value = walk(one)
                    if (alias, key) not in outcome.kept and (target is not content or value is not one):
                        target[key] = value
            return known[alias]

        def walk(nested: Any) -> Any:
            return tree_map(change, nested, is_leaf=is_container)

        returned, written = walk((outcome.returned, outcome.written))
        outcome.written[:] = written
        return returned

    def written_in_place(self) -> list[Any]:
        """The entries that are the same objects as before, to whose tensors the call has written."""
        return [
            one
            for (index, key), versions in self._versions.items()
            if _versions_in(one := self._before[index][key]) != versions
        ]

    def entry(self, slot: Slot) -> Any:
        """An entry of the arguments, as it was before the call."""
        index, key = slot
        return self._before[index][key]

    def written(self) -> list[Content]:
        """The entries of each mapping that are new or changed since then.

        Raises:
            ValueError: The module has changed the order of a mapping, or removed from it.
        """
        pairs = [
            (before, found)
            for before, found in zip(self._before, self._containers, strict=True)
            if isinstance(found, _KINDS)
        ]
        if any(list(found)[: len(before)] != list(before) for before, found in pairs):
            raise self._unseen_write()
        return [
            {key: value for key, value in found.items() if before.get(key, _MISSING) is not value}
            for before, found in pairs
        ]

    def changed_lists(self) -> list[Any]:
        """The lists that have other items since then."""
        return [
            each
            for before, each in zip(self._before, self._containers, strict=True)
            if isinstance(each, _LISTS)
            and (len(each) != len(before) or any(one is not before[index] for index, one in enumerate(each)))
        ]

    def _unseen_write(self) -> ValueError:
        return ValueError(
            f"module {self._path!r} changes a list among its arguments, or removes from a mapping or moves its keys,"
            " which other stages would not see: let it return what it computes, or write to a mapping"
        )


def check_inputs(args: Sequence[Any], kwargs: Content) -> None:
    """Raise ValueError for inputs of a model that later stages would get as other objects.

    These are mappings and lists that are there twice, and nested values of other types than dict, list and tuple.
    """
    seen: set[int] = set()
    for leaf in tree_leaves((args, kwargs), is_leaf=lambda each: type(each) not in {dict, list, tuple}):
        if is_container(leaf) or not _is_leaf_of_torch(leaf):
            raise ValueError(
                f"the model's inputs have {with_article(type(leaf).__name__)}, which goes from stage to stage as"
                " another type: pass a dict, a list or a tuple, or its tensors one by one"
            )

    def visit(container: Any) -> bool:
        if id(container) in seen:
            raise ValueError(
                f"the model's inputs have one {type(container).__name__} twice, and stages after the first would get"
                " two: give it once, or give copies"
            )
        seen.add(id(container))
        return True

    _visit(visit, (*args, *kwargs.values()))


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """A nested value with the result of a function for each tensor, and a copy of each mapping and list."""
    return _copied(value, lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, copy.copy)


def leaves_in(value: Any) -> list[Any]:
    """The leaves of a nested value, also of mappings and lists that aren't torch's pytrees."""
    found = []
    for leaf in tree_leaves(value):
        if is_container(leaf):
            found += leaves_in([one for _, one in _items_of(leaf)])
        else:
            found.append(leaf)
    return found


def is_container(value: Any) -> bool:
    """True for a mapping or list, also one that torch doesn't know."""
    return isinstance(value, (*_KINDS, *_LISTS))


def _items_of(container: Any) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, _KINDS) else enumerate(container)


def _copied(value: Any, leaf_of: Callable[[Any], Any], copy_of: Callable[[Any], Any]) -> Any:
    """A nested value with another value for each leaf, and one copy of each mapping and list.

    ``copy_of`` gives the copy, which has the same keys, or None for one that stays as it is.
    """
    made: dict[int, Any] = {}

    def change(leaf: Any) -> Any:
        if not is_container(leaf):
            return leaf_of(leaf)
        if id(leaf) not in made:
            copied = copy_of(leaf)
            made[id(leaf)] = leaf if copied is None else copied
            if copied is not None:
                for key, one in _items_of(leaf):
                    copied[key] = walk(one)
        return made[id(leaf)]

    def walk(nested: Any) -> Any:
        return tree_map(change, nested, is_leaf=is_container)

    return walk(value)


def _visit(visit: Callable[[Any], bool], value: Any) -> None:
    """Call a function with each mapping and list of a value, depth first; its items follow if it returns true."""
    for leaf in tree_leaves(value, is_leaf=is_container):
        if is_container(leaf) and visit(leaf):
            for _, one in _items_of(leaf):
                _visit(visit, one)


def _containers_in(value: Any) -> list[Any]:
    """The mappings and lists in a nested value, each once."""
    found: dict[int, Any] = {}

    def visit(container: Any) -> bool:
        is_first = id(container) not in found
        found[id(container)] = container
        return is_first

    _visit(visit, value)
    return list(found.values())


def _versions_in(value: Any) -> list[int]:
    """The number of writes to each tensor in an entry, but for those in mappings and lists of their own."""
    tensors = (leaf for leaf in tree_leaves(value, is_leaf=is_container) if isinstance(leaf, torch.Tensor))
    return [0 if each.is_inference() else version_of(each) for each in tensors]


def _plain(container: Any) -> Any:
    return dict(container) if isinstance(container, _KINDS) else list(container)


def _is_leaf_of_torch(value: Any) -> bool:
    return any(leaf is value for leaf in tree_leaves(value, is_leaf=lambda each: each is not value))
