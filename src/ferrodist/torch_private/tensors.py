"""Private names of torch's tensors and their memory.

===================================================  =========================================
`Tensor._make_wrapper_subclass`                      2.10 to 2.15; there are no DTensors without
`torch._C._disabled_torch_function_impl`             2.10 to 2.15
`torch._C.DisableTorchFunction...`                   2.10 to 2.15
`torch._C._DisableTorchDispatch`                     2.10 to 2.15
`torch._C._storage_Use_Count`, `Tensor._use_count`   2.10 to 2.15; gradients are copied without
`UntypedStorage._cdata`                              2.10 to 2.15
`UntypedStorage._checkpoint_offset`                  2.10 to 2.15, told for the meta device from 2.11 on
`Tensor._indices`, `_values`                         2.10 to 2.15
`_foreach_supported_types`                           2.10 to 2.15, of `torch.optim.optimizer` and of
                                                     `torch.utils._foreach_utils`
===================================================  =========================================
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import optimizer

from ferrodist.torch_private.names import look_up

try:
    from torch.utils import _foreach_utils
except ImportError:  # then what it knows is not to be told
    _foreach_utils = None  # type: ignore[assignment]

__all__ = [
    "accept_in_foreach",
    "base_data",
    "call_plain",
    "checkpoint_offset",
    "is_held_once",
    "make_wrapper",
    "no_torch_dispatch",
    "no_torch_function",
    "parts_of_sparse",
    "plain_functions",
    "storage_identity",
]

make_wrapper: Any = look_up(torch.Tensor, "_make_wrapper_subclass", "distributed tensor")
"""Make a tensor of a subclass that has no memory of its own."""

call_plain: Any = torch._C._disabled_torch_function_impl
"""A ``__torch_function__`` that leaves functions as they are."""

plain_functions: Any = torch._C.DisableTorchFunctionSubclass
"""A block inside of which torch's functions take subclasses for plain tensors; torch documents it for subclasses."""

no_torch_function: Any = torch._C.DisableTorchFunction
"""A block inside of which no subclass and no mode sees functions."""

no_torch_dispatch: Any = look_up(torch._C, "_DisableTorchDispatch", "view in place of a distributed tensor")
"""A block inside of which operators see a wrapper's own shape and stride."""

base_data: Any = torch.Tensor.__dict__.get("data", torch._C.TensorBase.data)
"""The property ``data``."""

_HOLDERS = 2
"""Of the memory of a tensor that nobody else has: the tensor, and what asks for the number."""

_storage_uses = getattr(torch._C, "_storage_Use_Count", None)


def is_held_once(tensor: torch.Tensor) -> bool:
    """Whether nobody else has a tensor, or its memory; False where this torch doesn't say."""
    uses = getattr(tensor, "_use_count", None)
    if uses is None or _storage_uses is None:
        return False
    return bool(uses() == 1 and _storage_uses(tensor.untyped_storage()._cdata) <= _HOLDERS)


def storage_identity(tensor: torch.Tensor) -> int:
    """Return a number that only tensors of one memory have in common."""
    return int(tensor.untyped_storage()._cdata)


def checkpoint_offset(tensor: torch.Tensor) -> Any:
    """Return where in its file a tensor's memory lies, which was loaded to the meta device; None if torch doesn't say.

    torch's documents on serialization tell of it.
    """
    return getattr(tensor.untyped_storage(), "_checkpoint_offset", None)


def parts_of_sparse(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and the values of a sparse tensor, as they are, not coalesced."""
    return tensor._indices(), tensor._values()


def accept_in_foreach(*kinds: tuple[str, type]) -> None:
    """Have torch's optimizers and foreach functions take classes for plain tensors, where they keep lists of such.

    Args:
        kinds: Pairs of "optimizer" or "foreach", and a class.
    """
    owners = {"optimizer": optimizer, "foreach": _foreach_utils}
    for where, kind in kinds:
        supported = getattr(owners[where], "_foreach_supported_types", [kind])
        if kind not in supported:
            supported.append(kind)
