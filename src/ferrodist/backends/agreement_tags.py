"""Tags of an agreement's messages, where these pass through others' hands."""

from __future__ import annotations

import hashlib
import hmac
import struct

from ferrodist.backends.call import CALL_SIZE
from ferrodist.errors import AuthenticationError

__all__ = ["AgreementTags"]

_TAG_BYTES = 16
_ABOUT = struct.Struct("<QQQi")  # group, in two halves; position of the call; the rank whose call it is, or all's
_ALL = -1
_LOW_64 = (1 << 64) - 1


class AgreementTags:
    """The tags of one agreement: of each rank's call, and of the list of all.

    Args:
        key: The group's, or nothing where the messages need no tags.
        group_id: Of the group.
        sequence: Position of the call among the group's collectives.

    Attributes:
        size: Bytes of a tag; 0 without a key.
        record_size: Bytes of a call with its tag.
    """

    __slots__ = ("_about", "_key", "record_size", "size")

    def __init__(self, key: bytes, group_id: int, sequence: int) -> None:
        self._key = key
        self._about = group_id & _LOW_64, group_id >> 64 & _LOW_64, sequence
        self.size = _TAG_BYTES if key else 0
        self.record_size = CALL_SIZE + self.size

    def table_size(self, world_size: int) -> int:
        """Bytes of the list of all calls."""
        return self.record_size * world_size + self.size

    def seal_call(self, call: bytes, rank: int) -> bytes:
        """A rank's call with its tag."""
        return call + self._tag(call, rank)

    def check_calls(self, table: memoryview) -> None:
        """Raise AuthenticationError unless each record is what its rank has said."""
        for rank in range(len(table) // self.record_size if self.size else 0):
            record = table[rank * self.record_size :][: self.record_size]
            self._check(record[:CALL_SIZE], record[CALL_SIZE:], rank, f"the call of rank {rank} was altered")

    def seal_table(self, table: memoryview) -> None:
        """Write the tag of the whole list at its end."""
        if self.size:
            table[-self.size :] = self._tag(table[: -self.size], _ALL)

    def check_table(self, table: memoryview) -> None:
        """Raise AuthenticationError unless the list is what the group's rank 0 has said."""
        if self.size:
            self._check(table[: -self.size], table[-self.size :], _ALL, "the list of all ranks' calls was altered")

    def _tag(self, data: bytes | memoryview, rank: int) -> bytes:
        if not self._key:
            return b""
        about = _ABOUT.pack(*self._about, rank)
        return hashlib.blake2b(about + bytes(data), key=self._key, digest_size=_TAG_BYTES).digest()

    def _check(self, data: memoryview, tag: memoryview, rank: int, what: str) -> None:
        if not hmac.compare_digest(tag, self._tag(data, rank)):
            raise AuthenticationError(f"{what} on its way: somebody between the hosts changes what passes there")
