"""Something that will be known, for those who want to know."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Outcome"]

_Value = TypeVar("_Value")


class Outcome(Generic[_Value]):
    """What something comes to.

    Other than a future it keeps nothing of whom it has told: those may hold references, whose ends count here.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._values: list[_Value] = []  # none, or one
        self._then: list[Callable[[_Value], object]] = []

    def set(self, value: _Value) -> None:
        """Tell what it came to; the first time counts."""
        self._set(value, is_new=True)

    def replace(self, value: _Value) -> None:
        """Have it come to something else, for those who have not been told."""
        self._set(value, is_new=False)

    def when_set(self, then: Callable[[_Value], object]) -> None:
        """Call something with it: at once if it is known, or else in the thread that sets it."""
        with self._changed:
            if not self._values:
                self._then.append(then)
                return
            value = self._values[0]
        then(value)

    def look(self) -> list[_Value]:
        """It in a list, or an empty one."""
        return self._values[:]

    def wait(self, seconds: float) -> list[_Value]:
        """The same, after no longer than that."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._values), seconds)
            return self._values[:]

    def _set(self, value: _Value, *, is_new: bool) -> None:
        with self._changed:
            if is_new and self._values:
                return
            self._values = [value]
            then, self._then = self._then, []
            self._changed.notify_all()
        for each in then:
            each(value)
