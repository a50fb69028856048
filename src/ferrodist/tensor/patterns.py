"""Ways of computing an operator, found from which dims of its inputs and outputs are the same.

A pattern gives each dim of each input and output a letter, as einsum does; a dim with a letter of its own, or ``None``,
is never divided. An operator that works on each index of a letter by itself may have it divided: then all that have the
letter are divided along it, and the others are whole. Outputs without the letter are partial where the operator folds
over it, as a sum does.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ferrodist.collectives.reduce_op import ReduceOp
from ferrodist.tensor.call import Call, Choice
from ferrodist.tensor.placement import Partial, Placement, Replicate, Shard
from ferrodist.torch_private.operators import schema_of

__all__ = ["Letters", "Pattern", "choices_of"]

Letters = Sequence[Hashable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
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

    inputs: Sequence[Letters]
    outputs: Sequence[Letters]
    folds: Mapping[Hashable, ReduceOp] = field(default_factory=dict)
    settled: Sequence[Hashable] = ()
    linear: Sequence[Sequence[int]] = ()
    added: Sequence[int] = ()
    keeps: Sequence[ReduceOp] = ()


def choices_of(pattern: Pattern, call: Call, axis: int) -> list[Choice]:
    """The ways of computing an operator of this pattern along an axis."""
    num_inputs, num_outputs = len(pattern.inputs), len(pattern.outputs)
    choices = [Choice((Replicate(),) * num_inputs, (Replicate(),) * num_outputs)]
    letters = dict.fromkeys(letter for dims in pattern.inputs for letter in dims if letter is not None)
    for letter in letters:
        folded = letter in pattern.folds or letter in pattern.settled
        if not folded and any(letter not in dims for dims in pattern.outputs):
            continue
        lacking = Partial(pattern.folds[letter]) if letter in pattern.folds else Replicate()
        for blocks in _blocks(pattern, call, axis, letter):
            outputs = tuple(
                Shard(dims.index(letter), blocks) if letter in dims else lacking for dims in pattern.outputs
            )
            choices.append(Choice(_inputs(pattern, letter, blocks), outputs))
    ops = [ReduceOp.SUM]
    if any(layout.placements[axis] == Partial(ReduceOp.MEAN) for layout in call.inputs):
        ops.append(ReduceOp.MEAN)
    for group, op in itertools.product(pattern.linear, ops):
        if _counts_bools(call, group):
            continue
        inputs = tuple(Partial(op) if place in group else Replicate() for place in range(num_inputs))
        choices.append(Choice(inputs, (Partial(op),) * num_outputs))
    choices += [Choice((Partial(op),) * num_inputs, (Partial(op),) * num_outputs) for op in pattern.keeps]
    return choices


def _counts_bools(call: Call, group: Sequence[int]) -> bool:
    """Whether numbers are made of bools: the sum of these is whether any is true, and that of the numbers how many."""
    are_bool = {call.inputs[place].dtype is torch.bool for place in group}
    if are_bool == {True} and not schema_of(call.operator).is_mutable:
        are_bool |= {result.dtype is torch.bool for result in call.results}
    return len(are_bool) > 1


def _inputs(pattern: Pattern, letter: Hashable, blocks: int) -> tuple[Placement, ...]:
    folded = letter in pattern.folds
    return tuple(
        Shard(dims.index(letter), blocks)
        if letter in dims
        else Partial()
        if folded and place in pattern.added
        else Replicate()
        for place, dims in enumerate(pattern.inputs)
    )


def _blocks(pattern: Pattern, call: Call, axis: int, letter: Hashable) -> list[int]:
    """In how many blocks inputs are divided along the letter now; one is always among them."""
    found = {1}
    for dims, layout in zip(pattern.inputs, call.inputs, strict=True):
        placement = layout.placements[axis]
        if letter in dims and isinstance(placement, Shard) and placement.dim == dims.index(letter):
            found.add(placement.blocks)
    return sorted(found)
