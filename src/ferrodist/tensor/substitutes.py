"""What computes operators that have no rule: other operators, where these give the same."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.errors import UnsupportedOpError
from ferrodist.tensor.copied_views import ViewKind, become, find_kind, watch
from ferrodist.tensor.replication import PICKS, compute_picks, replicate_call
from ferrodist.tensor.rules.table import DECOMPOSITIONS, RULES
from ferrodist.torch_private.operators import can_decompose, schema_of
from ferrodist.torch_private.tensors import no_torch_dispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["copy_to_itself", "find_substitute", "is_copy_to_itself"]


def find_substitute(func: torch._ops.OpOverload, cls: type) -> Callable[..., Any]:
    """A function of the operator's arguments that computes it by others, or raises that it has no rule."""
    if func in SUBSTITUTES:
        return SUBSTITUTES[func]
    if func in PICKS:
        return partial(compute_picks, func, cls)
    if can_decompose(func):
        decomposed: Callable[..., Any] = func.decompose
        return decomposed
    if torch.Tag.inplace_view in func.tags and _without_underscore(func):
        return partial(_view_in_place, func)
    functional = _without_out(func)
    if functional is None:
        return replicate_call(func, cls)
    return partial(_compute_into, functional, [argument.name for argument in _outs(func)])


def _outs(func: torch._ops.OpOverload) -> list[Any]:
    """The arguments that an operator only writes to."""
    return [argument for argument in schema_of(func).arguments if argument.is_out]


def _set(tensor: Any, source: Any) -> Any:
    """Give a tensor the memory of another, and the way that one lies."""
    if not (hasattr(tensor, "_layout") and hasattr(source, "_layout")):
        raise UnsupportedOpError("set_() takes distributed tensors: distribute both, or work on to_local()")
    return become(tensor, source)


SUBSTITUTES: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    **DECOMPOSITIONS,
    torch.ops.aten.set_.source_Tensor: _set,
}


def is_copy_to_itself(func: torch._ops.OpOverload, arguments: Mapping[str, Any]) -> bool:
    """Whether a tensor is copied to one of another shape: a product with ``out`` ends with that.

    It computes into a view of ``out``, and copies that where the wrappers have no memory in common, as these never do.
    """
    if func is not torch.ops.aten.copy_.default:
        return False
    shape, source = arguments["self"].shape, arguments["src"].shape
    pairs = zip(reversed(shape), reversed(source), strict=False)
    return len(source) > len(shape) or any(there not in (here, 1) for here, there in pairs)


def copy_to_itself(tensor: Any, source: Any, non_blocking: bool = False) -> Any:  # noqa: FBT001, FBT002 - as torch has it
    """Return the tensor, of which the other is a view that has been written."""
    del non_blocking
    parts = [tensor._local, source._local if source._copied is None else source._copied.source]
    if source.numel() == tensor.numel() and find_kind(ViewKind.COPIED, *parts) is ViewKind.SHARED:
        return tensor
    raise RuntimeError(
        f"copy_() to a tensor of shape {tuple(tensor.shape)} of one of shape {tuple(source.shape)}, which can't be"
        " broadcast to it"
    )


def _without_underscore(func: torch._ops.OpOverload) -> torch._ops.OpOverloadPacket | None:
    """The operator that gives what this one makes of its first argument, if that has a rule."""
    packet = getattr(torch.ops.aten, schema_of(func).name.partition("::")[2].removesuffix("_"), None)
    found: torch._ops.OpOverloadPacket | None = packet
    return found if found and any(one.overloadpacket is found for one in RULES) else None


def _without_out(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The operator that returns what this one writes to ``out``, or to several such, if that has a rule."""
    arguments = schema_of(func).arguments
    outs = _outs(func)
    if not outs or outs != [argument for argument in arguments if argument.is_write]:
        return None
    wanted = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
    for name in func.overloadpacket.overloads():
        found = getattr(func.overloadpacket, name)
        if (found in RULES or found in DECOMPOSITIONS or found in PICKS) and wanted == [
            (argument.name, str(argument.type)) for argument in schema_of(found).arguments
        ]:
            functional: torch._ops.OpOverload = found
            return functional
    return None


def _view_in_place(func: torch._ops.OpOverload, /, tensor: Any, *args: Any) -> Any:
    """Give a tensor another shape, as ``squeeze_`` does, which products with vectors end with."""
    functional = _without_underscore(func)
    assert functional is not None, "it is looked for before"
    view = functional(tensor, *args)
    with no_torch_dispatch():
        func(tensor, *args)  # the wrapper's own shape and stride
    tensor._local, tensor._layout = view._local, view._layout
    if view._copied is not None:
        watch(tensor, view._copied)
    return tensor


def _compute_into(functional: torch._ops.OpOverload, names: Sequence[str], /, *args: Any, **kwargs: Any) -> Any:
    outs = [kwargs.pop(name) for name in names]
    computed = functional(*args, **kwargs)
    results = [computed] if isinstance(computed, torch.Tensor) else list(computed)
    for out, result in zip(outs, results, strict=True):
        if result.shape != out.shape and out.numel():
            raise UnsupportedOpError(
                f"{functional} gives a tensor of shape {tuple(result.shape)}, and out has {tuple(out.shape)}: a"
                " distributed tensor keeps its shape"
            )
        if not torch.can_cast(result.dtype, out.dtype):
            raise RuntimeError(f"result type {result.dtype} of {functional} can't be cast to that of out, {out.dtype}")
    for out, result in zip(outs, results, strict=True):
        target = out if out.shape == result.shape else become(out, result.to(out.dtype, copy=True))
        target.copy_(result)
    return outs[0] if len(outs) == 1 else tuple(outs)
