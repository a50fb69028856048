"""Warnings about late ranks, and the default timeout that they come before."""

import logging
import re
import threading

import pytest
import torch

import ferrodist as fd
from ferrodist import deadline
from ferrodist.backends.request import wait_all
from ferrodist.backends.stragglers import is_first_waiting_rank
from ferrodist.backends.tags import Channel, channel_tag
from ferrodist.collectives.host_p2p import receive_into, wait_for
from ferrodist.collectives.tensor_protocol import TensorHeader, payload_ids, start_payload
from ferrodist.deadline import Deadline
from ferrodist.rendezvous import MemoryStore
from ferrodist.rendezvous.membership import JoinRequest
from ferrodist.rendezvous.roll_call import await_all, claim_rank, note_rejection
from ferrodist.testing import run_ranks

_PATIENCE = 60.0


@pytest.fixture
def warned(monkeypatch):
    """What is warned of, soon, and a function that waits until one of the warnings has some words in it."""
    monkeypatch.setattr(deadline, "LONG_WAIT_SECONDS", 0.05)
    found: list[str] = []
    changed = threading.Condition()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with changed:
                found.append(record.getMessage())
                changed.notify_all()

    def until(words: str) -> bool:
        with changed:
            return changed.wait_for(lambda: any(words in text for text in found), _PATIENCE)

    handler = Handler()
    logging.getLogger("ferrodist").addHandler(handler)
    yield found, until
    logging.getLogger("ferrodist").removeHandler(handler)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("backend", ["simulated", "tcp-threads", "native-threads", "gloo-threads"])
def test_late_ranks_are_named_before_the_deadline(warned, backend, late, is_async):
    """A rank that prepares data is named, with the call, while the others wait; nothing fails."""
    found, until = warned

    def program(group):
        fd.barrier()
        if group.rank == late:
            assert until("allreduce(sum, float32[3])")
        total = fd.async_allreduce(torch.ones(3)).wait() if is_async else fd.allreduce(torch.ones(3))
        fd.barrier()
        return total.tolist()

    assert run_ranks(program, 3, backend=backend) == [[3.0] * 3] * 3
    about = [text for text in found if text.startswith("allreduce(sum, float32[3]) on group 'world', operation 1: ")]
    # A rank that this machine keeps from running may be late, too.
    named = [re.search(r": ranks? ([\d, ]+) ha(?:s|ve) not called it yet, and rank ", text) for text in about]
    assert about
    assert all(match and str(late) in match[1].split(", ") for match in named)


@pytest.mark.parametrize("backend", ["simulated", "tcp-threads", "native-threads", "gloo-threads"])
def test_late_ranks_of_calls_without_tensors_are_named_with_the_call(warned, backend):
    """A collective of objects has its name in the warning; the engine keeps it apart from what it knows of tensors."""
    found, until = warned

    def program(group):
        fd.barrier()
        if group.rank == 1:
            assert until("all_gather_object()")
        return fd.all_gather_object(group.rank)

    assert run_ranks(program, 2, backend=backend) == [[0, 1]] * 2
    assert any(text.startswith("all_gather_object() on group 'world', operation 1: ") for text in found)


def test_questions_leave_nothing_behind(warned):
    """A rank 0 that comes late takes in what the others have asked meanwhile."""
    _, until = warned

    def program(group):
        fd.barrier()
        if group.rank == 0:
            assert until("operation 1: ")
        fd.barrier()
        return [] if group.rank else list(group._mailbox._messages)

    assert run_ranks(program, 3)[0] == []


LARGE = torch.arange(300_000.0)

MESSAGES = {
    "recv": (lambda: fd.recv((3,), torch.float32, 1).sum(), lambda: fd.send(torch.ones(3), 0)),
    "recv_into": (lambda: fd.recv_into(torch.empty(3), 1), lambda: fd.send(torch.ones(3), 0)),
    "send": (lambda: fd.send(LARGE, 1), lambda: fd.recv(None, None, 0).sum() - LARGE.sum()),
    "sendrecv": (lambda: fd.sendrecv(torch.ones(3), 1, None, 1), lambda: fd.sendrecv(torch.ones(3), 0, None, 0)),
    "batch": (
        lambda: fd.batch([fd.Send(LARGE, 1), fd.Recv(torch.empty(2), 1)]),
        lambda: fd.batch([fd.Send(torch.ones(2), 0), fd.Recv(LARGE.clone(), 0)]),
    ),
}


@pytest.mark.parametrize("kind", MESSAGES)
@pytest.mark.parametrize("backend", ["simulated", "tcp-threads", "native-threads", "gloo-threads"])
def test_the_other_side_of_a_message_is_named(warned, backend, kind):
    """Who waits for a message, or for its receiver, is told so once; it comes all the same."""
    found, until = warned

    def program(group):
        fd.barrier()
        if group.rank == 1:
            assert until("rank 1 has not made the matching call yet")
        result = MESSAGES[kind][group.rank]()
        fd.barrier()
        return result if group.rank else None

    results = run_ranks(program, 2, backend=backend)
    if kind == "send":
        assert results[1] == 0
    about = [text for text in found if "the matching call" in text and "and rank 0 waits" in text]
    assert len(about) == 1
    assert about[0].startswith(
        {"batch": "send to rank 1, recv from rank 1", "sendrecv": "sendrecv with"}.get(kind, kind)
    )
    or_taken = ", or not taken all that is sent" if kind in ("send", "batch") else ""
    words = f"rank 1 has not made the matching call yet{or_taken}, and rank 0 waits for that, after 0."
    assert f" on group 'world': {words}" in about[0]


def test_who_has_begun_to_send_is_not_late(warned):
    """A receive says nothing while elements are on their way, however long that takes: their sender has made its call.

    The elements are held back here by a sender that sends their head alone first.
    """
    found, _ = warned

    def program(group):
        if group.rank == 1:
            number = next(payload_ids(group))
            head = TensorHeader(number, LARGE.dtype, tuple(LARGE.shape)).pack()
            group.send(head, 0, tag=channel_tag(Channel.TENSOR, 0))
            fd.recv(None, None, 0, tag=1)
            wait_all([start_payload(group, LARGE, 0, number)], Deadline(_PATIENCE))
            return True
        receive = receive_into(group, fd.Recv(torch.empty_like(LARGE), 1))
        deadline = Deadline(_PATIENCE)
        while not receive.is_coming and not deadline.expired:
            receive.ended_within(0.001)
        with pytest.raises(fd.DistributedTimeoutError):
            wait_for([receive], Deadline(0.2), group, "recv from rank 1")
        fd.send(torch.ones(1), 1, tag=1)
        return torch.equal(fd.recv(None, None, 1), LARGE)

    assert run_ranks(program, 2) == [True, True]
    assert [text for text in found if text.startswith("recv from rank 1")] == []


def test_who_receives_from_any_rank_waits_for_none(warned):
    """A server that has nothing to do is not warned of its clients."""
    found, _ = warned

    def program(group):
        if group.rank == 0:
            with pytest.raises(fd.DistributedTimeoutError):
                fd.recv(None, None, fd.ANY_SOURCE, timeout=0.3)

    run_ranks(program, 2)
    assert [text for text in found if "matching call" in text] == []


def test_one_rank_speaks_for_all():
    """The first rank that is not late itself."""
    assert [is_first_waiting_rank(rank, (0, 2)) for rank in (1, 3)] == [True, False]
    assert [is_first_waiting_rank(rank, (2,)) for rank in (0, 1, 3)] == [True, False, False]


def a_request(rank: int, world_size: int, deadline: Deadline) -> JoinRequest:
    return JoinRequest(rank=rank, world_size=world_size, local_rank=None, job="j", secret=b"", deadline=deadline)


def test_ranks_that_do_not_come_are_named(warned):
    """While the ranks meet, too."""
    found, until = warned
    store = MemoryStore()
    requests = [a_request(rank, 2, Deadline(_PATIENCE)) for rank in range(2)]
    claim_rank(store, requests[0], "here", "")
    waiting = threading.Thread(target=await_all, args=[store, requests[0], "here"])
    waiting.start()
    assert until("has not come yet")
    claim_rank(store, requests[1], "here", "")
    await_all(store, requests[1], "here")
    waiting.join(_PATIENCE)
    assert [text.partition(", after")[0] for text in found] == ["here: rank 1 of 2 has not come yet"]
    assert "Turned away" not in found[0]


def test_a_rank_that_claimed_its_number_and_stays_away_is_spoken_of(warned):
    """Nobody knows which one it is; that it is one of those that have come already, they do."""
    found, until = warned
    store = MemoryStore()
    requests = [a_request(rank, 2, Deadline(_PATIENCE)) for rank in range(2)]
    for request in requests:
        claim_rank(store, request, "here", "")
    waiting = threading.Thread(target=await_all, args=[store, requests[0], "here"])
    waiting.start()
    assert until("not all of them went on")
    await_all(store, requests[1], "here")
    waiting.join(_PATIENCE)
    assert found[0].startswith("here: all 2 ranks have claimed their numbers, and not all of them went on, after")


def test_ranks_that_were_turned_away_are_named_with_the_reason(warned):
    """Else rank 0 would wait half an hour for a rank with another secret, and its warning would not say why."""
    found, until = warned
    store = MemoryStore()
    note_rejection(store, "127.0.0.1:5: wrong job secret")
    requests = [a_request(rank, 2, Deadline(_PATIENCE)) for rank in range(2)]
    claim_rank(store, requests[0], "here", "")
    waiting = threading.Thread(target=await_all, args=[store, requests[0], "here"])
    waiting.start()
    assert until("Turned away")
    claim_rank(store, requests[1], "here", "")
    await_all(store, requests[1], "here")
    waiting.join(_PATIENCE)
    assert found[0].endswith(". Turned away: 127.0.0.1:5: wrong job secret")
