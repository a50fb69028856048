"""All rules, by operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrodist.tensor.rules import (
    attention,
    batch_norm,
    convolution,
    creation,
    cutting,
    embedding,
    extremes,
    indexing,
    likelihood,
    losses,
    matmul,
    moments,
    normalization,
    numbers,
    pointwise,
    random,
    reductions,
    softmax,
    views,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ferrodist.tensor.call import Rule

__all__ = ["DECOMPOSITIONS", "FAMILIES", "RULES"]

FAMILIES = (
    pointwise,
    matmul,
    reductions,
    moments,
    extremes,
    views,
    cutting,
    indexing,
    embedding,
    creation,
    random,
    numbers,
    softmax,
    likelihood,
    losses,
    normalization,
    batch_norm,
    attention,
    convolution,
)
"""The modules of rules, in the order in which documents list them."""

RULES: dict[torch._ops.OpOverload, Rule] = {}
"""What operators do with divided tensors."""

DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
"""Operators that are computed by others, on distributed tensors."""

for _family in FAMILIES:
    RULES.update(_family.RULES)
    DECOMPOSITIONS.update(getattr(_family, "DECOMPOSITIONS", {}))
