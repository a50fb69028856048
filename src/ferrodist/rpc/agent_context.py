"""What the callers of one agent share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.rpc.executor import Waits, Workers
    from ferrodist.rpc.large_messages import Buffers
    from ferrodist.rpc.messages import Call, Content, MessageKind
    from ferrodist.rpc.metrics import Counters
    from ferrodist.rpc.remote_objects import RemoteObjects


@dataclass(frozen=True, slots=True, kw_only=True)
class Office:
    """What an agent's callers share.

    Args:
        workers: Who serve them.
        waits: What threads wait with.
        counters: Of calls.
        buffers: Where large tensors arrive.
        objects: What references refer to.
        serve_internal: Serves the agents' own calls: called with a rank, its call, and what takes the answer.
        answered: Called with a rank, the number of a call of this rank, and what it has come to.
        name: Of this rank, if it has one.
        timeout: Seconds that owners of references in an answer may take.
        most_outstanding: Calls that a rank may have without a result.
        message_limit: Bytes that a message may have.
    """

    workers: Workers
    waits: Waits
    counters: Counters
    buffers: Buffers
    objects: RemoteObjects
    serve_internal: Callable[[int, Call, Callable[[Any], None]], None]
    answered: Callable[[int, int, MessageKind, Content], None]
    name: str | None
    timeout: float
    most_outstanding: int
    message_limit: int
