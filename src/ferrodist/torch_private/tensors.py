"""Private names of torch's tensors and their storage.

===================================================  =========================================
`Tensor._make_wrapper_subclass`                      2.10 to 2.15; there are no DTensors without
`torch._C._disabled_torch_function_impl`             2.10 to 2.15
`torch._C.DisableTorchFunction...`                   2.10 to 2.15
`torch._C._DisableTorchDispatch`                     2.10 to 2.15
`torch._C._ForceDispatchKeyGuard`, `_dispatch_tls_`  2.10 to 2.15; operators ignore conjugate bits without
`torch._C._storage_Use_Count`, `Tensor._use_count`   2.10 to 2.15; gradients are copied without
`UntypedStorage._cdata`                              2.10 to 2.15
`UntypedStorage._checkpoint_offset`                  2.10 to 2.15, set on the meta device from 2.11 on
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
except ImportError:  # then it has no list of types to extend
    _foreach_utils = None  # type: ignore[assignment]

make_wrapper: Any = look_up(torch.Tensor, "_make_wrapper_subclass", "distributed tensor")
"""Make a tensor of a wrapper subclass, without memory of its own."""

call_plain: Any = torch._C._disabled_torch_function_impl  # a `__torch_function__` that does nothing special

plain_functions: Any = torch._C.DisableTorchFunctionSubclass
"""A context manager in which torch's functions treat subclasses as plain tensors; documented for subclasses."""

no_torch_function: Any = torch._C.DisableTorchFunction
"""A context manager that disables ``__torch_function__`` of subclasses and modes."""

no_torch_dispatch: Any = look_up(torch._C, "_DisableTorchDispatch", "view in place of a distributed tensor")
"""A context manager in which operators act on a wrapper's own shape and strides."""

base_data: Any = torch.Tensor.__dict__.get("data", torch._C.TensorBase.data)  # the property `data`

_STORAGE_REFS = 2  # references to the storage of a tensor that nobody else holds: the tensor's, and the counting

_storage_uses = getattr(torch._C, "_storage_Use_Count", None)


_force_keys = getattr(torch._C, "_ForceDispatchKeyGuard", None)


def call_heeding_conjugates(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function in a dispatcher that heeds conjugate and negative bits; its results have neither.

    Inside of ``__torch_dispatch__`` torch leaves out the layer that does, and an operator that conjugates on its way,
    as gradients and decompositions of matrices do, computes with the wrong values.
    """
    if _force_keys is None:
        return function(*args, **kwargs)
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative, torch._C.DispatchKey.ZeroTensor):
        excluded = excluded.remove(key)
    with _force_keys(torch._C._dispatch_tls_local_include_set(), excluded):
        result = function(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            return result.resolve_conj().resolve_neg()
        if not isinstance(result, list | tuple):
            return result
        resolved = [one.resolve_conj().resolve_neg() if isinstance(one, torch.Tensor) else one for one in result]
        return resolved if isinstance(result, list) else tuple(resolved)


def is_held_once(tensor: torch.Tensor) -> bool:
    """Return whether nobody else holds a tensor or its storage; False if this torch has no reference counts."""
    uses = getattr(tensor, "_use_count", None)
    if uses is None or _storage_uses is None:
        return False
    return bool(uses() == 1 and _storage_uses(tensor.untyped_storage()._cdata) <= _STORAGE_REFS)


def storage_identity(tensor: torch.Tensor) -> int:
    """Return an id of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def checkpoint_offset(tensor: torch.Tensor) -> Any:
    """Return the file offset of a tensor loaded to the meta device, or None; see torch's serialization notes."""
    return getattr(tensor.untyped_storage(), "_checkpoint_offset", None)


def parts_of_sparse(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and the values of a sparse tensor, without coalescing it."""
    return tensor._indices(), tensor._values()


def accept_in_foreach(*kinds: tuple[str, type]) -> None:
    """Let torch's optimizers or foreach functions treat classes as plain tensors: pairs of "optimizer" or "foreach"."""
    owners = {"optimizer": optimizer, "foreach": _foreach_utils}
    for where, kind in kinds:
        supported = getattr(owners[where], "_foreach_supported_types", [kind])
        if kind not in supported:
            supported.append(kind)
