"""Where a row of costs is cut, so that the largest part costs as little as it can."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["partition"]


def partition(costs: Sequence[float], num_parts: int) -> tuple[int, ...]:
    """Divide a row of costs into parts, none empty, of which the largest costs as little as possible.

    It is exact, for it counts in integers: first the least limit that ``num_parts`` parts can keep, by bisection, then
    the best parts within that limit, by dynamic programming from the end. Of several divisions with the same largest
    part it takes the most even one, which has the least sum of squares. Of several of these each part, from the first
    on, costs as little as it can, for the first stages of a pipeline keep the most microbatches, and is then as long as
    it can be, so that what costs nothing goes with what comes before. Where nothing costs anything, all costs are taken
    for equal.

    Takes O(n log(total)) and O(num_parts n w) steps for n costs, of which at most w are in a part.

    Args:
        costs: Finite, none negative; at least ``num_parts``.
        num_parts: At least 1.

    Returns:
        For each part how many costs it has.
    """
    whole = _as_integers(costs) if any(costs) else [1] * len(costs)
    sums = [0, *accumulate(whole)]
    limit = _least_limit(sums, max(whole), num_parts)
    least = _least_squares(sums, limit, num_parts)
    cuts = [0]
    for after in reversed(range(num_parts)):  # parts that follow the one whose end is chosen
        start = cuts[-1]
        ends = [
            end
            for end in _ends(sums, start, limit)
            if end in least[after] and (sums[end] - sums[start]) ** 2 + least[after][end] == least[after + 1][start]
        ]
        cuts.append(min(ends, key=lambda end: (sums[end], -end)))
    return tuple(end - start for start, end in pairwise(cuts))


def _as_integers(costs: Sequence[float]) -> list[int]:
    """The same costs in another unit: every float is an integer over a power of two."""
    ratios = [cost.as_integer_ratio() for cost in costs]
    unit = math.lcm(*(denominator for _, denominator in ratios))
    return [numerator * (unit // denominator) for numerator, denominator in ratios]


def _least_limit(sums: Sequence[int], largest: int, num_parts: int) -> int:
    """What the largest part costs at best. Fewer parts within it do as well: cutting them on makes none larger."""
    low, high = max(largest, -(-sums[-1] // num_parts)), sums[-1]
    while low < high:
        middle = (low + high) // 2
        if _count_parts(sums, middle) <= num_parts:
            high = middle
        else:
            low = middle + 1
    return low


def _count_parts(sums: Sequence[int], limit: int) -> int:
    """How few parts are within a limit: each takes as much as it can."""
    start = count = 0
    while start < len(sums) - 1:
        start = bisect_right(sums, sums[start] + limit) - 1
        count += 1
    return count


def _least_squares(sums: Sequence[int], limit: int, num_parts: int) -> list[dict[int, int]]:
    """For each number of parts: from where that many within the limit reach the end, and their least sum of squares."""
    last = len(sums) - 1
    least = [{last: 0}]
    for parts in range(1, num_parts + 1):
        after = least[-1]
        found: dict[int, int] = {}
        for start in range(num_parts - parts, last - parts + 1):
            squares = [(sums[end] - sums[start]) ** 2 + after[end] for end in _ends(sums, start, limit) if end in after]
            if squares:
                found[start] = min(squares)
        least.append(found)
    return least


def _ends(sums: Sequence[int], start: int, limit: int) -> range:
    """Where a part that begins there may end."""
    return range(start + 1, bisect_right(sums, sums[start] + limit))
