"""References that go from one rank to another one, as the owner of what they refer to knows them.

[Note: references that third ranks send]
Rank S sends rank R a reference to an object of rank O. Each message with such references has a number of S's, its
*ticket*, which goes with them. A process of a rank is named by its incarnation; a connection that breaks counts as the
death of each for the other.

    S -> O   REGISTER     these references are about to go to that process of R, with this ticket; O answers
    S -> R   the message; its ticket is in it
    R -> O   CONFIRM      these have come
    R -> O   RELEASE      R has no reference to it any more, of so many that came

What S has registered is a `Registration` at O, and keeps its objects, until one of these takes it over or away; every
one of these names the ticket, so that none takes more than what it means:

- R confirms: its counts at O grow by as much. Notices come in order, so a RELEASE finds what was confirmed before.
- S has not sent it: the rank, or the call, was gone when O answered. S says so: UNREGISTER.
- R dies: O loses it, and with it all that was registered for that process. What is registered for a process that has
  been lost or replaced is refused; S then raises, and sends nothing. For one that O has not met yet the answer waits:
  O gives it when R says MET, as both know then of the connection that the counts belong to.
- S dies before O has answered: nothing was sent, O forgets it.
- S dies after that: only R can tell whether the message came. O asks: SETTLE. From then on R refuses what comes with
  the ticket, and its next CONFIRM says so, behind those of what came before. O forgets what is left. R so has a
  reference that is counted, or a message that it does not take, whose sender is gone.
- S and R lose each other, and both live: S says so to the owners that it has registered R with: LOST, and O asks R.
  Tickets grow, so that what S registers for the next connection is not meant.
- O dies: S can't register, or R holds what refers to nothing; the next process of O knows no such object.

All that R gives back was counted in the connection by which it goes: who tells another rank of counts first looks the
connection up and then the counts, of which those of connections before are none. So nothing is taken off the counts of
another process, nor of another connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ferrodist.rpc.rref import ReferenceId

if TYPE_CHECKING:
    Passage = tuple[int, int]
    """A message with references of third ranks: the rank that sends it, and its ticket."""


class Registration:
    """References in one message from a third rank.

    Args:
        passage: The rank that sends it, and the ticket.
        user: The rank that it goes to, and
        incarnation: which process of it.
        counts: How many references of which objects; those that have come are taken off.
        answer: Takes whether the message may go.

    Attributes:
        must_settle: Whether the user is to say what has come, for no more will.
    """

    def __init__(
        self,
        passage: Passage,
        user: int,
        incarnation: int,
        counts: dict[ReferenceId, int],
        answer: Callable[[Any], None],
    ) -> None:
        self.passage = passage
        self.registrar, self.ticket = passage
        self.user = user
        self.incarnation = incarnation
        self.counts = counts
        self.must_settle = False
        self._answer: Callable[[Any], None] | None = answer

    @property
    def is_answered(self) -> bool:
        """Whether the message may have been sent."""
        return self._answer is None

    def take_answer(self) -> list[Callable[[Any], None]]:
        """What takes the answer, for who gives it; only the first time."""
        found, self._answer = self._answer, None
        return [] if found is None else [found]


class Registrations:
    """All that an owner knows of; whoever uses this sees to it that one thread does at a time."""

    def __init__(self) -> None:
        self._by_passage: dict[Passage, Registration] = {}
        self._totals: dict[ReferenceId, int] = {}

    def add(self, registration: Registration) -> None:
        """Know of one more.

        Raises:
            ValueError: There is one with its ticket.
        """
        if self._by_passage.setdefault(registration.passage, registration) is not registration:
            raise ValueError(f"rank {registration.registrar} has sent ticket {registration.ticket} before")
        for id_, count in registration.counts.items():
            self._totals[id_] = self._totals.get(id_, 0) + count

    def has(self, id_: ReferenceId) -> bool:
        """Whether a reference to an object is registered."""
        return id_ in self._totals

    def find(self, passage: Passage) -> Registration | None:
        """Those of a message."""
        return self._by_passage.get(passage)

    def of(self, registrar: int) -> list[Registration]:
        """Those of a rank that sends."""
        return [each for each in self._by_passage.values() if each.registrar == registrar]

    def to(self, user: int) -> list[Registration]:
        """Those for a rank that receives."""
        return [each for each in self._by_passage.values() if each.user == user]

    def arrive(self, registration: Registration, id_: ReferenceId) -> None:
        """One reference of a message has come."""
        if id_ in registration.counts:
            self._take(registration.counts, id_, 1)
            self._take(self._totals, id_, 1)
            if not registration.counts:
                self._forget(registration)

    def drop(self, registration: Registration) -> Iterable[ReferenceId]:
        """Forget what has not come, if it is known; gives what it refers to."""
        if self._by_passage.get(registration.passage) is not registration:
            return ()
        self._forget(registration)
        for id_, count in registration.counts.items():
            self._take(self._totals, id_, count)
        return registration.counts

    def _forget(self, registration: Registration) -> None:
        del self._by_passage[registration.passage]

    @staticmethod
    def _take(counts: dict[ReferenceId, int], id_: ReferenceId, count: int) -> None:
        counts[id_] -= count
        if not counts[id_]:
            del counts[id_]
