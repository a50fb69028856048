"""Operators that draw random numbers; `generators` says how they come to be the same on any mesh.

Random numbers that all ranks draw alike: those that one process would draw for the whole tensor.

Every rank draws all of a tensor from its generator and keeps its part. That takes the time and the memory of the whole
tensor on each rank, and gives the same bits on any mesh. The generators must be in the same state on all ranks of the
mesh; each call compares them, which is one small exchange.

Operators that make new tensors of the shape and dtype of others, whose elements they don't read.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.engines.host import share_bytes
from ferrodist.errors import CollectiveMismatchError, UnsupportedOpError
from ferrodist.tensor.op_strategy import OpRule, OpStrategy
from ferrodist.tensor.ops.pointwise import overloads
from ferrodist.tensor.placement import Partial, Replicate, Shard
from ferrodist.tensor.redistribute import redistribute_local
from ferrodist.tensor.spec import DTensorSpec
from ferrodist.torch_private.operators import overload_name, schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.mesh import DeviceMesh
    from ferrodist.tensor.op_strategy import OpCall


def check_generators(mesh: DeviceMesh, generator: torch.Generator | None, name: str) -> None:
    """Return if the generators of all ranks of the mesh are in one state; all of them call this.

    Args:
        mesh: The mesh.
        generator: This rank's, or None for torch's default one. Ranks that are threads share that, so they would
            draw from it in any order: they need generators of their own.
        name: What is going to draw, for the error.

    Raises:
        CollectiveMismatchError: On all ranks: they are not.
    """
    group = mesh.group
    if group.world_size == 1:
        return
    state = (torch.default_generator if generator is None else generator).get_state()
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()
    said = share_bytes(group, "random", digest, group.timeout)
    others = [rank for rank, other in zip(mesh.ranks, said, strict=True) if other != said[0]]
    if others:
        raise CollectiveMismatchError(
            f"{name} draws the same numbers on all ranks, but the generators of ranks {', '.join(map(str, others))} are"
            f" in another state than that of rank {mesh.ranks[0]}: call torch.manual_seed(seed) with the same seed on"
            " all ranks, and draw from the generator only where all do (ranks that are threads pass a generator each)",
            ranks=tuple(others),
        )


def part_of_whole(whole: torch.Tensor, layout: DTensorSpec) -> torch.Tensor:
    """This rank's part of a tensor that every rank has all of; it may share memory with that."""
    return redistribute_local(whole, layout.whole, layout)


_aten = torch.ops.aten


def shape_alone(call: OpCall, axis: int) -> list[OpStrategy]:
    """As the input is divided, and whole where that is partial: nothing is moved."""
    now = call.inputs[0].placements[axis]
    return [OpStrategy((now,), (now if isinstance(now, Shard) else Replicate(),))]


def all_whole(call: OpCall, axis: int) -> list[OpStrategy]:
    """Nothing is divided: as what is drawn for an element depends on how many numbers those before it took."""
    del axis
    return [OpStrategy((Replicate(),) * len(call.inputs), (Replicate(),) * len(call.results))]


def _fresh(call: OpCall, axis: int) -> list[OpStrategy]:
    """Of shapes of their own: whole."""
    return [OpStrategy((call.inputs[0].placements[axis],), (Replicate(),))]


def _as_strided(tensor: Any, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
    """A view of memory: autograd takes such of whole tensors, for the gradient of what was written to a view."""
    layout: DTensorSpec = tensor._layout
    local = tensor._local
    if any(placement != Replicate() for placement in layout.placements) or (
        local.numel() > 1 and local.stride() != layout.stride
    ):
        raise UnsupportedOpError(
            f"torch.as_strided is of memory, of which ranks have parts: {layout}; use views that name dims, or"
            " as_strided on full_tensor()"
        )
    start = tensor.storage_offset()
    offset = 0 if storage_offset is None else storage_offset - start
    view = local.as_strided(size, stride, local.storage_offset() + offset)
    result = DTensorSpec.of(layout.mesh, layout.placements, view.shape, layout.dtype, view.stride())
    return type(tensor)._wrap_view(view, result, tensor, offset)


RULES: dict[torch._ops.OpOverload, OpRule] = {
    **{
        operator: OpRule(choices=shape_alone)
        for operator in (
            _aten.zeros_like.default,
            _aten.ones_like.default,
            _aten.empty_like.default,
            _aten.full_like.default,
        )
    },
    **{
        operator: OpRule(choices=_fresh)
        for operator in (
            _aten.new_zeros.default,
            _aten.new_ones.default,
            _aten.new_empty.default,
            _aten.new_full.default,
            _aten.new_empty_strided.default,
        )
    },
}

DECOMPOSITIONS: dict[torch._ops.OpOverload, Callable[..., Any]] = {_aten.as_strided.default: _as_strided}


def _whole(layout: DTensorSpec) -> torch.Tensor:
    """Memory for a whole tensor, which lies as the one of one process would: that decides who gets which number."""
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="cpu")


def _written(call: OpCall, axis: int) -> list[OpStrategy]:
    """The first input stays as it is, others are whole. Parts of a sum can't be drawn."""
    now = call.inputs[0].placements[axis]
    if isinstance(now, Partial):
        return []
    return [OpStrategy((now, *[Replicate()] * (len(call.inputs) - 1)), (now,))]


def _draw_in_place(call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]) -> Callable[..., Any]:
    del outputs
    layout, operator = inputs[0], call.operator

    def draw(local: torch.Tensor, *others: Any, generator: torch.Generator | None = None) -> torch.Tensor:
        check_generators(layout.mesh, generator, str(operator))
        return local.copy_(part_of_whole(operator(_whole(layout), *others, generator=generator), layout))

    return draw


def _draw_alike(call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]) -> Callable[..., Any]:
    layout, (output,), operator = inputs[0], outputs, call.operator
    takes_generator = any(argument.name == "generator" for argument in schema_of(operator).arguments)

    def draw(_: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        generator = named.get("generator") if takes_generator else None
        check_generators(layout.mesh, generator, str(operator))
        return part_of_whole(operator(_whole(layout), *others, **named), output)

    return draw


def _draw_from_whole(call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]) -> Callable[..., Any]:
    del outputs
    layout, operator = inputs[0], call.operator

    def draw(local: torch.Tensor, *others: Any, **named: Any) -> Any:
        generators = [one for one in (*others, *named.values()) if isinstance(one, torch.Generator)]
        check_generators(layout.mesh, generators[0] if generators else None, str(operator))
        return operator(_whole(layout).copy_(local), *others, **named)

    return draw


def _dropout(call: OpCall, axis: int) -> list[OpStrategy]:
    whole = [OpStrategy((Replicate(),), (Replicate(),) * 2)]
    now = call.inputs[0].placements[axis]
    return [*whole, OpStrategy((now,), (now,) * 2)] if isinstance(now, Shard) else whole


def _drop(call: OpCall, inputs: Sequence[DTensorSpec], outputs: Sequence[DTensorSpec]) -> Callable[..., Any]:
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

RULES |= {
    **{one: OpRule(choices=_written, local=_draw_in_place) for one in overloads(_IN_PLACE.split())},
    **{
        one: OpRule(choices=shape_alone, local=_draw_alike)
        for one in overloads(_ALIKE.split())
        if "Tensor" not in overload_name(one)
    },
    **{
        one: OpRule(choices=all_whole, local=_draw_from_whole)
        for one in (_aten.bernoulli.default, _aten.poisson.default, _aten.multinomial.default)
    },
    _aten.bernoulli.p: OpRule(choices=shape_alone, local=_draw_alike),
    _aten.native_dropout.default: OpRule(choices=_dropout, local=_drop),
}
