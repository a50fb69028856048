"""An operator's call as rules see it: layouts in the place of distributed tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.errors import UnsupportedOpError
from ferrodist.tensor.layout import Layout
from ferrodist.torch_private.operators import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.mesh import DeviceMesh
    from ferrodist.tensor.placement import Placement

__all__ = ["Call", "Choice", "Rule", "map_tensors"]


@dataclass(frozen=True, slots=True)
class Choice:
    """One way of computing an operator along one axis: how the inputs must lie there, and how the outputs then do."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What an operator does with tensors that are divided.

    Args:
        choices: The ways of computing it along an axis, given the call and the number of the axis. The axes before
            have been decided: ``call.chosen``. Of the ways the one that moves the fewest bytes is taken, of several
            such the first.
        local: What computes the local outputs instead of the operator itself, given the call, the layouts of the inputs
            as they will be, and those of the outputs; or None for the operator itself. It takes local tensors in the
            place of distributed ones.
        arguments: What other arguments the operator gets on this rank, by name, given the same.
        by_value: Whether choices depend on the values of floating-point arguments, and not on their presence alone.
        copies: Whether the local outputs are copies where the operator gives views.
        picks: Whether the shapes of the outputs depend on the elements, given all arguments by name. Such a call is
            computed on whole tensors, and only if all are, as `replication.compute_picks` does.
    """

    choices: Callable[[Call, int], Sequence[Choice]]
    local: Callable[[Call, Sequence[Layout], Sequence[Layout]], Callable[..., Any] | None] | None = None
    arguments: Callable[[Call, Sequence[Layout], Sequence[Layout]], Mapping[str, Any]] | None = None
    by_value: bool = False
    copies: bool = False
    picks: Callable[[Mapping[str, Any]], bool] | None = None


class Call:
    """One call of an operator.

    Args:
        operator: The operator.
        arguments: All arguments by name, defaults included; a distributed tensor is its layout.
        mesh: The mesh of all of them.
    """

    def __init__(self, operator: torch._ops.OpOverload, arguments: Mapping[str, Any], mesh: DeviceMesh) -> None:
        self.operator = operator
        self.arguments = arguments
        self.mesh = mesh
        self.inputs: list[Layout] = []
        """The layouts among the arguments, in order; those in lists too."""
        map_tensors(self.inputs.append, list(arguments.values()), Layout)
        self.chosen: list[Choice] = []
        """What has been decided for the first axes."""

    def __getitem__(self, name: str) -> Any:
        """An argument."""
        return self.arguments[name]

    @cached_property
    def results(self) -> list[torch.Tensor]:
        """What the operator returns for whole tensors, without their elements: of device meta."""
        arguments = {
            name: map_tensors(_as_meta, value, (Layout, torch.Tensor)) for name, value in self.arguments.items()
        }
        if (device := arguments.get("device")) is not None:
            if torch.device(device).type != "cpu":
                raise UnsupportedOpError(f"{self.operator} to {device}: distributed tensors are on the CPU")
            arguments["device"] = torch.device("meta")
        if arguments.get("layout", torch.strided) not in (None, torch.strided):
            raise UnsupportedOpError(f"{self.operator} to {arguments['layout']}: distributed tensors are strided")
        positional, named = split_arguments(self.operator, arguments)
        found: list[torch.Tensor] = []
        map_tensors(found.append, self.operator(*positional, **named), torch.Tensor)
        return found


def _as_meta(value: Layout | torch.Tensor) -> torch.Tensor:
    """Without elements; of plain numbers, too, which some operators take on the device of the others only."""
    stride = value.stride if isinstance(value, Layout) else value.stride()
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device="meta")


def map_tensors(function: Callable[[Any], Any], value: Any, kind: type | tuple[type, ...]) -> Any:
    """``value`` with what is of a kind in it, or in lists in it, replaced by what ``function`` makes of it."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)([map_tensors(function, one, kind) for one in value])
    return value


def bind_arguments(operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name, defaults included."""
    bound = {}
    for place, argument in enumerate(schema_of(operator).arguments):
        if place < len(args):
            bound[argument.name] = args[place]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value
    return bound


def split_arguments(operator: torch._ops.OpOverload, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by name as a call takes them: positional ones and the others."""
    positional, named = [], {}
    for argument in schema_of(operator).arguments:
        if argument.kwarg_only:
            named[argument.name] = arguments[argument.name]
        else:
            positional.append(arguments[argument.name])
    return positional, named
