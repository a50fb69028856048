"""What ranks tell each other of references: see [Note: references that third ranks send] in `registrations.py`.

Calls of these names are the agents' own; `ObjectCalls` serves them.
"""

from __future__ import annotations

import functools
import itertools
import secrets
import threading
from typing import TYPE_CHECKING, Any, Protocol

from ferrodist.errors import DistributedError
from ferrodist.rpc.messages import MET, OWN_NAMES, Call
from ferrodist.rpc.reference_tables import Tables

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ferrodist.deadline import Deadline
    from ferrodist.rpc.errands import Errands
    from ferrodist.rpc.futures import Future
    from ferrodist.rpc.reference_parts import Held
    from ferrodist.rpc.references import ReferenceId, Referring

__all__ = ["CONFIRM", "LOST", "MET", "REGISTER", "RELEASE", "SETTLE", "UNREGISTER", "Counting", "Telling"]

REGISTER = f"{OWN_NAMES}register"
"""(ticket, rank, incarnation, objects): references are about to be sent to a rank. Answers whether they may be."""

UNREGISTER = f"{OWN_NAMES}unregister"
"""(ticket): they were not sent. It has no answer, and nor have the others."""

CONFIRM = f"{OWN_NAMES}confirm"
"""((rank, ticket, object)s, (rank, ticket)s): these have come from a rank, and of those messages no more will."""

RELEASE = f"{OWN_NAMES}release"
"""(objects): whoever calls this has fewer references."""

SETTLE = f"{OWN_NAMES}settle"
"""(rank, tickets): say what has come of a rank's messages, and take no more of them."""

LOST = f"{OWN_NAMES}lost"
"""(rank, ticket): whoever calls this has lost a rank, and what it has sent there, up to this ticket, may not come."""

_TICKET_BITS = 62
_MOST_AT_ONCE = 32  # in one message, which so is small whatever the limit of messages


class Telling(Protocol):
    """What an agent does for this."""

    def start(self, to: int, call: Call, seconds: float) -> Future:
        """Call one of the agents' own, however many calls have no result."""

    def send_unanswered(self, to: int, name: str, make: Callable[[], tuple[Any, ...] | None]) -> None:
        """Call one that does not answer, with what is made, if it is, once the rank's connection is known."""


class Counting:
    """An agent's part of it: has the tables, and tells other ranks.

    Args:
        objects: Who the references are of.
        caller: The agent.
        errands: Does it, one after the other.

    Attributes:
        tables: What references there are.
    """

    def __init__(self, objects: Referring, caller: Telling, errands: Errands) -> None:
        self._caller = caller
        self._errands = errands
        self.tables = Tables(objects, errands, self)
        self._tickets = itertools.count(secrets.randbits(_TICKET_BITS))  # no other agent of this rank has the same
        self._owners: dict[int, set[int]] = {}  # by rank: who was told of references to be sent there
        self._lock = threading.Lock()

    def make_ticket(self) -> int:
        """For one message with references, of which owners are told."""
        return next(self._tickets)

    def register(
        self, owner: int, peer: int, ticket: int, counts: Mapping[ReferenceId, int], deadline: Deadline
    ) -> Future:
        """Tell an owner that references are about to be sent to a rank; it answers whether they may be."""
        with self._lock:
            self._owners.setdefault(peer, set()).add(owner)
        arguments = (ticket, peer, self.tables.incarnation(peer), _plain(counts))
        return self._caller.start(owner, Call(REGISTER, arguments, {}), deadline.remaining())

    def unregister(self, owner: int, ticket: int) -> None:
        """Tell an owner that they were not sent; one that can't be told has lost this rank."""
        self._tell(owner, UNREGISTER, lambda: (ticket,))

    def joined(self, peer: int, incarnation: int) -> None:
        """A rank may have references again."""
        self.tables.joined(peer, incarnation)

    def lost(self, peer: int) -> None:
        """A rank has no references any more, and those sent to it may not come."""
        with self._lock:
            owners = self._owners.pop(peer, set())
        arguments = (peer, self.make_ticket())
        for owner in owners - {peer}:
            self._errands.put(functools.partial(self._tell, owner, LOST, functools.partial(_same, arguments)))
        self.tables.lost(peer)

    # See `Teller`.

    def released(self, held: Held) -> None:
        """Give back what has come; see `Teller`."""
        creation = held.creation
        if creation is not None and not creation.done():  # the owner may not have heard of it yet
            creation.add_done_callback(lambda _: self._errands.put(functools.partial(self.released, held)))
            return

        def make() -> tuple[Any, ...] | None:
            count = self.tables.give_back(held)
            return (_plain({held.id: count}),) if count else None

        self.confirm(held.id.owner)  # what is given back must have been: an older errand may have led here
        self._tell(held.id.owner, RELEASE, make)

    def confirm(self, owner: int) -> None:
        """See `Teller`."""
        is_more = True

        def make() -> tuple[Any, ...] | None:
            nonlocal is_more
            arrived, settled = self.tables.take_confirmed(owner, _MOST_AT_ONCE)
            is_more = bool(arrived or settled)
            return ([(*passage, *id_) for passage, id_ in arrived], settled) if is_more else None

        while is_more and self._tell(owner, CONFIRM, make):
            pass

    def settle(self, user: int) -> None:
        """See `Teller`."""
        for registrar, tickets in self.tables.unsettled(user).items():
            for start in range(0, len(tickets), _MOST_AT_ONCE):
                arguments = (registrar, tickets[start : start + _MOST_AT_ONCE])
                self._tell(user, SETTLE, functools.partial(_same, arguments))

    def _tell(self, to: int, name: str, make: Callable[[], tuple[Any, ...] | None]) -> bool:
        """Tell a rank, if it is there: else it has lost this one, and what was counted between them."""
        try:
            self._caller.send_unanswered(to, name, make)
        except DistributedError:
            return False
        return True


def _same(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return arguments


def _plain(counts: Mapping[ReferenceId, int]) -> list[Any]:
    return [(*id_, count) for id_, count in counts.items()]
