"""Private names of torch's operators.

===================================================  =================================
`OpOverload._schema`, `_op`, `_overloadname`         2.10 to 2.15
`OpOverload._can_decompose`                          2.10 to 2.15
`torch.ops.aten._...`: `private_aten`                2.10 to 2.15, all of `_NAMES`
===================================================  =================================

An operator that a torch lacks is one that no program calls there: in its place is a name that equals no operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["can_decompose", "overload_name", "plain_call", "private_aten", "schema_of"]

_NAMES = frozenset(
    {
        "conj",
        "foreach_norm",
        "has_same_storage_numel",
        "is_all_true",
        "is_any_true",
        "local_scalar_dense",
        "log_softmax",
        "log_softmax_backward_data",
        "native_batch_norm_legit",
        "native_batch_norm_legit_functional",
        "native_batch_norm_legit_no_training",
        "safe_softmax",
        "scaled_dot_product_flash_attention_for_cpu",
        "scaled_dot_product_flash_attention_for_cpu_backward",
        "softmax",
        "softmax_backward_data",
        "unique2",
        "unsafe_index",
        "unsafe_view",
    }
)


class _Absent:
    """An operator that this torch lacks, with any overload.

    Args:
        name: The operator's name.
    """

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
    """Return the name of an overload, "" for the default one."""
    return str(operator._overloadname)


def plain_call(operator: Any) -> Callable[..., Any]:
    """Return what an operator calls in C++, which takes less time than the operator."""
    found: Callable[..., Any] = getattr(operator, "_op", operator)
    return found


def can_decompose(operator: Any) -> bool:
    """Whether an operator can be computed by others."""
    return bool(operator._can_decompose())
