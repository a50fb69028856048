"""The engine of a group's collectives of tensors on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.collectives.engines.data_plane import DataPlaneEngine
from ferrodist.collectives.engines.reference import ReferenceEngine

if TYPE_CHECKING:
    from ferrodist.backends.base import Backend
    from ferrodist.backends.engine import HostEngine

_KEY = "collectives.reference"


def host_engine_of(group: Backend) -> HostEngine:
    """The group's own engine if it has one, else ours over its data plane, or else over its messages."""
    engine: HostEngine | None = group.engine("cpu")
    if engine is not None:
        return engine
    found = group.attachments.get(_KEY)
    if found is None:
        made = ReferenceEngine(group) if group.data_plane is None else DataPlaneEngine(group)
        found = group.attachments.setdefault(_KEY, made)
    assert isinstance(found, ReferenceEngine)
    return found


def share_bytes(group: Backend, name: str, payload: bytes, timeout: float) -> list[bytes]:
    """Give every rank a few bytes of each, by rank; a collective.

    Ranks compare ``name``, of at most 24 ASCII characters. A payload has at most `MAX_PAYLOAD` bytes.
    """
    engine = host_engine_of(group)
    op = CollectiveOp(kind=CollectiveKind.SHARE, name=name, payload=payload, timeout=timeout)
    return engine.run(op, engine.reserve()) or []
