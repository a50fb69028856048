"""The former name of `ferrodist.torch_backend`, for programs that were written with it."""

from __future__ import annotations

from ferrodist.torch_backend import group_of, register, use_c10d_kernels

__all__ = ["group_of", "register", "use_c10d_kernels"]


def __dir__() -> list[str]:
    return sorted(__all__)
