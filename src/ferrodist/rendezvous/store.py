"""The `Store` interface, a small shared map through which ranks find each other, and stores within one process."""

from __future__ import annotations

import threading
from abc import abstractmethod
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from ferrodist.deadline import Deadline, check_timeout
from ferrodist.errors import DistributedTimeoutError, RendezvousError, UnsupportedOpError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

DEFAULT_STORE_TIMEOUT = 60.0
"""The default timeout of store operations in seconds. Groups pass the rest of the rendezvous timeout."""

MAX_VALUE_BYTES = 64 * 1024 * 1024  # the size limit of a value
_MAX_KEY_BYTES = 4096
_MAX_NAMED_KEYS = 8
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


def is_server_silent(error: DistributedTimeoutError) -> bool:
    """Return whether a store's server did not answer; else a key was missing. The error of the first names rank 0."""
    return bool(error.ranks)


class Store(Protocol):
    """A map from strings to bytes shared by the ranks of a job.

    Each operation is atomic. Threads may share a client: a waiting call does not block others. A forked child opens a
    client of its own. ``timeout`` is in seconds; None means the store's own default.

    A call that runs out of time raises `DistributedTimeoutError`, one on a closed store or a store whose server is gone
    `RendezvousError`. An argument of a wrong type raises TypeError, a wrong value ValueError, and nothing is changed.
    """

    def set(self, key: str, value: bytes, *, timeout: float | None = None) -> None:
        """Store ``value`` under ``key``, replacing any previous value."""

    def get(self, key: str, *, timeout: float | None = None) -> bytes:
        """Return the value of ``key``, waiting until it exists."""

    def wait(self, keys: Iterable[str], *, timeout: float | None = None) -> None:
        """Return once all ``keys`` exist at the same moment."""

    def add(self, key: str, amount: int, *, timeout: float | None = None) -> int:
        """Add to the number under ``key``, stored as decimal ASCII (missing: 0), and return the sum.

        ``amount`` and the sum are signed 64-bit integers. A sum beyond raises ValueError.
        """

    def compare_set(self, key: str, expected: bytes, desired: bytes, *, timeout: float | None = None) -> bytes:
        """Store ``desired`` if the value is ``expected``, and return the value after the call.

        ``expected=b""`` means "only if the key is missing". A key that is missing after the call gives ``b""``.
        """

    def delete(self, key: str, *, timeout: float | None = None) -> bool:
        """Remove ``key``; returns whether it existed."""

    def close(self) -> None:
        """Release the store; waiting and later calls raise."""


class PrefixStore(Store):
    """A view of a store that prefixes every key, so that users of one store do not collide.

    Args:
        store: The parent; may be another PrefixStore. Closing the view leaves it open.
        prefix: The prefix, separated from the key by a slash.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = check_key(prefix)

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{check_key(key)}"

    @override
    def set(self, key: str, value: bytes, *, timeout: float | None = None) -> None:
        self._store.set(self._key(key), value, timeout=timeout)

    @override
    def get(self, key: str, *, timeout: float | None = None) -> bytes:
        return self._store.get(self._key(key), timeout=timeout)

    @override
    def wait(self, keys: Iterable[str], *, timeout: float | None = None) -> None:
        self._store.wait([self._key(key) for key in check_keys(keys)], timeout=timeout)

    @override
    def add(self, key: str, amount: int, *, timeout: float | None = None) -> int:
        return self._store.add(self._key(key), amount, timeout=timeout)

    @override
    def compare_set(self, key: str, expected: bytes, desired: bytes, *, timeout: float | None = None) -> bytes:
        return self._store.compare_set(self._key(key), expected, desired, timeout=timeout)

    @override
    def delete(self, key: str, *, timeout: float | None = None) -> bool:
        return self._store.delete(self._key(key), timeout=timeout)

    def close(self) -> None:
        """Do nothing: the parent's owner closes it."""


def check_amount(amount: int) -> int:
    """Return ``amount``, or raise unless it is a signed 64-bit int."""
    if isinstance(amount, bool) or not isinstance(amount, int):
        raise TypeError(f"a store adds a whole number, not {type(amount).__name__}")
    if not _INT64_MIN <= amount <= _INT64_MAX:
        raise ValueError(f"a store adds a number of 64 bits, not {amount}")
    return amount


def check_key(key: str) -> str:
    """Return ``key``, or raise unless it is a string of 1 to 4096 bytes."""
    if not isinstance(key, str):
        raise TypeError(f"a store key must be text, not {type(key).__name__}")
    if not 0 < len(key.encode()) <= _MAX_KEY_BYTES:
        raise ValueError(f"a store key must have 1 to {_MAX_KEY_BYTES} bytes")
    return key


def check_keys(keys: Iterable[str]) -> list[str]:
    """Return ``keys`` as a list of checked keys; a single string is refused."""
    if isinstance(keys, str):
        raise TypeError("wait takes several keys: put the one key in a list")
    return [check_key(key) for key in keys]


def check_value(value: bytes) -> bytes:
    """Return ``value`` as bytes, or raise unless it is bytes-like and at most 64 MiB."""
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"a store value must be bytes, not {type(value).__name__}")
    if memoryview(value).nbytes > MAX_VALUE_BYTES:
        raise ValueError(f"a store value may have {MAX_VALUE_BYTES} bytes, this one is longer")
    return bytes(value)


def add_to_counter(key: str, current: bytes, amount: int) -> bytes:
    """Return the value of a counter after `Store.add`; ValueError for one beyond 64 bits."""
    try:
        total = int(current or b"0") + amount
    except ValueError:
        message = f"store add: key {key!r} holds {current[:32]!r}, which is not a decimal number"
        raise UnsupportedOpError(message) from None
    if not _INT64_MIN <= total <= _INT64_MAX:
        raise ValueError(f"store add: {amount} more would give key {key!r} a number of more than 64 bits, {total}")
    return b"%d" % total


def missing_keys_error(where: str, missing: Sequence[str], deadline: Deadline) -> DistributedTimeoutError:
    """Return the timeout error that names the missing keys."""
    shown = ", ".join(map(repr, missing[:_MAX_NAMED_KEYS]))
    more = f" and {len(missing) - _MAX_NAMED_KEYS} more" if len(missing) > _MAX_NAMED_KEYS else ""
    return DistributedTimeoutError(
        f"{where}: waited {deadline.elapsed():.2f} s (limit {deadline.timeout:.2f} s) for {len(missing)} "
        f"missing key{'s' if len(missing) != 1 else ''}: {shown}{more}"
    )


class TransactionalStore(Store):
    """A `Store` over a map that one call at a time changes."""

    @abstractmethod
    def _transaction(self, key: str, timeout: float | None) -> AbstractContextManager[dict[str, bytes]]:
        """Give exclusive access to the map, of which ``key`` may be changed in the block."""

    @abstractmethod
    def _await(self, keys: list[str], timeout: float | None) -> dict[str, bytes]:
        """Return a map with all ``keys``, once they exist at the same moment."""

    @override
    def set(self, key: str, value: bytes, *, timeout: float | None = None) -> None:
        check_key(key)
        value = check_value(value)
        with self._transaction(key, timeout) as values:
            values[key] = value

    @override
    def get(self, key: str, *, timeout: float | None = None) -> bytes:
        return self._await([check_key(key)], timeout)[key]

    @override
    def wait(self, keys: Iterable[str], *, timeout: float | None = None) -> None:
        self._await(check_keys(keys), timeout)

    @override
    def add(self, key: str, amount: int, *, timeout: float | None = None) -> int:
        check_key(key)
        check_amount(amount)
        with self._transaction(key, timeout) as values:
            values[key] = add_to_counter(key, values.get(key, b""), amount)
            return int(values[key])

    @override
    def compare_set(self, key: str, expected: bytes, desired: bytes, *, timeout: float | None = None) -> bytes:
        check_key(key)
        expected, desired = check_value(expected), check_value(desired)
        with self._transaction(key, timeout) as values:
            current = values.get(key)
            if (current is None and not expected) or (expected and current == expected):
                values[key] = desired
            return values.get(key, b"")

    @override
    def delete(self, key: str, *, timeout: float | None = None) -> bool:
        check_key(key)
        with self._transaction(key, timeout) as values:
            return values.pop(key, None) is not None


class MemoryStore(TransactionalStore):
    """A `Store` in this process's memory, safe for any number of threads.

    A waiting thread sleeps on one missing key at a time, so that setting a key wakes only the threads that wait for it.

    Args:
        timeout: The default timeout of a call, in seconds.
    """

    def __init__(self, *, timeout: float = DEFAULT_STORE_TIMEOUT) -> None:
        self._timeout = check_timeout(timeout)
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._waiters: dict[str, set[threading.Event]] = {}
        self._closed = False

    @contextmanager
    @override
    def _transaction(self, key: str, timeout: float | None) -> Iterator[dict[str, bytes]]:
        self._limit(timeout)
        with self._lock:
            self._check_open()
            yield self._values
            if key in self._values:
                for event in self._waiters.pop(key, ()):
                    event.set()

    @override
    def _await(self, keys: list[str], timeout: float | None) -> dict[str, bytes]:
        return dict(zip(keys, self.get_all(keys, timeout=timeout), strict=True))

    @override
    def close(self) -> None:
        with self._lock:
            self._closed = True
            for events in self._waiters.values():
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
                    raise missing_keys_error("store in memory", missing, deadline)
                event = threading.Event()
                self._waiters.setdefault(missing[0], set()).add(event)
            event.wait(deadline.remaining())
            with self._lock:
                others = self._waiters.get(missing[0], set())
                others.discard(event)
                if not others:
                    self._waiters.pop(missing[0], None)

    def _limit(self, timeout: float | None) -> float:
        """Return the timeout of a call, checked also for calls that never wait, as in other stores."""
        return self._timeout if timeout is None else check_timeout(timeout)

    def _check_open(self) -> None:
        if self._closed:
            raise RendezvousError("the store was closed")
