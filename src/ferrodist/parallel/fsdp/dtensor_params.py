"""Parameters and buffers that lie over another mesh already, as tensor parallelism divides them.

[Note: parts]
Of a distributed tensor this rank has a *part*. FSDP divides parts: all ranks of its group have the same part of each
tensor, those of other groups have the others. So shapes, flat tensors and pieces are those of parts, plain tensors.
Only while a unit is gathered does the module see distributed parameters again, whose parts lie in the unit's memory.
What is one for the whole model (norms, whole states) goes over the groups of the other mesh too.
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
    from ferrodist.parallel.fsdp.wrap import UnitPlan


def layout_of(tensor: torch.Tensor) -> DTensorSpec | None:
    """How a distributed tensor lies; None for a plain one."""
    return tensor._spec if isinstance(tensor, DTensor) else None  # noqa: SLF001 - to look at one is no operator


def lie_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape have the same parts on each rank."""
    first, second = layout_of(one), layout_of(other)
    return first is second or (first is not None and second is not None and first.placements == second.placements)


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor, outside of autograd, or the tensor itself if it is a plain one."""
    return tensor._local if isinstance(tensor, DTensor) else tensor  # noqa: SLF001 - to_local() is differentiable


def wrap_part(part: torch.Tensor, layout: DTensorSpec) -> DTensor:
    """The distributed tensor of which this rank has a part, in the part's dtype."""
    lies = DTensorSpec.make(layout.mesh, layout.placements, layout.shape, part.dtype)
    return DTensor._wrap(part, lies)  # noqa: SLF001 - from_local() is differentiable, and would keep the part's history


def join_parts(part: torch.Tensor, layout: DTensorSpec | None) -> torch.Tensor:
    """The whole tensor; every rank of the layout's mesh calls this. None: the part is all of it."""
    return part if layout is None else wrap_part(part, layout).full_tensor()


def cut_part(whole: torch.Tensor, layout: DTensorSpec | None) -> torch.Tensor:
    """This rank's part of a whole tensor that all ranks have; nothing is sent."""
    if layout is None:
        return whole
    return redistribute_local(whole.detach(), layout.replicated, layout)


def describe_part(layout: DTensorSpec) -> str:
    """Which part this rank has, of what, as a text that states are compared by."""
    return f"{layout} of {layout.mesh.shape} ranks, at {layout.mesh.coordinate}"


def count_copies(layout: DTensorSpec) -> int:
    """How many ranks of its mesh have each element of a tensor that is not partial."""
    places = zip(layout.placements, layout.mesh.shape, strict=True)
    return prod(num_ranks for placement, num_ranks in places if isinstance(placement, Replicate))


def find_groups(layouts: Iterable[DTensorSpec | None]) -> tuple[Backend, ...]:
    """The groups over which tensors lie, each once, where these have more than one rank."""
    groups = dict.fromkeys(layout.mesh.group for layout in layouts if layout is not None)
    return tuple(group for group in groups if group.world_size > 1)


@contextlib.contextmanager
def as_parts(plans: Sequence[UnitPlan]) -> Iterator[dict[str, DTensorSpec]]:
    """Put this rank's parts in the places of distributed parameters, in plans and modules; see [Note: parts].

    When the block raises, modules have their distributed parameters again, unchanged.

    Yields:
        How the parameters lie, by name.
    """
    before: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
    layouts: dict[str, DTensorSpec] = {}
    try:
        for plan in plans:
            for name, parameter in plan.parameters.items():
                layout = layout_of(parameter)
                if layout is None:
                    continue
                layouts[name] = layout
                part = torch.nn.Parameter(part_of(parameter), requires_grad=parameter.requires_grad)
                plan.parameters[name] = part
                for module, attribute in plan.places[name]:
                    before.append((module, attribute, parameter))
                    setattr(module, attribute, part)
        yield layouts
    except BaseException:
        for module, attribute, parameter in before:
            setattr(module, attribute, parameter)
        raise
