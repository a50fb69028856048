"""What ranks tell each other of references: see [Note: references that third ranks send] in `pending_forks.py`.

Calls of these names are the agents' own; `ObjectCalls` serves them.

What other ranks tell of references, as who is told takes it.

References that are sent: what must be before the message goes, and after it could not go.
"""

from __future__ import annotations

import functools
import itertools
import secrets
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

from ferrodist.errors import DistributedError, DistributedTimeoutError, PeerLostError, RpcError
from ferrodist.rpc.future import Outcome
from ferrodist.rpc.messages import MET, OWN_NAMES, Call
from ferrodist.rpc.pending_forks import Registration
from ferrodist.rpc.refcount_tables import Tables, part_of
from ferrodist.rpc.rref import ReferenceId

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ferrodist.deadline import Deadline
    from ferrodist.rpc.executor import Errands
    from ferrodist.rpc.future import Future
    from ferrodist.rpc.pending_forks import Passage
    from ferrodist.rpc.refcount_tables import Held
    from ferrodist.rpc.rref import Referring, RRef

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


_NUM_IN_PASSAGE = 2


class CountCalls:
    """Serves the calls that `Counting` makes, in the thread that receives them.

    Args:
        tables: Of this rank.
        rank: It.
        world_size: How many ranks there are.
    """

    def __init__(self, tables: Tables, rank: int, world_size: int) -> None:
        self._tables = tables
        self._rank = rank
        self._world_size = world_size

    def serve(self, peer: int, call: Call, answer: Callable[[Any], None]) -> bool:
        """Serve a call of another rank's, if it is one of these.

        Raises:
            RpcError: An object is not here any more.
            ValueError: No agent makes such a call.
        """
        match call.name, call.arguments:
            case str(name), (ticket, int(user), int(incarnation), list(items)) if name == REGISTER:
                self._check_other(user, peer)
                counts = self._counts(items)
                self._tables.register(Registration((peer, _whole(ticket)), user, incarnation, counts, answer))
                return True
            case str(name), (ticket,) if name == UNREGISTER:
                self._tables.unregister((peer, _whole(ticket)))
            case str(name), (list(arrived), list(settled)) if name == CONFIRM:
                came = [self._came(item) for item in arrived]
                self._tables.confirm(peer, came, [self._passage(item) for item in settled])
            case str(name), (list(items),) if name == RELEASE:
                self._tables.release(peer, self._counts(items))
            case str(name), (int(registrar), list(tickets)) if name == SETTLE:
                self._check_other(registrar, peer)
                self._tables.refuse(peer, registrar, [_whole(ticket) for ticket in tickets])
            case str(name), (int(user), ticket) if name == LOST:
                self._check_other(user, peer)
                self._tables.settle(peer, user, _whole(ticket))
            case str(name), () if name == MET:
                self._tables.met(peer)
            case str(name), _:
                if name in _NAMES:
                    raise ValueError("it says nothing of references")
                return False
        answer(None)  # to whoever asks for one
        return True

    def _check_other(self, rank: int, peer: int) -> None:
        """See that a rank is neither the one that says something of it, nor this one."""
        if not (0 <= rank < self._world_size) or rank in (peer, self._rank):
            raise ValueError("it says nothing of a third rank")

    def _counts(self, items: list[Any]) -> dict[ReferenceId, int]:
        counts: dict[ReferenceId, int] = {}
        for item in items:
            if not (isinstance(item, tuple) and item and type(item[-1]) is int and item[-1] > 0):
                raise ValueError("it is no number of references")
            counts[ReferenceId.of(item[:-1], self._world_size)] = item[-1]
        return counts

    def _came(self, item: Any) -> tuple[Passage, ReferenceId]:
        if isinstance(item, tuple):
            return self._passage(item[:_NUM_IN_PASSAGE]), ReferenceId.of(item[_NUM_IN_PASSAGE:], self._world_size)
        raise ValueError("it names nothing that came")

    def _passage(self, item: Any) -> Passage:
        if isinstance(item, tuple) and len(item) == _NUM_IN_PASSAGE:
            return _whole(item[0]), _whole(item[1])
        raise ValueError("it names no message")


_NAMES = frozenset({CONFIRM, LOST, MET, REGISTER, RELEASE, SETTLE, UNREGISTER})


def _whole(value: Any) -> int:
    if type(value) is int:
        return value
    raise ValueError(f"{value!r} is no number")


class Sender(Protocol):
    """What is needed of who sends references."""

    rank: int
    counting: Counting
    errands: Errands

    def unsent(self, reference: RRef) -> Outcome[BaseException | None] | None:
        """What is done when the owner is sure to hear of the object before it hears of what is sent from now on."""


class Passing:
    """The references in one message.

    The receiver is counted at their owners before the message goes (see `[Note: counts of references]`, and
    `[Note: references that third ranks send]`). Where that takes a message to an owner, this one goes when the answer
    is there, and nobody waits for that: calls may be made in threads that bring answers.

    Args:
        objects: Of the agent that sends.
        peer: The rank that it goes to.
        references: They, each as often as it is there.
        ticket: Of the message, where there are some whose owners are neither of the two.
    """

    def __init__(self, objects: Sender, peer: int, references: list[RRef], ticket: int | None) -> None:
        self._objects = objects
        self._peer = peer
        self._ticket = ticket
        self._references = references
        self._has_ended = False
        self._own: Counter[ReferenceId] = Counter()
        self._foreign: dict[int, Counter[ReferenceId]] = {}
        for reference in references:
            id_ = part_of(reference).id
            if reference.is_owner:
                self._own[id_] += 1
            elif id_.owner != peer:
                self._foreign.setdefault(id_.owner, Counter())[id_] += 1

    def send(
        self, transmit: Callable[[], None], failed: Callable[[BaseException], None], deadline: Deadline
    ) -> Outcome[BaseException | None] | None:
        """Send the message, now or soon.

        Args:
            transmit: Does that.
            failed: Called where it could not be sent soon.
            deadline: Until when owners may take to answer.

        Returns:
            None if it has been sent; otherwise what will be why it could not be, or None.

        Raises:
            Exception: It could not be sent now.
        """
        if self._peer == self._objects.rank:  # who receives has them
            transmit()
            return None
        unsent = [each for each in map(self._objects.unsent, self._references) if each is not None]
        if not (unsent or self._foreign):
            self._transmit(transmit)
            return None
        sent: Outcome[BaseException | None] = Outcome()

        def end(error: BaseException | None) -> None:
            if error is not None:
                failed(error)
            sent.set(error)

        # An owner must hear of an object that it makes before it hears of references to it.
        _after([each.when_set for each in unsent], lambda: self._register(unsent, transmit, end, deadline))
        return sent

    def forget(self, _: object = None) -> None:
        """Keep the references no more: the call has ended, whether it was sent or not."""
        self._has_ended = True
        self._references.clear()

    def _register(
        self,
        unsent: Sequence[Outcome[BaseException | None]],
        transmit: Callable[[], None],
        end: Callable[[BaseException | None], None],
        deadline: Deadline,
    ) -> None:
        error = next((error for each in unsent for error in each.look() if error is not None), None)
        if error is not None or self._has_ended:
            end(error or _given_up())
            return
        calls: dict[int, Future] = {}
        try:
            for owner, counts in self._foreign.items():
                assert self._ticket is not None
                calls[owner] = self._objects.counting.register(owner, self._peer, self._ticket, counts, deadline)
        except ValueError as too_large:  # to be told of, for the limit of messages
            self._give_back()
            end(too_large)
            return
        # The answers' thread is not to be held up by what may be a large message.
        _after(
            [call.add_done_callback for call in calls.values()],
            lambda: self._objects.errands.put(lambda: self._finish(calls, transmit, end)),
        )

    def _finish(
        self,
        calls: dict[int, Future],
        transmit: Callable[[], None],
        end: Callable[[BaseException | None], None],
    ) -> None:
        errors = {owner: error for owner, call in calls.items() if (error := self._error_of(owner, call)) is not None}
        for owner, error in errors.items():
            if not isinstance(error, DistributedTimeoutError):  # of those one doesn't know
                del self._foreign[owner]
        error = next(iter(errors.values()), _given_up() if self._has_ended else None)
        try:
            if error is None:
                self._transmit(transmit)
            else:
                self._give_back()
        except Exception as found:  # noqa: BLE001 - it is the caller's
            error = found
        end(error)

    def _error_of(self, owner: int, call: Future) -> BaseException | None:
        error = call.exception()
        if error is None and call.result() is not True:
            return PeerLostError(
                f"rank {self._peer} can't be sent references to objects of rank {owner}, which has lost it, or knows"
                " that it was started again",
                ranks=(self._peer,),
            )
        return error

    def _transmit(self, transmit: Callable[[], None]) -> None:
        tables = self._objects.counting.tables
        try:
            connection = tables.count(self._peer, self._own)
        except BaseException:
            self._give_back()
            raise
        try:
            transmit()
        except BaseException:
            tables.uncount(self._peer, self._own, connection)
            self._give_back()
            raise

    def _give_back(self) -> None:
        for owner in self._foreign:
            assert self._ticket is not None
            self._objects.counting.unregister(owner, self._ticket)


def _given_up() -> RpcError:
    return RpcError("the call had ended before it could be sent: references in it were to be registered first")


def _after(events: Sequence[Callable[[Callable[[object], None]], object]], then: Callable[[], None]) -> None:
    """Call something when all have been: now, or in the thread that sees the last one.

    Args:
        events: Each is given what is to be called then.
        then: The something.
    """
    lock, left = threading.Lock(), len(events)

    def one_more(_: object) -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = not left
        if is_last:
            then()

    if not events:
        then()
    for when in events:
        when(one_more)
