"""Decompositions, inverses and solutions of matrices, cross products, and distances of rows.

Each matrix is independent of the others, so all dims before the matrices' own two may be sharded, with broadcasting.
The dims of a matrix are replicated.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.op_strategy import EinsumPattern, OpRule, all_replicated, einsum_rule, rule_table
from ferrodist.tensor.ops.pointwise import broadcast_labels
from ferrodist.tensor.redistribute import full_local
from ferrodist.tensor.spec import DTensorSpec
from ferrodist.torch_private.operators import plain_call, private_aten
from ferrodist.torch_private.tensors import call_heeding_conjugates

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ferrodist.tensor.op_strategy import Labels, LocalFunction, OpCall

_aten = torch.ops.aten


def heed_conjugates(call: OpCall) -> LocalFunction:
    """The operator, for kernels that conjugate on their way."""
    return partial(call_heeding_conjugates, plain_call(call.operator))


def _batch_shapes(call: OpCall, own_dims: Mapping[str, int]) -> list[tuple[int, ...]]:
    """The shapes of the dims before the matrices' own, whose number is two if ``own_dims`` does not say otherwise."""
    found = []
    for name, value in call.arguments.items():
        if isinstance(value, DTensorSpec):
            own = own_dims.get(name, 2)
            if name == "B" and _is_vector(call):
                own = 1
            found.append(value.shape[: max(value.ndim - own, 0)])
    return found


def _is_vector(call: OpCall) -> bool:
    """Return whether the right side of `torch.linalg.solve` is a batch of vectors, as torch decides it."""
    matrix, right = call.arguments.get("A"), call.arguments.get("B")
    if not isinstance(matrix, DTensorSpec) or not isinstance(right, DTensorSpec):
        return False
    is_solve = call.operator.overloadpacket is private_aten.linalg_solve_ex
    return is_solve and (right.ndim == 1 or (matrix.ndim - 1 == right.ndim and right.shape == matrix.shape[:-1]))


def _matrices(own_dims: Mapping[str, int], call: OpCall) -> EinsumPattern:
    shapes = _batch_shapes(call, own_dims)
    ndim = max(map(len, shapes))
    sizes = [max(shape[dim] for shape in shapes if len(shape) >= -dim) for dim in range(-ndim, 0)]
    batches = broadcast_labels(shapes, ndim)
    inputs = [[*labels, *[None] * (spec.ndim - len(labels))] for labels, spec in zip(batches, call.inputs, strict=True)]
    outputs: list[Labels] = []
    for result in call.results:
        has_batch = list(result.shape[:ndim]) == sizes
        first = min(ndim, result.ndim)
        outputs.append([*(range(ndim) if has_batch else [None] * first), *[None] * (result.ndim - first)])
    return EinsumPattern(inputs=inputs, outputs=outputs)


def _rule(**own_dims: int) -> OpRule:
    return einsum_rule(partial(_matrices, own_dims), local=heed_conjugates)


def _cross(call: OpCall) -> EinsumPattern:
    """A product of vectors along one dim; the inputs are broadcast."""
    ndim = call.results[0].ndim
    crossed = call["dim"] % ndim
    labels = broadcast_labels([spec.shape for spec in call.inputs], ndim)
    return EinsumPattern(
        inputs=[[None if label == crossed else label for label in dims] for dims in labels],
        outputs=[[None if dim == crossed else dim for dim in range(ndim)]],
        linear=((0,), (1,)),
    )


def _distances(call: OpCall) -> EinsumPattern:
    """Distances (..., P, R) of rows (..., P, M) and (..., R, M), or their gradient."""
    specs = call.inputs
    first = 1 if len(specs) == 4 else 0
    ndim = specs[first].ndim
    is_equal = all(spec.ndim == ndim and spec.shape[:-2] == specs[0].shape[:-2] for spec in specs)
    batch: list[Any] = [*range(ndim - 2)] if is_equal else [None] * (ndim - 2)

    def labels(spec_ndim: int, *own: str | None) -> list[Any]:
        return [*(batch if spec_ndim == ndim else [None] * (spec_ndim - 2)), *own]

    if first:
        return EinsumPattern(
            inputs=[labels(spec.ndim, None, None) for spec in specs], outputs=[labels(ndim, None, None)]
        )
    inputs = [labels(specs[0].ndim, "p", None), labels(specs[1].ndim, "r", None)]
    return EinsumPattern(inputs=inputs, outputs=[labels(call.results[0].ndim, "p", "r")])


def _outer(call: OpCall) -> EinsumPattern:
    labels, _ = broadcast_labels([call.inputs[0].shape, call.results[0].shape], 2)
    added = [None if dim is None else "mn"[dim] for dim in labels]
    is_exact = call["beta"] != 0  # else the first input is not read
    return EinsumPattern(inputs=[added, "m", "n"], outputs=["mn"], linear=((0, 1), (0, 2)) if is_exact else ())


def _sum_of_products(call: OpCall) -> EinsumPattern:
    labels, _ = broadcast_labels([call.inputs[0].shape, call.results[0].shape], 2)
    added = [None if dim is None else "mn"[dim] for dim in labels]
    return EinsumPattern(
        inputs=[added, "bmk", "bkn"],
        outputs=["mn"],
        reductions={"b": ReduceOp.SUM, "k": ReduceOp.SUM},
        linear=((0, 1), (0, 2)),
        addends=(0,),
    )


_REPLICATED = OpRule(strategies=all_replicated, local=heed_conjugates)

RULES = rule_table(
    (
        _rule(),
        (
            "linalg_inv_ex.default _linalg_svd.default linalg_qr.default _linalg_slogdet.default _linalg_det.default"
            " linalg_cholesky_ex.default _linalg_eigh.default linalg_eig.default linalg_lu_factor_ex.default"
            " linalg_lu.default linalg_ldl_factor_ex.default cholesky.default cholesky_inverse.default"
            " cholesky_solve.default linalg_matrix_exp.default triangular_solve.default"
            " linalg_solve_triangular.default _linalg_solve_ex.default _linalg_eigvals.default"
        ),
    ),
    (_rule(pivots=1), "linalg_ldl_solve.default linalg_lu_solve.default"),
    (_rule(LU_pivots=1), "lu_unpack.default"),
    (_rule(input2=1), "ormqr.default"),
    (_rule(tau=1), "linalg_householder_product.default"),
    (_rule(atol=0, rtol=0), "linalg_pinv.atol_rtol_tensor"),
    (_REPLICATED, "_pdist_forward.default _pdist_backward.default _trilinear.default"),
    (einsum_rule(_cross), "linalg_cross.default"),
    (einsum_rule(_distances), "_cdist_forward.default _cdist_backward.default"),
    (einsum_rule(_outer), "addr.default"),
    (einsum_rule(_sum_of_products), "addbmm.default"),
)


def _trace(matrix: Any) -> Any:
    return torch.diagonal(matrix).sum()


def _dist(one: Any, other: Any, p: float = 2) -> Any:
    return torch.linalg.vector_norm(one - other, p)


def _check_errors(info: Any, api_name: str, *, is_matrix: bool) -> None:
    """Raise torch's error on all ranks if a kernel reports one for any matrix."""
    private_aten.linalg_check_errors(full_local(info), api_name, is_matrix=is_matrix)


DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    private_aten.linalg_check_errors.default: _check_errors,
    _aten.trace.default: _trace,
    _aten.dist.default: _dist,
}
