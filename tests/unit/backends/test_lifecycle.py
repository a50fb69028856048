"""What a process ends at its exit, in which order, and snapshots of weak collections."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import TYPE_CHECKING
from weakref import WeakSet, WeakValueDictionary

import pytest

from ferrodist.backends.lifecycle import ExitStage, at_exit, cancel_at_exit
from ferrodist.backends.weak import snapshot_weak

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class _Thing:
    pass


def _of_set() -> tuple[Callable[[_Thing], object], Callable[[], Iterable[object]]]:
    things: WeakSet[_Thing] = WeakSet()
    return things.add, lambda: things


def _of_dictionary() -> tuple[Callable[[_Thing], object], Callable[[], Iterable[object]]]:
    things: WeakValueDictionary[int, _Thing] = WeakValueDictionary()
    return lambda thing: things.__setitem__(id(thing), thing), things.values


@pytest.mark.parametrize("make", [_of_set, _of_dictionary])
def test_a_snapshot_while_others_add(
    make: Callable[[], tuple[Callable[[_Thing], object], Callable[[], Iterable[object]]]],
) -> None:
    """A snapshot is repeated if an element is added meanwhile; it has all elements that were there throughout."""
    add, collection = make()
    kept = [_Thing() for _ in range(5)]
    for thing in kept:
        add(thing)
    late = [_Thing() for _ in range(3)]

    def disturbed() -> Iterator[object]:
        for thing in collection():
            if late:
                kept.append(late.pop())
                add(kept[-1])
            yield thing

    with pytest.raises(RuntimeError, match="changed size"):
        list(disturbed())
    assert len(late) == 2
    assert {id(thing) for thing in snapshot_weak(disturbed)} == {id(thing) for thing in kept}
    assert not late


_PROGRAM = """
import atexit
from ferrodist.backends.lifecycle import ExitStage, at_exit, cancel_at_exit

def fail():
    raise ValueError("an agent")

cancelled = lambda: print("cancelled")
at_exit(ExitStage.RPC_AGENTS, lambda: print("first agent"))
at_exit(ExitStage.RPC_AGENTS, fail)
at_exit(ExitStage.DEFAULT_GROUP, cancelled)
at_exit(ExitStage.DEFAULT_GROUP, lambda: print("group"))
atexit.register(print, "the program's handler")
at_exit(ExitStage.RPC_AGENTS, lambda: print("last agent"))
cancel_at_exit(ExitStage.DEFAULT_GROUP, cancelled)
"""


def test_stages_end_in_their_order() -> None:
    """Users of groups end before the groups, whatever one raises; the program's handlers keep their place."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["last agent", "the program's handler", "first agent", "group"]
    assert "ValueError: an agent" in done.stderr


def test_a_cancelled_callback_is_freed_at_once() -> None:
    """What an object registers and cancels keeps it no longer: a destroyed torch group frees its store's port."""

    class Owner:
        def end(self) -> None:
            raise AssertionError

    owner = Owner()
    gone = weakref.ref(owner)
    at_exit(ExitStage.TORCH_GROUPS, owner.end)
    cancel_at_exit(ExitStage.TORCH_GROUPS, owner.end)
    gc.disable()
    try:
        del owner
        assert gone() is None
    finally:
        gc.enable()
