"""UCC as a backend: it moves the bytes of collectives, and what is said and folded is ours."""

from ferrodist.backends.ucc.backend import UccBackend
from ferrodist.backends.ucc.bindings import is_ucc_available

__all__ = ["UccBackend", "is_ucc_available"]


def __dir__() -> list[str]:
    return sorted(__all__)
