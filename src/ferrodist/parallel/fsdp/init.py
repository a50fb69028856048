"""A module becomes units: forms compared, values taken from rank 0, one unit in memory at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

from ferrodist.collectives.arguments import check_tensor
from ferrodist.collectives.engines.select import engine_of
from ferrodist.collectives.objects import all_gather_object
from ferrodist.collectives.reduce_op import ReduceOp, check_dtype, check_reduction
from ferrodist.deadline import Deadline
from ferrodist.errors import UnsupportedOpError, add_error_context
from ferrodist.parallel.fsdp.dtensor_params import layout_of, part_of
from ferrodist.parallel.fsdp.flat_layout import FlatLayout, find_gone, order_of, release_names
from ferrodist.parallel.fsdp.flat_param import FlatParameters
from ferrodist.parallel.fsdp.memory import allocate_shards
from ferrodist.parallel.fsdp.unit import Unit
from ferrodist.parallel.module_guard import claim_parameters, describe_owner
from ferrodist.parallel.module_init import (
    describe,
    find_unsynchronised_batch_norm,
    has_meta_tensors,
    materialise,
    verify_across_ranks,
    write_obstacle,
)
from ferrodist.tensor.dtensor import is_grad_placement_hook
from ferrodist.tensor.placement import Partial
from ferrodist.torch_private.autograd import backward_hooks, has_accumulate_hooks
from ferrodist.torch_private.modules import own_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.parallel.fsdp.config import MixedPrecision, ShardAxes
    from ferrodist.parallel.fsdp.wrap import UnitPlan
    from ferrodist.tensor.spec import DTensorSpec

_ADVICE = "Every rank of the group must make it, at the same point of its program."


def check_same_plan(
    plans: Sequence[UnitPlan], root: torch.nn.Module, axes: ShardAxes, settings: str, *, device: torch.device
) -> None:
    """Compare units, parameters and buffers with those of rank 0; every rank of the group calls this.

    Names that models had which are gone on all ranks are free again; see [Note: names] in `flat_layout.py`.

    Raises:
        CollectiveMismatchError: On every rank, naming the first difference. The group stays good.
        UnsupportedOpError, ValueError: On every rank, naming what can't be divided. The group stays good.
        ValueError: On every rank: they have different parts of a distributed parameter. The group stays good.
    """
    group = axes.whole
    lines = [f"settings {settings}", *_describe(plans, root)]
    refusal = _refusal(plans, root, device, group)
    deadline = Deadline(group.timeout)
    verify_across_ranks(lines, group, deadline, maker="FSDP", module=type(root).__name__, refusal=refusal)
    said = (find_gone(group), _find_places(plans))
    answers = all_gather_object(said, group=group, timeout=deadline.remaining())
    release_names(group, set.intersection(*(set(gone) for gone, _ in answers)))
    _check_same_parts(plans, [places for _, places in answers], group)


def _find_places(plans: Sequence[UnitPlan]) -> list[tuple[int, ...] | None]:
    """Where this rank is in the mesh of each parameter; None for plain ones."""
    layouts = [layout_of(parameter) for plan in plans for parameter in plan.parameters.values()]
    return [None if layout is None else layout.mesh.coordinate for layout in layouts]


def _check_same_parts(plans: Sequence[UnitPlan], places: Sequence[Sequence[object]], group: Backend) -> None:
    """Raise unless all ranks have the same parts, for FSDP makes equal what they have."""
    names = [name for plan in plans for name in plan.parameters]
    for rank, theirs in enumerate(places):
        for name, first, other in zip(names, places[0], theirs, strict=True):
            if first != other:
                raise ValueError(
                    f"ranks 0 and {rank} of group {group.name!r} have different parts of parameter {name!r}, at"
                    f" {first} and {other} of its mesh: give FSDP the ranks that have the same part, along another axis"
                    " than the parameter's, as mesh['data'] of a DeviceMesh where mesh['tensor'] divides the module"
                )


def _describe(plans: Sequence[UnitPlan], root: torch.nn.Module) -> list[str]:
    lines: list[str] = []
    for plan in plans:
        lines.append(f"unit {plan.name!r}")
        lines += [
            f"{'' if parameter.requires_grad else 'frozen '}parameter {_describe_tensor(name, parameter)}"
            for name, parameter in plan.parameters.items()
        ]
    return lines + [f"buffer {_describe_tensor(name, buffer)}" for name, buffer in root.named_buffers()]


def _describe_tensor(name: str, tensor: torch.Tensor) -> str:
    if is_lazy(tensor) or tensor.is_nested:
        return describe(name, tensor)
    spec = layout_of(tensor)
    if spec is not None:
        return f"{describe(name, tensor)}, distributed as {spec} of {spec.mesh.shape} ranks"
    is_channels_last = isinstance(tensor, torch.nn.Parameter) and order_of(tensor) is not None
    return f"{describe(name, tensor)}{', channels last' if is_channels_last else ''}"


def _refusal(plans: Sequence[UnitPlan], root: torch.nn.Module, device: torch.device, group: Backend) -> str | None:
    """Why a parameter or buffer can't be divided or sent, or None."""
    parameters = {name: parameter for plan in plans for name, parameter in plan.parameters.items()}
    if reason := _device_refusal({**parameters, **dict(root.named_buffers())}, device, group):
        return reason
    if reason := describe_owner(parameters.items()):
        return f"{reason}: build the module anew"
    for name, parameter in parameters.items():
        if reason := _parameter_refusal(parameter):
            return f"parameter {name!r} {reason}"
    for name, buffer in root.named_buffers():
        if reason := _tensor_refusal(buffer):
            return f"buffer {name!r}: {reason}"
        if obstacle := write_obstacle(part_of(buffer)):
            return f"buffer {name!r} {obstacle}, so nothing can be written to it: make it a clone()"
    return find_unsynchronised_batch_norm(root, group)


def find_device(plans: Sequence[UnitPlan], root: torch.nn.Module, given: torch.device | str | None) -> torch.device:
    """Where a model is: the device of the first of its parameters and buffers that is on one, else the given one.

    Raises:
        ValueError: They differ.
    """
    chosen = None if given is None else torch.device(given)
    if chosen == torch.device("cuda"):
        chosen = torch.device("cuda", torch.cuda.current_device())
    parameters = (parameter for plan in plans for parameter in plan.parameters.values())
    found = next((tensor.device for tensor in (*parameters, *root.buffers()) if not tensor.is_meta), chosen)
    if chosen is not None and found != chosen:
        raise ValueError(f"device={given!r} is not where the module is, on {found}: move it with to(), or leave it out")
    return found or torch.device("cpu")


def _device_refusal(tensors: Mapping[str, torch.Tensor], device: torch.device, group: Backend) -> str | None:
    """Why a model can't be where it is, or None."""
    for name, tensor in tensors.items():
        if not tensor.is_meta and tensor.device != device:
            return f"{name!r} is on {tensor.device} and not on {device}: a model is on one device, move it with to()"
    if group.world_size > 1:
        try:
            engine_of(group, device)
        except UnsupportedOpError as error:
            return error.message
    return None


def _parameter_refusal(parameter: torch.nn.Parameter) -> str | None:
    if bool(is_lazy(parameter)):  # as a condition it would promise that parameters are never lazy
        return "is lazy and has no shape yet: run the module once before FSDP"
    if parameter.grad is not None:
        return "has a gradient, which would be lost: call zero_grad() before FSDP"
    if parameter.is_inference():
        return "was made under inference_mode and can't be written to: make it a clone()"
    if _has_hooks(parameter):
        return (
            "has hooks (register_hook, register_post_accumulate_grad_hook, or those of a DDP), which would never be"
            " called, for backward sees other parameters: remove them before FSDP"
        )
    layout = layout_of(parameter)
    if layout is not None and any(isinstance(placement, Partial) for placement in layout.placements):
        return "is a distributed one of partial sums, which ranks can't train: redistribute() it first"
    reason = _tensor_refusal(parameter)
    return reason and f"can't be divided: {reason}"


def _has_hooks(parameter: torch.Tensor) -> bool:
    others = any(not is_grad_placement_hook(hook) for hook in backward_hooks(parameter).values())
    return others or has_accumulate_hooks(parameter)


def _tensor_refusal(tensor: torch.Tensor) -> str | None:
    try:
        if tensor.device.type == "meta":
            check_dtype(tensor.dtype)
        else:
            check_tensor(part_of(tensor))
        if tensor.requires_grad:
            check_reduction(tensor.dtype, ReduceOp.MEAN)
    except (TypeError, NotImplementedError) as error:
        return str(error)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Parameters of a unit that lie in one flat tensor: of one dtype, all trainable or all frozen."""

    unit: int
    names: tuple[str, ...]
    dtype: torch.dtype
    layout: FlatLayout
    dtypes: tuple[torch.dtype, torch.dtype]


@torch.no_grad()
def build_units(
    plans: Sequence[UnitPlan],
    axes: ShardAxes,
    precision: MixedPrecision,
    init: Callable[[torch.nn.Module], object] | None,
    *,
    layouts: Mapping[str, DTensorSpec],
    device: torch.device,
) -> list[Unit]:
    """Divide a model's parameters over the ranks, with the values of rank 0; every rank of the group calls this.

    Beside the shards it needs the memory of one unit, twice.

    Args:
        plans: The units to be.
        axes: Who divides.
        precision: Which dtypes travel.
        init: Gives a module's parameters values where they were on the meta device.
        layouts: How the tensors lie of which parameters are parts, by the parameters' names.
        device: Where the parameters are, or get memory.
    """
    kinds = [
        kind for number, plan in enumerate(plans) for kind in _kinds(number, plan, axes, precision, distributed=layouts)
    ]
    memories = allocate_shards(
        [(kind.layout.shard_size, kind.dtype, kind.dtypes[0]) for kind in kinds], axes.shard, device
    )
    units = []
    for number, plan in enumerate(plans):
        _materialise(plan, init, device)
        flats = []
        for kind, memory in zip(kinds, memories, strict=True):
            if kind.unit != number:
                continue
            flat = FlatParameters(
                kind.names,
                [plan.parameters[name] for name in kind.names],
                [plan.places[name] for name in kind.names],
                layout=kind.layout,
                axes=axes,
                dtypes=kind.dtypes,
                memory=memory,
                distributed=[layouts.get(name) for name in kind.names],
            )
            with add_error_context(lambda: f"Rank 0 was giving the values of unit {plan.name!r}.", _ADVICE):  # noqa: B023
                flat.take_values(flat.parameters)
            flat.adopt_pieces()
            claim_parameters([*flat.parameters, *flat.fulls], "an FSDP, which has divided it over the ranks")
            flats.append(flat)
        units.append(Unit(number, plan.name, plan.module, flats, axes.whole))
    return units


def _kinds(
    number: int, plan: UnitPlan, axes: ShardAxes, precision: MixedPrecision, *, distributed: Collection[str]
) -> list[_Kind]:
    names: dict[tuple[torch.dtype, bool], list[str]] = {}
    for name, parameter in plan.parameters.items():
        names.setdefault((parameter.dtype, parameter.requires_grad), []).append(name)
    found = []
    for (dtype, _), members in names.items():
        shapes = [plan.parameters[name].shape for name in members]
        orders = [None if name in distributed else order_of(plan.parameters[name]) for name in members]
        computed, reduced = precision.computed(dtype), precision.reduced(dtype)
        layout = FlatLayout(
            shapes, axes.num_shards, axes.whole, orders=orders, kept=dtype, gathered=computed, reduced=reduced
        )
        found.append(_Kind(unit=number, names=tuple(members), dtype=dtype, layout=layout, dtypes=(computed, reduced)))
    return found


def _materialise(plan: UnitPlan, init: Callable[[torch.nn.Module], object] | None, device: torch.device) -> None:
    """Give the unit's parameters and buffers that are on the meta device memory and values."""
    owners = dict.fromkeys(module for places in plan.places.values() for module, _ in places)
    for name, module in plan.module.named_modules():
        if module in owners or (has_meta_tensors(module) and not any(True for _ in module.parameters(recurse=False))):
            materialise(f"{plan.name}.{name}".strip("."), module, init, device)
    for name, places in plan.places.items():
        module, attribute = places[0]
        real = own_parameters(module)[attribute]
        assert real is not None
        plan.parameters[name] = real
        for other, other_attribute in places[1:]:
            setattr(other, other_attribute, real)
