"""Sub-groups that the ranks made differently: only a timeout can show it, which says what may be wrong."""

from __future__ import annotations

import contextlib
import re
import threading
from typing import TYPE_CHECKING

import pytest
import torch

import ferrodist as fd
from ferrodist.backends.subgroup import _COUNTS
from ferrodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.backends.base import Backend

_DOUBT = re.escape("made this sub-group with other ranks, in another order, or another number of times")

_MADE_DIFFERENTLY: dict[str, Callable[[Backend], fd.SubBackend]] = {
    "other ranks": lambda group: fd.SubBackend(group, [0, 1] if group.rank == 0 else [0, 1, 2]),
    "another order": lambda group: fd.SubBackend(group, [0, 1] if group.rank == 0 else [1, 0]),
    "another number of times": lambda group: [fd.SubBackend(group, [0, 1]) for _ in range(1 + group.rank)][-1],
}


@pytest.mark.parametrize("name", _MADE_DIFFERENTLY)
def test_a_sub_group_made_differently(name: str) -> None:
    """The timeout of the first collective says that the ranks may not mean the same group."""

    def on_rank(group: Backend) -> None:
        if group.rank < 2:
            sub = _MADE_DIFFERENTLY[name](group)
            with pytest.raises(fd.DistributedTimeoutError, match=_DOUBT):
                fd.allreduce(torch.ones(2), group=sub, timeout=0.2)
        group.barrier(timeout=60)

    run_ranks(on_rank, 3)


def test_a_group_that_has_worked_is_not_doubted() -> None:
    """Once the ranks have agreed they do mean the same group; and the outermost one they never made."""

    def on_rank(group: Backend) -> None:
        sub = fd.SubBackend(group, [1, 0])
        sub.barrier(timeout=60)
        for late in (sub, group):
            if group.rank == 0:
                with pytest.raises(fd.DistributedTimeoutError) as caught:
                    late.barrier(timeout=0.1)
                assert "has not called it" in caught.value.message
                assert re.search(_DOUBT, caught.value.message) is None

    run_ranks(on_rank, 2)


def test_sub_groups_of_sub_groups_leave_nothing_with_the_outermost() -> None:
    """What is counted for the sub-groups of a group goes with it: a program may make new ones for ever."""
    group = fd.SimulatedBackend.create_group(1)[0]
    ids = {fd.SubBackend(fd.SubBackend(group, [0]), [0]).group_id for _ in range(100)}
    assert len(ids) == 100
    assert len(group.attachments[_COUNTS]) == 1
    group.close()


def test_threads_that_close_a_sub_group_at_once_close_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its group would count twice that this rank has left, and its callbacks run in two threads."""
    both = threading.Barrier(2)

    class Met(fd.SubBackend):
        @property
        def name(self) -> str:
            with contextlib.suppress(threading.BrokenBarrierError):  # the other thread has to wait
                both.wait(0.3)
            return "met"

    (group,) = fd.SimulatedBackend.create_group(1)
    sub = Met(group, [0])
    both.reset()
    closed: list[int] = []
    monkeypatch.setattr(group, "close_subgroup", lambda group_id, _: closed.append(group_id))
    threads = [threading.Thread(target=sub.close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert closed == [sub.group_id]
    monkeypatch.undo()
    group.close()
