"""The roster: which process is which rank now."""

import re
import threading

import pytest

from ferrodist.errors import ProtocolError
from ferrodist.rendezvous import MemoryStore
from ferrodist.rpc.peer_directory import PeerDirectory, _pack
from ferrodist.testing import check_leaks

_PATIENCE = 60.0


class Observed(MemoryStore):
    """A store that lets a test act between two operations of others."""

    def __init__(self):
        super().__init__()
        self.on_set = lambda key: None
        self.deleted = threading.Semaphore(0)

    def set(self, key, value, *, timeout=None):
        super().set(key, value, timeout=timeout)
        self.on_set(key)

    def delete(self, key, *, timeout=None):
        was_there = super().delete(key, timeout=timeout)
        if was_there:
            self.deleted.release()
        return was_there

    def bells(self):
        return sorted(key for key in self._values if key.startswith("bell/"))


def test_the_newest_process_counts():
    """A process that is slow to write where it listens does not write over its successor, nor when it leaves."""
    store = MemoryStore()
    first, second = (PeerDirectory(store, 0, 1, _PATIENCE) for _ in range(2))
    slow = first.enter("a:1")
    newest = second.enter("b:2")
    assert (slow.incarnation, newest.incarnation) == (1, 2)
    assert slow.token != newest.token
    first._write(slow)
    assert store.get("process/0") == _pack(newest)
    first.leave()
    assert store.get("process/0") == _pack(newest)
    second.leave()
    assert store.get("process/0") != _pack(newest)
    third = PeerDirectory(store, 0, 1, _PATIENCE).enter("c:3")
    assert store.get("process/0") == _pack(third)


def test_a_bell_is_heard_once():
    """Whoever is woken looks again, and then waits: the bell is gone."""
    store = Observed()
    found = []
    with check_leaks():
        higher = PeerDirectory(store, 1, 2, _PATIENCE)
        higher.enter("b:2")
        higher.watch(lambda rank, entry: found.append((rank, entry.address)), pytest.fail)
        lower = PeerDirectory(store, 0, 2, _PATIENCE)
        lower.enter("a:1")
        assert store.deleted.acquire(timeout=_PATIENCE)
        higher.leave()
    assert found[-1] == (0, "a:1")
    assert len(found) <= 2
    assert store.bells() == []


def test_a_rank_that_starts_while_its_bell_is_rung():
    """The bell of the one that it replaces does not stay; its own is rung."""
    store = Observed()
    PeerDirectory(store, 1, 2, _PATIENCE).enter("b:1")

    def start(key):
        if key == "bell/1/1":
            store.on_set = lambda key: None
            store.add("incarnation/1", 1)

    store.on_set = start
    PeerDirectory(store, 0, 2, _PATIENCE).enter("a:1")
    assert store.bells() == ["bell/1/2"]


def test_few_bells_stay():
    """Of any number of processes of a rank that did not leave, no more than two."""
    store = Observed()
    for _ in range(5):
        for rank in (0, 1):
            PeerDirectory(store, rank, 2, _PATIENCE).enter("a:1")
            assert len(store.bells()) <= 4


def watched(store, found=lambda rank, entry: None):
    """What a rank is told that looks for another one, before it leaves; and why it looks no more."""
    ends, has_ended = [], threading.Event()
    with check_leaks():
        higher = PeerDirectory(store, 1, 2, _PATIENCE)
        higher.enter("b:2")
        store.prepare()
        higher.watch(found, lambda why: (ends.append(why), has_ended.set()))
        assert has_ended.wait(_PATIENCE)
        higher.leave()
    return ends


class Spoilt(Observed):
    """A store in which another program writes."""

    def __init__(self, key, data):
        super().__init__()
        self._spoilt = key, data

    def prepare(self):
        """Have it write."""
        key, data = self._spoilt
        self.delete(key)
        if data is not None:
            super().set(key, data)


@pytest.mark.parametrize(
    ("key", "data", "why"),
    [
        ("process/0", b"\xc1", r"the store has b'\\xc1' under 'process/0', which no agent has written"),
        ("process/0", b"\x93\x01\xa1t\x01", "under 'process/0', which no agent has written"),
        ("incarnation/1", b"many", "the store has b'many' under 'incarnation/1', which no agent has written"),
        ("incarnation/1", None, "the store through which they meet has none of their keys any more"),
    ],
)
def test_a_store_that_holds_something_else(key, data, why):
    """Whoever looks there says so, and looks no more."""
    (end,) = watched(Spoilt(key, data))
    assert re.search(f"^ No process can join again: .*{why}", end)


def test_a_store_with_foreign_numbers():
    """Who enters is told."""
    store = Observed()
    store.set("incarnation/1", b"many")
    with pytest.raises(ProtocolError, match="the store has b'many' under 'incarnation/1'"):
        PeerDirectory(store, 0, 2, _PATIENCE).enter("a:1")
    store.set("process/0", b"")
    store.set("process/1", b"\xc1")
    store.delete("incarnation/1")
    with pytest.raises(ProtocolError, match="under 'process/1'"):
        PeerDirectory(store, 1, 2, _PATIENCE).enter("a:1")


def test_whoever_takes_what_is_found_fails(caplog):
    """It is said, and logged."""
    store = Observed()
    store.prepare = lambda: PeerDirectory(store, 0, 2, _PATIENCE).enter("a:1")

    def fail(rank, entry):
        raise RuntimeError("no more threads")

    (end,) = watched(store, fail)
    assert end == " This process finds no other one any more: RuntimeError: no more threads."
    assert "rank 1 looks for other ranks no more" in caplog.text
