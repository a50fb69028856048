"""What happens to operators without a rule: an error, or whole tensors on every rank where the program allows it."""

from __future__ import annotations

import contextlib
import warnings
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.errors import UnsupportedOpError
from ferrodist.tensor.call import bind_arguments, map_tensors, split_arguments
from ferrodist.tensor.layout import Layout
from ferrodist.tensor.placement import Replicate
from ferrodist.tensor.redistribution import redistribute_local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["allow_replication", "replicate_call"]

_FORWARD_MODE = torch.ops.aten._has_same_storage_numel.default
"""What forward-mode differentiation asks of a tensor and its tangent before anything else, and nothing else does."""

_allowed: ContextVar[bool] = ContextVar("allowed", default=False)


@contextlib.contextmanager
def allow_replication() -> Iterator[None]:
    """Inside, an operator that DTensor has no rule for is computed on whole tensors, on every rank, with a warning.

    Its inputs are gathered, and its outputs are `Replicate`. Without it such an operator raises `UnsupportedOpError`.
    """
    before = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(before)


def replicate_call(func: torch._ops.OpOverload, cls: Any) -> Callable[..., Any]:
    """What calls an operator without a rule, or raises."""
    return partial(_call, func, cls)


def _call(func: torch._ops.OpOverload, cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    if func is _FORWARD_MODE:
        raise UnsupportedOpError(
            "distributed tensors are not differentiated forward (torch.func.jvp, jacfwd, forward_ad): use backward(),"
            " torch.func.vjp or jacrev, or differentiate a function of full_tensor()"
        )
    if not _allowed.get():
        raise UnsupportedOpError(
            f"DTensor has no rule for {func}: write it with operators that docs/dtensor-operators.md lists, compute it"
            " on to_local() or full_tensor(), or put it inside of `with fd.allow_replication():`, which gathers its"
            " inputs"
        )
    warnings.warn(f"{func} has no rule: its inputs are gathered, and every rank computes all of it", stacklevel=4)
    arguments = bind_arguments(func, args, kwargs)

    def gather(tensor: Any) -> torch.Tensor:
        layout = tensor._layout
        whole = redistribute_local(tensor._local, layout, layout.whole)
        return whole.clone() if whole is tensor._local else whole

    tensors: list[Any] = []
    map_tensors(tensors.append, list(arguments.values()), cls)
    mesh = tensors[0]._layout.mesh
    wholes = {name: map_tensors(gather, value, cls) for name, value in arguments.items()}
    positional, named = split_arguments(func, wholes)
    results = func(*positional, **named)
    written = [argument.name for argument in func._schema.arguments if argument.is_write]
    for name in written:
        for tensor, whole in zip(_listed(arguments[name]), _listed(wholes[name]), strict=True):
            layout = tensor._layout
            tensor._local.copy_(redistribute_local(whole, layout.whole, layout))
    if written:
        return arguments[written[0]]

    def wrap(result: torch.Tensor) -> Any:
        layout = Layout.of(mesh, [Replicate()] * mesh.ndim, result.shape, result.dtype, result.stride())
        return cls._wrap(result, layout)

    return map_tensors(wrap, results, torch.Tensor)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
