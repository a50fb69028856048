"""The conformance suite of stores passes on correct stores, and finds the faults of broken ones."""

import contextlib
import time

import pytest

from ferrodist.errors import DistributedTimeoutError
from ferrodist.rendezvous import FileStore, MemoryStore, PrefixStore, TcpStore, TcpStoreServer
from ferrodist.testing import STORE_CHECKS, check_store

CHECKS = {check.__name__: check for check in STORE_CHECKS}


class ClosingPrefixStore(PrefixStore):
    """A prefixed view that closes its store, as the checks ask of a client."""

    def close(self):
        self._store.close()


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", ["memory", "prefix", "file", "tcp"])
def test_store_keeps_the_contract(kind, check, tmp_path):
    """Every rule holds on every kind of store."""
    with contextlib.ExitStack() as stack:

        def factory():
            if kind == "file":
                return [FileStore(tmp_path / "store") for _ in range(3)]
            if kind == "tcp":
                server = TcpStoreServer("127.0.0.1", 0, secret=b"s", job="j", world_size=3)
                stack.callback(server.close)
                return [TcpStore(server.address, secret=b"s", job="j", rank=rank, world_size=3) for rank in range(3)]
            store = MemoryStore()
            return [store] * 3 if kind == "memory" else [ClosingPrefixStore(store, "prefix") for _ in range(3)]

        check(factory)


class ImpatientStore(MemoryStore):
    """Does not wait for keys."""

    def get(self, key, *, timeout=None):
        return super().get(key, timeout=0.0)


class SlowStore(MemoryStore):
    """Exceeds its timeout."""

    def get_all(self, keys, *, timeout=None):
        return super().get_all(keys, timeout=timeout + 1)


class RacyStore(MemoryStore):
    """Adds in two steps."""

    def add(self, key, amount, *, timeout=None):
        try:
            current = int(self.get(key, timeout=0.0))
        except DistributedTimeoutError:
            current = 0
        time.sleep(0.001)  # makes room for the race that the check looks for
        self.set(key, b"%d" % (current + amount))
        return current + amount


class EndlessStore(MemoryStore):
    """Adds without a limit."""

    def add(self, key, amount, *, timeout=None):
        total = int(self.get(key) if not self.missing([key]) else 0) + amount
        self.set(key, b"%d" % total)
        return total


class OverwritingStore(MemoryStore):
    """Sets without comparing."""

    def compare_set(self, key, expected, desired, *, timeout=None):
        self.set(key, desired)
        return desired


class HesitantStore(MemoryStore):
    """Compares and sets in two steps."""

    def compare_set(self, key, expected, desired, *, timeout=None):
        missing = self.missing([key])
        time.sleep(0.001)  # makes room for the race that the check looks for
        if missing:
            self.set(key, desired)
            return desired
        return self.get(key)


class KeepingStore(MemoryStore):
    """Deletes nothing."""

    def delete(self, key, *, timeout=None):
        return not self.missing([key])


class VagueStore(MemoryStore):
    """Does not say which key is missing."""

    def get_all(self, keys, *, timeout=None):
        try:
            return super().get_all(keys, timeout=timeout)
        except DistributedTimeoutError:
            raise DistributedTimeoutError("something is late") from None


class CarelessStore(MemoryStore):
    """Checks the timeout only when it waits."""

    def delete(self, key, *, timeout=None):
        return super().delete(key)


class UnfinishedStore(MemoryStore):
    """Has no `add` yet."""

    def add(self, key, amount, *, timeout=None):
        raise NotImplementedError


class UndeadStore(MemoryStore):
    """Goes on after it was closed."""

    def close(self):
        pass


BROKEN = [
    (ImpatientStore, "get_waits_for_the_key"),
    (SlowStore, "get_keeps_its_deadline"),
    (RacyStore, "add_is_atomic"),
    (EndlessStore, "add_stays_in_64_bits"),
    (OverwritingStore, "compare_set_sets_when_equal"),
    (HesitantStore, "compare_set_has_one_winner"),
    (KeepingStore, "delete_removes"),
    (VagueStore, "wait_keeps_its_deadline"),
    (CarelessStore, "wrong_arguments_are_refused"),
    (RacyStore, "threads_share_a_client"),
    (UndeadStore, "a_closed_store_says_so"),
]


@pytest.mark.parametrize(("store", "rule"), BROKEN, ids=lambda value: getattr(value, "__name__", value))
def test_broken_store_is_found(store, rule, monkeypatch):
    """A store that breaks one rule fails the check of that rule."""
    monkeypatch.setattr("ferrodist.testing.conformance.store.TIMEOUT", 1.0)
    shared = store()
    with pytest.raises((AssertionError, DistributedTimeoutError)):
        CHECKS[rule](lambda: [shared] * 3)


def test_check_store_runs_all_checks():
    """`check_store` passes on a good store and lists what is wrong with a broken one."""
    check_store(lambda: [MemoryStore()] * 2)
    with pytest.raises(AssertionError, match=r"store: \d+ of \d+ checks failed(?s:.*)delete_removes: `delete` says"):
        check_store(lambda: [KeepingStore()] * 2)
    with pytest.raises(AssertionError, match=r"add_counts: (?s:.*)NotImplementedError(?s:.*)delete_removes: "):
        check_store(lambda: [UnfinishedStore()] * 2)
