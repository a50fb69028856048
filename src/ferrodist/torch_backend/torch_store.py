"""torch's stores as ours: where ranks that torch has brought together meet again."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined] # its stub leaves it out

from ferrodist.deadline import Deadline, check_timeout
from ferrodist.errors import RendezvousError
from ferrodist.rendezvous.store import check_amount, check_key, check_keys, check_value, missing_keys_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch._C._distributed_c10d import Store as Torchs

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 0.05
_END = 2**63
_ROOT = 0

_T = TypeVar("_T")


def server_of(store: Torchs) -> str | None:
    """The host that serves one of torch's stores, if one does."""
    inner = _without_prefixes(store)
    return inner.host if isinstance(inner, TCPStore) else None


def hide(store: Torchs) -> bool:
    """Hide one of torch's stores from other users where that can be; returns whether nobody else can or could read it.

    torch lets all users read its files. Who has opened one goes on reading it, though that is forbidden afterwards: it
    is sure that nobody has only below a folder that keeps others out. Files that others may write to stay as they are,
    for that was somebody's wish.
    """
    inner = _without_prefixes(store)
    if isinstance(inner, HashStore):  # of this process
        return True
    if isinstance(inner, FileStore):
        path = Path(inner.path)  # type: ignore[attr-defined] # which it has
        with contextlib.suppress(OSError):  # no such file
            status = path.stat()
            if status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                path.chmod(stat.S_IMODE(status.st_mode) & stat.S_IRWXU)
                return _is_shut_in(path)
    return False


def _is_shut_in(path: Path) -> bool:
    """Whether a folder above a file lets no other user through."""
    folders = [folder.stat() for folder in path.resolve().parents]
    owners = (os.geteuid(), _ROOT)
    return any(found.st_uid in owners and not found.st_mode & (stat.S_IXGRP | stat.S_IXOTH) for found in folders)


def _without_prefixes(store: Torchs) -> Any:
    inner: Any = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    return inner


class TorchStore:
    """A `Store` in one of torch's, whichever that is (TCP, file, hash, a prefix of one).

    Those take no timeouts, and give up when their own has passed: a call on one whose server does not answer may last
    that long. Waiting is to look again, for a wait of torch's would hold up the other calls of the same store.

    Args:
        store: It.
        timeout: Default limit of a call, in seconds.
    """

    def __init__(self, store: Torchs, *, timeout: float) -> None:
        self._store = store
        self._timeout = check_timeout(timeout)
        self._is_closed = False

    def set(self, key: str, value: bytes, *, timeout: float | None = None) -> None:
        """See `Store.set`."""
        self._limit(timeout)
        value = check_value(value)
        self._ask(lambda store: store.set(check_key(key), value))  # type: ignore[arg-type] # bytes will do, too
        self._has(key)  # torch's TCPStore has not waited for its server, which answers this after it

    def get(self, key: str, *, timeout: float | None = None) -> bytes:
        """See `Store.get`."""
        self.wait([key], timeout=timeout)
        return bytes(self._ask(lambda store: store.get(key)))

    def wait(self, keys: Iterable[str], *, timeout: float | None = None) -> None:
        """See `Store.wait`."""
        wanted = check_keys(keys)
        deadline = Deadline(self._limit(timeout))
        pause = _FIRST_PAUSE_SECONDS
        while not self._ask(lambda store: store.check(wanted)):
            if deadline.expired:
                missing = [key for key in wanted if not self._has(key)]
                raise missing_keys_error("torch's store", missing or wanted, deadline)
            time.sleep(min(pause, deadline.remaining()))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def add(self, key: str, amount: int, *, timeout: float | None = None) -> int:
        """See `Store.add`."""
        self._limit(timeout)
        check_amount(amount)
        try:
            found = int(self._ask(lambda store: store.add(check_key(key), amount)))
        except ValueError as error:
            raise RendezvousError(f"the value of {key!r} in torch's store is no number to add to") from error
        if not -_END <= found - amount < _END:  # it has come round
            self._ask(lambda store: store.add(key, -amount))
            raise ValueError(f"adding {amount} to {key!r} would go beyond 64 bits")
        return found

    def compare_set(self, key: str, expected: bytes, desired: bytes, *, timeout: float | None = None) -> bytes:
        """See `Store.compare_set`."""
        self._limit(timeout)
        check_key(key)
        expected, desired = check_value(expected), check_value(desired)
        found = bytes(self._ask(lambda store: store.compare_set(key, expected, desired)))  # type: ignore[arg-type]
        # Where the key is missing these stores give back what was expected.
        is_missing = expected and found == expected and (expected != desired or not self._has(key))
        return b"" if is_missing else found

    def delete(self, key: str, *, timeout: float | None = None) -> bool:
        """See `Store.delete`."""
        self._limit(timeout)
        return self._has(check_key(key)) and bool(self._ask(lambda store: store.delete_key(key)))

    def close(self) -> None:
        """See `Store.close`; torch's stays open."""
        self._is_closed = True

    def _has(self, key: str) -> bool:
        return bool(self._ask(lambda store: store.check([key])))

    def _limit(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else check_timeout(timeout)

    def _ask(self, question: Callable[[Torchs], _T]) -> _T:
        if self._is_closed:
            raise RendezvousError("the store is closed")
        try:
            return question(self._store)
        except RuntimeError as error:
            raise RendezvousError(
                f"torch's store does not answer: {error}. Is the process that serves it still there?"
            ) from error
