"""A plan applied to a module: parameters divided over the ranks, forwards prepared.

States of undivided modules, loaded into divided ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ferrodist.deadline import Deadline
from ferrodist.errors import UnsupportedOpError
from ferrodist.mesh import DeviceMesh
from ferrodist.parallel.module_init import materialise, verify_across_ranks
from ferrodist.parallel.tensor_parallel.async_linear import AsyncTPLinear
from ferrodist.parallel.tensor_parallel.module_io import (
    GatheredMethod,
    ParallelModel,
    ReplicatedForward,
    ShardedForward,
)
from ferrodist.parallel.tensor_parallel.plan import check_values, describe_plan, parameter_placements, resolve_plan
from ferrodist.parallel.tensor_parallel.styles import ColumnParallel, Style
from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.factories import distribute
from ferrodist.tensor.grad_placements import keep_grad_placements
from ferrodist.tensor.placement import Replicate
from ferrodist.torch_private.modules import own_buffers, own_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ferrodist.tensor.placement import Placement


def accept_full_state_dicts(module: nn.Module) -> None:
    """Have ``load_state_dict`` of a module, or of one in it, take plain whole tensors too, of which rank 0's count."""
    for one in module.modules():
        one.register_load_state_dict_pre_hook(_distribute_values)  # type: ignore[no-untyped-call]
        one.register_load_state_dict_post_hook(_place_gradients)  # type: ignore[no-untyped-call]


def _distribute_values(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    tensors = {**own_parameters(module), **own_buffers(module)}
    for key, own in tensors.items():
        value = state.get(prefix + key)
        if not isinstance(own, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        if value.shape == own.shape:  # else torch says what doesn't fit
            state[prefix + key] = distribute(value.detach(), own.mesh, own.placements)


def _place_gradients(module: nn.Module, *_: Any) -> None:
    """Parameters that were assigned are other ones than those that had their gradients placed."""
    parameters: dict[str, torch.Tensor | None] = {**own_parameters(module)}
    for own in parameters.values():
        if isinstance(own, DTensor):
            keep_grad_placements(own)


_Module = TypeVar("_Module", bound=nn.Module)


def parallelize(
    module: _Module,
    mesh: DeviceMesh,
    plan: Mapping[str, Style],
    *,
    gathers_outputs: bool = True,
    check: bool = False,
    init: Callable[[nn.Module], object] | None = None,
) -> _Module:
    """Divide a module over the ranks of a mesh, as a plan says; every rank of the mesh calls this.

    Parameters become DTensors, with the values of rank 0 of the mesh: those that the plan names divided, all others,
    and buffers, whole on every rank. The module's own code runs as it is, on DTensors. Plain tensors that it makes, as
    positions and masks, count as whole, in gradients too; the ranks compare what they have, and inputs, at the end of a
    forward, or a backward, in which there were such. From outside the module looks undivided, and so does each module
    in it: plain tensors that come in count as whole, and plain whole tensors come out; so do those in tuples, lists,
    mappings and dataclasses, which are copied where they have tensors. A method ``generate`` gives what it gives of
    plain tensors.

    Its ``state_dict()`` has DTensors, whose ``full_tensor()`` can be saved; ``load_state_dict`` takes these and plain
    whole tensors, of which rank 0's count. Make optimizers after this.

    Args:
        module: The module, which is changed in place. Parameters may be on the meta device: then no rank ever holds
            more than its parts, and all parameters of one module in it.
        mesh: The ranks, along one axis: a slice of a larger mesh by its name.
        plan: Styles by the paths of modules, as ``named_modules`` has them: ``{"blocks.*.up": ColumnParallel()}``. A
            ``*`` stands for any one name of a path, or a part of one. The empty path is the module itself.
        gathers_outputs: Whether the module's outputs become plain whole tensors. False gives DTensors, as scores that
            stay divided by the vocabulary until ``cross_entropy``.
        check: Compare each plain tensor before it is used, and those that come in, by an exchange for each, also where
            the model makes none. That names the first that differs, also where ranks with different ones don't come to
            the forward's end together.
        init: ``init(module)`` gives a module's own parameters and buffers their values where they were on the meta
            device; None calls ``module.reset_parameters()``. Every rank calls it; rank 0's values count.

    Returns:
        ``module``.

    Raises:
        TypeError: An argument is of another kind, or a style is of another module.
        ValueError: The mesh has several axes; a path of the plan is of no module; a module, or a parameter that modules
            share, gets different styles; a parameter is distributed already, has a gradient, or no shape yet. Nothing
            was changed.
        UnsupportedOpError: One of the two on another rank; or a module on the meta device has nothing to give it
            values. Nothing was changed.
        CollectiveMismatchError: On every rank: modules or plans differ between ranks. Nothing was changed.
    """
    check_mesh(mesh)
    if not isinstance(module, nn.Module):
        raise TypeError(f"parallelize takes a torch.nn.Module, not {type(module).__name__}")
    settings = f"gathers_outputs={gathers_outputs}, check={check}"
    styles = shard_module(module, mesh, plan, settings=settings, init=init)
    model = ParallelModel(mesh, gathers=gathers_outputs, checks=check)
    for path, one in module.named_modules():
        if path in styles:
            _prepare(one, mesh, styles[path])
        if type(one).forward is not nn.Module.forward:
            one.forward = ReplicatedForward(one.forward, path, model)
        if callable(getattr(type(one), "generate", None)):
            one.generate = GatheredMethod(one.generate, model)
    return module


def apply_style(module: nn.Module, mesh: DeviceMesh, style: Style, given: Placement) -> None:
    """Make one module a layer by itself, divided and with its forward prepared; every rank of the mesh calls this.

    Args:
        module: The module, which is changed in place.
        mesh: The ranks, along one axis.
        style: How.
        given: How an input lies that comes as a plain tensor, this rank's part.

    Raises:
        TypeError, ValueError, CollectiveMismatchError: As for `parallelize`.
    """
    check_mesh(mesh)
    shard_module(module, mesh, {"": style}, settings=f"plain inputs {given}")
    _prepare(module, mesh, style, given)


def shard_module(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, Style],
    *,
    settings: str = "",
    init: Callable[[nn.Module], object] | None = None,
) -> dict[str, Style]:
    """Make the parameters and buffers of a module and those in it DTensors, with the values of the mesh's rank 0.

    Args:
        module: The module.
        mesh: The ranks; all of them call this.
        plan: As for `parallelize`; the parameters of modules without a style are whole on every rank.
        settings: What else must be the same on all ranks.
        init: As for `parallelize`.

    Returns:
        The styles by the paths of modules.

    Raises:
        TypeError, ValueError, UnsupportedOpError, CollectiveMismatchError: As for `parallelize`.
    """
    failure = None
    styles: dict[str, Style] = {}
    placements: dict[nn.Parameter, Placement] = {}
    try:
        styles = resolve_plan(module, plan)
        placements = parameter_placements(module, styles)
        check_values(module, init)
    except (TypeError, ValueError, UnsupportedOpError) as error:
        failure = error  # the others hear of it below, or they would wait for this rank
    lines = [] if failure else [f"the settings {settings!r}", *describe_plan(module, styles, placements)]
    refusal = None if failure is None else str(failure)
    deadline = Deadline(mesh.group.timeout)
    name = type(module).__name__
    try:
        verify_across_ranks(lines, mesh.group, deadline, maker="parallelize", module=name, refusal=refusal)
    except UnsupportedOpError:
        if failure is not None:
            raise failure from None
        raise
    _distribute(module, mesh, placements, init)
    accept_full_state_dicts(module)
    return styles


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise unless it is a mesh of one axis."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"the ranks are given as a DeviceMesh of one axis, not as {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(
            f"tensor parallelism is over one axis, and this mesh has {', '.join(map(repr, mesh.axis_names))}: pass a"
            f" slice, as mesh[{mesh.axis_names[-1]!r}]"
        )


@torch.no_grad()
def _distribute(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Mapping[nn.Parameter, Placement],
    init: Callable[[nn.Module], object] | None,
) -> None:
    """Put DTensors in the places of parameters and buffers, module by module."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for path, owner in module.named_modules():
        parameters, buffers = dict(own_parameters(owner)), dict(own_buffers(owner))
        materialise(path, owner, init)
        for key, own in parameters.items():
            if own is None:
                continue
            if own not in made:
                divided = distribute(getattr(owner, key).detach(), mesh, placements[own])
                made[own] = nn.Parameter(divided, requires_grad=own.requires_grad)
                keep_grad_placements(made[own])
            setattr(owner, key, made[own])  # modules may keep lists of theirs, which they then renew
        for key, buffer in buffers.items():
            if buffer is not None and not isinstance(buffer, DTensor):
                if buffer not in made:
                    made[buffer] = distribute(getattr(owner, key).detach(), mesh, Replicate())
                own_buffers(owner)[key] = made[buffer]


def _prepare(module: nn.Module, mesh: DeviceMesh, style: Style, given: Placement | None = None) -> None:
    forward = module.forward
    if isinstance(style, ColumnParallel) and style.chunks > 1:
        assert isinstance(module, nn.Linear), "the style has checked it"
        forward = AsyncTPLinear(module, style.chunks)
    module.forward = ShardedForward(forward, mesh, style.preparation(), given)
