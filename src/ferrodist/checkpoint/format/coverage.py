"""A check that boxes cover a tensor, each element once."""

from __future__ import annotations

import secrets
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_PRIME = (1 << 127) - 1


def covers_once(boxes: Iterable[tuple[Sequence[int], Sequence[int]]], shape: Sequence[int]) -> bool:
    """Return whether each element of a tensor is in exactly one box.

    Boxes are weighed: along each dim an interval weighs the difference of two secret random numbers, one for each end,
    and a box weighs the product of its intervals, modulo a prime. Boxes that cover the tensor once weigh as much as it
    does. Other boxes do so with a probability of at most the number of dims in 2**127, by the Schwartz-Zippel lemma,
    since the difference is a non-zero polynomial in the random numbers. The cost is one step per dim and box.
    """
    weights_of_ends: list[dict[int, int]] = [{} for _ in shape]

    def weight(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        weighed = 1
        for weights, begin, size in zip(weights_of_ends, offsets, sizes, strict=True):
            for end in (begin, begin + size):
                if end not in weights:
                    weights[end] = secrets.randbelow(_PRIME)
            weighed = weighed * (weights[begin + size] - weights[begin]) % _PRIME
        return weighed

    found = sum(weight(offsets, sizes) for offsets, sizes in boxes if prod(sizes))
    return (found - weight([0] * len(shape), shape)) % _PRIME == 0
