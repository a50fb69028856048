"""All rules, by operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrodist.tensor.rules import (
    creation,
    cutting,
    embedding,
    indexing,
    matmul,
    numbers,
    pointwise,
    random,
    reductions,
    views,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ferrodist.tensor.call import Rule

__all__ = ["DECOMPOSITIONS", "RULES"]

_FAMILIES = (pointwise, matmul, reductions, views, cutting, indexing, embedding, creation, random, numbers)

RULES: dict[torch._ops.OpOverload, Rule] = {}
"""What operators do with divided tensors."""

DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
"""Operators that are computed by others, on distributed tensors."""

for _family in _FAMILIES:
    RULES.update(_family.RULES)
    DECOMPOSITIONS.update(getattr(_family, "DECOMPOSITIONS", {}))
