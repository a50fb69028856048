"""UCC as a backend: it moves the bytes of collectives; comparing calls and folding reductions are ferrodist's."""

from ferrodist.backends.ucc.backend import UccBackend
from ferrodist.backends.ucc.bindings import is_ucc_available

__all__ = ["UccBackend", "is_ucc_available"]


def __dir__() -> list[str]:
    return sorted(__all__)
