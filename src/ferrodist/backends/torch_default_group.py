"""A group of ours as torch's default group, for code that asks torch.distributed, as samplers do."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined] # its stub leaves it out

from ferrodist.errors import BackendUnavailable, CollectiveMismatchError, DistributedTimeoutError, UnsupportedOpError
from ferrodist.rendezvous import PrefixStore, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ferrodist.backends.base import Backend
    from ferrodist.deadline import Deadline

_NAME = "ferrodist"  # torch's name for our backend, and the name of our entry point for torch
_LONGEST_SECONDS = 1e9  # the longest timeout that torch gets, which counts milliseconds in 64 bits


def check_torch_default() -> None:
    """Raise BackendUnavailable if torch was built without torch.distributed, ValueError if it has a default group."""
    if not dist.is_available():
        raise BackendUnavailable("torch_default=True: this torch was built without torch.distributed")
    if dist.is_initialized():
        own = " Calls without a group use it already." if dist.get_backend() == _NAME else ""
        raise ValueError(
            f"torch_default=True: torch.distributed has a default group already, of backend {dist.get_backend()!r}:"
            f" call torch.distributed.destroy_process_group() first, or leave torch_default out.{own}"
        )


def open_torch_default(group: Backend, store: Store | None, deadline: Deadline) -> Callable[[], None]:
    """Make ``group`` torch's default group; all its ranks call. Torch's functions share its order of calls with ours.

    Torch's groups of other backends meet in ``store``; None if the job has none. Returns a function that destroys
    torch's default group if it is still this one. Raises CollectiveMismatchError on every rank when others do not make
    theirs torch's.
    """
    if _NAME not in dist.Backend.backend_list:  # TORCH_DEVICE_BACKEND_AUTOLOAD=0
        for entry in entry_points(group="torch.backends", name=_NAME):
            entry.load()()
    try:
        group.barrier(deadline.remaining())
    except CollectiveMismatchError as error:
        extended = error.fresh()
        extended.message += " Pass torch_default=True to init_process_group on all ranks, or on none."
        extended.args = (extended.message,)
        raise extended from None
    torchs_store = _NoStore() if store is None else _StoreForTorch(PrefixStore(store, "torch"), group.timeout)
    dist.init_process_group(
        _NAME,
        store=torchs_store,
        rank=group.rank,
        world_size=group.world_size,
        timeout=timedelta(seconds=min(group.timeout, _LONGEST_SECONDS)),
        pg_options=group,
    )
    return partial(_end, dist.group.WORLD, torchs_store)


def _end(made: dist.ProcessGroup | None, store: TorchStore) -> None:
    """Destroy torch's default group if it is ``made``; keeps ``store`` alive, of which C++ holds only its own half."""
    del store
    if dist.is_initialized() and dist.group.WORLD is made:
        dist.destroy_process_group()


class _StoreForTorch(TorchStore):
    """A store of ours as one of torch's; torch's C++ calls the methods."""

    def __init__(self, store: Store, timeout: float) -> None:
        super().__init__()
        self._store = store
        self._seconds = timeout

    def set(self, key: str, value: bytes | str) -> None:
        self._store.set(key, _bytes_of(value))

    def get(self, key: str) -> bytes:
        return self._store.get(key, timeout=self._seconds)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        found = self._store.compare_set(key, _bytes_of(expected), _bytes_of(desired))
        return found or _bytes_of(expected)  # what torch's stores give where the key is missing

    def check(self, keys: Sequence[str]) -> bool:
        try:
            self._store.wait(keys, timeout=0)
        except DistributedTimeoutError:
            return False
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, timeout=self._seconds if timeout is None else timeout.total_seconds())

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - torch's C++ calls it so
        return self._store.delete(key)

    def getNumKeys(self) -> int:  # noqa: N802
        raise UnsupportedOpError("a store of ferrodist does not count its keys")

    def clone(self) -> TorchStore:
        return self


class _NoStore(TorchStore):
    """Torch's store if ranks have met without one; groups of our backend need none."""

    def _refuse(self, *_: object) -> None:
        raise UnsupportedOpError(
            "the ranks of this job have met through MPI, without a store: make groups of torch.distributed with"
            " backend='ferrodist', which need none"
        )

    set = get = add = compare_set = check = wait = deleteKey = getNumKeys = _refuse  # type: ignore[assignment] # noqa: N815

    def clone(self) -> TorchStore:
        return self


def _bytes_of(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
