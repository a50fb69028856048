"""Operators that draw random numbers; `generators` says how they come to be the same on any mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ferrodist.tensor.call import Choice, Rule
from ferrodist.tensor.generators import check_generators, part_of_whole
from ferrodist.tensor.placement import Partial, Replicate, Shard
from ferrodist.tensor.rules.creation import all_whole, shape_alone
from ferrodist.tensor.rules.pointwise import overloads
from ferrodist.torch_private.operators import overload_name, schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.tensor.call import Call
    from ferrodist.tensor.layout import Layout

__all__ = ["RULES"]

_aten = torch.ops.aten


def _whole(layout: Layout) -> torch.Tensor:
    """Memory for a whole tensor, which lies as the one of one process would: that decides who gets which number."""
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="cpu")


def _written(call: Call, axis: int) -> list[Choice]:
    """The first input stays as it is, others are whole. Parts of a sum can't be drawn."""
    now = call.inputs[0].placements[axis]
    if isinstance(now, Partial):
        return []
    return [Choice((now, *[Replicate()] * (len(call.inputs) - 1)), (now,))]


def _draw_in_place(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Callable[..., Any]:
    del outputs
    layout, operator = inputs[0], call.operator

    def draw(local: torch.Tensor, *others: Any, generator: torch.Generator | None = None) -> torch.Tensor:
        check_generators(layout.mesh, generator, str(operator))
        return local.copy_(part_of_whole(operator(_whole(layout), *others, generator=generator), layout))

    return draw


def _draw_alike(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Callable[..., Any]:
    layout, (output,), operator = inputs[0], outputs, call.operator
    takes_generator = any(argument.name == "generator" for argument in schema_of(operator).arguments)

    def draw(_: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        generator = named.get("generator") if takes_generator else None
        check_generators(layout.mesh, generator, str(operator))
        return part_of_whole(operator(_whole(layout), *others, **named), output)

    return draw


def _draw_from_whole(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Callable[..., Any]:
    del outputs
    layout, operator = inputs[0], call.operator

    def draw(local: torch.Tensor, *others: Any, **named: Any) -> Any:
        generators = [one for one in (*others, *named.values()) if isinstance(one, torch.Generator)]
        check_generators(layout.mesh, generators[0] if generators else None, str(operator))
        return operator(_whole(layout).copy_(local), *others, **named)

    return draw


def _dropout(call: Call, axis: int) -> list[Choice]:
    whole = [Choice((Replicate(),), (Replicate(),) * 2)]
    now = call.inputs[0].placements[axis]
    return [*whole, Choice((now,), (now,) * 2)] if isinstance(now, Shard) else whole


def _drop(call: Call, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Callable[..., Any]:
    layout, mask_layout, operator = inputs[0], outputs[1], call.operator

    def drop(local: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: FBT001
        if train is False:
            results: tuple[torch.Tensor, torch.Tensor] = operator(local, p, train)
            return results
        check_generators(layout.mesh, None, str(operator))
        # The mask is drawn before anything is computed, from as many numbers as the tensor has elements.
        mask = part_of_whole(operator(_whole(layout).fill_(1), p, train)[1], mask_layout)
        return (local * mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask

    return drop


_IN_PLACE = "bernoulli_ uniform_ normal_ exponential_ cauchy_ log_normal_ geometric_ random_"
_ALIKE = "rand_like randn_like randint_like"

RULES: dict[torch._ops.OpOverload, Rule] = {
    **{one: Rule(choices=_written, local=_draw_in_place) for one in overloads(_IN_PLACE.split())},
    **{
        one: Rule(choices=shape_alone, local=_draw_alike)
        for one in overloads(_ALIKE.split())
        if "Tensor" not in overload_name(one)
    },
    **{
        one: Rule(choices=all_whole, local=_draw_from_whole)
        for one in (_aten.bernoulli.default, _aten.poisson.default, _aten.multinomial.default)
    },
    _aten.bernoulli.p: Rule(choices=shape_alone, local=_draw_alike),
    _aten.native_dropout.default: Rule(choices=_dropout, local=_drop),
}
