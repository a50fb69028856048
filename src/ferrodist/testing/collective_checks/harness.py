"""What the checks of collectives are made of.

A check is a function of one rank's group, which is also the default group; it runs on every rank, whatever their
number, as threads or as processes. So it shares nothing with other ranks but the group, and proves nothing by sleeping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from ferrodist.backends.sub import SubBackend
from ferrodist.testing.collective_checks.oracle import elements, expected_fold, same_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ferrodist.backends.base import Backend
    from ferrodist.collectives.reduce_op import Op

    CollectiveCheck: TypeAlias = Callable[[Backend], None]

__all__ = [
    "LATE_SECONDS",
    "ONE_STEP_BYTES",
    "PAYLOAD_BYTES",
    "SEGMENT_BYTES",
    "CollectiveCheck",
    "expect",
    "factor_of",
    "inputs_of",
    "parts_along",
    "same_group_anew",
    "starts_of",
]

# Where the reference implementation changes its algorithm. Other engines have other places; checks on both sides of
# these are good for any.
PAYLOAD_BYTES = 108
ONE_STEP_BYTES = 64 * 1024
SEGMENT_BYTES = 4 << 20

LATE_SECONDS = 1.5
"""How much later than its deadline a call may return, on a busy machine with more ranks than cores."""


def inputs_of(group: Backend, dtype: torch.dtype, count: int, seed: int = 0) -> list[torch.Tensor]:
    """What each rank passes to a collective, by rank."""
    return [elements(dtype, count, rank, seed) for rank in range(group.world_size)]


def factor_of(rank: int) -> float:
    """Each rank's factor in a premultiplied sum: different ones, with more digits than a float32 has."""
    return (rank + 1) / 3 - 0.9


def expect(
    group: Backend, actual: torch.Tensor, op: Op, inputs: Sequence[torch.Tensor], what: str, *, start: int = 0
) -> None:
    """Assert that ``actual`` is the fold of ``inputs`` from element ``start`` on, bit for bit."""
    factors = [factor_of(rank) for rank in range(group.world_size)]
    pieces = [tensor[start : start + actual.numel()] for tensor in inputs]
    dtype = str(actual.dtype).removeprefix("torch.")
    what = f"{what} of {inputs[0].numel()} {dtype} with {op}, rank {group.rank} of {group.world_size}"
    same_bits(actual.reshape(-1), expected_fold(op, pieces, factors), what)


def parts_along(tensor: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> list[torch.Tensor]:
    """The parts of a tensor along a dim, by rank."""
    return [tensor.narrow(dim, start, size) for start, size in zip(starts_of(sizes), sizes, strict=True)]


def starts_of(sizes: Sequence[int]) -> list[int]:
    """Where each part begins."""
    return [sum(sizes[:rank]) for rank in range(len(sizes))]


def same_group_anew(group: Backend) -> Backend:
    """A sub-group of all ranks, which a check may have fail."""
    return SubBackend(group, range(group.world_size))
