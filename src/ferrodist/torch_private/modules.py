"""Private names of `torch.nn.Module` and of module wrappers.

===================================================  =================
`Module._parameters`, `_buffers`, `_modules`         2.10 to 2.15
`Module._forward_hooks` and three like it            2.10 to 2.15
`Module._compiled_call_impl`                         2.10 to 2.15
`torch.nn.modules.module._has_any_global_hook`       2.10 to 2.15
`torch.nn.modules.batchnorm._BatchNorm`              2.10 to 2.15
`torch.nn.modules.batchnorm._LazyNormBase`           2.10 to 2.15
`torch.compile`'s `_orig_mod`                        2.10 to 2.15
`GradScaler._per_optimizer_states`                   2.10 to 2.15
===================================================  =================

The dictionaries have each parameter, buffer and child under each of its names, unlike the public ``named_...``.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from torch.nn.modules import batchnorm, module

from ferrodist.torch_private.names import missing_error

if TYPE_CHECKING:
    import torch

BatchNormBase = batchnorm._BatchNorm  # the base class of torch's batch norms


def check_input_dim(layer: Any, tensor: torch.Tensor) -> None:
    """Raise if an input has another number of dims than a batch norm takes."""
    layer._check_input_dim(tensor)


def is_lazy_norm(layer: torch.nn.Module) -> bool:
    """Return whether a batch norm is lazy, and not initialized yet."""
    return isinstance(layer, getattr(batchnorm, "_LazyNormBase", ()))


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Return the dictionary of a module's own parameters."""
    return module._parameters


def own_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the dictionary of a module's own buffers."""
    return module._buffers


def own_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Return the dictionary of a module's children."""
    return module._modules


has_global_hooks: Any = getattr(module, "_has_any_global_hook", bool)  # bool() is False
"""Return whether there are hooks of all modules."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether a module has forward or backward hooks."""
    return any(getattr(module, name, None) for name in _HOOKS)


def hooks_of(module: torch.nn.Module) -> list[Any]:
    """Return a module's forward and backward hooks."""
    return [hook for name in _HOOKS for hook in (getattr(module, name, None) or {}).values()]


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether calls of a module are compiled, by its method `compile`."""
    return getattr(module, "_compiled_call_impl", None) is not None


def clear_hooks(module: torch.nn.Module) -> None:
    """Give a module empty dictionaries of forward and backward hooks, of its own."""
    for name in _HOOKS:
        setattr(module, name, OrderedDict())


def compiled_module(module: torch.nn.Module) -> object:
    """Return the original of a compiled module, or None."""
    return getattr(module, "_orig_mod", None)


def found_infinities(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> dict[torch.device, torch.Tensor]:
    """A scaler's writable flags, by device, for infinities in gradients; UnsupportedOpError without them."""
    states = getattr(scaler, "_per_optimizer_states", None)
    if states is None:
        raise missing_error("GradScaler._per_optimizer_states", "gradient scaling with FSDP")
    found: dict[torch.device, torch.Tensor] = states[id(optimizer)]["found_inf_per_device"]
    return found
