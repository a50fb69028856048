"""The engine of a group's collectives of tensors on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrodist.collectives.engines.data_plane import MovedCollectives
from ferrodist.collectives.engines.reference import ReferenceCollectives

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend
    from ferrodist.collectives.engines.base import Collectives

_KEY = "collectives.reference"


def collectives_of(group: Backend) -> Collectives:
    """The engine of a group: its own when it offers one, else ours over its mover, or else over its messages."""
    engine: Collectives | None = group.collectives
    if engine is not None:
        return engine
    found = group.attachments.get(_KEY)
    if found is None:
        made = ReferenceCollectives(group) if group.mover is None else MovedCollectives(group)
        found = group.attachments.setdefault(_KEY, made)
    assert isinstance(found, ReferenceCollectives)
    return found
