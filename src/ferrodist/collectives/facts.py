"""The facts that ranks tell each other with a call, read with care: another rank may run another program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrodist.collectives.reduce_op import DTYPES
from ferrodist.errors import ProtocolError

if TYPE_CHECKING:
    import struct
    from collections.abc import Sequence

    import torch

    from ferrodist.backends.base import Backend

_MAX_SIZE = 1 << 47
"""Elements; more than any machine's memory has bytes."""


def read_facts(form: struct.Struct, payloads: Sequence[bytes], group: Backend, operation: str) -> list[tuple[Any, ...]]:
    """Unpack what stands at the front of each rank's payload, by rank.

    Raises:
        ProtocolError: A rank said less than that. The group has failed.
    """
    for rank, payload in enumerate(payloads):
        if len(payload) < form.size:
            raise protocol_error(
                group, rank, f"sent {len(payload)} bytes with its {operation}, which takes {form.size}"
            )
    return [form.unpack_from(payload) for payload in payloads]


def check_sizes(sizes: Sequence[int], group: Backend, rank: int, operation: str) -> None:
    """Raise ProtocolError, and abort the group, unless a rank's tensors can have such sizes."""
    wrong = [size for size in sizes if not 0 <= size <= _MAX_SIZE]
    if wrong:
        raise protocol_error(group, rank, f"named a size of {wrong[0]} with its {operation}")


def protocol_error(group: Backend, rank: int, what: str) -> ProtocolError:
    """Abort the group for what a rank sent, and return the error to raise."""
    error = ProtocolError(f"rank {rank} of group {group.name!r} broke the protocol: it {what}", ranks=(rank,))
    group.abort(error)
    return error


def dtype_at(place: int, group: Backend, rank: int, operation: str) -> torch.dtype:
    """The dtype that a rank named by its place in `DTYPES`.

    Raises:
        ProtocolError: There is none. The group has failed.
    """
    if not 0 <= place < len(DTYPES):
        raise protocol_error(group, rank, f"named dtype number {place} with its {operation}, which is unknown here")
    return DTYPES[place]


def dtype_text(place: int) -> str:
    """The name of the dtype at a place in `DTYPES`, for messages; of an unknown one its number."""
    return str(DTYPES[place]).removeprefix("torch.") if 0 <= place < len(DTYPES) else f"dtype {place}"
