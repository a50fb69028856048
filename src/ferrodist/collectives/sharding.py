"""How elements are divided over ranks."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from ferrodist.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["compute_shard_sizes", "offsets_of"]


def compute_shard_sizes(total: int, world_size: int) -> list[int]:
    """Divide ``total`` elements over ranks as evenly as possible: the first ranks get one more."""
    if total < 0 or world_size < 1:
        raise ValueError(f"cannot divide {counted(total, 'element')} over {counted(world_size, 'rank')}")
    share, rest = divmod(total, world_size)
    return [share + (rank < rest) for rank in range(world_size)]


def offsets_of(sizes: Sequence[int]) -> list[int]:
    """Where each part starts when parts of these sizes lie one after the other; one entry more, for the end."""
    return [0, *itertools.accumulate(sizes)]
