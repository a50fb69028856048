"""Where the largest and smallest elements are, and operators that put a dim in order or run along it.

What rules that fold over the ranks themselves are made of: which ranks have parts of a dim, and where these lie.

Operators that fold dims: sums and their kin, whose parts are folded by the same operation.

Where a dim that goes is divided, the result is partial: of a sum by SUM, of a maximum by MAX. Operators whose parts
make no such result fold over the ranks themselves, in `moments` and `extremes`.

Variances, norms and logsumexp: where a dim that goes is divided, small tensors are reduced over its ranks.
"""

from __future__ import annotations

import functools
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce import allreduce
from ferrodist.collectives.reduce_op import ReduceOp, accumulation_dtype
from ferrodist.tensor.op_strategy import EinsumPattern, OpRule, einsum_strategies
from ferrodist.tensor.ops.pointwise import cast_is_linear
from ferrodist.tensor.ops.random import all_replicated
from ferrodist.tensor.placement import Partial, Replicate, Shard
from ferrodist.tensor.redistribute import extremum_identity, record_move
from ferrodist.tensor.spec import contiguous_stride, shard_of
from ferrodist.torch_private.operators import private_aten

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from ferrodist.tensor.op_strategy import OpCall, OpStrategy
    from ferrodist.tensor.spec import DTensorSpec


def sharding_axes(spec: DTensorSpec, dims: Collection[int]) -> tuple[int, ...]:
    """The axes that divide any of some dims."""
    return tuple(
        axis for axis, placement in enumerate(spec.placements) if isinstance(placement, Shard) and placement.dim in dims
    )


def cross_rank_reducer(spec: DTensorSpec, axes: tuple[int, ...]) -> Callable[[torch.Tensor, ReduceOp], torch.Tensor]:
    """What folds a tensor over the ranks along some axes of a layout's mesh, so that all of them have the result."""
    if not axes:
        return _same
    part = spec.mesh_along(axes)
    group = part.group

    def fold(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        record_move(tensor, part, Partial(op), Replicate())
        return allreduce(tensor, op, group=group)

    return fold


def _same(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    del op
    return tensor


def local_indices(spec: DTensorSpec, dim: int) -> torch.Tensor:
    """Where in the whole dim the indices of this rank's part lie, in ascending order."""
    num_ranks, coordinate = spec.mesh.shape, spec.coordinate
    axes = sharding_axes(spec, (dim,))
    placements = [spec.placements[axis] for axis in axes]
    blocks = [placement.blocks for placement in placements if isinstance(placement, Shard)]
    cuts = zip(blocks, [num_ranks[axis] for axis in axes], [coordinate[axis] for axis in axes], strict=True)
    return _cached_indices(spec.shape[dim], tuple(cuts))


@functools.lru_cache(maxsize=256)
def _cached_indices(size: int, cuts: tuple[tuple[int, int, int], ...]) -> torch.Tensor:
    """One tensor for all calls that divide a dim alike, as a vocabulary: recipes keep it."""
    found = torch.arange(size, device="cpu")
    for blocks, num_ranks, at in cuts:
        found = shard_of(found, Shard(0, blocks), num_ranks, at)
    return found


_aten = torch.ops.aten

_KEEP_ALL = (_aten.all.dims, _aten.any.dims)
"""To these no dims mean none, and not all."""


def reduced_dims(call: OpCall) -> list[int]:
    """The dims of the first input that an operator folds: those of ``dim``, or all."""
    ndim = call.inputs[0].ndim
    dims = call.arguments.get("dim")
    if dims is None or (dims == [] and call.operator not in _KEEP_ALL):
        return list(range(ndim))
    return [dim % max(ndim, 1) for dim in ([dims] if isinstance(dims, int) else dims) if ndim]


def kept_labels(call: OpCall) -> list[int | None]:
    """The letters of the result of a reduction whose input has the numbers of its dims as letters."""
    gone = reduced_dims(call)
    keepdim = call.arguments.get("keepdim", False)
    return [None if dim in gone else dim for dim in range(call.inputs[0].ndim) if keepdim or dim not in gone]


def loses_partials(call: OpCall) -> bool:
    """Whether elements are cast before they are folded to a dtype in which parts of them are no parts any more."""
    dtype = call.arguments.get("dtype")
    return dtype is not None and not cast_is_linear(call.inputs[0].dtype, dtype)


def _folded(
    op: ReduceOp, linear: Sequence[Sequence[int]], commuting: Sequence[ReduceOp], call: OpCall, axis: int
) -> list[OpStrategy]:
    is_cut = loses_partials(call)
    pattern = EinsumPattern(
        inputs=[range(call.inputs[0].ndim)],
        outputs=[kept_labels(call)],
        reductions=dict.fromkeys(reduced_dims(call), op),
        linear=() if is_cut else linear,
        commuting=() if is_cut else commuting,
    )
    return einsum_strategies(pattern, call, axis)


def _mean(call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]) -> Callable[..., Any] | None:
    """The sum of this rank's part, divided by the size of the whole: parts need not be of one size."""
    gone = reduced_dims(call)
    if not sharding_axes(inputs[0], gone):
        return None
    count = math.prod(inputs[0].shape[dim] for dim in gone)
    result, shape = outputs[0].dtype, outputs[0].local_shape
    wide = accumulation_dtype(result)

    def mean(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        del given, named  # as in the layouts
        return (tensor.sum(gone, dtype=wide) / count).reshape(shape).to(result)

    return mean


def _extremum(
    op: ReduceOp, call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]
) -> Callable[..., Any] | None:
    """Of an empty part, for which torch has none, what every element of another part wins against."""
    gone = reduced_dims(call)
    if all(inputs[0].local_shape[dim] for dim in gone) or any(inputs[0].shape[dim] == 0 for dim in gone):
        return None  # torch raises where the whole has no element
    shape, dtype = outputs[0].local_shape, outputs[0].dtype

    def neutral(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        del given, named  # as in the layouts
        return tensor.new_full(shape, extremum_identity(op, dtype))

    return neutral


def _rule(op: ReduceOp, *, linear: Sequence[Sequence[int]] = (), commuting: Sequence[ReduceOp] = ()) -> OpRule:
    return OpRule(strategies=partial(_folded, op, linear, commuting))


def _extremum_rule(op: ReduceOp) -> OpRule:
    return OpRule(strategies=partial(_folded, op, (), (op,)), local=partial(_extremum, op))


def _both_extrema(tensor: Any, *, dim: int | None = None, keepdim: bool = False) -> tuple[Any, Any]:
    dims = () if dim is None else (dim,)
    return torch.amin(tensor, dims, keepdim), torch.amax(tensor, dims, keepdim)


_sum_rule = _rule(ReduceOp.SUM, linear=((0,),))
_mean_rule = OpRule(strategies=partial(_folded, ReduceOp.SUM, ((0,),), ()), local=_mean)
_count_rule = _rule(ReduceOp.SUM)
_product_rule = _rule(ReduceOp.PRODUCT, commuting=(ReduceOp.PRODUCT,))
_all_rule, _any_rule = _rule(ReduceOp.MIN), _rule(ReduceOp.MAX)
_max_rule, _min_rule = _extremum_rule(ReduceOp.MAX), _extremum_rule(ReduceOp.MIN)

RULES: dict[torch._ops.OpOverload, OpRule] = {
    _aten.sum.default: _sum_rule,
    _aten.sum.dim_IntList: _sum_rule,
    _aten.nansum.default: _count_rule,
    _aten.mean.default: _mean_rule,
    _aten.mean.dim: _mean_rule,
    _aten.count_nonzero.default: _count_rule,
    _aten.count_nonzero.dim_IntList: _count_rule,
    _aten.prod.default: _product_rule,
    _aten.prod.dim_int: _product_rule,
    _aten.amax.default: _max_rule,
    _aten.max.default: _max_rule,
    _aten.amin.default: _min_rule,
    _aten.min.default: _min_rule,
    _aten.all.default: _all_rule,
    _aten.all.dim: _all_rule,
    _aten.all.dims: _all_rule,
    _aten.any.default: _any_rule,
    _aten.any.dim: _any_rule,
    _aten.any.dims: _any_rule,
    private_aten.is_all_true.default: _all_rule,
    private_aten.is_any_true.default: _any_rule,
    _aten.histc.default: OpRule(strategies=all_replicated),
}

DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {_aten.aminmax.default: _both_extrema}


def cross_rank_strategies(call: OpCall, axis: int) -> list[OpStrategy]:
    """Any dim divided; the results are whole where one is that goes."""
    kept = kept_labels(call)
    pattern = EinsumPattern(
        inputs=[range(call.inputs[0].ndim)], outputs=[kept] * len(call.results), reduced_locally=reduced_dims(call)
    )
    return einsum_strategies(pattern, call, axis)


def _moments(call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]) -> Callable[..., Any] | None:
    """The mean first, then the sum of the squares of what the elements differ from it."""
    spec = inputs[0]
    gone = reduced_dims(call)
    axes = sharding_axes(spec, gone)
    if not axes and 0 not in spec.local_shape:  # of no elements torch warns
        return None
    fold = cross_rank_reducer(spec, axes)
    count = math.prod(spec.shape[dim] for dim in gone)
    name = call.operator.overloadpacket.__name__
    dtypes = [output.dtype for output in outputs]
    shape = outputs[0].local_shape

    def moments(
        tensor: torch.Tensor, *given: Any, correction: float | None = None, **named: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        del given, named  # as in the layouts
        wide = tensor.to(accumulation_dtype(tensor.dtype))
        mean = fold(wide.sum(gone, keepdim=True), ReduceOp.SUM) / count
        away = wide - mean
        squares = fold(away.abs().square().sum(gone), ReduceOp.SUM)
        variance = squares / max(count - (1 if correction is None else correction), 0)
        first = (variance.sqrt() if name.startswith("std") else variance).reshape(shape).to(dtypes[0])
        return (first, mean.reshape(shape).to(dtypes[1])) if name.endswith("mean") else first

    return moments


def _norm(call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]) -> Callable[..., Any] | None:
    """The norm of the parts' norms."""
    gone = reduced_dims(call)
    axes = sharding_axes(inputs[0], gone)
    if not axes:
        return None
    fold = cross_rank_reducer(inputs[0], axes)
    result = outputs[0].dtype
    wide = accumulation_dtype(result)
    shape = outputs[0].local_shape
    is_empty = any(inputs[0].local_shape[dim] == 0 for dim in gone)

    def norm(tensor: torch.Tensor, ord: float = 2, *given: Any, **named: Any) -> torch.Tensor:  # noqa: A002 # torch's
        del given, named  # as in the layouts
        if is_empty:
            owned_grad = torch.full(shape, math.inf if ord < 0 else 0.0, dtype=wide, device="cpu")
        else:
            owned_grad = torch.linalg.vector_norm(tensor.to(_same_kind(tensor, wide)), ord, gone).reshape(shape)
        if math.isinf(ord):
            found = fold(owned_grad, ReduceOp.MAX if ord > 0 else ReduceOp.MIN)
        elif ord == 0:
            found = fold(owned_grad, ReduceOp.SUM)
        else:
            found = fold(owned_grad**ord, ReduceOp.SUM) ** (1 / ord)
        return found.to(result)

    return norm


def _same_kind(tensor: torch.Tensor, real: torch.dtype) -> torch.dtype:
    """The dtype of real numbers, or the complex one of them for a complex tensor."""
    return real.to_complex() if tensor.is_complex() else real


def _logsumexp(
    call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]
) -> Callable[..., Any] | None:
    gone = reduced_dims(call)
    axes = sharding_axes(inputs[0], gone)
    if not axes:
        return None
    fold = cross_rank_reducer(inputs[0], axes)
    result = outputs[0].dtype
    shape = outputs[0].local_shape
    is_empty = any(inputs[0].local_shape[dim] == 0 for dim in gone)
    kept = [1 if dim in gone else size for dim, size in enumerate(inputs[0].local_shape)]

    def logsumexp(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        del given, named  # as in the layouts
        wide = tensor.to(accumulation_dtype(result))
        # Of complex numbers the size of their exponentials is that of the real part's.
        real = wide.real if wide.is_complex() else wide
        owned_grad = real.new_full(kept, -math.inf) if is_empty else real.amax(gone, keepdim=True)
        largest = fold(owned_grad, ReduceOp.MAX)
        # Infinities would give NaN.
        shift = torch.where(largest.isinf(), 0.0, largest)
        total = fold((wide - shift).exp().sum(gone, keepdim=True), ReduceOp.SUM)
        return (total.log() + shift).reshape(shape).to(result)

    return logsumexp


def _any_norm(tensor: Any, p: Any = 2, *dims: Any, dtype: Any = None) -> Any:
    """``torch.norm``, which leaves the order out for the usual one; ``dims`` are the dims and keepdim."""
    return torch.linalg.vector_norm(tensor, 2 if p is None else p, *dims, dtype=dtype)


def _norm_each(tensors: Sequence[Any], ord: Any = 2, dtype: Any = None) -> list[Any]:  # noqa: A002 # torch's name
    return [torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in tensors]


_moments_rule = OpRule(strategies=cross_rank_strategies, local=_moments)

RULES |= {
    _aten.var.correction: _moments_rule,
    _aten.std.correction: _moments_rule,
    _aten.var_mean.correction: _moments_rule,
    _aten.std_mean.correction: _moments_rule,
    _aten.linalg_vector_norm.default: OpRule(strategies=cross_rank_strategies, local=_norm),
    _aten.logsumexp.default: OpRule(strategies=cross_rank_strategies, local=_logsumexp),
}

DECOMPOSITIONS |= {
    _aten.norm.Scalar: _any_norm,
    _aten.norm.ScalarOpt_dim: _any_norm,
    _aten.norm.ScalarOpt_dim_dtype: _any_norm,
    _aten.norm.ScalarOpt_dtype: _any_norm,
    _aten._foreach_norm.Scalar: _norm_each,
}

_NOWHERE = torch.iinfo(torch.int64).max


def _find(
    op: ReduceOp, call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]
) -> Callable[..., Any] | None:
    """Each part's extremum and its place in the whole; of equal ones the first counts, as torch has it."""
    spec = inputs[0]
    gone = reduced_dims(call)
    axes = sharding_axes(spec, gone)
    if not axes or any(spec.shape[dim] == 0 for dim in gone):  # of nothing there is none: torch raises
        return None
    fold = cross_rank_reducer(spec, axes)
    dim = call["dim"]
    where = [local_indices(spec, dim) for dim in gone]
    whole = contiguous_stride([spec.shape[dim] for dim in gone])
    sizes = [spec.local_shape[dim] for dim in gone]
    shape = outputs[0].local_shape

    def find(tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
        del given, named  # as in the layouts
        flat, along = (tensor.reshape(-1), 0) if dim is None else (tensor, dim)
        if math.prod(sizes):
            values, index = flat.max(along) if op is ReduceOp.MAX else flat.min(along)
            parts = torch.unravel_index(index, sizes)
            steps = [place[part] * step for place, part, step in zip(where, parts, whole, strict=True)]
            index = torch.stack(steps).sum(0)
        else:
            values = tensor.new_full(shape, extremum_identity(op, tensor.dtype))
            index = torch.full(shape, _NOWHERE, device="cpu")
        values, index = values.reshape(shape), index.reshape(shape)
        best = fold(values, op)
        # A NaN is the extremum wherever there is one.
        is_best = (values == best) | (values != values)  # noqa: PLR0124
        index = fold(torch.where(is_best, index, _NOWHERE), ReduceOp.MIN)
        return (best, index) if len(outputs) == 2 else index

    return find


def _along(linear: Sequence[Sequence[int]], call: OpCall, axis: int) -> list[OpStrategy]:
    """The dim that it runs along must be whole; the others may be divided."""
    ndim = call.inputs[0].ndim
    dim = call["dim"] % max(ndim, 1)
    labels = [None if place == dim else place for place in range(ndim)]
    pattern = EinsumPattern(
        inputs=[labels], outputs=[labels] * len(call.results), linear=() if loses_partials(call) else linear
    )
    return einsum_strategies(pattern, call, axis)


def _picked(call: OpCall, axis: int) -> list[OpStrategy]:
    """Reductions that need a whole dim."""
    gone = reduced_dims(call)
    labels = [None if dim in gone else dim for dim in range(call.inputs[0].ndim)]
    pattern = EinsumPattern(inputs=[labels], outputs=[kept_labels(call)] * len(call.results))
    return einsum_strategies(pattern, call, axis)


_highest = OpRule(strategies=cross_rank_strategies, local=partial(_find, ReduceOp.MAX))
_lowest = OpRule(strategies=cross_rank_strategies, local=partial(_find, ReduceOp.MIN))
_cumsum_rule, _order_rule = OpRule(strategies=partial(_along, ((0,),))), OpRule(strategies=partial(_along, ()))
_pick_rule = OpRule(strategies=_picked)

RULES |= {
    _aten.argmax.default: _highest,
    _aten.argmin.default: _lowest,
    _aten.max.dim: _highest,
    _aten.min.dim: _lowest,
    _aten.cumsum.default: _cumsum_rule,
    _aten.cumprod.default: _order_rule,
    _aten.cummax.default: _order_rule,
    _aten.cummin.default: _order_rule,
    _aten.logcumsumexp.default: _order_rule,
    _aten.topk.default: _order_rule,
    _aten.sort.default: _order_rule,
    _aten.sort.stable: _order_rule,
    _aten.median.default: _pick_rule,
    _aten.median.dim: _pick_rule,
    _aten.nanmedian.default: _pick_rule,
    _aten.nanmedian.dim: _pick_rule,
    _aten.kthvalue.default: _pick_rule,
    _aten.mode.default: _pick_rule,
}
