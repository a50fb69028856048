"""Plain tensors among distributed ones: taken as replicated if the ranks have the same, else refused.

[Note: plain tensors among distributed ones]
A plain tensor may differ between ranks, and then an operator on it and distributed tensors gives no tensor. So plain
tensors are refused, except for:

- scalars, which tensors without dims are, and empty tensors;
- inside of a parallel module, and in its gradients, the tensors that the module's code makes: they count as replicated,
  and the ranks compare them (`ReplicaCheck`);
- the zeros and ones that formulas of gradients make, recognised by their elements;
- tensors that torch's own functions make, such as the mask of causal attention or the index of a list. The ranks
  compare these at once;
- all of them on a mesh over which torch.compile has traced a parallel module, compared at once, too: the code between
  two graphs, and graphs of ``backend="eager"``, run outside of the module.

[Note: tensors of torch's own functions]
Two heuristics recognise them. First, only torch holds the tensor, by the number of references to it (`_ARGUMENT_REFS`,
`_LIST_ELEMENT_REFS`, `_BASE_REFS`). So nothing between torch and `replicate_plain` may hold an argument any longer:
`DTensor.__torch_dispatch__` clears its loop variable before it calls `dispatch`. Second, torch's Python code calls the
operator, by the names of the files on the call stack. To find the counts for another version of torch or Python, print
``sys.getrefcount(args[at])`` in `replicate_plain` for an operator whose plain argument no variable holds.
"""

from __future__ import annotations

import functools
import sys
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.tensor.op_strategy import bind_arguments, find_all, map_tensors, split_arguments
from ferrodist.tensor.ops import indexing, loss, matmul
from ferrodist.tensor.placement import Replicate
from ferrodist.tensor.redistribute import full_local
from ferrodist.tensor.replica_check import ReplicaCheck, check_replicated, describe_module
from ferrodist.tensor.spec import DTensorSpec
from ferrodist.tensor.traced import traced_check
from ferrodist.torch_private.autograd import base_of, current_graph_task
from ferrodist.torch_private.compilers import is_traced
from ferrodist.torch_private.operators import schema_of
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType

    from ferrodist.mesh import DeviceMesh

ACTIVE_CHECK: ContextVar[ReplicaCheck | None] = ContextVar("active_check", default=None)
"""The check of the parallel module whose code runs."""

REFUSE_SCALARS = frozenset([*indexing.RULES, *loss.RULES, *matmul.RULES])
"""Operators whose rules count their inputs, so that plain scalars have to be replicated first."""

BACKWARD_CHECKS = "tensor.backward_checks"
"""The group attachment that has, for each mesh, the `ReplicaCheck` of parallel modules' gradients."""

_COMPILED_CHECKS = "tensor.compiled_checks"
"""The group attachment that has, for each mesh, the `ReplicaCheck` of the parallel model that was compiled last."""


def attach_compiled_check(check: ReplicaCheck) -> None:
    """Let code on a model's mesh have the model's check where no module's code runs: the model is compiled."""
    check.mesh.parent.attachments.setdefault(_COMPILED_CHECKS, {})[check.mesh.identity] = check


def find_compiled_check(mesh: DeviceMesh) -> ReplicaCheck | None:
    """The check of a parallel model that was compiled on a mesh, or None."""
    found: ReplicaCheck | None = mesh.parent.attachments.get(_COMPILED_CHECKS, {}).get(mesh.identity)
    return found


def find_plain(arguments: Sequence[Any], *, takes_scalars: bool = True) -> list[torch.Tensor]:
    """The plain tensors that can't be taken as scalars, if the operator's rule takes tensors without dims as scalars.

    In a list with distributed tensors none can.
    """
    found: list[torch.Tensor] = []
    for value in arguments:
        is_list = isinstance(value, list | tuple)
        plain = [one for one in (value if is_list else [value]) if isinstance(one, torch.Tensor)]
        plain = [one for one in plain if not _is_distributed(one)]
        refuses_scalars = not takes_scalars or (is_list and any(map(_is_distributed, value)))
        found += [one for one in plain if one.dim() or refuses_scalars]
    return found


def _is_distributed(value: Any) -> bool:
    return hasattr(value, "_spec") or isinstance(value, DTensorSpec)


def plain_caller(func: torch._ops.OpOverload, dtensor_type: Any, mesh: DeviceMesh) -> Callable[..., Any]:
    """A function that calls an operator with plain tensors beside distributed ones, or raises."""
    is_foreach = str(func).startswith("aten._foreach_")
    return functools.partial(_call_foreach if is_foreach else _call, func, dtensor_type, mesh)


def _call(func: torch._ops.OpOverload, dtensor_type: Any, mesh: DeviceMesh, /, *args: Any, **kwargs: Any) -> Any:
    replicated, named = replicate_plain(func, dtensor_type, mesh, args, kwargs)
    result = func(*replicated, **named)
    arguments = bind_arguments(func, args, kwargs)
    returned = [arguments[name] for name in returned_arguments(func) if name is not None]
    return returned[0] if len(returned) == 1 else result


@functools.cache
def returned_arguments(func: torch._ops.OpOverload) -> list[str | None]:
    """For each result of an operator the name of the argument that it returns, or None for a new tensor."""
    return [
        aliased_argument(func, result) if result.alias_info is not None and result.alias_info.is_write else None
        for result in schema_of(func).returns
    ]


def aliased_argument(func: torch._ops.OpOverload, result: Any) -> str | None:
    """The name of the argument that one of an operator's results returns, or is a view of; None for a new tensor."""
    if result.alias_info is None:
        return None
    arguments = [one for one in schema_of(func).arguments if one.alias_info is not None]
    return next((one.name for one in arguments if one.alias_info.before_set & result.alias_info.before_set), None)


def replicate_plain(
    func: torch._ops.OpOverload, dtensor_type: Any, mesh: DeviceMesh, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Replace plain tensors by replicated distributed ones, which share their memory; errors as of `check_plain`."""
    # References are counted before anything here holds the tensors.
    temporaries = {id(args[at]) for at in range(len(args)) if sys.getrefcount(args[at]) <= _ARGUMENT_REFS}
    for value in (*args, *kwargs.values()):
        if isinstance(value, list):
            unheld = [at for at in range(len(value)) if sys.getrefcount(value[at]) <= _LIST_ELEMENT_REFS]
            temporaries |= {id(value[at]) for at in unheld}
    only_scalars = _writes_scalars(func, dtensor_type, args, kwargs)
    overwritten = set(map(id, _find_overwritten(func, args, kwargs)))

    def wrap(tensor: torch.Tensor) -> Any:
        if isinstance(tensor, dtensor_type):
            return tensor
        if is_traced(tensor):
            if not only_scalars and tensor.numel() and tensor.dim() and id(tensor) not in overwritten:
                tensor = traced_check(tensor, func, mesh)
        elif not only_scalars and tensor.numel() and tensor.dim():
            check_plain(
                func, tensor, mesh, is_temporary=id(tensor) in temporaries, is_overwritten=id(tensor) in overwritten
            )
        plain = tensor.resolve_conj().resolve_neg()
        placements = [Replicate()] * mesh.ndim
        return dtensor_type._wrap(plain, DTensorSpec.make(mesh, placements, plain.shape, plain.dtype, plain.stride()))

    takes_scalars = func not in REFUSE_SCALARS

    def replace(value: Any) -> Any:
        return map_tensors(wrap, value, torch.Tensor) if find_plain([value], takes_scalars=takes_scalars) else value

    return [replace(value) for value in args], {name: replace(value) for name, value in kwargs.items()}


_ARGUMENT_REFS = 4
"""References to an argument that only torch holds: torch's call, its tuple of arguments, ours, and the counting.

With a version of torch or Python that has other counts, tensors of torch's own are refused, or those of a program are
compared: both are safe.
"""

_LIST_ELEMENT_REFS = 3
"""References to a tensor in a list that only torch holds: torch's call, the list, and the counting."""

_BASE_REFS = 3  # references to the base of a view that nobody else holds: the view, a name, and the counting


def _writes_scalars(
    func: torch._ops.OpOverload, dtensor_type: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Return whether plain tensors are written, given scalars that all ranks have, as when gradients are clipped."""
    arguments = bind_arguments(func, args, kwargs)
    written = [argument.name for argument in schema_of(func).arguments if argument.is_write]
    others = [value for name, value in arguments.items() if name not in written]
    return (
        bool(written)
        and not any(isinstance(arguments[name], dtensor_type) for name in written)
        and not any(isinstance(value, list | tuple) and find_plain([value]) for value in others)
        and not any(isinstance(value, torch.Tensor) and value.dim() for value in others)
    )


def _find_overwritten(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments all of whose elements an operator replaces, so that their old values don't matter."""
    arguments = bind_arguments(func, args, kwargs)
    found: list[Any] = []
    for argument in schema_of(func).arguments:
        if argument.is_out or (argument.is_write and str(func.overloadpacket) in _OVERWRITING):
            found += find_all(torch.Tensor, arguments[argument.name])
    return found


_OVERWRITING = ("aten.copy_", "aten.fill_", "aten._foreach_copy_")


def check_plain(
    operator: object, tensor: torch.Tensor, mesh: DeviceMesh, *, is_temporary: bool, is_overwritten: bool
) -> None:
    """Raise unless a plain tensor, which an operator takes beside distributed ones, counts as replicated.

    ``is_temporary``: only torch holds it. ``is_overwritten``: all elements are replaced, and may differ between ranks.
    ValueError: it may differ between ranks. CollectiveMismatchError, on all ranks: it does.
    """
    is_backward = current_graph_task() != -1
    check = find_check(mesh, is_backward=is_backward)
    kind, reason = with_article(type(tensor).__name__), ""
    if not is_plain(tensor):
        reason = f"it is {kind} on {tensor.device}, and distributed tensors are plain ones on the CPU"
    elif tensor.requires_grad and not is_backward and _is_of_leaf(tensor):
        reason = "it is a leaf that requires grad, or a view of one, and would get the gradient of a distributed tensor"
    elif check is not None:
        if not is_overwritten:
            check.record(operator, tensor, mesh)
        return
    elif _has_known_elements(operator, tensor, is_backward=is_backward):
        return
    elif (
        (is_temporary and not tensor.requires_grad and _is_base_unreferenced(tensor))
        or _is_called_by_torch()
        or find_compiled_check(mesh) is not None
    ):
        check_replicated(operator, tensor, mesh)
        return
    raise ValueError(  # a TypeError would be replaced by that of operators such as +
        f"{operator}{describe_module()} got distributed tensors and {kind} of shape {tuple(tensor.shape)}:"
        f" {reason + ': ' if reason else ''}distribute it too, as by fd.distribute(tensor, mesh, placements), or work"
        " on to_local(); inside of fd.parallelize(model, mesh, plan) plain tensors that the model's code makes count as"
        " replicated"
    )


def find_check(mesh: DeviceMesh, *, is_backward: bool) -> ReplicaCheck | None:
    """The check of the parallel module whose code runs, or whose gradients are computed; None elsewhere."""
    check = ACTIVE_CHECK.get()
    if check is None and is_backward:
        check = mesh.parent.attachments.get(BACKWARD_CHECKS, {}).get(mesh.identity)
    return check


def record_scalars(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], dtensor_type: Any
) -> None:
    """Let the ranks compare the plain scalars that a parallel module's code uses with distributed tensors."""
    is_backward = current_graph_task() != -1
    if ACTIVE_CHECK.get() is None and not is_backward:
        return
    tensors = find_all(torch.Tensor, [*args, *kwargs.values()])
    scalars = [one for one in tensors if not one.dim() and is_plain(one)]
    distributed = next((one for one in tensors if isinstance(one, dtensor_type)), None)
    if not scalars or distributed is None:
        return
    mesh = distributed._spec.mesh
    check = find_check(mesh, is_backward=is_backward)
    if check is None:
        return
    overwritten = set(map(id, _find_overwritten(func, args, kwargs)))
    for scalar in scalars:
        if id(scalar) not in overwritten:
            check.record(func, scalar, mesh)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of torch's own class, in memory that ranks can compare."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
    )


def _is_base_unreferenced(view: torch.Tensor) -> bool:
    """Return whether nobody else holds the tensor that one is a view of."""
    base = base_of(view)
    return base is None or sys.getrefcount(base) <= _BASE_REFS


def _is_of_leaf(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a leaf, or a view of one, as the transposed weight of a linear layer is."""
    base = base_of(tensor)
    return (tensor if base is None else base).is_leaf


def _has_known_elements(operator: object, tensor: torch.Tensor, *, is_backward: bool) -> bool:
    """Return whether a tensor is one that torch makes: zeros or ones in backward, or the range of ``one_hot``."""
    if is_backward:
        return not tensor.any() or bool((tensor == 1).all())
    classes = torch.arange(tensor.numel(), dtype=tensor.dtype, device="cpu") if tensor.dtype is torch.int64 else None
    return operator is torch.ops.aten.eq.Tensor and classes is not None and torch.equal(tensor, classes)


_OWN_FILES = str(Path(__file__).parent.parent)
_TORCH_FILES = str(Path(torch.__file__).parent)
_CALL_FILES = tuple(f"{_TORCH_FILES}/{name}" for name in ("_ops.py", "utils/"))
_FUNCTION_FILES = tuple(f"{_TORCH_FILES}/{name}" for name in ("functional.py", "_decomp/", "_refs/", "_prims"))


def _is_called_by_torch() -> bool:
    """Return whether a torch function that is written in Python calls the operator."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_OWN_FILES, *_CALL_FILES)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_FUNCTION_FILES)


def _call_foreach(
    func: torch._ops.OpOverload, dtensor_type: Any, mesh: DeviceMesh, /, *args: Any, **kwargs: Any
) -> Any:
    """Compute separately the elements of lists whose tensors are all plain: each rank its own."""
    arguments = bind_arguments(func, args, kwargs)
    lists = {name: value for name, value in arguments.items() if isinstance(value, list | tuple) and value}
    others = {name: value for name, value in arguments.items() if name not in lists}
    count = max(map(len, lists.values()))
    are_plain = [not any(isinstance(value[index], dtensor_type) for value in lists.values()) for index in range(count)]
    if not any(are_plain):
        return _call(func, dtensor_type, mesh, *args, **kwargs)
    results: list[Any] = [None] * count
    for plain in (True, False):
        indices = [index for index in range(count) if are_plain[index] is plain]
        if not indices:
            continue
        chosen = {
            name: map_tensors(full_local, value, dtensor_type) if plain else value for name, value in others.items()
        }
        chosen |= {name: [value[index] for index in indices] for name, value in lists.items()}
        positional, named = split_arguments(func, chosen)
        computed = func(*positional, **named)
        for index, one in zip(indices, computed or [None] * len(indices), strict=True):
            results[index] = one
    return results if schema_of(func).returns else None
