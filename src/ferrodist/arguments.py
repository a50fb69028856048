"""Checks of arguments that every layer makes."""

from __future__ import annotations

import contextlib
import operator
from typing import Any


def check_int(name: str, value: Any, *, min: int | None = None) -> int:  # noqa: A002 - as callers write it
    """Return any integer, also NumPy's, as an int; TypeError for others and bools, ValueError below ``min``."""
    number: int | None = None
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            number = operator.index(value)
    if number is None:
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if min is not None and number < min:
        raise ValueError(f"{name} must be at least {min}, not {number}")
    return number


def check_type(value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Raise TypeError unless a value has a type; the message is ``expected``, and the type that it has."""
    if not isinstance(value, kind):
        raise TypeError(f"{expected}, not {type(value).__name__}")


def check_bool(name: str, value: object) -> None:
    """Raise TypeError unless a value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {type(value).__name__}")
