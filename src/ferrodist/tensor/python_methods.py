"""Methods of DTensor by which Python uses a tensor: as a number, a list or a text, and in augmented assignments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ferrodist.tensor.placement import Replicate
from ferrodist.tensor.redistribute import full_local
from ferrodist.torch_private.compilers import is_called_by_compiler, is_traced

if TYPE_CHECKING:
    from collections.abc import Callable

_WRITES = {
    "iadd": "add_",
    "isub": "sub_",
    "imul": "mul_",
    "itruediv": "div_",
    "ifloordiv": "floor_divide_",
    "imod": "remainder_",
    "ipow": "pow_",
    "iand": "bitwise_and_",
    "ior": "bitwise_or_",
    "ixor": "bitwise_xor_",
    "ilshift": "bitwise_left_shift_",
    "irshift": "bitwise_right_shift_",
}
"""Methods for augmented assignments. torch's own turn a TypeError, which `UnsupportedOpError` is, into NotImplemented:
then Python evaluates ``x += y`` as ``x = x + y``, and the tensor is not written."""

_NUMBERS = ("__index__", "__int__", "__float__", "__complex__", "__bool__")


def _number(name: str) -> Callable[[Any], Any]:
    own = getattr(torch.Tensor, name)

    def convert(self: Any) -> Any:
        """As of the full tensor; every rank of the mesh calls this.

        Computed on local tensors: `torch.tensor` of a list with DTensors calls this with their dispatch switched off.
        """
        if self.numel() != 1 or is_traced(self):
            return own(self)
        return getattr(full_local(self), name)()

    convert.__name__, convert.__qualname__ = name, f"DTensor.{name}"
    return convert


def _tolist(self: Any) -> Any:
    """The full tensor's elements as nested lists, or as a number; every rank of the mesh calls this."""
    return full_local(self).tolist()


def _format(self: Any, spec: str) -> str:
    """Format the number of a scalar tensor, on every rank of the mesh.

    Without a format spec nothing is sent: a tensor that is not replicated is shown by its placements and shard.
    """
    is_replicated = all(isinstance(one, Replicate) for one in self.placements)
    return format(self.item() if not self.dim() and (spec or is_replicated) else repr(self), spec)


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Refused, since each rank has a shard: call it on `full_tensor` or `to_local`."""
        if name == "untyped_storage" and is_called_by_compiler():  # which asks whether tensors share memory
            return torch.Tensor.untyped_storage(self)
        del self, args, kwargs
        shown = "numpy" if name == "__array__" else name
        raise TypeError(
            f"{shown}() of a DTensor, of which each rank has a shard: call it on full_tensor() or to_local()"
        )

    refuse.__name__, refuse.__qualname__ = name, f"DTensor.{name}"
    return refuse


_REFUSED = ("numpy", "apply_", "share_memory_", "untyped_storage", "__dlpack__", "__array__")

METHODS: dict[str, Any] = {
    **{f"__{operator}__": getattr(torch.Tensor, method) for operator, method in _WRITES.items()},
    **{name: _number(name) for name in _NUMBERS},
    **{name: _refusal(name) for name in _REFUSED},
    "tolist": _tolist,
    "__format__": _format,
}
"""The methods by name."""
