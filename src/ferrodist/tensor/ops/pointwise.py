"""Operators that compute each element by itself, after broadcasting, in place too, and on lists of tensors."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.op_strategy import EinsumPattern, OpRule, einsum_strategies
from ferrodist.tensor.placement import Partial, Shard
from ferrodist.tensor.spec import DTensorSpec
from ferrodist.torch_private.operators import private_aten, schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ferrodist.tensor.op_strategy import OpCall, OpStrategy

_aten = torch.ops.aten


def cast_is_linear(dtype: torch.dtype, result: torch.dtype) -> bool:
    """Whether parts of a sum that are cast are still parts of it: not of fractions that are cut off, nor rounded."""
    is_exact = dtype.is_floating_point and torch.promote_types(dtype, result) is result
    return result is dtype or is_exact


def overloads(names: Sequence[str]) -> Iterator[torch._ops.OpOverload]:
    """The overloads of operators that return what they compute, or write it to their first argument.

    Args:
        names: Of operators, all of whose overloads are meant, or of single overloads: ``"where.self"``.
    """
    for name, _, only in (name.partition(".") for name in names):
        packet = getattr(_aten, name, None)
        for overload in [only] if only else packet.overloads() if packet is not None else ():
            found = getattr(packet, overload, None)
            if found is None:  # an operator of another torch's
                continue
            arguments = schema_of(found).arguments
            written = [argument.name for argument in arguments if argument.is_write]
            takes_tensors = any("Tensor" in str(argument.type) for argument in arguments)
            gives_tensors = all(str(one.type) in ("Tensor", "List[Tensor]") for one in schema_of(found).returns)
            if takes_tensors and gives_tensors and (not written or written[0] == arguments[0].name):
                yield found


def broadcast_labels(shapes: Sequence[Sequence[int]], ndim: int) -> list[list[int | None]]:
    """The dims of inputs as letters: those of the result, but none where one element is used for all."""
    sizes = [
        max((shape[len(shape) - place] for shape in shapes if len(shape) >= place), default=1)
        for place in range(ndim, 0, -1)
    ]
    return [
        [
            ndim - place if shape[len(shape) - place] == sizes[ndim - place] else None
            for place in range(len(shape), 0, -1)
        ]
        for shape in shapes
    ]


def _strategies(
    linear: Callable[[OpCall], Sequence[Sequence[int]]], commuting: Sequence[ReduceOp], call: OpCall, axis: int
) -> list[OpStrategy]:
    shapes = [spec.shape for spec in call.inputs]
    ndim = max(map(len, shapes))
    labels = broadcast_labels(shapes, ndim)
    num_outputs = max(1, len(schema_of(call.operator).returns))
    # Divided tensors become the parts of a sum for nothing, but all of them have to be sent when it is read.
    are_divided = all(isinstance(spec.placements[axis], Shard) for spec in call.inputs)
    pattern = EinsumPattern(
        inputs=labels,
        outputs=[range(ndim)] * num_outputs,
        linear=() if are_divided else linear(call),
        commuting=commuting if len(shapes) == 1 else (),
    )
    return einsum_strategies(pattern, call, axis)


def _rule(linear: Callable[[OpCall], Sequence[Sequence[int]]], commuting: Sequence[ReduceOp] = ()) -> OpRule:
    return OpRule(strategies=partial(_strategies, linear, commuting))


def _in_nothing(call: OpCall) -> Sequence[Sequence[int]]:
    del call
    return ()


def _in_first(call: OpCall) -> Sequence[Sequence[int]]:
    """Unless that is a plain number, and the first distributed tensor another argument."""
    first = next(iter(call.arguments.values()))
    return () if isinstance(first, torch.Tensor) else ((0,),)


def _in_each(call: OpCall) -> Sequence[Sequence[int]]:
    return tuple((place,) for place in range(len(call.inputs)))


_SUMMANDS = ("self", "other", "src", "end", "tensors1")
_FACTORS = ("alpha", "weight", "non_blocking")


def _in_all(call: OpCall) -> Sequence[Sequence[int]]:
    """As sums are, of tensors: numbers beside them would be added on every rank, and a tensor of weights multiplies."""
    tensors = 0
    for name, value in call.arguments.items():
        (operand,) = value if isinstance(value, list | tuple) and value else (value,)
        if isinstance(operand, DTensorSpec) and name in _SUMMANDS:
            tensors += 1
        elif name not in _FACTORS or isinstance(operand, DTensorSpec | torch.Tensor):
            return ()
    return (tuple(range(tensors)),)


def _in_dividend(call: OpCall) -> Sequence[Sequence[int]]:
    """Unless quotients are rounded."""
    return _in_first(call) if call.arguments.get("rounding_mode") is None else ()


def _in_branches(call: OpCall) -> Sequence[Sequence[int]]:
    return ((1, 2),) if len(call.inputs) == 3 else ()


def _in_masked(call: OpCall) -> Sequence[Sequence[int]]:
    """Zeros in each part are zeros in their sum."""
    return ((0,),) if call.arguments["value"] == 0 else ()


def _in_cast(call: OpCall) -> Sequence[Sequence[int]]:
    """Parts are cast before they are added only where that loses nothing."""
    return ((0,),) if cast_is_linear(call.inputs[0].dtype, call.results[0].dtype) else ()


def _in_copied(call: OpCall) -> Sequence[Sequence[int]]:
    """Unless what is copied is cast to whole numbers, which cuts fractions off, or is such, which may overflow."""
    to, of = (spec.dtype for spec in call.inputs) if len(call.inputs) == 2 else (None, None)
    alike = to is of or all(one is not None and (one.is_floating_point or one.is_complex) for one in (to, of))
    return _in_all(call) if alike else ()


_ALL_FOLDS = (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)

_NAMES: list[tuple[OpRule, str]] = [
    (_rule(_in_first, _ALL_FOLDS), "alias clone detach lift_fresh detach_ positive"),
    (_rule(_in_cast), "_to_copy"),
    (_rule(_in_copied), "copy copy_ _foreach_copy_"),
    (_rule(_in_first), "neg neg_ zero_ real imag conj_physical _conj_physical resolve_conj resolve_neg"),
    (_rule(_in_all), "add add_ sub sub_ rsub lerp lerp_"),
    (_rule(_in_each), "mul mul_"),
    (_rule(_in_dividend), "div div_"),
    (_rule(_in_branches), "where.self where.ScalarSelf where.ScalarOther where.Scalar"),
    (
        _rule(_in_first),
        """
        threshold_backward gelu_backward silu_backward sigmoid_backward tanh_backward hardtanh_backward
        leaky_relu_backward elu_backward softplus_backward hardswish_backward hardsigmoid_backward mish_backward
        logit_backward log_sigmoid_backward native_dropout_backward _prelu_kernel_backward
        """,
    ),
    (
        _rule(_in_nothing),
        """
        abs abs_ acos acos_ acosh acosh_ addcdiv addcdiv_ addcmul addcmul_ angle asin asin_ asinh asinh_ atan atan_
        atan2 atan2_ atanh atanh_ bitwise_and bitwise_and_ bitwise_left_shift bitwise_not bitwise_not_ bitwise_or
        bitwise_or_ bitwise_right_shift bitwise_xor bitwise_xor_ ceil ceil_ celu celu_ clamp clamp_ clamp_max clamp_max_
        clamp_min clamp_min_ copysign copysign_ cos cos_ cosh cosh_ digamma elu elu_ eq eq_ erf erf_ erfc erfc_ erfinv
        erfinv_ exp exp_ exp2 exp2_ expm1 expm1_ fill fill_ floor floor_ floor_divide floor_divide_ fmax fmin fmod fmod_
        frac ge ge_ gelu gelu_ gt gt_ hardsigmoid hardsigmoid_ hardswish hardswish_ hardtanh hardtanh_ heaviside hypot
        i0 isinf isnan isneginf isposinf le le_ leaky_relu leaky_relu_ lgamma log log_ log10 log10_ log1p log1p_
        log2 log2_ log_sigmoid_forward logaddexp logaddexp2 logical_and logical_and_ logical_not logical_not_ logical_or
        logical_or_ logical_xor logical_xor_ logit lt lt_ masked_fill masked_fill_ maximum minimum mish mish_ nan_to_num
        nan_to_num_ ne ne_ nextafter pow pow_ reciprocal reciprocal_ relu relu_ relu6 remainder remainder_
        round round_ rsqrt rsqrt_ sgn sgn_ sigmoid sigmoid_ sign sign_ signbit silu silu_ sin sin_ sinc sinh sinh_
        softplus sqrt sqrt_ square square_ tan tan_ tanh tanh_ threshold threshold_ trunc trunc_ xlogy xlogy_
        isfinite _prelu_kernel
        """,
    ),
    (_rule(_in_all), "_foreach_add _foreach_add_ _foreach_sub _foreach_sub_ _foreach_lerp_"),
    (_rule(_in_first), "_foreach_neg _foreach_neg_ _foreach_zero_ _foreach_div _foreach_div_"),
    (_rule(_in_each), "_foreach_mul _foreach_mul_"),
    (
        _rule(_in_nothing),
        """
        _foreach_abs _foreach_abs_ _foreach_addcdiv _foreach_addcdiv_ _foreach_addcmul _foreach_addcmul_
        _foreach_clamp_max _foreach_clamp_max_ _foreach_clamp_min _foreach_clamp_min_ _foreach_exp _foreach_exp_
        _foreach_lerp _foreach_maximum _foreach_maximum_ _foreach_minimum _foreach_minimum_ _foreach_pow _foreach_pow_
        _foreach_reciprocal _foreach_reciprocal_ _foreach_round _foreach_rsqrt_ _foreach_sign _foreach_sign_
        _foreach_sqrt _foreach_sqrt_ _fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_
        """,
    ),
]


def _in_sum_or_first(call: OpCall) -> Sequence[Sequence[int]]:
    """Parts of a sum that a number is added to stay what they are, where they are written to."""
    is_written = isinstance(call.arguments["self"], DTensorSpec)
    return _in_first(call) if is_written and len(call.inputs) == 1 else _in_all(call)


def _add_number(
    call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]
) -> Callable[..., Any] | None:
    """A number is added to one part of a sum only."""
    del outputs
    spec = inputs[0]
    if len(call.inputs) > 1:
        return None
    parts = [at for at, placement in zip(spec.coordinate, spec.placements, strict=True) if placement == Partial()]
    return _leave if any(parts) else None


def _leave(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
    del given, named
    return tensor


def _conjugate(call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]) -> Callable[..., Any]:
    """In memory: operators on parts, which run below where torch sees to it, would not heed a mark on the tensor."""
    del call, inputs, outputs
    return torch.conj_physical


_add_in_place_rule = OpRule(strategies=partial(_strategies, _in_sum_or_first, ()), local=_add_number)
_masked_rule = OpRule(strategies=partial(_strategies, _in_masked, ()), depends_on_values=True)

RULES: dict[torch._ops.OpOverload, OpRule] = {
    **{overload: rule for rule, names in _NAMES for overload in overloads(names.split())},
    **dict.fromkeys((_aten.add_.Scalar, _aten.add_.Tensor, _aten.sub_.Scalar, _aten.sub_.Tensor), _add_in_place_rule),
    private_aten.conj.default: OpRule(strategies=partial(_strategies, _in_first, ()), local=_conjugate, copies=True),
    _aten.masked_fill.Scalar: _masked_rule,
    _aten.masked_fill_.Scalar: _masked_rule,
}
