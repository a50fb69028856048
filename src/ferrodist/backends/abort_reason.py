"""The wire format of the reason of a group's failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ferrodist.errors import DistributedError, error_from_wire, error_to_wire

if TYPE_CHECKING:
    from typing_extensions import Buffer


_MAX_CHARACTERS = 10_000
_MAX_RANKS = 10_000

_DECODER = msgspec.msgpack.Decoder(tuple[str, str, tuple[int, ...]])


def pack_reason(
    error: DistributedError, *, max_characters: int = _MAX_CHARACTERS, max_ranks: int = _MAX_RANKS
) -> bytes:
    """Encode an error: its class, the first ``max_characters`` of its message and ``max_ranks`` of its ranks."""
    name, message, named = error_to_wire(error)
    return msgspec.msgpack.encode((name, message[:max_characters], named[:max_ranks]))


def unpack_reason(data: Buffer, world_size: int) -> DistributedError:
    """Decode `pack_reason`'s result; raises ValueError if it can't be read or names no rank of the world."""
    try:
        name, message, ranks = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # text that isn't UTF-8 is a ValueError
        raise ValueError(f"a reason that can't be read ({error})") from None
    wrong = [rank for rank in ranks if not 0 <= rank < world_size]
    if wrong:
        raise ValueError(f"a reason that names rank {wrong[0]} of a world of {world_size}")
    return error_from_wire(name, message, ranks)
