"""Products of matrices. All forms of linear and einsum come down to these."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.call import Rule
from ferrodist.tensor.patterns import Pattern, choices_of
from ferrodist.tensor.rules.pointwise import broadcast_letters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.tensor.call import Call, Choice

__all__ = ["DECOMPOSITIONS", "RULES"]

_aten = torch.ops.aten


def _product(inputs: Sequence[str], output: str, call: Call, axis: int) -> list[Choice]:
    pattern = Pattern(inputs=inputs, outputs=[output], folds={"k": ReduceOp.SUM}, linear=((0,), (1,)))
    return choices_of(pattern, call, axis)


def _product_and_sum(inputs: Sequence[str], output: str, call: Call, axis: int) -> list[Choice]:
    """The first input is added to the product, with broadcasting."""
    letters, _ = broadcast_letters([call.inputs[0].shape, call.results[0].shape], len(output))
    addend = [None if place is None else output[place] for place in letters]
    pattern = Pattern(
        inputs=[addend, *inputs],
        outputs=[output],
        folds={"k": ReduceOp.SUM},
        linear=((0, 1), (0, 2)),
        added=(0,),
    )
    return choices_of(pattern, call, axis)


def _rule(inputs: str, output: str) -> Rule:
    return Rule(choices=partial(_product, inputs.split(), output))


def _sum_rule(inputs: str, output: str) -> Rule:
    return Rule(choices=partial(_product_and_sum, inputs.split(), output))


RULES: dict[torch._ops.OpOverload, Rule] = {
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
