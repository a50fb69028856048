"""Plain tensors among distributed ones: whole where they count as such, and refused elsewhere.

[Note: plain tensors among distributed ones]
A plain tensor may be another one on each rank, and what is computed from it and distributed ones is a tensor only if it
is not. So it is refused, but for these:

- numbers, which a tensor without dims is, and tensors without elements;
- inside of a module that is parallel as a whole, and in its gradients: what the module's code makes counts as whole,
  and the ranks compare it (`ReplicaCheck`);
- what formulas of gradients make: zeros and ones, known by their elements;
- what torch's own functions make, as the mask of causal attention or the index that a list is: nobody but torch has
  such a tensor, or torch's Python code is what computes with it. The ranks compare these at once.
"""

from __future__ import annotations

import functools
import sys
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.tensor.op_strategy import bind_arguments, map_tensors, split_arguments
from ferrodist.tensor.ops import indexing, matmul
from ferrodist.tensor.placement import Replicate
from ferrodist.tensor.redistribute import redistribute_local
from ferrodist.tensor.replica_check import check_replicated, describe_module
from ferrodist.tensor.spec import DTensorSpec
from ferrodist.torch_private.autograd import base_of, current_graph_task
from ferrodist.torch_private.operators import schema_of
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType

    from ferrodist.mesh import DeviceMesh
    from ferrodist.tensor.replica_check import ReplicaCheck

ACTIVE_CHECK: ContextVar[ReplicaCheck | None] = ContextVar("inside", default=None)
"""The plain tensors of the parallel module whose code runs."""

REFUSE_SCALARS = frozenset([*indexing.RULES, *matmul.RULES])
"""Operators whose rules count their inputs, so that a plain number has to be distributed."""

BACKWARD_CHECKS = "tensor.backward"
"""What a group keeps under this name: by mesh the `ReplicaCheck` of parallel modules over it, for the gradients."""


def find_plain(arguments: Sequence[Any], *, takes_scalars: bool = True) -> list[torch.Tensor]:
    """The plain tensors among arguments that can't be taken as numbers, as none can in a list with distributed ones.

    Args:
        arguments: All of them.
        takes_scalars: Whether the operator's rule takes tensors without dims as numbers.
    """
    found: list[torch.Tensor] = []
    for value in arguments:
        if isinstance(value, torch.Tensor):
            if (value.dim() or not takes_scalars) and not _is_distributed(value):
                found.append(value)
        elif isinstance(value, list | tuple):
            has_distributed = any(map(_is_distributed, value)) or not takes_scalars
            found += [
                one
                for one in value
                if isinstance(one, torch.Tensor) and (one.dim() or has_distributed) and not _is_distributed(one)
            ]
    return found


def _is_distributed(value: Any) -> bool:
    return hasattr(value, "_spec") or isinstance(value, DTensorSpec)


def is_foreach(func: torch._ops.OpOverload) -> bool:
    """Whether an operator works on each place of lists of tensors by itself."""
    return str(func).startswith("aten._foreach_")


def plain_caller(func: torch._ops.OpOverload, cls: Any, mesh: DeviceMesh) -> Callable[..., Any]:
    """What calls an operator that got plain tensors beside distributed ones, or raises."""
    return functools.partial(_call_each if is_foreach(func) else _call, func, cls, mesh)


def _call(func: torch._ops.OpOverload, cls: Any, mesh: DeviceMesh, /, *args: Any, **kwargs: Any) -> Any:
    wrapped, named = replicate_plain(func, cls, mesh, args, kwargs)
    result = func(*wrapped, **named)
    arguments = bind_arguments(func, args, kwargs)
    returned = [arguments[name] for name in returned_arguments(func) if name is not None]
    return returned[0] if len(returned) == 1 else result


@functools.cache
def returned_arguments(func: torch._ops.OpOverload) -> list[str | None]:
    """For each result of an operator the name of the argument that it is, or None for one that is no argument."""
    written = [argument for argument in schema_of(func).arguments if argument.is_write]

    def name_of(result: Any) -> str | None:
        if result.alias_info is None or not result.alias_info.is_write:
            return None
        names = [
            one.name
            for one in written
            if one.alias_info is not None and one.alias_info.before_set & result.alias_info.before_set
        ]
        return names[0] if names else None

    return [name_of(result) for result in schema_of(func).returns]


def replicate_plain(
    func: torch._ops.OpOverload, cls: Any, mesh: DeviceMesh, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments with plain tensors replaced by distributed ones, which are whole and share memory with them.

    Raises:
        ValueError: A plain tensor may be another one on each rank.
        CollectiveMismatchError: On all ranks: a plain tensor is another one on some.
    """
    # Counted before anything else has the tensors.
    ours = {id(args[place]) for place in range(len(args)) if sys.getrefcount(args[place]) <= _HOLDERS}
    for value in (*args, *kwargs.values()):
        if isinstance(value, list):
            ours |= {
                id(value[place]) for place in range(len(value)) if sys.getrefcount(value[place]) <= _HOLDERS_IN_LIST
            }
    arguments = [*args, *kwargs.values()]
    is_written_number = _writes_numbers(func, cls, args, kwargs)

    overwritten = set(map(id, _find_overwritten(func, args, kwargs)))

    def wrap(tensor: torch.Tensor) -> Any:
        if isinstance(tensor, cls):
            return tensor
        if not is_written_number and tensor.numel() and tensor.dim():
            check_plain(func, tensor, mesh, is_torchs=id(tensor) in ours, is_overwritten=id(tensor) in overwritten)
        plain = tensor.resolve_conj().resolve_neg()
        whole = [Replicate()] * mesh.ndim
        return cls._wrap(plain, DTensorSpec.make(mesh, whole, plain.shape, plain.dtype, plain.stride()))

    takes_scalars = func not in REFUSE_SCALARS

    def replace(value: Any) -> Any:
        return map_tensors(wrap, value, torch.Tensor) if find_plain([value], takes_scalars=takes_scalars) else value

    made = [replace(value) for value in arguments]
    return made[: len(args)], dict(zip(kwargs, made[len(args) :], strict=True))


_HOLDERS = 4
"""Of an argument that no other code has: torch's call, its tuple of arguments, ours, and what asks for the number.

A version of torch or Python in which these are others has tensors refused that are torch's own, or compared that are a
program's: both are right.
"""

_HOLDERS_IN_LIST = 3
"""Of a tensor in a list that is an argument: torch's call, the list, and what asks."""


_HOLDERS_OF_BASE = 3
"""Of the tensor that a view is of: the view, a name, and what asks."""


def _writes_numbers(func: torch._ops.OpOverload, cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether each rank's own tensor is written, given a number that all have, as when gradients are clipped."""
    arguments = bind_arguments(func, args, kwargs)
    written = [argument.name for argument in schema_of(func).arguments if argument.is_write]
    others = [value for name, value in arguments.items() if name not in written]
    return (
        bool(written)
        and not any(isinstance(arguments[name], cls) for name in written)
        and not any(isinstance(value, list | tuple) and find_plain([value]) for value in others)
        and not any(isinstance(value, torch.Tensor) and value.dim() for value in others)
    )


def _find_overwritten(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments whose elements an operator replaces, all of them: what was there before is nobody's concern."""
    arguments = bind_arguments(func, args, kwargs)
    found: list[Any] = []
    for argument in schema_of(func).arguments:
        if argument.is_out or (argument.is_write and str(func.overloadpacket) in _REPLACING):
            map_tensors(found.append, arguments[argument.name], torch.Tensor)
    return found


_REPLACING = ("aten.copy_", "aten.fill_", "aten._foreach_copy_")


def check_plain(
    operator: object,
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    *,
    is_torchs: bool = False,
    is_overwritten: bool = False,
) -> None:
    """Return if a plain tensor counts as whole.

    Args:
        operator: What takes it.
        tensor: It.
        mesh: Over which the tensors lie that it is used with.
        is_torchs: Whether no other code than torch's has it.
        is_overwritten: Whether none of its elements will be left, so that those of the ranks may differ.

    Raises:
        ValueError: It may be another one on each rank.
        CollectiveMismatchError: On all ranks: it is another one on some.
    """
    is_backward = current_graph_task() != -1
    inside = _find_inside(mesh, is_backward=is_backward)
    reason = ""
    if not is_plain(tensor):
        reason = (
            f"it is {with_article(type(tensor).__name__)} on {tensor.device}, and distributed tensors are plain"
            " ones on the CPU"
        )
    elif tensor.requires_grad and tensor.is_leaf and not is_backward:
        reason = "it is a leaf that requires grad, and would get the gradient of a distributed tensor"
    elif inside is not None:
        if not is_overwritten:
            inside.record(operator, tensor, mesh)
        return
    elif _is_known(operator, tensor, is_backward=is_backward):
        return
    elif (is_torchs and not tensor.requires_grad and _is_of_torchs(tensor)) or _is_torchs_code():
        check_replicated(operator, tensor, mesh)
        return
    raise ValueError(  # no TypeError, of which operators as + make one of their own
        f"{operator}{describe_module()} got distributed tensors and {with_article(type(tensor).__name__)} of shape"
        f" {tuple(tensor.shape)}: {reason + ': ' if reason else ''}distribute it too, as by"
        " fd.distribute(tensor, mesh, placements), or work on to_local(); inside of fd.parallelize(model, mesh, plan)"
        " plain tensors that the model's code makes count as whole"
    )


def _find_inside(mesh: DeviceMesh, *, is_backward: bool) -> ReplicaCheck | None:
    """The plain tensors of the parallel module whose code runs, or whose gradients are computed; None elsewhere."""
    inside = ACTIVE_CHECK.get()
    if inside is None and is_backward:
        inside = mesh.parent.attachments.get(BACKWARD_CHECKS, {}).get(mesh.identity)
    return inside


def record_scalars(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], cls: Any) -> None:
    """Have the ranks compare the tensors without dims that a parallel module's code mixes with distributed ones.

    Raises:
        CollectiveMismatchError: On all ranks: a number is another one on some, and each is compared when it is used.
    """
    is_backward = current_graph_task() != -1
    if ACTIVE_CHECK.get() is None and not is_backward:
        return
    tensors: list[Any] = []
    map_tensors(tensors.append, [*args, *kwargs.values()], torch.Tensor)
    numbers = [one for one in tensors if not one.dim() and is_plain(one)]
    distributed = next((one for one in tensors if isinstance(one, cls)), None)
    if not numbers or distributed is None:
        return
    mesh = distributed._spec.mesh
    inside = _find_inside(mesh, is_backward=is_backward)
    if inside is None:
        return
    overwritten = set(map(id, _find_overwritten(func, args, kwargs)))
    for number in numbers:
        if id(number) not in overwritten:
            inside.record(func, number, mesh)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is one of torch's own class, in memory that ranks can compare."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
    )


def _is_of_torchs(view: torch.Tensor) -> bool:
    """Whether no other code has the tensor that one is a view of."""
    base = base_of(view)
    return base is None or sys.getrefcount(base) <= _HOLDERS_OF_BASE


def _is_known(operator: object, tensor: torch.Tensor, *, is_backward: bool) -> bool:
    if is_backward:
        return not tensor.any() or bool((tensor == 1).all())
    numbers = torch.arange(tensor.numel(), dtype=tensor.dtype, device="cpu") if tensor.dtype is torch.int64 else None
    return operator is torch.ops.aten.eq.Tensor and numbers is not None and torch.equal(tensor, numbers)


_OURS = str(Path(__file__).parent.parent)
_TORCH = str(Path(torch.__file__).parent)
_CALLS = tuple(f"{_TORCH}/{name}" for name in ("_ops.py", "utils/"))
_FUNCTIONS = tuple(f"{_TORCH}/{name}" for name in ("functional.py", "_decomp/", "_refs/", "_prims"))


def _is_torchs_code() -> bool:
    """Whether a function of torch that is written in Python calls the operator."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_OURS, *_CALLS)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_FUNCTIONS)


def _call_each(func: torch._ops.OpOverload, cls: Any, mesh: DeviceMesh, /, *args: Any, **kwargs: Any) -> Any:
    """Compute places of lists where all tensors are plain by themselves: each rank its own."""
    arguments = bind_arguments(func, args, kwargs)
    lists = {name: value for name, value in arguments.items() if isinstance(value, list | tuple) and value}
    count = max(map(len, lists.values()))
    is_plain = [not any(isinstance(value[place], cls) for value in lists.values()) for place in range(count)]
    if not any(is_plain):
        return _call(func, cls, mesh, *args, **kwargs)
    results: list[Any] = [None] * count
    for wanted in (True, False):
        places = [place for place in range(count) if is_plain[place] is wanted]
        if not places:
            continue
        selected = {
            name: [value[place] for place in places] if name in lists else _as_plain(value, cls) if wanted else value
            for name, value in arguments.items()
        }
        positional, named = split_arguments(func, selected)
        computed = func(*positional, **named)
        for place, one in zip(places, computed or [None] * len(places), strict=True):
            results[place] = one
    return results if schema_of(func).returns else None


def _as_plain(value: Any, cls: Any) -> Any:
    """A number that is distributed as a plain one."""
    if not isinstance(value, cls):
        return value
    spec = value._spec
    return redistribute_local(value._local, spec, spec.replicated)
