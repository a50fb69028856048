"""Products of matrices and vectors, to which all forms of linear and einsum come down."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.op_strategy import EinsumPattern, OpRule, einsum_rule
from ferrodist.tensor.ops.pointwise import broadcast_labels

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.tensor.op_strategy import OpCall

_aten = torch.ops.aten


def _product_and_sum(inputs: Sequence[str], output: str, call: OpCall) -> EinsumPattern:
    """The pattern of a product to which the first input is added, with broadcasting."""
    labels, _ = broadcast_labels([call.inputs[0].shape, call.results[0].shape], len(output))
    addend = [None if dim is None else output[dim] for dim in labels]
    return EinsumPattern(
        inputs=[addend, *inputs],
        outputs=[output],
        reductions={"k": ReduceOp.SUM},
        linear=((0, 1), (0, 2)),
        addends=(0,),
    )


def _rule(inputs: str, output: str) -> OpRule:
    pattern = EinsumPattern(
        inputs=inputs.split(), outputs=[output], reductions={"k": ReduceOp.SUM}, linear=((0,), (1,))
    )
    return einsum_rule(lambda _: pattern)


def _sum_rule(inputs: str, output: str) -> OpRule:
    return einsum_rule(partial(_product_and_sum, inputs.split(), output))


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
    _aten.vdot.default: lambda one, other: torch.dot(one.conj(), other)
}
