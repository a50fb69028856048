"""The executor of a rank's actions: waits, prefetched receives, and cancellation."""

import pytest
import torch
from torch import nn

from ferrodist.errors import DistributedTimeoutError
from ferrodist.parallel.pipeline import schedule_executor
from ferrodist.parallel.pipeline.schedule.ir import Action
from ferrodist.parallel.pipeline.schedule_executor import ScheduleExecutor, StepData
from ferrodist.parallel.pipeline.stage import Stage, find_edges
from ferrodist.testing import run_ranks

LARGE, SMALL = torch.arange(100_000.0), torch.ones(3)
"""A tensor that travels out-of-band, and one in-band."""


def make(group):
    """An executor of one of two stages that pass on what they are given."""
    return ScheduleExecutor({group.rank: Stage(nn.Identity(), 0)}, [0, 1], find_edges(2, {}), 8)


@torch.no_grad()
def run(own, text, group, inputs=(), timeout=5):
    """Run the actions of a text; returns the last stage's result for each microbatch."""
    taken = {}

    def take(microbatch, value):
        taken[microbatch] = value
        return []

    own.run(map(Action.from_text, text.split()), StepData(inputs, take, {}), group, timeout)
    return taken


def test_sends_are_done_when_run_returns():
    """A rank that has sent something large returns when it was received, or waits until the timeout."""

    def program(group):
        if group.rank == 0:
            with pytest.raises(DistributedTimeoutError):
                run(make(group), "F0.0 SF0.0", group, [LARGE], timeout=0.2)
        group.barrier()

    run_ranks(program, 2, backend="native")


def test_reset_cancels_receives():
    """A prefetched receive takes nothing any more."""

    def program(group):
        own = make(group)
        if group.rank == 0:
            run(own, "F0.0 SF0.0", group, [LARGE])
            group.barrier()
            run(own, "F0.1 SF0.1", group, [None, LARGE + 1])
            return
        run(own, "RF1.0 F1.0 RF1.1", group)
        own.reset()
        group.barrier()
        assert torch.equal(run(own, "RF1.1 F1.1", group)[1], LARGE + 1)

    run_ranks(program, 2)


def test_large_values_are_prefetched(monkeypatch):
    """If the last value on an edge was large; small ones arrive anyway."""
    begun = []

    class Noted(schedule_executor.PendingRecv):
        def __init__(self, *args, prefetch, **more):
            begun.append(prefetch)
            super().__init__(*args, prefetch=prefetch, **more)

    monkeypatch.setattr(schedule_executor, "PendingRecv", Noted)

    def program(group):
        sent = [SMALL, LARGE, LARGE, SMALL, SMALL]
        if group.rank == 0:
            run(make(group), " ".join(f"F0.{number} SF0.{number}" for number in range(5)), group, sent)
            return
        found = run(make(group), " ".join(f"RF1.{number} F1.{number}" for number in range(5)), group)
        assert all(torch.equal(found[number], each) for number, each in enumerate(sent))
        assert begun == [False, False, True, True, False]

    run_ranks(program, 2)
