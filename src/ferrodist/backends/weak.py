"""Weak collections that other threads change, and weak references to bound methods."""

from __future__ import annotations

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


def weak_method(method: Callable[..., object]) -> Callable[..., None]:
    """Return a function that calls a bound method, and does nothing once the method's object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: object) -> None:
        found = reference()
        if found is not None:
            found(*arguments)

    return call
