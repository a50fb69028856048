"""The compiled engine, or why there is none."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ferrodist.errors import BackendUnavailable

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["is_gloo_available", "is_native_available", "load", "why_no_native"]

_reason: str | None = None
_module: ModuleType | None = None

try:
    _module = importlib.import_module("ferrodist._native")
except ImportError as error:
    _reason = str(error)


def load() -> ModuleType:
    """The engine's module.

    Raises:
        BackendUnavailable: This installation was built without it.
    """
    if _module is None:
        raise BackendUnavailable(
            f"this installation of ferrodist has no native engine ({_reason}): install it with a C++ compiler and"
            " without FERRODIST_NO_NATIVE, or use the tcp backend"
        )
    return _module


def why_no_native() -> str | None:
    """Why this installation has no native engine; None where it has."""
    return _reason


def is_native_available() -> bool:
    """Whether this installation has the native engine."""
    return _module is not None


def is_gloo_available() -> bool:
    """Whether this installation has `GlooBackend`, which is the native engine over TCP alone."""
    return is_native_available()
