"""Trials that a rank wants, of which the ranks agree at the beginning of a forward that all of them begin.

A trial sends messages, so all ranks must make it at one time, and what makes a rank want one may happen on that rank
alone: other arguments, a copy of the model, a hook. So a rank notes what it wants in a forward; at the beginning of the
next one, where the ranks exchange a message anyway, they send digests of it, and where all are equal they try.
"""

from __future__ import annotations

from typing import Protocol

import xxhash

_MOST_FORWARDS = 16
"""The number of forwards for which a rank waits for the others to want a trial."""


class Trial(Protocol):
    """A trial that a rank wants to make with all others."""

    description: str

    def is_obsolete(self) -> bool:
        """Return whether the trial will never be ready again."""

    def is_ready(self) -> bool:
        """Return whether the trial can be made now."""

    def run(self) -> None:
        """Make the trial; all ranks call this."""

    def give_up(self) -> None:
        """Note that the other ranks don't want it."""


class TrialQueue:
    """The trials that a rank wants."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Trial, int]] = []
        """Trials, and for how many forwards each has waited."""
        self._taken: list[tuple[Trial, int]] = []

    def add(self, trial: Trial) -> None:
        """Add a trial that this rank wants."""
        self._waiting.append((trial, 0))

    def take_ready(self) -> list[Trial]:
        """Take the trials that can be made now; those that aren't made are to be put back by `put_back`."""
        self._taken, waiting = [], self._waiting
        self._waiting = []
        for trial, age in waiting:
            if trial.is_obsolete():
                continue
            (self._taken if trial.is_ready() else self._waiting).append((trial, age))
        return [trial for trial, _ in self._taken]

    def put_back(self) -> None:
        """Put back the trials that were taken, for the ranks did not agree on them."""
        for trial, age in self._taken:
            if age < _MOST_FORWARDS:
                self._waiting.append((trial, age + 1))
            else:
                trial.give_up()


def digest(trials: list[Trial]) -> bytes:
    """16 bytes that are equal on ranks that want the same trials."""
    return xxhash.xxh3_128_digest("\n".join([one.description for one in trials]).encode())
