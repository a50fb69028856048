"""How the builders of schedules say what a rank does: in turns, whose microbatches are counted for them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ferrodist.parallel.pipeline.actions import Action, ActionKind

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PipelineSize", "Turn", "actions_of_turns", "phase"]


@dataclass(frozen=True, slots=True)
class PipelineSize:
    """What a schedule is built for.

    Args:
        num_ranks: At least 1.
        num_microbatches: At least 1.
        stages_per_rank: At least 1, equal on all ranks.
    """

    num_ranks: int
    num_microbatches: int
    stages_per_rank: int


@dataclass(frozen=True, slots=True)
class Turn:
    """An action but for its microbatch, which is the next that this kind has not had in this stage.

    Args:
        kind: A compute action.
        place: Of the stage among its rank's, in the order of their numbers: 0 is the rank's first.
    """

    kind: ActionKind
    place: int


def phase(text: str, times: int) -> list[Turn]:
    """Some turns, again and again.

    Args:
        text: Kinds, each with the place of its stage: ``F1 I1 W1`` is a forward and both halves of a backward in the
            rank's second stage.
        times: How often.
    """
    assert times >= 0, f"{text} has {times} times"
    return [Turn(ActionKind(word[0]), int(word[1:])) for word in text.split()] * times


def actions_of_turns(turns: Sequence[Turn], stages: Sequence[int], num_microbatches: int) -> tuple[Action, ...]:
    """Give a rank's turns their microbatches: in each stage 0, 1, 2, ... for every kind.

    [Note: fewer microbatches] Turns may be for more microbatches than there are; those for others are left out. What
    remains keeps its order and waits for nothing that was left out, since microbatches do not depend on each other. So
    a schedule that runs to its end still does with some microbatches taken from it, and it ends no later and needs no
    more memory.

    Args:
        turns: In the rank's order.
        stages: The rank's stages, in the order of their numbers.
        num_microbatches: How many there are.
    """
    counts: defaultdict[tuple[ActionKind, int], int] = defaultdict(int)
    actions = []
    for turn in turns:
        # A whole backward and the half that goes on to the rank before are one count: a microbatch has either.
        counted = ActionKind.BACKWARD_INPUT if turn.kind is ActionKind.BACKWARD else turn.kind
        microbatch = counts[counted, turn.place]
        counts[counted, turn.place] += 1
        if turn.kind is ActionKind.BACKWARD:
            counts[ActionKind.BACKWARD_WEIGHT, turn.place] += 1
        if microbatch < num_microbatches:
            actions.append(Action(turn.kind, stages[turn.place], microbatch))
    return tuple(actions)
