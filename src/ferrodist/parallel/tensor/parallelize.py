"""A plan applied to a module: parameters divided over the ranks, forwards prepared."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from torch import nn

from ferrodist.mesh import DeviceMesh
from ferrodist.parallel.tensor.forward import PreparedForward, WholeForward
from ferrodist.parallel.tensor.overlap import OverlappedLinear
from ferrodist.parallel.tensor.styles import ColumnParallel, Preparation, Style
from ferrodist.tensor.distribution import distribute
from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.gradient_placement import keep_gradients_placed
from ferrodist.tensor.placement import Placement, Replicate

__all__ = ["apply_style", "check_mesh", "divide", "parallelize"]


def parallelize(
    module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Style], *, gathers_outputs: bool = True
) -> nn.Module:
    """Divide a module over the ranks of a mesh, as a plan says; every rank of the mesh calls this.

    Parameters become DTensors, with the values of rank 0 of the mesh: those that the plan names divided, all others,
    and buffers, whole on every rank. The module's own code runs as it is, on DTensors: tensors that it makes itself and
    mixes with them must be distributed too. From outside it looks undivided: plain tensors that come in count as whole,
    and plain whole tensors come out.

    Make optimizers after this.

    Args:
        module: The module, which is changed in place.
        mesh: The ranks, along one axis: a slice of a larger mesh by its name.
        plan: Styles by the paths of modules, as ``named_modules`` has them: ``{"blocks.*.up": ColumnParallel()}``. A
            ``*`` stands for any one name of a path, or a part of one. The empty path is the module itself.
        gathers_outputs: Whether the module's outputs become plain whole tensors. False gives DTensors, as scores that
            stay divided by the vocabulary until ``cross_entropy``.

    Returns:
        ``module``.

    Raises:
        TypeError: An argument is of another kind, or a style is of another module.
        ValueError: The mesh has several axes; a path of the plan is of no module; a module, or a parameter that modules
            share, gets different styles; a parameter is distributed already, or has a gradient. Nothing was changed.
        CollectiveMismatchError: Parameters differ in shape or dtype between ranks.
    """
    check_mesh(mesh)
    if not isinstance(module, nn.Module):
        raise TypeError(f"parallelize takes a torch.nn.Module, not {type(module).__name__}")
    styles = _match(module, plan)
    divide(module, mesh, styles)
    for name, one in module.named_modules():
        if name in styles:
            _prepare(one, mesh, styles[name])
        elif one is not module and any(True for _ in one.parameters(recurse=False)):
            # Plain tensors that the module's code makes and gives to it, as positions to an embedding.
            one.forward = PreparedForward(one.forward, mesh, Preparation())
    module.forward = WholeForward(module.forward, mesh, gathers=gathers_outputs)
    return module


def apply_style(module: nn.Module, mesh: DeviceMesh, style: Style, given: Placement) -> None:
    """Make one module a layer by itself, divided and with its forward prepared; every rank of the mesh calls this.

    Args:
        module: The module, which is changed in place.
        mesh: The ranks, along one axis.
        style: How.
        given: How an input lies that comes as a plain tensor, this rank's part.

    Raises:
        TypeError, ValueError: As for `parallelize`.
    """
    check_mesh(mesh)
    style.check(type(module).__name__, module)
    divide(module, mesh, {"": style})
    _prepare(module, mesh, style, given)


def divide(module: nn.Module, mesh: DeviceMesh, styles: Mapping[str, Style]) -> None:
    """Make the parameters and buffers of a module and those in it DTensors, with the values of the mesh's rank 0.

    Args:
        module: The module.
        mesh: The ranks; all of them call this.
        styles: By paths of modules; the parameters of others are whole on every rank.

    Raises:
        ValueError: As for `parallelize`.
    """
    _distribute(module, mesh, _place(module, styles))


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise unless it is a mesh of one axis."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"the ranks are given as a DeviceMesh of one axis, not as {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(
            f"tensor parallelism is over one axis, and this mesh has {', '.join(map(repr, mesh.axis_names))}: pass a"
            f" slice, as mesh[{mesh.axis_names[-1]!r}]"
        )


def _match(module: nn.Module, plan: Mapping[str, Style]) -> dict[str, Style]:
    """The style of each module that has one."""
    if not isinstance(plan, Mapping):
        raise TypeError(f"a plan is a mapping from paths to styles, not {type(plan).__name__}")
    modules = dict(module.named_modules())
    styles: dict[str, Style] = {}
    by: dict[str, str] = {}
    for pattern, style in plan.items():
        if not isinstance(style, Style):
            raise TypeError(f"the plan's {pattern!r} must be a style, as ColumnParallel(), not {style!r}")
        found = [name for name in modules if _fits(name, pattern)]
        if not found:
            raise ValueError(
                f"the plan's path {pattern!r} is of no module; some are {', '.join(map(repr, list(modules)[1:9]))}"
            )
        for name in found:
            if name in styles and styles[name] != style:
                raise ValueError(f"module {name!r} has two styles, by {by[name]!r} and by {pattern!r}")
            style.check(name, modules[name])
            styles[name], by[name] = style, pattern
    return styles


def _fits(name: str, pattern: str) -> bool:
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))


def _place(module: nn.Module, styles: Mapping[str, Style]) -> dict[nn.Parameter, Placement]:
    """How each parameter shall lie; one that modules share lies as the style of one of them says."""
    found: dict[nn.Parameter, Placement] = {}
    by: dict[nn.Parameter, str] = {}
    for path, owner in module.named_modules():
        style = styles.get(path)
        for key, parameter in owner.named_parameters(recurse=False):
            name = f"{path}.{key}".strip(".")
            _check_parameter(name, parameter)
            if style is None:
                found.setdefault(parameter, Replicate())
                continue
            placement = style.placement_of(key, parameter)
            if parameter in by and found[parameter] != placement:
                raise ValueError(
                    f"parameter {name!r} is also {by[parameter]!r}, and the plan divides it as {placement} and as"
                    f" {found[parameter]}: give both modules styles that agree"
                )
            found[parameter], by[parameter] = placement, name
    return found


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    is_distributed = isinstance(parameter, DTensor)
    if is_distributed:
        raise ValueError(f"parameter {name!r} is distributed already: parallelize a module once")
    if parameter.grad is not None:
        raise ValueError(f"parameter {name!r} has a gradient, which would be lost: call zero_grad() first")


def _distribute(module: nn.Module, mesh: DeviceMesh, placements: Mapping[nn.Parameter, Placement]) -> None:
    """Put DTensors in the places of parameters and buffers."""
    made = {}
    for parameter, placement in placements.items():
        divided = distribute(parameter.detach(), mesh, placement)
        made[parameter] = nn.Parameter(divided, requires_grad=parameter.requires_grad)
        if parameter.requires_grad:
            keep_gradients_placed(made[parameter])
    for owner in module.modules():
        for key, own in list(owner._parameters.items()):  # noqa: SLF001 - setattr would look them up again
            if own is not None:
                owner._parameters[key] = made[own]  # noqa: SLF001
        for key, buffer in list(owner._buffers.items()):  # noqa: SLF001
            if buffer is not None and not isinstance(buffer, DTensor):
                owner._buffers[key] = distribute(buffer, mesh, Replicate())  # noqa: SLF001


def _prepare(module: nn.Module, mesh: DeviceMesh, style: Style, given: Placement | None = None) -> None:
    forward = module.forward
    if isinstance(style, ColumnParallel) and style.chunks > 1:
        assert isinstance(module, nn.Linear), "the style has checked it"
        forward = OverlappedLinear(module, style.chunks)
    module.forward = PreparedForward(forward, mesh, style.preparation(), given)
