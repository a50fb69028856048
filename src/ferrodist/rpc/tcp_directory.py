"""`PeerDirectory`: the current process of each rank, in a store.

[Note: peer directory]
Every process that starts takes the next number of its rank, its *incarnation*, and writes its address under its rank,
over that of the process before. Then it sets the *change key* of each higher rank, which wakes the process that waits
for it. That process deletes the key and then reads the addresses of all lower ranks, so a key that is set twice and
seen once loses nothing. A change key belongs to one incarnation: a process that has been replaced but lives on does not
see its successor's. Each rank has two keys, and two change keys at most.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from typing import TYPE_CHECKING

import msgspec

from ferrodist.errors import DistributedError, DistributedTimeoutError, ProtocolError, describe_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.rendezvous import Store

_log = logging.getLogger(__name__)

_NEVER = b"\0"  # no key has this value: a comparison with it reads a key without waiting for it

_CLOSE_SECONDS = 2.0
_REREAD_SECONDS = 60.0


class PeerRecord(msgspec.Struct, frozen=True, array_like=True):
    """A process of a rank: its incarnation, a random token, and its address, which is empty once it has left.

    The token tells processes apart whose store was started anew, and counts from one again.
    """

    incarnation: int
    token: str
    address: str


_DECODER = msgspec.msgpack.Decoder(PeerRecord)


class PeerDirectory:
    """The processes of all ranks, and this one among them; see [Note: peer directory]."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._key = f"process/{rank}"
        self._record: PeerRecord | None = None
        self._incarnation = 0
        self._change_key = _change_key(rank, 0)
        self._closed = False
        self._thread: threading.Thread | None = None

    def enter(self, address: str) -> PeerRecord:
        """Become the rank's newest process, which listens at an address, and notify the higher ranks."""
        incarnation = self._incarnation = self._store.add(f"incarnation/{self._rank}", 1, timeout=self._timeout)
        self._change_key = _change_key(self._rank, incarnation)
        self._record = record = PeerRecord(incarnation, secrets.token_hex(8), address)
        self._store.delete(_change_key(self._rank, incarnation - 2), timeout=self._timeout)
        if incarnation > 1:  # wakes a process that this one replaces, if it lives
            self._store.set(_change_key(self._rank, incarnation - 1), b"1", timeout=self._timeout)
        self._write(record)
        for rank in range(self._rank + 1, self._world_size):
            self._notify(rank)
        return record

    def watch(self, on_found: Callable[[int, PeerRecord], None], on_end: Callable[[str], None]) -> None:
        """Have a thread report the lower ranks' newest processes, now and whenever they change.

        ``on_end`` is called once with the reason, a sentence, when no more will be found.
        """
        thread = threading.Thread(
            target=self._watch, args=(on_found, on_end), name=f"ferrodist-rpc-{self._rank}-directory", daemon=True
        )
        thread.start()
        self._thread = thread

    def leave(self) -> None:
        """Remove this process from the directory, unless another one has replaced it, and have the thread end."""
        self._closed = True
        record = self._record
        if record is None:
            return
        with contextlib.suppress(DistributedError):  # the store may be gone, and with it the keys
            gone = PeerRecord(record.incarnation, record.token, "")
            self._store.compare_set(self._key, _pack(record), _pack(gone), timeout=_CLOSE_SECONDS)
            self._store.set(self._change_key, b"1", timeout=_CLOSE_SECONDS)
            self.join(_CLOSE_SECONDS)
            self._store.delete(self._change_key, timeout=_CLOSE_SECONDS)

    def join(self, timeout: float) -> None:
        """Wait for the thread's end, after `leave`."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _incarnation_of(self, rank: int) -> int:
        """The incarnation of a rank's newest process, or 0."""
        data = self._peek(f"incarnation/{rank}")
        try:
            return int(data or b"0")
        except ValueError:
            raise _foreign(f"incarnation/{rank}", data) from None

    def _write(self, record: PeerRecord) -> None:
        current = self._peek(self._key)
        while not current or _unpack(self._key, current).incarnation < record.incarnation:
            found = self._store.compare_set(self._key, current, _pack(record), timeout=self._timeout)
            if found == _pack(record):
                return
            current = found

    def _notify(self, rank: int) -> None:
        """Wake a rank's current process. One that starts meanwhile finds this one's address by itself."""
        while incarnation := self._incarnation_of(rank):
            self._store.set(_change_key(rank, incarnation), b"1", timeout=self._timeout)
            if self._incarnation_of(rank) == incarnation:
                return
            self._store.delete(_change_key(rank, incarnation), timeout=self._timeout)

    def _peek(self, key: str) -> bytes:
        return self._store.compare_set(key, _NEVER, _NEVER, timeout=self._timeout)

    def _watch(self, on_found: Callable[[int, PeerRecord], None], on_end: Callable[[str], None]) -> None:
        try:
            while not self._closed and self._is_newest():
                with contextlib.suppress(DistributedTimeoutError):  # nothing new, or the store's process is stopped
                    self._read(on_found)
                    self._store.get(self._change_key, timeout=_REREAD_SECONDS)
                    self._store.delete(self._change_key, timeout=self._timeout)
            reason = f" Another process was started as rank {self._rank}: this one joins no rank again."
        except ProtocolError as error:
            reason = f" No process can join again: {error}."
        except DistributedError as error:
            reason = f" No process can join again, for the store through which they meet is gone: {error}."
        except Exception as error:  # noqa: BLE001 - no other thread reports it
            _log.exception("rank %d looks for other ranks no more", self._rank)
            reason = f" This process finds no other one any more: {describe_error(error)}."
        if not self._closed:
            on_end(reason)

    def _is_newest(self) -> bool:
        """Return True unless another process has replaced this one, as far as the store answers."""
        with contextlib.suppress(DistributedTimeoutError):
            incarnation = self._incarnation_of(self._rank)
            if not incarnation:
                raise ProtocolError("the store through which they meet has none of their keys any more")
            return incarnation == self._incarnation
        return True

    def _read(self, on_found: Callable[[int, PeerRecord], None]) -> None:
        for rank in range(self._rank):
            data = self._peek(f"process/{rank}")
            if data:
                on_found(rank, _unpack(f"process/{rank}", data))


def _change_key(rank: int, incarnation: int) -> str:
    return f"bell/{rank}/{incarnation}"


def _unpack(key: str, data: bytes) -> PeerRecord:
    try:
        return _DECODER.decode(data)
    except ValueError:  # also for text that isn't UTF-8
        raise _foreign(key, data) from None


def _foreign(key: str, data: bytes) -> ProtocolError:
    return ProtocolError(
        f"the store has {data[:40]!r} under {key!r}, which no agent has written: the keys of a job are its own"
    )


def _pack(record: PeerRecord) -> bytes:
    return msgspec.msgpack.encode(record)
