"""Python objects between ranks: msgpack by default, pickle only when asked for by name.

msgpack carries None, bool, int (64 bits), float, str, bytes, list, tuple, dict, and dataclasses and msgspec structs
as dicts; it comes back as None, bool, int, float, str, bytes, list and dict: a tuple arrives as a list. Decoding it
runs no code.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from ferrodist.collectives.gathering import all_gather, all_gather_uneven
from ferrodist.collectives.point_to_point import recv, send
from ferrodist.collectives.prepare import check_root, group_and_timeout
from ferrodist.collectives.reductions import broadcast
from ferrodist.collectives.scattering import gather, scatter_by_sizes
from ferrodist.deadline import Deadline
from ferrodist.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ferrodist.backends.base import Backend

__all__ = [
    "all_gather_object",
    "broadcast_object",
    "gather_object",
    "recv_object",
    "scatter_object",
    "send_object",
]


def all_gather_object(
    value: Any, *, group: Backend | None = None, allow_pickle: bool = False, timeout: float | None = None
) -> list[Any]:
    """Give every rank the objects of all ranks, in rank order.

    Args:
        value: This rank's object.
        group: The group, on all of whose ranks this is called; None is the default group.
        allow_pickle: Encode with pickle, and so run code that other ranks choose when decoding. On all ranks or on
            none.
        timeout: Seconds; None takes the group's.

    Raises:
        TypeError: msgpack can't carry the object; raised before anything is sent.
        ProtocolError: What came can't be decoded.
    """
    chosen, limit = group_and_timeout(group, timeout)
    encoded = _encode(value, allow_pickle)
    deadline = Deadline(limit)
    sizes = all_gather(torch.tensor([encoded.numel()]), group=chosen, timeout=limit)
    joined = all_gather_uneven(encoded, group=chosen, timeout=deadline.remaining())
    return [_decode(part, allow_pickle) for part in torch.split(joined, sizes.tolist())]


def broadcast_object(
    value: Any = None,
    root: int = 0,
    *,
    group: Backend | None = None,
    allow_pickle: bool = False,
    timeout: float | None = None,
) -> Any:
    """Give every rank the root's object; ``value`` is not read elsewhere. See `all_gather_object`."""
    chosen, limit = group_and_timeout(group, timeout)
    check_root(chosen, root, "root")
    encoded = _encode(value, allow_pickle) if chosen.rank == root else torch.empty(0, dtype=torch.uint8)
    deadline = Deadline(limit)
    size = broadcast(torch.tensor([encoded.numel()]), root, group=chosen, timeout=limit)
    if chosen.rank != root:
        encoded = torch.empty(int(size), dtype=torch.uint8)
    return _decode(broadcast(encoded, root, group=chosen, timeout=deadline.remaining()), allow_pickle)


def gather_object(
    value: Any,
    dst: int = 0,
    *,
    group: Backend | None = None,
    allow_pickle: bool = False,
    timeout: float | None = None,
) -> list[Any] | None:
    """Give rank ``dst`` the objects of all ranks, in rank order; None elsewhere. See `all_gather_object`."""
    chosen, limit = group_and_timeout(group, timeout)
    check_root(chosen, dst, "dst")
    encoded = _encode(value, allow_pickle)
    deadline = Deadline(limit)
    sizes = gather(torch.tensor([encoded.numel()]), dst, group=chosen, timeout=limit)
    joined = gather(encoded, dst, group=chosen, timeout=deadline.remaining())
    if chosen.rank != dst:
        return None
    return [_decode(part, allow_pickle) for part in torch.split(joined, sizes.tolist())]


def scatter_object(
    values: Sequence[Any] | None = None,
    src: int = 0,
    *,
    group: Backend | None = None,
    allow_pickle: bool = False,
    timeout: float | None = None,
) -> Any:
    """Give rank r the object ``values[r]`` of rank ``src``; elsewhere ``values`` is None. See `all_gather_object`."""
    chosen, limit = group_and_timeout(group, timeout)
    check_root(chosen, src, "src")
    parts = [torch.empty(0, dtype=torch.uint8)] * chosen.world_size
    if chosen.rank == src:
        if values is None or len(values) != chosen.world_size:
            raise ValueError(f"rank {src} scatters: pass one object for each of the {chosen.world_size} ranks there")
        parts = [_encode(value, allow_pickle) for value in values]
    deadline = Deadline(limit)
    sizes = torch.tensor([part.numel() for part in parts])
    counts = broadcast(sizes, src, group=chosen, timeout=limit).tolist()
    whole = torch.cat(parts) if chosen.rank == src else None
    mine = torch.empty(counts[chosen.rank], dtype=torch.uint8)
    part = scatter_by_sizes(whole, mine, counts, src, dim=0, group=chosen, timeout=deadline.remaining())
    return _decode(part, allow_pickle)


def send_object(
    value: Any,
    dst: int,
    *,
    tag: int = 0,
    group: Backend | None = None,
    allow_pickle: bool = False,
    timeout: float | None = None,
) -> None:
    """Send an object to one rank, which calls `recv_object`. See `send` and `all_gather_object`."""
    send(_encode(value, allow_pickle), dst, tag=tag, group=group, timeout=timeout)


def recv_object(
    src: int,
    *,
    tag: int = 0,
    group: Backend | None = None,
    allow_pickle: bool = False,
    timeout: float | None = None,
) -> Any:
    """Receive an object from one rank, or `ANY_SOURCE`. See `recv` and `all_gather_object`."""
    return _decode(recv(None, torch.uint8, src, tag=tag, group=group, timeout=timeout), allow_pickle)


_MSGPACK, _PICKLE = b"m", b"p"


def _encode(value: Any, allow_pickle: bool) -> torch.Tensor:  # noqa: FBT001 - the user's keyword, passed on
    if allow_pickle:
        data = _PICKLE + pickle.dumps(value)
    else:
        try:
            data = _MSGPACK + msgspec.msgpack.encode(value)
        except (TypeError, OverflowError, ValueError) as error:
            raise TypeError(
                f"msgpack can't carry this {type(value).__name__} ({error}): send plain data, or pass"
                " allow_pickle=True on all ranks if every rank may run code on every other"
            ) from error
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _decode(data: torch.Tensor, allow_pickle: bool) -> Any:  # noqa: FBT001 - the user's keyword, passed on
    raw = data.numpy().tobytes()
    codec, body = raw[:1], raw[1:]
    if codec not in (_MSGPACK, _PICKLE):
        raise ProtocolError("what another rank sent is not an object: receive it with recv()")
    if codec == _PICKLE and not allow_pickle:
        raise ProtocolError(
            "another rank sent a pickle; pass allow_pickle=True to run what it says, on all ranks or none"
        )
    try:
        return pickle.loads(body) if codec == _PICKLE else msgspec.msgpack.decode(body)  # noqa: S301 - asked for by name
    except Exception as error:
        raise ProtocolError(f"what another rank sent can't be decoded: {error!r}") from error
