"""Construction of units: modules are verified, values taken from rank 0, with one unit in memory at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

from ferrodist.collectives.arguments import check_tensor
from ferrodist.collectives.engines.select import engine_of
from ferrodist.collectives.objects import all_gather_object
from ferrodist.collectives.reduce import broadcast
from ferrodist.collectives.reduce_op import ReduceOp, check_dtype, check_reduction
from ferrodist.deadline import Deadline
from ferrodist.errors import UnsupportedOpError, add_error_context
from ferrodist.parallel.fsdp.dtensor_params import local_tensor, spec_of
from ferrodist.parallel.fsdp.flat_layout import FlatLayout, dim_order
from ferrodist.parallel.fsdp.flat_memory import allocate_shards
from ferrodist.parallel.fsdp.flat_param import FlatParameters
from ferrodist.parallel.fsdp.layout_ids import layout_ids
from ferrodist.parallel.fsdp.unit import Unit
from ferrodist.parallel.module_init import (
    LeaveEmpty,
    describe,
    describe_tensors,
    empty_value,
    find_unsynchronised_batch_norm,
    has_meta_tensors,
    materialise,
    verify_across_ranks,
    write_obstacle,
)
from ferrodist.parallel.parameter_claims import claim_parameters, describe_claim
from ferrodist.tensor.dtensor import is_grad_placement_hook
from ferrodist.tensor.placement import Partial
from ferrodist.torch_private.autograd import backward_hooks, has_accumulate_hooks
from ferrodist.torch_private.modules import own_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.parallel.fsdp.config import MixedPrecision, ShardAxes
    from ferrodist.parallel.fsdp.wrap import UnitSpec
    from ferrodist.tensor.spec import DTensorSpec

_ADVICE = "Every rank of the group must make it, at the same point of its program."


def verify_units(
    specs: Sequence[UnitSpec], root: torch.nn.Module, axes: ShardAxes, settings: str, *, device: torch.device
) -> None:
    """Compare units, parameters and buffers with those of rank 0; every rank of the group calls this."""
    group = axes.world
    lines = [f"settings {settings}"]
    for spec in specs:
        lines += [f"unit {spec.name!r}", *describe_tensors(spec.parameters.items(), (), _describe_tensor)]
    lines += describe_tensors((), root.named_buffers(), _describe_tensor)
    refusal = _find_refusal(specs, root, device, group)
    deadline = Deadline(group.timeout)
    verify_across_ranks(lines, group, deadline, maker="FSDP", module=type(root).__name__, refusal=refusal)
    dtensor_specs = [spec_of(parameter) for spec in specs for parameter in spec.parameters.values()]
    coordinates = [None if spec is None else spec.mesh.coordinate for spec in dtensor_specs]
    own = (layout_ids(group).find_collected(), coordinates)
    gathered = all_gather_object(own, group=group, timeout=deadline.remaining())
    layout_ids(group).release(set.intersection(*(set(collected) for collected, _ in gathered)))
    # All ranks must have the same local tensors, since FSDP makes these equal.
    names = [name for spec in specs for name in spec.parameters]
    for rank, (_, theirs) in enumerate(gathered):
        for name, first, other in zip(names, gathered[0][1], theirs, strict=True):
            if first != other:
                raise ValueError(
                    f"ranks 0 and {rank} of group {group.name!r} have different local tensors of parameter {name!r}, at"
                    f" {first} and {other} of its mesh: give FSDP the ranks that have the same one, along another axis"
                    " than the parameter's, as mesh['data'] of a DeviceMesh where mesh['tensor'] divides the module"
                )


def _describe_tensor(name: str, tensor: torch.Tensor) -> str:
    if is_lazy(tensor) or tensor.is_nested:
        return describe(name, tensor)
    spec = spec_of(tensor)
    if spec is not None:
        return f"{describe(name, tensor)}, distributed as {spec} of {spec.mesh.shape} ranks"
    is_channels_last = isinstance(tensor, torch.nn.Parameter) and dim_order(tensor) is not None
    return f"{describe(name, tensor)}{', channels last' if is_channels_last else ''}"


def _find_refusal(specs: Sequence[UnitSpec], root: torch.nn.Module, device: torch.device, group: Backend) -> str | None:
    """The reason why a parameter or buffer can't be sharded or sent, or None."""
    parameters = {name: parameter for spec in specs for name, parameter in spec.parameters.items()}
    if reason := _device_refusal({**parameters, **dict(root.named_buffers())}, device, group):
        return reason
    if reason := describe_claim(parameters.items()):
        return f"{reason}: build the module anew"
    for name, parameter in parameters.items():
        if reason := _parameter_refusal(parameter):
            return f"parameter {name!r} {reason}"
    for name, buffer in root.named_buffers():
        if reason := _tensor_refusal(buffer):
            return f"buffer {name!r}: {reason}"
        if obstacle := write_obstacle(local_tensor(buffer)):
            return f"buffer {name!r} {obstacle}, so nothing can be written to it: make it a clone()"
    return find_unsynchronised_batch_norm(root, group)


def find_device(specs: Sequence[UnitSpec], root: torch.nn.Module, given: torch.device | str | None) -> torch.device:
    """The device of the first parameter or buffer that is not on meta, otherwise the given one."""
    chosen = None if given is None else torch.device(given)
    if chosen == torch.device("cuda"):
        chosen = torch.device("cuda", torch.cuda.current_device())
    parameters = (parameter for spec in specs for parameter in spec.parameters.values())
    found = next((tensor.device for tensor in (*parameters, *root.buffers()) if not tensor.is_meta), chosen)
    if chosen is not None and found != chosen:
        raise ValueError(f"device={given!r} is not where the module is, on {found}: move it with to(), or leave it out")
    return found or torch.device("cpu")


def choose_device(device: torch.device, *, cpu_offload: bool) -> torch.device:
    """The device of a model's units, given that of its tensors."""
    if cpu_offload and device.type != "cpu":
        raise UnsupportedOpError(
            f"cpu_offload=True keeps a model on the CPU and computes there, but this one is on {device}: leave it out,"
            " or move the module with cpu()"
        )
    return device


def _device_refusal(tensors: Mapping[str, torch.Tensor], device: torch.device, group: Backend) -> str | None:
    """The reason why a model can't be on its device, or None."""
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
    if bool(is_lazy(parameter)):  # bool(), or mypy would narrow parameters to lazy ones
        return "is lazy and has no shape yet: run the module once before FSDP"
    if parameter.grad is not None:
        return "has a gradient, which would be lost: call zero_grad() before FSDP"
    if parameter.is_inference():
        return "was made under inference_mode and can't be written to: make it a clone()"
    others = any(not is_grad_placement_hook(hook) for hook in backward_hooks(parameter).values())
    if others or has_accumulate_hooks(parameter):
        return (
            "has hooks (register_hook, register_post_accumulate_grad_hook, or those of a DDP), which would never be"
            " called, for backward sees other parameters: remove them before FSDP"
        )
    spec = spec_of(parameter)
    if spec is not None and any(isinstance(placement, Partial) for placement in spec.placements):
        return "is a distributed one of partial sums, which ranks can't train: redistribute() it first"
    reason = _tensor_refusal(parameter)
    return reason and f"can't be divided: {reason}"


def _tensor_refusal(tensor: torch.Tensor) -> str | None:
    try:
        if tensor.device.type == "meta":
            check_dtype(tensor.dtype)
        else:
            check_tensor(local_tensor(tensor))
        if tensor.requires_grad:
            check_reduction(tensor.dtype, ReduceOp.MEAN)
    except (TypeError, NotImplementedError) as error:
        return str(error)
    return None


@torch.no_grad()
def build_units(
    specs: Sequence[UnitSpec],
    axes: ShardAxes,
    precision: MixedPrecision,
    init: Callable[[torch.nn.Module], object] | None,
    *,
    dtensor_specs: Mapping[str, DTensorSpec],
    device: torch.device,
) -> list[Unit]:
    """Shard a model's parameters, with rank 0's values, in a unit's memory twice; every rank calls this."""
    unit_layouts = [_make_layouts(spec, axes, precision, dtensor_specs=dtensor_specs) for spec in specs]
    memories = iter(allocate_shards([layout for each in unit_layouts for _, layout in each], axes.shard, device))
    units = []
    for index, (spec, layouts) in enumerate(zip(specs, unit_layouts, strict=True)):
        _materialise(spec, init, device)
        flats = []
        for names, layout in layouts:
            flat = FlatParameters(
                names, spec, layout=layout, axes=axes, memory=next(memories), dtensor_specs=dtensor_specs
            )
            with add_error_context(lambda: f"Rank 0 was giving the values of unit {spec.name!r}.", _ADVICE):  # noqa: B023
                _fill(flat, device)
            flat.adopt_shards()
            claim_parameters([*flat.parameters, *flat.full_params], "an FSDP, which has divided it over the ranks")
            flats.append(flat)
        units.append(Unit(index, spec.name, spec.module, flats, axes.world))
    return units


def _fill(flat: FlatParameters, device: torch.device) -> None:
    """Fill the shards of all ranks with rank 0's values; those that are left empty (`LeaveEmpty`) with NaN."""
    if all(parameter.is_meta for parameter in flat.parameters):
        flat.fill(empty_value(flat.shard.dtype))
        return
    values = [
        torch.full_like(each, empty_value(each.dtype), device=device) if each.is_meta else each
        for each in flat.parameters
    ]
    flat.scatter_from_rank0(values)


def describe_empty(specs: Sequence[UnitSpec], init: object) -> str:
    """The names of the parameters that are left empty, which must be the same on all ranks."""
    if not isinstance(init, LeaveEmpty):
        return ""
    return f", empty {[name for spec in specs for name, each in spec.parameters.items() if each.is_meta]}"


def _make_layouts(
    spec: UnitSpec, axes: ShardAxes, precision: MixedPrecision, *, dtensor_specs: Collection[str]
) -> list[tuple[list[str], FlatLayout]]:
    """Lay out a unit's parameters in flat tensors: of one dtype each, all trainable or all frozen."""
    groups: dict[tuple[torch.dtype, bool], list[str]] = {}
    for name, parameter in spec.parameters.items():
        groups.setdefault((parameter.dtype, parameter.requires_grad), []).append(name)
    return [
        (
            names,
            FlatLayout(
                [spec.parameters[name].shape for name in names],
                axes.num_shards,
                axes.world,
                dim_orders=[None if name in dtensor_specs else dim_order(spec.parameters[name]) for name in names],
                shard_dtype=dtype,
                param_dtype=precision.computed(dtype),
                reduce_dtype=precision.reduced(dtype),
            ),
        )
        for (dtype, _), names in groups.items()
    ]


@torch.no_grad()
def broadcast_buffers(module: torch.nn.Module, group: Backend) -> None:
    """Give a module's buffers, which are local tensors of DTensors or plain, rank 0's values; every rank calls this."""
    if group.world_size > 1:
        for buffer in map(local_tensor, module.buffers()):
            broadcast(buffer, 0, group=group, out=buffer)


def _materialise(spec: UnitSpec, init: Callable[[torch.nn.Module], object] | None, device: torch.device) -> None:
    """Allocate and initialise the unit's parameters and buffers that are on the meta device."""
    owners = dict.fromkeys(module for registrations in spec.registrations.values() for module, _ in registrations)
    for name, module in spec.module.named_modules():
        if module in owners or (has_meta_tensors(module) and not any(True for _ in module.parameters(recurse=False))):
            materialise(f"{spec.name}.{name}".strip("."), module, init, device)
    for name, registrations in spec.registrations.items():
        module, attribute = registrations[0]
        real = own_parameters(module)[attribute]
        assert real is not None
        spec.parameters[name] = real
        for other, other_attribute in registrations[1:]:
            setattr(other, other_attribute, real)
