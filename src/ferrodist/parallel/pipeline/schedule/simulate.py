"""Simulation of a schedule without a model: when each rank computes, and which ranks wait forever."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ferrodist.parallel.pipeline.schedule.lowering import Dependencies

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.parallel.pipeline.schedule.ir import Action, Schedule


@dataclass(frozen=True, slots=True)
class Span:
    """The time of a compute action."""

    action: Action
    start: float
    stop: float


def simulate(
    schedule: Schedule, cost: Callable[[Action], float]
) -> tuple[tuple[tuple[Span, ...], ...], dict[int, tuple[Action, Action]]]:
    """Simulate a schedule with sends and receives: ranks run actions in order, each when its dependencies are done.

    Sends and receives block no rank. The result does not depend on the order in which ranks are visited, since no
    action can take away another's data. ``cost`` is that of a compute action, or of a send until its data have arrived.

    Returns the ranks' spans; and for each rank that waits forever its next action, and the one that it waits for.
    """
    dependencies = Dependencies(schedule)
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    positions = [0] * schedule.num_ranks
    clocks = [0.0] * schedule.num_ranks
    done_at: dict[Action, float] = {}
    blocked: dict[int, tuple[Action, Action]] = {}
    waiting_ranks: defaultdict[Action, list[int]] = defaultdict(list)
    ready = list(range(schedule.num_ranks))
    while ready:
        rank = ready.pop()
        blocked.pop(rank, None)
        for action in schedule.actions[rank][positions[rank] :]:
            needs = dependencies.of(action)
            missing = next((need for need in needs if need not in done_at), None)
            if missing is not None:
                blocked[rank] = (action, missing)
                waiting_ranks[missing].append(rank)
                break
            start = max([clocks[rank], *(done_at[need] for need in needs)])
            done_at[action] = start + cost(action)
            if action.kind.is_compute:
                clocks[rank] = done_at[action]
                spans[rank].append(Span(action, start, done_at[action]))
            positions[rank] += 1
            ready += waiting_ranks.pop(action, [])
    return tuple(map(tuple, spans)), blocked
