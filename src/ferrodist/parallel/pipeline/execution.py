"""A schedule run without a model: when each action begins and ends, and where ranks wait forever."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ferrodist.parallel.pipeline.dependencies import Dependencies

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferrodist.parallel.pipeline.actions import Action
    from ferrodist.parallel.pipeline.schedule import Schedule

__all__ = ["Execution", "Span", "Wait", "execute"]


@dataclass(frozen=True, slots=True)
class Span:
    """When a rank computes something.

    Args:
        action: What.
        start: When it begins, in the unit of the costs; 0 is the beginning of the step.
        stop: When it ends.
    """

    action: Action
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that got no further.

    Args:
        rank: The rank.
        action: What it was to do next.
        needed: What that waits for.
    """

    rank: int
    action: Action
    needed: Action


@dataclass(frozen=True, slots=True)
class Execution:
    """What became of a schedule.

    Args:
        spans: For each rank its compute actions, in its order.
        waits: The ranks that got stuck, in the order of their numbers; none is the rule.
    """

    spans: tuple[tuple[Span, ...], ...]
    waits: tuple[Wait, ...]


def execute(schedule: Schedule, cost: Callable[[Action], float]) -> Execution:
    """Run a schedule: each rank does its actions in order, and each as soon as what it needs is done.

    Sends and receives block nobody. The result does not depend on the order in which ranks are looked at, for no action
    takes from another what that needs.

    Args:
        schedule: With sends and receives.
        cost: How long a compute action occupies its rank, and how long after a send its data are there.
    """
    dependencies = Dependencies(schedule)
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    positions = [0] * schedule.num_ranks
    clocks = [0.0] * schedule.num_ranks
    done_at: dict[Action, float] = {}
    waits: dict[int, Wait] = {}
    wakes: defaultdict[Action, list[int]] = defaultdict(list)
    ready = list(range(schedule.num_ranks))
    while ready:
        rank = ready.pop()
        waits.pop(rank, None)
        for action in schedule.actions[rank][positions[rank] :]:
            needs = dependencies.of(action)
            missing = next((need for need in needs if need not in done_at), None)
            if missing is not None:
                waits[rank] = Wait(rank, action, missing)
                wakes[missing].append(rank)
                break
            start = max([clocks[rank], *(done_at[need] for need in needs)])
            done_at[action] = start + cost(action)
            if action.kind.is_compute:
                clocks[rank] = done_at[action]
                spans[rank].append(Span(action, start, done_at[action]))
            positions[rank] += 1
            ready += wakes.pop(action, [])
    return Execution(tuple(map(tuple, spans)), tuple(waits[rank] for rank in sorted(waits)))
