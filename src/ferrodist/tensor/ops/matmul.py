"""Products of matrices and vectors, to which all forms of linear and einsum come down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.op_strategy import EinsumPattern, Labels, OpCall, OpRule, einsum_rule
from ferrodist.tensor.ops.pointwise import broadcast_labels
from ferrodist.torch_private.operators import private_aten

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

_aten = torch.ops.aten

_SUM: dict[Hashable, ReduceOp] = {"k": ReduceOp.SUM}


def _rule(inputs: str, output: str) -> OpRule:
    pattern = EinsumPattern(inputs=inputs.split(), outputs=[output], reductions=_SUM, linear=((0,), (1,)))
    return einsum_rule(lambda _: pattern)


def _sum_rule(factors: str, output: str) -> OpRule:
    """The rule of a product to which the first input is added, with broadcasting."""

    def pattern_of(call: OpCall) -> EinsumPattern:
        labels, _ = broadcast_labels([call.inputs[0].shape, call.results[0].shape], len(output))
        inputs: list[Labels] = [[None if dim is None else output[dim] for dim in labels], *factors.split()]
        return EinsumPattern(inputs=inputs, outputs=[output], reductions=_SUM, linear=((0, 1), (0, 2)), addends=(0,))

    return einsum_rule(pattern_of)


RULES: dict[torch._ops.OpOverload, OpRule] = {
    _aten.mm.default: _rule("mk kn", "mn"),
    _aten.bmm.default: _rule("bmk bkn", "bmn"),
    _aten.mv.default: _rule("mk k", "m"),
    _aten.dot.default: _rule("k k", ""),
    _aten.addmm.default: _sum_rule("mk kn", "mn"),
    _aten.addmv.default: _sum_rule("mk k", "m"),
    _aten.baddbmm.default: _sum_rule("bmk bkn", "bmn"),
}

DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    _aten.vdot.default: lambda one, other: torch.dot(one.conj(), other),
    private_aten.foreach_mm.default: lambda ones, others: [torch.mm(*pair) for pair in zip(ones, others, strict=True)],
}
