"""The state of a block: attributes of its modules and their classes, and the objects in them.

They may change the path of the block's code. Each forward compares them, so objects are compared by identity, as they
lie in their containers: some microseconds for a decoder's layer and its configuration. Modes of training are left out.
"""

from __future__ import annotations

import functools
import operator
import random
from collections import deque
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ferrodist.torch_private.autograd import version_of
from ferrodist.torch_private.modules import own_buffers, own_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

_OF_MODULES = frozenset(vars(nn.Module()))
"""The attributes that all modules have."""
_LEVELS = 10
"""Objects in each other that are looked at."""
_MOST_ITEMS = 2000
"""Items that a state has at most; comparing more takes as long as an operator."""
_MOST_BYTES = 4096
"""The size of an array whose contents are compared."""
_PLAIN = (int, float, complex, str, bytes, torch.dtype, torch.device)
_CLOSED = (*_PLAIN, type(None), type, ModuleType, FunctionType, MethodType)
_NOT_ENTERED = {"torch", "ferrodist", "logging"}
"""Packages whose objects change when they are used, such as a logger."""


class UnknownStateError(Exception):
    """Modules have attributes that can't be compared, or too many."""


class BlockState:
    """The state of modules as it is when this is made. UnknownStateError: it can't be compared."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._own: list[tuple[dict[str, Any], int, tuple[str, ...]]] = []
        """The attributes of modules: how many there are, and the names of those that not all modules have."""
        self._containers: list[Collection[Any]] = []
        """Collections, and views of the keys or values of dictionaries: what they have now."""
        self._values: list[tuple[Callable[[], Any], Any]] = []
        """What gives the contents of an object that changes in place, and what it gave."""
        self._levels: dict[int, int] = {}
        """The number of levels that were entered from an object."""
        self._kept: list[Any] = []  # so that no other object gets their ids
        try:
            for one in modules:
                self._add_module(one, _LEVELS)
            self._before = [*self._items()]
        except UnknownStateError:
            raise
        except Exception as error:  # of the object's own code, or of another thread's writes
            raise UnknownStateError from error
        if len(self._before) > _MOST_ITEMS:
            raise UnknownStateError

    def is_current(self) -> bool:
        """Return whether the modules have the same state now."""
        try:
            return (
                all(len(attributes) == number for attributes, number, _ in self._own)
                and sum(map(len, self._containers)) == len(self._before) - self._num_own
                and (
                    all(map(operator.is_, self._items(), self._before))
                    or all(map(_is_equal, self._items(), self._before))
                )
                and all(find() == before for find, before in self._values)
            )
        except Exception:  # noqa: BLE001 - as in the constructor
            return False

    @functools.cached_property
    def _num_own(self) -> int:
        return sum(len(names) for _, _, names in self._own)

    def _items(self) -> Iterable[Any]:
        own = (attributes.get(name) for attributes, _, names in self._own for name in names)
        return chain(own, chain.from_iterable(self._containers))

    def _add_module(self, module: nn.Module, levels: int) -> None:
        self._values.append((lambda: type(module), type(module)))
        attributes = module.__dict__
        names = tuple([name for name in attributes if name not in _OF_MODULES])
        self._own.append((attributes, len(attributes), names))
        self._containers += [own_buffers(module).values(), own_modules(module).values()]
        for kind in type(module).__mro__:
            if not kind.__module__.startswith(("torch.", "builtins")):
                self._containers.append(vars(kind).values())
        for name in names:
            self._enter(attributes[name], levels)

    def _enter(self, value: Any, levels: int) -> None:
        if isinstance(value, _CLOSED) or self._levels.get(id(value), 0) >= levels:
            return
        is_new = id(value) not in self._levels
        self._levels[id(value)] = levels
        self._kept.append(value)
        if (find := _find_contents(value)) is not None:
            self._values += [(find, find())] if is_new else []
        elif isinstance(value, nn.Module):
            if is_new and levels > 1:  # one outside of the block
                self._add_module(value, levels - 1)
        else:
            items = _items_of(value)
            self._containers += items if is_new else []
            if sum(map(len, items)) > _MOST_ITEMS:
                raise UnknownStateError
            slots = _slots_of(value)
            if slots and is_new:
                self._values.append((functools.partial(_read_slots, value, slots), _read_slots(value, slots)))
            for one in chain(_read_slots(value, slots), *items):
                self._enter(one, levels - 1)


def _items_of(value: Any) -> list[Collection[Any]]:
    """The objects in an object. UnknownStateError: each use changes it, and nothing shows how."""
    kind = type(value)
    package = str(kind.__module__).partition(".")[0]
    if hasattr(value, "__next__") or package == "itertools":
        raise UnknownStateError
    items: list[Collection[Any]] = []
    if isinstance(value, functools.partial):
        items = [value.args, value.keywords.values()]
    elif isinstance(value, dict):
        items = [value.keys(), value.values()]
    elif isinstance(value, list | tuple | set | frozenset | deque):
        items = [value]
    return items if package in _NOT_ENTERED else [*items, getattr(value, "__dict__", {}).values()]


def _find_contents(value: Any) -> Callable[[], Any] | None:
    """A function that gives the contents of an object that is written in place, or None."""
    if isinstance(value, torch.Tensor):
        return (lambda: 0) if value.is_inference() else lambda: version_of(value)
    if isinstance(value, torch.Generator):
        return lambda: value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate
    if isinstance(value, np.random.Generator):
        return lambda: repr(value.bit_generator.state)
    if isinstance(value, np.ndarray):
        return value.tobytes if value.nbytes <= _MOST_BYTES else lambda: 0
    return None


def _slots_of(value: Any) -> list[str]:
    if str(type(value).__module__).partition(".")[0] in _NOT_ENTERED:
        return []
    found = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for each in found for name in ([each] if isinstance(each, str) else each)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _read_slots(value: Any, slots: Sequence[str]) -> list[Any]:
    return [getattr(value, name, None) for name in slots]


def _is_equal(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and one == other)
