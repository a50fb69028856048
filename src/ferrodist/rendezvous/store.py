"""The store seam: a small shared map through which ranks find each other, before any group exists.

A store for threads of one process; also what the TCP server keeps its keys in.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from ferrodist.deadline import Deadline, check_timeout
from ferrodist.errors import DistributedTimeoutError, RendezvousError, UnsupportedOpError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

DEFAULT_STORE_TIMEOUT = 60.0
"""Seconds an operation of a store may take that names no timeout. Groups name one: what is left for ranks to meet."""

MAX_VALUE_BYTES = 64 * 1024 * 1024
"""The longest value a store takes."""

_MAX_KEY_BYTES = 4096
_KEYS_NAMED = 8
_LOWEST, _HIGHEST = -(2**63), 2**63 - 1


class Store(Protocol):
    """A map from text to bytes that the ranks of a job share.

    Each operation is atomic. Threads may share a client: a call that waits holds up no other. A forked child opens a
    client of its own. ``timeout`` is in seconds; None means the store's own default.

    A call that runs out of time raises `DistributedTimeoutError`, one on a closed store or a store whose server went
    away `RendezvousError`. An argument of a wrong type raises TypeError, a wrong value ValueError, and nothing is
    changed.
    """

    def set(self, key: str, value: bytes, *, timeout: float | None = None) -> None:
        """Store ``value`` under ``key``, replacing what was there."""

    def get(self, key: str, *, timeout: float | None = None) -> bytes:
        """Return the value of ``key``, waiting until there is one."""

    def wait(self, keys: Iterable[str], *, timeout: float | None = None) -> None:
        """Return once all ``keys`` exist at the same moment."""

    def add(self, key: str, amount: int, *, timeout: float | None = None) -> int:
        """Add to the number under ``key``, kept as decimal ASCII (missing: 0), and return the sum.

        ``amount`` and the sum are whole numbers of 64 bits with a sign. A sum beyond raises ValueError.
        """

    def compare_set(self, key: str, expected: bytes, desired: bytes, *, timeout: float | None = None) -> bytes:
        """Store ``desired`` if the value is ``expected``, and return the value after the call.

        ``expected=b""`` means "only if the key is missing". A key that is missing after the call gives
        ``b""``.
        """

    def delete(self, key: str, *, timeout: float | None = None) -> bool:
        """Remove ``key``; returns whether it was there."""

    def close(self) -> None:
        """Let go of the store; calls that are waiting, and later ones, raise."""


class PrefixStore:
    """A view of a store in which every key carries a prefix, so that users of one store do not collide.

    Args:
        store: The parent; may be another PrefixStore. Closing the view leaves it open.
        prefix: Put before each key, with a slash between.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = check_key(prefix)

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{check_key(key)}"

    def set(self, key: str, value: bytes, *, timeout: float | None = None) -> None:
        """See `Store.set`."""
        self._store.set(self._key(key), value, timeout=timeout)

    def get(self, key: str, *, timeout: float | None = None) -> bytes:
        """See `Store.get`."""
        return self._store.get(self._key(key), timeout=timeout)

    def wait(self, keys: Iterable[str], *, timeout: float | None = None) -> None:
        """See `Store.wait`."""
        self._store.wait([self._key(key) for key in check_keys(keys)], timeout=timeout)

    def add(self, key: str, amount: int, *, timeout: float | None = None) -> int:
        """See `Store.add`."""
        return self._store.add(self._key(key), amount, timeout=timeout)

    def compare_set(self, key: str, expected: bytes, desired: bytes, *, timeout: float | None = None) -> bytes:
        """See `Store.compare_set`."""
        return self._store.compare_set(self._key(key), expected, desired, timeout=timeout)

    def delete(self, key: str, *, timeout: float | None = None) -> bool:
        """See `Store.delete`."""
        return self._store.delete(self._key(key), timeout=timeout)

    def close(self) -> None:
        """Do nothing: the parent belongs to whoever opened it."""


def check_amount(amount: int) -> int:
    """Return ``amount``, or raise: what is added is an int of 64 bits."""
    if isinstance(amount, bool) or not isinstance(amount, int):
        raise TypeError(f"a store adds a whole number, not {type(amount).__name__}")
    if not _LOWEST <= amount <= _HIGHEST:
        raise ValueError(f"a store adds a number of 64 bits, not {amount}")
    return amount


def check_key(key: str) -> str:
    """Return ``key``, or raise: a key is text of 1 to 4096 bytes."""
    if not isinstance(key, str):
        raise TypeError(f"a store key must be text, not {type(key).__name__}")
    if not 0 < len(key.encode()) <= _MAX_KEY_BYTES:
        raise ValueError(f"a store key must have 1 to {_MAX_KEY_BYTES} bytes")
    return key


def check_keys(keys: Iterable[str]) -> list[str]:
    """Return ``keys`` as a list of checked keys; a bare text, which would be taken apart, is refused."""
    if isinstance(keys, str):
        raise TypeError("wait takes several keys: put the one key in a list")
    return [check_key(key) for key in keys]


def check_value(value: bytes) -> bytes:
    """Return ``value`` as bytes, or raise: a value is bytes-like and at most 64 MiB."""
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"a store value must be bytes, not {type(value).__name__}")
    if memoryview(value).nbytes > MAX_VALUE_BYTES:
        raise ValueError(f"a store value may have {MAX_VALUE_BYTES} bytes, this one is longer")
    return bytes(value)


def added(key: str, current: bytes, amount: int) -> bytes:
    """Return the value of a counter after `Store.add`; raises ValueError for one of more than 64 bits."""
    try:
        total = int(current or b"0") + amount
    except ValueError:
        message = f"store add: key {key!r} holds {current[:32]!r}, which is not a decimal number"
        raise UnsupportedOpError(message) from None
    if not _LOWEST <= total <= _HIGHEST:
        raise ValueError(f"store add: {amount} more would give key {key!r} a number of more than 64 bits, {total}")
    return b"%d" % total


def missing_error(where: str, missing: Sequence[str], deadline: Deadline) -> DistributedTimeoutError:
    """Say which keys did not come in time."""
    named = ", ".join(map(repr, missing[:_KEYS_NAMED]))
    more = f" and {len(missing) - _KEYS_NAMED} more" if len(missing) > _KEYS_NAMED else ""
    return DistributedTimeoutError(
        f"{where}: waited {deadline.elapsed():.2f} s (limit {deadline.timeout:.2f} s) for {len(missing)} "
        f"missing key{'s' if len(missing) != 1 else ''}: {named}{more}"
    )


class MemoryStore:
    """A `Store` in this process's memory, safe for any number of threads.

    A waiting thread sleeps on one missing key at a time, so setting a key wakes only those who wait for it.

    Args:
        timeout: Default limit of a call, in seconds.
    """

    def __init__(self, *, timeout: float = DEFAULT_STORE_TIMEOUT) -> None:
        self._timeout = check_timeout(timeout)
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, set[threading.Event]] = {}
        self._closed = False

    def set(self, key: str, value: bytes, *, timeout: float | None = None) -> None:
        """See `Store.set`."""
        check_key(key)
        self._limit(timeout)
        value = check_value(value)
        with self._lock:
            self._check_open()
            self._put(key, value)

    def get(self, key: str, *, timeout: float | None = None) -> bytes:
        """See `Store.get`."""
        return self.get_all([check_key(key)], timeout=timeout)[0]

    def wait(self, keys: Iterable[str], *, timeout: float | None = None) -> None:
        """See `Store.wait`."""
        self.get_all(check_keys(keys), timeout=timeout)

    def add(self, key: str, amount: int, *, timeout: float | None = None) -> int:
        """See `Store.add`."""
        check_key(key)
        check_amount(amount)
        self._limit(timeout)
        with self._lock:
            self._check_open()
            value = added(key, self._values.get(key, b""), amount)
            self._put(key, value)
            return int(value)

    def compare_set(self, key: str, expected: bytes, desired: bytes, *, timeout: float | None = None) -> bytes:
        """See `Store.compare_set`."""
        check_key(key)
        expected, desired = check_value(expected), check_value(desired)
        self._limit(timeout)
        with self._lock:
            self._check_open()
            current = self._values.get(key)
            if (current is None and not expected) or (expected and current == expected):
                self._put(key, desired)
                return desired
            return current or b""

    def delete(self, key: str, *, timeout: float | None = None) -> bool:
        """See `Store.delete`."""
        check_key(key)
        self._limit(timeout)
        with self._lock:
            self._check_open()
            return self._values.pop(key, None) is not None

    def close(self) -> None:
        """See `Store.close`."""
        with self._lock:
            self._closed = True
            for events in self._waiting.values():
                for event in events:
                    event.set()

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Return those of ``keys`` that do not exist now."""
        with self._lock:
            return [key for key in keys if key not in self._values]

    def get_all(self, keys: list[str], *, timeout: float | None = None) -> list[bytes]:
        """Return the values of ``keys``, waiting until all of them exist at the same moment."""
        deadline = Deadline(self._limit(timeout))
        while True:
            with self._lock:
                self._check_open()
                missing = [key for key in keys if key not in self._values]
                if not missing:
                    return [self._values[key] for key in keys]
                if deadline.expired:
                    raise missing_error("store in memory", missing, deadline)
                arrival = threading.Event()
                self._waiting.setdefault(missing[0], set()).add(arrival)
            arrival.wait(deadline.remaining())
            with self._lock:
                others = self._waiting.get(missing[0], set())
                others.discard(arrival)
                if not others:
                    self._waiting.pop(missing[0], None)

    def _limit(self, timeout: float | None) -> float:
        """The limit of a call; checked by those that never wait too, as other stores do."""
        return self._timeout if timeout is None else check_timeout(timeout)

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for arrival in self._waiting.pop(key, ()):
            arrival.set()

    def _check_open(self) -> None:
        if self._closed:
            raise RendezvousError("the store was closed")
