"""The engine of a group's collectives of tensors on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrodist.collectives.engines.data_plane import DataPlaneEngine
from ferrodist.collectives.engines.reference import ReferenceEngine

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend
    from ferrodist.collectives.engines.base import HostEngine

_KEY = "collectives.reference"


def host_engine_of(group: Backend) -> HostEngine:
    """The engine of a group: its own when it offers one, else ours over its mover, or else over its messages."""
    engine: HostEngine | None = group.collectives
    if engine is not None:
        return engine
    found = group.attachments.get(_KEY)
    if found is None:
        made = ReferenceEngine(group) if group.data_plane is None else DataPlaneEngine(group)
        found = group.attachments.setdefault(_KEY, made)
    assert isinstance(found, ReferenceEngine)
    return found
