"""The log of calls, in processes of their own: the environment switches it on when ferrodist is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ferrodist.backends.native import is_native_available

_PROGRAM = """
import torch
import torch.distributed as dist
import ferrodist as fd
from ferrodist.testing import run_ranks
from ferrodist.torch_backend.process_group import FerrodistProcessGroup

def program(group):
    tensor = torch.ones(4, 4)
    for _ in range(3):
        fd.allreduce(tensor)
    fd.allreduce(tensor.t())
    fd.allreduce(torch.ones(2, requires_grad=True))
    fd.all_gather(tensor, 1, out=torch.empty(4, 4))
    fd.broadcast(torch.ones(2, dtype=torch.complex64))
    fd.async_allreduce(torch.ones(2)).wait()
    fd.all_gather_object(1)
    fd.all_to_all([torch.ones(1)])
    with fd.coalesce():
        fd.async_allreduce(torch.ones(3))
    options = dist.GatherOptions()
    options.asyncOp = False
    FerrodistProcessGroup(group).gather([[torch.ones(1)]], [torch.ones(1)], options)

run_ranks(program, 1, backend=%r)
"""


def _log_of(backend, program=_PROGRAM, **environment):
    command = [sys.executable, "-c", program % backend]
    ended = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return ended.stderr.splitlines()


_MESSAGES = """
import torch
import ferrodist as fd
from ferrodist.testing import run_ranks

def program(group):
    if group.rank == 0:
        fd.send(torch.ones(3), 1)
        fd.sendrecv(torch.ones(2), 1, None, 1)
        fd.batch([fd.Send(torch.ones(4, 2)[:, 0], 1), fd.Send(torch.ones(5), 1)])
        fd.batch([fd.Send(torch.ones(4), 1), fd.Send(torch.ones(5), 1)])
    else:
        assert fd.recv((3,), torch.float32, 0).sum() == 3
        fd.sendrecv(torch.ones(2), 0, None, 0)
        for count in (4, 5, 4, 5):
            assert fd.recv_into(torch.zeros(count), 0) == 0
        try:
            fd.recv_into(torch.zeros(6), 0, timeout=0.01)
        except fd.DistributedTimeoutError:
            pass

run_ranks(program, 2, backend=%r)
"""


@pytest.mark.skipif(not is_native_available(), reason="this installation was built without the native engine")
def test_messages_say_their_path_too():
    """Point-to-point calls say so, too, also one that began on the fast path and went on on the general one."""
    lines = set(_log_of("native-threads", _MESSAGES, FERRODIST_EXPLAIN_CALLS="1"))
    assert lines >= {
        "send(float32[3]): fast path",
        "recv(): fast path",
        "sendrecv(float32[2]): fast path",
        "batch(float32[4], float32[5]): fast path",
        "recv_into(float32[5]): fast path",
        "recv_into(float32[6]): fast path, then the general path, which goes on with it",
    }
    assert any(line.startswith("batch(float32[4], float32[5]): general path: ") for line in lines)


@pytest.mark.skipif(not is_native_available(), reason="this installation was built without the native engine")
def test_each_call_says_its_path_and_why():
    """One line for each call that differs, and how often each came at the end."""
    lines = _log_of("native-threads", FERRODIST_EXPLAIN_CALLS="1")
    unusual = "its arguments have no fast path (dims, sizes, overlaps), or are wrong"
    expected = [
        "allreduce(float32[4, 4]): fast path",
        "allreduce(float32[4, 4]): general path: a tensor is not contiguous",
        "allreduce(float32[2]): general path: a tensor requires grad",
        f"all_gather(float32[4, 4]): general path: {unusual}",
        "broadcast(complex64[2]): general path: a tensor is complex64",
        "async_allreduce(float32[2]): fast path",
        "all_gather_object(2 bytes): fast path",
        "all_to_all(float32[1]): fast path",
        "async_allreduce(float32[3]): general path: it is inside coalesce()",
        "gather(float32[1]): fast path",
    ]
    assert lines[: len(expected)] == expected
    assert "3 times allreduce(float32[4, 4]): fast path" in lines
    assert "1 times gather(float32[1]): fast path" in lines


def test_other_engines_are_named():
    """Every call of a group without the compiled engine says so."""
    lines = _log_of("simulated", FERRODIST_EXPLAIN_CALLS="1")
    reason = "group 'world', a SimulatedBackend, has no compiled engine, or has ended"
    if is_native_available():
        assert f"allreduce(float32[4, 4]): general path: {reason}" in lines
    assert not any("fast path" in line for line in lines)


def test_without_the_variable_nothing_is_logged():
    """Calls don't pay for the log."""
    assert _log_of("simulated") == []


_ERRORS = """
import torch
import ferrodist as fd
from ferrodist.testing import run_ranks

try:
    fd.allreduce(torch.ones(1))
except fd.GroupClosedError:
    pass

def program(group):
    group.barrier()
    try:
        fd.allreduce(torch.ones(1 + group.rank))
    except fd.CollectiveMismatchError:
        pass

run_ranks(program, 2, backend=%r)
"""


@pytest.mark.skipif(not is_native_available(), reason="this installation was built without the native engine")
def test_errors_are_as_without_the_log():
    """A call without a group raises what it does, and a call that raises is logged."""
    lines = _log_of("native-threads", _ERRORS, FERRODIST_EXPLAIN_CALLS="1")
    assert "allreduce(float32[1]): general path: there is no group" in lines
    assert any(line.endswith("fast path, raised CollectiveMismatchError") for line in lines)
