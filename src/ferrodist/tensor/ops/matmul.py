"""Products of matrices. All forms of linear and einsum come down to these.

Operators whose result is a number of Python's: the same on every rank.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.op_strategy import EinsumPattern, OpRule, einsum_strategies
from ferrodist.tensor.ops.pointwise import broadcast_labels
from ferrodist.tensor.ops.reduction import cross_rank_reducer
from ferrodist.tensor.redistribute import redistribute_local
from ferrodist.torch_private.operators import private_aten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.tensor.op_strategy import OpCall, OpStrategy
    from ferrodist.tensor.spec import DTensorSpec

_aten = torch.ops.aten


def _product(inputs: Sequence[str], output: str, call: OpCall, axis: int) -> list[OpStrategy]:
    pattern = EinsumPattern(inputs=inputs, outputs=[output], reductions={"k": ReduceOp.SUM}, linear=((0,), (1,)))
    return einsum_strategies(pattern, call, axis)


def _product_and_sum(inputs: Sequence[str], output: str, call: OpCall, axis: int) -> list[OpStrategy]:
    """The first input is added to the product, with broadcasting."""
    labels, _ = broadcast_labels([call.inputs[0].shape, call.results[0].shape], len(output))
    addend = [None if place is None else output[place] for place in labels]
    pattern = EinsumPattern(
        inputs=[addend, *inputs],
        outputs=[output],
        reductions={"k": ReduceOp.SUM},
        linear=((0, 1), (0, 2)),
        addends=(0,),
    )
    return einsum_strategies(pattern, call, axis)


def _rule(inputs: str, output: str) -> OpRule:
    return OpRule(strategies=partial(_product, inputs.split(), output))


def _sum_rule(inputs: str, output: str) -> OpRule:
    return OpRule(strategies=partial(_product_and_sum, inputs.split(), output))


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


def _item(tensor: Any) -> Any:
    """The element of a tensor that has one."""
    spec: DTensorSpec = tensor._spec
    return private_aten.local_scalar_dense(redistribute_local(tensor._local, spec, spec.replicated))


def _compare(compare: Callable[..., bool], one: Any, other: Any, *tolerance: Any, **named: Any) -> bool:
    """Whether all ranks find their parts to be alike."""
    for tensor, beside in ((one, other), (other, one)):
        if not hasattr(tensor, "_spec"):
            raise TypeError(
                f"a distributed tensor is compared with a plain one of shape {tuple(tensor.shape)}: distribute it too,"
                f" as by fd.distribute(tensor, mesh, {list(beside.placements)}), or compare with full_tensor()"
            )
    here: DTensorSpec = one._spec
    there: DTensorSpec = other._spec
    if here.mesh.identity != there.mesh.identity:
        raise ValueError(f"tensors of different meshes are compared:\n{here.mesh}\nand\n{there.mesh}")
    if here.shape != there.shape:
        # Both are whole, and compared as any two are.
        here, there = here.replicated, there.replicated
    else:
        here = here.without_partial
        there = there.with_placements(here.placements)
    parts = [redistribute_local(tensor._local, tensor._spec, spec) for tensor, spec in ((one, here), (other, there))]
    alike = compare(*parts, *tolerance, **named)
    fold = cross_rank_reducer(here, tuple(range(here.mesh.ndim)))
    return bool(fold(torch.tensor([alike], dtype=torch.uint8, device="cpu"), ReduceOp.MIN).item())


DECOMPOSITIONS |= {
    private_aten.local_scalar_dense.default: _item,
    _aten.is_same_size.default: lambda one, other: one.shape == other.shape,
    _aten.equal.default: partial(_compare, torch.equal),
    _aten.allclose.default: partial(_compare, torch.allclose),
}
