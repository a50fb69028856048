"""A real MPI as a backend: it moves the bytes; comparing calls and folding reductions are ferrodist's."""

from ferrodist.backends.mpi.backend import MpiBackend
from ferrodist.backends.mpi.runtime import is_mpi_available

__all__ = ["MpiBackend", "is_mpi_available"]


def __dir__() -> list[str]:
    return sorted(__all__)
