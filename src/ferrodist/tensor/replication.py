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
from ferrodist.tensor.comparison import describe_module
from ferrodist.tensor.copied_views import ViewKind, after_write, become
from ferrodist.tensor.generators import check_generators
from ferrodist.tensor.layout import Layout
from ferrodist.tensor.placement import Replicate, Shard
from ferrodist.tensor.plain import INSIDE, adopt, find_plain, returned_arguments
from ferrodist.tensor.redistribution import redistribute_local
from ferrodist.torch_private.autograd import current_graph_task
from ferrodist.torch_private.operators import private_aten, schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ferrodist.mesh import DeviceMesh

__all__ = ["PICKS", "allow_replication", "compute_picks", "compute_whole", "replicate_call"]

_FORWARD_MODE = private_aten.has_same_storage_numel.default
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
    if _is_safe(cls, args, kwargs):
        return compute_whole(func, cls, args, kwargs)
    if not _allowed.get():
        raise UnsupportedOpError(
            f"DTensor has no rule for {func}{describe_module()}: write it with operators that docs/dtensor-operators.md"
            " lists, compute it on to_local() or full_tensor(), or put it inside of `with fd.allow_replication():`,"
            " which gathers its inputs"
        )
    warnings.warn(f"{func} has no rule: its inputs are gathered, and every rank computes all of it", stacklevel=4)
    return compute_whole(func, cls, args, kwargs)


def _is_safe(cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether nothing would be gathered, and a parallel module's code computes, or gradients do: theirs is not chosen.

    So recurrent layers of float32, and what else torch has kernels of its own for, need no consent.
    """
    if INSIDE.get() is None and current_graph_task() == -1:
        return False
    tensors: list[Any] = []
    map_tensors(tensors.append, [*args, *kwargs.values()], cls)
    return all(
        size == 1 or isinstance(one, Replicate)
        for tensor in tensors
        for one, size in zip(tensor._layout.placements, tensor._layout.mesh.shape, strict=True)
    )


def compute_whole(func: torch._ops.OpOverload, cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute an operator on whole tensors, on every rank.

    Raises:
        UnsupportedOpError: It gives a tensor that it writes to another shape.
        ValueError: A plain tensor among the arguments may be another one on each rank.
    """
    tensors: list[Any] = []
    map_tensors(tensors.append, [*args, *kwargs.values()], cls)
    mesh = tensors[0]._layout.mesh
    given = bind_arguments(func, args, kwargs)
    written = {argument.name for argument in schema_of(func).arguments if argument.is_write}
    # What is only written may be each rank's own.
    read = {name: value for name, value in given.items() if name not in written or find_plain([value]) == []}
    adopted, _ = adopt(func, cls, mesh, list(read.values()), {})
    arguments = given | dict(zip(read, adopted, strict=True))

    def gather(tensor: Any) -> torch.Tensor:
        layout = tensor._layout
        return redistribute_local(tensor._local, layout, layout.whole)

    wholes = {name: map_tensors(gather, value, cls) for name, value in arguments.items()}
    for name in written:
        wholes[name] = (
            map_tensors(torch.clone, wholes[name], torch.Tensor) if _has(arguments[name], cls) else given[name]
        )
    if torch.Tag.nondeterministic_seeded in func.tags:
        check_generators(
            mesh, next((one for one in wholes.values() if isinstance(one, torch.Generator)), None), str(func)
        )
    positional, named = split_arguments(func, wholes)
    results = func(*positional, **named)
    for name in written:
        for tensor, whole in zip(_listed(arguments[name]), _listed(wholes[name]), strict=True):
            if isinstance(tensor, cls):
                _write(func, tensor, whole)
    if not schema_of(func).returns:
        return None
    returned = returned_arguments(func)
    several = len(returned) > 1
    made = [
        given[name] if name is not None else _wrap(result, cls, mesh, _viewed(func, place, arguments))
        for place, (name, result) in enumerate(zip(returned, results if several else [results], strict=True))
    ]
    return tuple(made) if several else made[0]


def compute_picks(func: torch._ops.OpOverload, cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Compute an operator whose results have shapes that depend on the elements: those of whole tensors all ranks know.

    Raises:
        UnsupportedOpError: A tensor is divided. Gradients' formulas get theirs as they come, which are gathered.
    """
    tensors: list[Any] = []
    map_tensors(tensors.append, [*args, *kwargs.values()], torch.Tensor)
    divided = [one._layout for one in tensors if isinstance(one, cls) and _is_divided(one._layout)]
    if divided and current_graph_task() == -1:
        name, instead = PICKS.get(func, (str(func), _WITH_MASKS))
        raise UnsupportedOpError(
            f"{name} gives a tensor whose shape depends on the elements, so the ranks' parts of {divided[0]} have no"
            f" layout: {instead}, or call it on redistribute(fd.Replicate()), which every rank has all of"
        )
    return compute_whole(func, cls, args, kwargs)


def _is_divided(layout: Layout) -> bool:
    return any(
        size > 1 and isinstance(one, Shard) for one, size in zip(layout.placements, layout.mesh.shape, strict=True)
    )


_WITH_MASKS = "use torch.where(mask, x, other), x.masked_fill(mask, value) or x * mask"
_COUNTED = "count with torch.bincount of a full_tensor()"

_aten = torch.ops.aten

PICKS: dict[torch._ops.OpOverload, tuple[str, str]] = {
    _aten.masked_select.default: ("torch.masked_select", _WITH_MASKS),
    _aten.masked_scatter.default: ("torch.masked_scatter", _WITH_MASKS),
    _aten.masked_scatter_.default: ("torch.masked_scatter", _WITH_MASKS),
    _aten.nonzero.default: ("torch.nonzero", "work with the mask itself"),
    private_aten.unique2.default: ("torch.unique", _COUNTED),
    _aten.unique_dim.default: ("torch.unique", _COUNTED),
    _aten.unique_consecutive.default: ("torch.unique_consecutive", _COUNTED),
    _aten.bincount.default: ("torch.bincount", "add up torch.nn.functional.one_hot"),
    _aten.repeat_interleave.Tensor: ("torch.repeat_interleave with repeats that are a tensor", "index with a tensor"),
}
"""Operators that are computed of whole tensors only: how users call them, and what to do instead."""


def _has(value: Any, cls: Any) -> bool:
    return any(isinstance(one, cls) for one in _listed(value))


def _write(func: torch._ops.OpOverload, tensor: Any, whole: torch.Tensor) -> None:
    """Have a distributed tensor what an operator wrote to the whole of it."""
    layout = tensor._layout
    if tuple(whole.shape) != layout.shape and not tensor.numel():
        # As torch does with an empty tensor; it gives operators such itself.
        become(tensor, _wrap(whole, type(tensor), layout.mesh, None))
        return
    if tuple(whole.shape) != layout.shape:
        raise UnsupportedOpError(
            f"{func} gives a tensor of shape {tuple(whole.shape)}, and what it writes to has {tuple(layout.shape)}: a"
            " distributed tensor keeps its shape"
        )
    tensor._local.copy_(redistribute_local(whole.contiguous(), layout.whole, layout))
    after_write(tensor)


def _viewed(func: torch._ops.OpOverload, place: int, arguments: Mapping[str, Any]) -> Any:
    """The argument that one of the results is a view of, or None."""
    alias = schema_of(func).returns[place].alias_info
    if alias is None:
        return None
    for argument in schema_of(func).arguments:
        if argument.alias_info is not None and argument.alias_info.before_set & alias.before_set:
            return arguments[argument.name]
    return None


def _wrap(result: Any, cls: Any, mesh: DeviceMesh, viewed: Any) -> Any:
    """A result as distributed tensors, whole on every rank: those of views are never written in vain."""

    def wrap(one: torch.Tensor) -> Any:
        plain = one.resolve_conj().resolve_neg()
        layout = Layout.of(mesh, [Replicate()] * mesh.ndim, plain.shape, plain.dtype, plain.stride())
        if not isinstance(viewed, cls):
            return cls._wrap(plain, layout)
        return cls._wrap_view(plain, layout, viewed, 0, ViewKind.MOVED)

    return map_tensors(wrap, result, torch.Tensor)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
