"""Weak collections that other threads change, weak references to bound methods, and names of objects."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_Item = TypeVar("_Item")


def snapshot_weak(collection: Callable[[], Iterable[_Item]]) -> list[_Item]:
    """Copy a weak collection to a list: ``snapshot_weak(lambda: weak_set)``, ``snapshot_weak(weak_dictionary.items)``.

    ``list(weak_set)`` runs Python code for each element, so another thread may add one meanwhile, for which Python
    raises; the copy is then made again. Elements added after it was made are missing.
    """
    while True:
        try:
            return list(collection())
        except RuntimeError:  # noqa: PERF203 - the loop is for this
            continue


def weak_method(method: Callable[..., object], *bound: object) -> Callable[..., None]:
    """Return a function that calls a bound method, and does nothing once the method's object is gone.

    ``bound`` are the first arguments of each call; they are kept alive.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: object) -> None:
        found = reference()
        if found is not None:
            found(*bound, *arguments)

    return call


_indices = itertools.count()
_named: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()


def name_weakly(value: object) -> str:
    """Name an object, as long as it lives; no other object of this process has the name, not even later."""
    name = f"{type(value).__name__} {next(_indices)}"
    _named[name] = value
    return name


def find_weakly(name: str) -> object | None:
    """The object of a name, or None if it is gone."""
    return _named.get(name)
