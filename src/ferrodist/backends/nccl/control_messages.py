"""Small messages of fixed size between the CPUs of the ranks of an NCCL group, sent without waiting."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ferrodist.backends.base import Backend
    from ferrodist.backends.persistent_recv import PersistentRecv
    from ferrodist.backends.request import Request
    from ferrodist.errors import DistributedError


def send_without_waiting(group: Backend, message: bytes, rank: int, tag: int) -> Request | None:
    """Send a message without waiting; returns the request if it could not be handed over at once."""
    return None if group.try_send(message, rank, tag=tag) else group.isend(message, rank, tag=tag)


def post_persistent_recvs(
    group: Backend,
    ranks: Iterable[int],
    on_messages: Callable[[int, list[bytes]], None],
    on_end: Callable[[int, DistributedError], None] = lambda *_: None,  # waiting threads and the watchdog see it too
    *,
    tag: int,
    size_bytes: int,
) -> list[PersistentRecv]:
    """Receive the messages of several ranks, for as long as the group lasts or until closed.

    ``on_messages(rank, messages)`` is called in any thread and must not block or raise; ``on_end(rank, error)`` when
    nothing more will come from a rank.
    """
    return [
        group.post_persistent_recv(rank, size_bytes, partial(on_messages, rank), partial(on_end, rank), tag=tag)
        for rank in ranks
    ]
