"""What a rank does for one microbatch in one stage: the words in which schedules are written.

A schedule as data: for each rank the list of what it does, in its order; and as text, there and back.

How the builders of schedules say what a rank does: in turns, whose microbatches are counted for them.
"""

from __future__ import annotations

import enum
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class ActionKind(enum.Enum):
    """What is done. The values are what texts of schedules have."""

    FORWARD = "F"
    BACKWARD = "B"
    """The gradients of a stage's inputs and of its parameters."""

    BACKWARD_INPUT = "I"
    """The gradients of its inputs alone, for which the rank before waits."""

    BACKWARD_WEIGHT = "W"
    """Those of its parameters, later; nobody waits for them."""

    SEND_FORWARD = "SF"
    """The outputs of a stage go to where they are inputs."""

    RECV_FORWARD = "RF"
    """The inputs of a stage come from other ranks; the forward waits for them, not this."""

    SEND_BACKWARD = "SB"
    """The gradients of a stage's inputs go to where those came from."""

    RECV_BACKWARD = "RB"
    """The gradients of a stage's outputs come; the backward waits for them, not this."""

    # Members are equal if they are the same. Enum hashes their names, in Python, for every set and dict of actions.
    __hash__ = object.__hash__

    @property
    def is_forward(self) -> bool:
        """Whether it is a forward, or moves what forwards give."""
        return self.value.endswith("F")

    @property
    def gives_gradients(self) -> bool:
        """Whether it makes the gradients of a stage's inputs, for which the stage before waits."""
        return self is ActionKind.BACKWARD or self is ActionKind.BACKWARD_INPUT

    @property
    def is_compute(self) -> bool:
        """Whether it takes a rank's time; the others begin a transfer."""
        return len(self.value) == 1


_TEXT = re.compile(r"(F|B|I|W|SF|RF|SB|RB)([0-9]+)\.([0-9]+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does; as text ``F2.5`` is the forward of stage 2 for microbatch 5.

    Args:
        kind: What.
        stage: 0-based, of the whole model.
        microbatch: 0-based.
    """

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"

    @classmethod
    def from_text(cls, text: str) -> Action:
        """Read what ``str`` gives.

        Raises:
            ValueError: It is none.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{text!r} is no action: write F2.5 for the forward of stage 2 and microbatch 5; kinds are F, B, I, W,"
                " SF, RF, SB and RB"
            )
        return cls(ActionKind(found[1]), int(found[2]), int(found[3]))


_HEAD = "ferrodist pipeline schedule"


@dataclass(frozen=True)
class Schedule:
    """Who does what when, in a step of a pipeline.

    Args:
        name: For messages: a line, without ``#``.
        stage_ranks: The rank of each stage.
        num_microbatches: How many flow through the stages.
        actions: For each rank what it does, in this order. With sends and receives: see `add_communication`.

    Raises:
        ValueError: The name is no line.
    """

    name: str
    stage_ranks: tuple[int, ...]
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if self.name.partition("#")[0].strip() != self.name or len(self.name.splitlines()) > 1:
            raise ValueError(f"a schedule's name is one line without # or spaces around it, not {self.name!r}")

    @property
    def num_ranks(self) -> int:
        """How many ranks it is for."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """How many stages the model has, on all ranks together."""
        return len(self.stage_ranks)

    @cached_property
    def rank_stages(self) -> tuple[tuple[int, ...], ...]:
        """For each rank its stages, in the order of their numbers."""
        return tuple(
            tuple(stage for stage, of in enumerate(self.stage_ranks) if of == rank) for rank in range(self.num_ranks)
        )

    @cached_property
    def backward_orders(self) -> tuple[tuple[int, ...], ...]:
        """For each stage its microbatches, in the order in which they go backward; none in a schedule for inference."""
        orders: list[list[int]] = [[] for _ in self.stage_ranks]
        for actions in self.actions:
            for action in actions:
                if action.kind.gives_gradients:
                    orders[action.stage].append(action.microbatch)
        return tuple(map(tuple, orders))

    def __str__(self) -> str:
        """The text that `from_text` reads."""
        lines = [
            f"{_HEAD}: {self.name}",
            f"stage ranks: {' '.join(map(str, self.stage_ranks))}",
            f"microbatches: {self.num_microbatches}",
            *(f"rank {rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(self.actions)),
        ]
        return "".join(f"{line}\n" for line in lines)

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Read what ``str`` gives; empty lines, and what follows a ``#``, are left out.

        Raises:
            ValueError: It is none; the line is named.
        """
        lines = [(number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1)]
        fields = [(number, *_field(number, line)) for number, line in lines if line]
        wanted = [_HEAD, "stage ranks", "microbatches", *(f"rank {rank}" for rank in range(len(fields) - 3))]
        for (number, key, _), expected in zip(fields, wanted, strict=False):
            if key != expected:
                raise ValueError(f"line {number} of a schedule is {key!r} where {expected!r} comes next")
        if len(fields) < len(wanted) or len(fields) < 4:
            raise ValueError(
                f"a schedule has a line for each of: {', '.join(wanted[:3])}, rank 0, ..., and not {text!r}"
            )
        name, ranks, count = ((number, value) for number, _, value in fields[:3])
        return cls(
            name=name[1],
            stage_ranks=tuple(_number(ranks[0], word) for word in ranks[1].split()),
            num_microbatches=_number(*count),
            actions=tuple(tuple(_action(number, word) for word in value.split()) for number, _, value in fields[3:]),
        )


def _field(number: int, line: str) -> tuple[str, str]:
    key, colon, value = line.partition(":")
    if not colon:
        raise ValueError(f"line {number} of a schedule has no colon: {line!r}")
    return " ".join(key.split()), value.strip()


def _number(number: int, word: str) -> int:
    if not (word.isascii() and word.isdigit()):
        raise ValueError(f"line {number} of a schedule has {word!r} where a number belongs")
    return int(word)


def _action(number: int, word: str) -> Action:
    try:
        return Action.from_text(word)
    except ValueError as error:
        raise ValueError(f"line {number} of a schedule: {error}") from None


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
class Slot:
    """An action but for its microbatch, which is the next that this kind has not had in this stage.

    Args:
        kind: A compute action.
        place: Of the stage among its rank's, in the order of their numbers: 0 is the rank's first.
    """

    kind: ActionKind
    place: int


def repeat(text: str, times: int) -> list[Slot]:
    """Some turns, again and again.

    Args:
        text: Kinds, each with the place of its stage: ``F1 I1 W1`` is a forward and both halves of a backward in the
            rank's second stage.
        times: How often.
    """
    assert times >= 0, f"{text} has {times} times"
    return [Slot(ActionKind(word[0]), int(word[1:])) for word in text.split()] * times


def actions_of_turns(turns: Sequence[Slot], stages: Sequence[int], num_microbatches: int) -> tuple[Action, ...]:
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
