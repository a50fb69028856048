"""What msgpack carries so that it comes back as itself, or as a plainer form that is written down here.

    sent                                     arrives as
    None, bool, int, float, str, bytes       itself
    list, dict                               itself; a subclass as a list or a dict
    tuple                                    a list; as a key of a dict a tuple
    numpy scalar                             the bool, int, float, str or bytes that is equal to it
    dataclass, msgspec struct                a dict of the fields that are set; an ``array_like`` struct as a list

An int has 64 bits, with or without sign. A key of a dict is None, bool, int, float, str, bytes or a tuple of these.
All else raises TypeError: msgspec would also encode times, UUIDs, Decimals, Enums, sets and byte arrays, as text,
values and lists that don't say what they were.
"""

from __future__ import annotations

import dataclasses
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ferrodist.collectives.numpy_scalars import python_value
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["encode_plain"]

_PLAIN = {type(None), bool, int, float, str, bytes, msgspec.UnsetType}


def encode_plain(value: Any) -> bytes:
    """Encode plain data as msgpack.

    Raises:
        TypeError: A part of it would not come back as the table above says.
        RecursionError: It is nested too deeply, or holds itself.
    """
    try:
        data = msgspec.msgpack.encode(
            value, enc_hook=_replace
        )  # first: what it can encode ends, so the walk below does
    except (OverflowError, ValueError) as error:
        raise TypeError(str(error)) from error
    _check_values([value])
    return data


def _replace(value: Any) -> Any:
    """What is encoded for a value that msgspec does not know."""
    replacement = python_value(value)
    if isinstance(replacement, np.generic) or replacement is value:
        raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")
    return replacement


def _check_values(values: Iterable[Any]) -> None:
    """Raise TypeError for what msgspec encodes and `msgspec.msgpack.decode` doesn't give back."""
    left = [values]
    while left:
        members = list(left.pop())
        if set(map(type, members)) <= _PLAIN:
            continue
        for value in members:
            if type(python_value(value)) in _PLAIN:
                continue
            if isinstance(value, (list, tuple)):
                left.append(value)
            elif isinstance(value, dict):
                _check_keys(value)
                left.append(value.values())
            elif isinstance(value, msgspec.Struct):
                left.append(getattr(value, name, None) for name in value.__struct_fields__)
            elif dataclasses.is_dataclass(value):
                left.append(getattr(value, field.name, None) for field in dataclasses.fields(value))
            else:
                raise TypeError(f"{with_article(type(value).__name__)} would arrive as something else")


def _check_keys(keys: Iterable[Any]) -> None:
    while others := [key for key in keys if type(python_value(key)) not in _PLAIN]:
        for key in others:
            if not isinstance(key, tuple):
                name = with_article(type(key).__name__)
                raise TypeError(f"{name} as a key of a dict would arrive as something else, or not at all")
        keys = chain.from_iterable(others)
