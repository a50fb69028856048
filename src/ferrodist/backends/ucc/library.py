"""The UCC library of this machine, or why there is none."""

from __future__ import annotations

import os
import threading

from ferrodist.backends.ucc.bindings import Library, is_of_parent
from ferrodist.errors import BackendUnavailable

__all__ = ["is_ucc_available", "load", "why_no_ucc"]

_VARIABLE = "FERRODIST_UCC_LIBRARY"
_DEFAULT = "libucc.so.1"
_MAJOR = 1

_loading = threading.Lock()
_loaded: dict[str, Library | str] = {}
"""By path: the library, or why it can't be loaded."""


def load() -> Library:
    """UCC, as the variable FERRODIST_UCC_LIBRARY or else the dynamic linker finds it. Loading starts nothing.

    Raises:
        BackendUnavailable: There is none, or not of version 1, or the process that this one was forked from uses it.
    """
    path = os.environ.get(_VARIABLE) or _DEFAULT
    with _loading:
        if path not in _loaded:
            _loaded[path] = _try(path)
        found = _loaded[path]
    if isinstance(found, str):
        raise BackendUnavailable(
            f"there is no UCC here ({found}): install it, with the UCX it was built with; {_VARIABLE} names the library"
            f" where the dynamic linker does not find {_DEFAULT}"
        )
    if is_of_parent():
        raise BackendUnavailable(
            "UCC can't be used here: the process that this one was forked from has a group over it. Fork before a group"
            " is made or after all are closed, or start a new process instead (multiprocessing's 'spawn')"
        )
    return found


def _try(path: str) -> Library | str:
    try:
        library = Library(path)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with a file that somebody has named
        return " ".join(str(error).split()) or type(error).__name__
    if library.version[0] != _MAJOR:
        return f"{path} is {library}, and version {_MAJOR} is needed"
    return library


def is_ucc_available() -> bool:
    """Whether a UCC library can be loaded here; it looks, which loads it, and starts nothing."""
    return why_no_ucc() is None


def why_no_ucc() -> str | None:
    """Why no UCC library can be loaded, or None if one can."""
    try:
        load()
    except BackendUnavailable as error:
        return error.message
    return None
