"""The native engine: shared memory on one host, TCP between hosts."""

from ferrodist.backends.native.backend import GlooBackend, NativeBackend
from ferrodist.backends.native.binding import is_gloo_available, is_native_available

__all__ = ["GlooBackend", "NativeBackend", "is_gloo_available", "is_native_available"]


def __dir__() -> list[str]:
    return sorted(__all__)
