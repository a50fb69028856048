"""Plain tensors among distributed ones: an error, but for those that torch itself makes, the same on every rank."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.tensor.call import map_tensors
from ferrodist.tensor.layout import Layout
from ferrodist.tensor.placement import Replicate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.mesh import DeviceMesh

__all__ = ["adopt_plain", "find_plain"]


def find_plain(arguments: Sequence[Any]) -> list[torch.Tensor]:
    """The plain tensors among arguments that are more than one number; numbers are taken as they are."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, list(arguments), torch.Tensor)
    return [tensor for tensor in found if tensor.dim() and not hasattr(tensor, "_layout")]


def adopt_plain(func: torch._ops.OpOverload, cls: Any, mesh: DeviceMesh) -> Callable[..., Any]:
    """What calls an operator that got plain tensors beside distributed ones, or raises.

    Formulas of gradients fill in zeros for what has no gradient, that of a product starts with ones, and one_hot
    compares with the numbers from 0: all are known by their elements, and are whole. Any other tensor may be another
    one on each rank.
    """
    return partial(_call, func, cls, mesh)


def _call(func: torch._ops.OpOverload, cls: Any, mesh: DeviceMesh, /, *args: Any, **kwargs: Any) -> Any:
    def wrap(tensor: torch.Tensor) -> Any:
        if not tensor.dim() or isinstance(tensor, cls):
            return tensor
        if not _is_the_same_everywhere(func, tensor):
            raise ValueError(  # no TypeError, of which operators as + make one of their own
                f"{func} got distributed tensors and a {type(tensor).__name__} of shape {tuple(tensor.shape)}:"
                " distribute it too, as by fd.distribute(tensor, mesh, placements), or work on to_local()"
            )
        whole = [Replicate()] * mesh.ndim
        return cls._wrap(tensor, Layout.of(mesh, whole, tensor.shape, tensor.dtype, tensor.stride()))

    named = {name: map_tensors(wrap, value, torch.Tensor) for name, value in kwargs.items()}
    return func(*[map_tensors(wrap, value, torch.Tensor) for value in args], **named)


def _is_the_same_everywhere(func: torch._ops.OpOverload, tensor: torch.Tensor) -> bool:
    if torch._C._current_graph_task_id() != -1:
        return not tensor.any() or bool((tensor == 1).all())
    numbers = torch.arange(tensor.numel(), dtype=tensor.dtype, device="cpu") if tensor.dtype is torch.int64 else None
    return func is torch.ops.aten.eq.Tensor and numbers is not None and torch.equal(tensor, numbers)
