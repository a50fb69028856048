"""The scope of a step: each rank gets an error, wherever it waits."""

from types import SimpleNamespace

import pytest
from torch import nn

from ferrodist.collectives.barrier import barrier
from ferrodist.deadline import Deadline
from ferrodist.errors import CollectiveMismatchError, DistributedTimeoutError, PipelineError
from ferrodist.parallel.pipeline.pipeline import StepScope
from ferrodist.parallel.pipeline.schedule.ir import Action
from ferrodist.parallel.pipeline.tied_parameters import TiedParameters
from ferrodist.testing import run_ranks


def fail_on_rank_0(error, current_action, *, waits_for_shared):
    """What rank 0 raises where it fails and rank 1 where it waits, in two steps; each forgets when all are told."""

    def program(group):
        events = []
        shared = TiedParameters([[(0, "weight"), (1, "weight")]], {group.rank: nn.Linear(2, 2)}, [0, 1])
        groups, raised = [], []
        reset = lambda: events.append(groups[-1].failure is not None)  # noqa: E731
        running = SimpleNamespace(current_action=None, reset=reset, drop_unsynced=lambda: None)
        own = StepScope(group, running, shared)

        def step():
            with own.run_together(5) as (inner, limit):
                groups.append(inner)
                if group.rank == 0:
                    running.current_action = current_action
                    raise error
                if waits_for_shared:
                    shared.broadcast_values(Deadline(limit))
                barrier(inner, timeout=limit)

        for _ in range(2):
            with pytest.raises(BaseException) as caught:
                step()
            raised.append((type(caught.value), str(caught.value)))
        assert raised[0] == raised[1]
        assert events == [True, True], "whoever waits is told before anything is given up"
        return raised[0]

    return run_ranks(program, 2)


@pytest.mark.parametrize("waits_for_shared", [False, True])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("no"), (PipelineError, "rank 0 could not take part in a step: RuntimeError: no")),
        (CollectiveMismatchError("two"), (CollectiveMismatchError, "two")),
        (DistributedTimeoutError("late"), (DistributedTimeoutError, "late")),
        (PipelineError("inner"), (PipelineError, "inner")),
    ],
)
def test_errors_outside_of_stages(error, told, waits_for_shared):
    """The failing rank raises its error, and waiting ranks get it too, also those that wait for shared parameters."""
    found = fail_on_rank_0(error, None, waits_for_shared=waits_for_shared)
    assert found == [(type(error), str(error)), told]


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt("no")])
def test_errors_of_stages(error):
    """All ranks raise with the stage, but an interrupt stays one."""
    kind = type(error).__name__
    told = PipelineError, f"stage 1 failed in the backward of microbatch 2, on rank 0: {kind}: no"
    found = fail_on_rank_0(error, Action.from_text("I1.2"), waits_for_shared=False)
    assert found == [told if isinstance(error, Exception) else (KeyboardInterrupt, "no"), told]
