"""The forwards that `parallelize` puts around those of modules, and what is inside of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


class ForwardWrapper:
    """A forward around another one."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward: Any = forward


def find_forward(module: nn.Module, *kinds: type[ForwardWrapper]) -> Any:
    """The forward inside of a module's wrappers, or the outermost wrapper of one of the kinds."""
    forward: Any = module.forward
    while isinstance(forward, ForwardWrapper) and not isinstance(forward, kinds):
        forward = forward._forward  # noqa: SLF001
    return forward


def has_own_forward(module: nn.Module) -> bool:
    """Return whether the forward inside of wrappers is the class's, and not one that a program has put around it."""
    return getattr(find_forward(module), "__func__", None) is type(module).forward
