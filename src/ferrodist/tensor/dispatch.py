"""Dispatch of operators on distributed tensors: each kind of call is prepared once and cached.

What is cached is a `CachedDispatch`. Its key is the operator, the specs of the distributed tensors, and the other
arguments; of floats only that they are there, unless the rule depends on their values. `DTensor` looks up the cache
itself and runs the common kinds inline, which takes less time than a call would.

The parameter ``dtensor_type`` is always `DTensor`: this module can't import it, as its module imports this one. That
holds for `fallback` and `plain_tensors` too.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.errors import UnsupportedOpError
from ferrodist.tensor.copied_views import VIEW_COPIES, ViewKind, actual_kind, after_write, check_writable
from ferrodist.tensor.fallback import (
    compute_data_dependent,
    find_substitute,
    ignore_copy_of_own_view,
    is_copy_of_own_view,
)
from ferrodist.tensor.op_strategy import OpCall, bind_arguments, find_all, map_tensors, select_strategy, split_arguments
from ferrodist.tensor.ops.table import RULES
from ferrodist.tensor.plain_tensors import (
    REFUSE_SCALARS,
    find_plain,
    plain_caller,
    record_scalars,
    returned_arguments,
)
from ferrodist.tensor.redistribute import redistribute_local
from ferrodist.tensor.spec import DTensorSpec
from ferrodist.torch_private.modes import no_modes, num_dispatch_modes
from ferrodist.torch_private.operators import method_call, plain_call, private_aten, schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.mesh import DeviceMesh
    from ferrodist.tensor.op_strategy import OpRule

KEYED_BY_VALUE: Any = object()
"""A cache entry that refers to another one, whose key is `key_by_value`."""

_UNSAFE_VIEW = private_aten.unsafe_view.default
"""A view that autograd does not take for one: of results that nobody else has, and of what `torch.kron` writes to."""

_local_of = operator.attrgetter("_local")

_MAX_CACHED = 1 << 14  # the entries of a group's cache; programs with new shapes in each step would fill the memory


class DispatchKind(Enum):
    """The work around a cached call's local computation."""

    RESULT = "one tensor comes out of the local tensors as they are"
    IN_PLACE = "the first argument is written, given the local tensors as they are"
    SEVERAL = "several tensors, or None for some, come out of the local tensors as they are"
    VIEW = "one tensor that shares memory with the first argument comes out of the local tensors as they are"
    VIEWS = "a list of such views comes out of the local tensors as they are"
    LISTS = "lists of tensors are written, given the local tensors as they are, and nothing comes out"
    ANY = "anything, inputs redistributed first"


@dataclass(slots=True, eq=False)
class CachedDispatch:
    """The prepared computation of a kind of call."""

    local: Callable[..., Any]
    """The operator (its C++ call, which is faster), or the local function of its rule."""
    specs: Sequence[DTensorSpec]
    """The specs to which the distributed tensors among the arguments are redistributed."""
    outputs: Sequence[DTensorSpec]
    """The specs of the tensors that ``local`` returns."""
    replaced: Mapping[str, Any]
    """The arguments that differ on this rank."""
    written: Sequence[str]
    """The names of the arguments that are written to."""
    kind: DispatchKind = field(default=DispatchKind.ANY, init=False)
    output: DTensorSpec | None = field(default=None, init=False)
    """The spec of the only result, for RESULT and VIEW."""
    positions: Sequence[tuple[int, Any]] = field(default=(), init=False)
    """``replaced`` by position, for all kinds but ANY; for LISTS the positions of what is written."""
    offsets: Sequence[int] | None = field(default=None, init=False)
    """The storage offsets of views in the full tensor; None if the results are no views."""
    offset: int = field(default=0, init=False)
    """The only one of ``offsets``, for VIEW."""
    view_kind: ViewKind = field(default=ViewKind.COPIED, init=False)
    """The kind of views whose shards have memory of their own."""
    may_copy: bool = field(default=True, init=False)
    """Whether the shards of views may be copies: those by the operator itself never are."""
    is_at_start: bool = field(default=False, init=False)
    """Whether a VIEW that is no copy begins where the viewed tensor does."""


def cache_key(value: Any, dtensor_type: Any) -> Any:
    """The contribution of an argument to the key of a cached call."""
    kind = type(value)
    if kind is int or value is None or kind is torch.dtype or kind is torch.SymInt:
        # A SymInt is there while a compiler traces, whose graph is then for this number.
        return value if kind is not torch.SymInt else int(value)
    if kind is float or kind is bool:
        return kind if kind is float else (kind, value)  # True, 1 and 1.0 are equal
    if kind is dtensor_type:
        return value._spec
    if kind is list or kind is tuple:
        return tuple(
            [
                one._spec if type(one) is dtensor_type else one if type(one) is int else cache_key(one, dtensor_type)
                for one in value
            ]
        )
    if isinstance(value, torch.Tensor):
        return (kind, value.dim(), value.dtype)  # of a scalar too: it may decide the dtype of the result
    return (kind, None if kind is torch.Generator else value)


def key_by_value(key: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The key of a call that is prepared for the values of its floats, or for torch's default dtype."""
    values = [one for one in (*args, *kwargs.values()) if type(one) in (float, list, tuple)]
    return (*key, KEYED_BY_VALUE, torch.get_default_dtype(), *find_all(float, values))


def dispatch(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], dtensor_type: Any, key: list[Any]
) -> Any:
    """Compute a call that `DTensor` does not run inline.

    ``key`` is the call's key: the operator's identity, and the `cache_key` of each argument. UnsupportedOpError: no
    rule fits. ValueError: the tensors are not all on one mesh, or some are distributed and others are not.
    """
    _check_writable(func, args, kwargs)
    record_scalars(func, args, kwargs, dtensor_type)
    cache = _find_cache(args, kwargs, dtensor_type)
    cached = cache.get(tuple(key))
    if cached is None:
        make_room(cache)
        rule = RULES.get(func)
        is_by_value = rule is not None and rule.depends_on_values
        cached = KEYED_BY_VALUE if is_by_value else _prepare_outside_of_modes(func, args, kwargs, dtensor_type)
        if isinstance(cached, CachedDispatch) and _depends_on_default_dtype(cached, [*args, *kwargs.values()]):
            cached = KEYED_BY_VALUE
        cache[tuple(key)] = cached
    if cached is KEYED_BY_VALUE:
        exact = key_by_value(key, args, kwargs)
        cached = cache.get(exact)
        if cached is None:
            make_room(cache)
            cached = cache[exact] = _prepare_outside_of_modes(func, args, kwargs, dtensor_type)
    if not isinstance(cached, CachedDispatch):
        return cached(*args, **kwargs)
    return _run(cached, func, args, kwargs, dtensor_type)


def make_room(cache: dict[Any, Any]) -> None:
    """Empty a full cache, before another entry is added."""
    if len(cache) >= _MAX_CACHED:
        cache.clear()


def dispatch_foreach(
    cached: CachedDispatch,
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dtensor_type: Any,
) -> None:
    """Compute a call of `DispatchKind.LISTS`."""
    if VIEW_COPIES:
        _check_writable(func, args, kwargs)
    local = [
        list(map(_local_of, value)) if type(value) is list and value and type(value[0]) is dtensor_type else value
        for value in args  # no list has plain tensors beside distributed ones: `_prepare` refuses such
    ]
    cached.local(*local, **kwargs)
    if VIEW_COPIES:
        map_tensors(after_write, [args[index] for index, _ in cached.positions], dtensor_type)


def wrap_results(cached: CachedDispatch, result: Any, base: Any, dtensor_type: Any) -> Any:
    """The results of a cached call of `DispatchKind.VIEW`, VIEWS or SEVERAL, the first argument of which is given."""
    if cached.kind is DispatchKind.SEVERAL:
        outputs = iter(cached.outputs)
        return tuple([None if one is None else dtensor_type._wrap(one, next(outputs)) for one in result])
    if cached.kind is DispatchKind.VIEW:
        is_view = not cached.may_copy or (cached.local is torch.reshape and base._local.is_contiguous())
        kind = ViewKind.SHARED if is_view else actual_kind(cached.view_kind, result, base._local)
        return dtensor_type._wrap_view(result, cached.output, base, cached.offset, kind)
    assert cached.offsets is not None, "views have offsets"
    kinds = [actual_kind(cached.view_kind, one, base._local) if cached.may_copy else ViewKind.SHARED for one in result]
    return [
        dtensor_type._wrap_view(one, spec, base, offset, kind)
        for one, spec, offset, kind in zip(result, cached.outputs, cached.offsets, kinds, strict=True)
    ]


def _depends_on_default_dtype(cached: CachedDispatch, arguments: Sequence[Any]) -> bool:
    """Return whether integers become floats, of torch's default dtype unless an argument gives one."""
    has_floats, gives_floats = (
        any(spec.dtype.is_floating_point or spec.dtype.is_complex for spec in specs)
        for specs in (cached.specs, cached.outputs)
    )
    return gives_floats and not has_floats and not any(isinstance(value, torch.dtype) for value in arguments)


def _find_cache(args: Sequence[Any], kwargs: Mapping[str, Any], dtensor_type: Any) -> dict[Any, Any]:
    """The dispatch cache of the group whose tensors are among the arguments."""
    for value in args:
        first = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(first, dtensor_type):
            return first._spec.dispatch_cache  # type: ignore[no-any-return]
    return find_all(dtensor_type, [*args, *kwargs.values()])[0]._spec.dispatch_cache  # type: ignore[no-any-return]


def _run(
    cached: CachedDispatch,
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dtensor_type: Any,
) -> Any:
    specs = iter(cached.specs)

    def localize(tensor: Any) -> torch.Tensor:
        return redistribute_local(tensor._local, tensor._spec, next(specs))

    given = bind_arguments(func, args, kwargs)
    arguments = {name: map_tensors(localize, value, dtensor_type) for name, value in given.items()}
    arguments.update(cached.replaced)
    positional, named = split_arguments(func, arguments)
    results = cached.local(*positional, **named)
    if cached.written:
        map_tensors(after_write, [given[name] for name in cached.written], dtensor_type)
        return given[cached.written[0]] if schema_of(func).returns else None
    outputs = iter(cached.outputs)
    if cached.offsets is not None:
        base, offsets = next(iter(given.values())), iter(cached.offsets)

        def wrap(local: torch.Tensor) -> Any:
            kind = actual_kind(cached.view_kind, local, base._local)
            return dtensor_type._wrap_view(local, next(outputs), base, next(offsets), kind)

        return map_tensors(wrap, results, torch.Tensor)
    return map_tensors(lambda local: dtensor_type._wrap(local, next(outputs)), results, torch.Tensor)


def _check_writable(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if what is written to one of the arguments would be lost."""
    for index, name in _written_arguments(func):
        value = args[index] if index < len(args) else kwargs.get(name)
        for tensor in value if isinstance(value, list | tuple) else (value,):
            check_writable(func, tensor)


@functools.cache
def _written_arguments(func: torch._ops.OpOverload) -> list[tuple[int, str]]:
    """The positions and names of the arguments that an operator writes to; schemas are slow to read."""
    arguments = enumerate(schema_of(func).arguments)
    return [(index, argument.name) for index, argument in arguments if argument.is_write]


def _prepare_outside_of_modes(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], dtensor_type: Any
) -> CachedDispatch | Callable[..., Any]:
    """`_prepare`, whose operators on the meta device are not part of a graph that a compiler traces."""
    if not num_dispatch_modes():
        return _prepare(func, args, kwargs, dtensor_type)
    with no_modes():
        return _prepare(func, args, kwargs, dtensor_type)


def _prepare(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], dtensor_type: Any
) -> CachedDispatch | Callable[..., Any]:
    """Find how a call is computed: by a `CachedDispatch`, or by another function of the same arguments."""
    arguments = bind_arguments(func, args, kwargs)
    rule = RULES.get(func)
    if rule is None:
        return find_substitute(func, dtensor_type)
    specs = {name: map_tensors(lambda one: one._spec, value, dtensor_type) for name, value in arguments.items()}
    mesh = _common_mesh(func, specs)
    if (other := _find_exception(func, rule, specs, mesh, dtensor_type)) is not None:
        return other
    is_fused = str(func).startswith(("aten._fused_adam", "aten._fused_sgd", "aten._fused_adagrad"))
    takes_lists = is_fused or str(func).startswith("aten._foreach_")
    call = OpCall(func, specs, mesh)
    try:
        cached = _prepare_foreach(func, specs, rule, mesh) if takes_lists else _select(call, rule)
    except _NoStrategyError as error:
        if is_fused:
            raise
        return functools.partial(_write_redistributed, func, dtensor_type, str(error))
    if takes_lists:
        _set_lists_kind(cached, func, args, kwargs, dtensor_type)
        return cached
    if (func.is_view or func is _UNSAFE_VIEW) and not cached.written:
        cached.offsets = [int(meta.storage_offset()) for meta in call.results]
        cached.view_kind = _own_memory_kind(func, rule, call.inputs[0], cached.specs[0])
    # Plain tensors here are scalars, at which `record_scalars` looks in each call.
    if all(isinstance(one, dtensor_type) for one in find_all(torch.Tensor, [*args, *kwargs.values()])):
        _set_kind(cached, func, args, dtensor_type)
    return cached


def _find_exception(
    func: torch._ops.OpOverload, rule: OpRule, specs: Mapping[str, Any], mesh: DeviceMesh, dtensor_type: Any
) -> Callable[..., Any] | None:
    """The function that computes a call to which the operator's rule does not apply, or None."""
    if find_plain(list(specs.values()), takes_scalars=func not in REFUSE_SCALARS):
        return plain_caller(func, dtensor_type, mesh)
    if rule.is_data_dependent is not None and rule.is_data_dependent(specs):
        return functools.partial(compute_data_dependent, func, dtensor_type)
    return ignore_copy_of_own_view if is_copy_of_own_view(func, specs) else None


class _NoStrategyError(UnsupportedOpError):
    """No strategy of an operator keeps the placements of its written arguments."""


def _write_redistributed(
    func: torch._ops.OpOverload, dtensor_type: Any, refusal: str, /, *args: Any, **kwargs: Any
) -> Any:
    """Compute into copies with other placements, and bring what was written back to the tensors, which keep theirs.

    The copies are whole where the tensors are partial, and replicated if that is not enough.
    """
    names = [name for _, name in _written_arguments(func)]
    arguments = bind_arguments(func, args, kwargs)
    pairs: list[tuple[Any, Any]] = []

    def copy(tensor: Any) -> Any:
        spec = tensor._spec
        target = spec.replicated if spec is spec.without_partial else spec.without_partial
        local = redistribute_local(tensor._local, spec, target)
        made = dtensor_type._wrap(local.clone() if local is tensor._local else local, target)
        pairs.append((tensor, made))
        return made

    copied = {name: map_tensors(copy, arguments[name], dtensor_type) for name in names}
    if all(tensor._spec is made._spec for tensor, made in pairs):
        raise UnsupportedOpError(refusal)
    positional, named = split_arguments(func, arguments | copied)
    func(*positional, **named)
    for tensor, made in pairs:
        tensor._local.copy_(redistribute_local(made._local, made._spec, tensor._spec))
        after_write(tensor)
    returned = [arguments[name] for name in returned_arguments(func) if name is not None]
    return returned[0] if len(returned) == 1 else tuple(returned) or None


def _own_memory_kind(func: torch._ops.OpOverload, rule: OpRule, before: DTensorSpec, after: DTensorSpec) -> ViewKind:
    """The kind of a view whose shard has memory of its own; the same on all ranks."""
    is_moved = any(
        size > 1 and one != other
        for size, one, other in zip(before.mesh.shape, before.placements, after.placements, strict=True)
    )
    if is_moved and func is _UNSAFE_VIEW:
        return ViewKind.UNSPECIFIED
    return ViewKind.MOVED if is_moved or rule.copies else ViewKind.COPIED


def _common_mesh(func: torch._ops.OpOverload, arguments: Mapping[str, Any]) -> DeviceMesh:
    """The mesh of all distributed tensors of a call."""
    specs = find_all(DTensorSpec, list(arguments.values()))
    mesh: DeviceMesh = specs[0].mesh
    for spec in specs:
        if spec.mesh.identity != mesh.identity:
            advice = (
                "They are of the same ranks but have groups of their own: make the mesh once, and use it for both"
                if spec.mesh == mesh
                else "Bring them to one mesh, as by to_local() and DTensor.from_local(), or make both from slices of"
                " one"
            )
            raise ValueError(f"{func} got tensors of different meshes:\n{mesh}\nand\n{spec.mesh}\n{advice}")
    return mesh


def _select(call: OpCall, rule: OpRule) -> CachedDispatch:
    """Prepare a call by the strategies of its rule."""
    func = call.operator
    if not schema_of(func).is_mutable:
        _ = call.results  # torch refuses wrong arguments here, and rules need not
    written = [
        argument.name
        for argument in schema_of(func).arguments
        # Fused optimizer steps write to gradients only when they unscale them.
        if argument.is_write and (argument.name != "grads" or call.arguments.get("grad_scale") is not None)
    ]
    fixed: list[int] = []  # the indices of the inputs that are written
    num_inputs = 0
    for name, value in call.arguments.items():
        first, num_inputs = num_inputs, num_inputs + len(find_all(DTensorSpec, value))
        if name in written:
            fixed += range(first, num_inputs)
    if not select_strategy(call, rule, fixed):
        raise _NoStrategyError(
            f"{func} can't write to a tensor placed as {call.inputs[fixed[0]] if fixed else call.inputs}:"
            " redistribute() it first, or use the form that makes a new tensor"
        )
    call.place(fixed if written else None)
    local = None if rule.local is None else rule.local(call)
    replaced = {} if rule.arguments is None else rule.arguments(call)
    return CachedDispatch(local or plain_call(func), call.placed_inputs, call.outputs, replaced, written)


def _set_kind(cached: CachedDispatch, func: torch._ops.OpOverload, args: Sequence[Any], dtensor_type: Any) -> None:
    """Set the kind of a call whose inputs are not redistributed."""
    current = [one._spec for one in find_all(dtensor_type, list(args))]
    names = [argument.name for argument in schema_of(func).arguments]
    direct = [value for value in args if isinstance(value, dtensor_type)]
    if len(direct) < len(cached.specs) or any(
        one is not other for one, other in zip(current, cached.specs, strict=True)
    ):
        return
    if any(names.index(name) >= len(args) for name in cached.replaced):
        return
    cached.positions = [(names.index(name), value) for name, value in cached.replaced.items()]
    returns = schema_of(func).returns
    cached.may_copy = cached.local is not plain_call(func)
    if cached.written:
        if cached.written == names[:1] and isinstance(args[0], dtensor_type):
            cached.kind = DispatchKind.IN_PLACE
    elif len(returns) == 1 and isinstance(returns[0].type, torch.TensorType):
        cached.kind = DispatchKind.RESULT if cached.offsets is None else DispatchKind.VIEW
        (cached.output,) = cached.outputs
        cached.offset = cached.offsets[0] if cached.offsets else 0
        cached.is_at_start = cached.offsets is not None and not cached.may_copy and cached.offset == 0
    elif cached.offsets is None and all(isinstance(one.type, torch.TensorType) for one in returns):
        cached.kind = DispatchKind.SEVERAL
    elif cached.offsets is not None and [str(one.type) for one in returns] == ["List[Tensor]"]:
        cached.kind = DispatchKind.VIEWS
    # The first argument of torch.add(1.0, tensor) is a number.
    if not cached.may_copy and cached.kind is not DispatchKind.ANY and isinstance(args[0], torch.Tensor):
        cached.local = method_call(func) or cached.local


def _set_lists_kind(
    cached: CachedDispatch,
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dtensor_type: Any,
) -> None:
    if any(isinstance(value, torch.Tensor) for value in args):
        return  # `DTensor` takes calls with distributed ones for the other kinds, and scalars are looked at
    current = [one._spec for one in find_all(dtensor_type, [*args, *kwargs.values()])]
    has_named_lists = any(isinstance(value, list | tuple) for value in kwargs.values())
    if not schema_of(func).returns and current == cached.specs and not has_named_lists:
        cached.kind = DispatchKind.LISTS
        cached.positions = [(index, None) for index, _ in _written_arguments(func) if index < len(args)]
        # torch's function reads lists faster than the operator does.
        cached.local = getattr(torch, func.overloadpacket.__name__, cached.local)


def _prepare_foreach(
    func: torch._ops.OpOverload, arguments: Mapping[str, Any], rule: OpRule, mesh: DeviceMesh
) -> CachedDispatch:
    """Prepare an operator on lists of tensors: each element of the lists as a call with lists of one."""
    lists = {name: value for name, value in arguments.items() if isinstance(value, list | tuple)}
    count = max(map(len, lists.values()))
    elements = []
    for index in range(count):
        one = {name: [value[index]] if name in lists and value else value for name, value in arguments.items()}
        elements.append(_select(OpCall(func, one, mesh), rule))
    # The specs of all elements' inputs, in the order in which they are found among the arguments.
    specs: list[DTensorSpec] = []
    element_specs = [iter(element.specs) for element in elements]
    for name, value in arguments.items():
        values = value if name in lists else [value] * count
        found = [next(element_specs[at]) for at, one in enumerate(values) if isinstance(one, DTensorSpec)]
        specs += found if name in lists else found[-1:]
    outputs = [spec for element in elements for spec in element.outputs]
    return CachedDispatch(plain_call(func), specs, outputs, {}, elements[0].written)
