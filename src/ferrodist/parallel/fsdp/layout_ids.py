"""Ids that tell the layouts of a group apart, so that ranks can't confuse their parameters.

[Note: ids of layouts]
*Problem*: ranks whose forwards took different branches must not compute with each other's parameters.

*Ids*: each collective compares its number of elements and its dim of concatenation between ranks anyway, so layouts
that differ in one of them can't be confused, and no message is added. To gather, layouts with shards of one size use
different dims: of two with shards of 1024 elements, the first concatenates shards of shape (1024,) along dim 0, the
second shards of shape (1, 1024) along dim 1, which puts the elements in the same order. From the 32nd layout of a size
on the last dim is shared, and each gathering is followed by a token whose number of elements is the layout's own, as it
is for shards that are used in shared memory. To reduce, rows are padded to a number of elements that no other layout
has. Shards are not padded for this: their size depends on nothing but the unit's shapes and the number of ranks, so
that a saved state fits a model that is made later.

*Release*: an id is free again when all ranks have found its layout collected, which they ask each other when they make
the next FSDP: garbage collection happens at a different time on each rank.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from ferrodist.backends.base import Backend

_ATTACHMENT = "parallel.fsdp.layout_ids"


class LayoutIds:
    """The ids of a group's layouts; all ranks claim and release them in one order."""

    def __init__(self) -> None:
        self._taken: defaultdict[str, set[int]] = defaultdict(set)
        self._claims: list[tuple[weakref.ref[object], list[tuple[str, int]]]] = []

    def begin(self, layout: object) -> None:
        """Start the claims of another layout."""
        self._claims.append((weakref.ref(layout), []))

    def claim(self, kind: str, first: int, *, step: int = 1) -> int:
        """Claim the smallest free id of a kind among ``first``, ``first + step``, ..."""
        taken = self._taken[kind]
        claimed = first
        while claimed in taken:
            claimed += step
        taken.add(claimed)
        self._claims[-1][1].append((kind, claimed))
        return claimed

    def find_collected(self) -> list[int]:
        """Indices of the layouts that this rank has collected."""
        return [index for index, (layout, _) in enumerate(self._claims) if layout() is None]

    def release(self, indices: Collection[int]) -> None:
        """Release the ids of layouts that all ranks have collected; all ranks release the same."""
        for index in indices:
            for kind, claimed in self._claims[index][1]:
                self._taken[kind].discard(claimed)
        self._claims = [claim for index, claim in enumerate(self._claims) if index not in indices]


def layout_ids(group: Backend) -> LayoutIds:
    """The ids of a group's layouts."""
    ids: LayoutIds = group.attachments.setdefault(_ATTACHMENT, LayoutIds())
    return ids
