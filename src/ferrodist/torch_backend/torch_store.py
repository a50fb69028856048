"""torch's stores behind the interface of `Store`, for the rendezvous of ranks that torch has brought together."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined] # its stub leaves it out
from typing_extensions import override

from ferrodist.deadline import Deadline, check_timeout
from ferrodist.errors import RendezvousError
from ferrodist.rendezvous.store import Store, check_amount, check_key, check_keys, check_value, missing_keys_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch._C._distributed_c10d import Store as C10dStore

_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.001, 0.05
_INT64_END = 2**63
_ROOT_UID = 0

_T = TypeVar("_T")


def server_of(store: C10dStore) -> str | None:
    """The host of the server of a store of torch's, if there is one."""
    inner = _without_prefixes(store)
    return inner.host if isinstance(inner, TCPStore) else None


def make_private(store: C10dStore) -> bool:
    """Make a store of torch's unreadable for other users, if possible; returns whether none can read it, or could.

    torch makes its files readable for all users. A process that has opened one can go on reading it, so other users are
    excluded for certain only below a folder that keeps them out. Files that others may write to stay as they are.
    """
    inner = _without_prefixes(store)
    if isinstance(inner, HashStore):  # in this process
        return True
    if isinstance(inner, FileStore):
        path = Path(inner.path)  # type: ignore[attr-defined] # which it has
        with contextlib.suppress(OSError):  # no such file
            status = path.stat()
            if status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                path.chmod(stat.S_IMODE(status.st_mode) & stat.S_IRWXU)
                return _has_private_parent(path)
    return False


def _has_private_parent(path: Path) -> bool:
    """Return whether a folder above a file keeps other users out."""
    folders = [folder.stat() for folder in path.resolve().parents]
    owners = (os.geteuid(), _ROOT_UID)
    return any(found.st_uid in owners and not found.st_mode & (stat.S_IXGRP | stat.S_IXOTH) for found in folders)


def _without_prefixes(store: C10dStore) -> Any:
    inner: Any = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    return inner


class TorchStore(Store):
    """A `Store` over a store of torch's of any kind (TCP, file, hash, prefix).

    torch's stores have one timeout for all calls: a call whose server does not answer may last that long. `wait` polls,
    for a wait of torch's would block other calls of the same store.
    """

    def __init__(self, store: C10dStore, *, timeout: float) -> None:
        self._store = store
        self._timeout = check_timeout(timeout)
        self._is_closed = False

    @override
    def set(self, key: str, value: bytes, *, timeout: float | None = None) -> None:
        self._timeout_of(timeout)
        value = check_value(value)
        self._call(lambda store: store.set(check_key(key), value))  # type: ignore[arg-type] # bytes will do, too
        self._has(key)  # torch's TCPStore does not wait for its server, which answers this after the set

    @override
    def get(self, key: str, *, timeout: float | None = None) -> bytes:
        self.wait([key], timeout=timeout)
        return bytes(self._call(lambda store: store.get(key)))

    @override
    def wait(self, keys: Iterable[str], *, timeout: float | None = None) -> None:
        wanted = check_keys(keys)
        deadline = Deadline(self._timeout_of(timeout))
        pause = _MIN_POLL_SECONDS
        while not self._call(lambda store: store.check(wanted)):
            if deadline.expired:
                missing = [key for key in wanted if not self._has(key)]
                raise missing_keys_error("torch's store", missing or wanted, deadline)
            time.sleep(min(pause, deadline.remaining()))
            pause = min(2 * pause, _MAX_POLL_SECONDS)

    @override
    def add(self, key: str, amount: int, *, timeout: float | None = None) -> int:
        self._timeout_of(timeout)
        check_amount(amount)
        try:
            found = int(self._call(lambda store: store.add(check_key(key), amount)))
        except ValueError as error:
            raise RendezvousError(f"the value of {key!r} in torch's store is not a number to add to") from error
        if not -_INT64_END <= found - amount < _INT64_END:  # it has wrapped around
            self._call(lambda store: store.add(key, -amount))
            raise ValueError(f"adding {amount} to {key!r} would go beyond 64 bits")
        return found

    @override
    def compare_set(self, key: str, expected: bytes, desired: bytes, *, timeout: float | None = None) -> bytes:
        self._timeout_of(timeout)
        check_key(key)
        expected, desired = check_value(expected), check_value(desired)
        found = bytes(self._call(lambda store: store.compare_set(key, expected, desired)))  # type: ignore[arg-type]
        # If the key is missing, torch's stores return the expected value.
        is_missing = expected and found == expected and (expected != desired or not self._has(key))
        return b"" if is_missing else found

    @override
    def delete(self, key: str, *, timeout: float | None = None) -> bool:
        self._timeout_of(timeout)
        return self._has(check_key(key)) and bool(self._call(lambda store: store.delete_key(key)))

    @override
    def close(self) -> None:
        # torch's store stays open.
        self._is_closed = True

    def _has(self, key: str) -> bool:
        return bool(self._call(lambda store: store.check([key])))

    def _timeout_of(self, timeout: float | None) -> float:
        """The seconds of a timeout, which is checked. All but `wait` only check it: torch's stores have one timeout."""
        return self._timeout if timeout is None else check_timeout(timeout)

    def _call(self, function: Callable[[C10dStore], _T]) -> _T:
        if self._is_closed:
            raise RendezvousError("the store is closed")
        try:
            return function(self._store)
        except RuntimeError as error:
            raise RendezvousError(
                f"torch's store does not answer: {error}. Is the process that serves it still there?"
            ) from error
