"""Which methods of objects other ranks may call."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ferrodist.errors import RpcError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

__all__ = ["find_method"]


def find_method(value: Any, name: str, classes: Collection[type]) -> Callable[..., Any]:
    """A method of an object: a public one that its class has, where that class, or one above it, may be used.

    Args:
        value: The object.
        name: Of the method.
        classes: Which were registered; ``object`` is not meant by that, or everything would be.

    Raises:
        RpcError: There is none that may be called.
    """
    kind = type(value)
    if not any(base in classes for base in kind.__mro__ if base is not object):
        raise RpcError(
            f"methods of {kind.__name__} can't be called: register its class with its owner's agent, as in"
            f" agent.register({kind.__name__!r}, {kind.__name__})"
        )
    if name.startswith("_"):
        raise RpcError(f"{name!r} is no public method, and only those are called from other ranks")
    # Not getattr: what an object has for itself, or its metaclass for the class, is no method.
    found: Any = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    is_method = callable(found) or isinstance(found, (classmethod, functools.partialmethod))
    if not is_method or isinstance(found, type):
        raise RpcError(f"{kind.__name__} has no method {name!r}")
    bound: Callable[..., Any] = found.__get__(value, kind) if hasattr(found, "__get__") else found
    return bound
