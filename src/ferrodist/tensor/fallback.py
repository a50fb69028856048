"""What computes operators that have no rule: other operators, where these give the same.

What happens to operators without a rule: an error, or whole tensors on every rank where the program allows it.
"""

from __future__ import annotations

import contextlib
import warnings
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.errors import UnsupportedOpError
from ferrodist.tensor.copied_views import ViewKind, actual_kind, after_write, rebind, track
from ferrodist.tensor.op_strategy import bind_arguments, map_tensors, split_arguments
from ferrodist.tensor.ops.random import check_generators
from ferrodist.tensor.ops.table import DECOMPOSITIONS, RULES
from ferrodist.tensor.placement import Replicate, Shard
from ferrodist.tensor.plain_tensors import ACTIVE_CHECK, find_plain, replicate_plain, returned_arguments
from ferrodist.tensor.redistribute import redistribute_local
from ferrodist.tensor.replica_check import describe_module
from ferrodist.tensor.spec import DTensorSpec
from ferrodist.torch_private.autograd import current_graph_task
from ferrodist.torch_private.operators import can_decompose, private_aten, schema_of
from ferrodist.torch_private.tensors import no_torch_dispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ferrodist.mesh import DeviceMesh

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
        return compute_replicated(func, cls, args, kwargs)
    if not _allowed.get():
        raise UnsupportedOpError(
            f"DTensor has no rule for {func}{describe_module()}: write it with operators that docs/dtensor-operators.md"
            " lists, compute it on to_local() or full_tensor(), or put it inside of `with fd.allow_replication():`,"
            " which gathers its inputs"
        )
    warnings.warn(f"{func} has no rule: its inputs are gathered, and every rank computes all of it", stacklevel=4)
    return compute_replicated(func, cls, args, kwargs)


def _is_safe(cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether nothing would be gathered, and a parallel module's code computes, or gradients do: theirs is not chosen.

    So recurrent layers of float32, and what else torch has kernels of its own for, need no consent.
    """
    if ACTIVE_CHECK.get() is None and current_graph_task() == -1:
        return False
    tensors: list[Any] = []
    map_tensors(tensors.append, [*args, *kwargs.values()], cls)
    return all(
        size == 1 or isinstance(one, Replicate)
        for tensor in tensors
        for one, size in zip(tensor._spec.placements, tensor._spec.mesh.shape, strict=True)
    )


def compute_replicated(func: torch._ops.OpOverload, cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute an operator on whole tensors, on every rank.

    Raises:
        UnsupportedOpError: It gives a tensor that it writes to another shape.
        ValueError: A plain tensor among the arguments may be another one on each rank.
    """
    tensors: list[Any] = []
    map_tensors(tensors.append, [*args, *kwargs.values()], cls)
    mesh = tensors[0]._spec.mesh
    given = bind_arguments(func, args, kwargs)
    written = {argument.name for argument in schema_of(func).arguments if argument.is_write}
    # What is only written may be each rank's own.
    read = {name: value for name, value in given.items() if name not in written or find_plain([value]) == []}
    adopted, _ = replicate_plain(func, cls, mesh, list(read.values()), {})
    arguments = given | dict(zip(read, adopted, strict=True))

    def gather(tensor: Any) -> torch.Tensor:
        spec = tensor._spec
        return redistribute_local(tensor._local, spec, spec.replicated)

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


def compute_data_dependent(func: torch._ops.OpOverload, cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Compute an operator whose results have shapes that depend on the elements: those of whole tensors all ranks know.

    Raises:
        UnsupportedOpError: A tensor is divided. Gradients' formulas get theirs as they come, which are gathered.
    """
    tensors: list[Any] = []
    map_tensors(tensors.append, [*args, *kwargs.values()], torch.Tensor)
    divided = [one._spec for one in tensors if isinstance(one, cls) and _is_divided(one._spec)]
    if divided and current_graph_task() == -1:
        name, instead = DATA_DEPENDENT.get(func, (str(func), _WITH_MASKS))
        raise UnsupportedOpError(
            f"{name} gives a tensor whose shape depends on the elements, so the ranks' parts of {divided[0]} have no"
            f" layout: {instead}, or call it on redistribute(fd.Replicate()), which every rank has all of"
        )
    return compute_replicated(func, cls, args, kwargs)


def _is_divided(spec: DTensorSpec) -> bool:
    return any(size > 1 and isinstance(one, Shard) for one, size in zip(spec.placements, spec.mesh.shape, strict=True))


_WITH_MASKS = "use torch.where(mask, x, other), x.masked_fill(mask, value) or x * mask"
_COUNTED = "count with torch.bincount of a full_tensor()"

_aten = torch.ops.aten

DATA_DEPENDENT: dict[torch._ops.OpOverload, tuple[str, str]] = {
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
    spec = tensor._spec
    if tuple(whole.shape) != spec.shape and not tensor.numel():
        # As torch does with an empty tensor; it gives operators such itself.
        rebind(tensor, _wrap(whole, type(tensor), spec.mesh, None))
        return
    if tuple(whole.shape) != spec.shape:
        raise UnsupportedOpError(
            f"{func} gives a tensor of shape {tuple(whole.shape)}, and what it writes to has {tuple(spec.shape)}: a"
            " distributed tensor keeps its shape"
        )
    tensor._local.copy_(redistribute_local(whole.contiguous(), spec.replicated, spec))
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
        spec = DTensorSpec.make(mesh, [Replicate()] * mesh.ndim, plain.shape, plain.dtype, plain.stride())
        if not isinstance(viewed, cls):
            return cls._wrap(plain, spec)
        return cls._wrap_view(plain, spec, viewed, 0, ViewKind.MOVED)

    return map_tensors(wrap, result, torch.Tensor)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def find_substitute(func: torch._ops.OpOverload, cls: type) -> Callable[..., Any]:
    """A function of the operator's arguments that computes it by others, or raises that it has no rule."""
    if func in SUBSTITUTES:
        return SUBSTITUTES[func]
    if func in DATA_DEPENDENT:
        return partial(compute_data_dependent, func, cls)
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
    if not (hasattr(tensor, "_spec") and hasattr(source, "_spec")):
        raise UnsupportedOpError("set_() takes distributed tensors: distribute both, or work on to_local()")
    return rebind(tensor, source)


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
    parts = [tensor._local, source._local if source._view_copy is None else source._view_copy.source]
    if source.numel() == tensor.numel() and actual_kind(ViewKind.COPIED, *parts) is ViewKind.SHARED:
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
        if (found in RULES or found in DECOMPOSITIONS or found in DATA_DEPENDENT) and wanted == [
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
    tensor._local, tensor._spec = view._local, view._spec
    if view._view_copy is not None:
        track(tensor, view._view_copy)
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
        target = out if out.shape == result.shape else rebind(out, result.to(out.dtype, copy=True))
        target.copy_(result)
    return outs[0] if len(outs) == 1 else tuple(outs)
