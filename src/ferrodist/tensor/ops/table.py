"""The rules of all operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrodist.tensor.ops import (
    attention,
    convolution,
    creation,
    embedding,
    fourier,
    indexing,
    linear_algebra,
    loss,
    matmul,
    normalization,
    pointwise,
    random,
    rearranging,
    reduction,
    scalar,
    searching,
    slicing,
    spatial,
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
    view,
    slicing,
    indexing,
    embedding,
    creation,
    random,
    scalar,
    loss,
    normalization,
    attention,
    convolution,
    spatial,
    linear_algebra,
    fourier,
    rearranging,
    searching,
)
"""The modules of rules, in the order in which the operator table lists them."""

RULES: dict[torch._ops.OpOverload, OpRule] = {}  # the rule of each operator that is computed on local shards

DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
"""Functions that compute an operator by others, given distributed tensors."""

for _family in FAMILIES:
    RULES.update(_family.RULES)
    DECOMPOSITIONS.update(getattr(_family, "DECOMPOSITIONS", {}))
