"""Whether boxes are a whole tensor together, each element once."""

from __future__ import annotations

import secrets
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_PRIME = (1 << 127) - 1


def covers_once(boxes: Iterable[tuple[Sequence[int], Sequence[int]]], shape: Sequence[int]) -> bool:
    """Whether each element of a tensor is in exactly one of some boxes.

    Boxes are weighed: along each dim an interval weighs the difference of two secret random numbers, one for each of
    its ends, and a box the product of its intervals, modulo a prime. Boxes that cover the tensor once weigh what it
    does. Other boxes weigh as much with a probability of at most the number of dims in 2**127, by the Schwartz-Zippel
    lemma, for the difference is a polynomial in the random numbers that isn't zero. Each dim of each box is a step.

    Args:
        boxes: Offsets and shape of each; all lie within the tensor.
        shape: The tensor's.
    """
    places: list[dict[int, int]] = [{} for _ in shape]

    def weight(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        weighed = 1
        for numbers, begin, size in zip(places, offsets, sizes, strict=True):
            for end in (begin, begin + size):
                if end not in numbers:
                    numbers[end] = secrets.randbelow(_PRIME)
            weighed = weighed * (numbers[begin + size] - numbers[begin]) % _PRIME
        return weighed

    found = sum(weight(offsets, sizes) for offsets, sizes in boxes if prod(sizes))
    return (found - weight([0] * len(shape), shape)) % _PRIME == 0
