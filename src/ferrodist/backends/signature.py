"""The signature of a collective call: 192 bytes that ranks exchange, and compare, before a result is written."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from functools import lru_cache

_OPERATION_SIZE, _DTYPE_SIZE, _REDUCE_OP_SIZE = 24, 16, 18

# operation, dtype, reduce op, root, dim, element count, sequence | bytes of payload, payload
_HEADER = struct.Struct(f"<{_OPERATION_SIZE}s{_DTYPE_SIZE}s{_REDUCE_OP_SIZE}sihqQ")
_PAYLOAD_LENGTH = struct.Struct("<I")
_STAMP = struct.Struct("<QI")  # the end of the header, and the length of the payload
FINGERPRINT_BYTES = _HEADER.size
"""Size of the front of a record that must be the same on all ranks."""
PAYLOAD_START = _HEADER.size + _PAYLOAD_LENGTH.size

RECORD_BYTES = 192
"""Size of a record (an encoded call) in bytes: three cache lines; every rank's fits in a connection's first segment."""

MAX_PAYLOAD = RECORD_BYTES - PAYLOAD_START  # bytes of payload that travel with a call at no cost

FAILED_PROGRAM = "failed_program"
"""The operation that a rank calls when its program failed where the others may go on; the payload says how."""


@lru_cache(maxsize=256)
def _text(value: str, size: int) -> bytes:
    encoded = value.encode("ascii")
    assert len(encoded) <= size, f"{value!r} would be cut to {size} bytes"
    return encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSignature:
    """One rank's collective call. All fields but ``payload`` must be equal on all ranks."""

    operation: str  # its name, at most 24 ASCII characters
    dtype: str = ""  # name of the element type, at most 16 characters, or empty
    reduce_op: str = ""  # name of the reduction, at most 18 characters, or empty
    root: int = -1  # -1: none
    dim: int = -1  # the dim that is concatenated or split, from 0; -1: none
    count: int = 0  # elements that all ranks must agree on; 0 if they may differ
    sequence: int = 0  # sequence number of the group's collective
    payload: bytes = b""  # at most `MAX_PAYLOAD` bytes that every rank receives

    def encode(self) -> bytes:
        """Encode the call in `RECORD_BYTES` bytes."""
        assert len(self.payload) <= MAX_PAYLOAD
        header = _HEADER.pack(
            _text(self.operation, _OPERATION_SIZE),
            _text(self.dtype, _DTYPE_SIZE),
            _text(self.reduce_op, _REDUCE_OP_SIZE),
            self.root,
            self.dim,
            self.count,
            self.sequence,
        )
        return (header + _PAYLOAD_LENGTH.pack(len(self.payload)) + self.payload).ljust(RECORD_BYTES, b"\0")

    @staticmethod
    def decode(record: bytes | memoryview) -> CollectiveSignature:
        """Decode the result of `encode`; text that is not ASCII gets replacement characters."""
        operation, dtype, reduce_op, root, dim, count, sequence = _HEADER.unpack_from(record)
        return CollectiveSignature(
            operation=operation.rstrip(b"\0").decode("ascii", "replace"),
            dtype=dtype.rstrip(b"\0").decode("ascii", "replace"),
            reduce_op=reduce_op.rstrip(b"\0").decode("ascii", "replace"),
            root=root,
            dim=dim,
            count=count,
            sequence=sequence,
            payload=payload_of(record),
        )

    def at(self, sequence: int) -> CollectiveSignature:
        """The same call with another sequence number."""
        return replace(self, sequence=sequence)

    def with_payload(self, payload: bytes) -> CollectiveSignature:
        """The same call with another payload."""
        return replace(self, payload=payload)

    def __str__(self) -> str:
        parts = [self.reduce_op] if self.reduce_op else []
        if self.dtype:
            parts.append(f"{self.dtype}[{self.count}]")
        if self.root >= 0:
            parts.append(f"root={self.root}")
        if self.dim >= 0:
            parts.append(f"dim={self.dim}")
        return f"{self.operation}({', '.join(parts)})"


def stamp(record: bytes, sequence: int, payload: bytes) -> bytes:
    """Encode a call again, with another sequence number and payload."""
    front = record[: PAYLOAD_START - _STAMP.size] + _STAMP.pack(sequence, len(payload))
    return (front + payload).ljust(RECORD_BYTES, b"\0")


def fingerprint_of(record: bytes | memoryview) -> bytes:
    """The part of an encoded call that must be the same on all ranks."""
    return bytes(record[:FINGERPRINT_BYTES])


def payload_of(record: bytes | memoryview) -> bytes:
    """The part of an encoded call that may differ between ranks."""
    (length,) = _PAYLOAD_LENGTH.unpack_from(record, _HEADER.size)
    return bytes(record[PAYLOAD_START : PAYLOAD_START + min(length, MAX_PAYLOAD)])
