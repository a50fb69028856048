"""Ends of processes are seen in the order in which they happened."""

from __future__ import annotations

import os
import select
import subprocess

import pytest

from ferrodist.launch import process_watch
from ferrodist.launch.process_watch import ExitWatch

needs_pidfd = pytest.mark.skipif(not process_watch._has_pidfd(), reason="this system has no pidfd_open")


@pytest.fixture
def children():
    """Four shells, each of which ends with its number once its standard input closes."""
    processes = [
        subprocess.Popen(["sh", "-c", f"read line; exit {number}"], stdin=subprocess.PIPE) for number in range(4)
    ]
    yield processes
    for process in processes:
        process.kill()
        process.stdin.close()
        process.wait()


def end(process: subprocess.Popen) -> None:
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


@needs_pidfd
@pytest.mark.parametrize("order", [(3, 1, 2, 0), (0, 1, 2, 3), (2, 3, 0, 1)])
def test_the_order_of_exits_survives_late_polls(children, order):
    """All have ended before the first poll, and are still reported in order."""
    watch = ExitWatch()
    for process in children:
        watch.add(process.pid)
    assert watch.take() == []
    for number in order:
        end(children[number])
    assert watch.take() == [(children[number].pid, number) for number in order]
    assert watch.take() == []
    watch.close()


@needs_pidfd
def test_the_descriptor_becomes_readable(children):
    """An event loop can wait for the next end, and again for the one after."""
    watch = ExitWatch()
    poller = select.poll()
    poller.register(watch.fileno(), select.POLLIN)
    for process in children:
        watch.add(process.pid)
    assert poller.poll(0) == []
    for number in (2, 0):
        end(children[number])
        assert poller.poll(10_000)
        assert watch.take() == [(children[number].pid, number)]
        assert poller.poll(0) == []
    watch.close()


def test_without_pidfd_every_end_is_seen(children, monkeypatch):
    """Without pidfds, polling still finds each exit once, without reaping."""
    monkeypatch.setattr(process_watch, "_has_pidfd", lambda: False)
    watch = ExitWatch()
    assert watch.fileno() is None
    for process in children:
        watch.add(process.pid)
    end(children[1])
    children[2].kill()
    os.waitid(os.P_PID, children[2].pid, os.WEXITED | os.WNOWAIT)
    assert watch.take() == [(children[1].pid, 1), (children[2].pid, -9)]
    assert watch.take() == []
    assert children[1].wait() == 1
    watch.close()


@needs_pidfd
def test_a_child_that_ended_before_it_was_added_counts(children):
    """A rank that dies during the start of the others is not missed."""
    end(children[3])
    watch = ExitWatch()
    watch.add(children[3].pid)
    assert watch.take() == [(children[3].pid, 3)]
    watch.close()
