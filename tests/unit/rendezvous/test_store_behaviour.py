"""One suite for every store: alone, and behind a prefix."""

import contextlib
import threading

import pytest

from ferrodist.errors import DistributedTimeoutError, RendezvousError, UnsupportedOpError
from ferrodist.rendezvous import FileStore, MemoryStore, PrefixStore, TcpStore, TcpStoreServer


@contextlib.contextmanager
def opened(kind, path):
    if kind == "memory":
        yield MemoryStore(timeout=20)
    elif kind == "file":
        yield FileStore(path, timeout=20)
    else:
        with contextlib.closing(TcpStoreServer("127.0.0.1", 0, secret=b"s", job="j", world_size=2)) as server:
            yield TcpStore(server.address, secret=b"s", job="j", rank=0, world_size=2, timeout=20)


@pytest.fixture(params=["memory", "file", "tcp"])
def parent(request, tmp_path):
    """A store of each kind."""
    with opened(request.param, tmp_path / "store") as store, contextlib.closing(store):
        yield store


@pytest.fixture(params=["plain", "prefixed", "nested"])
def store(request, parent):
    """Each store as it is, behind a prefix, and behind two."""
    for prefix in {"plain": (), "prefixed": ("a",), "nested": ("a", "b")}[request.param]:
        parent = PrefixStore(parent, prefix)
    return parent


@pytest.mark.parametrize("value", [b"", b"x", b"\0\xff", b"a" * 300_000])
def test_get_returns_what_was_set(store, value):
    """A value comes back byte for byte, and the last one counts."""
    store.set("k", b"before")
    store.set("k", value)
    assert store.get("k") == value
    assert store.get("k", timeout=0) == value


def test_bytes_like_values(store):
    """Any bytes-like value is stored as bytes; other types and bad keys are refused."""
    store.set("k", bytearray(b"ab"))
    assert store.get("k") == b"ab"
    store.set("k", memoryview(b"cd"))
    assert store.get("k") == b"cd"
    with pytest.raises(TypeError, match=r"bytes"):
        store.set("k", "text")
    with pytest.raises(TypeError, match=r"text"):
        store.get(3)
    with pytest.raises(ValueError, match=r"1 to 4096"):
        store.get("")
    with pytest.raises(TypeError, match=r"in a list"):
        store.wait("key")


def test_a_value_beyond_the_limit_is_refused(store):
    """A value over 64 MiB is refused before anything is sent."""
    with pytest.raises(ValueError, match=r"67108864"):
        store.set("k", bytes(64 * 1024 * 1024 + 1))


def test_get_waits_for_the_key(store, in_threads):
    """A get that comes first returns once another thread sets the key."""
    results = in_threads(lambda: store.get("k"), lambda: store.get("k"), lambda: store.set("k", b"v"))
    assert results == [b"v", b"v", None]


def test_wait_needs_all_keys(store, in_threads):
    """Wait returns when the last key is there, whatever the order of their coming."""
    calls = [lambda: store.wait(["a", "b", "c"]), lambda: store.wait([])]
    calls += [lambda key=key: store.set(key, b"1") for key in "cab"]
    assert in_threads(*calls) == [None] * 5


@pytest.mark.parametrize("timeout", [0, 0.05])
def test_timeout_names_the_missing_keys(store, timeout):
    """A timeout names the keys that are missing, not the others, and the limit."""
    store.set("here", b"1")
    with pytest.raises(DistributedTimeoutError) as caught:
        store.wait(["here", "gone-1", "gone-2"], timeout=timeout)
    assert "gone-1" in caught.value.message
    assert "gone-2" in caught.value.message
    assert "here'" not in caught.value.message
    assert f"limit {timeout:.2f} s" in caught.value.message
    assert caught.value.ranks == ()
    with pytest.raises(DistributedTimeoutError, match=r"gone-1"):
        store.get("gone-1", timeout=timeout)


def test_bad_timeouts(store):
    """A negative timeout is an error, an infinite one is not."""
    with pytest.raises(ValueError, match=r"timeout"):
        store.get("k", timeout=-1)
    store.set("k", b"v", timeout=float("inf"))
    assert store.get("k", timeout=float("inf")) == b"v"


@pytest.mark.parametrize(("timeout", "kind"), [(-1, ValueError), (float("nan"), ValueError), ("1", TypeError)])
@pytest.mark.parametrize("make", [MemoryStore, FileStore], ids=["memory", "file"])
def test_bad_default_timeouts(make, timeout, kind, tmp_path):
    """A store is not made with a timeout that none of its calls could use."""
    with pytest.raises(kind, match=r"timeout"):
        make(*[tmp_path / "store"] * (make is FileStore), timeout=timeout)


def test_add_counts(store):
    """Add starts at 0, takes any sign, and leaves decimal ASCII behind."""
    assert store.add("n", 3) == 3
    assert store.add("n", -5) == -2
    assert store.get("n") == b"-2"
    store.set("n", b"40")
    assert store.add("n", 2) == 42
    store.set("n", b"many")
    with pytest.raises(UnsupportedOpError, match=r"'.*n' holds b'many'"):
        store.add("n", 1)


@pytest.mark.parametrize(("start", "amount"), [(2**63 - 1, 1), (-(2**63), -1), (10**30, 1), (2**62, 2**62)])
def test_sums_have_64_bits(store, start, amount):
    """A sum beyond 64 bits raises ValueError with the key and the sum, and the number stays."""
    store.set("n", b"%d" % start)
    with pytest.raises(ValueError, match=rf"n' a number of more than 64 bits, {start + amount}"):
        store.add("n", amount)
    assert store.get("n") == b"%d" % start
    store.delete("n")
    assert store.add("n", 2**63 - 1) == 2**63 - 1
    assert store.add("n", -(2**63)) == -1
    assert store.add("n", 1 - 2**63) == -(2**63)


def test_add_is_atomic(store, in_threads):
    """No increment of concurrent threads is lost."""
    in_threads(*[lambda: [store.add("n", 1) for _ in range(20)]] * 4)
    assert store.get("n") == b"80"


def test_compare_set(store):
    """Compare-and-set writes on a match or into a gap, and returns the value after the call."""
    assert store.compare_set("k", b"x", b"new") == b""
    assert store.compare_set("k", b"", b"one") == b"one"
    assert store.compare_set("k", b"", b"two") == b"one"
    assert store.compare_set("k", b"one", b"two") == b"two"
    assert store.compare_set("k", b"one", b"three") == b"two"
    store.set("empty", b"")
    assert store.compare_set("empty", b"", b"full") == b""


def test_compare_set_has_one_winner(store, in_threads):
    """One of several concurrent claims of a missing key wins, and all see which."""
    results = in_threads(*[lambda i=i: store.compare_set("k", b"", b"%d" % i) for i in range(8)])
    assert len(set(results)) == 1
    assert store.get("k") == results[0]


def test_delete(store):
    """Delete says whether the key was there, and a deleted key is missing."""
    assert store.delete("k") is False
    store.set("k", b"v")
    assert store.delete("k") is True
    assert store.delete("k") is False
    with pytest.raises(DistributedTimeoutError):
        store.get("k", timeout=0)


def test_prefixes_keep_keys_apart(parent):
    """Two prefixes of one store do not see each other, and closing a view closes nothing."""
    left, right = PrefixStore(parent, "left"), PrefixStore(parent, "right")
    left.set("k", b"1")
    assert right.delete("k") is False
    left.close()
    assert left.get("k") == b"1"
    assert parent.get("left/k") == b"1"


def test_close_ends_waits_and_later_calls(parent, in_threads, until):
    """Closing a store raises in a thread that waits on it, and in each later call."""
    waiting = threading.Event()

    def get():
        waiting.set()
        parent.get("never")

    def close():
        assert waiting.wait(10)
        parent.close()

    caught = in_threads(get, close)
    assert isinstance(caught[0], RendezvousError)
    assert "closed" in str(caught[0])
    for call in (lambda: parent.get("k"), lambda: parent.set("k", b""), lambda: parent.add("k", 1)):
        with pytest.raises(RendezvousError, match=r"closed"):
            call()
    parent.close()
