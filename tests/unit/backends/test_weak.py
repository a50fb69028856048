"""Collections of weak references while other threads add to them."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakSet, WeakValueDictionary

import pytest

from ferrodist.backends.weak import held_now

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class _Thing:
    pass


@contextmanager
def _filled_meanwhile(add: Callable[[_Thing], object]) -> Iterator[None]:
    """Have another thread add things, and drop them again, as often as it can."""
    done = threading.Event()
    interval = sys.getswitchinterval()

    def fill() -> None:
        while not done.is_set():
            things = [_Thing() for _ in range(20)]
            for thing in things:
                add(thing)

    filler = threading.Thread(target=fill)
    sys.setswitchinterval(1e-6)
    filler.start()
    try:
        yield
    finally:
        done.set()
        filler.join()
        sys.setswitchinterval(interval)


def _of_set() -> tuple[Callable[[_Thing], object], Callable[[], Iterable[object]]]:
    things: WeakSet[_Thing] = WeakSet()
    return things.add, lambda: things


def _of_dictionary() -> tuple[Callable[[_Thing], object], Callable[[], Iterable[object]]]:
    things: WeakValueDictionary[int, _Thing] = WeakValueDictionary()
    return lambda thing: things.__setitem__(id(thing), thing), things.items


@pytest.mark.parametrize("make", [_of_set, _of_dictionary])
def test_a_look_while_others_add(
    make: Callable[[], tuple[Callable[[_Thing], object], Callable[[], Iterable[object]]]],
) -> None:
    """Whatever other threads add meanwhile, a look succeeds and shows what was there all the time."""
    add, collection = make()
    kept = [_Thing() for _ in range(50)]
    for thing in kept:
        add(thing)
    interrupted = 0
    with _filled_meanwhile(add):
        for _ in range(1000):
            try:
                list(collection())
            except RuntimeError:
                interrupted += 1
            seen = {id(each[1] if isinstance(each, tuple) else each) for each in held_now(collection)}
            assert seen >= {id(thing) for thing in kept}
    assert interrupted > 0, "no look was disturbed: this shows nothing"
