"""What goes from stage to stage: nested values, taken apart into tensors and a plan of how they were nested.

in the value                                     in the plan
tensor                                           its number; one that is there twice has one
tuple, list, dict                                the same, of plans; subclasses arrive as these
None, bool, int of 64 bits, float, str, bytes    itself
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Plan", "flatten", "map_tensors", "unflatten"]

Plan = list[Any]
"""Plain data: a mark, and what belongs to it."""

_TENSOR, _TUPLE, _LIST, _DICT, _PLAIN = "tensor", "tuple", "list", "dict", "plain"
_PLAIN_TYPES = (type(None), bool, int, float, str, bytes)
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
        for key in value:
            if not isinstance(key, (str, int)):
                raise TypeError(
                    f"{where} has the key {key!r}: keys of what goes from stage to stage are text or numbers"
                )
        return [_DICT, [[key, _plan_of(each, f"{where}[{key!r}]", tensors, numbers)] for key, each in value.items()]]
    if not isinstance(value, _PLAIN_TYPES):
        raise TypeError(
            f"{where} is of type {type(value).__name__}: tensors, numbers, text, bytes and None go from stage to stage,"
            " in tuples, lists and dicts"
        )
    if isinstance(value, int) and value.bit_length() >= _INT_BITS:
        raise TypeError(f"{where} is {value}: integers that go from stage to stage have 64 bits")
    return [_PLAIN, value]


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


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any, what: str) -> Any:
    """A value with what a function makes of each of its tensors."""
    plan, tensors = flatten(value, what)
    return unflatten(plan, [function(tensor) for tensor in tensors])
