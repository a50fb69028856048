"""numpy's scalars as the Python values that are equal to them."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["python_value"]

_KINDS = frozenset("biufSU")
"""Booleans, integers, floats, bytes and text. A time or a record has no equal among plain values."""


def python_value(value: Any) -> Any:
    """A numpy scalar as a bool, int, float, bytes or str; anything else unchanged, as a float of more than 64 bits."""
    if isinstance(value, np.generic) and value.dtype.kind in _KINDS:
        return value.item()
    return value
