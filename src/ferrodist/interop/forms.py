"""The two forms of torch's methods: lists and options, or tensors and what options would say. Ours know the first."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["both_forms", "use_router"]

_Result = TypeVar("_Result")

_ATTRIBUTES = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}
"""What options call it."""


_router: Callable[..., Any] | None = None


def use_router(router: Callable[..., Any]) -> None:
    """Ask ``router(group, method, arguments)`` before each method; what it returns, unless None, is the result."""
    global _router  # noqa: PLW0603 - it is looked at in each call, of all groups
    _router = router


def both_forms(
    options: type, num_tensors: int, *fields: str, in_lists: bool = False
) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """A method that takes tensors and ``opts`` is to be called without ``opts``, too, and with what they would say.

    Args:
        options: Their class; whoever gives none has its defaults.
        num_tensors: How many arguments come before ``opts``.
        fields: What may come in place of ``opts``: "root" and "op", in torch's order. After them comes "timeout".
        in_lists: Whether the arguments before are of one member each, and may come without their lists.
    """
    names = (*fields, "timeout")

    def decorate(method: Callable[..., _Result]) -> Callable[..., _Result]:
        def run(group: Any, *arguments: Any, **unknown: Any) -> _Result:
            found: _Result | None = None if _router is None or unknown else _router(group, method, arguments)
            return method(group, *arguments, **unknown) if found is None else found

        @functools.wraps(method)
        def call(group: Any, *given: Any, **named: Any) -> _Result:
            if given and type(given[-1]) is options and not named:  # so do torch's own calls: no time is to be lost
                return method(group, *given) if _router is None else run(group, *given)
            tensors, rest = given[:num_tensors], given[num_tensors:]
            if in_lists and any(isinstance(each, torch.Tensor) for each in tensors):
                tensors = tuple([each] for each in tensors)
            opts = named.pop("opts", None)
            if opts is None and rest and (rest[0] is None or hasattr(rest[0], "timeout")):
                opts, rest = rest[0], rest[1:]
            if opts is None:
                if len(rest) > len(names):
                    raise TypeError(f"{method.__name__} takes {', '.join(names)} after its tensors, not {rest}")
                said = dict(zip(names, rest, strict=False)) | {name: named.pop(name) for name in names if name in named}
                opts = _options(options, said)
            elif rest:
                raise TypeError(f"{method.__name__} takes opts, or {', '.join(names)}, not both")
            return run(group, *tensors, opts, **named)

        return call

    return decorate


def _options(kind: type, said: dict[str, Any]) -> Any:
    made = kind()
    for name, value in said.items():
        if value is not None:
            setattr(made, _ATTRIBUTES[name], value)
    return made
