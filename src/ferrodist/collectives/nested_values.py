"""Nested values, taken apart into tensors and a plan of how these were nested.

in the value                                     in the plan
tensor                                           its number; one that is there twice has one
tuple, list, dict                                the same, of plans
None, bool, int of 64 bits, float, str, bytes    itself

What is of a subclass of these arrives as these: a named tuple as a tuple, numpy's float64 as a float.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Plan", "check_plan", "flatten", "unflatten"]

Plan = list[Any]
"""Plain data: a mark, and what belongs to it."""

_TENSOR, _TUPLE, _LIST, _DICT, _PLAIN = "tensor", "tuple", "list", "dict", "plain"
_INT_BITS = 64


def flatten(value: Any, what: str) -> tuple[Plan, list[torch.Tensor]]:
    """Take a value apart.

    Args:
        value: Nested as the table above says.
        what: What it is, for errors.

    Raises:
        TypeError: It holds something else; the place is named.
    """
    tensors: dict[int, torch.Tensor] = {}
    numbers: dict[int, int] = {}
    plan = _plan_of(value, what, tensors, numbers)
    return plan, list(tensors.values())


def _plan_of(value: Any, where: str, tensors: dict[int, torch.Tensor], numbers: dict[int, int]) -> Plan:
    if isinstance(value, torch.Tensor):
        tensors.setdefault(id(value), value)
        return [_TENSOR, numbers.setdefault(id(value), len(numbers))]
    if isinstance(value, (tuple, list)):
        mark = _TUPLE if isinstance(value, tuple) else _LIST
        return [mark, [_plan_of(each, f"{where}[{place}]", tensors, numbers) for place, each in enumerate(value)]]
    if isinstance(value, Mapping):
        pairs = []
        for key, each in value.items():
            inner = f"{where}[{key!r}]"
            if not isinstance(key, (str, int)):
                raise TypeError(f"{where} has the key {key!r}: keys of what goes from rank to rank are text or numbers")
            pairs.append([_plain(key, f"the key of {inner}"), _plan_of(each, inner, tensors, numbers)])
        return [_DICT, pairs]
    return [_PLAIN, _plain(value, where)]


def _plain(value: Any, where: str) -> Any:
    match value:
        case None | bool():
            return value
        case int():
            if value.bit_length() >= _INT_BITS:
                raise TypeError(f"{where} is {value}: integers that go from rank to rank have 64 bits")
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case str():
            return str.__str__(value)
        case bytes():
            return bytes(memoryview(value))
    raise TypeError(
        f"{where} is of type {type(value).__name__}: tensors, numbers, text, bytes and None go from rank to rank,"
        " in tuples, lists and dicts"
    )


def check_plan(plan: Any, num_tensors: int) -> None:
    """See that `unflatten` can follow a plan that another rank sent.

    Raises:
        ValueError: It can't.
    """
    match plan:
        case [mark, list(content)] if mark in (_TUPLE, _LIST):
            for each in content:
                check_plan(each, num_tensors)
        case [mark, list(content)] if mark == _DICT:
            for pair in content:
                match pair:
                    case [str() | int(), each]:
                        check_plan(each, num_tensors)
                    case _:
                        raise ValueError(f"a plan has {pair!r} for a pair of key and value")
        case [mark, int(number)] if mark == _TENSOR and 0 <= number < num_tensors:
            pass
        case [mark, None | bool() | int() | float() | str() | bytes()] if mark == _PLAIN:
            pass
        case _:
            raise ValueError(f"a plan has {plan!r}")


def unflatten(plan: Plan, tensors: Sequence[Any]) -> Any:
    """Put a value together again, with something in the place of each tensor."""
    mark, content = plan
    if mark == _TENSOR:
        return tensors[content]
    if mark == _TUPLE:
        return tuple(unflatten(each, tensors) for each in content)
    if mark == _LIST:
        return [unflatten(each, tensors) for each in content]
    if mark == _DICT:
        return {key: unflatten(each, tensors) for key, each in content}
    return content
