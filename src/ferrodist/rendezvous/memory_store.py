"""A store for threads of one process; also what the TCP server keeps its keys in."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ferrodist.deadline import Deadline, check_timeout
from ferrodist.errors import RendezvousError
from ferrodist.rendezvous.store import (
    DEFAULT_STORE_TIMEOUT,
    added,
    check_amount,
    check_key,
    check_keys,
    check_value,
    missing_error,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["MemoryStore"]


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
