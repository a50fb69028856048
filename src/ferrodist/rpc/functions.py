"""A table of functions: what may be called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ferrodist.rpc.messages import OWN_NAMES
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Functions"]


class Functions:
    """What may be called, by name. Only what was registered can be."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}

    def register(self, name: str, function: Callable[..., Any]) -> None:
        """Have a function called by a name.

        Raises:
            TypeError: It is none, or the name is no text.
            ValueError: There is another one of that name, it is empty, or agents have such names for themselves.
        """
        if not isinstance(name, str) or not callable(function):
            raise TypeError(f"register(name, function) takes a text and a function, not {name!r} and {function!r}")
        if not name:
            raise ValueError("the name of a function is empty: give it one by which others call it")
        if name.startswith(OWN_NAMES):
            raise ValueError(f"names that begin with {OWN_NAMES!r} are the agents' own: take another one")
        if self._functions.setdefault(name, function) is not function:
            raise ValueError(f"there is a function {name!r} already: take another name")

    def register_all(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        """Register functions by their names.

        Raises:
            TypeError, ValueError: As for `register`, or they have no names.
        """
        if not isinstance(functions, Mapping):
            raise TypeError(
                f"functions are given by their names, as in {{'add': add}}, not as"
                f" {with_article(type(functions).__name__)}"
            )
        for name, function in functions.items():
            self.register(name, function)

    def find(self, name: str) -> Callable[..., Any] | None:
        """The function of a name, or None."""
        return self._functions.get(name)

    def classes(self) -> set[type]:
        """Those that are classes."""
        return {function for function in list(self._functions.values()) if isinstance(function, type)}

    def names(self) -> list[str]:
        """All names."""
        return sorted(self._functions)
