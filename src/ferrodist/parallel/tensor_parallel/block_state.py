"""The attributes of a block's modules and the objects in them: what may change the path of a block's code.

Each forward compares them, so objects are compared by identity, as they lie in their containers: some microseconds for
a decoder's layer and its configuration.
"""

from __future__ import annotations

import operator
from collections import deque
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_OF_MODULES = frozenset(vars(nn.Module()))
"""The attributes that all modules have."""
_LEVELS = 3
"""Objects in each other that are looked at."""
_MANY = 1000
"""The items of a collection that are looked at; one with more is data."""
_PLAIN = (int, float, complex, str, bytes, torch.dtype, torch.device)
_CLOSED = (*_PLAIN, type(None), torch.Tensor, nn.Module, type, ModuleType, FunctionType, MethodType)
_NOT_ENTERED = {"torch", "ferrodist", "logging"}
"""Packages whose objects change when they are used, such as a logger."""


class BlockState:
    """The state of modules as it is when this is made."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._containers: list[Collection[Any]] = []
        """Collections, and views of the keys or values of dictionaries: what they have now."""
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self._seen: set[int] = set()
        for one in modules:
            self._containers.append(one.__dict__.values())
            for name, value in one.__dict__.items():
                if name not in _OF_MODULES:
                    self._enter(value, _LEVELS)
        self._before = [*chain.from_iterable(self._containers)]

    def is_current(self) -> bool:
        """Return whether the modules have the same state now."""
        try:
            is_same = sum(map(len, self._containers)) == len(self._before) and (
                all(map(operator.is_, chain.from_iterable(self._containers), self._before))
                or all(map(_is_equal, chain.from_iterable(self._containers), self._before))
            )
        except RuntimeError:  # another thread writes to a container
            return False
        return is_same and all(torch.equal(one.get_state(), before) for one, before in self._generators)

    def _enter(self, value: Any, levels: int) -> None:
        if isinstance(value, _CLOSED) or not levels or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Generator):
            self._generators.append((value, value.get_state()))
        elif isinstance(value, list | tuple | set | frozenset | deque):
            self._add_items(value, value, levels)
        elif isinstance(value, dict) or str(type(value).__module__).partition(".")[0] not in _NOT_ENTERED:
            if isinstance(value, dict):
                self._containers.append(value.keys())
            mapping = value if isinstance(value, dict) else getattr(value, "__dict__", {})
            self._add_items(mapping.values(), mapping, levels)

    def _add_items(self, items: Collection[Any], owner: Any, levels: int) -> None:
        if len(owner) <= _MANY:
            self._containers.append(items)
            for one in (*items,):
                self._enter(one, levels - 1)


def _is_equal(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and one == other)
