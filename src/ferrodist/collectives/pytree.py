"""Nested values, taken apart into tensors and a plan of how these were nested.

in the value                                     in the plan
tensor                                           its number; one that is there twice has one
tuple, list, dict                                the same, of plans
None, bool, int, float, str, bytes               itself
what an `LeafCodec` knows                        the plan of what it makes of that

What is of a subclass of these arrives as these: a named tuple as a tuple. A numpy scalar arrives as the bool, int,
float, str or bytes that is equal to it. An int has 64 bits, with or without sign. Nothing is nested deeper than
`MAX_LEVELS`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.arguments import python_value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Plan = list[Any]
"""Plain data: a mark, and what belongs to it."""

MAX_LEVELS = 100
"""Of tuples, lists and dicts in each other."""

_TENSOR, _TUPLE, _LIST, _DICT, _PLAIN = "tensor", "tuple", "list", "dict", "plain"
_LEAST_INT, _MOST_INT = -(1 << 63), (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafCodec:
    """One more kind of values.

    Args:
        mark: Its name in plans, the same on all ranks.
        take_apart: Called with a value that is none of the table's; gives what stands for it, or None for what is not
            of this kind. Raises TypeError for what can't travel, which says why: "is ...", after the place.
        put_together: The reverse. Raises ValueError for what nothing was taken apart into.
    """

    mark: str
    take_apart: Callable[[Any], Any]
    put_together: Callable[[Any], Any]


class _MisfitError(TypeError):
    """Something that has no plan: what is wrong with it, and where it is, from the inside out."""

    def __init__(self, wrong: str) -> None:
        super().__init__(wrong)
        self.wrong = wrong
        self.place = ""


class _Flattening:
    """One value on its way into a plan."""

    def __init__(self, extensions: Sequence[LeafCodec], check: Callable[[torch.Tensor], None] | None) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.marks: set[str] = set()
        self._numbers: dict[int, int] = {}
        self._extensions = extensions
        self._check = check

    def plan_of(self, value: Any, levels: int) -> Plan:
        if isinstance(value, torch.Tensor):
            if id(value) not in self.tensors:
                self._add(value)
            return [_TENSOR, self._numbers[id(value)]]
        if not isinstance(value, (tuple, list, Mapping)):
            return self._of_one(value, levels)
        self._check_levels(levels)
        if isinstance(value, Mapping):
            return [_DICT, [self._pair(key, each, levels - 1) for key, each in value.items()]]
        mark = _TUPLE if isinstance(value, tuple) else _LIST
        return [mark, [self._member(place, each, levels - 1) for place, each in enumerate(value)]]

    def _add(self, tensor: torch.Tensor) -> None:
        if self._check is not None:
            try:
                self._check(tensor)
            except TypeError as error:
                raise _MisfitError(str(error)) from None
        self._numbers[id(tensor)] = len(self._numbers)
        self.tensors[id(tensor)] = tensor

    def _member(self, place: object, value: Any, levels: int) -> Plan:
        try:
            return self.plan_of(value, levels)
        except _MisfitError as misfit:
            misfit.place = f"[{place!r}]{misfit.place}"
            raise

    def _pair(self, key: Any, value: Any, levels: int) -> list[Any]:
        key = python_value(key)
        if not isinstance(key, (str, int)):
            raise _MisfitError(f"has the key {key!r}: keys of what goes from rank to rank are text or numbers")
        return [_plain(key), self._member(key, value, levels)]

    def _of_one(self, value: Any, levels: int) -> Plan:
        for extension in self._extensions:
            try:
                inner = extension.take_apart(value)
            except TypeError as error:
                raise _MisfitError(str(error)) from None
            if inner is not None:
                self._check_levels(levels)
                self.marks.add(extension.mark)
                return [extension.mark, self.plan_of(inner, levels - 1)]
        return [_PLAIN, _plain(value)]

    def _check_levels(self, levels: int) -> None:
        if not levels:
            raise _MisfitError(f"is nested more than {MAX_LEVELS} levels deep, or in itself")


def flatten(
    value: Any,
    what: str,
    extensions: Sequence[LeafCodec] = (),
    check: Callable[[torch.Tensor], None] | None = None,
    marks: set[str] | None = None,
) -> tuple[Plan, list[torch.Tensor]]:
    """Take a value apart.

    Args:
        value: Nested as the table above says.
        what: What it is, for errors.
        extensions: What else may be in it.
        check: Called with each tensor; raises TypeError as `LeafCodec.take_apart` does.
        marks: Those of what else is in it are added to these.

    Raises:
        TypeError: It holds something else; the place is named.
    """
    flattening = _Flattening(extensions, check)
    try:
        plan = flattening.plan_of(value, MAX_LEVELS)
    except _MisfitError as misfit:
        raise TypeError(f"{what}{misfit.place} {misfit.wrong}") from None
    if marks is not None:
        marks |= flattening.marks
    return plan, list(flattening.tensors.values())


def is_encodable(text: str) -> bool:
    """Whether a text can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain(value: Any) -> Any:
    match python_value(value):
        case None | bool() as value:
            return value
        case int() as value:
            if not _LEAST_INT <= value <= _MOST_INT:
                raise _MisfitError(
                    f"is {value}: integers that go from rank to rank are -2**63 to 2**64 - 1, which have 64 bits"
                )
            return int.__int__(value)
        case float() as value:
            return float.__float__(value)
        case str() as value:
            if not is_encodable(value):
                raise _MisfitError(f"is {value!r}, which holds half of a surrogate pair: pass it as bytes")
            return str.__str__(value)
        case bytes() as value:
            return bytes(memoryview(value))
    raise _MisfitError(
        f"is of type {type(value).__name__}: tensors, numbers, text, bytes and None go from rank to rank, in tuples,"
        " lists and dicts"
    )


def check_plan(plan: Any, num_tensors: int, marks: Sequence[str] = (), *, levels: int = MAX_LEVELS) -> None:
    """See that `unflatten` can follow a plan that another rank sent.

    Args:
        plan: It.
        num_tensors: How many come with it.
        marks: Of extensions.
        levels: How deep it may be nested.

    Raises:
        ValueError: It can't.
    """
    if not (isinstance(plan, list) and len(plan) == 2 and levels >= 0):
        raise ValueError("a plan has no two parts, or is nested too deeply")
    mark, content = plan
    if mark == _PLAIN and (content is None or isinstance(content, (bool, int, float, str, bytes))):
        return
    if mark == _TENSOR and isinstance(content, int) and 0 <= content < num_tensors:
        return
    if mark in (_TUPLE, _LIST) and isinstance(content, list):
        for each in content:
            check_plan(each, num_tensors, marks, levels=levels - 1)
    elif mark == _DICT and isinstance(content, list):
        for pair in content:
            if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], (str, int))):
                raise ValueError("a plan has what is no pair of a key and a value")
            check_plan(pair[1], num_tensors, marks, levels=levels - 1)
    elif isinstance(mark, str) and mark in marks:
        check_plan(content, num_tensors, marks, levels=levels - 1)
    else:
        raise ValueError(f"a plan has the mark {mark!r}, or what does not belong to it")


def unflatten(plan: Plan, tensors: Sequence[Any], extensions: Sequence[LeafCodec] = ()) -> Any:
    """Put a value together again, with something in the place of each tensor.

    Each part that is an extension's is put together once, also where another one raises: it may be counted.

    Raises:
        ValueError: An extension says so.
    """
    mark, content = plan
    match mark:
        case "tensor":
            return tensors[content]
        case "plain":
            return content
        case "tuple":
            return tuple(_unflatten_all(content, tensors, extensions))
        case "list":
            return _unflatten_all(content, tensors, extensions)
        case "dict":
            values = _unflatten_all([each for _, each in content], tensors, extensions)
            return {key: value for (key, _), value in zip(content, values, strict=True)}
    extension = next(each for each in extensions if each.mark == mark)
    return extension.put_together(unflatten(content, tensors, extensions))


def _unflatten_all(plans: Sequence[Plan], tensors: Sequence[Any], extensions: Sequence[LeafCodec]) -> list[Any]:
    found: list[Any] = []
    try:
        for plan in plans:
            found.append(unflatten(plan, tensors, extensions))  # noqa: PERF401 - what is found so far is to be known
    except Exception:
        for plan in plans[len(found) + 1 :]:
            with contextlib.suppress(Exception):
                unflatten(plan, tensors, extensions)
        raise
    return found
