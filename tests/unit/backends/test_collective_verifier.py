"""Agreement where a rank stops in the middle of it."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

import ferrodist as fd
from ferrodist.backends.delegating_backend import DelegatingBackend
from ferrodist.backends.request import BaseRequest
from ferrodist.backends.signature import CollectiveSignature
from ferrodist.backends.tags import Channel, channel_of_tag
from ferrodist.backends.verification import CallAuthenticator
from ferrodist.testing import run_ranks


class _UntakenSend(BaseRequest):
    """A send that nobody receives."""

    def cancel(self):
        return True


class _HubWithoutTakers(fd.SimulatedBackend):
    """What rank 0 sends is not received."""

    sent = threading.Semaphore(0)  # by the others, to rank 0

    def isend(self, data, dst, *, tag=0):
        if self.rank == 0:
            return _UntakenSend(dst)
        request = super().isend(data, dst, tag=tag)
        self.sent.release()
        return request


def test_ranks_that_do_not_take_the_answer_are_named() -> None:
    """If rank 0 can't send the table of calls, all ranks name the operation and the ranks that did not take it."""

    def on_rank(group):
        if group.rank == 0:
            assert all(group.sent.acquire(timeout=20) for _ in range(2))
        with pytest.raises(fd.DistributedTimeoutError) as caught:
            group.barrier(timeout=0.05 if group.rank == 0 else 20)
        assert caught.value.ranks == (1, 2)
        return caught.value.message

    messages = run_ranks(on_rank, 3, backend=_HubWithoutTakers.create_group)
    assert len(set(messages)) == 1
    assert messages[0].startswith(
        "barrier() on group 'world', operation 0: all ranks have called it, but ranks 1, 2 did not take rank 0's"
        " answer, after 0."
    )
    assert "of 0.05 s allowed" in messages[0]


class _OutOfThinAirError(Exception):
    """What no collective raises of its own."""


@pytest.mark.parametrize("error", [KeyboardInterrupt(), _OutOfThinAirError("no memory"), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("leaver", [0, 1, 2])
@pytest.mark.parametrize("step", ["agreement", "data"])
def test_any_exception_that_leaves_a_collective_is_reported(error, leaver, step):
    """Ranks that wait for one that has left by an exception raise at once, and name the rank and its exception."""

    def program(group):
        fd.barrier()
        if group.rank == leaver:
            transfer = group.irecv

            def fail(buffer, *args, tag):
                channel = channel_of_tag(tag)
                if channel == (Channel.CALL if step == "agreement" else Channel.DATA):
                    raise error
                return transfer(buffer, *args, tag=tag)

            group.irecv = fail
            with pytest.raises(type(error)):
                fd.allreduce(torch.ones(10_000), timeout=60)
            group.irecv = transfer
        else:
            with pytest.raises(fd.GroupAbortedError, match=rf"rank {leaver} left .*{type(error).__name__}") as caught:
                fd.allreduce(torch.ones(10_000), timeout=60)
            assert caught.value.ranks == (leaver,)

    run_ranks(program, 3, timeout=20)


class _JustInTime:
    """A request that ends between the end of a wait for it and the look whether it has ended."""

    def __init__(self, request):
        self._request = request

    def wait(self, timeout=None):
        if timeout == 0:
            return self._request.wait(0)
        self._request.wait(20)
        raise fd.DistributedTimeoutError("not in time")

    def __getattr__(self, name):
        return getattr(self._request, name)


class _AnsweredJustInTime(fd.SimulatedBackend):
    """Ranks whose answers from rank 0 come when a long wait has ended."""

    def irecv(self, buffer, src, *, tag=0):
        request = super().irecv(buffer, src, tag=tag)
        return _JustInTime(request) if self.rank and channel_of_tag(tag) == Channel.CALL else request


def test_an_answer_at_the_moment_of_a_warning_counts():
    """Else a group would end by a timeout of 30 seconds that nobody has set, though all ranks had called."""
    assert run_ranks(lambda group: group.barrier(timeout=60), 2, backend=_AnsweredJustInTime.create_group) == [None] * 2


class _Tapped(fd.SimulatedBackend):
    """Ranks of a group with a key, whose messages somebody changes on their way."""

    verification_key = b"k" * 32
    changes = ()
    """For each change the ranks it is between, and the byte."""

    def isend(self, data, dst, *, tag=0):
        changed = bytearray(data)
        for source, target, place in self.changes:
            if (source, target) == (self.rank, dst) and len(changed) > 100:
                changed[place] ^= 1
        return super().isend(changed, dst, tag=tag)


@pytest.mark.parametrize("place", [0, 100, -1], ids=["operation", "payload", "tag"])
@pytest.mark.parametrize(("source", "target", "what"), [(2, 0, "the call of rank 2"), (0, 1, "the list of all")])
def test_altered_messages_are_errors(monkeypatch, source, target, what, place):
    """A call or a table that is altered on its way is an error on all ranks, and never another result."""
    monkeypatch.setattr(_Tapped, "changes", [(source, target, place)])

    def on_rank(group):
        with pytest.raises(fd.DistributedError) as caught:  # noqa: PT012 - it fails in one of the two
            group.verifier.verify(CollectiveSignature(operation="sizes", payload=bytes([group.rank])), 20)
            group.barrier(timeout=20)  # who has got the list as it was said learns of it here
        return caught.value

    errors = run_ranks(on_rank, 3, backend=_Tapped.create_group)
    assert {type(error) for error in errors} == {fd.AuthenticationError}
    assert all(what in error.message and "altered" in error.message for error in errors)


class _Controlled(DelegatingBackend):
    def close(self, timeout=None):
        self.control.close(timeout)


@pytest.mark.parametrize("in_subgroup", [False, True])
def test_groups_over_a_control_group_are_protected_as_it_is(monkeypatch, in_subgroup):
    """Messages of hybrid, NCCL and UCC groups, and of their sub-groups, are authenticated like the control group's."""
    monkeypatch.setattr(_Tapped, "changes", [(1, 0, 0)])

    def on_rank(control):
        group = _Controlled(control)
        with pytest.raises(fd.AuthenticationError, match="the call of rank 1 was altered"):
            (fd.new_group(group=group) if in_subgroup else group).verifier.verify(
                CollectiveSignature(operation="sizes"), 20
            )

    run_ranks(on_rank, 2, backend=_Tapped.create_group)


def test_tags_depend_on_group_and_sequence():
    """The tag of a call in one group, or at one position, is invalid in another: no message can be replayed."""
    call = CollectiveSignature(operation="barrier").encode()
    places = itertools.product((0, 1 << 64, 7), (0, 1), (0, 1))
    assert (
        len({CallAuthenticator(b"k", group, position).seal_call(call, rank) for group, position, rank in places}) == 12
    )
    assert CallAuthenticator(b"", 0, 0).seal_call(call, 0) == call


def test_a_group_with_a_key_agrees():
    """Payloads of all ranks arrive with tags as they do without."""

    def on_rank(group):
        sub = fd.SubBackend(group, [0, 2]) if group.rank != 1 else None
        said = [
            group.verifier.verify(CollectiveSignature(operation="sizes", payload=bytes([group.rank])), 20)
            for _ in range(3)
        ]
        if sub is not None:
            assert sub.verifier.verify(CollectiveSignature(operation="sizes", payload=b"x"), 20) == [b"x", b"x"]
        return said

    assert run_ranks(on_rank, 3, backend=_Tapped.create_group) == [[[b"\0", b"\1", b"\2"]] * 3] * 3
