"""Operators that draw random numbers, the same on any mesh.

Every rank draws all numbers of the full tensor from its generator and keeps those of its shard. That takes the time and
the memory of the full tensor on each rank, and gives the same bits on any mesh. The generators must be in the same
state on all ranks of the mesh; each call compares them, in one small exchange.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ferrodist.collectives.engines.host import share_bytes
from ferrodist.errors import CollectiveMismatchError
from ferrodist.tensor.op_strategy import OpRule, OpStrategy, all_replicated, keep_sharding, rule_table
from ferrodist.tensor.placement import Partial, Placement, Replicate, Shard
from ferrodist.tensor.redistribute import redistribute_local
from ferrodist.tensor.traced import define_generator_check, traced_generator_check
from ferrodist.torch_private.compilers import is_traced

if TYPE_CHECKING:
    from ferrodist.mesh import DeviceMesh
    from ferrodist.tensor.op_strategy import LocalFunction, OpCall
    from ferrodist.tensor.spec import DTensorSpec


def check_generators(mesh: DeviceMesh, generator: torch.Generator | None, name: str) -> None:
    """Raise unless the generators of all ranks of a mesh are in the same state; all of them call this.

    None is torch's default generator. Ranks that are threads share that one and would draw from it in any order: they
    need generators of their own.
    """
    group = mesh.group
    if group.world_size == 1:
        return
    state = (torch.default_generator if generator is None else generator).get_state()
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()
    digests = share_bytes(group, "random", digest, group.timeout)
    others = [rank for rank, other in zip(mesh.ranks, digests, strict=True) if other != digests[0]]
    if others:
        raise CollectiveMismatchError(
            f"{name} draws the same numbers on all ranks, but the generators of ranks {', '.join(map(str, others))} are"
            f" in another state than that of rank {mesh.ranks[0]}: call torch.manual_seed(seed) with the same seed on"
            " all ranks, and draw from the generator only where all do (ranks that are threads pass a generator each)",
            ranks=tuple(others),
        )


def local_of_full(full: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """This rank's shard of a tensor that every rank has in full; it may share memory with that."""
    return redistribute_local(full, spec.replicated, spec)


def _empty_full(spec: DTensorSpec, generator: torch.Generator | None, operator: object) -> torch.Tensor:
    """Memory for the full tensor, with the full tensor's strides: these decide which element gets which number.

    Ranks must draw the same numbers; errors as of `check_generators`.
    """
    made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu")
    if is_traced(made):
        return traced_generator_check(made, operator, spec.mesh)
    check_generators(spec.mesh, generator, str(operator))
    return made


def _in_place_strategies(call: OpCall, axis: int) -> list[OpStrategy]:
    """The first input as it is, others replicated. Partial sums can't be drawn."""
    current = call.inputs[0].placements[axis]
    if isinstance(current, Partial):
        return []
    return [OpStrategy((current, *[Replicate()] * (len(call.inputs) - 1)), (current,))]


def _draw_in_place(call: OpCall) -> LocalFunction:
    spec, operator = call.placed_inputs[0], call.operator

    def draw(local: torch.Tensor, *others: Any, generator: torch.Generator | None = None) -> torch.Tensor:
        full = _empty_full(spec, generator, operator)
        return local.copy_(local_of_full(operator(full, *others, generator=generator), spec))

    return draw


def _draw(call: OpCall, *, reads_input: bool) -> LocalFunction:
    """Draw a new tensor of the shape of the input, or by its elements, such as probabilities: these are replicated."""
    spec, (output,), operator = call.placed_inputs[0], call.outputs, call.operator

    def draw(local: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        generator = next((one for one in (*others, *named.values()) if isinstance(one, torch.Generator)), None)
        full = _empty_full(spec, generator, operator)
        return local_of_full(operator(full.copy_(local) if reads_input else full, *others, **named), output)

    return draw


def _dropout_strategies(call: OpCall, axis: int) -> list[OpStrategy]:
    current = call.inputs[0].placements[axis]
    placements: list[Placement] = [Replicate(), *([current] if isinstance(current, Shard) else [])]
    return [OpStrategy((one,), (one, one)) for one in placements]


def _dropout(call: OpCall) -> LocalFunction:
    spec, mask_spec, operator = call.placed_inputs[0], call.outputs[1], call.operator

    def drop(local: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: FBT001
        if train is False:
            return operator(local, p, train)  # type: ignore[no-any-return]
        # The mask is drawn before anything is computed, from as many numbers as the tensor has elements.
        mask = local_of_full(operator(_empty_full(spec, None, operator).fill_(1), p, train)[1], mask_spec)
        return (local * mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask

    return drop


def _draw_replicated(call: OpCall) -> LocalFunction:
    """Draw by the elements of several tensors, which every rank has."""
    mesh, operator = call.mesh, call.operator

    def draw(*given: Any, generator: torch.Generator | None = None) -> Any:
        check_generators(mesh, generator, str(operator))
        return operator(*given, generator=generator)

    return draw


define_generator_check(check_generators)

RULES = rule_table(
    (
        OpRule(strategies=_in_place_strategies, local=_draw_in_place),
        "bernoulli_ uniform_ normal_ exponential_ cauchy_ log_normal_ geometric_ random_",
    ),
    (
        OpRule(strategies=keep_sharding, local=partial(_draw, reads_input=False)),
        (
            "rand_like randn_like randint_like.default randint_like.low_dtype randint_like.generator"
            " randint_like.low_generator_dtype"
        ),
    ),
    (
        OpRule(strategies=all_replicated, local=partial(_draw, reads_input=True)),
        "bernoulli.default poisson.default multinomial.default",
    ),
    (OpRule(strategies=keep_sharding, local=partial(_draw, reads_input=False)), "bernoulli.p"),
    (
        OpRule(strategies=all_replicated, local=_draw_replicated),
        "normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor",
    ),
    (OpRule(strategies=_dropout_strategies, local=_dropout), "native_dropout.default"),
)
