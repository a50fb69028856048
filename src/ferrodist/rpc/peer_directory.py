"""Which process is which rank now, through a store.

[Note: the roster]
Every process that starts takes the next number of its rank, its *incarnation*, and writes where it listens under its
rank, over what the one before has written. Then it rings the bell of each higher rank: a key that wakes the process
which waits for it. Who is woken takes the key away and then reads the addresses of all lower ranks, so a bell that is
rung twice and heard once loses nothing. A bell belongs to one incarnation: a process that has been replaced but lives
on does not hear its successor's. Each rank has two keys, and two bells at most.
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

_NEVER = b"\0"
"""What no key holds: compared with it, a key is read without being waited for."""

_CLOSE_SECONDS = 2.0
_LOOK_AGAIN_SECONDS = 60.0


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """The process that is a rank.

    Args:
        incarnation: How many processes have been this rank, with this one.
        token: Random: a store that is started anew counts from one again.
        address: Where it listens, or empty once it has left.
    """

    incarnation: int
    token: str
    address: str


_DECODER = msgspec.msgpack.Decoder(Entry)


class Roster:
    """See [Note: the roster].

    Args:
        store: For the keys; it stays open.
        rank: This rank.
        world_size: How many there are.
        timeout: Seconds the store may take.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._entry: Entry | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def enter(self, address: str) -> Entry:
        """Become the rank's newest process, which listens at an address, and tell the higher ranks.

        Raises:
            DistributedError: The store is gone, or does not answer.
        """
        number = self._store.add(f"incarnation/{self._rank}", 1, timeout=self._timeout)
        self._entry = entry = Entry(number, secrets.token_hex(8), address)
        self._store.delete(_bell(self._rank, number - 2), timeout=self._timeout)
        if number > 1:  # a process that this one replaces, and that lives, is to know
            self._store.set(_bell(self._rank, number - 1), b"1", timeout=self._timeout)
        self._write(entry)
        for rank in range(self._rank + 1, self._world_size):
            self._ring(rank)
        return entry

    def watch(
        self,
        found: Callable[[int, Entry], None],
        ended: Callable[[str], None],
    ) -> None:
        """Have a thread tell which processes the lower ranks are, now and whenever that changes.

        Args:
            found: Called with a rank and its newest process, again and again.
            ended: Called once with the reason, a sentence, when nothing more will be found.
        """
        self._thread = threading.Thread(
            target=self._watch, args=(found, ended), name=f"ferrodist-rpc-{self._rank}-roster", daemon=True
        )
        self._thread.start()

    def leave(self) -> None:
        """Take this process off the roster, unless another one has replaced it, and have the thread end."""
        self._closed = True
        entry = self._entry
        if entry is None:
            return
        with contextlib.suppress(DistributedError):  # the store may be gone, and nobody then finds what is left there
            gone = Entry(entry.incarnation, entry.token, "")
            self._store.compare_set(self._key, _pack(entry), _pack(gone), timeout=_CLOSE_SECONDS)
            self._store.set(self._bell, b"1", timeout=_CLOSE_SECONDS)
            self.join(_CLOSE_SECONDS)
            self._store.delete(self._bell, timeout=_CLOSE_SECONDS)

    def join(self, timeout: float) -> None:
        """Wait for the thread's end, after `leave`."""
        if self._thread is not None:
            self._thread.join(timeout)

    @property
    def _number(self) -> int:
        return 0 if self._entry is None else self._entry.incarnation

    @property
    def _bell(self) -> str:
        return _bell(self._rank, self._number)

    @property
    def _key(self) -> str:
        return f"process/{self._rank}"

    def _number_of(self, rank: int) -> int:
        """The incarnation of a rank's newest process, or 0."""
        data = self._peek(f"incarnation/{rank}")
        try:
            return int(data or b"0")
        except ValueError:
            raise _foreign(f"incarnation/{rank}", data) from None

    def _entry_of(self, rank: int) -> Entry | None:
        data = self._peek(f"process/{rank}")
        return _unpack(f"process/{rank}", data) if data else None

    def _write(self, entry: Entry) -> None:
        current = self._peek(self._key)
        while not current or _unpack(self._key, current).incarnation < entry.incarnation:
            found = self._store.compare_set(self._key, current, _pack(entry), timeout=self._timeout)
            if found == _pack(entry):
                return
            current = found

    def _ring(self, rank: int) -> None:
        """Wake the process that is a rank now. One that starts meanwhile finds this one's address by itself."""
        while number := self._number_of(rank):
            self._store.set(_bell(rank, number), b"1", timeout=self._timeout)
            if self._number_of(rank) == number:
                return
            self._store.delete(_bell(rank, number), timeout=self._timeout)

    def _peek(self, key: str) -> bytes:
        return self._store.compare_set(key, _NEVER, _NEVER, timeout=self._timeout)

    def _watch(self, found: Callable[[int, Entry], None], ended: Callable[[str], None]) -> None:
        try:
            while not self._closed and self._is_newest():
                with contextlib.suppress(DistributedTimeoutError):  # nothing new; or the store's process is stopped
                    self._look(found)
                    self._store.get(self._bell, timeout=_LOOK_AGAIN_SECONDS)
                    self._store.delete(self._bell, timeout=self._timeout)
        except ProtocolError as error:
            if not self._closed:
                ended(f" No process can join again: {error}.")
            return
        except DistributedError as error:
            if not self._closed:
                ended(f" No process can join again, for the store through which they meet is gone: {error}.")
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody else tells of it
            _log.exception("rank %d looks for other ranks no more", self._rank)
            ended(f" This process finds no other one any more: {describe_error(error)}.")
            return
        if not self._closed:
            ended(f" Another process was started as rank {self._rank}: this one joins no rank again.")

    def _is_newest(self) -> bool:
        """Whether no other process has replaced this one; also when the store does not say."""
        with contextlib.suppress(DistributedTimeoutError):
            number = self._number_of(self._rank)
            if not number:
                raise ProtocolError("the store through which they meet has none of their keys any more")
            return number == self._number
        return True

    def _look(self, found: Callable[[int, Entry], None]) -> None:
        for rank in range(self._rank):
            entry = self._entry_of(rank)
            if entry is not None:
                found(rank, entry)


def _bell(rank: int, incarnation: int) -> str:
    return f"bell/{rank}/{incarnation}"


def _unpack(key: str, data: bytes) -> Entry:
    try:
        return _DECODER.decode(data)
    except ValueError:  # text that isn't UTF-8 is one, too
        raise _foreign(key, data) from None


def _foreign(key: str, data: bytes) -> ProtocolError:
    return ProtocolError(
        f"the store has {data[:40]!r} under {key!r}, which no agent has written: the keys of a job are its own"
    )


def _pack(entry: Entry) -> bytes:
    return msgspec.msgpack.encode(entry)
