"""Agreement where a rank stops in the middle of it."""

from __future__ import annotations

import threading

import pytest
import torch

import ferrodist as fd
from ferrodist.backends.request import BaseRequest
from ferrodist.backends.tags import Channel, channel_of_tag
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
    """When rank 0 can't hand out the calls it has collected, all ranks say in which operation, and to whom."""

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
def test_any_exception_that_leaves_a_collective_is_told(error, leaver, step):
    """Ranks that count on one that has left by an exception raise at once who left, and by what."""

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
