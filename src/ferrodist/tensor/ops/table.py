"""All rules, by operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrodist.tensor.ops import (
    attention,
    convolution,
    embedding,
    indexing,
    loss,
    matmul,
    normalization,
    pointwise,
    random,
    reduction,
    view,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ferrodist.tensor.op_strategy import OpRule

FAMILIES = (
    pointwise,
    matmul,
    reduction,
    reduction,
    reduction,
    view,
    view,
    indexing,
    embedding,
    random,
    random,
    matmul,
    loss,
    loss,
    loss,
    normalization,
    normalization,
    attention,
    convolution,
)
"""The modules of rules, in the order in which documents list them."""

RULES: dict[torch._ops.OpOverload, OpRule] = {}
"""What operators do with divided tensors."""

DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
"""Operators that are computed by others, on distributed tensors."""

for _family in FAMILIES:
    RULES.update(_family.RULES)
    DECOMPOSITIONS.update(getattr(_family, "DECOMPOSITIONS", {}))
