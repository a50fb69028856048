"""Rules of operators on distributed tensors, and the selection of the strategy that moves the fewest bytes.

A rule lists, for one mesh axis at a time, the strategies by which an operator can be computed: the placements that its
inputs must have along that axis, and those that its outputs then have. Most rules derive their strategies from an
`EinsumPattern`, which labels the dims of inputs and outputs as einsum does. A dim whose label is ``None`` is never
sharded. An operator that treats each index of a label independently may have that label sharded: all dims with the
label are then sharded along it, and tensors without it are replicated. Outputs without the label are partial if the
operator reduces over it, as a sum does.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.errors import UnsupportedOpError
from ferrodist.tensor.placement import Partial, Placement, Replicate, Shard, reductions_commute
from ferrodist.tensor.spec import DTensorSpec, has_equal_blocks
from ferrodist.torch_private.operators import overloads, schema_of

if TYPE_CHECKING:
    from ferrodist.mesh import DeviceMesh

LocalFunction = Callable[..., Any]  # what computes this rank's outputs from local shards


@dataclass(frozen=True, slots=True)
class OpStrategy:
    """One way to compute an operator along one mesh axis: the placements of its inputs and of its outputs."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRule:
    """The rule by which an operator is computed on sharded tensors."""

    strategies: Callable[[OpCall, int], Sequence[OpStrategy]]
    """Lists the strategies along one axis, given by its index; `call.selected` has those selected for the axes before.

    The strategy that moves the fewest bytes is selected; of equal ones, the first.
    """
    local: Callable[[OpCall], LocalFunction | None] | None = None
    """Makes the local function, which computes the local outputs instead of the operator; None: the operator itself.

    The call has `placed_inputs` and `outputs`.
    """
    arguments: Callable[[OpCall], Mapping[str, Any]] | None = None
    """Makes the arguments, by name, that differ on this rank, such as local sizes."""
    depends_on_values: bool = False
    """Whether strategies depend on the values of float arguments."""
    copies: bool = False
    """Whether local outputs are copies where the operator gives views."""
    is_data_dependent: Callable[[Mapping[str, Any]], bool] | None = None
    """Whether the shapes of the outputs depend on the elements, given all arguments by name.

    Such a call needs replicated inputs; see `fallback.compute_data_dependent`.
    """


class OpCall:
    """One call of an operator, with specs instead of distributed tensors; ``arguments`` has defaults too, by name."""

    def __init__(self, operator: torch._ops.OpOverload, arguments: Mapping[str, Any], mesh: DeviceMesh) -> None:
        self.operator = operator
        self.arguments = arguments
        self.mesh = mesh
        self.inputs: list[DTensorSpec] = find_all(DTensorSpec, list(arguments.values()))
        """The specs among the arguments, in order, including those in lists."""
        self.selected: list[OpStrategy] = []  # the strategies of the first axes, as far as they are selected
        self.placed_inputs: Sequence[DTensorSpec] = ()  # the specs to which the inputs are redistributed
        self.outputs: Sequence[DTensorSpec] = ()  # the specs of the results, or of the inputs that are written

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @cached_property
    def results(self) -> list[torch.Tensor]:
        """The results of the operator for the full tensors, on the meta device."""
        arguments = {
            name: map_tensors(_as_meta, value, (DTensorSpec, torch.Tensor)) for name, value in self.arguments.items()
        }
        if (device := arguments.get("device")) is not None:
            if torch.device(device).type != "cpu":
                raise UnsupportedOpError(f"{self.operator} to {device}: distributed tensors are on the CPU")
            arguments["device"] = torch.device("meta")
        if arguments.get("layout", torch.strided) not in (None, torch.strided):
            raise UnsupportedOpError(f"{self.operator} to {arguments['layout']}: distributed tensors are strided")
        if self.operator is torch.ops.aten.linalg_vector_norm.default and arguments["dim"]:
            ndim = len(self.inputs[0].shape)  # torch 2.10's meta kernel keeps a dim of size 1 with a negative number
            arguments["dim"] = [dim + ndim if -ndim <= dim < 0 else dim for dim in arguments["dim"]]
        positional, named = split_arguments(self.operator, arguments)
        results = self.operator(*positional, **named)
        if (wanted := arguments.get("output_mask")) is not None:  # for batch norms the meta device doesn't heed it
            results = [result for result, is_wanted in zip(results, wanted, strict=True) if is_wanted]
        return find_all(torch.Tensor, results)

    def place(self, written: Sequence[int] | None) -> None:
        """Set `placed_inputs` and `outputs` from the strategies; if not None, inputs ``written`` are the outputs."""
        self.placed_inputs = [
            spec.with_placements([strategy.inputs[index] for strategy in self.selected])
            for index, spec in enumerate(self.inputs)
        ]
        if written is not None:
            self.outputs = [self.inputs[index] for index in written]
            return
        self.outputs = [
            DTensorSpec.make(
                self.mesh, [one.outputs[index] for one in self.selected], meta.shape, meta.dtype, meta.stride()
            )
            for index, meta in enumerate(self.results)
        ]


def make_zeros(specs: Sequence[DTensorSpec]) -> list[torch.Tensor]:
    """This rank's shards of tensors of zeros."""
    return [torch.zeros(spec.local_shape, dtype=spec.dtype, device="cpu") for spec in specs]


def zeros_if_empty(call: OpCall) -> LocalFunction | None:
    """Zeros, as ``output_mask`` wants them, on a rank with an empty shard, by whose size torch's kernel divides."""
    if all(0 not in spec.local_shape for spec in call.placed_inputs):
        return None
    outputs = call.outputs
    wanted = call.arguments.get("output_mask", [True] * len(outputs))

    def compute(*_: Any, **__: Any) -> list[torch.Tensor | None]:
        zeros = iter(make_zeros(outputs))
        return [next(zeros) if want else None for want in wanted]

    return compute


def _as_meta(value: DTensorSpec | torch.Tensor) -> torch.Tensor:
    """The tensor on the meta device: plain scalars too, as some operators need all inputs on one device."""
    stride = value.stride if isinstance(value, DTensorSpec) else value.stride()
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device="meta")


def map_tensors(function: Callable[[Any], Any], value: Any, kind: type | tuple[type, ...]) -> Any:
    """Apply ``function`` to ``value``, or to the elements of lists in it, where they are of a class."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)([map_tensors(function, one, kind) for one in value])
    return value


def find_all(kind: type, value: Any) -> list[Any]:
    """The value, or the elements of lists in it, if they are of a class."""
    if isinstance(value, kind):
        return [value]
    return [found for one in value for found in find_all(kind, one)] if isinstance(value, list | tuple) else []


def bind_arguments(operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name, defaults included."""
    parameters = _parameters(operator)
    bound = {name: value for (name, _, _), value in zip(parameters, args, strict=False)}
    for name, default, _ in parameters[len(args) :]:
        bound[name] = kwargs.get(name, default)
    return bound


@functools.cache
def _parameters(operator: torch._ops.OpOverload) -> list[tuple[str, Any, bool]]:
    """The name and default of each argument, and whether it is keyword-only; schemas are slow to read."""
    return [(one.name, one.default_value, one.kwarg_only) for one in schema_of(operator).arguments]


def split_arguments(operator: torch._ops.OpOverload, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Split arguments by name into the positional and the keyword-only ones."""
    parameters = _parameters(operator)
    positional = [arguments[name] for name, _, is_named in parameters if not is_named]
    return positional, {name: arguments[name] for name, _, is_named in parameters if is_named}


_LOCAL_COPY_COST = 1e-9
"""The cost of a byte that is copied locally, relative to one that is sent: it ranks strategies that send nothing."""


def select_strategy(call: OpCall, rule: OpRule, written: Sequence[int]) -> bool:
    """Select a strategy for each axis in turn, by the fewest bytes given the inputs' placements: ``call.selected``.

    The inputs with the indices ``written`` keep their placements, which are the first output's too. Returns whether
    each axis has a strategy.
    """
    for axis in range(call.mesh.ndim):
        best, least = None, math.inf
        for strategy in rule.strategies(call, axis):
            first = strategy.outputs[0]
            targets = [(call.inputs[index].placements[axis], strategy.inputs[index]) for index in written]
            if any(current != first or target != first for current, target in targets):
                continue
            cost = _cost(call.inputs, strategy.inputs, axis)
            if cost < least and _is_valid(call, strategy, axis, writes=bool(written)):
                best, least = strategy, cost
        if best is None:
            return False
        call.selected.append(best)
    return True


def _is_valid(call: OpCall, strategy: OpStrategy, axis: int, *, writes: bool) -> bool:
    """Return whether tensors can have the placements of a strategy together with those of the axes before."""
    has_blocks = any(isinstance(placement, Shard) and placement.blocks > 1 for placement in strategy.outputs)
    input_shapes = [spec.shape for spec in call.inputs]
    output_shapes: list[Any] = [None] * len(strategy.outputs)
    if has_blocks and not writes:
        output_shapes = [tuple(result.shape) for result in call.results]
    return all(
        _fits([before[index] for before in earlier], placement, shape, call, axis)
        for placements, earlier, shapes in (
            (strategy.inputs, [one.inputs for one in call.selected], input_shapes),
            (strategy.outputs, [one.outputs for one in call.selected], output_shapes),
        )
        for index, (placement, shape) in enumerate(zip(placements, shapes, strict=False))
    )


def _fits(
    before: Sequence[Placement], placement: Placement, shape: tuple[int, ...] | None, call: OpCall, axis: int
) -> bool:
    """Return whether a placement has equal blocks after the axes before, and a reduction that commutes with theirs."""
    if isinstance(placement, Partial):
        return all(reductions_commute(one, placement) for one in before if isinstance(one, Partial))
    return shape is None or has_equal_blocks(placement, shape, before, call.mesh.shape, axis)


def _cost(inputs: Sequence[DTensorSpec], targets: Sequence[Placement], axis: int) -> float:
    """The bytes that a rank sends to bring all inputs to their target placements along an axis."""
    pairs = list(zip(inputs, targets, strict=True))
    sharded = {
        (spec.shape[target.dim], target.blocks)
        for spec, target in pairs
        if isinstance(target, Shard) and spec.placements[axis] == target
    }
    return sum(_input_cost(spec, target, axis, sharded) for spec, target in pairs)


def _input_cost(spec: DTensorSpec, target: Placement, axis: int, sharded: set[tuple[int, int]]) -> float:
    """The bytes that a rank sends to bring one input to its target; infinite for uneven shards that no input has.

    ``sharded`` has the sizes and blocks of the dims of inputs that have their target sharding already.
    """
    current = spec.placements[axis]
    if current == target:
        return 0.0
    mesh_shape = spec.mesh.shape
    num_ranks = mesh_shape[axis]
    others = [size for at, size in enumerate(mesh_shape) if at != axis and isinstance(spec.placements[at], Shard)]
    full = math.prod(spec.shape) * spec.dtype.itemsize / math.prod(others)
    share = full * (num_ranks - 1) / num_ranks + _LOCAL_COPY_COST
    if isinstance(target, Shard):
        size = spec.shape[target.dim]
        if (target.blocks > 1 or size % num_ranks) and (size, target.blocks) not in sharded:
            # Shards would be uneven, or it takes several steps: only for an input that has this sharding already.
            return math.inf
    if isinstance(current, Shard) and isinstance(target, Shard):
        return share / num_ranks if current.dim != target.dim else share
    if isinstance(current, Shard):
        return full * _LOCAL_COPY_COST if isinstance(target, Partial) else share
    if isinstance(current, Partial):
        return share if isinstance(target, Shard) else 2 * share
    assert isinstance(current, Replicate), "there are three kinds of placements"
    return full * _LOCAL_COPY_COST


def rule_table(*rows: tuple[OpRule, str]) -> dict[torch._ops.OpOverload, OpRule]:
    """Map operators to rules; each row has a rule and the names of its operators, as `overloads` takes them.

    Of several rows with an operator the last one counts. docs/dtensor-operators.md shows an example for each row, so
    equal rows are for operators whose examples differ.
    """
    return {overload: rule for rule, names in rows for overload in overloads(names)}


def keep_sharding(call: OpCall, axis: int) -> list[OpStrategy]:
    """The input's sharding, or replicated outputs of a partial input: for operators that read no element."""
    current = call.inputs[0].placements[axis]
    return [OpStrategy((current,), (current if isinstance(current, Shard) else Replicate(),))]


def all_replicated(call: OpCall, axis: int) -> list[OpStrategy]:
    """Replicated inputs and outputs: for operators that need the full tensors."""
    del axis
    return [OpStrategy((Replicate(),) * len(call.inputs), (Replicate(),) * len(call.results))]


Labels = Sequence[Hashable]  # the label of each dim of a tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EinsumPattern:
    """The labels of an operator's dims, and its reductions."""

    inputs: Sequence[Labels]
    outputs: Sequence[Labels]
    # for labels that outputs lack: where such a label is sharded, these outputs are partial by its reduction
    reductions: Mapping[Hashable, ReduceOp] = field(default_factory=dict)
    # further labels that outputs lack, which the local function reduces over the ranks itself: outputs are replicated
    cross_rank: Sequence[Hashable] = ()
    # groups of inputs in which the operator is linear: if all of a group are partial sums (or means) and all others
    # replicated, so are the outputs
    linear: Sequence[Sequence[int]] = ()
    # indices of inputs that are added to the result, and are partial sums where a label is reduced
    addends: Sequence[int] = ()
    commuting: Sequence[ReduceOp] = ()  # other reductions that commute with the operator, over all of its inputs


def einsum_rule(pattern_of: Callable[[OpCall], EinsumPattern], **options: Any) -> OpRule:
    """A rule whose strategies are those of the pattern that a function makes for a call; other options of `OpRule`."""

    def strategies(call: OpCall, axis: int) -> list[OpStrategy]:
        return einsum_strategies(pattern_of(call), call, axis)

    return OpRule(strategies=strategies, **options)


def einsum_strategies(pattern: EinsumPattern, call: OpCall, axis: int) -> list[OpStrategy]:
    """The strategies along an axis of an operator that has a pattern."""
    num_inputs, num_outputs = len(pattern.inputs), len(pattern.outputs)
    strategies = [OpStrategy((Replicate(),) * num_inputs, (Replicate(),) * num_outputs)]
    labels = dict.fromkeys(label for dims in pattern.inputs for label in dims if label is not None)
    for label in labels:
        is_reduced = label in pattern.reductions or label in pattern.cross_rank
        if not is_reduced and any(label not in dims for dims in pattern.outputs):
            continue
        without = Partial(pattern.reductions[label]) if label in pattern.reductions else Replicate()
        for blocks in _blocks(pattern, call, axis, label):
            outputs = tuple(Shard(dims.index(label), blocks) if label in dims else without for dims in pattern.outputs)
            strategies.append(OpStrategy(tuple(_sharded_inputs(pattern, label, blocks)), outputs))
    ops = [ReduceOp.SUM]
    if any(spec.placements[axis] == Partial(ReduceOp.MEAN) for spec in call.inputs):
        ops.append(ReduceOp.MEAN)
    for group, op in itertools.product(pattern.linear, ops):
        if not _counts_bools(call, group):
            inputs = tuple(Partial(op) if index in group else Replicate() for index in range(num_inputs))
            strategies.append(OpStrategy(inputs, (Partial(op),) * num_outputs))
    strategies += [OpStrategy((Partial(op),) * num_inputs, (Partial(op),) * num_outputs) for op in pattern.commuting]
    return strategies


def _counts_bools(call: OpCall, group: Sequence[int]) -> bool:
    """Return whether bools become numbers: a sum of bools says if any is true, and one of numbers counts them."""
    are_bool = {call.inputs[index].dtype is torch.bool for index in group}
    if are_bool == {True} and not schema_of(call.operator).is_mutable:
        are_bool |= {result.dtype is torch.bool for result in call.results}
    return len(are_bool) > 1


def _sharded_inputs(pattern: EinsumPattern, label: Hashable, blocks: int) -> Iterator[Placement]:
    """The placements of the inputs where a label is sharded."""
    for index, dims in enumerate(pattern.inputs):
        if label in dims:
            yield Shard(dims.index(label), blocks)
        else:
            yield Partial() if label in pattern.reductions and index in pattern.addends else Replicate()


def _blocks(pattern: EinsumPattern, call: OpCall, axis: int, label: Hashable) -> list[int]:
    """The numbers of blocks in which inputs are sharded along a label now, and one."""
    found = {1}
    for dims, spec in zip(pattern.inputs, call.inputs, strict=True):
        placement = spec.placements[axis]
        if label in dims and isinstance(placement, Shard) and placement.dim == dims.index(label):
            found.add(placement.blocks)
    return sorted(found)
