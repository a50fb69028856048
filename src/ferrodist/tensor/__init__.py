"""DTensor: tensors distributed over a device mesh by placements."""

from __future__ import annotations

from ferrodist.tensor import factories

__all__ = ["factories"]


def __dir__() -> list[str]:
    return sorted(__all__)
