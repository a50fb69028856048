"""Looking through collections of weak references that other threads add to."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_Held = TypeVar("_Held")


def held_now(collection: Callable[[], Iterable[_Held]]) -> list[_Held]:
    """What a weak collection holds: ``held_now(lambda: weak_set)``, ``held_now(weak_dictionary.items)``.

    ``list(weak_set)`` runs Python code for each element, so another thread may add one meanwhile, for which Python
    raises. The look is taken again then. What is added after it was taken is not in it: who adds must see to that.
    """
    while True:
        try:
            return list(collection())
        except RuntimeError:  # noqa: PERF203 - the loop is for this
            continue
