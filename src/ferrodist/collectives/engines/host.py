"""The engine of a group's collectives of tensors on the host."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from ferrodist.backends.collective_op import CollectiveKind, CollectiveOp
from ferrodist.collectives.engines.data_plane import DataPlaneEngine
from ferrodist.collectives.engines.reference import ReferenceEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend
    from ferrodist.backends.interfaces import HostEngine

_T = TypeVar("_T")
_KEY = "collectives.reference"
_making = threading.Lock()


def host_engine_of(group: Backend) -> HostEngine:
    """The group's own engine if it has one, else ours over its data plane, or else over its messages."""
    engine: HostEngine | None = group.engine("cpu")
    if engine is not None:
        return engine
    return attached_to(group, _KEY, ReferenceEngine if group.data_plane is None else DataPlaneEngine)


def attached_to(group: Backend, key: str, make: Callable[[Backend], _T]) -> _T:
    """The object that is attached to a group under a name, made by ``make(group)`` when first needed."""
    found: _T | None = group.attachments.get(key)
    if found is None:
        with _making:
            found = group.attachments.get(key)
            if found is None:
                found = group.attachments[key] = make(group)
    return found


def share_bytes(group: Backend, name: str, payload: bytes, timeout: float) -> list[bytes]:
    """Give every rank a few bytes of each, by rank; a collective.

    Ranks compare ``name``, of at most 24 ASCII characters. A payload has at most `MAX_PAYLOAD` bytes, or as many as
    the engine's ``share_room`` says.
    """
    engine = host_engine_of(group)
    op = CollectiveOp(kind=CollectiveKind.SHARE, name=name, payload=payload, timeout=timeout)
    return engine.run(op, engine.reserve()) or []
