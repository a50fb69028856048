"""An operator's call as rules see it: layouts in the place of distributed tensors.

Of the ways in which an operator can be computed, the one that moves the fewest bytes.

Ways of computing an operator, found from which dims of its inputs and outputs are the same.

A pattern gives each dim of each input and output a letter, as einsum does; a dim with a letter of its own, or ``None``,
is never divided. An operator that works on each index of a letter by itself may have it divided: then all that have the
letter are divided along it, and the others are whole. Outputs without the letter are partial where the operator folds
over it, as a sum does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.errors import UnsupportedOpError
from ferrodist.tensor.placement import Partial, Placement, Replicate, Shard, reductions_commute
from ferrodist.tensor.spec import DTensorSpec, sizes_before_axis
from ferrodist.torch_private.operators import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class OpStrategy:
    """One way of computing an operator along one axis: how the inputs must lie there, and how the outputs then do."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRule:
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
            computed on whole tensors, and only if all are, as `replication.compute_data_dependent` does.
    """

    strategies: Callable[[OpCall, int], Sequence[OpStrategy]]
    local: Callable[[OpCall, Sequence[DTensorSpec], Sequence[DTensorSpec]], Callable[..., Any] | None] | None = None
    arguments: Callable[[OpCall, Sequence[DTensorSpec], Sequence[DTensorSpec]], Mapping[str, Any]] | None = None
    depends_on_values: bool = False
    copies: bool = False
    is_data_dependent: Callable[[Mapping[str, Any]], bool] | None = None


class OpCall:
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
        self.inputs: list[DTensorSpec] = []
        """The layouts among the arguments, in order; those in lists too."""
        map_tensors(self.inputs.append, list(arguments.values()), DTensorSpec)
        self.selected: list[OpStrategy] = []
        """What has been decided for the first axes."""

    def __getitem__(self, name: str) -> Any:
        """An argument."""
        return self.arguments[name]

    @cached_property
    def results(self) -> list[torch.Tensor]:
        """What the operator returns for whole tensors, without their elements: of device meta."""
        arguments = {
            name: map_tensors(_as_meta, value, (DTensorSpec, torch.Tensor)) for name, value in self.arguments.items()
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


def _as_meta(value: DTensorSpec | torch.Tensor) -> torch.Tensor:
    """Without elements; of plain numbers, too, which some operators take on the device of the others only."""
    stride = value.stride if isinstance(value, DTensorSpec) else value.stride()
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


_LITTLE = 1e-9
"""What a byte that is only copied costs, beside one that travels: it decides between ways that send nothing."""


def select_strategy(call: OpCall, rule: OpRule, fixed: Sequence[int]) -> bool:
    """Decide every axis: ``call.chosen``.

    The axes are decided one after the other, each for the fewest bytes given how the inputs lie now.

    Args:
        call: The call.
        rule: The operator's rule.
        fixed: The inputs that are written, so must stay as they lie and be what the first output is.

    Returns:
        Whether there was a way for each axis.
    """
    for axis in range(call.mesh.ndim):
        best, least = None, math.inf
        for strategy in rule.strategies(call, axis):
            if any(
                not call.inputs[place].placements[axis] == strategy.inputs[place] == strategy.outputs[0]
                for place in fixed
            ):
                continue
            cost = _cost(call.inputs, strategy.inputs, axis)
            if cost < least and _is_layout(call, strategy, axis, writes=bool(fixed)):
                best, least = strategy, cost
        if best is None:
            return False
        call.selected.append(best)
    return True


def _is_layout(call: OpCall, strategy: OpStrategy, axis: int, *, writes: bool) -> bool:
    """Whether a choice, with those of the axes before, is a way in which tensors can lie."""
    has_blocks = any(isinstance(then, Shard) and then.blocks > 1 for then in strategy.outputs)
    shapes = [spec.shape for spec in call.inputs]
    of_results = [tuple(result.shape) for result in call.results] if has_blocks and not writes else None
    earlier = call.selected
    return all(
        _fits([one.inputs[place] for one in earlier], then, shapes[place], call, axis)
        for place, then in enumerate(strategy.inputs)
    ) and all(
        _fits(
            [one.outputs[place] for one in earlier], then, None if of_results is None else of_results[place], call, axis
        )
        for place, then in enumerate(strategy.outputs)
    )


def _fits(before: Sequence[Placement], then: Placement, shape: tuple[int, ...] | None, call: OpCall, axis: int) -> bool:
    """Whether axes before leave as many equal blocks of a dim as there shall be, and are folded as this one."""
    if isinstance(then, Partial):
        return all(reductions_commute(one, then) for one in before if isinstance(one, Partial))
    if isinstance(then, Shard) and then.blocks > 1 and shape is not None:
        return all(
            size % then.blocks == 0 for size in sizes_before_axis(shape, before, call.mesh.shape, axis, then.dim)
        )
    return True


def _cost(inputs: Sequence[DTensorSpec], wanted: Sequence[Placement], axis: int) -> float:
    pairs = list(zip(inputs, wanted, strict=True))
    asked = {
        (spec.shape[then.dim], then.blocks)
        for spec, then in pairs
        if isinstance(then, Shard) and spec.placements[axis] == then
    }
    return sum(_cost_of_one(spec, then, axis, asked) for spec, then in pairs)


def _cost_of_one(spec: DTensorSpec, then: Placement, axis: int, asked: set[tuple[int, int]]) -> float:
    """Bytes that a rank sends to bring one input there, or infinity where it would be cut as nobody asked for.

    ``asked`` are the sizes, and the blocks, of what other inputs have divided already as they shall be.
    """
    now = spec.placements[axis]
    if now == then:
        return 0.0
    mesh_shape = spec.mesh.shape
    num_ranks = mesh_shape[axis]
    others = [size for at, size in enumerate(mesh_shape) if at != axis and isinstance(spec.placements[at], Shard)]
    whole = math.prod(spec.shape) * spec.dtype.itemsize / math.prod(others)
    share = whole * (num_ranks - 1) / num_ranks + _LITTLE
    if isinstance(then, Shard):
        size = spec.shape[then.dim]
        if (then.blocks > 1 or size % num_ranks) and (size, then.blocks) not in asked:
            # Uneven parts come out, or it takes more than one step: only for the sake of an input that lies so already.
            return math.inf
    if isinstance(now, Shard) and isinstance(then, Shard):
        return share / num_ranks if now.dim != then.dim else share
    if isinstance(now, Shard):
        return whole * _LITTLE if isinstance(then, Partial) else share
    if isinstance(now, Partial):
        return share if isinstance(then, Shard) else 2 * share
    assert isinstance(now, Replicate), "there are three kinds of placements"
    return whole * _LITTLE


Labels = Sequence[Hashable]


@dataclass(frozen=True, slots=True, kw_only=True)
class EinsumPattern:
    """Which dims are the same.

    Args:
        inputs: The letters of each input's dims.
        outputs: The letters of each output's dims.
        folds: Letters that may be divided though an output lacks them, and how this output's parts then become one.
        settled: Other such letters: what computes the local outputs folds over the ranks, so they are whole.
        linear: Groups of inputs in which the operator is linear: when all of a group are partial sums (or means) and
            all others whole, so are the outputs.
        added: Inputs that are added to the result, and so are partial sums where a letter is folded.
        keeps: Other reductions that may be done after the operator as well as before it, of all its inputs.
    """

    inputs: Sequence[Labels]
    outputs: Sequence[Labels]
    reductions: Mapping[Hashable, ReduceOp] = field(default_factory=dict)
    reduced_locally: Sequence[Hashable] = ()
    linear: Sequence[Sequence[int]] = ()
    addends: Sequence[int] = ()
    commuting: Sequence[ReduceOp] = ()


def einsum_strategies(pattern: EinsumPattern, call: OpCall, axis: int) -> list[OpStrategy]:
    """The ways of computing an operator of this pattern along an axis."""
    num_inputs, num_outputs = len(pattern.inputs), len(pattern.outputs)
    strategies = [OpStrategy((Replicate(),) * num_inputs, (Replicate(),) * num_outputs)]
    labels = dict.fromkeys(label for dims in pattern.inputs for label in dims if label is not None)
    for label in labels:
        folded = label in pattern.reductions or label in pattern.reduced_locally
        if not folded and any(label not in dims for dims in pattern.outputs):
            continue
        lacking = Partial(pattern.reductions[label]) if label in pattern.reductions else Replicate()
        for blocks in _blocks(pattern, call, axis, label):
            outputs = tuple(Shard(dims.index(label), blocks) if label in dims else lacking for dims in pattern.outputs)
            strategies.append(OpStrategy(_inputs(pattern, label, blocks), outputs))
    ops = [ReduceOp.SUM]
    if any(spec.placements[axis] == Partial(ReduceOp.MEAN) for spec in call.inputs):
        ops.append(ReduceOp.MEAN)
    for group, op in itertools.product(pattern.linear, ops):
        if _counts_bools(call, group):
            continue
        inputs = tuple(Partial(op) if place in group else Replicate() for place in range(num_inputs))
        strategies.append(OpStrategy(inputs, (Partial(op),) * num_outputs))
    strategies += [OpStrategy((Partial(op),) * num_inputs, (Partial(op),) * num_outputs) for op in pattern.commuting]
    return strategies


def _counts_bools(call: OpCall, group: Sequence[int]) -> bool:
    """Whether numbers are made of bools: the sum of these is whether any is true, and that of the numbers how many."""
    are_bool = {call.inputs[place].dtype is torch.bool for place in group}
    if are_bool == {True} and not schema_of(call.operator).is_mutable:
        are_bool |= {result.dtype is torch.bool for result in call.results}
    return len(are_bool) > 1


def _inputs(pattern: EinsumPattern, label: Hashable, blocks: int) -> tuple[Placement, ...]:
    folded = label in pattern.reductions
    return tuple(
        Shard(dims.index(label), blocks)
        if label in dims
        else Partial()
        if folded and place in pattern.addends
        else Replicate()
        for place, dims in enumerate(pattern.inputs)
    )


def _blocks(pattern: EinsumPattern, call: OpCall, axis: int, label: Hashable) -> list[int]:
    """In how many blocks inputs are divided along the letter now; one is always among them."""
    found = {1}
    for dims, spec in zip(pattern.inputs, call.inputs, strict=True):
        placement = spec.placements[axis]
        if label in dims and isinstance(placement, Shard) and placement.dim == dims.index(label):
            found.add(placement.blocks)
    return sorted(found)
