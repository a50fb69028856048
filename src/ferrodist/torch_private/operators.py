"""Private names of torch's operators.

===================================================  =================================
`OpOverload._schema`, `_op`, `_overloadname`         2.10 to 2.15
`OpOverload._can_decompose`                          2.10 to 2.15
`torch.ops.aten._...`: `private_aten`                2.10 to 2.15, all of `_NAMES`
`torch._C._dispatch_get_all_op_names`                2.10 to 2.15
===================================================  =================================

No program calls an operator that its torch lacks: a placeholder, which equals no operator, stands for it.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NAMES = frozenset(
    {
        "amp_foreach_non_finite_check_and_unscale_",
        "foreach_max",
        "foreach_mm",
        "has_same_storage_numel",
        "linalg_check_errors",
        "linalg_solve_ex",
        "local_scalar_dense",
        "log_softmax",
        "log_softmax_backward_data",
        "native_batch_norm_legit",
        "native_batch_norm_legit_functional",
        "safe_softmax",
        "unique2",
        "unsafe_view",
        "weight_norm_interface",
        "weight_norm_interface_backward",
    }
)


class _Absent:
    """A placeholder for an operator that this torch lacks, with any overload."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, overload: str) -> _Absent:
        if overload.startswith("__"):
            raise AttributeError(overload)
        return _Absent(f"{self.__name__}.{overload}")


class _PrivateAten:
    """`torch.ops.aten._name` as ``private_aten.name``."""

    def __getattr__(self, name: str) -> Any:
        if name not in _NAMES:
            raise AttributeError(f"{name!r} is not among the private operators that are listed here")
        found = getattr(torch.ops.aten, f"_{name}", None) or _Absent(f"aten._{name}")
        setattr(self, name, found)
        return found


private_aten: Any = _PrivateAten()


def schema_of(operator: Any) -> Any:
    """Return the arguments and results of an operator."""
    return operator._schema


def overload_name(operator: Any) -> str:
    """Return the name of an operator's overload, without the operator's."""
    return str(operator._overloadname)


def overloads(names: str) -> Iterator[torch._ops.OpOverload]:
    """The overloads of operators that return tensors, or write them to their first argument; torch may lack some.

    A name is that of an operator, for all of its overloads, or of a single overload as ``where.self``.
    """
    for name, _, only in (name.partition(".") for name in names.split()):
        packet = getattr(torch.ops.aten, name, None)
        for overload in [only] if only else packet.overloads() if packet is not None else ():
            found = getattr(packet, overload, None)
            if found is None:
                continue
            arguments = schema_of(found).arguments
            written = [argument.name for argument in arguments if argument.is_write]
            takes_tensors = any("Tensor" in str(argument.type) for argument in arguments)
            gives_tensors = all(str(one.type) in ("Tensor", "List[Tensor]") for one in schema_of(found).returns)
            if takes_tensors and gives_tensors and (not written or written[0] == arguments[0].name):
                yield found


@functools.cache
def create_operators() -> None:
    """Create the objects of torch's operators, in 0.2 to 0.6 s, since several threads can't do it safely.

    The dispatcher keeps the object of an operator that a tensor subclass has met, but no reference to it. Two threads
    that meet an operator for the first time each create an object; `torch.ops` keeps the second. If the dispatcher has
    the first, later calls crash (torch 2.13 to 2.15), or the call fails with "expected != self_interpreter INTERNAL
    ASSERT FAILED" (2.10).
    """
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        packet, _, overload = operator.partition(".")
        with contextlib.suppress(AttributeError, RuntimeError):  # it has none, as when its module was not imported
            getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def plain_call(operator: Any) -> Callable[..., Any]:
    """Return the C++ call of an operator, which takes less time than the operator."""
    found: Callable[..., Any] = getattr(operator, "_op", operator)
    return found


_METHODS = """
abs.default acos.default add.Tensor add_.Tensor amax.default amin.default atan.default bmm.default ceil.default
clamp.default clone.default copy_.default cos.default detach.default div.Tensor div_.Tensor eq.Scalar
eq.Tensor erf.default exp.default expand.default expm1.default fill_.Scalar floor.default ge.Scalar ge.Tensor gt.Scalar
gt.Tensor isfinite.default isinf.default isnan.default le.Scalar le.Tensor lerp.Scalar log.default log1p.default
log2.default logical_and.default logical_and_.default logical_not.default logical_or.default lt.Scalar lt.Tensor
masked_fill.Scalar masked_fill_.Scalar maximum.default mean.default mean.dim minimum.default mm.default
mul.Tensor mul_.Tensor mv.default ne.Scalar ne.Tensor neg.default permute.default pow.Tensor_Scalar pow.Tensor_Tensor
reciprocal.default relu.default relu_.default round.default rsqrt.default select.int sgn.default sigmoid.default
sign.default sin.default sqrt.default squeeze.dim sub.Tensor sub_.Tensor sum.default sum.dim_IntList t.default
tan.default tanh.default transpose.int tril.default triu.default trunc.default unsqueeze.default view.default
where.self zero_.default
"""


def method_call(operator: Any) -> Callable[..., Any] | None:
    """Return the method of tensors, or torch's function, that calls an operator in less time than `plain_call`.

    It takes the operator's arguments, the first of which is a tensor. None: there is none that is known to be the same.
    """
    name, overload = schema_of(operator).name.removeprefix("aten::"), overload_name(operator) or "default"
    if f"{name}.{overload}" not in _METHODS.split():
        return None
    found: Callable[..., Any] = getattr(torch if name == "where" else torch.Tensor, name)
    return found


def can_decompose(operator: Any) -> bool:
    """Return whether torch can decompose an operator into others."""
    return bool(operator._can_decompose())
