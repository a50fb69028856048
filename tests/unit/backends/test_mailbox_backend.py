"""What the backends with a mailbox share: how groups end that nobody closed, and what may be on its way."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

import pytest

import ferrodist as fd
from ferrodist.backends import mailbox, mailbox_backend
from ferrodist.backends.mailbox import EAGER_LIMIT
from ferrodist.backends.native import is_native_available
from ferrodist.testing import check_leaks, run_ranks

if TYPE_CHECKING:
    from ferrodist.backends.mailbox_backend import MailboxBackend

_NATIVE = pytest.param(
    "native-threads",
    marks=pytest.mark.skipif(not is_native_available(), reason="this installation was built without the native engine"),
)
_BACKENDS = ["simulated", "tcp-threads", _NATIVE]


def _collect(group: MailboxBackend) -> None:
    """Have all of the group's sub-groups, which nobody holds, collected."""
    while len(group.subgroups):
        gc.collect()  # does nothing while another thread does the same


def _control(group: Any) -> Any:
    """The control plane that records a group's ends: the group itself, unless it is composed."""
    return getattr(group, "_control", group)


@pytest.mark.parametrize("backend", _BACKENDS)
def test_dropped_sub_groups_are_forgotten(backend: str) -> None:
    """A sub-group that is made for one use and not closed takes no memory once the next one is made."""

    def program(group: MailboxBackend) -> int:
        for _ in range(20):
            fd.SubBackend(group, [0, 1]).barrier()
        _collect(group)
        last = fd.SubBackend(group, [1, 0])
        last.barrier()
        assert len(_control(group)._members) == len(_control(group)._names) == 2, "the world and the last one"
        assert len(group.subgroups) == 1
        group.barrier()
        return len(_control(group)._left)

    assert all(left <= 40 for left in run_ranks(program, 2, backend=backend, timeout=60))


@pytest.mark.parametrize("backend", _BACKENDS)
@pytest.mark.parametrize("first", [0, 1])
def test_closed_sub_groups_are_forgotten(backend: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that all members have closed, whoever did so first, take no memory; what comes in one of them is refused
    as long as a member may send it.
    """
    monkeypatch.setattr(mailbox_backend, "_MAX_DRAINED_IDS", 3)

    def program(group: MailboxBackend) -> None:
        def open_and_close() -> None:
            sub = fd.SubBackend(group, [0, 1])
            sub.barrier()
            if group.rank == first:
                sub.close()
            group.barrier()
            if group.rank != first:
                sub.close()
            group.barrier()

        later = fd.SubBackend(group, [0, 1], name="later")
        for _ in range(30):
            open_and_close()
        while any(_control(group)._closed.values()):
            time.sleep(0.001)  # a barrier in shared memory overtakes the control plane's news of the other's closes
        group.barrier()
        open_and_close()
        assert len(_control(group)._closed) <= 4, "the last ones, and one of which the news may be on its way"
        assert not _control(group)._left
        group.barrier()
        if group.rank == first:
            later.close()
        group.barrier()
        for _ in range(10):  # `later` has a member that may still send
            sub = fd.SubBackend(group, [0, 1])
            sub.barrier()
            sub.close()
            group.barrier()
        if group.rank == first:
            assert later.group_id in _control(group)._closed
        else:
            with pytest.raises(fd.PeerLostError):
                later.send(bytes(8), later.world_size - 1 - later.rank)
            later.close()
            assert later.group_id in _control(group)._drained
        group.barrier()

    run_ranks(program, 2, backend=backend, timeout=60)


@pytest.mark.parametrize("backend", _BACKENDS)
def test_sub_groups_of_a_dead_rank_are_forgotten(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has died or left the world sends nothing in groups that were closed before, or are closed later."""
    monkeypatch.setattr(mailbox_backend, "_MAX_DRAINED_IDS", 0)

    def program(group: MailboxBackend) -> None:
        subs = [fd.SubBackend(group, [0, 1]) for _ in range(10)]
        group.barrier()
        if group.rank == 1:
            group.close()
            return
        for sub in subs[:5]:
            sub.close()
        with pytest.raises(fd.PeerLostError):
            group.recv(bytearray(1), 1, timeout=20)
        for sub in subs[5:]:
            sub.close()
        assert not _control(group)._closed

    run_ranks(program, 2, backend=backend, timeout=60)


@pytest.mark.parametrize("backend", _BACKENDS)
def test_dropping_a_sub_group_does_not_take_its_messages_back(backend: str) -> None:
    """Messages that were started in it arrive, and only then is the group left: ranks that wait for more learn it."""

    def program(group: MailboxBackend) -> None:
        size = EAGER_LIMIT + 1
        if group.rank == 0:
            fd.SubBackend(group, [0, 1]).isend(b"a" * size, 1)
            _collect(group)
            fd.SubBackend(group, [0])
            group.barrier()
            group.barrier()
            fd.SubBackend(group, [0])
        else:
            sub = fd.SubBackend(group, [0, 1])
            group.barrier()
            buffer = bytearray(size)
            assert sub.recv(buffer, 0) == 0
            assert buffer == b"a" * size
            group.barrier()
            with pytest.raises(fd.PeerLostError, match="left"):
                sub.recv(buffer, 0)

    run_ranks(program, 2, backend=backend, timeout=60)


@pytest.mark.parametrize("backend", _BACKENDS)
def test_a_cancelled_large_receive_does_not_fill_the_mailbox(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message of a cancelled receive does not count against its sender, and waits for the next receive."""
    monkeypatch.setattr(mailbox, "MAX_UNEXPECTED_BYTES", 1 << 20)

    def program(group: MailboxBackend) -> None:
        size = 4 << 20
        if group.rank == 0:
            group.recv(bytearray(1), 1, tag=1)
            sending = group.isend(b"a" * size, 1)
            group.send(b"x", 1, tag=2)
            sending.wait(30)
        else:
            receive = group.irecv(bytearray(size), 0)
            group.send(b"x", 0, tag=1)
            group.recv(bytearray(1), 0, tag=2)
            if receive.cancel():
                into = bytearray(size)
                group.recv(into, 0)
                assert into == b"a" * size
        group.barrier()

    run_ranks(program, 2, backend=backend, timeout=60)


def test_a_reason_that_utf8_cannot_carry_reaches_all() -> None:
    """An error that names a file whose name is no text ends the group everywhere, and the group can be closed."""

    def program(group: MailboxBackend) -> None:
        if group.rank == 0:
            group.abort("can't read caf\udce9.png")
        with pytest.raises(fd.GroupAbortedError, match=r"can't read caf(\udce9|\\udce9)\.png"):
            group.recv(bytearray(1), 1 - group.rank)
        group.close()

    with check_leaks():
        run_ranks(program, 2, backend="tcp-threads", timeout=60)


def test_closing_ends_the_thread_whatever_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while closing is raised, and neither a thread nor a connection stays behind."""

    def program(group: MailboxBackend) -> None:
        group.barrier()
        closed: list[int] = []
        group.on_close(lambda: closed.append(1))
        with monkeypatch.context() as patch:
            if group.rank == 0:
                patch.setattr(group, "_notify_left", lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    group.close()
            else:
                group.close()
        group.close()
        assert closed == [1]

    with check_leaks():
        start = time.monotonic()
        run_ranks(program, 2, backend="tcp-threads", timeout=60)
        assert time.monotonic() - start < 30


def test_a_close_callback_that_raises_keeps_no_other_from_running() -> None:
    """Those of the group and of its sub-groups run, last in, first out, and the error is raised."""
    (group,) = fd.SimulatedBackend.create_group(1)
    subgroup = fd.new_group(group=group)
    ran: list[str] = []
    for each, names in ((group, "ab"), (subgroup, "cd")):
        for name in names:
            each.on_close(lambda name=name: ran.append(name))
        each.on_close(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        group.close()
    assert ran == ["d", "c", "b", "a"]
