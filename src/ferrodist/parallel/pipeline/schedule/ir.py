"""Schedules as data and as text: actions of ranks, and slots, from which builders make them."""

from __future__ import annotations

import enum
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class ActionKind(enum.Enum):
    """A kind of action; the values are those of schedules' texts."""

    FORWARD = "F"
    BACKWARD = "B"
    """The gradients of a stage's inputs and of its parameters."""
    BACKWARD_INPUT = "I"
    """The gradients of its inputs alone, for which the previous rank waits."""
    BACKWARD_WEIGHT = "W"
    """The gradients of its parameters, later; nobody waits for them."""
    SEND_FORWARD = "SF"
    """Send the outputs of a stage."""
    RECV_FORWARD = "RF"
    """Prepare to receive the inputs of a stage, and start if they may be large; the forward waits for them."""
    SEND_BACKWARD = "SB"
    """Send the gradients of a stage's inputs."""
    RECV_BACKWARD = "RB"
    """Prepare to receive the gradients of a stage's outputs, likewise; the backward waits for them."""

    # Members are compared by identity. Enum would hash their names, in Python, for every set and dict of actions.
    __hash__ = object.__hash__

    @property
    def is_forward(self) -> bool:
        """True if it is a forward, or a transfer of forwards' results."""
        return self.value.endswith("F")

    @property
    def gives_gradients(self) -> bool:
        """True if it computes the gradients of a stage's inputs, for which the previous stage waits."""
        return self is ActionKind.BACKWARD or self is ActionKind.BACKWARD_INPUT

    @property
    def is_compute(self) -> bool:
        """True if it takes a rank's time; the others are transfers."""
        return len(self.value) == 1


_TEXT = re.compile(r"(F|B|I|W|SF|RF|SB|RB)([0-9]+)\.([0-9]+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank; the text ``F2.5`` is the forward of stage 2 for microbatch 5.

    Args:
        kind: The kind.
        stage: Index of the stage in the whole model, from 0.
        microbatch: Index of the microbatch, from 0.
    """

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"

    @classmethod
    def from_text(cls, text: str) -> Action:
        """Parse the text of ``str``.

        Raises:
            ValueError: The text is not an action.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{text!r} is not an action: write F2.5 for the forward of stage 2 and microbatch 5; kinds are F, B,"
                " I, W, SF, RF, SB and RB"
            )
        return cls(ActionKind(found[1]), int(found[2]), int(found[3]))


_HEADER = "ferrodist pipeline schedule"


@dataclass(frozen=True)
class Schedule:
    """The actions of all ranks in a step of a pipeline.

    Args:
        name: Name in messages: one line, without ``#``.
        stage_ranks: The rank of each stage.
        num_microbatches: Number of microbatches of a step.
        actions: The actions of each rank, in order. With sends and receives: see `add_communication`.

    Raises:
        ValueError: The name is not one line.
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
        """Number of ranks."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Number of stages of the model."""
        return len(self.stage_ranks)

    @cached_property
    def rank_stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in ascending order."""
        return tuple(
            tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)
            for rank in range(self.num_ranks)
        )

    @cached_property
    def backward_orders(self) -> tuple[tuple[int, ...], ...]:
        """The microbatches of each stage, in the order of their backwards; empty in a schedule for inference."""
        orders: list[list[int]] = [[] for _ in self.stage_ranks]
        for actions in self.actions:
            for action in actions:
                if action.kind.gives_gradients:
                    orders[action.stage].append(action.microbatch)
        return tuple(map(tuple, orders))

    def __str__(self) -> str:
        """The text for `from_text`."""
        lines = [
            f"{_HEADER}: {self.name}",
            f"stage ranks: {' '.join(map(str, self.stage_ranks))}",
            f"microbatches: {self.num_microbatches}",
            *(f"rank {rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(self.actions)),
        ]
        return "".join(f"{line}\n" for line in lines)

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Parse the text of ``str``; empty lines, and text behind a ``#``, are ignored.

        Raises:
            ValueError: The text is not a schedule; the line is named.
        """
        lines = [(number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1)]
        fields = [(number, *_parse_field(number, line)) for number, line in lines if line]
        wanted = [_HEADER, "stage ranks", "microbatches", *(f"rank {rank}" for rank in range(len(fields) - 3))]
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
            stage_ranks=tuple(_parse_int(ranks[0], word) for word in ranks[1].split()),
            num_microbatches=_parse_int(*count),
            actions=tuple(
                tuple(_parse_action(number, word) for word in value.split()) for number, _, value in fields[3:]
            ),
        )


def _parse_field(number: int, line: str) -> tuple[str, str]:
    key, colon, value = line.partition(":")
    if not colon:
        raise ValueError(f"line {number} of a schedule has no colon: {line!r}")
    return " ".join(key.split()), value.strip()


def _parse_int(number: int, word: str) -> int:
    if not (word.isascii() and word.isdigit()):
        raise ValueError(f"line {number} of a schedule has {word!r} where a number belongs")
    return int(word)


def _parse_action(number: int, word: str) -> Action:
    try:
        return Action.from_text(word)
    except ValueError as error:
        raise ValueError(f"line {number} of a schedule: {error}") from None


class PipelineSize(NamedTuple):
    """The numbers that a schedule is built for, each at least 1."""

    num_ranks: int
    num_microbatches: int
    stages_per_rank: int


class Slot(NamedTuple):
    """A compute action of a rank's local stage; its microbatch is the next of its kind there."""

    kind: ActionKind
    local_stage: int


def parse_slots(text: str, times: int) -> list[Slot]:
    """Parse slots, each a kind and a local stage as in ``"F0 B1"``, and repeat the list."""
    assert times >= 0, f"{text} has {times} times"
    return [Slot(ActionKind(word[0]), int(word[1:])) for word in text.split()] * times


def assign_microbatches(slots: Sequence[Slot], stages: Sequence[int], num_microbatches: int) -> tuple[Action, ...]:
    """Assign microbatches to a rank's slots: in each stage 0, 1, 2, ... for every kind.

    [Note: fewer microbatches]
    Slots may be for more microbatches than exist; those for others are left out. The rest keeps its order and waits for
    none of the removed actions, since microbatches do not depend on each other. So a schedule that ends still does with
    some microbatches removed, no later and with no more memory.
    """
    counts: defaultdict[tuple[ActionKind, int], int] = defaultdict(int)
    actions = []
    for slot in slots:
        # A whole backward and its input half share a count: a microbatch has either.
        counted = ActionKind.BACKWARD_INPUT if slot.kind is ActionKind.BACKWARD else slot.kind
        microbatch = counts[counted, slot.local_stage]
        counts[counted, slot.local_stage] += 1
        if slot.kind is ActionKind.BACKWARD:
            counts[ActionKind.BACKWARD_WEIGHT, slot.local_stage] += 1
        if microbatch < num_microbatches:
            actions.append(Action(slot.kind, stages[slot.local_stage], microbatch))
    return tuple(actions)
