"""Decoding of the structs that ranks exchange, with checks: another rank may run another program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ferrodist.collectives.arguments import bytes_of
from ferrodist.collectives.reduce_op import DTYPES
from ferrodist.errors import CollectiveMismatchError, ProtocolError

if TYPE_CHECKING:
    import struct
    from collections.abc import Iterable, Sequence

    import torch

    from ferrodist.backends.base import Backend

_MAX_SIZE = 1 << 47  # elements; more than the bytes of any machine's memory


def unpack_payloads(
    form: struct.Struct, payloads: Sequence[bytes], group: Backend, operation: str
) -> list[tuple[Any, ...]]:
    """Unpack a struct from the start of each rank's payload; aborts the group if one is too short."""
    for rank, payload in enumerate(payloads):
        if len(payload) < form.size:
            raise abort_for_protocol_error(
                group, rank, f"sent {len(payload)} bytes with its {operation}, which takes {form.size}"
            )
    return [form.unpack_from(payload) for payload in payloads]


def few_elements(tensor: torch.Tensor, room: int) -> bytes:
    """The elements of a flat tensor that travel with a description of it: none if they have no room, or on a GPU."""
    return b"" if tensor.nbytes > room or tensor.is_cuda else bytes(bytes_of(tensor))


def elements_after(
    head_size: int, payload: bytes, size_bytes: int, *, group: Backend, rank: int, operation: str
) -> memoryview | None:
    """A rank's elements behind the head of its payload, or None if they have not come with it.

    Aborts the group unless a payload with elements has ``size_bytes`` of them.
    """
    elements = memoryview(payload)[head_size:]
    if len(elements) == size_bytes:
        return elements
    if len(elements):
        raise abort_for_protocol_error(
            group, rank, f"sent {len(elements)} bytes of elements with its {operation}, which takes {size_bytes}"
        )
    return None


def check_sizes(sizes: Sequence[int], group: Backend, rank: int, operation: str) -> None:
    """Raise ProtocolError, and abort the group, unless a rank's tensors can have these sizes."""
    wrong = [size for size in sizes if not 0 <= size <= _MAX_SIZE]
    if wrong:
        raise abort_for_protocol_error(group, rank, f"named a size of {wrong[0]} with its {operation}")


def abort_for_protocol_error(group: Backend, rank: int, what: str) -> ProtocolError:
    """Abort the group for a malformed message of a rank, and return the error to raise."""
    error = ProtocolError(f"rank {rank} of group {group.name!r} broke the protocol: it {what}", ranks=(rank,))
    group.abort(error)
    return error


def abort_for_disagreement(
    group: Backend, operation: str, calls: Iterable[str], advice: str, ranks: tuple[int, ...] = ()
) -> CollectiveMismatchError:
    """Abort the group for ranks that made different calls, and return the error to raise."""
    error = CollectiveMismatchError(
        f"the ranks of group {group.name!r} disagree about {operation}: {'; '.join(calls)}. {advice}", ranks=ranks
    )
    group.abort(error)
    return error


def dtype_at(index: int, group: Backend, rank: int, operation: str) -> torch.dtype:
    """The dtype that a rank sent as its index in `DTYPES`; aborts the group if there is none."""
    if not 0 <= index < len(DTYPES):
        raise abort_for_protocol_error(
            group, rank, f"named dtype number {index} with its {operation}, which is unknown here"
        )
    return DTYPES[index]


def dtype_text(index: int) -> str:
    """The name of a dtype by its index in `DTYPES`, for messages; the index of an unknown one."""
    return str(DTYPES[index]).removeprefix("torch.") if 0 <= index < len(DTYPES) else f"dtype {index}"
