"""`parallelize`: a plan applied to a module, whose parameters become DTensors and whose forwards are wrapped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ferrodist.arguments import check_bool, check_type
from ferrodist.collectives.objects import all_gather_object
from ferrodist.deadline import Deadline
from ferrodist.errors import CollectiveMismatchError
from ferrodist.mesh import DeviceMesh
from ferrodist.parallel.module_init import (
    LeaveEmpty,
    empty_value,
    materialise,
    resolve_initialiser,
    verify_across_ranks,
)
from ferrodist.parallel.program_failures import report_failure
from ferrodist.parallel.tensor_parallel.async_linear import AsyncTPLinear
from ferrodist.parallel.tensor_parallel.experts import ExpertStyle, IdentityExpert
from ferrodist.parallel.tensor_parallel.gathered_method import GatheredMethod
from ferrodist.parallel.tensor_parallel.local_blocks import LocalBlock, find_local_blocks
from ferrodist.parallel.tensor_parallel.local_forwards import make_local_forward
from ferrodist.parallel.tensor_parallel.model_plan import read_plan
from ferrodist.parallel.tensor_parallel.plan import check_tensors, parameter_placements, plan_lines, resolve_plan
from ferrodist.parallel.tensor_parallel.styles import ColumnParallel, Style
from ferrodist.parallel.tensor_parallel.trial_queue import TrialQueue
from ferrodist.parallel.tensor_parallel.wrapped_forwards import (
    ParallelState,
    ReplicatedForward,
    ShardedForward,
)
from ferrodist.tensor.dtensor import DTensor, keep_grad_placements
from ferrodist.tensor.factories import distribute, full
from ferrodist.tensor.placement import Placement, Replicate
from ferrodist.torch_private.modules import own_buffers, own_parameters
from ferrodist.wording import with_article

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def _distribute_values(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Distribute full plain tensors of a state that is being loaded, those of rank 0; all ranks must have the same."""
    tensors = {**own_parameters(module), **own_buffers(module)}
    targets = {prefix + key: own for key, own in tensors.items() if isinstance(own, DTensor)}
    if not targets:
        return
    found = {name: state[name] for name in targets if isinstance(state.get(name), torch.Tensor)}
    _compare_states(targets, found)
    for name, value in found.items():
        own = targets[name]
        if not isinstance(value, DTensor) and value.shape == own.shape:  # else torch says what doesn't fit
            state[name] = distribute(value.detach(), own.mesh, own.placements)


def _compare_states(targets: Mapping[str, DTensor], found: Mapping[str, torch.Tensor]) -> None:
    """Raise CollectiveMismatchError on all ranks unless they load the same tensors into a module."""
    mesh = next(iter(targets.values())).mesh
    forms = [
        f"{found[name].dtype} of shape {tuple(found[name].shape)}{_if_distributed(found[name])}"
        if name in found
        else "none"
        for name in targets
    ]
    ranks_forms = all_gather_object(forms, group=mesh.group)
    for rank, other in zip(mesh.ranks, ranks_forms, strict=True):
        if other != ranks_forms[0]:
            name, one, another = next(
                each for each in zip(targets, ranks_forms[0], other, strict=True) if each[1] != each[2]
            )
            raise CollectiveMismatchError(
                f"load_state_dict of a parallelized model: the ranks have different states: of {name!r} rank"
                f" {mesh.ranks[0]} has {one}, rank {rank} {another}. Pass the same names, shapes and dtypes on all"
                " ranks; the values are rank 0's",
                ranks=(rank,),
            )


def _if_distributed(value: torch.Tensor) -> str:
    return ", distributed" if isinstance(value, DTensor) else ""


def _keep_grad_placements(module: nn.Module, *_: Any) -> None:
    """Hook the parameters, which are new ones if the state was assigned."""
    parameters: dict[str, torch.Tensor | None] = {**own_parameters(module)}
    for own in parameters.values():
        if isinstance(own, DTensor):
            keep_grad_placements(own)


_Module = TypeVar("_Module", bound=nn.Module)


def parallelize(
    module: _Module,
    mesh: DeviceMesh,
    plan: Mapping[str, Style | str] | str,
    *,
    gathers_outputs: bool = True,
    check: bool = False,
    fallback: str = "replicate",
    init: Callable[[nn.Module], object] | str | None = None,
    local_blocks: bool | None = None,
) -> _Module:
    """Shard a module over the ranks of a mesh by a plan; every rank of the mesh calls this.

    Parameters become DTensors, with the values of the mesh's rank 0: sharded if the plan names them, else replicated,
    as buffers are. The module's own code runs unchanged, on DTensors. Plain tensors that it makes, such as positions
    and masks, count as replicated, in gradients too; at the end of a forward or a backward that used some, the ranks
    compare them, and the inputs. From outside the module, and each of its sub-modules, looks unsharded: plain inputs
    count as replicated, and outputs are full plain tensors; so are those in tuples, lists, mappings and dataclasses,
    which are copied if they have tensors. A method ``generate`` returns plain tensors too.

    The ``state_dict()`` has DTensors, whose ``full_tensor()`` can be saved; ``load_state_dict`` takes these and full
    plain tensors, of which it reads rank 0's. Make optimizers after this.

    Args:
        module: The module, which is changed in place. Parameters may be on the meta device: then no rank ever holds
            more than its shards and all parameters of one sub-module.
        mesh: The ranks, along one axis: a slice of a larger mesh by its name.
        plan: Styles by the paths of modules, as in ``named_modules``: ``{"blocks.*.up": ColumnParallel()}``. A ``*``
            matches any name in a path, or a part of one. The empty path is the module itself.
            "auto" takes the plan of the model itself, ``model.tp_plan`` of a transformers model. A style may be one of
            transformers' names, as ``"colwise"``, also for the path of a parameter. `describe_plan` shows a plan.
        gathers_outputs: Whether the module's outputs become full plain tensors. False gives DTensors, such as logits
            that stay sharded by the vocabulary until ``cross_entropy``.
        check: Whether to compare each plain tensor before it is used, and each input, by an exchange for each, even if
            the model makes none. The error then names the first tensor that differs, even if the ranks don't reach the
            forward's end together.
        fallback: The treatment of operators that DTensor has no rule for, in forwards and gradients. "replicate"
            gathers its inputs, and every rank computes all of it; a warning, once for an operator and a module, names
            both, and the bytes that a rank sends. "error" raises UnsupportedOpError. In a backward the setting
            of the model counts whose forward was the last one on the mesh.
        init: ``init(module)`` initialises a module's own parameters and buffers if they were on the meta device; None
            calls ``module.reset_parameters()``, or in a transformers model its ``_init_weights(module)``. Every rank
            calls it; rank 0's values are used. "empty" fills such parameters with NaN, for a load that follows: a rank
            then allocates its shards alone, and nothing is sent. Buffers are initialised as by None.
        local_blocks: Whether blocks of linear layers and norms, as a decoder's layers, compute on local tensors once
            the ranks have found that this gives the same bits: they try each kind of forwards out, at the beginning of
            the next one, which takes longer. None is for blocks whose classes are all of torch, transformers or peft.
            True is for all blocks: their code must have no state that isn't in attributes, and no effect but its
            result, for trials repeat it. Not with ``check=True``.

    Returns:
        ``module``.

    Raises:
        TypeError: An argument has the wrong type, or a style is for another class of modules.
        ValueError: ``fallback`` is another string; the mesh has several axes; a path of the plan matches no module; a
            module, or a parameter that modules share, gets different styles; a parameter is distributed already, has a
            gradient, or no shape yet. Nothing was changed.
        UnsupportedOpError: Another rank raised one of these two; or a module on the meta device can't be initialised.
            Nothing was changed.
        CollectiveMismatchError: On every rank: modules or plans differ between ranks. Nothing was changed.
    """
    check_mesh(mesh)
    initialise, failure = None, None
    try:
        check_type(module, nn.Module, "parallelize takes a torch.nn.Module")
        check_bool("gathers_outputs", gathers_outputs)
        check_bool("check", check)
        if local_blocks is not None:
            check_bool("local_blocks", local_blocks)
        _check_fallback(fallback)
        initialise = resolve_initialiser(init, module)
    except (TypeError, ValueError) as error:
        failure = error
    settings = f"gathers_outputs={gathers_outputs}, check={check}, fallback={fallback!r}, local_blocks={local_blocks}"
    if isinstance(initialise, LeaveEmpty):
        settings += ", init='empty'"
    styles = shard_module(module, mesh, plan, settings=settings, init=initialise, failure=failure)
    state = ParallelState(mesh, gathers=gathers_outputs, checks=check, replicates=fallback == "replicate")
    for path, one in module.named_modules():
        _wrap_forward(one, mesh, styles.get(path))
    if local_blocks is not False and not check:
        for path, block in find_local_blocks(module, styles, takes_all=bool(local_blocks)).items():
            block.forward = LocalBlock(block, state, f"{path} {type(block).__name__}")
            state.trials = state.trials or TrialQueue()
    for path, one in module.named_modules():
        if type(one).forward is not nn.Module.forward:
            one.forward = ReplicatedForward(one.forward, path, state)
        if callable(getattr(type(one), "generate", None)):
            one.generate = GatheredMethod(one.generate, state)
    return module


def _check_fallback(fallback: object) -> None:
    check_type(fallback, str, 'fallback must be "replicate" or "error"')
    if fallback not in ("replicate", "error"):
        raise ValueError(f'fallback must be "replicate" or "error", not {fallback!r}')


def apply_style(module: nn.Module, mesh: DeviceMesh, style: Style, given: Placement) -> None:
    """Shard a module in place and wrap its forward, which takes plain inputs placed as ``given``; all ranks call."""
    check_mesh(mesh)
    shard_module(module, mesh, {"": style}, settings=f"plain inputs {given}")
    _wrap_forward(module, mesh, style, given)


def shard_module(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, Style | str] | str,
    *,
    settings: str = "",
    init: Callable[[nn.Module], object] | None = None,
    failure: Exception | None = None,
) -> dict[str, Style]:
    """Make the parameters and buffers of a module and its sub-modules DTensors, with the values of the mesh's rank 0.

    Every rank of the mesh calls this. Parameters of modules without a style are replicated. ``settings`` must be the
    same on all ranks; ``failure`` is an error that this rank has found already. When it raises, on all ranks, the
    module is as it was. Returns the styles by the paths of modules.
    """
    styles: dict[str, Style] = {}
    placements: dict[nn.Parameter, Placement] = {}
    try:
        if failure is None:
            styles = resolve_plan(module, read_plan(module, plan))
            placements = parameter_placements(module, styles)
            check_tensors(module, init)
    except Exception as error:  # noqa: BLE001 - the other ranks learn it below, else they would wait for this one
        failure = error
    lines = [] if failure else [f"the settings {settings!r}", *plan_lines(module, styles, placements)]
    deadline = Deadline(mesh.group.timeout)
    name = type(module).__name__
    verify_across_ranks(lines, mesh.group, deadline, maker="parallelize", module=name, failure=failure)
    replaced: list[tuple[nn.Module, dict[str, torch.Tensor | None]]] = []
    try:
        _distribute(module, mesh, placements, init, replaced)
    except BaseException as error:
        for owner, tensors in replaced:
            restore_tensors(owner, tensors)
        if isinstance(error, Exception):
            report_failure(mesh.group, f"parallelize of {with_article(name)}", error)
        raise
    for one in module.modules():
        one.register_load_state_dict_pre_hook(_distribute_values)  # type: ignore[no-untyped-call]
        one.register_load_state_dict_post_hook(_keep_grad_placements)  # type: ignore[no-untyped-call]
    return styles


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise unless ``mesh`` is a mesh of one axis."""
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
    replaced: list[tuple[nn.Module, dict[str, torch.Tensor | None]]],
) -> None:
    """Replace parameters and buffers by DTensors, module by module; those before are added to ``replaced``."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for path, owner in module.named_modules():
        parameters, buffers = dict(own_parameters(owner)), dict(own_buffers(owner))
        replaced.append((owner, {**parameters, **buffers}))
        materialise(path, owner, init)
        for key, own in parameters.items():
            if own is None:
                continue
            if own not in made:
                value = getattr(owner, key).detach()
                distributed = (
                    _empty(value, mesh, placements[own]) if value.is_meta else distribute(value, mesh, placements[own])
                )
                made[own] = nn.Parameter(distributed, requires_grad=own.requires_grad)
                keep_grad_placements(made[own])
            setattr(owner, key, made[own])  # a module may have a list of its parameters, which this renews
        for key, buffer in buffers.items():
            if buffer is not None and not isinstance(buffer, DTensor):
                if buffer not in made:
                    made[buffer] = distribute(getattr(owner, key).detach(), mesh, Replicate())
                own_buffers(owner)[key] = made[buffer]


def restore_tensors(owner: nn.Module, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Give a module its own parameters and buffers of before."""
    for key, tensor in tensors.items():
        if key in own_parameters(owner):
            setattr(owner, key, tensor)
        else:
            own_buffers(owner)[key] = tensor


def _empty(value: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """A distributed tensor like one on the meta device, which `LeaveEmpty` has left there."""
    return full(value.shape, empty_value(value.dtype), mesh=mesh, placements=placement, dtype=value.dtype)


def _wrap_forward(module: nn.Module, mesh: DeviceMesh, style: Style | None, given: Placement | None = None) -> None:
    if isinstance(style, ExpertStyle | IdentityExpert):
        module.forward = style.make_forward(module, mesh)
        return
    forward = make_local_forward(module)
    if isinstance(style, ColumnParallel) and style.chunks > 1:
        assert isinstance(module, nn.Linear), "the style has checked it"
        forward = AsyncTPLinear(module, style.chunks)
    if style is not None:
        forward = ShardedForward(forward, mesh, style.preparation(), given)
    if forward != module.forward:
        module.forward = forward
