"""The conformance suite of stores: the contract of `ferrodist.rendezvous.Store` as runnable checks, for implementers.

::

    @pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
    def test_my_store(check):
        check(lambda: [MyStore(address), MyStore(address)])
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeAlias

from ferrodist.errors import DistributedError, DistributedTimeoutError, RendezvousError
from ferrodist.testing.conformance.harness import TIMEOUT, check_deadline, error_of, pattern, run_checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ferrodist.rendezvous import Store

    StoreFactory: TypeAlias = Callable[[], Sequence[Store]]
    StoreCheck: TypeAlias = Callable[[StoreFactory], None]


def check_store(factory: StoreFactory) -> None:
    """Run all checks on a store.

    Args:
        factory: Returns two or more clients of one fresh, empty store. The checks close them.

    Raises:
        AssertionError: Rules are broken; all of them are listed, and the first failure is the cause.
    """
    run_checks("store", [(check.__name__, check, partial(check, factory)) for check in STORE_CHECKS])


_checks: list[StoreCheck] = []


def _store_check(body: Callable[[Sequence[Store]], None]) -> StoreCheck:
    @wraps(body)
    def check(factory: StoreFactory) -> None:
        clients = factory()
        assert len(clients) > 1, "the factory must return at least two clients"
        try:
            body(clients)
        finally:
            for client in clients:
                client.close()

    _checks.append(check)
    return check


@_store_check
def a_value_is_seen_by_all(clients: Sequence[Store]) -> None:
    """Every client gets a value that one sets: any bytes, none, a megabyte; a second `set` replaces the first."""
    for value in (b"value", b"", b"\0\xff\n", pattern(1 << 20), b"replaced"):
        clients[0].set("key", value, timeout=TIMEOUT)
        for i, client in enumerate(clients):
            got = client.get("key", timeout=TIMEOUT)
            assert bytes(got) == value, f"client {i} gets {got[:20]!r} in place of {value[:20]!r}"


@_store_check
def keys_are_told_apart(clients: Sequence[Store]) -> None:
    """Any text is a key, and each key has its own value."""
    keys = ["a", "A", "a/b", "a b", "a/b/", "ключ", "../a", "a\n", "k" * 1000]
    for key in keys:
        clients[0].set(key, key.encode(), timeout=TIMEOUT)
    for key in keys:
        got = clients[1].get(key, timeout=TIMEOUT)
        assert bytes(got) == key.encode(), f"key {key[:20]!r} has value {got[:20]!r}"


@_store_check
def get_waits_for_the_key(clients: Sequence[Store]) -> None:
    """`get` of a missing key returns when another client sets it, for all who wait."""
    with ThreadPoolExecutor(len(clients)) as pool:
        waiting = [pool.submit(client.get, "late", timeout=TIMEOUT) for client in clients[1:]]
        error_of(DistributedTimeoutError, lambda: clients[0].get("never", timeout=0.1), "get of a missing key")
        assert not any(future.done() for future in waiting), "get of a missing key returned"
        clients[0].set("late", b"here", timeout=TIMEOUT)
        got = [bytes(future.result(TIMEOUT)) for future in waiting]
    assert all(value == b"here" for value in got), f"those who waited got {got}"


@_store_check
def get_keeps_its_deadline(clients: Sequence[Store]) -> None:
    """`get` of a key that does not come raises when its time is up, names the key, and leaves the store usable."""
    for timeout in (0.0, 0.1, 0.3):
        with check_deadline(timeout, "get"):
            get = partial(clients[0].get, "missing", timeout=timeout)
            error = error_of(DistributedTimeoutError, get, "get of a missing key")
        assert "missing" in str(error), f"the error does not name the key: {error}"
    clients[1].set("missing", b"now", timeout=TIMEOUT)
    assert bytes(clients[0].get("missing", timeout=TIMEOUT)) == b"now", "the store is of no use after a timeout"


@_store_check
def wait_returns_when_all_are_there(clients: Sequence[Store]) -> None:
    """`wait` returns when all of its keys exist, at once for an empty list."""
    clients[0].wait([], timeout=0.0)
    clients[1].set("one", b"1", timeout=TIMEOUT)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(clients[0].wait, ["one", "two", "three"], timeout=TIMEOUT)
        clients[1].set("three", b"3", timeout=TIMEOUT)
        error_of(DistributedTimeoutError, lambda: clients[1].wait(["two"], timeout=0.1), "wait for a missing key")
        assert not waiting.done(), "wait returned before all keys existed"
        clients[1].set("two", b"2", timeout=TIMEOUT)
        waiting.result(TIMEOUT)


@_store_check
def wait_keeps_its_deadline(clients: Sequence[Store]) -> None:
    """`wait` that runs out of time names the keys that are missing and not those that are there."""
    clients[0].set("present", b"", timeout=TIMEOUT)
    with check_deadline(0.2, "wait"):
        wait = partial(clients[0].wait, ["present", "absent"], timeout=0.2)
        error = error_of(DistributedTimeoutError, wait, "wait for a missing key")
    assert "absent" in str(error), f"the missing key is not named: {error}"
    assert "present" not in str(error), f"a key that is there is named: {error}"


@_store_check
def add_counts(clients: Sequence[Store]) -> None:
    """`add` starts from 0, takes any sign, returns the sum, and keeps it as decimal text."""
    sums = [clients[i % 2].add("count", amount, timeout=TIMEOUT) for i, amount in enumerate((5, 0, -7, 1 << 40))]
    assert sums == [5, 5, -2, (1 << 40) - 2], f"sums returned: {sums}"
    got = clients[0].get("count", timeout=TIMEOUT)
    assert bytes(got) == b"%d" % ((1 << 40) - 2), f"the count is kept as {got!r}"
    clients[0].set("count", b"10", timeout=TIMEOUT)
    assert clients[1].add("count", 1, timeout=TIMEOUT) == 11, "a number that was set is not added to"
    clients[0].set("word", b"ten", timeout=TIMEOUT)
    error_of(DistributedError, lambda: clients[0].add("word", 1, timeout=TIMEOUT), "add to a word")


@_store_check
def add_stays_in_64_bits(clients: Sequence[Store]) -> None:
    """`add` counts up to the ends of 64 bits with a sign; a sum beyond raises ValueError and changes nothing."""
    for end, step in ((2**63 - 1, 1), (-(2**63), -1)):
        clients[0].set("count", b"0", timeout=TIMEOUT)
        got = clients[1].add("count", end, timeout=TIMEOUT)
        assert got == end, f"add of {end} to 0 gave {got}"
        error_of(ValueError, partial(clients[0].add, "count", step, timeout=TIMEOUT), f"add of {step} to {end}")
        kept = bytes(clients[1].get("count", timeout=TIMEOUT))
        assert kept == b"%d" % end, f"a sum beyond 64 bits left {kept!r} in place of {end}"
        assert clients[0].add("count", -step, timeout=TIMEOUT) == end - step, "the number is of no use afterwards"


@_store_check
def add_is_atomic(clients: Sequence[Store]) -> None:
    """Many clients that add at the same time each get another sum, and none is lost."""
    each, total = 50, 50 * len(clients)
    counts = _at_once(lambda _, client: [client.add("count", 1, timeout=TIMEOUT) for _ in range(each)], clients)
    sums = sorted(itertools.chain.from_iterable(counts))
    assert sums == list(range(1, total + 1)), f"{total} additions gave the sums {sums}"


@_store_check
def compare_set_sets_when_equal(clients: Sequence[Store]) -> None:
    """`compare_set` replaces the expected value only, takes ``b""`` as "missing", and returns what is there then."""
    first, second = clients[0], clients[1]
    steps: list[tuple[Store, bytes, bytes, bytes]] = [
        (first, b"other", b"new", b""),
        (first, b"", b"one", b"one"),
        (second, b"", b"two", b"one"),
        (second, b"zero", b"two", b"one"),
        (second, b"one", b"two", b"two"),
    ]
    for client, expected, desired, after in steps:
        got = client.compare_set("key", expected, desired, timeout=TIMEOUT)
        assert bytes(got) == after, f"compare_set(expected={expected!r}, desired={desired!r}) returned {got!r}"
    assert bytes(first.get("key", timeout=TIMEOUT)) == b"two", "compare_set returned what it did not keep"


@_store_check
def compare_set_has_one_winner(clients: Sequence[Store]) -> None:
    """When all clients compare_set a missing key at the same time exactly one wins, and all get its value."""
    names = [b"client %d" % i for i in range(len(clients))]
    for i in range(10):

        def claim(index: int, client: Store, key: str = f"key {i}") -> bytes:
            return bytes(client.compare_set(key, b"", names[index], timeout=TIMEOUT))

        winners = set(_at_once(claim, clients))
        assert len(winners) == 1, f"several clients won: {winners}"
        assert winners <= set(names), f"the winner is {winners}, which nobody set"


@_store_check
def delete_removes(clients: Sequence[Store]) -> None:
    """`delete` says whether the key was there; afterwards it is missing for all, and may be set again."""
    assert not clients[0].delete("key", timeout=TIMEOUT), "delete of a missing key returned True"
    clients[0].set("key", b"value", timeout=TIMEOUT)
    assert clients[1].delete("key", timeout=TIMEOUT), "delete of a key returned False"
    error_of(DistributedTimeoutError, lambda: clients[0].get("key", timeout=0.0), "get of a deleted key")
    assert clients[0].add("key", 3, timeout=TIMEOUT) == 3, "a deleted key still counts"


@_store_check
def waiting_holds_up_nobody(clients: Sequence[Store]) -> None:
    """While one client waits, the others are served."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(clients[0].get, "slow", timeout=TIMEOUT)
        for i in range(20):
            clients[1].set(f"quick {i}", b"", timeout=TIMEOUT)
        assert not waiting.done(), "get of a missing key returned"
        clients[1].set("slow", b"", timeout=TIMEOUT)
        waiting.result(TIMEOUT)


@_store_check
def threads_share_a_client(clients: Sequence[Store]) -> None:
    """Threads may use one client at once: no addition is lost, and one that waits holds up no other."""
    shared = clients[0]

    def count(index: int, client: Store) -> list[int]:
        client.set(f"thread {index}", b"%d" % index, timeout=TIMEOUT)
        assert bytes(client.get(f"thread {index}", timeout=TIMEOUT)) == b"%d" % index, "two threads mixed up values"
        return [client.add("count", 1, timeout=TIMEOUT) for _ in range(20)]

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(shared.get, "late", timeout=TIMEOUT)
        sums = sorted(itertools.chain.from_iterable(_at_once(count, [shared] * 4)))
        assert sums == list(range(1, 81)), f"80 additions of 4 threads gave the sums {sums}"
        assert not waiting.done(), "get of a missing key returned"
        shared.set("late", b"", timeout=TIMEOUT)
        waiting.result(TIMEOUT)


@_store_check
def wrong_arguments_are_refused(clients: Sequence[Store]) -> None:
    """Wrong keys, values, amounts and timeouts raise TypeError or ValueError, and nothing is changed."""
    store: Any = clients[0]
    calls: dict[str, tuple[type[Exception], Callable[[], object]]] = {
        "set with a key of bytes": (TypeError, lambda: store.set(b"key", b"", timeout=TIMEOUT)),
        "get with no key": (TypeError, lambda: store.get(None, timeout=TIMEOUT)),
        "set with an empty key": (ValueError, lambda: store.set("", b"", timeout=TIMEOUT)),
        "set with text": (TypeError, lambda: store.set("key", "text", timeout=TIMEOUT)),
        "wait with one text": (TypeError, lambda: store.wait("key", timeout=TIMEOUT)),
        "add of 1.5": (TypeError, lambda: store.add("key", 1.5, timeout=TIMEOUT)),
        "add of True": (TypeError, lambda: store.add("key", True, timeout=TIMEOUT)),
        "add of 2**63": (ValueError, lambda: store.add("key", 1 << 63, timeout=TIMEOUT)),
    }
    for timeout in (-1, float("nan"), "1", True):
        wrong = TypeError if isinstance(timeout, (str, bool)) else ValueError
        calls |= {f"{name} with timeout={timeout!r}": (wrong, call) for name, call in _calls_of(store, timeout)}
    for what, (kind, call) in calls.items():
        error_of(kind, call, what)
    error_of(DistributedTimeoutError, lambda: store.get("key", timeout=0.0), "get of a key that was refused")


@_store_check
def a_closed_store_says_so(clients: Sequence[Store]) -> None:
    """`close` may be called twice, wakes a call of this client that waits, and makes later ones raise."""
    store = clients[-1]
    about_to_wait = threading.Event()
    with ThreadPoolExecutor(1, initializer=about_to_wait.set) as pool:
        waiting = pool.submit(store.get, "never", timeout=TIMEOUT)
        about_to_wait.wait(TIMEOUT)
        store.close()
        store.close()
        error_of(RendezvousError, lambda: waiting.result(TIMEOUT), "get, while the store is closed,")
    for what, call in _calls_of(store, TIMEOUT):
        error_of(RendezvousError, call, f"{what} on a closed store")


def _calls_of(store: Store, timeout: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "set", lambda: store.set("key", b"", timeout=timeout)
    yield "get", lambda: store.get("key", timeout=timeout)
    yield "wait", lambda: store.wait(["key"], timeout=timeout)
    yield "add", lambda: store.add("key", 1, timeout=timeout)
    yield "compare_set", lambda: store.compare_set("key", b"", b"1", timeout=timeout)
    yield "delete", lambda: store.delete("key", timeout=timeout)


def _at_once(call: Callable[[int, Store], Any], clients: Sequence[Store]) -> list[Any]:
    """Run ``call(index, client)`` for all clients in threads that start together."""
    start = threading.Barrier(len(clients))

    def run(index: int, client: Store) -> Any:
        start.wait(TIMEOUT)
        return call(index, client)

    with ThreadPoolExecutor(len(clients)) as pool:
        return list(pool.map(run, range(len(clients)), clients))


STORE_CHECKS: tuple[StoreCheck, ...] = tuple(_checks)
"""All checks. Each takes a factory as `check_store` does, and raises when its rule is broken."""
