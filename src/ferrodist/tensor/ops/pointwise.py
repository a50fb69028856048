"""Elementwise operators, with broadcasting, in place, and on lists of tensors."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.tensor.op_strategy import EinsumPattern, OpRule, einsum_strategies, rule_table
from ferrodist.tensor.ops.view import EXTREMA_AND_PRODUCT
from ferrodist.tensor.placement import Partial, Shard
from ferrodist.tensor.spec import DTensorSpec
from ferrodist.torch_private.operators import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.collectives.reduce_op import ReduceOp
    from ferrodist.tensor.op_strategy import LocalFunction, OpCall, OpStrategy

    InputGroups = Sequence[Sequence[int]]  # groups of inputs in which an operator is linear; see `EinsumPattern.linear`


def cast_is_linear(dtype: torch.dtype, result: torch.dtype) -> bool:
    """Return whether partial sums stay such when they are cast: not where fractions are cut off or rounded."""
    is_exact = dtype.is_floating_point and torch.promote_types(dtype, result) is result
    return result is dtype or is_exact


def broadcast_labels(shapes: Sequence[Sequence[int]], ndim: int) -> list[list[int | None]]:
    """Label inputs' dims by the dims of the result, and by None where an element is broadcast."""
    sizes = [max((shape[dim] for shape in shapes if len(shape) >= -dim), default=1) for dim in range(-ndim, 0)]
    return [[ndim + dim if shape[dim] == sizes[dim] else None for dim in range(-len(shape), 0)] for shape in shapes]


def _strategies(
    linear: Callable[[OpCall], InputGroups], commuting: Sequence[ReduceOp], call: OpCall, axis: int
) -> list[OpStrategy]:
    shapes = [spec.shape for spec in call.inputs]
    ndim = max(map(len, shapes))
    num_outputs = max(1, len(schema_of(call.operator).returns))
    # Shards become partial at no cost, but all of the result has to be sent when it is read.
    are_sharded = all(isinstance(spec.placements[axis], Shard) for spec in call.inputs)
    pattern = EinsumPattern(
        inputs=broadcast_labels(shapes, ndim),
        outputs=[range(ndim)] * num_outputs,
        linear=() if are_sharded else linear(call),
        commuting=commuting if len(shapes) == 1 else (),
    )
    return einsum_strategies(pattern, call, axis)


def _rule(linear: Callable[[OpCall], InputGroups], commuting: Sequence[ReduceOp] = (), **options: Any) -> OpRule:
    return OpRule(strategies=partial(_strategies, linear, commuting), **options)


def _linear_in_first(call: OpCall) -> InputGroups:
    """Linear in the first argument, unless that is a number or a plain scalar beside a distributed tensor."""
    first = next(iter(call.arguments.values()))
    return ((0,),) if isinstance(first, DTensorSpec | list | tuple) else ()


def _linear_in_each(call: OpCall) -> InputGroups:
    return tuple((index,) for index in range(len(call.inputs)))


_SUMMANDS = ("self", "other", "src", "end", "tensors1")
_FACTORS = ("alpha", "weight", "non_blocking")


def _linear_in_all(call: OpCall) -> InputGroups:
    """Linear in all tensors, as sums are: not beside scalars, which every rank would add, nor weights, which scale."""
    tensors = 0
    for name, value in call.arguments.items():
        (operand,) = value if isinstance(value, list | tuple) and value else (value,)
        if isinstance(operand, DTensorSpec) and name in _SUMMANDS:
            tensors += 1
        elif name not in _FACTORS or isinstance(operand, DTensorSpec | torch.Tensor):
            return ()
    return (tuple(range(tensors)),)


def _linear_in_dividend(call: OpCall) -> InputGroups:
    """Linear in the dividend, unless quotients are rounded."""
    return _linear_in_first(call) if call.arguments.get("rounding_mode") is None else ()


def _linear_in_copied(call: OpCall) -> InputGroups:
    """Linear unless a copy casts from or to integers: fractions would be cut off, or integers overflow."""
    target, source = (spec.dtype for spec in call.inputs) if len(call.inputs) == 2 else (None, None)
    are_floats = all(one is not None and (one.is_floating_point or one.is_complex) for one in (target, source))
    return _linear_in_all(call) if target is source or are_floats else ()


def _linear_in_add_(call: OpCall) -> InputGroups:
    """Linear in all tensors, and in the tensor that ``add_`` or ``sub_`` with a scalar writes to."""
    is_written = isinstance(call.arguments["self"], DTensorSpec)
    return _linear_in_first(call) if is_written and len(call.inputs) == 1 else _linear_in_all(call)


def _add_scalar_once(call: OpCall) -> LocalFunction | None:
    """Add a scalar to a partial sum on one rank alone."""
    spec = call.placed_inputs[0]
    if len(call.inputs) > 1:
        return None
    is_other = any(at for at, one in zip(spec.coordinate, spec.placements, strict=True) if one == Partial())
    return (lambda tensor, *_, **__: tensor) if is_other else None


_NONLINEAR = """
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
__ilshift__ __irshift__ __lshift__ __rshift__ bitwise_left_shift_ bitwise_right_shift_ digamma_ frac_ gcd gcd_
hardshrink heaviside_ hypot_ i0_ igamma igamma_ igammac igammac_ lcm lcm_ ldexp ldexp_ lgamma_ logit_ mvlgamma
mvlgamma_ nextafter_ polygamma polygamma_ sinc_ softshrink polar complex frexp.Tensor
special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_entr special_erfcx
special_i0e special_i1 special_i1e special_log_ndtr special_ndtri special_modified_bessel_i0
special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0 special_xlog1py
special_zeta special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he
special_laguerre_polynomial_l special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t
special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
special_shifted_chebyshev_polynomial_w
"""

_GRADIENTS = """
threshold_backward gelu_backward silu_backward sigmoid_backward tanh_backward hardtanh_backward
leaky_relu_backward elu_backward softplus_backward hardswish_backward hardsigmoid_backward mish_backward
logit_backward log_sigmoid_backward native_dropout_backward _prelu_kernel_backward
hardshrink_backward softshrink_backward
"""

_NONLINEAR_LISTS = """
_foreach_abs _foreach_abs_ _foreach_acos _foreach_acos_ _foreach_addcdiv _foreach_addcdiv_ _foreach_addcmul
_foreach_addcmul_ _foreach_asin _foreach_asin_ _foreach_atan _foreach_atan_ _foreach_ceil _foreach_ceil_
_foreach_clamp_max _foreach_clamp_max_ _foreach_clamp_min _foreach_clamp_min_ _foreach_cos _foreach_cos_ _foreach_cosh
_foreach_cosh_ _foreach_erf _foreach_erf_ _foreach_erfc _foreach_erfc_ _foreach_exp _foreach_exp_ _foreach_expm1
_foreach_expm1_ _foreach_floor _foreach_floor_ _foreach_frac _foreach_frac_ _foreach_lerp _foreach_lgamma
_foreach_lgamma_ _foreach_log _foreach_log_ _foreach_log10 _foreach_log10_ _foreach_log1p _foreach_log1p_ _foreach_log2
_foreach_log2_ _foreach_maximum _foreach_maximum_ _foreach_minimum _foreach_minimum_ _foreach_pow _foreach_pow_
_foreach_reciprocal _foreach_reciprocal_ _foreach_round _foreach_round_ _foreach_rsqrt _foreach_rsqrt_
_foreach_sigmoid _foreach_sigmoid_ _foreach_sign _foreach_sign_ _foreach_sin _foreach_sin_ _foreach_sinh _foreach_sinh_
_foreach_sqrt _foreach_sqrt_ _foreach_tan _foreach_tan_ _foreach_tanh _foreach_tanh_ _foreach_trunc _foreach_trunc_
_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_
"""

RULES = rule_table(
    (
        _rule(_linear_in_first, EXTREMA_AND_PRODUCT),
        "alias clone detach lift_fresh detach_ positive",
    ),
    (
        _rule(lambda call: ((0,),) if cast_is_linear(call.inputs[0].dtype, call.results[0].dtype) else ()),
        "_to_copy",
    ),
    (_rule(_linear_in_copied), "copy copy_ _foreach_copy_"),
    (
        _rule(_linear_in_first),
        (
            "neg neg_ zero_ real imag conj_physical _conj_physical resolve_conj resolve_neg deg2rad deg2rad_ rad2deg"
            " rad2deg_"
        ),
    ),
    (_rule(_linear_in_all), "add add_ sub sub_ rsub lerp lerp_"),
    (_rule(_linear_in_each), "mul mul_"),
    (_rule(_linear_in_dividend), "div div_"),
    (
        _rule(lambda call: ((1, 2),) if len(call.inputs) == 3 else ()),
        "where.self where.ScalarSelf where.ScalarOther where.Scalar",
    ),
    (_rule(_linear_in_first), _GRADIENTS),
    (_rule(lambda _: ()), _NONLINEAR),
    (_rule(_linear_in_all), "_foreach_add _foreach_add_ _foreach_sub _foreach_sub_ _foreach_lerp_"),
    (_rule(_linear_in_first), "_foreach_clone _foreach_neg _foreach_neg_ _foreach_zero_ _foreach_div _foreach_div_"),
    (_rule(_linear_in_each), "_foreach_mul _foreach_mul_"),
    (_rule(lambda _: ()), _NONLINEAR_LISTS),
    # The later row of an operator counts: above, `_linear_in_all` is for all overloads of a name, these are for some.
    (_rule(_linear_in_add_, local=_add_scalar_once), "add_.Scalar add_.Tensor sub_.Scalar sub_.Tensor"),
    # Operators on local shards run below the layer where torch heeds the conjugate bit.
    (_rule(_linear_in_first, local=lambda _: torch.conj_physical, copies=True), "_conj.default"),
    (
        # Masked elements that become zeros add up to zeros.
        _rule(lambda call: ((0,),) if call["value"] == 0 else (), depends_on_values=True),
        "masked_fill.Scalar masked_fill_.Scalar",
    ),
)
