"""Modules on the meta device get memory and values, one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ferrodist.errors import UnsupportedOpError
from ferrodist.torch_private.modules import own_buffers, own_parameters

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["find_initialiser", "has_meta_tensors", "materialise"]


def has_meta_tensors(module: torch.nn.Module) -> bool:
    """Whether some of a module's own parameters and buffers are on the meta device."""
    tensors = (*own_parameters(module).values(), *own_buffers(module).values())
    return any(tensor is not None and tensor.is_meta for tensor in tensors)


def find_initialiser(
    name: str, module: torch.nn.Module, init: Callable[[torch.nn.Module], object] | None
) -> Callable[[torch.nn.Module], object]:
    """What gives a module's own parameters and buffers their values: ``init``, or its ``reset_parameters``.

    Raises:
        UnsupportedOpError: There is none.
    """
    give = init if init is not None else getattr(type(module), "reset_parameters", None)
    if give is None:
        raise UnsupportedOpError(
            f"module {name!r} ({type(module).__name__}) is on the meta device and has no reset_parameters(): pass"
            " init=, a function that gives such a module's parameters and buffers their values"
        )
    return give


def materialise(
    name: str,
    module: torch.nn.Module,
    init: Callable[[torch.nn.Module], object] | None,
    device: torch.device | str = "cpu",
) -> None:
    """Give a module's own parameters and buffers that are on the meta device memory and values; others keep theirs.

    Args:
        name: The module's.
        module: It is changed in place.
        init: Gives its own parameters and buffers their values; None calls its ``reset_parameters``.
        device: Where they get memory.

    Raises:
        UnsupportedOpError: Nothing gives it values.
    """
    if not has_meta_tensors(module):
        return
    give = find_initialiser(name, module, init)
    tensors = {**own_parameters(module), **own_buffers(module)}
    kept = {key: tensor.clone() for key, tensor in tensors.items() if tensor is not None and not tensor.is_meta}
    for key, tensor in tensors.items():
        if tensor is None or not tensor.is_meta:
            continue
        real = torch.empty_like(tensor, device=device)
        if isinstance(tensor, torch.nn.Parameter):
            setattr(module, key, torch.nn.Parameter(real, requires_grad=tensor.requires_grad))
        else:
            own_buffers(module)[key] = real
    give(module)
    for key, values in kept.items():
        getattr(module, key).copy_(values)
