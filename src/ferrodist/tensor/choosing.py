"""Of the ways in which an operator can be computed, the one that moves the fewest bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ferrodist.tensor.layout import sizes_before
from ferrodist.tensor.placement import Partial, Replicate, Shard, fold_alike

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.tensor.call import Call, Choice, Rule
    from ferrodist.tensor.layout import Layout
    from ferrodist.tensor.placement import Placement

__all__ = ["choose"]

_LITTLE = 1e-9
"""What a byte that is only copied costs, beside one that travels: it decides between ways that send nothing."""


def choose(call: Call, rule: Rule, fixed: Sequence[int]) -> bool:
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
        for choice in rule.choices(call, axis):
            if any(
                not call.inputs[place].placements[axis] == choice.inputs[place] == choice.outputs[0] for place in fixed
            ):
                continue
            cost = _cost(call.inputs, choice.inputs, axis)
            if cost < least and _is_layout(call, choice, axis, writes=bool(fixed)):
                best, least = choice, cost
        if best is None:
            return False
        call.chosen.append(best)
    return True


def _is_layout(call: Call, choice: Choice, axis: int, *, writes: bool) -> bool:
    """Whether a choice, with those of the axes before, is a way in which tensors can lie."""
    has_blocks = any(isinstance(then, Shard) and then.blocks > 1 for then in choice.outputs)
    shapes = [layout.shape for layout in call.inputs]
    of_results = [tuple(result.shape) for result in call.results] if has_blocks and not writes else None
    earlier = call.chosen
    return all(
        _fits([one.inputs[place] for one in earlier], then, shapes[place], call, axis)
        for place, then in enumerate(choice.inputs)
    ) and all(
        _fits(
            [one.outputs[place] for one in earlier], then, None if of_results is None else of_results[place], call, axis
        )
        for place, then in enumerate(choice.outputs)
    )


def _fits(before: Sequence[Placement], then: Placement, shape: tuple[int, ...] | None, call: Call, axis: int) -> bool:
    """Whether axes before leave as many equal blocks of a dim as there shall be, and are folded as this one."""
    if isinstance(then, Partial):
        return all(fold_alike(one, then) for one in before if isinstance(one, Partial))
    if isinstance(then, Shard) and then.blocks > 1 and shape is not None:
        return all(size % then.blocks == 0 for size in sizes_before(shape, before, call.mesh.shape, axis, then.dim))
    return True


def _cost(inputs: Sequence[Layout], wanted: Sequence[Placement], axis: int) -> float:
    pairs = list(zip(inputs, wanted, strict=True))
    asked = {
        (layout.shape[then.dim], then.blocks)
        for layout, then in pairs
        if isinstance(then, Shard) and layout.placements[axis] == then
    }
    return sum(_cost_of_one(layout, then, axis, asked) for layout, then in pairs)


def _cost_of_one(layout: Layout, then: Placement, axis: int, asked: set[tuple[int, int]]) -> float:
    """Bytes that a rank sends to bring one input there, or infinity where it would be cut as nobody asked for.

    ``asked`` are the sizes, and the blocks, of what other inputs have divided already as they shall be.
    """
    now = layout.placements[axis]
    if now == then:
        return 0.0
    mesh_shape = layout.mesh.shape
    num_ranks = mesh_shape[axis]
    others = [size for at, size in enumerate(mesh_shape) if at != axis and isinstance(layout.placements[at], Shard)]
    whole = math.prod(layout.shape) * layout.dtype.itemsize / math.prod(others)
    share = whole * (num_ranks - 1) / num_ranks + _LITTLE
    if isinstance(then, Shard):
        size = layout.shape[then.dim]
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
