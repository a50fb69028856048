"""What a rank does for one microbatch in one stage: the words in which schedules are written."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

__all__ = ["Action", "ActionKind"]


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
