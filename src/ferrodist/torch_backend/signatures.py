"""The two forms of torch's methods: lists and options, or tensors and what options would say. Ours know the first."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.autograd.profiler import record_function

from ferrodist.torch_private.profiling import is_profiling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

_Result = TypeVar("_Result")

_ATTRIBUTES = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}
"""What options call it."""


_MISSING = object()

_NOT_RECORDED = contextlib.nullcontext()

_router: Callable[..., Any] | None = None


def use_router(router: Callable[..., Any]) -> None:
    """Ask ``router(group, method, arguments)`` before each method; what it returns, unless None, is the result."""
    global _router  # noqa: PLW0603 - it is looked at in each call, of all groups
    _router = router


def recorded(name: str) -> AbstractContextManager[object]:
    """Inside of this, torch's profiler sees a call, as ``ferrodist:name``."""
    return record_function(f"ferrodist:{name}") if is_profiling() else _NOT_RECORDED


def accept_options(
    options: type, num_tensors: int, *fields: str, in_lists: bool = False
) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """A method that takes tensors and ``opts`` is to be called without ``opts``, too, and with what they would say.

    Args:
        options: Their class; whoever gives none has its defaults.
        num_tensors: How many arguments come before ``opts``.
        fields: What may come in place of ``opts``: "root" and "op", in torch's order. After them comes "timeout".
        in_lists: Whether the arguments before are of one member each, and may come without their lists.
    """

    def decorate(method: Callable[..., _Result]) -> Callable[..., _Result]:
        first = _ArgumentParser(method, options, num_tensors, (*fields, "timeout"), in_lists=in_lists)

        def run(group: Any, arguments: Sequence[Any]) -> _Result:
            found: _Result | None = None if _router is None else _router(group, method, arguments)
            if found is not None:
                return found
            with recorded(method.__name__):
                return method(group, *arguments)

        def call(group: Any, *given: Any, **named: Any) -> _Result:
            group.num_calls += 1
            if given and type(given[-1]) is options and not named:  # so do torch's own calls: no time is to be lost
                is_watched = _router is not None or is_profiling()
                return run(group, given) if is_watched else method(group, *given)
            return run(group, first.of(given, named))

        def call_with_one(
            group: Any, tensors: Any = _MISSING, opts: Any = _MISSING, /, *rest: Any, **named: Any
        ) -> _Result:
            # The same in half the time, which is 0.2 us less.
            if type(opts) is options and _router is None and not (rest or named or is_profiling()):
                group.num_calls += 1
                return method(group, tensors, opts)
            return call(group, *[each for each in (tensors, opts) if each is not _MISSING], *rest, **named)

        return functools.wraps(method)(call_with_one if num_tensors == 1 else call)

    return decorate


class _ArgumentParser:
    """The first form of a method's arguments; see `accept_options`."""

    def __init__(
        self, method: Callable[..., Any], options: type, num_tensors: int, fields: tuple[str, ...], *, in_lists: bool
    ) -> None:
        self._name = method.__name__
        self._tensor_names = list(inspect.signature(method).parameters)[1 : 1 + num_tensors]
        self._options = options
        self._fields = fields
        self._in_lists = in_lists

    def of(self, given: Sequence[Any], named: dict[str, Any]) -> list[Any]:
        """Tensors and options; what it takes is gone from ``named``.

        Raises:
            TypeError: Something is missing, or is too much.
        """
        rest, tensors = list(given), []
        for name in self._tensor_names:
            if rest:
                tensors.append(rest.pop(0))
            elif name in named:
                tensors.append(named.pop(name))
            else:
                raise TypeError(f"{self._name} takes {', '.join(self._tensor_names)}: {name} is missing")
        if self._in_lists and any(isinstance(each, torch.Tensor) for each in tensors):
            tensors = [[each] for each in tensors]
        opts = named.pop("opts", None)
        if opts is None and rest and hasattr(rest[0], "timeout"):
            opts = rest.pop(0)
        if opts is not None:
            if rest or named:
                raise TypeError(f"{self._name} takes opts, or {', '.join(self._fields)}, not both")
            return [*tensors, opts]
        said = dict(zip(self._fields, rest, strict=False))
        said |= {name: named.pop(name) for name in self._fields if name in named}
        if named or len(rest) > len(self._fields):
            given_too = ", ".join([*map(repr, rest), *named])
            raise TypeError(f"{self._name} takes {', '.join(self._fields)} after its tensors, not {given_too}")
        return [*tensors, _filled(self._options, said)]


def _filled(kind: type, said: dict[str, Any]) -> Any:
    made = kind()
    for name, value in said.items():
        if value is not None:
            setattr(made, _ATTRIBUTES[name], value)
    return made
