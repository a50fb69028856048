"""Resolution of a plan: the style of each module, and the placement of each parameter."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parameter import is_lazy

from ferrodist.arguments import check_type
from ferrodist.collectives.reduce_op import DTYPES
from ferrodist.errors import UnsupportedOpError
from ferrodist.parallel.module_init import describe, describe_tensors, find_initialiser, has_meta_tensors
from ferrodist.parallel.parameter_claims import describe_claim
from ferrodist.parallel.tensor_parallel.styles import IOPlacements, Style
from ferrodist.parallel.tensor_parallel.wrapped_forwards import find_arguments
from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.placement import Partial, Placement, Replicate, Shard
from ferrodist.torch_private.autograd import backward_hooks, has_accumulate_hooks
from ferrodist.wording import counted

if TYPE_CHECKING:
    import torch


def resolve_plan(module: nn.Module, plan: Mapping[str, Style]) -> dict[str, Style]:
    """The styles of modules by path; a module with several paths is under its first one."""
    check_type(plan, Mapping, "a plan is a mapping from paths to styles")
    # A module that is registered several times has a path for each.
    modules = dict(module.named_modules(remove_duplicate=False))
    first = {one: name for name, one in reversed(modules.items())}
    styles: dict[str, Style] = {}
    patterns: dict[str, str] = {}
    for pattern, style in plan.items():
        check_path(pattern)
        if not isinstance(style, Style):
            raise TypeError(f"the plan's {pattern!r} must be a style, as ColumnParallel(), not {style!r}")
        found = [name for name in modules if path_matches(name, pattern)]
        if not found:
            raise ValueError(
                f"the plan's path {pattern!r} matches no module; some are {', '.join(map(repr, list(modules)[1:9]))}"
            )
        for one in dict.fromkeys(modules[name] for name in found):
            name = first[one]
            own = style.fitted(one)
            if name in styles and styles[name] != own:
                raise ValueError(f"module {name!r} has two styles, by {patterns[name]!r} and by {pattern!r}")
            own.check(name or type(module).__name__, one)
            _check_placements(name or type(module).__name__, own.preparation())
            _check_arguments(name or type(module).__name__, one, own.preparation().wanted)
            styles[name], patterns[name] = own, pattern
    return styles


def check_path(path: object) -> None:
    """Raise TypeError unless a plan's key can be a path."""
    check_type(path, str, f"the plan's key {path!r} must be a path of modules, as 'layers.*.up'")


def path_matches(name: str, pattern: str) -> bool:
    """True if a path has a pattern's number of parts, and each fits, with ``*`` for any text."""
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))


def _check_placements(name: str, placements: IOPlacements) -> None:
    """Raise TypeError unless a style's inputs and outputs have placements."""
    for title, value in (("wanted", placements.wanted), ("outputs", placements.outputs)):
        each = value.values() if isinstance(value, Mapping) else value if isinstance(value, Sequence) else (value,)
        for one in each:
            check_type(
                one,
                (Shard, Replicate, Partial, NoneType),
                f"the style of module {name!r} must have {title}= of placements, as Shard(1)",
            )


def _check_arguments(name: str, module: nn.Module, wanted: Any) -> None:
    """Raise unless the module takes the arguments for which a style has placements."""
    names, takes_others = find_arguments(module.forward)
    if takes_others or wanted is None or isinstance(wanted, Placement):
        return
    if isinstance(wanted, Mapping):
        if unknown := [one for one in wanted if one not in names]:
            raise ValueError(
                f"module {name!r} takes no argument {unknown[0]!r}: it takes {', '.join(map(repr, names))}"
            )
    elif len(wanted) > len(names):
        inputs = counted(len(wanted), "input")
        raise ValueError(f"the style places {inputs} of module {name!r}, which takes {', '.join(map(repr, names))}")


def parameter_placements(
    module: nn.Module, styles: Mapping[str, Style], path: str = ""
) -> dict[nn.Parameter, Placement]:
    """The placement of each parameter; a shared one has that of the style of any of its modules.

    ``path`` is the module's own, with which those of ``styles`` and the names in errors begin.
    """
    found: dict[nn.Parameter, Placement] = {}
    placed: dict[nn.Parameter, str] = {}
    for owner_path, owner in module.named_modules(prefix=path):
        style = styles.get(owner_path)
        for key, parameter in owner.named_parameters(recurse=False):
            name = f"{owner_path}.{key}".strip(".")
            _check_parameter(name, parameter)
            if style is None:
                found.setdefault(parameter, Replicate())
                continue
            placement = style.placement_of(key, parameter)
            check_type(
                placement,
                (Shard, Replicate, Partial),
                f"the plan must give parameter {name!r} a placement, as Shard(0)",
            )
            if parameter in placed and found[parameter] != placement:
                raise ValueError(
                    f"parameter {name!r} is also {placed[parameter]!r}, and the plan places it as {placement} and as"
                    f" {found[parameter]}: give both modules styles that agree"
                )
            _check_dim(name, parameter, placement)
            found[parameter], placed[parameter] = placement, name
    return found


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    is_distributed = isinstance(parameter, DTensor)  # a variable, or mypy would take the rest for unreachable
    if is_distributed:
        raise ValueError(f"parameter {name!r} is distributed already: parallelize a module once")
    if parameter.is_cuda:
        raise UnsupportedOpError(
            f"parameter {name!r} is on {parameter.device}: distributed tensors are on the CPU, parallelize module.cpu()"
        )
    if is_lazy(parameter):
        raise ValueError(f"parameter {name!r} has no shape yet: call the module once, which gives it one")
    if backward_hooks(parameter) or has_accumulate_hooks(parameter):
        raise ValueError(
            f"parameter {name!r} has hooks, as DDP registers them, which would be lost: parallelize the module first,"
            " then wrap it, or register them"
        )
    if parameter.grad is not None:
        raise ValueError(f"parameter {name!r} has a gradient, which would be lost: call zero_grad() first")


def _check_dim(name: str, parameter: nn.Parameter, placement: Placement) -> None:
    """Raise unless a parameter has the dim that is to be sharded, and the dim has equal blocks."""
    if isinstance(placement, Partial):
        raise ValueError(f"parameter {name!r} can't be {placement}: optimizers are not linear in partial sums")  # noqa: TRY004
    if not isinstance(placement, Shard):
        return
    shape = tuple(parameter.shape)
    if not -len(shape) <= placement.dim < len(shape):
        raise ValueError(f"parameter {name!r} of shape {shape} can't be {placement}: it has no such dim")
    if shape[placement.dim] % placement.blocks:
        raise ValueError(
            f"parameter {name!r} of shape {shape} can't be {placement}: {shape[placement.dim]} is not"
            f" {placement.blocks} equal blocks"
        )


def check_tensors(module: nn.Module, init: Callable[[nn.Module], object] | None) -> None:
    """Raise unless all parameters and buffers can be sent, and those on the meta device initialised."""
    if reason := describe_claim(module.named_parameters()):
        raise ValueError(f"{reason}: parallelize the module first, and wrap it afterwards")
    for name, one in module.named_modules():
        if has_meta_tensors(one):
            find_initialiser(name, one, init)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name!r} is {tensor.dtype}, which no collective carries")


def plan_lines(
    module: nn.Module, styles: Mapping[str, Style], placements: Mapping[nn.Parameter, Placement]
) -> list[str]:
    """The lines that must be the same on all ranks: styles, parameters and buffers."""
    lines = [f"the style {style} for {name!r}" for name, style in styles.items()]

    def describe_placed(name: str, tensor: torch.Tensor) -> str:
        placement = ""
        if isinstance(tensor, nn.Parameter) and tensor in placements:  # a buffer may be a Parameter
            placement = f" as {placements[tensor]}"
        return f"{describe(name, tensor)}{placement}{' on the meta device' if tensor.is_meta else ''}"

    return lines + describe_tensors(module.named_parameters(), module.named_buffers(), describe_placed)
