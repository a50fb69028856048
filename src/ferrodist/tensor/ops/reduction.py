"""Reductions of dims (sums, norms, variances, extrema), and sorting and accumulation along a dim.

If a reduced dim is sharded, the result is partial: of a sum by SUM, of a maximum by MAX. Operators whose local results
can't be combined so, such as norms, variances and argmax, reduce small tensors over the ranks themselves.
"""

from __future__ import annotations

import functools
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce import allreduce
from ferrodist.collectives.reduce_op import ReduceOp, accumulation_dtype
from ferrodist.tensor.op_strategy import EinsumPattern, OpRule, all_replicated, einsum_rule, rule_table
from ferrodist.tensor.ops.pointwise import cast_is_linear
from ferrodist.tensor.placement import Partial, Replicate, Shard
from ferrodist.tensor.redistribute import extremum_identity, record_step
from ferrodist.tensor.spec import DTensorSpec, contiguous_stride, shard_of, sharding_axes
from ferrodist.tensor.traced import traced_redistribute
from ferrodist.torch_private.compilers import is_traced
from ferrodist.torch_private.operators import private_aten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.tensor.op_strategy import LocalFunction, OpCall

_aten = torch.ops.aten


def cross_rank_reducer(spec: DTensorSpec, axes: tuple[int, ...]) -> Callable[[torch.Tensor, ReduceOp], torch.Tensor]:
    """A function that allreduces a tensor over the ranks along some axes of a spec's mesh."""
    if not axes:
        return lambda tensor, _: tensor
    mesh = spec.mesh_along(axes)
    group = mesh.group

    def reduce(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        record_step(tensor, mesh, Partial(op), Replicate())
        if is_traced(tensor):
            partial = DTensorSpec.make(mesh, [Partial(op)] * mesh.ndim, tensor.shape, tensor.dtype)
            return traced_redistribute(tensor, partial, partial.replicated)
        return allreduce(tensor, op, group=group)

    return reduce


def local_indices(spec: DTensorSpec, dim: int) -> torch.Tensor:
    """The indices in the full dim of this rank's elements, in ascending order."""
    return _cached_indices(spec.shape[dim], _cuts_of(spec, dim))


def traced_local_indices(spec: DTensorSpec, dim: int) -> torch.Tensor:
    """`local_indices`, made by operators of a graph that a compiler traces."""
    made: torch.Tensor = _cached_indices.__wrapped__(spec.shape[dim], _cuts_of(spec, dim))
    return made


def _cuts_of(spec: DTensorSpec, dim: int) -> tuple[tuple[int, int, int], ...]:
    """The blocks, ranks and this rank's index of each axis that shards a dim."""
    return tuple(
        (placement.blocks, num_ranks, index)
        for placement, num_ranks, index in zip(spec.placements, spec.mesh.shape, spec.coordinate, strict=True)
        if isinstance(placement, Shard) and placement.dim == dim
    )


@functools.lru_cache(maxsize=256)
def _cached_indices(size: int, cuts: tuple[tuple[int, int, int], ...]) -> torch.Tensor:
    """One tensor for all calls that shard a dim alike, such as a vocabulary: cached calls keep it."""
    found = torch.arange(size, device="cpu")
    for blocks, num_ranks, rank in cuts:
        found = shard_of(found, Shard(0, blocks), num_ranks, rank)
    return found


_NO_DIMS_IS_NONE = (_aten.all.dims, _aten.any.dims)
"""Operators that reduce no dims if given an empty list, where others reduce all."""


def reduced_dims(call: OpCall) -> list[int]:
    """The dims of the first input that an operator reduces: those of ``dim``, or all."""
    ndim = call.inputs[0].ndim
    dims = call.arguments.get("dim")
    if dims is None or (dims == [] and call.operator not in _NO_DIMS_IS_NONE):
        return list(range(ndim))
    return [dim % max(ndim, 1) for dim in ([dims] if isinstance(dims, int) else dims) if ndim]


def result_labels(call: OpCall) -> list[int | None]:
    """The labels of a reduction's result, if the input's dims are labelled by their indices."""
    reduced = reduced_dims(call)
    keepdim = call.arguments.get("keepdim", False)
    return [None if dim in reduced else dim for dim in range(call.inputs[0].ndim) if keepdim or dim not in reduced]


def _casts_inexactly(call: OpCall) -> bool:
    """Return whether elements are first cast to a dtype to which partial sums can't be cast."""
    dtype = call.arguments.get("dtype")
    return dtype is not None and not cast_is_linear(call.inputs[0].dtype, dtype)


def _reduction(
    op: ReduceOp, linear: Sequence[Sequence[int]], commuting: Sequence[ReduceOp], call: OpCall
) -> EinsumPattern:
    is_inexact = _casts_inexactly(call)
    return EinsumPattern(
        inputs=[range(call.inputs[0].ndim)],
        outputs=[result_labels(call)],
        reductions=dict.fromkeys(reduced_dims(call), op),
        linear=() if is_inexact else linear,
        commuting=() if is_inexact else commuting,
    )


def _mean(call: OpCall) -> LocalFunction | None:
    """This rank's sum divided by the full size, as shards may differ in size."""
    (spec, output), reduced = (call.placed_inputs[0], call.outputs[0]), reduced_dims(call)
    if not sharding_axes(spec.placements, reduced):
        return None
    count = math.prod(spec.shape[dim] for dim in reduced)
    result, shape = output.dtype, output.local_shape
    wide = accumulation_dtype(result)
    return lambda tensor, *_, **__: (tensor.sum(reduced, dtype=wide) / count).reshape(shape).to(result)


def _empty_extremum(op: ReduceOp, call: OpCall) -> LocalFunction | None:
    """The identity of the reduction for an empty shard, for which torch has no extremum."""
    (spec, output), reduced = (call.placed_inputs[0], call.outputs[0]), reduced_dims(call)
    if all(spec.local_shape[dim] for dim in reduced) or any(spec.shape[dim] == 0 for dim in reduced):
        return None  # torch raises if the full tensor is empty
    shape, identity = output.local_shape, extremum_identity(op, output.dtype)
    return lambda tensor, *_, **__: tensor.new_full(shape, identity)


def _rule(op: ReduceOp, *, linear: Sequence[Sequence[int]] = (), commuting: Sequence[ReduceOp] = ()) -> OpRule:
    return einsum_rule(partial(_reduction, op, linear, commuting))


def _extremum_rule(op: ReduceOp) -> OpRule:
    return einsum_rule(partial(_reduction, op, (), (op,)), local=partial(_empty_extremum, op))


def _cross_rank_reduction(call: OpCall) -> EinsumPattern:
    """A reduction whose local function reduces over the ranks: results are replicated if a reduced dim is sharded."""
    return EinsumPattern(
        inputs=[range(call.inputs[0].ndim)],
        outputs=[result_labels(call)] * len(call.results),
        cross_rank=reduced_dims(call),
    )


def _variance(call: OpCall) -> LocalFunction | None:
    """Variances and deviations: the mean over the ranks first, then the sum of squared deviations from it."""
    spec, reduced = call.placed_inputs[0], reduced_dims(call)
    axes = sharding_axes(spec.placements, reduced)
    if not axes and 0 not in spec.local_shape:  # for an empty tensor torch warns
        return None
    reduce = cross_rank_reducer(spec, axes)
    count = math.prod(spec.shape[dim] for dim in reduced)
    name = call.operator.overloadpacket.__name__
    dtypes = [output.dtype for output in call.outputs]
    shape = call.outputs[0].local_shape

    def variance(
        tensor: torch.Tensor, *_: Any, correction: float | None = None, **__: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        wide = tensor.to(accumulation_dtype(tensor.dtype))
        mean = reduce(wide.sum(reduced, keepdim=True), ReduceOp.SUM) / count
        deviations = wide - mean
        squares = reduce(deviations.abs().square().sum(reduced), ReduceOp.SUM)
        result = squares / max(count - (1 if correction is None else correction), 0)
        first = (result.sqrt() if name.startswith("std") else result).reshape(shape).to(dtypes[0])
        return (first, mean.reshape(shape).to(dtypes[1])) if name.endswith("mean") else first

    return variance


def _norm(call: OpCall) -> LocalFunction | None:
    """The norm of the shards' norms."""
    spec, reduced = call.placed_inputs[0], reduced_dims(call)
    axes = sharding_axes(spec.placements, reduced)
    if not axes:
        return None
    reduce = cross_rank_reducer(spec, axes)
    result, shape = call.outputs[0].dtype, call.outputs[0].local_shape
    wide = accumulation_dtype(result)
    is_empty = any(spec.local_shape[dim] == 0 for dim in reduced)

    def norm(tensor: torch.Tensor, ord: float = 2, *_: Any, **__: Any) -> torch.Tensor:  # noqa: A002 # torch's
        if is_empty:
            local = torch.full(shape, math.inf if ord < 0 else 0.0, dtype=wide, device="cpu")
        else:
            dtype = wide.to_complex() if tensor.is_complex() else wide
            local = torch.linalg.vector_norm(tensor.to(dtype), ord, reduced).reshape(shape)
        if math.isinf(ord):
            full = reduce(local, ReduceOp.MAX if ord > 0 else ReduceOp.MIN)
        elif ord == 0:
            full = reduce(local, ReduceOp.SUM)
        else:
            full = reduce(local**ord, ReduceOp.SUM) ** (1 / ord)
        return full.to(result)

    return norm


def _logsumexp(call: OpCall) -> LocalFunction | None:
    spec, reduced = call.placed_inputs[0], reduced_dims(call)
    axes = sharding_axes(spec.placements, reduced)
    if not axes:
        return None
    reduce = cross_rank_reducer(spec, axes)
    result, shape = call.outputs[0].dtype, call.outputs[0].local_shape
    is_empty = any(spec.local_shape[dim] == 0 for dim in reduced)
    keepdim_shape = [1 if dim in reduced else size for dim, size in enumerate(spec.local_shape)]

    def logsumexp(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        wide = tensor.to(accumulation_dtype(result))
        # The real parts decide the magnitude of complex exponentials.
        real = wide.real if wide.is_complex() else wide
        local = real.new_full(keepdim_shape, -math.inf) if is_empty else real.amax(reduced, keepdim=True)
        largest = reduce(local, ReduceOp.MAX)
        shift = torch.where(largest.isinf(), 0.0, largest)  # infinities would give NaN
        total = reduce((wide - shift).exp().sum(reduced, keepdim=True), ReduceOp.SUM)
        return (total.log() + shift).reshape(shape).to(result)

    return logsumexp


_NO_INDEX = torch.iinfo(torch.int64).max


def _find_extremum(op: ReduceOp, call: OpCall) -> LocalFunction | None:
    """Each shard's extremum and its index in the full tensor; of equal ones the first, as in torch."""
    spec, reduced, outputs = call.placed_inputs[0], reduced_dims(call), call.outputs
    axes = sharding_axes(spec.placements, reduced)
    if not axes or any(spec.shape[dim] == 0 for dim in reduced):  # torch raises for an empty tensor
        return None
    reduce = cross_rank_reducer(spec, axes)
    dim = call["dim"]
    full_indices = [local_indices(spec, dim) for dim in reduced]
    full_strides = contiguous_stride([spec.shape[dim] for dim in reduced])
    sizes = [spec.local_shape[dim] for dim in reduced]
    shape = outputs[0].local_shape

    def find(tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
        flat, along = (tensor.reshape(-1), 0) if dim is None else (tensor, dim)
        if math.prod(sizes):
            values, index = flat.max(along) if op is ReduceOp.MAX else flat.min(along)
            local = torch.unravel_index(index, sizes)
            offsets = [full[at] * step for full, at, step in zip(full_indices, local, full_strides, strict=True)]
            index = torch.stack(offsets).sum(0)
        else:
            values = tensor.new_full(shape, extremum_identity(op, tensor.dtype))
            index = torch.full(shape, _NO_INDEX, device="cpu")
        values, index = values.reshape(shape), index.reshape(shape)
        best = reduce(values, op)
        # A NaN is the extremum wherever there is one.
        is_best = (values == best) | (values != values)  # noqa: PLR0124
        index = reduce(torch.where(is_best, index, _NO_INDEX), ReduceOp.MIN)
        return (best, index) if len(outputs) == 2 else index

    return find


def _along_dims(linear: Sequence[Sequence[int]], call: OpCall, *, reduces: bool = False) -> EinsumPattern:
    """The pattern of an operator that sorts, accumulates or reduces along full dims: all others may be sharded."""
    dims = reduced_dims(call)
    labels = [None if dim in dims else dim for dim in range(call.inputs[0].ndim)]
    outputs = [result_labels(call) if reduces else labels] * len(call.results)
    return EinsumPattern(inputs=[labels], outputs=outputs, linear=() if _casts_inexactly(call) else linear)


def _renorm(call: OpCall) -> EinsumPattern:
    """The pattern of slices along a dim, each scaled to a largest norm by itself."""
    kept = call["dim"] % call.inputs[0].ndim
    labels = [dim if dim == kept else None for dim in range(call.inputs[0].ndim)]
    return EinsumPattern(inputs=[labels], outputs=[labels])


RULES = rule_table(
    (_rule(ReduceOp.SUM, linear=((0,),)), "sum.default sum.dim_IntList"),
    (_rule(ReduceOp.SUM), "nansum.default count_nonzero.default count_nonzero.dim_IntList"),
    (einsum_rule(partial(_reduction, ReduceOp.SUM, ((0,),), ()), local=_mean), "mean.default mean.dim"),
    (_rule(ReduceOp.PRODUCT, commuting=(ReduceOp.PRODUCT,)), "prod.default prod.dim_int"),
    (_extremum_rule(ReduceOp.MAX), "amax.default max.default"),
    (_extremum_rule(ReduceOp.MIN), "amin.default min.default"),
    (_rule(ReduceOp.MIN), "all.default all.dim all.dims _is_all_true.default"),
    (_rule(ReduceOp.MAX), "any.default any.dim any.dims _is_any_true.default"),
    (OpRule(strategies=all_replicated), "histc.default"),
    (einsum_rule(_renorm), "renorm.default renorm_.default"),
    (
        einsum_rule(_cross_rank_reduction, local=_variance),
        "var.correction std.correction var_mean.correction std_mean.correction",
    ),
    (einsum_rule(_cross_rank_reduction, local=_norm), "linalg_vector_norm.default"),
    (einsum_rule(_cross_rank_reduction, local=_logsumexp), "logsumexp.default"),
    (einsum_rule(_cross_rank_reduction, local=partial(_find_extremum, ReduceOp.MAX)), "argmax.default max.dim"),
    (einsum_rule(_cross_rank_reduction, local=partial(_find_extremum, ReduceOp.MIN)), "argmin.default min.dim"),
    (einsum_rule(partial(_along_dims, ((0,),))), "cumsum.default"),
    (
        einsum_rule(partial(_along_dims, ())),
        "cumprod.default cummax.default cummin.default logcumsumexp.default topk.default sort.default sort.stable",
    ),
    (
        einsum_rule(partial(_along_dims, (), reduces=True)),
        "median.default median.dim nanmedian.default nanmedian.dim kthvalue.default mode.default",
    ),
)


def _both_extrema(tensor: Any, *, dim: int | None = None, keepdim: bool = False) -> tuple[Any, Any]:
    dims = () if dim is None else (dim,)
    return torch.amin(tensor, dims, keepdim), torch.amax(tensor, dims, keepdim)


def _any_norm(tensor: Any, p: Any = 2, *dims: Any, dtype: Any = None) -> Any:
    """``torch.norm``, whose order may be None; ``dims`` are the dims and keepdim."""
    return torch.linalg.vector_norm(tensor, 2 if p is None else p, *dims, dtype=dtype)


def _unscale(gradients: Sequence[Any], found: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Scale gradients in place, and note an infinity or NaN of one rank on all: a part of `torch.amp.GradScaler`."""
    private_aten.amp_foreach_non_finite_check_and_unscale_(
        [getattr(gradient, "_local", gradient) for gradient in gradients], found, inverse_scale
    )
    divided: dict[object, tuple[DTensorSpec, set[int]]] = {}  # the axes that divide gradients, by mesh
    for gradient in gradients:
        if (spec := getattr(gradient, "_spec", None)) is not None:
            _, axes = divided.setdefault(spec.mesh.identity, (spec, set()))
            axes.update(axis for axis, placement in enumerate(spec.placements) if placement != Replicate())
    for spec, axes in divided.values():
        found.copy_(cross_rank_reducer(spec, tuple(sorted(axes)))(found.clone(), ReduceOp.MAX))


DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    private_aten.amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    _aten.aminmax.default: _both_extrema,
    _aten.norm.Scalar: _any_norm,
    _aten.norm.ScalarOpt_dim: _any_norm,
    _aten.norm.ScalarOpt_dim_dtype: _any_norm,
    _aten.norm.ScalarOpt_dtype: _any_norm,
    private_aten.foreach_max.default: lambda tensors: [torch.max(one) for one in tensors],
    _aten._foreach_norm.Scalar: lambda tensors, p=2, dtype=None: [_any_norm(one, p, dtype=dtype) for one in tensors],
}
