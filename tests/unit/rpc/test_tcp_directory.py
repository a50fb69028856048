"""`PeerDirectory`: the current process of each rank."""

import re
import threading

import pytest

from ferrodist.errors import ProtocolError
from ferrodist.rendezvous import MemoryStore
from ferrodist.rpc.tcp_directory import PeerDirectory, _pack
from ferrodist.testing import check_leaks

_PATIENCE = 60.0


class Observed(MemoryStore):
    """A store that lets a test act between two operations."""

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

    def change_keys(self):
        return sorted(key for key in self._values if key.startswith("bell/"))


def test_the_newest_process_counts():
    """A process that is slow to write its address does not overwrite its successor's, nor when it leaves."""
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


def test_a_change_key_wakes_once():
    """The process that it wakes deletes it, reads again, and then waits."""
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
    assert store.change_keys() == []


def test_a_rank_that_starts_while_its_change_key_is_set():
    """The replaced process's key does not stay; the new one's is set."""
    store = Observed()
    PeerDirectory(store, 1, 2, _PATIENCE).enter("b:1")

    def start(key):
        if key == "bell/1/1":
            store.on_set = lambda key: None
            store.add("incarnation/1", 1)

    store.on_set = start
    PeerDirectory(store, 0, 2, _PATIENCE).enter("a:1")
    assert store.change_keys() == ["bell/1/2"]


def test_few_change_keys_stay():
    """No more than two, of any number of processes of a rank that did not leave."""
    store = Observed()
    for _ in range(5):
        for rank in (0, 1):
            PeerDirectory(store, rank, 2, _PATIENCE).enter("a:1")
            assert len(store.change_keys()) <= 4


def watched(store, found=lambda rank, entry: None):
    """The processes that a directory reports until it leaves, and the reason why it reports no more."""
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
def test_a_store_with_foreign_values(key, data, why):
    """The process that reads them reports it, and reads no more."""
    (end,) = watched(Spoilt(key, data))
    assert re.search(f"^ No process can join again: .*{why}", end)


def test_a_store_with_foreign_numbers():
    """A process that registers raises."""
    store = Observed()
    store.set("incarnation/1", b"many")
    with pytest.raises(ProtocolError, match="the store has b'many' under 'incarnation/1'"):
        PeerDirectory(store, 0, 2, _PATIENCE).enter("a:1")
    store.set("process/0", b"")
    store.set("process/1", b"\xc1")
    store.delete("incarnation/1")
    with pytest.raises(ProtocolError, match="under 'process/1'"):
        PeerDirectory(store, 1, 2, _PATIENCE).enter("a:1")


def test_an_exception_of_the_callback(caplog):
    """It is reported and logged."""
    store = Observed()
    store.prepare = lambda: PeerDirectory(store, 0, 2, _PATIENCE).enter("a:1")

    def fail(rank, entry):
        raise RuntimeError("no more threads")

    (end,) = watched(store, fail)
    assert end == " This process finds no other one any more: RuntimeError: no more threads."
    assert "rank 1 looks for other ranks no more" in caplog.text
