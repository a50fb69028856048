"""DTensor: tensors that are one to the program and lie in parts over a mesh."""

from __future__ import annotations

from ferrodist.tensor import factories

__all__ = ["factories"]


def __dir__() -> list[str]:
    return sorted(__all__)
