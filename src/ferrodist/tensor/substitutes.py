"""What computes operators that have no rule: other operators, where these give the same."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.errors import UnsupportedOpError
from ferrodist.tensor.copied_views import watch
from ferrodist.tensor.replication import replicate_call
from ferrodist.tensor.rules.table import DECOMPOSITIONS, RULES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["find_substitute"]


def find_substitute(func: torch._ops.OpOverload, cls: type) -> Callable[..., Any]:
    """A function of the operator's arguments that computes it by others, or raises that it has no rule."""
    if func in DECOMPOSITIONS:
        return DECOMPOSITIONS[func]
    if func._can_decompose():
        decomposed: Callable[..., Any] = func.decompose
        return decomposed
    if torch.Tag.inplace_view in func.tags:
        return partial(_view_in_place, func)
    functional = _without_out(func)
    return replicate_call(func, cls) if functional is None else partial(_compute_into, functional)


def _without_out(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The operator that returns what this one writes to ``out``, if that has a rule."""
    if [argument.name for argument in func._schema.arguments if argument.is_write] != ["out"]:
        return None
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments if argument.name != "out"]
    for name in func.overloadpacket.overloads():
        found = getattr(func.overloadpacket, name)
        if found in RULES and wanted == [(argument.name, str(argument.type)) for argument in found._schema.arguments]:
            functional: torch._ops.OpOverload = found
            return functional
    return None


def _view_in_place(func: torch._ops.OpOverload, /, tensor: Any, *args: Any) -> Any:
    """Give a tensor another shape, as ``squeeze_`` does, which products with vectors end with."""
    functional = getattr(torch.ops.aten, func._schema.name.partition("::")[2].removesuffix("_"))
    view = functional(tensor, *args)
    with torch._C._DisableTorchDispatch():
        func(tensor, *args)  # the wrapper's own shape and stride
    tensor._local, tensor._layout = view._local, view._layout
    if view._copied is not None:
        watch(tensor, view._copied)
    return tensor


def _compute_into(functional: torch._ops.OpOverload, /, *args: Any, out: Any, **kwargs: Any) -> Any:
    result = functional(*args, **kwargs)
    if result.shape != out.shape:
        raise UnsupportedOpError(
            f"{functional} gives a tensor of shape {tuple(result.shape)}, and out has {tuple(out.shape)}: a distributed"
            " tensor keeps its shape"
        )
    return out.copy_(result)
