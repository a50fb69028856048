"""Parameters and buffers that are DTensors already, over another axis of a mesh, as in tensor parallelism.

[Note: sharded DTensors]
FSDP shards local tensors of DTensors: all ranks of its group have the same local tensor, those of other groups have the
others. So shapes, flat tensors and shards are those of local tensors, which are plain. Only while a unit is gathered
does the module see DTensors again, whose local tensors are in the unit's memory. Values for the whole model (norms,
full states) are reduced over the groups of the other axis too.
"""

from __future__ import annotations

import contextlib
from math import prod
from typing import TYPE_CHECKING

import torch

from ferrodist.tensor.dtensor import DTensor
from ferrodist.tensor.placement import Replicate
from ferrodist.tensor.redistribute import redistribute_local
from ferrodist.tensor.spec import DTensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.parallel.fsdp.wrap import UnitSpec


def spec_of(tensor: torch.Tensor) -> DTensorSpec | None:
    """A DTensor's spec; None for a plain tensor."""
    return tensor._spec if isinstance(tensor, DTensor) else None  # noqa: SLF001 - reading it must not dispatch


def same_placements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors of one shape have the same local tensor on each rank."""
    first, second = spec_of(one), spec_of(other)
    return first is second or (first is not None and second is not None and first.placements == second.placements)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's local tensor, outside of autograd; a plain tensor itself."""
    return tensor._local if isinstance(tensor, DTensor) else tensor  # noqa: SLF001 - to_local() is differentiable


def wrap_detached(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Wrap a local tensor as a DTensor, in its own dtype and without its history."""
    local_spec = DTensorSpec.make(spec.mesh, spec.placements, spec.shape, local.dtype)
    return DTensor._wrap(local, local_spec)  # noqa: SLF001 - from_local() and wrap_local() are differentiable


def full_tensor(local: torch.Tensor, spec: DTensorSpec | None) -> torch.Tensor:
    """The full tensor of a local one; every rank of the spec's mesh calls this. Without a spec the tensor itself."""
    return local if spec is None else wrap_detached(local, spec).full_tensor()


def slice_local(full: torch.Tensor, spec: DTensorSpec | None) -> torch.Tensor:
    """Slice this rank's local tensor from a full tensor that all ranks have; nothing is sent."""
    if spec is None:
        return full
    return redistribute_local(full.detach(), spec.replicated, spec)


def count_replicas(spec: DTensorSpec) -> int:
    """Number of ranks of its mesh that have each element of a tensor that is not partial."""
    axes = zip(spec.placements, spec.mesh.shape, strict=True)
    return prod(num_ranks for placement, num_ranks in axes if isinstance(placement, Replicate))


def mesh_groups(specs: Iterable[DTensorSpec | None]) -> tuple[Backend, ...]:
    """The groups of the specs' meshes, each once, without those of one rank."""
    groups = dict.fromkeys(spec.mesh.group for spec in specs if spec is not None)
    return tuple(group for group in groups if group.world_size > 1)


@contextlib.contextmanager
def use_local_params(units: Sequence[UnitSpec]) -> Iterator[dict[str, DTensorSpec]]:
    """Replace DTensors by local parameters, and yield their specs by name; see [Note: sharded DTensors].

    When the block raises, modules have their DTensors again, unchanged.
    """
    before: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
    specs: dict[str, DTensorSpec] = {}
    try:
        for unit in units:
            for name, parameter in unit.parameters.items():
                spec = spec_of(parameter)
                if spec is None:
                    continue
                specs[name] = spec
                local = torch.nn.Parameter(local_tensor(parameter), requires_grad=parameter.requires_grad)
                unit.parameters[name] = local
                for module, attribute in unit.registrations[name]:
                    before.append((module, attribute, parameter))
                    setattr(module, attribute, local)
        yield specs
    except BaseException:
        for module, attribute, parameter in before:
            setattr(module, attribute, parameter)
        raise
