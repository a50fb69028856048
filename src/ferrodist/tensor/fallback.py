"""Fallbacks for operators without a rule: other operators, full tensors on every rank, or an error."""

from __future__ import annotations

import contextlib
import warnings
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.errors import UnsupportedOpError
from ferrodist.tensor.copied_views import ViewKind, actual_kind, after_write, rebind, register_view
from ferrodist.tensor.op_strategy import bind_arguments, find_all, map_tensors, split_arguments
from ferrodist.tensor.ops.random import check_generators
from ferrodist.tensor.ops.table import DECOMPOSITIONS, RULES
from ferrodist.tensor.placement import Replicate, Shard
from ferrodist.tensor.plain_tensors import (
    ACTIVE_CHECK,
    aliased_argument,
    find_check,
    find_compiled_check,
    find_plain,
    replicate_plain,
    returned_arguments,
)
from ferrodist.tensor.redistribute import full_local, redistribute_local
from ferrodist.tensor.redistribute_plan import make_plan
from ferrodist.tensor.replica_check import describe_module, describe_path
from ferrodist.tensor.spec import DTensorSpec
from ferrodist.torch_private.autograd import current_graph_task
from ferrodist.torch_private.compilers import is_traced
from ferrodist.torch_private.operators import can_decompose, overload_name, private_aten, schema_of
from ferrodist.torch_private.tensors import call_heeding_conjugates, no_torch_dispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ferrodist.mesh import DeviceMesh

_FORWARD_MODE = private_aten.has_same_storage_numel.default
"""The first operator that forward-mode differentiation calls, and nothing else does."""

_allowed: ContextVar[bool] = ContextVar("allowed", default=False)


@contextlib.contextmanager
def allow_replication() -> Iterator[None]:
    """Inside, an operator that DTensor has no rule for is computed on full tensors, on every rank, with a warning.

    Its inputs are gathered, and its outputs are `Replicate`. So is an operator whose output shape depends on the
    elements. Outside, both raise `UnsupportedOpError`, but in a model of ``parallelize(..., fallback="replicate")``.
    """
    before = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(before)


def _replicate_or_raise(func: torch._ops.OpOverload, dtensor_type: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Compute an operator without a rule on full tensors if that is allowed."""
    if func is _FORWARD_MODE:
        raise UnsupportedOpError(
            "distributed tensors are not differentiated forward (torch.func.jvp, jacfwd, forward_ad): use backward(),"
            " torch.func.vjp or jacrev, or differentiate a function of full_tensor()"
        )
    if _needs_no_consent(dtensor_type, args, kwargs):
        return compute_replicated(func, dtensor_type, args, kwargs)
    if not _may_gather(func, dtensor_type, args, kwargs):
        raise UnsupportedOpError(
            f"DTensor has no rule for {func}{describe_module()}: write it with operators that docs/dtensor-operators.md"
            " lists, compute it on to_local() or full_tensor(), or put it inside of `with fd.allow_replication():`,"
            " which gathers its inputs"
        )
    return compute_replicated(func, dtensor_type, args, kwargs)


def _may_gather(func: torch._ops.OpOverload, dtensor_type: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator's inputs may be gathered, by `allow_replication` or in a parallel model; warns."""
    specs = [one._spec for one in find_all(dtensor_type, [*args, *kwargs.values()])]
    is_backward = current_graph_task() != -1
    check = find_check(specs[0].mesh, is_backward=is_backward) or find_compiled_check(specs[0].mesh)
    if check is not None and check.replication_warnings is not None:
        size_bytes = sum(make_plan(spec, spec.replicated).size_bytes for spec in specs)
        check.replication_warnings.warn(func, describe_path(check.path, is_backward=is_backward), size_bytes)
        return True
    if _allowed.get():
        warnings.warn(f"{func} has no rule: its inputs are gathered, and every rank computes all of it", stacklevel=5)
        return True
    return False


def _needs_no_consent(dtensor_type: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether nothing would be gathered, in a parallel module or a backward, whose operators users don't choose.

    So recurrent layers of float32, and other layers with torch kernels of their own, need no consent.
    """
    if ACTIVE_CHECK.get() is None and current_graph_task() == -1:
        return False
    tensors = find_all(dtensor_type, [*args, *kwargs.values()])
    return all(
        size == 1 or isinstance(one, Replicate)
        for tensor in tensors
        for one, size in zip(tensor._spec.placements, tensor._spec.mesh.shape, strict=True)
    )


def compute_replicated(
    func: torch._ops.OpOverload, dtensor_type: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Compute an operator on full tensors, on every rank; ValueError if a plain argument may differ between ranks."""
    mesh = find_all(dtensor_type, [*args, *kwargs.values()])[0]._spec.mesh
    given = bind_arguments(func, args, kwargs)
    written = {argument.name for argument in schema_of(func).arguments if argument.is_write}
    # Plain tensors that are only written may differ between ranks.
    read = {name: value for name, value in given.items() if name not in written or find_plain([value]) == []}
    replicated, _ = replicate_plain(func, dtensor_type, mesh, list(read.values()), {})
    arguments: dict[Any, Any] = given | dict(zip(read, replicated, strict=True))
    full = {name: map_tensors(full_local, value, dtensor_type) for name, value in arguments.items()}
    for name in written:
        is_distributed = any(isinstance(one, dtensor_type) for one in _listed(arguments[name]))
        full[name] = map_tensors(torch.clone, full[name], torch.Tensor) if is_distributed else given[name]
    if torch.Tag.nondeterministic_seeded in func.tags:
        generator = next((one for one in full.values() if isinstance(one, torch.Generator)), None)
        if any(map(is_traced, find_all(torch.Tensor, [*full.values()]))):
            raise UnsupportedOpError(f"{func} of distributed tensors is not compiled: call it outside of torch.compile")
        check_generators(mesh, generator, str(func))
    positional, named = split_arguments(func, full)
    results = call_heeding_conjugates(func, *positional, **named)
    for name in written:
        for tensor, value in zip(_listed(arguments[name]), _listed(full[name]), strict=True):
            if isinstance(tensor, dtensor_type):
                _write(func, tensor, value)
    if not schema_of(func).returns:
        return None
    returned = returned_arguments(func)
    viewed = [arguments.get(aliased_argument(func, one)) for one in schema_of(func).returns]
    has_several = len(returned) > 1
    made = [
        given[name] if name is not None else _wrap(result, dtensor_type, mesh, base)
        for name, result, base in zip(returned, results if has_several else [results], viewed, strict=True)
    ]
    return tuple(made) if has_several else made[0]


def compute_data_dependent(func: torch._ops.OpOverload, dtensor_type: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Compute an operator whose output shapes depend on the elements; UnsupportedOpError if an input is sharded.

    Those of a gradient's formula are gathered instead, as are those of operators without a rule where that is allowed.
    """
    tensors = find_all(torch.Tensor, [*args, *kwargs.values()])
    sharded = [one._spec for one in tensors if isinstance(one, dtensor_type) and _is_sharded(one._spec)]
    if sharded and current_graph_task() == -1 and not _may_gather(func, dtensor_type, args, kwargs):
        name, instead = DATA_DEPENDENT.get(func, (str(func), _WITH_MASKS))
        raise UnsupportedOpError(
            f"{name} gives a tensor whose shape depends on the elements, so the ranks' shards of {sharded[0]} have no"
            f" layout: {instead}, or call it on redistribute(fd.Replicate()), which every rank has all of"
        )
    return compute_replicated(func, dtensor_type, args, kwargs)


def _as_strided(tensor: Any, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
    """A view of memory: of a replicated tensor, or of a gathered one where operators without a rule may gather.

    Autograd takes such views of replicated tensors, for the gradient of writes to a view.
    """
    spec: DTensorSpec = tensor._spec
    dtensor_type = type(tensor)
    local = tensor._local
    start = tensor.storage_offset()
    offset = 0 if storage_offset is None else storage_offset - start
    if all(placement == Replicate() for placement in spec.placements) and (
        local.numel() <= 1 or local.stride() == spec.stride
    ):
        view = local.as_strided(size, stride, local.storage_offset() + offset)
        result = DTensorSpec.make(spec.mesh, spec.placements, view.shape, spec.dtype, view.stride())
        return dtensor_type._wrap_view(view, result, tensor, offset)
    if (
        tuple(size) == spec.shape
        and not offset
        and all(length == 1 or one == other for length, one, other in zip(size, stride, spec.stride, strict=True))
    ):
        return tensor.view(size)
    if start or not _is_dense(spec) or not _may_gather(_aten.as_strided.default, dtensor_type, [tensor], {}):
        raise UnsupportedOpError(
            f"torch.as_strided is of memory, of which ranks have parts: {spec}; use views that name dims, or"
            " as_strided on full_tensor()"
        )
    full = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu").copy_(full_local(tensor))
    return _wrap(full.as_strided(size, stride, offset), dtensor_type, spec.mesh, tensor)


DECOMPOSITIONS[torch.ops.aten.as_strided.default] = _as_strided  # here, since it may gather


def _is_dense(spec: DTensorSpec) -> bool:
    """Return whether the tensor's elements fill its memory, each once."""
    expected = 1
    for stride, size in sorted(pair for pair in zip(spec.stride, spec.shape, strict=True) if pair[1] > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _is_sharded(spec: DTensorSpec) -> bool:
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
"""Operators whose output shapes depend on the elements: how users call them, and what to use instead."""


def _write(func: torch._ops.OpOverload, tensor: Any, full: torch.Tensor) -> None:
    """Write to a distributed tensor what an operator wrote to the full tensor."""
    spec = tensor._spec
    if tuple(full.shape) != spec.shape and not tensor.numel():
        # torch gives an empty tensor the result's shape, and calls operators with such itself.
        rebind(tensor, _wrap(full, type(tensor), spec.mesh, None))
        return
    if tuple(full.shape) != spec.shape:
        raise UnsupportedOpError(
            f"{func} gives a tensor of shape {tuple(full.shape)}, and what it writes to has {tuple(spec.shape)}: a"
            " distributed tensor keeps its shape"
        )
    tensor._local.copy_(redistribute_local(full.contiguous(), spec.replicated, spec))
    after_write(tensor)


def _wrap(result: Any, dtensor_type: Any, mesh: DeviceMesh, viewed: Any) -> Any:
    """A result as replicated distributed tensors; those that are views refuse writes, which would be lost."""

    def wrap(one: torch.Tensor) -> Any:
        if one.layout is not torch.strided:
            raise UnsupportedOpError(
                f"distributed tensors are strided, and this result has layout {one.layout}: make it of full_tensor()"
            )
        plain = one.resolve_conj().resolve_neg()
        spec = DTensorSpec.make(mesh, [Replicate()] * mesh.ndim, plain.shape, plain.dtype, plain.stride())
        if not isinstance(viewed, dtensor_type):
            return dtensor_type._wrap(plain, spec)
        return dtensor_type._wrap_view(plain, spec, viewed, 0, ViewKind.MOVED)

    return map_tensors(wrap, result, torch.Tensor)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def find_substitute(  # noqa: PLR0911 - a return for each kind of substitute
    func: torch._ops.OpOverload, dtensor_type: Any
) -> Callable[..., Any]:
    """A function that computes an operator without a rule by others, on full tensors, or raises."""
    if func in DECOMPOSITIONS:
        return DECOMPOSITIONS[func]
    if func in DATA_DEPENDENT:
        return partial(compute_data_dependent, func, dtensor_type)
    if can_decompose(func):
        decomposed: Callable[..., Any] = func.decompose
        return decomposed
    if torch.Tag.inplace_view in func.tags and (view := _functional_view(func)) is not None:
        return partial(_view_in_place, func, view)
    if (new := _without_underscore(func)) is not None:
        return partial(_compute_over, new)
    outs = [argument.name for argument in schema_of(func).arguments if argument.is_out]
    if (functional := _without_out(func, outs)) is not None:
        return partial(_compute_into, functional, outs)
    return partial(_replicate_or_raise, func, dtensor_type)


def is_copy_of_own_view(func: torch._ops.OpOverload, arguments: Mapping[str, Any]) -> bool:
    """Return whether a call copies a tensor's own view to the tensor, as `torch.matmul` with ``out`` does at its end.

    It computes into a view of ``out`` of another shape, and copies that to ``out`` if the two share no memory, which
    wrappers never do.
    """
    if func is not torch.ops.aten.copy_.default:
        return False
    shape, source = arguments["self"].shape, arguments["src"].shape
    pairs = zip(reversed(shape), reversed(source), strict=False)
    return len(source) > len(shape) or any(other not in (size, 1) for size, other in pairs)


def ignore_copy_of_own_view(tensor: Any, source: Any, non_blocking: bool = False) -> Any:  # noqa: FBT001, FBT002 - as torch has it
    """Return the tensor: the source, a view of it, has been written; RuntimeError if it is no view of the tensor."""
    del non_blocking
    shards = [tensor._local, source._local if source._view_copy is None else source._view_copy.source]
    if source.numel() == tensor.numel() and actual_kind(ViewKind.COPIED, *shards) is ViewKind.SHARED:
        return tensor
    raise RuntimeError(
        f"copy_() to a tensor of shape {tuple(tensor.shape)} of one of shape {tuple(source.shape)}, which can't be"
        " broadcast to it"
    )


def _functional_view(func: torch._ops.OpOverload) -> Any:
    """The operator that returns the view that this one makes of its argument in place; None if that has no rule."""
    packet = getattr(torch.ops.aten, schema_of(func).name.partition("::")[2].removesuffix("_"), None)
    is_known = packet is _aten.as_strided or any(one.overloadpacket is packet for one in RULES)
    return packet if is_known else None


def _without_out(func: torch._ops.OpOverload, outs: Sequence[str]) -> Any:
    """The operator that returns what this one writes to ``out`` arguments; None if that can't be computed."""
    arguments = schema_of(func).arguments
    if not outs or list(outs) != [argument.name for argument in arguments if argument.is_write]:
        return None
    wanted = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
    for found in (getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads()):
        taken = [(argument.name, str(argument.type)) for argument in schema_of(found).arguments]
        if taken == wanted and (found in RULES or found in DECOMPOSITIONS or found in DATA_DEPENDENT):
            return found
    return None


def _without_underscore(func: torch._ops.OpOverload) -> Any:
    """The operator that returns as a new tensor what this one writes to its first argument; None if there is none."""
    name = schema_of(func).name.partition("::")[2]
    packet = getattr(_aten, name.removesuffix("_"), None)
    found = getattr(packet, overload_name(func), None) if name.endswith("_") else None
    arguments, taken = schema_of(func).arguments, schema_of(found).arguments if found is not None else []
    is_same = [(one.name, str(one.type)) for one in arguments] == [(one.name, str(one.type)) for one in taken]
    return found if is_same and (found in RULES or found in DECOMPOSITIONS) else None


def _compute_over(functional: torch._ops.OpOverload, /, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute an operator's new tensor, and write it over the first argument."""
    result = functional(tensor, *args, **kwargs)
    if result.shape != tensor.shape:
        raise UnsupportedOpError(
            f"{functional} gives a tensor of shape {tuple(result.shape)}, and what is written has"
            f" {tuple(tensor.shape)}: a distributed tensor keeps its shape"
        )
    if not torch.can_cast(result.dtype, tensor.dtype):
        raise RuntimeError(f"result type {result.dtype} of {functional} can't be cast to {tensor.dtype}")
    return tensor.copy_(result)


def _view_in_place(func: torch._ops.OpOverload, functional: Callable[..., Any], /, tensor: Any, *args: Any) -> Any:
    """Compute an in-place view operator by its functional form; `torch.matmul` of vectors ends with ``squeeze_``."""
    view = functional(tensor, *args)
    with no_torch_dispatch():
        func(tensor, *args)  # the wrapper's own shape and strides
    tensor._local, tensor._spec = view._local, view._spec
    if view._view_copy is not None:
        register_view(tensor, view._view_copy)
    return tensor


def _compute_into(functional: torch._ops.OpOverload, names: Sequence[str], /, *args: Any, **kwargs: Any) -> Any:
    """Compute an operator and copy its results to the ``out`` arguments of some names."""
    outs = [out for name in names for out in _listed(kwargs.pop(name))]
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
        if not hasattr(out, "_spec"):  # torch makes such itself, for results that it drops
            out.resize_(result.shape).copy_(full_local(result))
            continue
        target = out if out.shape == result.shape else rebind(out, result.to(out.dtype, copy=True))
        target.copy_(result)
    returns = len(schema_of(functional).returns) == len(outs)
    return (outs[0] if len(outs) == 1 else tuple(outs)) if returns else None
