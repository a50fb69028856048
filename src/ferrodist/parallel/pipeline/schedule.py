"""A schedule as data: for each rank the list of what it does, in its order; and as text, there and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ferrodist.parallel.pipeline.actions import Action

__all__ = ["Schedule"]

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
